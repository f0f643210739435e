"""What a tier promises, on each: in host memory, on disk, and a toy that is late and disordered.

Whoever adds a tier adds it to `TIERS`. That parameters, gradients, state and kept inputs rest by these promises alone:
`test_toy_tier.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_tier import Toy

from zerokern.core.errors import BudgetError, StateError
from zerokern.io import Nvme, Store
from zerokern.io import tier as disk
from zerokern.memory import HostTier, Wanted

BUDGET = 1 << 20
SOME = [
    Wanted("weights", torch.Size([3, 5]), torch.float32),
    Wanted("inputs", torch.Size([70_001]), torch.bfloat16),
    Wanted("weights", torch.Size([]), torch.int64),
    Wanted("inputs", torch.Size([0, 4]), torch.int8),
]
LARGE = Wanted("inputs", torch.Size([BUDGET // 2]), torch.uint8)
TIERS: dict[str, Callable[[Path], Any]] = {
    "cpu": lambda folder: HostTier("test", budget=BUDGET),
    "nvme": lambda folder: Nvme(folder, budget=BUDGET, ring_nbytes="1M").open("", "test"),
    "toy": lambda folder: Toy(seed=7, budget=BUDGET).open("", "test"),
}
OPENED = ("nvme", "toy")  # outside of memory: they are opened, and close


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(disk, "Store", lambda *given, **named: Store(*given, depth=8, block=1 << 16, **named))
    made = TIERS[request.param](tmp_path)
    yield made
    if request.param in OPENED:
        made.close("the test is over")


def some_of(wanted: Wanted, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, wanted.shape, generator=generator).to(wanted.dtype)


def room_for(wanted: Wanted) -> Tensor:
    return torch.empty(wanted.shape, dtype=wanted.dtype)


def fetched(tier: Any, part: Any, wanted: Wanted) -> Tensor:
    out = room_for(wanted)
    tier.fetch(part, out).wait()
    return out


def test_what_is_stored_is_fetched(tier: Any) -> None:
    """Any shape and dtype, and no store is waited for."""
    parts, values, out = tier.lay_out(SOME), [some_of(one) for one in SOME], [room_for(one) for one in SOME]
    for part, value in zip(parts, values, strict=True):
        tier.store(part, value)
    for ticket in [tier.fetch(part, into) for part, into in zip(parts, out, strict=True)]:
        ticket.wait()
    assert all(map(torch.equal, values, out))


def test_a_fetch_takes_nothing_away(tier: Any) -> None:
    (part,) = tier.lay_out(SOME[:1])
    tier.store(part, some_of(SOME[0])).wait()
    for _ in range(3):
        assert torch.equal(fetched(tier, part, SOME[0]), some_of(SOME[0]))


def test_transfers_of_one_part_happen_in_the_order_of_the_calls(tier: Any) -> None:
    (part,) = tier.lay_out([SOME[1]])
    values, out = [some_of(SOME[1], seed) for seed in range(4)], [room_for(SOME[1]) for _ in range(4)]
    tickets = []
    for value, into in zip(values, out, strict=True):
        tickets += [tier.store(part, value), tier.fetch(part, into)]
    for ticket in reversed(tickets):
        ticket.wait()
    assert all(map(torch.equal, values, out))


def test_a_transfer_comes_after_one_of_another_part(tier: Any) -> None:
    first, second = tier.lay_out([SOME[1]] * 2)
    value, out = some_of(SOME[1]), room_for(SOME[1])
    tier.store(first, value)
    there = tier.fetch(first, out)
    tier.store(second, out, after=there).wait()
    assert torch.equal(fetched(tier, second, SOME[1]), value)


def test_memory_that_was_stored_may_change_once_the_ticket_has_ended(tier: Any) -> None:
    (part,) = tier.lay_out([SOME[1]])
    value = some_of(SOME[1])
    tier.store(part, value).wait()
    value.fill_(-1.0)
    assert torch.equal(fetched(tier, part, SOME[1]), some_of(SOME[1]))


def test_a_ticket_ends_once_and_may_be_asked_again(tier: Any) -> None:
    (part,) = tier.lay_out([SOME[1]])
    stored = tier.store(part, some_of(SOME[1]))
    until = time.monotonic() + 60
    while not stored.done():
        assert time.monotonic() < until
    got = tier.fetch(part, room_for(SOME[1]))
    for _ in range(2):
        got.wait()
        assert got.done()


def test_tickets_may_be_waited_for_in_any_order(tier: Any) -> None:
    parts, values = tier.lay_out([SOME[1]] * 5), [some_of(SOME[1], seed) for seed in range(5)]
    stored = [tier.store(part, value) for part, value in zip(parts, values, strict=True)]
    out = [room_for(SOME[1]) for _ in parts]
    got = [tier.fetch(part, into) for part, into in zip(parts, out, strict=True)]
    for place in (3, 0, 4, 1, 2):
        got[place].wait()
        assert torch.equal(out[place], values[place])
    assert all(one.done() for one in stored)


def test_threads_move_parts_of_their_own(tier: Any) -> None:
    parts, found = tier.lay_out([SOME[1]] * 3), [False] * 3

    def live(number: int) -> None:
        same = []
        for seed in range(5):
            tier.store(parts[number], some_of(SOME[1], 10 * number + seed))
            same.append(torch.equal(fetched(tier, parts[number], SOME[1]), some_of(SOME[1], 10 * number + seed)))
        found[number] = all(same)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert found == [True] * 3


def test_what_it_holds_is_told_by_role(tier: Any) -> None:
    assert tier.held() == {}
    parts = tier.lay_out(SOME)
    assert tier.held() == {"weights": 68, "inputs": 140_002}
    tier.evict(parts[:1])
    assert tier.held() == {"weights": 8, "inputs": 140_002}
    tier.evict(parts[1:])
    assert not any(tier.held().values())


def test_beyond_the_budget_nothing_is_taken(tier: Any) -> None:
    parts = tier.lay_out([LARGE])
    tier.store(parts[0], some_of(LARGE)).wait()
    with pytest.raises(BudgetError, match="budget="):
        tier.lay_out([SOME[0], LARGE, SOME[0], LARGE])
    assert tier.held() == {"inputs": BUDGET // 2}
    assert torch.equal(fetched(tier, parts[0], LARGE), some_of(LARGE))


def test_room_that_was_given_back_is_used_again(tier: Any) -> None:
    kept, part = tier.lay_out([SOME[0], LARGE])
    tier.store(kept, some_of(SOME[0])).wait()
    for seed in range(3):
        tier.store(part, some_of(LARGE, seed))
        tier.evict([part])
        del part  # in memory the tensor itself is the room
        (part,) = tier.lay_out([LARGE])
        tier.store(part, some_of(LARGE, 10 + seed))
        assert torch.equal(fetched(tier, part, LARGE), some_of(LARGE, 10 + seed))
    assert torch.equal(fetched(tier, kept, SOME[0]), some_of(SOME[0]))


@pytest.mark.parametrize("tier", OPENED, indirect=True)
def test_one_that_is_closed_says_why(tier: Any) -> None:
    (part,) = tier.lay_out([SOME[0]])
    tier.store(part, some_of(SOME[0]))
    tier.close("the next optimizer has it")
    for refused in (
        tier.open,
        lambda: tier.lay_out([SOME[0]]),
        lambda: tier.store(part, some_of(SOME[0])),
        lambda: tier.fetch(part, room_for(SOME[0])),
    ):
        with pytest.raises(StateError, match="the next optimizer has it"):
            refused()
    tier.close("twice")
