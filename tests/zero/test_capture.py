"""Whole training steps in CUDA graphs under zk.shard: replays have the bits of eager steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "optim"))

pytest.importorskip("triton", reason="needs triton")

from counting_device import DEVICE, CountingDevice, backward, counted_device, on_devices, quiet
from played_graph import CaptureRefused, capture, is_capturing, play_graphs

import zerokern as zk
from zerokern.comm import Group
from zerokern.comm.hybrid import HybridGroup
from zerokern.memory import Copies
from zerokern.memory.staging import cuda_driver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs torch's and Triton's calls to be played")


BUILDING = threading.Lock()


class Block(nn.Linear):
    def forward(self, x: Tensor, biased: bool = True) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias if biased else None))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 16) for _ in range(blocks))

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, number != without)
        return x.square().mean()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDevice]:
    play_graphs(monkeypatch)
    monkeypatch.setattr("zerokern.optim.clip.sumsq_there", lambda grads: sum(g.double().square().sum() for g in grads))
    with counted_device(monkeypatch) as device:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
        yield device


class Training:
    """One rank's model, optimizer and static input."""

    def __init__(
        self, group: Any, stage: int, micro: int = 1, *, clips: bool = False, scales: bool = False, idle: bool = False,
        no_sync: bool = False, frozen: bool = False, **given: Any,
    ) -> None:  # fmt: skip
        with BUILDING:  # values are drawn from the process's generator
            torch.manual_seed(0)
            model = Net().to(DEVICE)
        model.blocks[1].bias.requires_grad_(not frozen)
        self.rank, self.micro, self.clips, self.no_sync = group.rank, micro, clips, no_sync
        self.left_out = idle and group.rank == 1  # this rank has no gradient of a bias
        self.model = zk.shard(model, mesh=group, stage=stage, bucket_bytes=1100)
        self.opt = zk.AdamW(self.model.parameters(), lr=1e-2, capturable=True, **given)
        self.x = torch.zeros(micro, 4, 16, device=DEVICE)
        self.scale, self.found_inf = (torch.ones((), device=DEVICE) for _ in range(2)) if scales else (None, None)

    def set_input(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        if self.scale is not None:
            self.scale.fill_(2.0 ** (step + 1))
            self.found_inf.fill_(float(step == 4))

    def backward(self, part: int) -> None:
        loss = self.model(self.x[part], 1 if self.left_out else None)
        backward(loss if self.scale is None else loss * self.scale)

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=True)
        for part in range(self.micro):
            with zk.no_sync(self.model) if self.no_sync and part < self.micro - 1 else nullcontext():
                self.backward(part)
        if self.clips:
            zk.clip_grad_norm_(self.model, 0.1)
        if self.scale is not None:
            self.opt.grad_scale, self.opt.found_inf = self.scale, self.found_inf
        self.opt.step()

    def values(self) -> list[Tensor]:
        with zk.gathered(self.model):
            found = [param.detach().clone() for param in self.model.parameters()]
        state = [value for entry in self.opt.state_dict()["state"].values() for value in entry.values()]
        with quiet():
            return [*found, *(getattr(one, "local", one).detach().clone() for one in state)]


def trained(device: Any, group: Any, plan: str, **given: Any) -> list[Tensor]:
    """`plan`: a letter for each step: eager, captured, replayed."""
    run, graph = Training(group, **given), None
    for step, how in enumerate(plan):
        run.set_input(step)
        if how == "r":
            graph.replay()
        else:
            with capture(device) if how == "c" else nullcontext() as made:
                run.step()
            graph = made or graph
    return run.values()


def agree(
    device: Any, monkeypatch: pytest.MonkeyPatch, plan: str, ranks: int = 2, make: Any = None, **given: Any
) -> None:
    """On every rank, bits of parameters, moments and step counts are those of eager steps."""

    def of(plan: str) -> Any:
        work = lambda group: trained(device, group if make is None else make(group), plan, **given)  # noqa: E731
        return on_devices(device, monkeypatch, ranks, work)

    eager, replayed = of("e" * len(plan)), of(plan)
    with quiet():
        for mine, expected in zip(replayed, eager, strict=True):
            assert all(map(torch.equal, mine, expected))


GIVEN: list[dict[str, Any]] = [
    {"max_grad_norm": 0.1},
    {"micro": 2, "no_sync": True},
    {"clips": True},
    {"idle": True},
    {"frozen": True},
    {"scales": True, "max_grad_norm": 0.1, "micro": 2},
]


CASES = [
    pytest.param(
        stage, given, id=f"{stage}-{' '.join(given)}", marks=() if stage and given is GIVEN[-1] else pytest.mark.slow
    )
    for stage in (0, 1, 2, 3)
    for given in GIVEN
    if stage or "clips" not in given  # which is torch's own there
]


@pytest.mark.parametrize("stage, given", CASES)
def test_replays_have_the_bits_of_eager_steps(
    stage: int, given: dict[str, Any], device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(device, monkeypatch, "eecrrer", stage=stage, **given)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [None, lambda group: Group(0, 1, DEVICE, "alone")])
def test_on_one_rank(stage: int, make: Any, device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    agree(device, monkeypatch, "eecrer", ranks=1, make=make, stage=stage, max_grad_norm=0.1)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_replicas_reduce_on_a_side_stream(stage: int, device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(group: Any) -> HybridGroup:
        return HybridGroup(group, Group(0, 1, DEVICE, "alone"))

    agree(device, monkeypatch, "eecrer", make=make, stage=stage, max_grad_norm=0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_steps_after_replays_of_forward_and_backward(
    stage: int, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(plan: str) -> Any:
        def on_each(group: Any) -> list[Tensor]:
            run, graph = Training(group, stage, max_grad_norm=0.1), None
            for step, how in enumerate(plan):
                run.set_input(step)
                if how == "r":
                    graph.replay()
                else:
                    with capture(device) if how == "c" else nullcontext() as made:
                        run.opt.zero_grad()
                        run.backward(0)
                    graph = made or graph
                run.opt.step()
            return run.values()

        return on_devices(device, monkeypatch, 2, on_each)

    eager, captured = work("eeeee"), work("eecrr")
    with quiet():
        for mine, expected in zip(captured, eager, strict=True):
            assert all(map(torch.equal, mine, expected))


def first_step(run: Training) -> Any:
    return run.step


def gradients_that_no_step_before_had(run: Training) -> Any:
    run.step()
    run.left_out = True
    return run.step


def a_unit_alone(run: Training) -> Any:
    run.step()
    return lambda: run.model.blocks[0](run.x[0])


def micro_batches_in_part(run: Training) -> Any:
    run.step()
    with zk.no_sync(run.model):
        run.backward(0)
    return lambda: run.backward(1)


@pytest.mark.parametrize("stage, prepared, match", [
    (1, first_step, "first backward pass .* cannot go into a CUDA graph"),
    (3, first_step, "first backward pass .* cannot go into a CUDA graph"),
    (2, gradients_that_no_step_before_had, "other gradients than those before it"),
    (3, a_unit_alone, "without the forward of the whole model"),
    (2, micro_batches_in_part, "capture all micro-batches of a step, or none"),
    (3, micro_batches_in_part, "capture all micro-batches of a step, or none"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_refused(
    stage: int, prepared: Any, match: str, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a capture, by name; and eager steps go on afterwards."""

    def on_each(group: Any) -> None:
        given = {"micro": 2, "no_sync": True} if prepared is micro_batches_in_part else {}
        run = Training(group, stage, **given)
        act = prepared(run)
        with pytest.raises(zk.StateError, match=match), capture(device):
            act()
        run.step()
        run.step()

    on_devices(device, monkeypatch, 2, on_each)


def test_updates_and_copies_of_the_host_are_refused(device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(8, device=DEVICE))
    opt = zk.AdamW([weight], tier="cpu")
    weight.grad = torch.ones(8, device=DEVICE)
    with pytest.raises(zk.StateError, match=r"cannot go into a CUDA graph.*call step\(\) after each"), capture(device):
        opt.step()
    copies = Copies(cuda_driver(DEVICE))
    with pytest.raises(zk.StateError, match="a copy between a device and host memory"), capture(device):
        copies.to_host(torch.ones(8, device=DEVICE), torch.ones(8))
    copies.close()
    opt.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("backward", [False, True])
def test_a_capture_that_breaks_off_leaves_nothing_behind(
    stage: int, backward: bool, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> None:
        raise ZeroDivisionError

    def on_each(group: Any) -> None:
        run = Training(group, stage)
        run.step()
        block = run.model.blocks[1]
        hook = block.register_full_backward_hook(raises) if backward else block.register_forward_pre_hook(raises)
        with pytest.raises(ZeroDivisionError), capture(device):
            run.step()
        hook.remove()
        run.step()
        with capture(device) as graph:
            run.step()
        graph.replay()
        run.step()

    on_devices(device, monkeypatch, 2, on_each)


@pytest.mark.parametrize("what", ["item", "query", "join", "outside"])
def test_the_played_capture_refuses_what_cuda_does(
    what: str, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the tests above would prove nothing."""

    def on_each(group: Any) -> None:
        x, event = torch.ones(4, device=DEVICE), torch.cuda.Event()
        event.record()
        acts: dict[str, Any] = {
            "item": lambda: x.sum().item(),
            "query": event.query,
            "join": lambda: group.all_reduce(x),
            "outside": lambda: torch.cuda.current_stream().wait_event(event),
        }
        with pytest.raises(CaptureRefused), capture(device):
            acts[what]()

    on_devices(device, monkeypatch, 2, on_each)
