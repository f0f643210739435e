"""What people do with modules, as models of `zerokern bench right`, to be followed on meshes and on real ranks.

On two ranks, in every mode, the bench's programs are those of tests/conformance.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import World
from zero_cases import Case, Net, batch, mse

layers, modules, nets, optimizers, recomputing = (
    import_module(f"zerokern.bench.right.programs.{name}")
    for name in ("layers", "modules", "nets", "optimizers", "recomputing")
)
Mixture, Reordered = modules.Experts, modules.Ordered


def next_word(model: nn.Module, step: int, world: Any) -> Tensor:
    return modules.tied_head_and_embedding(world, model, step)


def routed(model: nn.Module, step: int, world: World) -> Tensor:
    """Rank 0 alone chooses `left` in steps 0 and 1, nobody does in step 2, rank 1 does in step 3."""
    x, y = batch(step, world.rank)
    chosen = {0: 0, 1: 0, 2: -1, 3: 1}[step] == world.rank
    return F.mse_loss(model(x, "left" if chosen else "right"), y)


def left_out_here(model: nn.Module, step: int, world: World) -> Tensor:
    """A whole unit that only rank 0 runs: right where nothing is gathered."""
    model.order = (0, 1) if world.rank else (0, 1, 2)
    return mse(model, step, world)


def in_another_order(model: nn.Module, step: int, world: World) -> Tensor:
    model.order = [(0, 1, 2), (2, 0, 1), (1,), (2, 1, 0, 2)][step]
    return mse(model, step, world)


def autocast(model: nn.Module, step: int, world: World) -> Tensor:
    x, y = batch(step, world.rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    return F.mse_loss(out.float(), y)


def twice(loss: Tensor) -> None:
    """Two passes through one graph."""
    loss.backward(retain_graph=True)
    loss.backward()


EXPERTS = Case("experts chosen by some ranks", Mixture, routed, steps=4)
CASES = [
    Case("plain", Net),
    Case("tied", nets.Tied, next_word),
    Case("tied across units", modules.one_weight_in_two_blocks),
    Case("frozen in part", modules.frozen_in_part),
    Case("unused everywhere", modules.UnusedParametersAndABlock),
    EXPERTS,
    Case("a unit unused on some ranks", Reordered, left_out_here, stages=(0, 1, 2)),
    Case("used outside of its module", modules.WeightsOfABlockReadByTheRoot),
    Case("repeated", modules.BlocksRunSeveralTimes),
    Case("twice in the list", modules.OneBlockTwiceInTheList),
    Case("nested units", modules.NetsInANet),
    Case("LoRA on a frozen base", modules.lora_on_a_frozen_base),
    Case("units in another order", Reordered, in_another_order, steps=4),
    Case("checkpointed", recomputing.EachBlockRecomputed),
    Case("checkpointed inside", recomputing.ACheckpointWithinEachBlock),
    Case("one checkpoint over several units", recomputing.CheckpointsOverSeveralBlocks),
    Case("nested checkpoints", recomputing.CheckpointsWithinCheckpoints),
    Case("autocast", Net, autocast),
    Case("structured outputs", modules.DataclassesBetweenBlocks),
    Case("two backward passes", Net, backward=twice, one_order=False),
    Case("odd parameters", modules.OddParameters),
    Case("torch's transformer", layers.a_transformer_encoder),
    Case("recurrent", layers.LstmAndGru),
    Case("expanded gradients", modules.ScalarsThatAreSummed),
]


class GivesNone(torch.autograd.Function):
    """The product of `x` and a weight, whose backward has a gradient for those of the two that `gives` names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gives: str) -> Tensor:
        ctx.gives = gives
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight if "x" in ctx.gives else None, grad.t() @ x if "w" in ctx.gives else None, None


class EndsInNone(Net):
    """What lies before the last layer has a gradient only where `gives` names `x`; autograd calls its hooks anyway."""

    gives = "xw"

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return GivesNone.apply(x, self.leave.weight, self.gives)
