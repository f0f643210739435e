"""Pipeline x ZeRO x tensor parallelism on eight processes, beside the undivided model in each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipeline_cases import CPU, MICROS, Model, batch, loss_of, part
from tensor_parallel_cases import whole
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import built, on_ranks

import zerokern as zk

STEPS, BAD = 4, 2  # the step in which one rank of one stage has a gradient that is not finite
HYPER: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.3}


def trained(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    for stage in range(4):
        train(rank, mesh, stage)


def train(rank: int, mesh: DeviceMesh, stage: int) -> None:
    number, dp, tp = (mesh.get_local_rank(name) for name in ("pp", "dp", "tp"))
    mine, alone = part(built(Model, 0), number, 2), built(Model, 0)
    for block in mine.blocks.values():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    zk.shard(mine, stage=stage, mesh=mesh["dp"])
    pipe = zk.PipelineStage(mine, number, 2, CPU, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipe, MICROS, loss_fn=loss_of)
    opt, expected = zk.AdamW(mine.parameters(), group=mesh["pp"], **HYPER), zk.AdamW(alone.parameters(), **HYPER)
    for step in range(STEPS):
        spoils = step == BAD and (number, dp, tp) == (1, 0, 1)
        handle = mine.blocks["7"].up.weight.register_hook(lambda grad: grad * math.nan) if spoils else None
        x, y = batch(0, step, dp)
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        if handle is not None:
            handle.remove()
        for other in range(2):
            x, y = batch(0, step, other)
            loss = loss_of(alone(x), y)
            (loss / 2).backward()
            if losses and other == dp:
                assert math.isclose(torch.stack(losses).mean().item(), loss.item(), rel_tol=1e-5), (stage, step)
        if step != BAD:
            expected.step()
        expected.zero_grad()
        opt.step()
        opt.zero_grad()
        assert opt.skipped_steps == (step >= BAD), (stage, step, rank)
        if step == BAD:
            assert not math.isfinite(opt.grad_norm)
        else:
            assert math.isclose(opt.grad_norm, expected.grad_norm, rel_tol=1e-5), (stage, step)
        values = dict(alone.named_parameters())
        with zk.gathered(mine):
            for name, param in mine.named_parameters():
                torch.testing.assert_close(
                    whole(param).detach(), values[name].detach(), rtol=1e-3, atol=1e-4, msg=f"{stage} {step} {name}"
                )


@pytest.mark.slow
def test_the_numbers_of_one_process() -> None:
    """To where Adam makes much of gradients near zero: products have other shapes, and sums another order."""
    on_ranks(8, trained)
