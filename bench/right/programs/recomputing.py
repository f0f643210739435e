"""Activations computed twice."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..training import Run, Training
from . import loss, model
from .nets import Net


@model()
class EachBlockRecomputed(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@model()
class ReentrantCheckpoints(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@model()
class ACheckpointWithinEachBlock(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(lambda x, b=block: b.down(F.gelu(b.up(x))), block.norm(x), use_reentrant=False)
        return x


@model()
class CheckpointsOverSeveralBlocks(Net):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)


@model()
class CheckpointsWithinCheckpoints(Net):
    def body(self, x: Tensor) -> Tensor:
        def each(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        return checkpoint(each, x, use_reentrant=False)


@loss(Net)
def the_whole_model_recomputed(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    return F.mse_loss(checkpoint(training, x, use_reentrant=False), y)


@model()
class OneBlockRecomputedTwice(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = checkpoint(block, x, use_reentrant=False)
        return x


@loss(EachBlockRecomputed)
def two_forwards_of_recomputed_blocks(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) + run.mse(training, step + 50)
