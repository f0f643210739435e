"""What frameworks do to an optimizer, one failure seen elsewhere per test, with the update on the host.

The numbers are those of the conformance list, as in test_conformance.py. Where they are missing here another file has
them: 1, 4, 5, 8, 12 and 15 test_elsewhere.py, 9 and 11 test_delayed.py, 10 test_gradient_edits.py, 18
test_offload_outside.py, 6, 14 and 16 tests/whole, 2, 7, 13 and 17 tests/conformance, 20 test_process.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from offload_cases import (
    SCHEDULES,
    ByHand,
    Row,
    agree,
    exact_calls,
    optimizer_of,
    train,
    values,
)
from optim_cases import same_bits
from tables import each
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader
from worlds import World

from zerokern.core.errors import ZerokernError

WORLD = World(0, 1)


EACH = each("schedule", ["overlap", "delayed"])


@EACH
@each("flatten", [True, False])
def test_3_initialised_by_a_step_with_zero_gradients_then_loaded(schedule: str, flatten: bool) -> None:
    """torch.distributed.checkpoint assigns zero gradients, sets lr to 0, steps, and loads into the state that made."""
    options, row = StateDictOptions(flatten_optimizer_state_dict=flatten), Row(dtype="bf16", steps=8)
    hand = ByHand(row, WORLD, exact_calls(SCHEDULES[schedule]))
    model = row.model(WORLD)
    first = optimizer_of(row, model, tier="cpu", schedule=SCHEDULES[schedule])
    for one, loop in ((model, first), (hand.model, hand)):
        train(WORLD, row, one, loop, range(4))
    saved = copy.deepcopy(get_optimizer_state_dict(model, first, options=options))
    weights = copy.deepcopy(model.state_dict())
    again = row.model(WORLD, seed=3)
    second = optimizer_of(row, again, tier="cpu", schedule=SCHEDULES[schedule])
    again.load_state_dict(weights)
    set_optimizer_state_dict(again, second, saved, options=options)
    assert same_bits(values(again), list(weights.values()))
    rest = range(4, 8)
    agree(train(WORLD, row, again, second, rest), train(WORLD, row, hand.model, hand, rest), ahead=True)


@EACH
def test_3_a_checkpoint_asked_of_an_optimizer_that_has_not_stepped(schedule: str) -> None:
    """DCP makes state by a step with lr 0 and zero gradients: no parameter changes, and none does later."""
    row = Row(dtype="bf16", steps=4)
    model = row.model(WORLD)
    optimizer = optimizer_of(row, model, tier="cpu", schedule=SCHEDULES[schedule])
    before = values(model)
    get_optimizer_state_dict(model, optimizer)
    assert same_bits(values(model), before)
    optimizer.flush()
    assert same_bits(values(model), before)


class Numbers:
    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = optimizer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if self.optimizer is None:
            return index
        try:
            self.optimizer.step()
        except ZerokernError as error:
            return str(error)
        return "it stepped"


def loaded(numbers: Numbers) -> list[Any]:
    settings = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60, "batch_size": None}
    return list(DataLoader(numbers, **settings))


@EACH
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_19_workers_forked_while_an_update_is_under_way(schedule: str) -> None:
    """They load data as ever; a step in one of them is refused, since it would be nobody's."""
    row = Row(dtype="bf16", steps=6)
    hand = ByHand(row, WORLD, exact_calls(SCHEDULES[schedule]))
    expected = train(WORLD, row, hand.model, hand)
    model = row.model(WORLD)
    ours = optimizer_of(row, model, tier="cpu", schedule=SCHEDULES[schedule])
    traces = [train(WORLD, row, model, ours, range(3))]
    assert loaded(Numbers()) == [0, 1, 2, 3]
    assert all("fork" in said for said in loaded(Numbers(ours)))
    traces.append(train(WORLD, row, model, ours, range(3, 6)))
    assert traces[0].losses + traces[1].losses == expected.losses
    assert same_bits(traces[1].values, expected.values)
