"""Tensor parallelism by torch, the same for every contender: each block's heads and hidden features are divided."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

from zerokern.examples.model import GPT, HEAD_WIDTH, Block

PLAN = {"qkv": ColwiseParallel, "mix": RowwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


class HeadsFirst(Block):
    """A block whose query, key and value of one head lie side by side, so that a slice of their rows is whole heads."""

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x)

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, HEAD_WIDTH))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(mixed.transpose(1, 2).flatten(-2))


def divisible(model: GPT) -> GPT:
    """The same weights, in blocks that can be divided by heads."""
    for block in model.blocks:
        block.__class__ = HeadsFirst
    return model


@functools.cache
def mesh(ranks: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))


def divide(model: GPT, on: DeviceMesh) -> GPT:
    for block in model.blocks:
        parallelize_module(block, on["tp"], {name: style() for name, style in PLAN.items()})
    return model
