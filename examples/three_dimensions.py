"""Pipeline x ZeRO x tensor parallelism: one model on eight processes of this machine, beside the same in one.

    torchrun --standalone --nproc-per-node=8 examples/three_dimensions.py [STAGE]

Two stages of a pipeline, each there for two halves of a batch, each layer divided in two. `zk.shard` shards what the
ranks of one `dp` have alike: optimizer state, gradients (stage 2, unless another is given), parameters (stage 3).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerokern as zk
from zerokern.examples.text import Batches, read_text

WIDTH, HEADS, BLOCKS, CONTEXT = 128, 4, 4, 32
STEPS, ROWS, MICROS = 12, 16, 4
SETTINGS: dict[str, Any] = {"lr": 2e-3, "max_grad_norm": 1.0}
TENSOR_PARALLEL = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
    **dict.fromkeys(("mix", "down"), RowwiseParallel()),
}


class Block(nn.Module):
    """Of a GPT, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_attention(x)
        # as many heads as this rank has
        query, key, value = (
            one(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        x = x + self.mix(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    """Stage `number` of `count`; one stage is all of it. Blocks keep their names, so checkpoints have one form."""

    def __init__(self, number: int = 0, count: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        words, blocks, head = nn.Embedding(256, WIDTH), [Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 256)
        mine = range(number * BLOCKS // count, (number + 1) * BLOCKS // count)
        self.words = words if number == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(one): blocks[one] for one in mine})
        self.head = head if number == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_one_process() -> list[float]:
    model, batches = Model(), Batches(read_text(), ROWS, CONTEXT, seed=0)
    losses: list[float] = []
    opt = zk.AdamW(model.parameters(), **SETTINGS)
    for _ in range(STEPS):
        tokens, targets = batches.next()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def main(zero_stage: int = 2) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    number, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")

    model = Model(number, 2)
    for block in model.blocks.values():
        parallelize_module(block, mesh["tp"], TENSOR_PARALLEL)
    shard: dict[str, Any] = {"stage": zero_stage, "units": lambda module: isinstance(module, Block)}
    plan = zk.plan(model, mesh=mesh, accumulate=MICROS, **shard)
    zk.shard(model, mesh=mesh["dp"], **shard)
    stage = zk.PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROS, loss_fn=loss_of)
    opt = zk.AdamW(model.parameters(), group=mesh["pp"], **SETTINGS)  # one norm, one decision, of both stages

    batches = Batches(read_text(), ROWS, CONTEXT, seed=0)
    told = (number, replica, mesh.get_local_rank("tp")) == (1, 0, 0)  # one of those that have the losses
    expected = in_one_process() if told else []
    for step in range(STEPS):
        tokens, targets = (whole.chunk(2)[replica] for whole in batches.next())
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        measured = zk.measure(model, opt)
        opt.step()
        if losses:
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, group=mesh.get_group("dp"))
            loss /= 2
        if told:
            print(f"step {step}: loss {loss.item():.5f} in three dimensions, {expected[step]:.5f} in one process")
        opt.zero_grad()
    if told:
        sent = (f"{name} {'?' if nbytes is None else f'{nbytes / 1e6:.2f} MB'}" for name, nbytes in plan.sent.items())
        print(f"\n{measured.beside(plan)}\n\nEach rank sends in a step, as planned: {', '.join(sent)}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
