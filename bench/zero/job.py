"""What every contender trains: a GPT, its start, and the batches of each rank."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerokern.core.errors import got
from zerokern.examples.model import GPT, HEAD_WIDTH, Shape
from zerokern.examples.text import Batches, read_text

from .parallel import divide, divisible, mesh

MODELS = {
    "tiny": Shape(layers=2, width=64, context=32),
    # sequences are short so that the batch, which sets the share of communication, can be chosen finely
    "25M": Shape(layers=8, width=512, context=32),
    "100M": Shape(layers=14, width=768, context=32),
}
DTYPES = ("fp32", "bf16")
MAX_NORM = 1.0
# a large eps: otherwise Adam forgives gradients of a wrong scale, and the losses would not tell
HYPER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
TEXT_NBYTES = 1 << 20
KEPT_BATCHES = 8


@dataclass(frozen=True)
class Job:
    """One contest: model, numbers, ranks, sequences per rank (0: yet to be chosen).

    In "bf16" everyone computes in bf16 and keeps what an fp32 master knows. `tp` ranks share each model by torch's
    tensor parallelism; data parallelism is over the rest. `wirings` tells by name which wiring a
    contender uses (its first where it is not told); `names` are those that take part (all where it is empty).
    """

    model: str
    dtype: str
    ranks: int
    batch: int
    threads: int = 1
    peers: tuple[str, ...] = ()
    wirings: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    tp: int = 1

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @property
    def numel(self) -> int:
        return self.shape.numel

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bf16"

    @property
    def name(self) -> str:
        """
        >>> Job("25M", "fp32", 2, 4).name
        'GPT 25M, fp32, 2 ranks'
        """
        return f"GPT {self.model}, {self.dtype}, {self.ranks} ranks" + (f", tp {self.tp}" if self.tp > 1 else "")

    @property
    def dp(self) -> int:
        """How many ranks train on rows of their own."""
        return self.ranks // self.tp

    @property
    def tokens(self) -> int:
        """What all ranks train on in one step."""
        return self.dp * self.batch * self.shape.context

    def with_batch(self, batch: int) -> Job:
        return dataclasses.replace(self, batch=batch)

    def build_model(self) -> GPT:
        """The same fp32 values on every rank and for every contender."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return GPT(self.shape) if self.tp == 1 else divisible(GPT(self.shape))

    def refuse(self) -> None:
        """Where so many ranks cannot share it."""
        heads = self.shape.width // HEAD_WIDTH
        if self.ranks % self.tp or heads % self.tp:
            allowed = f"what divides --ranks, {self.ranks}, and the heads of the model, {heads} of {self.model}"
            raise ValueError(got("--tp", self.tp, allowed))

    def divided_model(self) -> tuple[GPT, DeviceMesh | None]:
        """This rank's part of it, and the mesh of data parallelism."""
        if self.tp == 1:
            return self.build_model(), None
        both = mesh(self.ranks, self.tp)
        return divide(self.build_model(), both), both["dp"]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "peers": tuple(fields["peers"]), "names": tuple(fields["names"])})


Batch = tuple[Tensor, Tensor]


class Data:
    """Tokens and targets of step i: those of all ranks, or the rows of one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        source = Batches(_text(), job.batch * job.dp, job.shape.context, seed=7)
        self.kept = [source.next() for _ in range(KEPT_BATCHES)]

    def of_all(self, step: int) -> Batch:
        return self.kept[step % KEPT_BATCHES]

    def of_rank(self, step: int, rank: int) -> Batch:
        first = rank // self.job.tp * self.job.batch  # those of one model are neighbours
        rows = slice(first, first + self.job.batch)
        tokens, targets = self.of_all(step)
        return tokens[rows], targets[rows]


@functools.cache
def _text() -> Tensor:
    return read_text(at_most=TEXT_NBYTES)
