"""Gradients that are edited before step(), whether they have left for the host or not: the edit is what is applied."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from products import where_they_meet
from tables import each
from torch import Tensor, nn

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice

STEPS = 4
Edit = Callable[[list[Tensor], torch.optim.Optimizer], object]
EXACT = {"overlap": "overlap", "delayed": zk.Delayed(after=100)}  # as many calls of step() are exact


def some(edit: Callable[[Tensor], object], params: list[Tensor], _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for param in params[1:3]:
            edit(param)


def unscaled(params: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def over_its_storage(grad: Tensor) -> Tensor:
    return torch.tensor([], dtype=grad.dtype).set_(grad.untyped_storage(), grad.storage_offset(), (grad.numel(),))


def replaced(param: Tensor) -> None:
    param.grad = param.grad * 0.5


def given_memory(param: Tensor) -> None:
    param.grad.data = param.grad.data * 0.5


def turned_round(param: Tensor) -> None:
    param.grad.data.copy_(param.grad.clone().view(-1).flip(0).view(param.shape))


def dropped(param: Tensor) -> None:
    param.grad = None


HALVED = torch.compile(lambda grad: grad.mul_(0.5), backend="aot_eager")
ANYWHERE: dict[str, Edit] = {
    "mul_": partial(some, lambda p: p.grad.mul_(0.5)),
    "an operator": partial(some, lambda p: p.grad.__imul__(0.5)),
    "out=": partial(some, lambda p: torch.mul(p.grad, 0.5, out=p.grad)),
    "zero_": partial(some, lambda p: p.grad.zero_()),
    ".data": partial(some, lambda p: p.grad.data.mul_(0.5)),
    "detach": partial(some, lambda p: p.grad.detach().mul_(0.5)),
    "replaced": partial(some, replaced),
    "dropped": partial(some, dropped),
    "foreach": lambda params, _: torch._foreach_mul_([p.grad for p in params], 0.5),
    "foreach of .data": lambda params, _: torch._foreach_mul_([p.grad.data for p in params], 0.5),
    "unscale_": unscaled,
    "zk.clip_grad_norm_": lambda params, _: zk.clip_grad_norm_(params, 0.05),
    "zk.clip_grad_norm_ of some": lambda params, _: zk.clip_grad_norm_(params[1:], 0.05),
}
PLAIN: dict[str, Edit] = {
    "torch's clipping": lambda params, _: nn.utils.clip_grad_norm_(params, 0.05),
    "torch's clipping, one by one": lambda params, _: nn.utils.clip_grad_norm_(params, 0.05, foreach=False),
    "clip_grad_value_": lambda params, _: nn.utils.clip_grad_value_(params, 0.01),
    "numpy": partial(some, lambda p: p.grad.numpy().__imul__(0.5)),
    "DLPack": partial(some, lambda p: torch.from_dlpack(p.grad.data).mul_(0.5)),
    "storage": partial(some, lambda p: over_its_storage(p.grad).mul_(0.5)),
    "other memory": partial(some, given_memory),
    "elements that change places": partial(some, turned_round),
    "an element": partial(some, lambda p: p.grad.data.view(-1)[-1:].add_(1.0)),
    "compiled": partial(some, lambda p: HALVED(p.grad)),
}
SHARDED: dict[str, Edit] = {
    "local": partial(some, lambda p: p.grad.local.mul_(0.5)),
    "local.data": partial(some, lambda p: p.grad.local.data.mul_(0.5)),
    "numpy": partial(some, lambda p: p.grad.local.numpy().__imul__(0.5)),
    "DLPack": partial(some, lambda p: torch.from_dlpack(p.grad.local.data).mul_(0.5)),
    "storage": partial(some, lambda p: over_its_storage(p.grad.local).mul_(0.5)),
    "what .data gives out": partial(some, lambda p: p.grad.data.local.data.mul_(0.5)),
}
CASES = [(stage, edit, schedule) for stage in (None, 2) for edit in ANYWHERE for schedule in EXACT]
CASES += [(None, edit, schedule) for edit in PLAIN for schedule in EXACT]
CASES += [(2, edit, schedule) for edit in SHARDED for schedule in EXACT]
CASES += [(stage, edit, "overlap") for stage in (1, 3) for edit in ("local", "numpy")]
QUICK = where_they_meet(CASES, 2)


def trained(
    edit: Edit,
    stage: int | None,
    schedule: object,
    device: PlayedDevice | None,
    hooked: Edit | None = None,
    bucket_bytes: int = 1 << 20,
) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8))
    if stage is not None:
        zk.shard(model, stage=stage, bucket_bytes=bucket_bytes)
    params = list(model.parameters())
    for param in params if device is not None else ():
        device.own(param)
    tier = "device" if device is None else "cpu"
    optimizer = zk.AdamW(params, lr=0.1, tier=tier, schedule=schedule)
    for step in range(STEPS):
        torch.manual_seed(step)
        if device is not None:
            device.synchronize()
        model(torch.randn(4, 24)).square().mean().backward()
        if device is not None:
            counted = stage is not None and edit not in SHARDED.values()
            assert step < 2 or counted == bool(optimizer.runner.leaving._early)
            device.synchronize()  # gradients are on the host
        edit(params, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if hooked is not None and step == 2:
            hooked(params, optimizer)
    optimizer.flush()
    if device is not None:
        device.synchronize()
    return [getattr(param, "local", param).detach().clone() for param in params]


@functools.cache
def expected_of(edit: Edit, stage: int | None) -> list[Tensor]:
    """Nothing leaves, and nothing is late."""
    return trained(edit, stage, "sync", None)


def follow_edit(stage: int | None, edit: str, schedule: str, device: PlayedDevice) -> None:
    found = {**ANYWHERE, **(PLAIN if stage is None else SHARDED)}[edit]
    assert all(map(torch.equal, trained(found, stage, EXACT[schedule], device), expected_of(found, stage)))


@each("stage, edit, schedule", QUICK)
def test_the_update_is_made_of_the_edit(stage: int | None, edit: str, schedule: str, device: PlayedDevice) -> None:
    follow_edit(stage, edit, schedule, device)


@pytest.mark.slow
@each("stage, edit, schedule", [case for case in CASES if case not in QUICK])
def test_the_update_is_made_of_the_edit_at_every_schedule(
    stage: int | None, edit: str, schedule: str, device: PlayedDevice
) -> None:
    follow_edit(stage, edit, schedule, device)


@each("stage", [None, 1])
@each("counted", [True, False])
def test_hooks_that_come_after_ours(stage: int | None, counted: bool, device: PlayedDevice) -> None:
    """Registered when gradients leave already: they are called after these have left."""

    def halve(param: Tensor) -> None:
        with torch.no_grad():
            (param.grad if counted else param.grad.data).mul_(0.5)

    def hooked(params: list[Tensor], _: torch.optim.Optimizer) -> None:
        for param in params:
            param.register_post_accumulate_grad_hook(halve)
            if stage is None:
                param.register_hook(lambda grad: grad * 0.5)

    nothing = lambda *_: None  # noqa: E731
    expected = trained(nothing, stage, "sync", None, hooked)
    assert all(map(torch.equal, trained(nothing, stage, "overlap", device, hooked), expected))


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise InterruptedError


@each("stage", [None, 1, 2])
@each("breaks", [False, True])
def test_a_backward_that_nobody_expected(stage: int | None, breaks: bool, device: PlayedDevice) -> None:
    """It adds to gradients that have left, to all of them or until it breaks off."""

    def again() -> Edit:
        calls = iter(range(STEPS))

        def edit(params: list[Tensor], _: torch.optim.Optimizer) -> None:
            if next(calls) == STEPS - 1:
                first = params[0] * params[0]
                first = Breaks.apply(first) if breaks else first
                with contextlib.suppress(InterruptedError):
                    (first.sum() + sum((param * param).sum() for param in params[1:])).backward()

        return edit

    expected = trained(again(), stage, "sync", None)
    assert all(map(torch.equal, trained(again(), stage, "overlap", device), expected))


@each("schedule, stage", [("overlap", 1), ("delayed", 2), ("overlap", 3)])
def test_clipped_and_then_a_backward_that_breaks_off(stage: int, schedule: str, device: PlayedDevice) -> None:
    """The factor is applied to all that is shown when it begins, also to buckets that it never comes to."""

    def edit(params: list[Tensor], _: torch.optim.Optimizer) -> None:
        zk.clip_grad_norm_(params, 0.01)
        with contextlib.suppress(InterruptedError), zk.gathered(params):
            (Breaks.apply(params[0] * 1.0).sum() + (params[-1] * 0.0).sum()).backward()

    expected = trained(edit, stage, "sync", None, bucket_bytes=512)
    assert all(map(torch.equal, trained(edit, stage, EXACT[schedule], device, bucket_bytes=512), expected))


@each("stage", [1, 2, 3])
def test_a_look_at_memory_hands_nothing_out(stage: int, device: PlayedDevice) -> None:
    trained(lambda params, opt: zk.measure(nn.ParameterList(params), opt), stage, "overlap", device)
