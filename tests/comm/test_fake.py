"""The fake world keeps callers to the rules, and never hangs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_world import FakeWorld
from tables import each
from tries import Missed, best, in_time

from zerokern.comm import CommError, Group


def test_the_first_error_is_raised_and_the_others_are_released() -> None:
    def act(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("from rank 1")
        group.barrier()

    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="from rank 1"):
        FakeWorld(4).run(act)
    assert set(threading.enumerate()) <= before


def test_a_rank_that_does_not_come_is_named() -> None:
    def act(group: Group) -> None:
        if group.rank != 2:
            group.barrier()

    def waited(seconds: float) -> float:
        begun = time.monotonic()
        with pytest.raises(CommError) as caught:
            FakeWorld(3, timeout=seconds).run(act)
        took, said = time.monotonic() - begun, str(caught.value)
        if re.search(r"ranks \[(0|1), 2\] did not take part", said):
            raise Missed(said)
        assert f"ranks [2] did not take part within {seconds:g} s" in said
        assert took >= seconds
        return took

    assert best(partial(in_time, waited, 0.2), 4) < 4  # a world that waits for its own time would not do


def test_different_sizes_are_told() -> None:
    with pytest.raises(CommError, match=r"ranks differ in all_gather number 0: rank 0: '4 elements.*rank 1: '6 "):
        FakeWorld(2).run(lambda group: group.all_gather(torch.zeros(4 + 2 * group.rank)).wait())


def test_different_orders_are_told() -> None:
    def act(group: Group) -> None:
        x = torch.zeros(2)
        group.agree("a")
        if group.rank:
            group.agree("c")
        else:
            group.follow("b")
        group.all_gather(x).wait()

    with pytest.raises(CommError, match="ranks differ in step 1 of their order: rank 0: 'b', rank 1: 'c'"):
        FakeWorld(2).run(act)


@each("operation", ["reduce_scatter", "all_gather", "all_reduce"])
def test_changing_what_is_being_sent_is_caught(operation: str) -> None:
    def act(group: Group) -> None:
        x = torch.ones(4)
        handle = (
            group.reduce_scatter(x, torch.empty(2)) if operation == "reduce_scatter" else getattr(group, operation)(x)
        )
        x.add_(1)
        handle.wait()

    with pytest.raises(CommError, match="changed what it sends before wait"):
        FakeWorld(2).run(act)


def test_what_holds_nothing_to_rely_on_is_nan() -> None:
    def act(group: Group) -> tuple[torch.Tensor, ...]:
        bucket, out, full = torch.ones(4), torch.empty(2), torch.ones(4)
        scratch = torch.ones(2)
        group.reduce_scatter(bucket, out, scratch=scratch).wait()
        handle = group.all_gather(full)
        before = full.clone()
        handle.wait()
        return bucket, out, before[2 - 2 * group.rank :][:2], full, scratch

    for bucket, out, before, full, scratch in FakeWorld(2).run(act):
        assert bucket.isnan().all() and before.isnan().all() and scratch.isnan().all()
        assert out.tolist() == [2, 2] and full.tolist() == [1] * 4


def test_a_handle_knows_when_all_have_come() -> None:
    met = threading.Event()

    def act(group: Group) -> list[bool]:
        if group.rank:
            met.wait(60)
        handle = group.all_reduce(torch.ones(1))
        seen = [handle.done()]
        met.set()
        handle.wait()
        return [*seen, handle.done()]

    assert FakeWorld(2).run(act)[0] == [False, True]


@each("size", [0, -1, True, 2.0])
def test_a_world_has_ranks(size: object) -> None:
    with pytest.raises(ValueError, match="size"):
        FakeWorld(size)


CHECKPOINTS = """
import gc, sys, time
sys.path[:0] = [{folder!r}]
from fake_world import FakeWorld
import torch

class Garbage:
    def __init__(self): self.itself = self
    def __del__(self): time.sleep(0.0005)

def ask(group):
    for _ in range(300):
        Garbage()
        torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            pass

gc.set_threshold(1)
FakeWorld(2).run(ask)
print("over")
"""


@pytest.mark.slow
def test_ranks_that_ask_for_the_state_of_random_numbers_end() -> None:
    """The collector runs finalizers in between, which let the other rank in."""
    program = CHECKPOINTS.format(folder=str(Path(__file__).parent))
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert said.stdout == "over\n", said.stderr
