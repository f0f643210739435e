"""Ranks that die, stop, raise, or want something else: everyone who is left hears why, within the group's timeout."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from comm_cases import refused
from ranks import RanksFailed, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from tries import Missed, best, in_time

from zerokern.comm import Group, during, group_on
from zerokern.debug import agreement, watch

PATIENCE_S = 180.0  # the groups' timeout, which nobody waits for
SOON_S = 6.0  # for what a closed connection or the store shows, in the best of some tries
SOONER_S = 3.0  # the same in hasty groups, which need less than one
LATE_S = 60.0  # where one try must do
SLOW = pytest.mark.slow
Words = tuple[str, tuple[int, ...], str]


def hasty_group(*, answer: float = 1.0) -> Group:
    """Its ranks read more often what others agree to. `answer`: what those have who are gone.

    Who is stuck looks as late as ever: ranks that wait for each other hear of that only where nothing else is wrong.
    """
    agreement.LOOK_S, agreement.LONGEST_S, watch.TICK_S, watch.ANSWER_S = 0.03, 0.4, 0.05, answer
    return group_on()


def timed(group: Group, act) -> tuple[Words, float]:
    begun = time.monotonic()
    words = refused(group, act)
    return words, time.monotonic() - begun


def gather(group: Group) -> None:
    group.all_gather(torch.zeros(group.size << 18)).wait()


def reduce(group: Group) -> None:
    group.reduce_scatter(torch.zeros(group.size << 18), torch.empty(1 << 18)).wait()


def sum_up(group: Group) -> None:
    group.all_reduce(torch.zeros(1)).wait()


def sum_much(group: Group) -> None:
    group.all_reduce(torch.zeros(100_000)).wait()


def spread(group: Group) -> None:
    group.broadcast(torch.zeros(5), src=2).wait()


def step(group: Group) -> None:
    group.agree("a step")


ACTS = {act.__name__: act for act in (gather, reduce, sum_up, sum_much, spread, step)}


def one_dies(rank: int, act: str, when: str, hasty: bool) -> tuple[Words, float]:
    group = hasty_group(answer=0.3) if hasty else group_on()
    group.barrier()
    if rank == 2:
        time.sleep(0.2 if when == WAITING else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3 if when == BEFORE else 0)
    return timed(group, ACTS[act])


WAITING, BEFORE = "while others wait", "before others begin"
SHIPPED, QUICK = ("sum_up", WAITING), ("reduce", BEFORE)


def rows_of_deaths() -> list:
    rows = [(act, when) for when in (WAITING, BEFORE) for act in ACTS]
    return [pytest.param(*row, marks=() if row in (SHIPPED, QUICK) else SLOW) for row in rows]


@pytest.mark.parametrize("act, when", rows_of_deaths())
def test_a_dead_rank_is_named(act: str, when: str) -> None:
    """One row with the library's own times, which are those that users wait."""
    hasty = (act, when) != SHIPPED
    limit = SOONER_S if hasty else SOON_S

    def named() -> float:
        answers = run_ranks(3, one_dies, act, when, hasty, dies=[2], patience=PATIENCE_S)[:2]
        for (words, gone, operation), _ in answers:
            assert "rank 2 is gone" in words and gone == (2,)
            assert operation and operation in words and "ranks 0, 1 and 2" in words
        return max(seconds for _, seconds in answers)

    assert best(named, limit) < limit


def the_host_dies(rank: int) -> tuple[Words, float]:
    group, store = group_on(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["1 has met", "2 has met"])
        os._exit(1)
    store.set(f"{rank} has met", "")
    return timed(group, gather)


def test_the_rank_that_serves_the_store_is_named_too() -> None:
    for (words, gone, _), seconds in run_ranks(3, the_host_dies, dies=[0], store="rank0", patience=PATIENCE_S)[1:]:
        assert gone == (0,) and "rank 0" in words
        assert seconds < LATE_S


def one_leaves_a_chain(rank: int) -> tuple[Words, float]:
    """Rank 0 waits for rank 1, who waits for nobody but agrees to a step; rank 2 dies: all others hear it."""
    group = hasty_group(answer=0.3)
    group.barrier()
    if rank == 2:
        os._exit(1)
    return timed(group, step if rank else gather)


def test_a_death_reaches_those_who_do_something_else() -> None:
    for (words, gone, _), seconds in run_ranks(3, one_leaves_a_chain, dies=[2], patience=PATIENCE_S)[:2]:
        assert "rank 2 is gone" in words and gone == (2,)
        assert seconds < LATE_S


def impatient(seconds: float) -> Group:
    """A group that waits so long, of ranks that had more to find each other."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    group = hasty_group()
    group.barrier()
    return group


def waited(size: int, act: Callable, words: str, seconds: float) -> float:
    """How long it was until all ranks but the first had heard these words of it.

    Missed where another one was late too, for what the first ends before the group's time is then named as well:
    while they met, in the only collective of that which has the group's time, or afterwards.
    """
    try:
        answers = run_ranks(size, act, seconds, dies=[0])[1:]
    except RanksFailed as error:
        if any(re.search("CommError: all_reduce number 0 .* did not end", said) for said in error.errors.values()):
            raise Missed(str(error)) from error
        raise
    late = [re.search("(ranks? [0-9, and]+) did not take part in", said) for (said, *_), _ in answers]
    if any(found and found[1] != "rank 0" for found in late):
        raise Missed(str(answers))
    assert all(words.format(seconds) in said and gone == () for (said, gone, _), _ in answers), answers
    longest = max(took for _, took in answers)
    assert longest >= seconds  # who begins later is told by the first one
    return longest


def one_stops(rank: int, seconds: float) -> tuple[Words, float]:
    group = impatient(seconds)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return timed(group, sum_up)


def test_a_rank_that_stands_still_is_named_when_the_time_is_over() -> None:
    told = partial(waited, 3, one_stops, "rank 0 did not take part in all_reduce")
    assert best(partial(in_time, told, 0.4), SOON_S) < SOON_S


def other_sizes(rank: int, kind: str) -> tuple[Words, float, Words]:
    group = hasty_group()
    numel = group.size * (1 << 19) + (group.size if rank == 1 else 0)
    dtype = torch.bfloat16 if kind == "dtype" and rank == 1 else torch.float32

    def act(group: Group) -> None:
        if kind == "reduce":
            group.reduce_scatter(torch.zeros(numel), torch.empty(numel // group.size)).wait()
        elif kind == "gather":
            group.all_gather(torch.zeros(numel)).wait()
        elif kind == "few":
            group.all_reduce(torch.zeros(3 if rank == 1 else 2)).wait()
        else:
            group.all_reduce(torch.zeros(group.size << 19, dtype=dtype)).wait()

    words, seconds = timed(group, act)
    return words, seconds, refused(group, sum_up)


@pytest.mark.parametrize(
    "kind", ["reduce", *(pytest.param(one, marks=pytest.mark.slow) for one in ("dtype", "gather", "few"))]
)
def test_ranks_that_move_different_sizes_hear_which(kind: str) -> None:
    """Without the sizes in the tags gloo ends the process."""
    for (words, gone, _), seconds, (afterwards, _, _) in run_ranks(3, other_sizes, kind, patience=PATIENCE_S):
        assert "ranks differ in" in words and "rank 1: '" in words and gone == ()
        assert seconds < LATE_S
        assert "has failed before: ranks differ in" in afterwards


def another_order(rank: int) -> tuple[Words, float]:
    group = hasty_group()
    x = torch.zeros(group.size * 8)
    for key in "abcb":
        group.agree(key)
    for key in "ab":
        group.follow(key)
        group.all_gather(x).wait()

    def act(group: Group) -> None:
        if rank == 2:
            group.agree("block 9")
        else:
            group.follow("c")
        group.all_gather(x).wait()

    return timed(group, act)


def test_a_rank_that_leaves_the_order_raises_everywhere() -> None:
    for (words, _, _), seconds in run_ranks(3, another_order, patience=PATIENCE_S):
        assert "ranks differ in step 6" in words
        assert "rank 2: 'block 9'" in words and "'c'" in words
        assert seconds < LATE_S


def unlike_first_passes(rank: int) -> tuple[Words, float]:
    group = hasty_group()
    group.agree("embedding")
    return timed(group, lambda group: group.agree("block 1" if rank == 1 else "block 0"))


def test_first_passes_that_differ_raise_everywhere() -> None:
    def told() -> float:
        answers = run_ranks(3, unlike_first_passes, patience=PATIENCE_S)
        for (words, _, _), _ in answers:
            assert "step 1 of their order: ranks 0 and 2: 'block 0', rank 1: 'block 1'" in words
        return max(seconds for _, seconds in answers)

    assert best(told, SOONER_S) < SOONER_S


def absent(rank: int, seconds: float) -> tuple[Words, float]:
    group = impatient(seconds)
    if rank == 0:
        time.sleep(1000)
    return timed(group, step)


def test_an_agreement_that_nobody_comes_to_ends() -> None:
    words = "rank 1 wants 'a step' as step 0 of its order; rank 0 did not come to that step within {:g} s"
    assert best(partial(in_time, partial(waited, 2, absent, words), 0.4), SOON_S) < SOON_S


def recording_anew(rank: int) -> list[int]:
    """One rank asks for an agreement on a step that the others have on their record: that is no deviation."""
    group = hasty_group()
    x = torch.full((group.size,), float(rank))
    for _ in range(3):
        if rank == 0:
            group.agree("a")
        else:
            group.follow("a")
        group.all_gather(x[rank : rank + 1].repeat(group.size)).wait()
    group.agree("b")
    return group.exchange(rank)


def test_an_agreement_with_the_record_of_others_goes_on() -> None:
    assert run_ranks(2, recording_anew) == [[0, 1]] * 2


OPERATIONS = ("agree number 0", "all_reduce number 1")


def slow_but_well(rank: int, folder: str) -> tuple[list[float], list[str]]:
    """Each in its turn is slow until the other has said so. That is no failure."""
    group = hasty_group()
    agreement.WARN_S, watch.STUCK_S, said = 0.2, 0.1, []

    def hear(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        for turn, operation in enumerate(OPERATIONS):
            if operation in said[-1]:
                Path(folder, f"{turn}").touch()

    logging.getLogger("zerokern").addFilter(hear)
    for turn in range(2):
        while rank == turn and not Path(folder, f"{turn}").exists():
            time.sleep(0.05)
        if turn:
            group.all_reduce(torch.ones(3)).wait()
        else:
            group.agree("a step")
    x = torch.ones(4)
    group.all_reduce(x).wait()
    return x.tolist(), said


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    """Whoever waits says so, once each time."""
    for rank, (x, said) in enumerate(run_ranks(2, slow_but_well, str(tmp_path))):
        (told,) = [one for one in said if OPERATIONS[1 - rank] in one]
        assert x == [2.0] * 4 and f"rank {rank} has waited" in told
        assert f"for rank {1 - rank}, in " in told and "timeout of 30 s" in told
        assert len({re.search(r"\w+ number \d+", one)[0] for one in said}) == len(said)


def calls_alone(rank: int, folder: str) -> list[str]:
    """What rank 0 says in a save that the other rank does not come to: in the log, and when that one has ended."""
    group, process = hasty_group(), watch.THIS_PROCESS
    agreement.ASK_S, watch.STUCK_S, watch.QUIET_S, said = 0.1, 0.1, 0.3, []

    def hear(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        Path(folder, "asked").touch()

    logging.getLogger("zerokern").addFilter(hear)
    with during("opt.step"):
        group.all_reduce(torch.ones(3)).wait()
    if rank == 1:
        while not Path(folder, "asked").exists():
            time.sleep(0.05)
        os._exit(1)
    while '"last": "opt.step' not in str(process.store.get(f"zerokern/at/{process.known[1]}")):
        time.sleep(0.05)  # until the other one has said what it does: nothing
    with during("zk.save"):
        return [*said, refused(group, lambda group: group.agree("arguments"))[0], *said]


def test_who_waits_in_a_save_names_the_rank_that_is_in_no_call(tmp_path: Path) -> None:
    raised, asked = run_ranks(2, calls_alone, str(tmp_path), dies=[1])[0]
    assert "rank 0 has waited" in asked and "for rank 1, in zk.save (" in asked
    assert "rank 1 waits in no call of zerokern, and was last in opt.step (all_reduce" in asked
    assert "rank 1 is gone" in raised
    for said in (asked, raised):
        assert said.endswith(". All ranks must call zk.save: is it within `if rank == 0:`?")


def fails_late(rank: int) -> list[str]:
    """wait() raises the same each time, and so does the group."""
    group, store = hasty_group(answer=0.3), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["begun"])  # rank 1 is gone before the call on a busy machine, which raises it then
        os._exit(1)
    handle = group.all_gather(torch.zeros(group.size))
    store.set("begun", "")
    said = [refused(group, lambda _: handle.wait())[0] for _ in range(2)]
    return [*said, refused(group, gather)[0], str(handle.done())]


def test_a_failed_handle_stays_failed() -> None:
    first, second, third, done = run_ranks(2, fails_late, dies=[1])[0]
    assert first == second and "rank 1 is gone" in first
    assert "was not begun, for this group has failed before" in third and done == "True"


def round_over_four_groups(rank: int) -> tuple[Words, float]:
    """Each rank waits for its neighbour in a group that only these two share: together they wait for ever."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    rows, columns = group_on(mesh["rows"]), group_on(mesh["columns"])
    return timed(rows if rank in (0, 3) else columns, lambda group: sum_much(group) if rank % 3 else step(group))


@pytest.mark.slow
def test_who_waits_for_ever_over_several_groups_is_told() -> None:
    for (words, gone, _), seconds in run_ranks(4, round_over_four_groups, patience=PATIENCE_S):
        assert gone == () and "ranks wait for each other in different collectives, for ever: rank" in words
        assert words.count(" is in ") == 4 and seconds < LATE_S
