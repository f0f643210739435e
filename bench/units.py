"""Python of a unit at stage 3, forward and backward, over the plain model: zk.shard and FSDP2 on one rank, in turns.

A GPT of 12 tiny blocks, so that the host is all there is. Collectives go to torch's `fake` backend, through the classes
that serve a device, as for a group of one that is told that it is not alone; no kernel is launched for them. Calls are
exact; CPU time of the thread is not, and wants a quiet machine.

    python -m zerokern.bench.units [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import zerokern as zk
from zerokern.comm import joining
from zerokern.comm.device import DeviceGroup
from zerokern.zero.shard import shard_of

PLAIN, OURS, FSDP2, FSDP2_KEEPS = "plain", "zk.shard, stage 3", "FSDP2", "FSDP2, gathered until backward"
BLOCKS, WIDTH, WORDS, STEPS, WARM_ROUNDS = 12, 16, 64, 5, 2
UNITS = BLOCKS + 1
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).view(-1, WORDS), tokens.view(-1))


def model_of(name: str) -> Gpt:
    torch.manual_seed(0)
    model = Gpt().bfloat16()
    if name == OURS:
        zk.shard(model, stage=3, units=list(model.blocks), mesh=_group())
        reduction = shard_of(model.head.weight).sharding.reduction  # type: ignore[union-attr]
        reduction._on_host = reduction.memory.needs_scratch = False  # as on a device
    elif name != PLAIN:
        for one in (*model.blocks, model):
            fully_shard(one, reshard_after_forward=name == FSDP2)
    return model


def _group() -> DeviceGroup:
    pg: Any = dist.group.WORLD
    common = joining._common(pg, CPU)
    group = DeviceGroup(pg, common, CPU, "played")
    joining._meet(pg, group, common)
    return group


class Trained:
    """A model that is trained."""

    def __init__(self, name: str) -> None:
        self.model, self.tokens = model_of(name), torch.randint(0, WORDS, (1, 8))
        for _ in range(3):
            self.step()

    def step(self) -> tuple[float, float]:
        """Returns the CPU seconds of forward and backward."""
        begun = time.thread_time()
        loss = self.model(self.tokens)
        between = time.thread_time()
        loss.backward()
        ended = time.thread_time()
        self.model.zero_grad()
        return between - begun, ended - between

    def calls(self) -> int:
        """Returns how many Python functions forward and backward call."""
        count = 0

        def counted(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            self.model(self.tokens).backward()
        finally:
            sys.setprofile(None)
        self.model.zero_grad()
        return count


def started() -> None:
    torch.set_num_threads(1)
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)


def calls_of_units(*names: str) -> dict[str, float]:
    """Returns by name the Python calls of a unit over those of the plain model."""
    plain = Trained(PLAIN).calls()
    return {name: (Trained(name).calls() - plain) / UNITS for name in names}


def main(rounds: int) -> None:
    started()
    names = (OURS, FSDP2, FSDP2_KEEPS)
    for name, calls in calls_of_units(*names).items():
        print(f"{name:31} {calls:6.1f} calls of Python functions a unit")
    trained = {name: Trained(name) for name in (PLAIN, *names)}
    turns: dict[str, list[float]] = {name: [] for name in trained}
    for _ in range(WARM_ROUNDS + rounds):
        for name, one in trained.items():
            phases = zip(*(one.step() for _ in range(STEPS)), strict=True)
            turns[name].append(sum(map(statistics.median, phases)))
    plain, *others = (found[WARM_ROUNDS:] for found in turns.values())
    over = {
        name: [own - base for own, base in zip(found, plain, strict=True)]
        for name, found in zip(names, others, strict=True)
    }
    for name, found in over.items():
        ratio = statistics.median(one / other for one, other in zip(found, over[FSDP2], strict=True))
        print(f"{name:31} {1e6 * statistics.median(found) / UNITS:6.0f} us of CPU time a unit, {ratio:.2f} of FSDP2's")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
