"""Versions rise where values have changed, and nowhere else: autograd goes by them."""

from __future__ import annotations

import pytest
import torch
from reference_programs import Run, same_as_plain
from torch import nn
from worlds import World, on_threads, refusal, says
from zero_cases import make_adamw, mse


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_forward_two_optimizers(stage: int) -> None:
    """Autograd compares versions: those of what the first optimizer did not update must not have risen."""

    def program(run: Run) -> None:
        model = run.model
        late = run.optimizer([*model.blocks[1:].parameters(), *model.leave.parameters()])
        early = run.optimizer([*model.enter.parameters(), *model.blocks[0].parameters()])
        for step in range(2):
            loss = mse(model, step, run.world)
            hidden = model.blocks[0](model.enter(torch.ones(2, 6)))
            run.backward(loss)
            late.step()
            model.zero_grad()
            run.backward(hidden.square().mean())
            early.step()
            model.zero_grad()

    same_as_plain(2, program, stage=stage, bucket_bytes=600)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_over_values_that_were_updated_is_refused_on_every_rank(stage: int) -> None:
    """Also on those that own nothing of the parameter."""

    def work(world: World) -> None:
        model = world.shard(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)), stage=stage)
        optimizer = make_adamw(model.parameters())
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        says(refusal(lambda: loss.backward(), RuntimeError), ["inplace"])

    on_threads(3, work)
