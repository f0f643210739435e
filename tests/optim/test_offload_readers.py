"""Who reads between steps, while an update is under way, sees one whole set of parameters: that of the loop by hand."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import (
    SCHEDULES,
    ByHand,
    Row,
    backward,
    exact_calls,
    local,
    one_thread,
    optimizer_of,
)
from optim_cases import same_bits
from tables import each
from torch import Tensor, nn
from worlds import World, anywhere

STEPS = 3


def copied_whole(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [param.detach() for param in copy.deepcopy(model).parameters()]


pytestmark = pytest.mark.usefixtures("slow_cpu")


def follow(world: World, row: Row, schedule: Any, read: Callable[[nn.Module, Any], list[Tensor]]) -> None:
    hand = ByHand(row, world, exact_calls(schedule))
    model = row.model(world)
    optimizer = optimizer_of(row, model, tier="cpu", schedule=schedule)
    for step in range(STEPS):
        seen = []
        for one, loop in ((hand.model, hand), (model, optimizer)):
            work(world, row, one, loop, step)
            seen.append([value.clone() for value in read(one, loop)])
        assert same_bits(*seen), f"what is read after step {step}"


def work(world: World, row: Row, model: nn.Module, loop: Any, step: int) -> None:
    """One step, and nothing after it."""
    with one_thread():
        backward(world, row, model, step)
        loop.step()
        model.zero_grad()


def direct(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """As averages and logs do it: whoever asks a parameter for its values waits for them."""
    return [local(param.detach().clone()) for param in model.parameters()]


def averaged(model: nn.Module, optimizer: Any) -> list[Tensor]:
    kept = [torch.zeros_like(param) for param in model.parameters()]
    torch._foreach_lerp_([local(one) for one in kept], [local(param.data) for param in model.parameters()], 0.5)
    return [local(one) for one in kept]


def penalised(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [torch.stack([local(param.detach()).float().square().sum() for param in model.parameters()])]


def shown(model: nn.Module, optimizer: Any) -> list[Tensor]:
    text = f"{list(model.parameters())[-1]} {list(model.parameters())[-2]!r}".replace("Sharded", "")
    return [torch.tensor(list(text.encode()))]


def raw(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [torch.from_numpy(param.detach().float().numpy()) for param in model.parameters()]


def pickled(model: nn.Module, optimizer: Any) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    return [param.detach() for param in torch.load(file, weights_only=False)]


WHOLE = [(read, "overlap", "stage 1") for read in (penalised, shown, raw, copied_whole, pickled)]


@each("read, schedule, wrap", [
    *WHOLE, (direct, "overlap", "stage 2"), (averaged, "overlap", "stage 2"), (direct, "delayed", "stage 3"),
    (averaged, "delayed", "stage 3"),
])  # fmt: skip
def test_parameters_however_they_are_read(read: Callable, schedule: str, wrap: str) -> None:
    anywhere(2, follow, Row(wrap, "bf16"), SCHEDULES[schedule], read)


def restarted(world: World, wrap: str, tier: str, schedule: Any) -> None:
    row = Row(wrap, "bf16")
    model = row.model(world)
    optimizer = optimizer_of(row, model, tier=tier, schedule=schedule)
    for step in range(2):
        backward(world, row, model, step)
        optimizer.step()
        optimizer.zero_grad()
        moments = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        seen = [local(one).clone() for one in moments]
        assert any(one.any() for one in seen)
        for one in moments:
            one.zero_()
        optimizer.flush()
        assert not any(local(optimizer.state[param]["exp_avg"]).any() for param in model.parameters())


@each(
    "size, wrap, tier, schedule",
    [
        (1, "plain", "cpu", "delayed"),
        (1, "stage 3", "device", "overlap"),
        (2, "stage 2", "device", "overlap"),
        (2, "stage 1", "cpu", "delayed"),
    ],
)
def test_state_that_is_written_right_after_a_step_stays_so(size: int, wrap: str, tier: str, schedule: str) -> None:
    anywhere(size, restarted, wrap, tier, SCHEDULES[schedule])
