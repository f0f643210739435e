"""A small mixture of experts, whose tokens go to the ranks that have them, beside the same in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from trained_cases import Plain, Trained, make
from worlds import built

import zerokern as zk

__all__ = ["ROUTES", "Alone", "Model", "Run", "batches", "meshes_of"]

WIDTH, HIDDEN, EXPERTS, SLOTS, ROWS = 8, 12, 4, 2, 6
ROUTES = ("any", "first", "apart", "none", "any")  # by step: which experts tokens may go to
NOWHERE = EXPERTS


@cache
def meshes_of(*sizes: int) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Of what is no expert, of experts and of their parts: (efsdp, ep), or (replicate, efsdp, ep), and their ranks."""
    names = ("replicate", "efsdp", "ep")[-len(sizes) :]
    sparse = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    together = (*sizes[:-2], sizes[-2] * sizes[-1])
    dense = init_device_mesh("cpu", together, mesh_dim_names=(*names[:-2], "dp"))
    return dense, sparse[names[:-1]], sparse["ep"]


class Experts(nn.Module):
    """Experts of one rank, or all. `up`: expert `r * SLOTS + s` is the r-th of slot s; `down`: all in one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = EXPERTS // SLOTS, WIDTH, HIDDEN
        self.up = nn.ParameterList(nn.Parameter(torch.randn(sizes) * 0.4) for _ in range(SLOTS))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.4)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """`x`: tokens in the order of experts. What nobody uses takes no part in the graph."""
        found = []
        for number, rows in enumerate(x.split(counts)):
            if len(rows):
                rank, slot = divmod(number, SLOTS)
                up, down = (one.to_local() if isinstance(one, DTensor) else one for one in (self.up[slot], self.down))
                found.append(torch.tanh(rows @ up[rank]) @ down[number])
        return torch.cat(found) if found else x.clone()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.shared = Experts(), nn.Linear(WIDTH, WIDTH)
        self.ep: DeviceMesh | None = None

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        h = self.norm(x)
        scores = (self.router(h) + allowed[:, :EXPERTS]).softmax(-1)
        best, chosen = scores.max(-1)
        chosen = torch.where(allowed[:, NOWHERE] > 0, NOWHERE, chosen)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS + 1)[:EXPERTS]
        order = order[: int(counts.sum())]
        y = self._there(h[order], counts) * best[order, None]
        return x + self.shared(h) + torch.zeros_like(x).index_add(0, order, y)

    def _there(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.ep is None:
            return self.experts(tokens, counts.tolist())
        group, size = self.ep.get_group(), self.ep.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, got = counts.view(size, -1).sum(1).tolist(), theirs.view(size, -1).sum(1).tolist()
        arrived = _exchanged(tokens, got, sent, group)
        # by rank, and of each by expert; the experts want them by expert
        places = torch.arange(size).repeat_interleave(theirs.view(size, -1).sum(1))
        which = torch.cat(
            [torch.arange(theirs.numel() // size).repeat_interleave(row) for row in theirs.view(size, -1)]
        )
        by_expert = which.argsort(stable=True)
        assert len(places) == len(arrived)
        done = self.experts(arrived[by_expert], theirs.view(size, -1).sum(0).tolist())
        return _exchanged(done[by_expert.argsort()], sent, got, group)

    def divide(self, ep: DeviceMesh) -> None:
        self.ep = ep
        for name, param in list(self.experts.named_parameters()):
            placed = nn.Parameter(distribute_tensor(param.detach(), ep, [Shard(0)]))
            owner, _, key = name.rpartition(".")
            setattr(self.experts.get_submodule(owner), key, placed)


def _exchanged(tokens: Tensor, got: list[int], sent: list[int], group: Any) -> Tensor:
    found = all_to_all_single_autograd(tokens.contiguous(), got, sent, group)
    return torch.ops._c10d_functional.wait_tensor(found)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, allowed)
        return self.last(x)

    def loss(self, x: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
        return F.mse_loss(self(x, allowed), y)


def batches(seed: int, step: int, ranks: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`count` of each of these ranks, rank after rank: which experts their tokens may go to is the step's route."""
    route = ROUTES[step % len(ROUTES)]
    for number in range(ranks * count):
        generator = torch.Generator().manual_seed(10000 * seed + 100 * step + number)
        rank, allowed = number % ranks, torch.zeros(ROWS, EXPERTS + 1)
        if route == "none":
            allowed[:, NOWHERE] = 1.0
        elif route == "first":
            allowed[:, 1:EXPERTS] = -torch.inf
        elif route == "apart":  # each half of the ranks uses one half of the experts
            half = EXPERTS // 2
            other = slice(half, EXPERTS) if 2 * rank < ranks else slice(0, half)
            allowed[:, other] = -torch.inf
        yield torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator), allowed


class Run(Trained):
    """The model on this rank, sharded at a stage: experts over `efsdp`, all else over all ranks."""

    def __init__(self, sizes: tuple[int, ...], stage: int, seed: int = 0, opt: Any = None, **settings: Any) -> None:
        self.seed, self.stage = seed, stage
        self.model = self.module = built(Model, seed=seed)
        dense, sparse, ep = meshes_of(*sizes)
        for block in self.model.blocks:
            block.divide(ep)
        mesh = {self.model: dense, **{block.experts: sparse for block in self.model.blocks}}
        zk.shard(self.model, stage=stage, mesh=mesh, **settings)
        self.opt = (opt or make)(self.model.parameters())

    def backward(self, step: int, accumulated: int = 1, held: bool = False) -> float:
        """The mean loss of all ranks. `held`: what is accumulated is reduced once."""
        total, mine = 0.0, 0
        for number, batch in enumerate(batches(self.seed, step, dist.get_world_size(), accumulated)):
            if number % dist.get_world_size() == dist.get_rank():
                mine += 1
                loss = self.model.loss(*batch) / accumulated
                if held and mine < accumulated:
                    with zk.no_sync(self.model):
                        loss.backward()
                else:
                    loss.backward()
                total += loss.item()
        found = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(found)
        return found.item() / dist.get_world_size()


class Alone(Plain):
    def __init__(self, seed: int = 0, opt: Any = None) -> None:
        self.seed = seed
        super().__init__(built(Model, seed=seed), opt)

    def backward(self, step: int, ranks: int, accumulated: int = 1) -> float:
        return self.backward_of(batches(self.seed, step, ranks, accumulated))
