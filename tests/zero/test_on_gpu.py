"""zk.shard, offload and NCCL on one GPU, with work made late wherever an order could be missing.

One rank moves nothing, so the group is told that it is not alone: every collective then goes through the library. The
same bodies are rehearsed on the CPU, where gloo has the library's place and nothing is late.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import built, full, step_and_zero
from zero_cases import IN, OUT, Net

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "optim"))

from offload_cases import Late, one_thread

import zerokern as zk
from zerokern.comm import Group, joining
from zerokern.memory.staging import CudaDriver
from zerokern.zero.publishing import Publisher

LATE = 5_000_000  # cycles: milliseconds, so that whoever does not wait is too early
STEPS = 6
BUCKET_NBYTES = 4096  # several buckets
BLOCK_NBYTES = 512  # what torch's allocator gives at least
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Place:
    """Where a test trains, and how something is made late there."""

    device: torch.device
    group: Group

    def late(self, cycles: int = LATE) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(cycles)

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(side)

    def model(self, dtype: torch.dtype, stage: int | None = None, rests: str = "device") -> nn.Module:
        model = built(Net).to(device=self.device, dtype=dtype)
        if stage is None:
            return model
        return zk.shard(model, stage=stage, mesh=self.group, bucket_bytes=BUCKET_NBYTES, tier=rests)

    def moved(self, kind: str) -> int:
        """How many collectives of a kind the library has run."""
        return self.group._common.ledger.counts.get(kind, 0)  # type: ignore[attr-defined]


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), CUDA])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    device = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        pg = dist.group.WORLD
        common = joining._common(pg, device)
        group = joining._group(pg, device, common)
        group.alone = False
        joining._meet(pg, group, common)
        with one_thread():
            yield Place(device, group)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def everything_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and publications begin late, each on the stream that it is on."""
    if not torch.cuda.is_available():
        return
    copying, gathering = CudaDriver.copy, Publisher.gather

    def copy_late(self: CudaDriver, stream: Any, pairs: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
        copying(self, stream, pairs)

    def gather_late(self: Publisher, number: int) -> Any:
        torch.cuda._sleep(LATE)
        return gathering(self, number)

    monkeypatch.setattr(CudaDriver, "copy", copy_late)
    monkeypatch.setattr(Publisher, "gather", gather_late)


def batch(place: Place, dtype: torch.dtype, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(4, IN, generator=generator), torch.randn(4, OUT, generator=generator)
    return x.to(place.device, dtype), y.to(place.device)


def train(
    place: Place,
    model: nn.Module,
    loop: Any,
    *,
    accumulate: int = 1,
    once: bool = False,
    between: Callable[[int], object] = lambda step: None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The losses, and the parameters at the end. `once`: one reduction for all micro-batches."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(STEPS):
        for micro in range(accumulate):
            held = zk.no_sync(model) if once and micro < accumulate - 1 else contextlib.nullcontext()
            with held:
                x, y = batch(place, dtype, accumulate * step + micro)
                place.late()
                loss = F.mse_loss(model(x).float(), y)
                place.late()
                loss.backward()
            losses.append(loss.detach())
        place.late()
        loop.step()
        model.zero_grad()
        between(step)
    if getattr(loop, "schedule", None) == "overlap":
        loop.flush()
    return [loss.cpu() for loss in losses], [value.cpu() for value in full(model).values()]


def same(left: tuple[list[Tensor], list[Tensor]], right: tuple[list[Tensor], list[Tensor]]) -> None:
    for which, mine, theirs in zip(("losses", "parameters"), left, right, strict=True):
        assert all(map(torch.equal, mine, theirs)), which


def run(place: Place, stage: int | None, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    trained = {name: settings.pop(name) for name in ("accumulate", "once", "between") if name in settings}
    model = place.model(dtype, stage, settings.pop("rests", "device"))
    optimizer = zk.AdamW(model.parameters(), lr=1e-2, **settings)
    return train(place, model, optimizer, **trained)


@pytest.mark.usefixtures("everything_late")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_and_schedule_has_the_bits_of_plain_training(place: Place, stage: int, dtype: torch.dtype) -> None:
    """Without clipping: the host and the device add a norm's terms in orders of their own."""
    plain = run(place, None, dtype)
    same(run(place, stage, dtype), plain)
    same(run(place, stage, dtype, tier="cpu"), plain)
    same(run(place, stage, dtype, tier="cpu", schedule="overlap"), plain)


@pytest.mark.usefixtures("everything_late")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["by the library", "straight"])
def test_shards_in_host_memory_have_the_bits_of_plain_training(place: Place, alone: bool, dtype: torch.dtype) -> None:
    """Copied up late, and down late, whoever waits for what; with a collective in between, or none."""
    plain = run(place, None, dtype)
    place.group.alone = alone
    same(run(place, 3, dtype, rests="cpu"), plain)
    same(run(place, 3, dtype, rests="cpu", schedule="overlap", tier="cpu"), plain)


@pytest.mark.parametrize("place", [CUDA], indirect=True)
def test_shards_in_host_memory_leave_nothing_on_the_device(place: Place) -> None:
    """Between steps: what a step has allocated there is given back, and no more is reserved in later steps.

    Copies that have ended keep their tensors until the next ones are requested: the sums of squares, one block.
    """
    there: list[tuple[int, int]] = []

    def look(step: int) -> None:
        torch.cuda.synchronize()
        there.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    run(place, 3, rests="cpu", between=look)
    allocated, reserved = zip(*there[2:], strict=True)
    assert len(set(reserved)) == 1, there
    assert max(allocated) - min(allocated) <= BLOCK_NBYTES, there


CLIPPED: dict[str, Any] = {"tier": "cpu", "max_grad_norm": 0.3, "accumulate": 3}
SAME: dict[str, dict[str, Any]] = {
    "overlap": {"schedule": "overlap"},
    "overlap, reduced once": {"schedule": "overlap", "once": True},
    "on a disk": {"tier": "nvme"},
    "on a disk, overlap": {"tier": "nvme", "schedule": "overlap"},
    "on a disk, delayed": {"tier": "nvme", "schedule": zk.Delayed(after=2)},
    "gradients that leave": {"schedule": "overlap", "rests": "cpu"},
    "gradients that leave, reduced once": {"schedule": "overlap", "rests": "cpu", "once": True},
}


@pytest.mark.usefixtures("everything_late")
@pytest.mark.parametrize(
    "stage, name",
    [(stage, name) for stage in STAGES for name, more in SAME.items() if stage == 3 or "rests" not in more],
)
def test_the_bits_of_state_in_host_memory(place: Place, stage: int, name: str, tmp_path: Path) -> None:
    """Clipped and accumulated; what a delay makes is that of the same delay."""
    more = dict(SAME[name])
    kept = {key: more[key] for key in ("once", "schedule") if key in more and more[key] != "overlap"}
    if more.get("tier") == "nvme":
        more["tier"] = zk.Nvme(tmp_path, ring_nbytes="1M")
    same(run(place, stage, **{**CLIPPED, **more}), run(place, stage, **CLIPPED, **kept))


@pytest.mark.usefixtures("everything_late")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_muon_has_the_bits_of_plain_training(place: Place, stage: int, tier: str) -> None:
    """Whole matrices through the library, at stage 3 round by round."""
    trained = []
    for chosen, rests in ((None, "device"), (stage, tier)):
        model = built(Net).to(device=place.device, dtype=torch.bfloat16)
        matrices = [param for param in model.parameters() if param.dim() == 2]
        rest = [param for param in model.parameters() if param.dim() != 2]
        if chosen is not None:
            whole = {"whole": matrices} if chosen in (1, 2) else {}
            zk.shard(model, stage=chosen, mesh=place.group, bucket_bytes=BUCKET_NBYTES, **whole)
        muon = zk.Muon(matrices, lr=0.02, tier=rests)
        trained.append(train(place, model, zk.ChainedOptimizer([muon, zk.AdamW(rest, lr=1e-2)])))
    same(*trained)


@pytest.mark.usefixtures("everything_late")
@pytest.mark.parametrize("stage", STAGES)
def test_delayed_is_the_loop_of_the_paper(place: Place, stage: int) -> None:
    seen = place.model(torch.bfloat16)
    ahead = copy.deepcopy(seen)
    hand = Late(
        seen.parameters(), ahead.parameters(), zk.AdamW(ahead.parameters(), lr=1e-2, tier="cpu", max_grad_norm=0.3), 2
    )
    expected = train(place, seen, hand)
    found = run(place, stage, tier="cpu", max_grad_norm=0.3, schedule=zk.Delayed(after=2))
    same(found, expected)


@pytest.mark.usefixtures("everything_late")
@pytest.mark.parametrize("stage", STAGES)
def test_on_a_stream_of_the_programs_own(place: Place, stage: int) -> None:
    """The whole loop on a side stream: the same bits, and nothing that torch warns of."""
    settings: dict[str, Any] = {"tier": "cpu", "schedule": "overlap", "max_grad_norm": 0.3}
    expected = run(place, stage, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stream.*")
        with place.aside():
            found = run(place, stage, **settings)
    same(found, expected)


@pytest.mark.parametrize("place", ["cpu", CUDA], indirect=True)
@pytest.mark.parametrize("stage", STAGES)
def test_the_library_moves_everything(place: Place, stage: int) -> None:
    """What one rank would leave out is launched: or the tests above prove nothing."""
    before = {kind: place.moved(kind) for kind in ("reduce_scatter", "all_gather", "all_reduce")}
    run(place, stage)
    more = {kind for kind, count in before.items() if place.moved(kind) > count}
    assert more >= ({"all_reduce"} if stage == 0 else {"reduce_scatter", "all_gather"})


@pytest.mark.parametrize("place", [CUDA], indirect=True)
def test_units_fragment_nothing(place: Place) -> None:
    """What is reserved after the first steps is enough for those that follow."""
    reserved: list[int] = []
    run(place, 3, between=lambda step: reserved.append(torch.cuda.memory_reserved()))
    assert reserved[2:] == [reserved[2]] * (STEPS - 2)


@pytest.mark.parametrize("place", [CUDA], indirect=True)
def test_the_norm_of_a_step_makes_the_host_wait_a_constant_number_of_times(place: Place) -> None:
    """Buckets and parameters add none: a step of three times the blocks waits as often."""
    counts = []
    for blocks in (2, 6):
        model = built(lambda blocks=blocks: Net(blocks)).cuda()
        zk.shard(model, stage=2, mesh=place.group, bucket_bytes=BUCKET_NBYTES)
        optimizer = zk.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for _ in range(2):
            model(torch.ones(4, IN, device="cuda")).sum().backward()
            step_and_zero(optimizer)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(torch.ones(4, IN, device="cuda")).sum().backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(len([one for one in found if "synchroniz" in str(one.message)]))
    assert counts[0] == counts[1]
