"""Small models under torch's tensor parallelism, in two dimensions of ranks, beside the same by hand and alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from trained_cases import Plain, Trained, make, whole
from worlds import built

import zerokern as zk

__all__ = ["MODELS", "Alone", "Run", "mesh_of"]

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 48, 16, 2, 6, 4


@cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """(dp, tp), or (replicate, shard, tp), whose first two are one `dp` besides."""
    names = ("dp", "tp") if len(sizes) == 2 else ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if len(sizes) == 3:
        mesh["replicate", "shard"]._flatten("dp")
    return mesh


class Layer(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size + 1), nn.Linear(4 * size + 1, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Uneven(nn.Module):
    """torch's own case: sizes 3, 16 and 17; norms between, which nobody divides."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 16, 17)
        self.ends = nn.ModuleList(nn.Linear(a, b) for a, b in ((3, 16), (16, 17), (17, 5)))
        self.layers = nn.ModuleList(Layer(size) for size in sizes)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer, end in zip(self.layers, self.ends, strict=True):
            x = end(layer(x))
        return x

    def divide(self, tp: DeviceMesh) -> None:
        how = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        for layer in self.layers:
            parallelize_module(layer, tp, how)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS, 3, generator=generator), torch.randn(ROWS, 5, generator=generator)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for one in (self.wq, self.wk, self.wv)
        )
        scores = (q @ k.transpose(-1, -2)).mul(0.3).softmax(-1)
        return self.wo((scores @ v).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.silu(self.up(self.ffn_norm(x))))


class Transformer(nn.Module):
    """As torchtitan divides its Llama: the sequence between blocks, embeddings by rows, the loss by its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.tokens(x) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))

    def divide(self, tp: DeviceMesh) -> None:
        rows = Shard(1)
        parallelize_module(
            self,
            tp,
            {
                "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=False),
                "positions": RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
                ),
                "norm": SequenceParallel(),
                "output": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
            },
        )
        for block in self.blocks:
            parallelize_module(
                block,
                tp,
                {
                    "attention_norm": SequenceParallel(),
                    "attention": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
                    "attention.wq": ColwiseParallel(),
                    "attention.wk": ColwiseParallel(),
                    "attention.wv": ColwiseParallel(),
                    "attention.wo": RowwiseParallel(output_layouts=rows, use_local_output=False),
                    "ffn_norm": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=rows, use_local_output=False),
                    "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
                },
            )

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
        return drawn[0], drawn[1]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


MODELS: dict[str, Any] = {"uneven": Uneven, "transformer": Transformer}


def batches(name: str, seed: int, step: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of one rank of data parallelism, in this step."""
    for number in range(count):
        yield MODELS[name].batch(torch.Generator().manual_seed(1000 * seed + 10 * step + number))


class Run(Trained):
    """One model on this rank of dp x tp, sharded at a stage, or by hand where that is None."""

    def __init__(
        self,
        name: str,
        sizes: tuple[int, ...],
        stage: int | None,
        seed: int = 0,
        opt: Any = None,
        change: Callable[[Any], None] = lambda model: None,
        **settings: Any,
    ) -> None:
        """`change`: what is done to the model before it is sharded."""
        self.name, self.seed, self.mesh = name, seed, mesh_of(*sizes)
        self.model = self.module = built(MODELS[name], seed=seed)
        self.model.divide(self.mesh["tp"])
        change(self.model)
        self.stage, self.dp = stage, self.mesh["dp"]
        if stage is not None:
            over = self.dp if len(sizes) == 2 else self.mesh["replicate", "shard"]
            zk.shard(self.model, stage=stage, mesh=over, **settings)
        self.opt = (opt or make)(self.model.parameters())

    def backward(self, step: int, accumulated: int = 1) -> float:
        """The mean loss of all ranks."""
        total = 0.0
        count, rank = self.dp.size(), self.dp.get_local_rank()
        for number, (x, y) in enumerate(batches(self.name, self.seed, step, count * accumulated)):
            if number % count == rank:
                before = self._put_by() if self.stage is None else []
                with loss_parallel() if self.name == "transformer" else nullcontext():
                    loss = self.model.loss(x, y) / accumulated
                    loss.backward()
                total += whole(loss).item()
                if self.stage is None:
                    self._average()
                for param, grad in before:
                    param.grad = grad.add_(param.grad)
        found = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(found, group=self.dp.get_group())
        return found.item() / count

    def _put_by(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Gradients of the micro-batches before: each is reduced, and then added to them."""
        found = [(param, param.grad) for param in self.model.parameters() if param.grad is not None]
        self.model.zero_grad()
        return found

    def _average(self) -> None:
        """What data parallelism means, of this rank's parts."""
        for param in (one for one in self.model.parameters() if one.grad is not None):
            if isinstance(param, DTensor) and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)
            local = param.grad.to_local() if isinstance(param, DTensor) else param.grad
            dist.all_reduce(local, group=self.dp.get_group())
            local /= self.dp.size()


class Alone(Plain):
    def __init__(self, name: str, seed: int = 0, opt: Callable | None = None) -> None:
        self.name, self.seed = name, seed
        super().__init__(built(MODELS[name], seed=seed), opt)

    def backward(self, step: int, count: int) -> float:
        return self.backward_of(batches(self.name, self.seed, step, count))
