"""`publish="delta"` with parameters on a device that is played: the bits of "all", and fewer bytes on the way up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from offload_cases import one_thread
from publish_cases import (
    PROGRAMS,
    Copied,
    Late,
    LateReloaded,
    LoadedEmpty,
    Overlap,
    Program,
    Skipped,
    SkippedInOverlap,
    WrittenByAll,
    WrittenByOne,
    WrittenUncounted,
    same_bits,
)
from tables import each
from torch import Tensor
from waiting_device import HostComputes
from worlds import World, built, on_threads, ranked

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text
from zerokern.memory import changed_copies

pytest.importorskip("triton", reason="needs triton")


class Counting(HostComputes):
    """Counts what crosses the link to the device, and what is launched behind it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.up = {"nbytes": 0, "copies": 0, "launches": 0}

    def copy(self, stream: Any, pairs: Any) -> None:
        if stream.name == "up":
            self.up["nbytes"] += sum(src.nbytes for _, src in pairs)
            self.up["copies"] += 1
        super().copy(stream, pairs)

    def launch(self, *work: Any, **settings: Any) -> Any:
        self.up["launches"] += self._this_or_current(None).name == "up"
        return super().launch(*work, **settings)


def on_device(kind: type[Program], device: HostComputes, stage: int, **given: Any) -> type[Program]:
    """The same program with its parameters on a device and its update in host memory."""

    class OnDevice(kind):  # type: ignore[valid-type,misc]
        settings: ClassVar[dict[str, Any]] = {**kind.settings, "stage": stage}

        def wrap(self, publish: str) -> None:
            for param in self.model.parameters():
                device.own(param)
            super().wrap(publish)

        def adamw(self, params: Any, **settings: Any) -> Any:
            return super().adamw(params, **{**settings, "tier": "cpu", **given})

        def step(self, step: int) -> None:
            super().step(step)
            device.synchronize()

    return OnDevice


LEFT_OUT = ("Torchs", "TorchsBeside", "Muons", "InHost", "WrittenUncounted")
SOME = [one for one in PROGRAMS if one.__name__ not in LEFT_OUT]


def trained(
    kind: type[Program], world: World, publish: str, stage: int, stretch: Any = 0.0, **given: Any
) -> list[Tensor]:
    device = Counting(poison=True, stretch=stretch)
    with one_thread():
        program = on_device(kind, device, stage, **given)(world, publish)
        found = program.run()
    assert publish == "delta" or not device.up["launches"]
    for one in program.optimizers:
        one.close()
    device.close()
    return found


def trained_alike(kind: type[Program], stage: int, **given: Any) -> None:
    """The same bits are published, in the one way and in the other."""
    assert same_bits(*(trained(kind, World(0, 1), publish, stage, **given) for publish in ("all", "delta")))


@each("stage", [0, 2, 3])
@each("kind", SOME)
def test_a_device_has_the_bits_of_all(kind: type[Program], stage: int) -> None:
    trained_alike(kind, stage)


@each("kind", [Overlap, LoadedEmpty, Copied])
def test_with_state_on_a_disk(kind: type[Program], tmp_path: Path) -> None:
    trained_alike(kind, 2, tier=zk.Nvme(tmp_path))


def test_a_write_on_the_device_that_nobody_counts_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of a bucket that goes up once in so many updates; "all" writes over it in the next one."""
    monkeypatch.setattr(changed_copies, "_ALL_EACH", 1)
    trained_alike(WrittenUncounted, 2)


@each("kind", [Overlap, LateReloaded])
def test_a_slow_link(kind: type[Program]) -> None:
    """Packed bytes stay where they are until they have gone up, however many buckets come behind them."""
    trained_alike(kind, 2, stretch={"up": 0.003})


def counts_of(publish: str, stage: int, schedule: Any) -> tuple[list[Tensor], list[dict[str, int]]]:
    """A small GPT on a device, trained at a usual rate and then at 1e-6: its values, and what went up in each phase."""
    device = Counting()
    model = built(lambda: GPT(Shape(layers=2, width=64, context=32))).bfloat16()
    for param in model.parameters():
        device.own(param)
    zk.shard(model, stage=stage, publish=publish, bucket_bytes=1 << 16)
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=1.0, tier="cpu", schedule=schedule)
    batches = Batches(read_text(at_most=1 << 20), rows=2, context=32, seed=0)
    counts = []
    for rate, steps in ((1e-3, 20), (1e-6, 8), (1e-6, 8)):
        for one in optimizer.param_groups:
            one["lr"] = rate
        before = dict(device.up)
        with one_thread():
            for _ in range(steps):
                model(*batches.next()).backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.flush()
        device.synchronize()
        counts.append({name: count - before[name] for name, count in device.up.items()})
    with zk.gathered(model):
        values = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    device.close()
    return values, counts


@each("stage", [0, 2, 3])
@each("schedule", ["sync", "overlap", zk.Delayed(after=2)])
def test_bytes_of_fine_tuning(schedule: Any, stage: int) -> None:
    """A fifth at most, in one copy and one launch of each bucket; where nearly all changes no byte more than all."""
    (expected, dense), (values, found) = (counts_of(publish, stage, schedule) for publish in ("all", "delta"))
    assert same_bits(expected, values)
    assert found[0]["nbytes"] <= dense[0]["nbytes"]
    assert found[2]["nbytes"] < 0.2 * dense[2]["nbytes"], (found, dense)
    assert [one["copies"] for one in found] == [one["copies"] for one in dense]
    assert found[2]["launches"] == found[2]["copies"] > 0
    assert all(one["launches"] == 0 for one in dense)


def stepped(publish: str, place: str = "cpu", device: Any = None) -> list[Tensor]:
    """`place`: torch's default device while the optimizer steps."""
    model = built(lambda: torch.nn.Sequential(torch.nn.Linear(64, 500), torch.nn.Linear(500, 8))).bfloat16()
    if device is None:
        model.cuda()
    for param in model.parameters() if device is not None else ():
        device.own(param)
    zk.shard(model, stage=2, publish=publish)
    optimizer = zk.AdamW(model.parameters(), lr=1e-5, tier="cpu", schedule="sync")
    for seed in range(4):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x.to(next(model.parameters()).device)).float().square().mean().backward()
        with torch.device(place):
            optimizer.step()
            optimizer.zero_grad()
    optimizer.flush()
    values = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return values


@pytest.fixture
def device() -> Iterator[Counting]:
    made = Counting()
    with one_thread():
        yield made
    made.close()


def test_torchs_default_device_does_not_reach_what_is_sent(device: Counting) -> None:
    assert same_bits(stepped("all", device=device), stepped("delta", "meta", device))
    assert device.up["launches"]


@each("what", ["_filled", "_unpack"])
@each("error", [torch.OutOfMemoryError, zk.BudgetError, ImportError])
def test_where_changes_cannot_be_sent_all_is(
    what: str, error: type[Exception], device: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory for what is packed, or without a kernel that unpacks it, is no reason to end a step."""
    expected, made = stepped("all", device=device), getattr(changed_copies.ChangedCopies, what)
    calls = []

    def fail(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise error("not this time")
        return made(*given)

    monkeypatch.setattr(changed_copies.ChangedCopies, what, fail)
    monkeypatch.setattr("zerokern.kernels.changed._PAUSE", 2)
    assert same_bits(expected, stepped("delta", device=device))
    assert len(calls) > 1 and device.up["launches"]


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_all() -> None:
    assert same_bits(stepped("all"), stepped("delta"))


@each("kind", [Overlap, WrittenByAll, SkippedInOverlap, LateReloaded])
def test_pieces_of_parameters(kind: type[Program], cut: list[int]) -> None:
    """Parts that are copied in pieces are packed in pieces."""

    class Wide(kind):  # type: ignore[valid-type,misc]
        given: ClassVar[dict[str, Any]] = kind.given
        settings: ClassVar[dict[str, Any]] = {"bucket_bytes": 8 << 20}

        def net(self) -> Any:
            return built(lambda: GPT(Shape(layers=1, width=64, context=16))).to(self.dtype)

        def loss(self, step: int) -> Tensor:
            tokens = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(step))
            return self.model(tokens[:, :-1], tokens[:, 1:])

    trained_alike(Wide, 2)
    assert max(cut) > 2


@each("stage", [1, 2, 3])
@each("kind", [Overlap, WrittenByOne, Skipped, Late])
def test_ranks_on_devices_of_their_own(kind: type[Program], stage: int) -> None:
    """To each device what has changed of this rank's part goes; all of it to the other ranks."""
    expected, found = (on_threads(2, on_one_of_two, kind, publish, stage, timeout=60) for publish in ("all", "delta"))
    assert all(same_bits(*pair) for pair in zip(expected, found, strict=True))
    assert same_bits(*found)


@ranked
def on_one_of_two(world: World, kind: type[Program], publish: str, stage: int) -> list[Tensor]:
    return trained(kind, world, publish, stage)
