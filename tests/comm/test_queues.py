"""Ranks cannot wait for each other for ever in the queues of their GPUs, with what comm/device.py requires; each
requirement is needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from queue_machine import Call, apart, launch, one_queue, stuck, wait
from tables import each

from zerokern.comm import joining
from zerokern.memory.staging import STREAMS

GATHERS, REDUCTIONS = ("", 0), ("", 1)


def in_one_order(seed: int, size: int) -> list[list[Call]]:
    """A random program, the same on all ranks: launches and waits on a few streams and communicators."""
    rng = random.Random(seed)
    counts, open_, made = {GATHERS: 0, REDUCTIONS: 0, ("", 2): 0}, [], []
    for _ in range(rng.randrange(4, 30)):
        stream = rng.choice(["compute", "gather", "reduce"])
        if open_ and rng.random() < 0.4:
            made.append(wait(*rng.choice(open_), stream))
            continue
        communicator = rng.choice(list(counts))
        counts[communicator] += 1
        open_.append((communicator, counts[communicator]))
        made.append(launch(communicator, counts[communicator], stream))
    return [made] * size


@each("ordered", [False, True])
def test_one_order_of_launches_ends_in_any_queues(ordered: bool) -> None:
    """The first collective that has not ended is behind nothing that has not: all before it were launched before it."""
    for seed in range(300):
        programs = in_one_order(seed, 3)
        assert not stuck(programs, one_queue, ordered=ordered), seed
        rng = random.Random(seed)
        drawn: dict[tuple[int, str], str] = {}
        queues = lambda rank, stream: drawn.setdefault((rank, stream), rng.choice("ab"))  # noqa: B023, E731
        assert not stuck(programs, queues, ordered=ordered), seed


def merged(own: Sequence[Call], other: Sequence[Call], turns: Sequence[bool]) -> list[Call]:
    """What two threads launch, as it comes."""
    mine, theirs = iter(own), iter(other)
    return [next(theirs if turn else mine) for turn in turns]


OWN = [call for number in (1, 2) for call in (launch(GATHERS, number), wait(GATHERS, number))]
WORKER = [launch(REDUCTIONS, number, "publish") for number in (1, 2, 3)]
MERGES = [
    [place in chosen for place in range(len(OWN) + len(WORKER))]
    for chosen in itertools.combinations(range(len(OWN) + len(WORKER)), len(WORKER))
]


def outcomes(queues: object, **given: Any) -> list[bool]:
    """Whether each pair of orders in which two ranks may launch the same two threads' work ends."""
    return [
        not stuck([merged(OWN, WORKER, one), merged(OWN, WORKER, other)], queues, **given)  # type: ignore[arg-type]
        for one, other in itertools.product(MERGES, MERGES)
    ]


def test_what_a_worker_publishes_ends_where_each_stream_has_a_queue() -> None:
    """All 1,225 pairs of orders of two ranks; with one queue, or one for both communicators, some end never."""
    assert all(outcomes(apart)), "this is what 32 queues are for"
    assert not all(outcomes(one_queue)), "CUDA_DEVICE_MAX_CONNECTIONS=1"
    together = outcomes(lambda rank, stream: "nccl" if stream.startswith("communicator") else stream)
    assert not all(together), "two of too many streams for the queues"
    on_one = outcomes(lambda rank, stream: "nccl" if rank and stream.startswith("communicator") else stream)
    assert all(on_one), "one rank alone cannot: the others begin whatever it begins"


def dealt(streams: int, queues: int) -> Callable[[int, str], str]:
    """Queues as streams are made, in turn: the second communicator's so many after the first's."""
    places = {f"communicator {GATHERS}": 0, f"communicator {REDUCTIONS}": streams}
    return lambda rank, stream: str(places[stream] % queues) if stream in places else stream


def test_eight_queues_are_too_few_and_thirty_two_are_not() -> None:
    """CUDA's default, and what is asked for. Of one priority torch has 32 streams, which it hands out in turn; of ours
    there are six, however many models a process makes: tests/zero/test_streams.py."""
    assert not all(all(outcomes(dealt(streams, 8))) for streams in (8, 16, 24)), "as it was, and said nothing"
    assert all(all(outcomes(dealt(streams, joining.QUEUES))) for streams in (1, 8, 16, 24, 31))
    communicators = 4  # two for each dimension of a mesh
    assert 1 + len(STREAMS) + communicators <= joining.QUEUES


def test_queues_that_copies_share_with_a_communicator_hold_it_up_and_end() -> None:
    """A wait behind which a collective stands is for something launched earlier by the same thread."""
    assert all(outcomes(lambda rank, stream: "one" if stream in ("publish", f"communicator {GATHERS}") else stream))


def test_nccls_implicit_order_needs_one_order_of_launches() -> None:
    """Why comm/joining.py does not set NCCL_LAUNCH_ORDER_IMPLICIT: two on each side are enough, with a queue each."""
    own = [launch(GATHERS, number, "own") for number in (1, 2)]
    worker = [launch(REDUCTIONS, number, "publish") for number in (1, 2)]
    orders = [worker + own, own + worker]
    assert not stuck(orders, apart)
    assert stuck(orders, apart, ordered=True)
    assert not stuck([orders[0]] * 2, one_queue, ordered=True), "and where it is one, it needs no such help"


def test_both_communicators_need_room_at_once() -> None:
    """NCCL takes at most 32 multiprocessors for one, and two fit on what has 80. On a GPU that had room for one alone
    each rank could begin another one, in one order of launches too; against that its implicit order would help."""
    assert all(outcomes(apart, room=2))
    both = [[launch(GATHERS, 1, "gather"), launch(REDUCTIONS, 1, "reduce")]] * 2
    assert any(stuck(both, apart, room=1, seed=seed) for seed in range(20))
    assert not any(stuck(both, apart, room=2, seed=seed) for seed in range(20))
    assert not any(stuck(both, apart, room=1, seed=seed, ordered=True) for seed in range(20))


def left_out(rank: int, units: int, buffers: int) -> list[Call]:
    """A backward at stage 3: gathers one unit ahead, reductions after each unit; rank 1 reduces all at the end, for its
    first bucket waits for a gradient that never comes. The others wait for a reduction when they need its buffer."""
    made = [launch(GATHERS, 1)]
    for unit in range(1, units + 1):
        made += [launch(GATHERS, unit + 1)] if unit < units else []
        made.append(wait(GATHERS, unit))
        if rank == 0:
            made += [wait(REDUCTIONS, unit - buffers)] if unit > buffers else []
            made.append(launch(REDUCTIONS, unit))
    return made if rank == 0 else made + [launch(REDUCTIONS, unit) for unit in range(1, units + 1)]


@each("units", [4, 8])
def test_a_rank_that_leaves_a_parameter_out_reduces_later(units: int) -> None:
    """It ends as long as nobody needs a buffer back. Where one does, no queue helps, and at stage 3 all ranks reduce a
    unit at the same turn of another one: tests/zero/test_random_programs.py."""
    programs = [left_out(rank, units, buffers=units) for rank in range(2)]
    assert not stuck(programs, apart)
    assert stuck(programs, one_queue) and stuck(programs, apart, ordered=True)
    assert stuck([left_out(rank, units, buffers=1) for rank in range(2)], apart)


def test_the_machine_finds_what_never_comes() -> None:
    assert stuck([[launch(GATHERS, 1)], []], apart) == ["rank 0: launch (('', 0), 1)"]
    assert not stuck([[launch(("row", 0), 1)], []], apart, ranks={"row": [[0], [1]]})
