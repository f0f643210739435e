"""One device and its host: a bf16 GPT, the steps of everyone who trains it, and the losses that they must have.

Blocks are recomputed in the backward pass where 64k tokens must fit beside the parameters; for everyone alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerokern as zk
from zerokern.examples.model import GPT, VOCABULARY, Shape
from zerokern.examples.text import Batches, read_text

from .ours import DELAYED, OVERLAP, RESIDENT, SYNC, keywords, settle

HYPER = {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
MAX_NORM = 1.0
CHECKED_STEPS = 4
TOLERANCE = 5e-3  # of a loss: a few roundings to bf16, which are 2**-9 each, averaged over a batch
SHARDED = 2
OFFLOADED = (SYNC, OVERLAP, DELAYED)
FORMATS = {
    "exact": {"state_format": "fp32", "master_format": "split16"},
    "int8": {"state_format": "int8", "master_format": "split8"},
}
HOST_BYTES = {"exact": 26.0, "int8": 12.1}  # that the update of one parameter moves

Update = Callable[[], object]


@dataclass(frozen=True)
class Stage:
    """Where training happens: a device, a shape of model, and batches of any number of tokens.

    With `recompute` the blocks keep nothing for the backward pass.
    """

    device: torch.device
    shape: Shape
    recompute: bool = True
    words: int = VOCABULARY

    def model(self, dtype: torch.dtype = torch.bfloat16) -> GPT:
        """The same values for everyone, which bf16 holds exactly; made where they will lie."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.random.fork_rng(), torch.device(self.device):
                torch.manual_seed(0)
                model = GPT(self.shape)
                if self.words != VOCABULARY:  # the same text, of words that it has few of
                    model.tokens = nn.Embedding(self.words, self.shape.width)
                    nn.init.normal_(model.tokens.weight, std=0.02)
        finally:
            torch.set_default_dtype(before)
        return recomputing(model.to(dtype)) if self.recompute else model.to(dtype)

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        rows = max(1, tokens // self.shape.context)
        inputs, targets = Batches(read_text(), rows, self.shape.context, seed=0).next()
        return inputs.to(self.device), targets.to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def recomputing(model: GPT) -> GPT:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


@dataclass(frozen=True)
class Trainer:
    """`step` takes a batch and returns its loss; `settle` waits for an update that is still under way."""

    step: Callable[[Tensor, Tensor], Tensor]
    settle: Callable[[], object] = lambda: None


def plain_loop(model: nn.Module, update: Update) -> Callable[[Tensor, Tensor], Tensor]:
    """The loop that everyone writes; `update` clips, steps and drops the gradients."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        update()
        return loss.detach()

    return step


def ours(
    stage: Stage, name: str, form: str, seen: Callable[[nn.Module, Any], object] | None = None, **more: Any
) -> Trainer:
    """zk.AdamW with its state on the device, or on the host in one of the schedules; with `more` of its arguments.

    Under zk.shard, where a block's forward waits for its own parameters: plain ones are complete when step() returns.
    `seen` gets the model and its optimizer.
    """
    model = stage.model() if name == RESIDENT else zk.shard(stage.model(), stage=SHARDED)
    given = {"max_grad_norm": MAX_NORM, **FORMATS[form], **keywords(name), **HYPER, **more}
    optimizer: Any = zk.AdamW(model.parameters(), **given)
    if seen is not None:
        seen(model, optimizer)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(plain_loop(model, update), functools.partial(settle, optimizer, name))


def compute_only(stage: Stage) -> Trainer:
    """Forward and backward; parameters stay what they are."""
    model = stage.model()
    return Trainer(plain_loop(model, model.zero_grad))


def truth(stage: Stage, batch: Sequence[Tensor], delayed: bool = False) -> list[float]:
    """The losses of plain fp32 training; `delayed`: each update is published a call late, and made before."""
    model = stage.model(torch.float32)
    shown = list(model.parameters())
    hidden = [nn.Parameter(param.detach().clone()) for param in shown] if delayed else shown
    optimizer = torch.optim.AdamW(hidden, foreach=True, **HYPER)

    @torch.no_grad()
    def update() -> None:
        for own, param in zip(hidden, shown, strict=True):
            if delayed:
                param.copy_(own)
                own.grad, param.grad = param.grad, None
        nn.utils.clip_grad_norm_(hidden, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    step = plain_loop(model, update)
    return [step(*batch).item() for _ in range(CHECKED_STEPS)]
