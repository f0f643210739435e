"""A weight that stages share is saved once, as one process saves it, and comes back into every copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))

from safetensors.torch import load_file
from tied_cases import Pipe, batch, whole
from torch import Tensor
from worlds import World, full, on_ranks, ranked

import zerokern as zk

OTHERS = ("head.weight", "more.weight")


def opt_of(pipe: Pipe) -> torch.optim.Optimizer:
    return zk.AdamW(pipe.params(), lr=1e-2, max_grad_norm=0.1, group=pipe.mesh["pp"])


def run(pipe: Pipe, opt: Any, steps: range) -> None:
    for step in steps:
        pipe.step(*batch(0, step, pipe.dp))
        opt.step()
        opt.zero_grad()


def same(pipe: Pipe, expected: dict[str, Tensor]) -> None:
    for model in pipe.models:
        for name, value in full(model).items():
            assert torch.equal(value, expected["words.weight" if name in OTHERS else name]), name


@ranked
def there_and_back(world: World, folder: Path, rows: list[tuple[str, int, int, int]]) -> None:
    name, stage, uses, pp = rows[0]
    pipe = Pipe(name, 0, uses, pp, stage=stage)
    opt = opt_of(pipe)
    run(pipe, opt, range(2))
    zk.save(folder / "piped", pipe.stages, opt)
    zk.export(folder / "exported", pipe.stages)
    alone = whole(3, uses, pipe.count)
    alone_opt = zk.AdamW(alone.parameters(), lr=1e-2, max_grad_norm=0.1)
    zk.load(folder / "piped", alone, alone_opt, rng=False)
    assert alone.head.weight is alone.words.weight
    expected = {key: value.detach().clone() for key, value in alone.named_parameters()}
    same(pipe, expected)
    zk.save(folder / "alone", alone, alone_opt)
    zk.export(folder / "by-one", alone)
    if world.rank == 0:
        found, one = (load_file(folder / what / "model.safetensors") for what in ("exported", "by-one"))
        assert found.keys() == one.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    run(pipe, opt, range(2, 4))
    for name, stage, uses, pp in rows:
        for path in ("piped", "alone"):
            other = Pipe(name, 5, uses, pp, stage=stage)
            other_opt = opt_of(other)
            zk.load(folder / path, other.stages, other_opt, rng=False)
            same(other, expected)
            run(other, other_opt, range(2, 4))
            if (name, stage, uses, pp) == rows[0]:  # goes on with the same bits
                for mine, theirs in zip(pipe.models, other.models, strict=True):
                    after = full(theirs)
                    assert all(torch.equal(value, after[key]) for key, value in full(mine).items())
        fresh = Pipe(name, 6, uses, pp, stage=stage)
        zk.load_pretrained(fresh.stages, folder / "exported")
        same(fresh, expected)
        run(fresh, opt_of(fresh), range(1))


def test_saved_once_and_loaded_into_every_copy(tmp_path: Path) -> None:
    # four blocks in each cut: pp 4, and pp 2 with two stages a rank, of which ZBV has the first and the last on one
    on_ranks(4, there_and_back, tmp_path, [("1F1B", 2, 2, 4), ("ZBVZeroBubble", 3, 2, 2)])


@pytest.mark.slow
def test_three_copies(tmp_path: Path) -> None:
    on_ranks(4, there_and_back, tmp_path, [("ZBVZeroBubble", 1, 3, 2), ("Interleaved1F1B", 0, 3, 2)])


@ranked
def renamed(world: World, folder: Path) -> None:
    """Names that all copies have in common, and names that another weight has."""
    pipe = Pipe("1F1B", 0, 2, 4, stage=2)
    zk.export(folder / "one", pipe.stages, rename=lambda name: "shared" if name in ("words.weight", *OTHERS) else name)
    zk.export(folder / "more", pipe.stages, rename=lambda name: f"m.{name}")
    fresh = Pipe("1F1B", 6, 2, 4, stage=3)
    zk.load_pretrained(fresh.stages, folder / "more", rename=lambda name: f"m.{name}")
    for mine, theirs in zip(pipe.models, fresh.models, strict=True):
        found = full(theirs)
        assert all(torch.equal(value, found[name]) for name, value in full(mine).items())
    if world.rank == 0:
        names = set(load_file(folder / "one" / "model.safetensors"))
        assert "shared" in names and len(names) == len(dict(whole(0, 2, 4).named_parameters()))
        assert "m.words.weight" in load_file(folder / "more" / "model.safetensors")
    first = pipe.mesh.get_local_rank("pp") == 0
    if pipe.stages[0].is_last:  # its copy of the one is called as the first stage's other weight is
        pipe.stages[0].submod.add_module("clash", pipe.stages[0].submod.head)
        del pipe.stages[0].submod.head
    elif first:
        pipe.stages[0].submod.add_module("clash", torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(zk.StateError, match="another weight has that name at another stage"):
        zk.save(folder / "clash", pipe.stages)


def test_names_of_copies(tmp_path: Path) -> None:
    on_ranks(4, renamed, tmp_path)
