"""The stages of a pipeline are saved as one model, weights that stages share once, and loaded into any other cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import Laid, mesh_of
from pipeline_cases import Alone, batch, gradients, parameters, part, pipeline, same, whole
from safetensors.torch import load_file
from tied_cases import Pipe
from tied_cases import batch as tied_batch
from tied_cases import whole as tied_whole
from torch import Tensor
from worlds import World, full, on_ranks, ranked, refusal, says

import zerokern as zk

FIRST, MORE = 1, 1


def opt_of(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    small = [param for param in params if param.ndim < 2]
    return zk.AdamW([{"params": [p for p in params if p.ndim > 1]}, {"params": small, "weight_decay": 0.0}], lr=1e-2)


@ranked
def there_and_back(world: World, folder: Path, cuts: list[tuple[str, int]]) -> None:
    """Steps, a save, other stages, a load, steps: as one process that goes on."""
    name, stage = cuts[0]
    pipe = pipeline(name, stage=stage)
    opt = opt_of(pipe.params())
    alone = Alone(0, lr=1e-2)
    alone.opt = opt_of(alone.model.parameters())
    for step in range(FIRST):
        pipe.step(*batch(0, step, pipe.dp))
        alone.step(step, pipe.orders())
        for one in (opt, alone.opt):
            one.step()
            one.zero_grad()
    saved = alone.parameters()
    zk.save(folder / "of-a-pipeline", pipe.stages, opt, extra={"step": FIRST}, wait=False).wait()
    other = whole(5)
    other_opt = opt_of(other.parameters())
    assert zk.load(folder / "of-a-pipeline", other, other_opt, rng=False) == {"step": FIRST}
    same({key: one.detach() for key, one in other.named_parameters()}, saved)
    zk.save(folder / "of-one", other, other_opt)
    for path, (name, stage) in zip(("of-a-pipeline", "of-one"), cuts[1:], strict=True):
        pipe = pipeline(name, 7, stage=stage)
        opt = opt_of(pipe.params())
        zk.load(folder / path, pipe.stages if len(pipe.stages) > 1 else pipe.stages[0], opt, rng=False)
        same(parameters(pipe.models), saved)
        kept = Alone(0, lr=1e-2)
        kept.opt = opt_of(kept.model.parameters())
        zk.load(folder / path, kept.model, kept.opt, rng=False)
        for step in range(FIRST, FIRST + MORE):
            pipe.step(*batch(0, step, pipe.dp))
            kept.step(step, pipe.orders())
            same(gradients(pipe.models), kept.gradients())
            for one in (opt, kept.opt):
                one.step()
                one.zero_grad()
            same(parameters(pipe.models), kept.parameters())


def no_whole_model(folder: Path) -> None:
    run = Laid(pp=2, dp=2, stage=2)
    some = mesh_of(2, 1, 2, 1)["dp", "tp"]
    says(refusal(lambda: zk.save(folder / "part", run.model, group=some), ValueError), ["of all ranks", "flatten"])
    run.model.num_stages = 3
    says(refusal(lambda: zk.export(folder / "three", run.model), zk.StateError), ["stages of all ranks"])
    run.model.num_stages = 2
    said = refusal(lambda: zk.export(folder / "same", run.model, rename=lambda name: name[-6:]), ValueError)
    says(said, ["the same name"])
    one_name = {0: "words.weight", 1: "head.weight"}[run.mesh.get_local_rank("pp")]
    said = refusal(
        lambda: zk.export(folder / "twice", run.model, rename=lambda name: "w" if name == one_name else name),
        zk.StateError,
    )
    says(said, ["two pipeline stages", "'w'"])
    says(refusal(lambda: zk.export(folder / "none", 3), TypeError), ["model=3"])
    zk.export(folder / "whole", run.model)
    said = refusal(lambda: zk.load_pretrained(run.module, folder / "whole"), zk.StateError)
    says(said, ["unexpected"])
    found = zk.load_pretrained(run.model, folder / "whole", rename=lambda name: f"{name}.", strict=False)
    assert len(found.missing) == len(list(run.module.parameters()))


@ranked
def refused(world: World, folder: Path) -> None:
    pipe = pipeline("1F1B", stage=2)
    opt = zk.AdamW(pipe.params(), lr=1e-2 * (1 + pipe.pp))
    with pytest.raises(zk.StateError, match="lr"):
        zk.save(folder / "one", pipe.stages, opt)
    pipe.stages[0].num_stages = 3
    with pytest.raises(zk.StateError, match="stages of all ranks"):
        zk.save(folder / "two", pipe.stages)
    pipe.stages[0].num_stages = 2
    pipe.models[0].blocks["0"] = part(whole(0), 0, 2).blocks["0"]
    with pytest.raises(zk.StateError, match=r"blocks\.0"):
        zk.save(folder / "three", pipe.stages)
    with pytest.raises(zk.ZerokernError, match="differs between ranks"):
        zk.save(folder / "four", pipe.models[0])
    no_whole_model(folder)


# weights that stages share

OTHERS = ("head.weight", "more.weight")


def tied_opt(pipe: Pipe) -> torch.optim.Optimizer:
    return zk.AdamW(pipe.params(), lr=1e-2, max_grad_norm=0.1, group=pipe.mesh["pp"])


def run(pipe: Pipe, opt: Any, steps: range) -> None:
    for step in steps:
        pipe.step(*tied_batch(0, step, pipe.dp))
        opt.step()
        opt.zero_grad()


def same_as(pipe: Pipe, expected: dict[str, Tensor]) -> None:
    for model in pipe.models:
        for name, value in full(model).items():
            assert torch.equal(value, expected["words.weight" if name in OTHERS else name]), name


@ranked
def tied_there_and_back(world: World, folder: Path, rows: list[tuple[str, int, int, int]]) -> None:
    name, stage, uses, pp = rows[0]
    pipe = Pipe(name, 0, uses, pp, stage=stage)
    opt = tied_opt(pipe)
    run(pipe, opt, range(1))
    zk.save(folder / "piped", pipe.stages, opt)
    zk.export(folder / "exported", pipe.stages)
    alone = tied_whole(3, uses, pipe.count)
    alone_opt = zk.AdamW(alone.parameters(), lr=1e-2, max_grad_norm=0.1)
    zk.load(folder / "piped", alone, alone_opt, rng=False)
    assert alone.head.weight is alone.words.weight
    expected = {key: value.detach().clone() for key, value in alone.named_parameters()}
    same_as(pipe, expected)
    zk.save(folder / "alone", alone, alone_opt)
    zk.export(folder / "by-one", alone)
    if world.rank == 0:
        found, one = (load_file(folder / what / "model.safetensors") for what in ("exported", "by-one"))
        assert found.keys() == one.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    run(pipe, opt, range(1, 2))
    for name, stage, uses, pp in rows:
        for path in ("piped", "alone")[: 1 if len(rows) > 1 else 2]:
            other = Pipe(name, 5, uses, pp, stage=stage)
            other_opt = tied_opt(other)
            zk.load(folder / path, other.stages, other_opt, rng=False)
            same_as(other, expected)
            run(other, other_opt, range(1, 2))
            if (name, stage, uses, pp) == rows[0]:  # goes on with the same bits
                for mine, theirs in zip(pipe.models, other.models, strict=True):
                    after = full(theirs)
                    assert all(torch.equal(value, after[key]) for key, value in full(mine).items())
        fresh = Pipe(name, 6, uses, pp, stage=stage)
        zk.load_pretrained(fresh.stages, folder / "exported")
        same_as(fresh, expected)
        run(fresh, tied_opt(fresh), range(1))


@ranked
def cuts_of_copies(world: World, folder: Path) -> None:
    """pp 2 with two stages a rank, of which ZBV has the first and the last on one."""
    tied_there_and_back(world, folder / "three", [("ZBVZeroBubble", 1, 3, 2), ("Interleaved1F1B", 0, 3, 2)])


@pytest.mark.slow
def test_three_copies(tmp_path: Path) -> None:
    on_ranks(4, cuts_of_copies, tmp_path)


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
        assert "shared" in names and len(names) == len(dict(tied_whole(0, 2, 4).named_parameters()))
        assert "m.words.weight" in load_file(folder / "more" / "model.safetensors")
    first = pipe.mesh.get_local_rank("pp") == 0
    if pipe.stages[0].is_last:  # its copy of the one is called as the first stage's other weight is
        pipe.stages[0].submod.add_module("clash", pipe.stages[0].submod.head)
        del pipe.stages[0].submod.head
    elif first:
        pipe.stages[0].submod.add_module("clash", torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(zk.StateError, match="another weight has that name at another stage"):
        zk.save(folder / "clash", pipe.stages)


@ranked
def in_one_start(world: World, folder: Path) -> None:
    for name in ("cuts", "tied", "refused", "names"):
        if world.rank == 0:
            (folder / name).mkdir()
    torch.distributed.barrier()
    there_and_back(world, folder / "cuts", [("Interleaved1F1B", 3), ("1F1B", 2), ("ZBVZeroBubble", 3)])
    tied_there_and_back(world, folder / "tied", [("1F1B", 2, 2, 4)])
    refused(world, folder / "refused")
    renamed(world, folder / "names")


def test_one_checkpoint_for_every_cut_and_every_copy(tmp_path: Path) -> None:
    """And what is no pipeline, or no whole model, is refused."""
    on_ranks(4, in_one_start, tmp_path)
    assert [one.name for one in (tmp_path / "refused").iterdir()] == ["whole"]
