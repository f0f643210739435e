"""What ranks do differently, or one finds wrong: every rank raises the same words, nobody hangs, nothing is changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import load, save
from torch import Tensor, nn
from weight_cases import SMALL, Mixed, export, filled, load_pretrained, names, whole
from worlds import World, on_ranks, on_threads, ranked, refusal, says

import zerokern as zk
from zerokern.core.errors import StateError, ZerokernError

Refusals = dict[str, tuple[tuple[str, ...], Callable[[], Any]]]  # by what is asked, the words that are expected


def in_arguments(rank: int, folder: Path) -> Refusals:
    """Bad ones on all ranks or on one, and good ones that differ."""
    model: Any = nn.Linear(2, 2)
    save(folder / "there", model)
    zk.export(folder / "weights", model)
    one = None if rank else model
    both = ("on rank 0", "on rank 1")
    return {
        "no progress": (("progress='yes'",), lambda: save(folder / "x", model, progress="yes")),  # type: ignore[arg-type]
        "exported": (("progress='yes'",), lambda: zk.export(folder / "x", model, progress="yes")),  # type: ignore[arg-type]
        "read": (("progress='yes'",), lambda: load_pretrained(model, folder / "weights", progress="yes")),  # type: ignore[arg-type]
        "size": (("max_shard_nbytes",), lambda: zk.export(folder / "x", model, max_shard_nbytes="a" if rank else "5G")),
        "no model": (("model=None",), lambda: save(folder / "x", one)),
        "none to load": (("model=None",), lambda: load(folder / "there", one)),
        "wait": (("wait=", *both), lambda: save(folder / "x", model, wait=bool(rank))),
        "rng": (("rng=", *both), lambda: save(folder / "x", model, rng=bool(rank))),
        "path": (("path=", *both), lambda: save(folder / f"y{rank}", model)),
        "verify": (("verify=", *both), lambda: load(folder / "there", model, verify="first" if rank else "reading")),
        "lossy": (("lossy=", *both), lambda: load(folder / "there", model, lossy=bool(rank))),
        "rng of a load": (("rng=", *both), lambda: load(folder / "there", model, rng=bool(rank))),
        "call": (("call=", *both), lambda: load(folder / "there", model) if rank else save(folder / "there", model)),
        "budget": (
            ("staging_budget=10",),
            lambda: save(folder / "x", nn.Linear(64, 64), wait=False, staging_budget=10 if rank else 1 << 20),
        ),
    }


def in_models(rank: int, folder: Path) -> Refusals:
    """What is saved, exported or loaded is not the same on the ranks, or only one of them finds something wrong."""
    model, stages = nn.Linear(2, 2), nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    divided, pair = zk.shard(nn.Linear(4, 4), stage=2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank:
        pair[1].weight = pair[0].weight
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lr = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    save(folder / "divided", divided)
    differs = "differs between ranks 0 and 1"
    return {
        "model": ((differs, "stage0.weight"), lambda: save(folder / "x", stages)),
        "opt": ((differs, "optimizer 0"), lambda: save(folder / "x", model, sgd if rank else None)),
        "lr": ((differs, '"lr": 1.1'), lambda: save(folder / "x", model, lr)),
        "tied": ((differs, "1.weight"), lambda: save(folder / "x", pair)),
        "extra": (("extra['a']",), lambda: save(folder / "x", divided, extra={"a": object() if rank else 1})),
        "keys": (("other keys",), lambda: save(folder / "x", divided, extra={"a" if rank else "b": 1})),
        "place": (("not there",), lambda: load(folder / ("divided" if rank else "not there"), divided)),
        "shape": (("(5, 4)",), lambda: load(folder / "divided", nn.Linear(4, 4 + rank))),
        "exported": (("ranks 1 have other tensors",), lambda: export(folder / "x", Mixed() if rank else filled(1.0))),
        "absent": (("absent",), lambda: load_pretrained(divided, folder / ("absent" if rank else "weights"))),
    }


@ranked
def refused(world: World, folder: Path) -> dict[str, str]:
    said = {}
    for kind in (in_arguments, in_models):
        for name, (words, work) in kind(world.rank, folder).items():
            text = refusal(work, (TypeError, ValueError, ZerokernError))
            says(text, words)
            said[f"{kind.__name__} {name}"] = text
    return said


def in_order(rank: int, folder: Path) -> list[Any]:
    """Extra is found by name whatever its order, each rank's own by rank; and each goes on with its own numbers."""
    values = {
        "a": torch.full((1000,), 1.0),
        "b": torch.full((1000,), 2.0),
        "own": {"seen": torch.full((3,), 3.0 + rank)},
    }
    model = nn.Linear(2, 2)
    save(folder / "order", model, extra=values if rank == 0 else dict(reversed(values.items())))
    found = load(folder / "order", model)
    return [
        float(found["a"].mean()),
        float(found["b"].mean()),
        float(found["own"]["seen"].mean()),
        torch.rand(1).item(),
    ]


@ranked
def failing_alone(world: World, folder: Path) -> str:
    """The disk of one rank is full."""
    model = world.shard(filled(2.0), stage=3)

    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        if world.rank == 1:
            patched.setattr(os, "pwrite", full)
        return refusal(lambda: export(folder / "full", model, max_shard_nbytes=SMALL), zk.IoError)


@ranked
def of_two_hosts(world: World, folder: Path) -> list[str]:
    """Each rank has a folder of its own under one name, as two hosts have."""
    here = Path.cwd()
    os.chdir(folder / f"host{world.rank}")
    try:
        model = nn.Linear(40, 30)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        said = []
        for name in ("ours", "file.pt", "dcp", "weights"):
            read = (lambda path, model: load_pretrained(model, path)) if name == "weights" else load
            said.append(refusal(lambda name=name, read=read: read(f"/proc/self/cwd/{name}", model), StateError))
            same(model.state_dict(), before)
        load("/proc/self/cwd/same", model)
        assert model.weight[0, 0] == 7
        return said
    finally:
        os.chdir(here)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@ranked
def everything(world: World, folder: Path) -> tuple[Any, ...]:
    rank = world.rank
    return refused(world, folder), in_order(rank, folder), failing_alone(world, folder), of_two_hosts(world, folder)


class Sampler:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is to be restored")


def test_what_ranks_do_differently_is_refused_on_all_in_the_same_words(tmp_path: Path) -> None:
    export(tmp_path / "full", filled(1.0), max_shard_nbytes=SMALL)
    before = names(tmp_path / "full")
    hosts(tmp_path)
    (said, order, full, places), (others, second, full_2, places_2) = on_ranks(2, everything, tmp_path)
    assert said == others and len(said) == 24
    assert order[:3] == [1.0, 2.0, 3.0] and second[:3] == [1.0, 2.0, 4.0] and order[3] != second[3]
    assert not {"x", "y0", "y1"} & set(names(tmp_path))
    for one in (full, full_2):
        says(one, ["No space left on device", str(tmp_path)])
    assert whole(tmp_path / "full") == 1.0 and names(tmp_path / "full") == before
    for one in (*places, *places_2):
        says(one, ["is not the same on all ranks", "nothing was changed"])
    assert "rank 0 sees the save 20" in places[0]
    extra = load(tmp_path / "order", nn.Linear(2, 2))
    assert type(extra["own"]).__name__ == "EachRank" and [float(one["seen"][0]) for one in extra["own"]] == [3.0, 4.0]
    with pytest.raises(StateError, match="'own' was not the same on all of the 2 ranks"):
        load(tmp_path / "order", nn.Linear(2, 2), extra={"own": Sampler()})


def hosts(folder: Path) -> None:
    """The same names with other steps in them, and one that is the same on both."""
    for rank in range(2):
        host, model = folder / f"host{rank}", nn.Linear(40, 30)
        save(host / "ours", model)
        torch.save(model.state_dict(), host / "file.pt")
        dcp.save(model.state_dict(), checkpoint_id=host / "dcp", no_dist=True)
        zk.export(host / "weights", model)
    nn.init.constant_(model.weight, 7)
    save(folder / "host0" / "same", model)
    shutil.copytree(folder / "host0" / "same", folder / "host1" / "same")


def test_a_part_of_the_ranks_is_refused(tmp_path: Path) -> None:
    @ranked
    def one(world: World) -> str:
        model = world.shard(filled(1.0), stage=3)
        return refusal(lambda: export(tmp_path / "new", model), StateError)

    for said in on_threads(2, one):  # no torch.distributed: each is alone
        says(said, ["no rank that takes part holds elements"])
    assert not (tmp_path / "new").exists()
