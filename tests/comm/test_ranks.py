"""The harness itself: results come back, failures are told with their cause, and nobody is left behind."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks
from tries import Missed, in_time


def add_up(rank: int, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    y = x + rank
    dist.all_reduce(y)
    return y, os.getpid()


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_ranks_meet_and_results_return(store: str) -> None:
    results = run_ranks(3, add_up, torch.ones(2), store=store)
    assert [y.tolist() for y, _ in results] == [[6, 6]] * 3
    assert len({pid for _, pid in results} | {os.getpid()}) == 4


def raises(rank: int) -> None:
    if rank == 1:
        raise LookupError("the cause")
    dist.barrier()


def test_the_traceback_of_a_rank_is_in_the_error() -> None:
    with pytest.raises(RanksFailed, match=r'(?s)rank 1 of 2.*test_ranks.py", line .*in raises.*the cause'):
        run_ranks(2, raises)


def ends(rank: int, pids: dict) -> None:
    if rank == 1:
        os._exit(3)


def test_a_silent_end_is_a_failure_unless_it_is_meant() -> None:
    with pytest.raises(RanksFailed, match="exit code 3 and no result"):
        run_ranks(2, ends, {})
    assert run_ranks(2, ends, {}, dies=[1]) == [None, None]


def hangs(rank: int, note: str) -> None:
    with open(f"{note}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == 0:
        time.sleep(1000)


def test_a_hang_shows_where_and_leaves_nobody(tmp_path) -> None:
    def hang(seconds: float) -> str:
        with pytest.raises(RanksFailed) as caught:
            run_ranks(2, hangs, str(tmp_path / "pid"), timeout=seconds)
        if not all((tmp_path / f"pid.{rank}").exists() for rank in range(2)):
            raise Missed("the ranks had not begun")
        return str(caught.value)

    assert re.search(r"(?s)rank 0 of 2 did not end in time.*in hangs", in_time(hang, 0.5))
    for rank in range(2):
        pid = int((tmp_path / f"pid.{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def given(rank: int) -> list[str]:
    return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA")]


def test_the_environment_is_torchruns() -> None:
    assert run_ranks(2, given, env={"EXTRA": "x"}) == [[str(rank), "2", "2", "x"] for rank in range(2)]
