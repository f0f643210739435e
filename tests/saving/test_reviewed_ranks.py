"""What ranks do differently, or one does meanwhile: nothing is lost, nothing hangs, and every rank says the same."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import load, save
from forked import run_forked
from torch import nn
from torch.distributed import destroy_process_group
from weight_cases import LARGE, SMALL, filled, whole
from worlds import on_ranks, refusal

import zerokern as zk
from zerokern.core.errors import IoError
from zerokern.saving import exported
from zerokern.saving.storage import Writer


def extra_in_another_order(rank: int, folder: Path) -> list[float]:
    values = {"a": torch.full((1000,), 1.0), "b": torch.full((1000,), 2.0), "own": torch.full((3,), 3.0 + rank)}
    save(folder / "x", nn.Linear(2, 2), extra=values if rank == 0 else dict(reversed(values.items())))
    found = load(folder / "x", nn.Linear(2, 2))
    return [float(found[name].mean()) for name in values]


def test_extra_is_found_by_name_whatever_its_order(tmp_path: Path) -> None:
    assert on_ranks(2, extra_in_another_order, tmp_path) == [[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]]


def held_writes() -> threading.Event:
    """In this process, for as long as it lives, writes wait for this."""
    write, go_on = Writer.write_data, threading.Event()

    def held(self: Writer, plan: Any, planner: Any) -> Any:
        assert go_on.wait(120)
        return write(self, plan, planner)

    Writer.write_data = held  # type: ignore[method-assign]
    return go_on


def ending_with_a_save(rank: int, folder: Path, whose: str) -> tuple[bool, bool]:
    """`destroy_process_group` as scripts have it: imported by name, long before."""
    go_on = held_writes()
    before = vars(dist.ProcessGroup)["shutdown"]
    model = nn.Linear(300, 300)
    nn.init.constant_(model.weight, 7.0)
    group = None if whose == "world" else dist.new_group([0, 1])
    save(folder / "x", model, wait=False, group=group)
    during = vars(dist.ProcessGroup)["shutdown"]
    threading.Timer(1.0, go_on.set).start()
    destroy_process_group(group)
    there = (folder / "x" / "zerokern.json").exists()
    if group is not None:
        destroy_process_group()
    return there, before is vars(dist.ProcessGroup)["shutdown"] is not during


@pytest.mark.parametrize("whose", ["world", "a group"])
def test_destroying_the_process_group_waits_for_the_save(whose: str, tmp_path: Path) -> None:
    assert on_ranks(2, ending_with_a_save, tmp_path, whose) == [(True, True)] * 2
    model = nn.Linear(300, 300)
    load(tmp_path / "x", model)
    assert (model.weight == 7.0).all()


def failing_beside(rank: int, folder: Path) -> bool:
    """What fails is in the log, and the process group goes as it would have."""

    def broken(self: Writer, plan: Any, planner: Any) -> Any:
        raise IoError("the disk has gone", path="x", errno=5)

    Writer.write_data = broken  # type: ignore[method-assign]
    save(folder / "x", nn.Linear(3, 3), wait=False)
    dist.destroy_process_group()
    return dist.is_initialized()


def test_a_failed_save_does_not_keep_the_process_group(tmp_path: Path) -> None:
    assert on_ranks(2, failing_beside, tmp_path) == [False, False]


def bad_progress(rank: int, folder: Path) -> list[str]:
    """Each call again on ranks that are still in step."""
    model = nn.Linear(2, 2)
    zk.export(folder / "e", model)
    calls = (
        lambda: save(folder / "x", model, progress="yes"),  # type: ignore[arg-type]
        lambda: zk.export(folder / "e", model, progress="yes"),  # type: ignore[arg-type]
        lambda: zk.load_pretrained(model, folder / "e", progress="yes"),  # type: ignore[arg-type]
        lambda: zk.export(folder / "e", model, max_shard_nbytes="many" if rank else "5G"),
        lambda: save(folder / "x", None if rank else model),  # type: ignore[arg-type]
        lambda: load(folder / "x", None if rank else model),  # type: ignore[arg-type]
    )
    return [refusal(call, (TypeError, ValueError)) for call in calls]


def test_a_bad_argument_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = on_ranks(2, bad_progress, tmp_path)
    assert first == second
    assert all("progress='yes'" in said for said in first[:3])
    assert "max_shard_nbytes" in first[3] and all("model=None" in said for said in first[4:])


def given_differently(rank: int, folder: Path) -> dict[str, str]:
    model = nn.Linear(2, 2)
    save(folder / "x", model)
    other = bool(rank)
    calls = {
        "wait": lambda: save(folder / "y", model, wait=other),
        "rng": lambda: save(folder / "y", model, rng=other),
        "path": lambda: save(folder / f"y{rank}", model),
        "verify": lambda: load(folder / "x", model, verify="first" if other else "reading"),
        "lossy": lambda: load(folder / "x", model, lossy=other),
        "rng=": lambda: load(folder / "x", model, rng=other),
        "call": lambda: load(folder / "x", model) if rank else save(folder / "x", model),
    }
    return {name: refusal(call, ValueError) for name, call in calls.items()}


def test_arguments_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    first, second = on_ranks(2, given_differently, tmp_path)
    assert first == second
    for name, said in first.items():
        assert f"{name.rstrip('=')}=" in said and "on rank 0" in said and "on rank 1" in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def differing_subjects(rank: int, folder: Path) -> dict[str, str]:
    same = nn.Linear(2, 2)
    stages = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank:
        pair[1].weight = pair[0].weight
    lr = torch.optim.SGD(same.parameters(), lr=0.1 + rank)
    calls = {
        "model": lambda: save(folder / "x", stages),
        "opt": lambda: save(folder / "x", same, torch.optim.SGD(same.parameters(), lr=0.1) if rank else None),
        "lr": lambda: save(folder / "x", same, lr),
        "tied": lambda: save(folder / "x", pair),
    }
    return {name: refusal(call, zk.StateError) for name, call in calls.items()}


def test_a_model_or_an_optimizer_that_differs_between_ranks_is_not_saved(tmp_path: Path) -> None:
    first, second = on_ranks(2, differing_subjects, tmp_path)
    assert first == second
    words = {"model": "stage0.weight", "opt": "optimizer 0", "lr": '"lr": 1.1', "tied": "1.weight"}
    for name, word in words.items():
        assert "differs between ranks 0 and 1" in first[name] and word in first[name], first[name]
    assert not list(tmp_path.iterdir())


def test_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model=None"):
        save(tmp_path / "x", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model=None"):
        load(tmp_path / "x", None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_is_waited_for_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the copy is taken: nobody has got the Saving."""
    model = nn.Linear(100, 100)
    reached, go_on = threading.Event(), threading.Event()
    real = zk.saving.background.StagedPlanner._copy

    def slow(self: Any, items: Any) -> None:
        reached.set()
        go_on.wait(120)
        real(self, items)

    def interrupt() -> None:
        reached.wait(120)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, go_on.set).start()

    monkeypatch.setattr(zk.saving.background.StagedPlanner, "_copy", slow)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "x", model, wait=False)
    save(tmp_path / "x", model)
    load(tmp_path / "x", model)


def test_what_fails_before_the_save_runs_lets_go_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start"):
            save(tmp_path / "x", model, wait=False)
    assert not (tmp_path / "x").exists()
    save(tmp_path / "x", model)


MOVING = """
import os, sys, torch, zerokern as zk
os.chdir(sys.argv[1])
model = torch.nn.Linear(2000, 2000)
saving = zk.save("saved", model, wait=False)
os.chdir(sys.argv[2])
saving.wait()
"""


def test_a_relative_path_is_where_it_was_when_the_save_began(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    moved = run_forked(MOVING, tmp_path / "here", tmp_path / "there")
    assert moved.returncode == 0, moved.stderr
    load(tmp_path / "here" / "saved", nn.Linear(2000, 2000))
    assert not list((tmp_path / "there").iterdir())


def test_a_failure_of_another_save_does_not_stop_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    save(tmp_path / "x", model)
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write_data", lambda *_: (_ for _ in ()).throw(IoError("gone", path="y", errno=5)))
        saving = save(tmp_path / "y", model, wait=False)
        assert saving is not None
        saving._thread.join()
    assert load(tmp_path / "x", model) == {}
    with pytest.raises(IoError, match="gone"):  # who saves hears of it
        save(tmp_path / "z", model)
    save(tmp_path / "z", model)


class Config:
    def __init__(self, value: float) -> None:
        self.value = value

    def to_json_string(self) -> str:
        return json.dumps({"value": self.value})


def configured(value: float) -> nn.Module:
    model = filled(value)
    model.config = Config(value)  # type: ignore[assignment]
    return model


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before, after", [(LARGE, LARGE), (LARGE, SMALL), (SMALL, LARGE), (SMALL, SMALL)])
def test_a_config_is_never_ahead_of_its_weights(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each change of the folder, as a kill would; the next export finishes or clears what is left."""
    states = set()
    for number in range(40):
        folder = tmp_path / str(number)
        zk.export(folder, configured(1.0), max_shard_nbytes=before)
        count = iter(range(1000))

        def dying(call: Any, count: Any = count, number: int = number) -> Any:
            def counted(*given: Any, **settings: Any) -> Any:
                if next(count) >= number:  # and nothing after it: a process that is gone clears nothing away
                    raise Killed
                return call(*given, **settings)

            return counted

        ended = False
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", dying(os.rename))
            patched.setattr(Path, "unlink", dying(Path.unlink))
            try:
                zk.export(folder, configured(2.0), max_shard_nbytes=after)
                ended = True
            except Killed:
                pass
        weights, config = whole(folder), config_of(folder)
        assert config <= weights
        states.add((weights, config))
        exported.Target(folder, 0, [["x"]], 0).abandon()  # what the next export begins with
        assert config_of(folder) == whole(folder) >= weights
        assert not list(folder.glob("*.new"))
        if ended:
            break
    assert ended and (2.0, 2.0) in states and (1.0, 1.0) in states


def config_of(folder: Path) -> float:
    return json.loads((folder / "config.json").read_text())["value"]
