"""zk.export killed with SIGKILL: at any time the folder holds the old export or the new one, whole, never a mix."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weight_cases import INDEX, LARGE, SINGLE, SMALL, export, filled, names, whole
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.interop import exported

CALLS = (
    (os, "rename"), (os, "fsync"), (os, "pwrite"), (Path, "unlink"), (os, "open"), (os, "ftruncate"),
)  # fmt: skip


def dying(call: Callable, counter: itertools.count, number: int) -> Callable:
    def counting(*given: object, **settings: object) -> object:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **settings)

    return counting


def dies_at(number: int, work: Callable[[], object]) -> bool:
    """A child that does the work and is killed before its n-th call; whether it came to an end instead."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    try:
        settle_in()
        counter = itertools.count(1)
        for home, name in CALLS:
            setattr(home, name, dying(getattr(home, name), counter, number))
        work()
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(repr(error))
    os._exit(1)


def settle_in() -> None:
    """A child has none of OpenMP's threads, and would wait for them; if it hangs all the same, it ends, and fails."""
    signal.alarm(120)
    torch.set_num_threads(1)


SLOW = pytest.mark.slow
CHANGES = [(LARGE, LARGE), (LARGE, SMALL), (SMALL, LARGE), (SMALL, SMALL)]


@pytest.mark.parametrize(
    "before, after, every", [(SMALL, SMALL, 4), *(pytest.param(*change, 1, marks=SLOW) for change in CHANGES[1:3])]
)
def test_killed_before_a_call_the_old_or_the_new_is_whole(before: int, after: int, every: int, tmp_path: Path) -> None:
    """Before every fourth of its calls of the system, or every one."""
    export(tmp_path / "first", filled(1.0), max_shard_nbytes=before)
    seen = set()
    for number in itertools.count(1, every):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        ended = dies_at(number, lambda folder=folder: export(folder, filled(2.0), max_shard_nbytes=after))
        seen.add(value := whole(folder))
        assert not ended or value == 2.0
        export(folder, filled(3.0), max_shard_nbytes=after)
        assert whole(folder) == 3.0
        index = folder / INDEX
        files = {SINGLE} if after == LARGE else {INDEX, *json.loads(index.read_text())["weight_map"].values()}
        assert set(names(folder)) == files  # nothing that the killed one left is there any more
        if ended:
            break
    assert number > 8 and seen == {1.0, 2.0}


class Config:
    def __init__(self, value: float) -> None:
        self.value = value

    def to_json_string(self) -> str:
        return json.dumps({"value": self.value})


def configured(value: float) -> nn.Module:
    model = filled(value)
    model.config = Config(value)  # type: ignore[assignment]
    return model


def config_of(folder: Path) -> float:
    return json.loads((folder / "config.json").read_text())["value"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before, after", CHANGES)
def test_a_config_is_never_ahead_of_its_weights(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each change of the folder, as a kill would; the next export finishes or clears what is left."""
    states = set()
    zk.export(tmp_path / "first", configured(1.0), max_shard_nbytes=before)
    for number in range(40):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        count = iter(range(1000))

        def dying(call: Any, count: Any = count, number: int = number) -> Any:
            def counted(*given: Any, **settings: Any) -> Any:
                if next(count) >= number:  # and nothing after it: a process that is gone clears nothing away
                    raise Killed
                return call(*given, **settings)

            return counted

        ended = False
        with monkeypatch.context() as patched, contextlib.suppress(Killed):
            patched.setattr(os, "rename", dying(os.rename))
            patched.setattr(Path, "unlink", dying(Path.unlink))
            zk.export(folder, configured(2.0), max_shard_nbytes=after)
            ended = True
        weights, config = whole(folder), config_of(folder)
        assert config <= weights
        states.add((weights, config))
        exported.Target(folder, 0, [["x"]], 0).abandon()  # what the next export begins with
        assert config_of(folder) == whole(folder) >= weights
        assert not list(folder.glob("*.new"))
        if ended:
            break
    assert ended and (2.0, 2.0) in states and (1.0, 1.0) in states


def test_an_index_that_a_kill_has_left_without_its_files_costs_no_new_one(tmp_path: Path) -> None:
    export(tmp_path, filled(1.0), max_shard_nbytes=SMALL)
    index = (tmp_path / INDEX).read_text()
    export(tmp_path, filled(2.0), max_shard_nbytes=LARGE)
    (tmp_path / INDEX).write_text(index)  # its removal was the last thing to do
    export(tmp_path, filled(3.0), max_shard_nbytes=SMALL)
    assert whole(tmp_path) == 3.0


@ranked
def one_of_two_dies(world: World, folder: Path, victim: int, number: int) -> str:
    model = world.shard(filled(2.0), stage=3)
    export(folder / "before", model)  # what a first call sets up
    counter = itertools.count(1)
    with pytest.MonkeyPatch.context() as patched:
        for home, name in CALLS if world.rank == victim else ():
            patched.setattr(home, name, dying(getattr(home, name), counter, number))
        try:
            export(folder / "old", model, max_shard_nbytes=SMALL)
        except Exception as error:
            return type(error).__name__
    return "done"


DEATHS = [(0, 5), (1, 2), *(pytest.param(0, number, marks=SLOW) for number in (1, 12, 25))]


@pytest.mark.parametrize("victim, number", DEATHS)
def test_one_of_two_ranks_is_killed(victim: int, number: int, tmp_path: Path) -> None:
    export(tmp_path / "old", filled(1.0), max_shard_nbytes=SMALL)
    said = on_ranks(2, one_of_two_dies, tmp_path, victim, number, dies=[victim], patience=60.0)
    assert said[victim] in (None, "done")
    assert said[1 - victim] is not None
    value = whole(tmp_path / "old")
    assert value == (1.0 if number <= 5 else value)
    export(tmp_path / "old", filled(3.0))
    assert whole(tmp_path / "old") == 3.0
    assert names(tmp_path / "old") == [SINGLE]
