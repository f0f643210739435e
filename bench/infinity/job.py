"""What every contender trains: the job of `bench/zero` at stage 3, in steps of several micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..zero.job import Job
from ..zero.trainer import Step

# sequences of one micro-batch and rank where none are asked for: powers of two, so that a mean over micro-batches has
# the bits of the mean over all of them; few, so that bytes decide
BATCHES = {"tiny": 2, "25M": 2, "100M": 2}


@dataclass(frozen=True)
class InfinityJob(Job):
    """One contest. `batch` is that of a step, which `micro` micro-batches share; what rests on disk, in `folder`."""

    micro: int = 1
    folder: str = ""

    @property
    def name(self) -> str:
        """
        >>> InfinityJob("25M", "bf16", 2, 8, micro=4).name
        'GPT 25M, bf16, 2 ranks, 4 micro-batches'
        """
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"GPT {self.model}, {self.dtype}, {ranks}, {self.micro} micro-batch{'es' if self.micro > 1 else ''}"

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch and rank."""
        return self.batch // self.micro


def accumulating(
    module: nn.Module,
    micro: int,
    update: Callable[[], object],
    all_but_last: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """The loop that everyone writes: micro-batches one after the other, then an update of their mean.

    The loss that it returns is that mean. All backward passes but the last run within `all_but_last`.
    """

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for i, batch in enumerate(zip(tokens.chunk(micro), targets.chunk(micro), strict=True)):
            with all_but_last() if i + 1 < micro else nullcontext():
                loss = module(*batch)
                (loss / micro).backward()
            losses.append(loss.detach())
        update()
        return torch.stack(losses).mean()

    return step
