"""Weights that several stages of a pipeline have copies of train as the one weight that they are in one process."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_cases import CPU, SCHEDULES, gradients, mesh_of
from tied_cases import MICROS, WIDTH, WORDS, Alone, Pipe, batch, loss_of, part, whole
from torch import Tensor, nn
from worlds import World, full, on_ranks, ranked, step_and_zero

import zerokern as zk

LIMIT = 0.05  # of the norm, which every step is above


def close(found: dict[str, Tensor], expected: dict[str, Tensor], where: Any) -> None:
    assert found
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=2e-4, atol=2e-6, msg=lambda said, name=name: f"{where} {name}: {said}"
        )


def copies_are_alike(world: World, models: list[nn.Module]) -> None:
    names = ("words.weight", "head.weight", "more.weight")
    mine = [
        (value.sum().item(), value.mul(3).cos().sum().item())
        for model in models
        for name, value in full(model).items()
        if name in names
    ]
    assert len({one for some in world.exchange(mine) for one in some}) == 1


def opt_of(pipe: Pipe, **settings: Any) -> Any:
    return zk.AdamW(pipe.params(), lr=1e-2, max_grad_norm=LIMIT, group=pipe.mesh["pp"], **settings)


def as_one_process(pipe: Pipe, alone: Alone, opt: Any, steps: Iterable[int], about: Any) -> None:
    for step in steps:
        where = (about, step)
        losses, expected = pipe.step(*batch(alone.seed, step, pipe.dp)), alone.step(step)
        torch.testing.assert_close(losses, expected[pipe.dp] if losses else [], rtol=2e-5, atol=0.0)
        close(gradients(pipe.models), {name: param.grad for name, param in alone.named().items()}, where)
        norm = nn.utils.clip_grad_norm_(alone.model.parameters(), LIMIT)
        step_and_zero(opt)
        alone.opt.step()
        if opt.grad_norm is not None:
            assert math.isclose(opt.grad_norm, norm.item(), rel_tol=1e-5), (where, opt.grad_norm, norm)


@ranked
def trained(world: World, rows: list[tuple[str, int, int, int]], steps: int, settings: Any) -> None:
    """`settings`: of the optimizer."""
    for name, stage, uses, pp in rows:
        pipe = Pipe(name, 0, uses, pp, stage=stage)
        alone, opt = Alone(0, uses, pipe.count, world.size // pp), opt_of(pipe, **settings)
        for step in range(steps):
            as_one_process(pipe, alone, opt, [step], (name, stage, uses, pp))
            copies_are_alike(world, pipe.models)


def test_as_one_weight_of_one_process() -> None:
    on_ranks(4, trained, [("1F1B", 2, 2, 2), ("ZBVZeroBubble", 3, 3, 2), ("GPipe", 0, 2, 4)], 2, {})


@pytest.mark.slow
def test_every_schedule() -> None:
    on_ranks(4, trained, [(name, number % 4, 2 + number % 2, 2) for number, name in enumerate(SCHEDULES)], 3, {})


@pytest.mark.slow
def test_updates_under_way() -> None:
    settings = {"tier": "cpu", "schedule": "overlap"}
    on_ranks(4, trained, [("1F1B", 3, 2, 2), ("Interleaved1F1B", 2, 3, 2)], 6, settings)


@ranked
def clipped_apart(world: World, stage: int) -> None:
    """zk.clip_grad_norm_ counts the weight once, and a NaN at one stage skips the step of all copies."""
    pipe, alone = Pipe("1F1B", 0, 2, 2, stage=stage), Alone(0, 2, 2, 2)
    opt = zk.AdamW(pipe.params(), lr=1e-2, group=pipe.mesh["pp"])
    for step in range(2):
        pipe.step(*batch(0, step, pipe.dp))
        alone.step(step)
        for kind in (2.0, math.inf):
            norm = zk.clip_grad_norm_(pipe.params(), 1e9, norm_type=kind, group=pipe.mesh["pp"])
            expected = nn.utils.clip_grad_norm_(alone.model.parameters(), 1e9, norm_type=kind)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        step_and_zero(opt)
        alone.opt.step()
    before = [full(model) for model in pipe.models]
    handles = [model.head.weight.register_hook(lambda grad: grad * math.nan) for model in pipe.models if model.head]
    pipe.step(*batch(0, 3, pipe.dp))
    for handle in handles:
        handle.remove()
    opt.step()
    assert opt.skipped_steps == 1
    for model, kept in zip(pipe.models, before, strict=True):
        for name, value in full(model).items():
            assert torch.equal(value, kept[name])
    opt.zero_grad()
    pipe.step(*batch(0, 4, pipe.dp))
    opt.step()
    copies_are_alike(world, pipe.models)


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_one_norm_and_one_decision(stage: int) -> None:
    on_ranks(4, clipped_apart, stage)


@ranked
def added_up(world: World, stage: int) -> None:
    """Steps add up, a copy that is used nowhere has the others' gradient, and a weight without any has none."""
    pipe, alone = Pipe("1F1B", 0, 2, 2, stage=stage), Alone(0, 2, 2, 2)
    sums: dict[str, Tensor] = {}
    for step in range(2):
        pipe.step(*batch(0, step, pipe.dp))
        alone.step(step)
        sums = {name: param.grad + sums.get(name, 0.0) for name, param in alone.named().items()}
        close(gradients(pipe.models), sums, (stage, step))
    for param in pipe.params():
        param.grad = None
    for model in pipe.models:
        if model.head is not None:
            model.head.forward = lambda x: x.repeat(1, 1, 9)[..., :WORDS].contiguous()  # type: ignore[method-assign]
    pipe.step(*batch(0, 2, pipe.dp))
    found = gradients(pipe.models)
    told = world.exchange({name: one.abs().sum().item() for name, one in found.items() if WORDS in one.shape})
    assert len({value for one in told for value in one.values()}) == 1 and all(told), told
    for param in pipe.params():
        param.grad = None
    for model in pipe.models:
        if model.words is not None:
            model.words.forward = lambda x: torch.ones(*x.shape, WIDTH)  # type: ignore[method-assign]
    pipe.step(*batch(0, 3, pipe.dp))
    assert all(WORDS not in value.shape for value in gradients(pipe.models).values())


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_steps_and_copies_add_up(stage: int) -> None:
    on_ranks(4, added_up, stage)


@ranked
def elsewhere(world: World, folder: Path) -> None:
    """Parameters, state and gradients that rest on a disk; copies stay alike."""
    nvme = zk.Nvme(folder / f"rank{world.rank}", ring_nbytes="1M")
    for shard, of_opt in (
        ({"stage": 3, "tier": nvme}, {"tier": zk.Nvme(folder / f"state{world.rank}", ring_nbytes="1M")}),
        ({"stage": 2}, {"schedule": zk.Delayed(after=1)}),
    ):
        pipe, alone = Pipe("1F1B", 0, 2, 2, **shard), Alone(0, 2, 2, 2)
        opt = opt_of(pipe, **of_opt)
        for step in range(3):
            pipe.step(*batch(0, step, pipe.dp))
            if not step:
                alone.step(step)
                close(gradients(pipe.models), {k: p.grad for k, p in alone.named().items()}, shard)
            step_and_zero(opt)
            copies_are_alike(world, pipe.models)


@pytest.mark.slow
def test_at_other_tiers(tmp_path: Path) -> None:
    on_ranks(4, elsewhere, tmp_path)


def refused(what: str) -> str:
    pipe = Pipe("1F1B", 0, 2, 2, stage=2)
    words = {"lr": 1e-2}
    if what == "alone" and pipe.stages[0].is_last:
        pipe.stages[0].tied = {}
    if what == "values":
        with torch.no_grad(), zk.gathered(pipe.models[0], write=True):
            for name, param in pipe.models[0].named_parameters():
                if name == "head.weight":
                    param[WORDS - 1, WIDTH - 1] += 1e-3
    if what == "frozen":
        for model in pipe.models:
            if model.head is not None:
                model.head.weight.requires_grad_(False)
    if what == "options" and pipe.stages[0].is_last:
        words = {"lr": 2e-2}
    opt = zk.AdamW(pipe.params(), group=pipe.mesh["pp"], **words)
    try:
        for step in range(3):
            pipe.step(*batch(0, step, pipe.dp))
            step_and_zero(opt)
    except zk.StateError as error:
        return str(error)
    return "nothing"


@ranked
def in_three_dimensions(world: World, stages: list[int]) -> None:
    """pp 2 x dp 2 x tp 2, words and head divided along tp by rows; and pp 2 x HSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    meshes = [init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", last)) for last in ("tp", "shard")]
    number, dp = meshes[0].get_local_rank("pp"), meshes[0].get_local_rank("dp")
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    for stage in stages:
        for hybrid, mesh in enumerate(meshes):
            model, tied = part(whole(0, 2, 2), number)
            weight = "words" if number == 0 else "head"
            if not hybrid:
                there = {name: how for name, how in plan.items() if getattr(model, name, 1) is not None}
                parallelize_module(model, mesh["tp"], there)
                tied = {"words.weight": getattr(model, weight).weight}
                assert tied["words.weight"].placements == (Shard(0),)
            zk.shard(model, stage=stage, mesh=mesh["dp", "shard"] if hybrid else mesh["dp"])
            one = zk.PipelineStage(model, number, 2, CPU, group=mesh.get_group("pp"), tied=tied)
            schedule = SCHEDULES["1F1B"][0](one, MICROS, loss_fn=loss_of)
            opt = zk.AdamW(model.parameters(), lr=1e-2, max_grad_norm=LIMIT, group=mesh["pp"])
            mine = 2 * dp + mesh.get_local_rank("shard") if hybrid else dp
            alone = Alone(0, 2, 2, 4 if hybrid else 2)
            for step in range(2):
                x, y = batch(0, step, mine)
                schedule.step(*([x] if number == 0 else []), target=y if number else None)
                alone.step(step)
                norm = nn.utils.clip_grad_norm_(alone.model.parameters(), LIMIT)
                step_and_zero(opt)
                alone.opt.step()
                assert math.isclose(opt.grad_norm, norm.item(), rel_tol=1e-5), (stage, hybrid, step)
                found = full(model)
                if not hybrid:
                    found = {
                        name: one.full_tensor() if hasattr(one, "placements") else one for name, one in found.items()
                    }
                for name, value in found.items():
                    torch.testing.assert_close(value, alone.named()[name].detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_beside_tensor_parallelism_and_copies() -> None:
    on_ranks(8, in_three_dimensions, [3, 1], timeout=200)


def test_strange_arguments() -> None:
    from zerokern.parallel.tied_stages import check_tied

    part = nn.Linear(2, 2)
    assert check_tied(None, part) == {}
    with pytest.raises(TypeError, match="parameters by name"):
        check_tied([part.weight], part)
    with pytest.raises(ValueError, match="of this stage's module"):
        check_tied({"weight": nn.Linear(2, 2).weight}, part)
    with pytest.raises(ValueError, match="one name for each"):
        check_tied({"a": part.weight, "b": part.weight}, part)


@ranked
def made_anew(world: World, rows: list[tuple[str, int]]) -> None:
    """Other stages over the same modules, and a schedule that was refused before another pipeline's begins."""
    for name, stage in rows:
        pipe = Pipe(name, 0, 2, 2, stage=stage)
        alone, opt = Alone(0, 2, pipe.count, 2), opt_of(pipe)
        as_one_process(pipe, alone, opt, range(1), name)
        with zk.no_sync(pipe.models[0]), pytest.raises(zk.StateError, match="no_sync"):
            pipe.step(*batch(0, 2, pipe.dp))
        kind, each = SCHEDULES[name]
        pipe.stages = [
            zk.PipelineStage(one.submod, one.stage_index, one.num_stages, CPU, group=one.group, tied=one.tied)
            for one in pipe.stages
        ]
        pipe.schedule = kind(pipe.stages if each > 1 else pipe.stages[0], MICROS, loss_fn=loss_of)
        as_one_process(pipe, alone, opt, range(1, 3), name)
        other = Pipe(name, 1, 2, 2, stage=stage)
        as_one_process(other, Alone(1, 2, other.count, 2), opt_of(other), range(1), name)
        as_one_process(pipe, alone, opt, range(3, 4), name)
        gone = [weakref.ref(model) for model in other.models]
        del other
        gc.collect()
        assert all(one() is None for one in gone)


@pytest.mark.slow
def test_stages_made_anew_and_two_pipelines_of_one_group() -> None:
    on_ranks(4, made_anew, [("ZBVZeroBubble", 3)])


def refused_alike() -> str:
    """A weight that differs in one rank's part alone, cut alike at both ends."""
    mesh = mesh_of(2)
    number = mesh.get_local_rank("pp")
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    if number:
        model.weight.data[-1, -1] = 2.0
    zk.shard(model, mesh=mesh["dp"], stage=2)
    stage = zk.PipelineStage(model, number, 2, CPU, group=mesh.get_group("pp"), tied={"w": model.weight})
    schedule = SCHEDULES["1F1B"][0](stage, 4, loss_fn=lambda a, b: (a - b).pow(2).mean())
    x = torch.randn(8, 64)
    try:
        schedule.step(*([] if number else [x]), target=x if number else None)
    except zk.StateError as error:
        first = str(error)
    stage.tied = {"w": nn.Parameter(torch.ones(64, 64))}
    with pytest.raises(zk.StateError, match="has another parameter now"):
        schedule.step(*([] if number else [x]), target=x if number else None)
    return first


SAYS = {
    "alone": "names 'words.weight' in tied=, and no other stage does",
    "values": "pipeline stages have different values of 'words.weight'",
    "frozen": "is trained at one of them and frozen at another",
    "options": "has other values at one of them since the last step",
}


@ranked
def all_refused(world: World) -> None:
    for what, words in SAYS.items():
        said = refused(what)
        assert words in said, (what, said)
    assert "different values of 'w'" in refused_alike()


def test_what_is_refused_by_name_on_all_ranks() -> None:
    on_ranks(4, all_refused)


@ranked
def other_ends(world: World, folder: Path) -> None:
    """Each end at another stage of ZeRO, or another tier."""
    first = mesh_of(2).get_local_rank("pp") == 0
    disk = zk.Nvme(folder / f"rank{world.rank}", ring_nbytes="1M")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stage": 3, "tier": disk}, {"stage": 3}),
        ({"stage": 2}, {"stage": 3, "tier": "cpu"}),
        *(({"stage": one}, {"stage": other}) for one, other in ((0, 1), (1, 3), (3, 0), (2, 1))),
    ]
    for pair in pairs:
        pipe = Pipe("1F1B", 0, 2, 2, **pair[0 if first else 1])
        as_one_process(pipe, Alone(0, 2, 2, 2), opt_of(pipe), range(2), pair)


@pytest.mark.slow
def test_ends_that_are_divided_otherwise(tmp_path: Path) -> None:
    on_ranks(4, other_ends, tmp_path)
