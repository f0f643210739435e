"""Parameters that torch divides: DTensors made by hand, and models under FSDP2."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))

from optim_cases import FP32, MAKERS, same_bits
from worlds import for_each, run_ranks

from zerokern.zero.sharded import Sharded

__all__ = ["SHAPES", "Pair", "built", "cut", "local", "mesh_of", "on_ranks", "one_by_one", "tensors"]

SHAPES = ((1,), (127,), (6, 128), (7, 3), (0,), (1000,))  # uneven, and of some a rank holds nothing
DIVIDED = (Shard(0),)


def on_ranks(size: int, function: Callable, *arguments: Any) -> list:
    """What it returns on real ranks; each of them looks at its own part."""
    return run_ranks(size, function, *arguments, timeout=120.0)


def one_by_one(rank: int, works: Iterable[Callable[[int], object]]) -> None:
    """Works in one launch of ranks. Each draws random numbers of its own, whatever ran before it."""

    def seeded(rank: int, work: Callable[[int], object]) -> None:
        torch.manual_seed(zlib.crc32(work.__name__.encode()))
        work(rank)

    for_each(rank, seeded, works)


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])


def tensors(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = FP32) -> list[Tensor]:
    """The same on every rank; the squares of their elements add up exactly, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-64, 65, shape, generator=generator) / 16).to(dtype) for shape in shapes]


def cut(value: Tensor, mesh: DeviceMesh, placements: Sequence[Any] = DIVIDED) -> DTensor:
    """This rank's part of what every rank has whole; nothing is sent."""
    return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)


def local(value: Any) -> Tensor:
    """What is here of a tensor, flat."""
    if isinstance(value, Sharded):
        return value.local
    return (value.to_local() if isinstance(value, DTensor) else value).detach().reshape(-1)


class Pair:
    """An optimizer over DTensors, and the same over the whole plain tensors, on every rank."""

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        placements: Sequence[Any] = DIVIDED,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = FP32,
        **settings: Any,
    ) -> None:
        self.mesh, self.placements, self.shapes, self.dtype = mesh, placements, shapes, dtype
        whole = tensors(99, shapes, dtype)
        self.params = [nn.Parameter(cut(value, mesh, placements)) for value in whole]
        self.straight = [nn.Parameter(value.clone()) for value in whole]
        self.ours, self.reference = (MAKERS[name](list(some), **settings) for some in (self.params, self.straight))

    def set_grads(self, seed: int, scale: float = 1.0) -> None:
        for grad, param, plain in zip(tensors(seed, self.shapes), self.params, self.straight, strict=True):
            plain.grad = (scale * grad).to(self.dtype)
            param.grad = cut(plain.grad, self.mesh, self.placements)

    def train(self, seeds: Sequence[int], scale: float = 1.0) -> None:
        for seed in seeds:
            self.set_grads(seed, scale)
            self.ours.step()
            self.reference.step()

    def agree(self) -> None:
        """Each rank has its part of the bits of one process, in parameters and state."""
        for param, plain in zip(self.params, self.straight, strict=True):
            self.same(param, plain)
            entry, expected = self.ours.state[param], self.reference.state[plain]
            assert entry.keys() == expected.keys()
            for key in entry:
                assert key == "step" or entry[key].shape == expected[key].shape
                self.same(entry[key], expected[key])

    def same(self, found: Any, whole: Tensor) -> None:
        if isinstance(found, Sharded):
            expected = found.span_of(whole)
        elif isinstance(found, DTensor):
            expected = local(cut(whole.detach(), found.device_mesh, found.placements))
        else:
            expected = whole.detach().reshape(-1)
        assert same_bits([local(found)], [expected])


def built(mesh: DeviceMesh, dtype: torch.dtype = FP32, **settings: Any) -> nn.Module:
    """A model under FSDP2; no size of it fits the ranks, and most of the last layer's parameters are on one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)
