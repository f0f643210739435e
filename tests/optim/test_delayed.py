"""`Delayed` against the paper's loop, written out: the same bits in what is seen, in losses, norms and state."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
from offload_cases import (
    ByHand,
    Row,
    agree,
    optimizer_of,
    train,
)
from worlds import World

import zerokern as zk

STEPS = 11


def test_the_loop_by_hand_is_worth_following() -> None:
    """It is not the exact loop, but one step late; never late, it is the exact loop."""
    row, world = Row(steps=STEPS), World(0, 1)
    model = row.model(world)
    exact = train(world, row, model, optimizer_of(row, model))
    late, never = ByHand(row, world, after=5), ByHand(row, world, after=STEPS)
    traces = [train(world, row, hand.model, hand) for hand in (late, never)]
    assert traces[0].losses[:6] == exact.losses[:6] and traces[0].losses[6] != exact.losses[6]
    agree(traces[1], exact)


class Seen:
    """The parameters of one small model, as each call of step() leaves them."""

    def __init__(self, after: int, **settings: Any) -> None:
        self.param = torch.nn.Parameter(torch.zeros(300))
        self.optimizer = zk.SGD([self.param], lr=1.0, tier="cpu", schedule=zk.Delayed(after=after), **settings)

    def step(self, gradient: float | None) -> float:
        """One parameter element after a call with that gradient everywhere."""
        self.param.grad = None if gradient is None else torch.full((300,), gradient)
        self.optimizer.step()
        assert len(set(self.param.tolist())) == 1, "readers see one whole set of parameters"
        return self.param[0].item()


def test_which_call_publishes_what() -> None:
    """With a learning rate of 1, each published gradient can be read off."""
    one = Seen(after=2)
    assert [one.step(g) for g in (1.0, 10.0, 100.0, 1000.0, 10000.0)] == [-1.0, -11.0, -11.0, -111.0, -1111.0]
    one.optimizer.flush()
    assert one.param[0] == -11111.0
    assert one.step(1e5) == -11111.0
    assert one.step(1e6) == -111111.0


def test_a_call_without_gradients_publishes_what_is_pending() -> None:
    one = Seen(after=0)
    assert [one.step(g) for g in (1.0, None, None, 10.0, 100.0)] == [0.0, -1.0, -1.0, -1.0, -11.0]


def test_learning_rate_and_clipping_are_those_of_the_call_that_had_the_gradient() -> None:
    one = Seen(after=0, max_grad_norm=300**0.5)
    one.step(0.5)
    one.optimizer.param_groups[0]["lr"] = 100.0
    one.optimizer.max_grad_norm = None
    assert one.step(0.25) == -0.5, "lr 1, and the norm was below the limit"
    one.optimizer.param_groups[0]["lr"] = 0.0
    assert one.step(1.0) == -25.5


def test_a_call_that_is_skipped_counts_as_a_call_and_publishes() -> None:
    one = Seen(after=1, max_grad_norm=1e9)
    assert [one.step(g) for g in (float("nan"), 1.0, float("inf"), 10.0, 100.0)] == [0.0, 0.0, -1.0, -1.0, -11.0]
    assert one.optimizer.skipped_steps == 2


def test_parameters_that_sometimes_have_no_gradient() -> None:
    """Their pending update waits for no gradient of theirs."""
    row = Row(steps=12)
    traces = []
    for by_hand in (True, False):
        world = World(0, 1)
        model = row.model(world)
        optimizer: Any = ByHand(row, world, 0, model) if by_hand else delayed(row, model)
        traces.append(trained_with_gaps(world, row, model, optimizer))
    agree(traces[1], traces[0], ahead=True)


def test_a_load_keeps_nothing_of_the_update_that_waits() -> None:
    seen = Seen(after=0)
    for _ in range(2):
        seen.step(1.0)
    last = weakref.ref(seen.optimizer.holdings.binding)
    seen.optimizer.load_state_dict(seen.optimizer.state_dict())
    gc.collect()
    assert last() is None


def delayed(row: Row, model: torch.nn.Module, after: int = 0) -> Any:
    return optimizer_of(row, model, tier="cpu", schedule=zk.Delayed(after=after))


def trained_with_gaps(world: World, row: Row, model: torch.nn.Module, optimizer: Any) -> Any:
    step = optimizer.step
    calls = iter(range(100))

    @functools.wraps(step)
    def with_gaps(*arguments: Any) -> Any:
        number = next(calls)
        for index, param in enumerate(model.parameters()):
            if (number + index) % 3 == 0:
                param.grad = None
        return step(*arguments)

    optimizer.step = with_gaps
    return train(world, row, model, optimizer)
