"""Whole training steps of a GPT on one device: the model, its batch, and the losses that every contestant must have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

from ..contest import Provider, WrongResult
from .settings import Settings

HYPER = {"lr": 2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 1.0
CHECKED_STEPS = 4
TOLERANCE = 5e-3  # of a loss: a few roundings to bf16, which are 2**-9 each, averaged over a batch
Step = Callable[[], Tensor]


class Training:
    """One model, one batch. Whoever trains begins from the same weights, which bf16 holds exactly."""

    def __init__(self, settings: Settings) -> None:
        sizes = settings.sizes
        self.device = settings.device
        self.shape = Shape(sizes.gpt_layers, sizes.gpt_width, sizes.gpt_context)
        tokens, targets = Batches(read_text(), sizes.gpt_rows, sizes.gpt_context, seed=0).next()
        self.batch = tokens.to(self.device), targets.to(self.device)

    def model(self, dtype: torch.dtype = torch.bfloat16) -> GPT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return GPT(self.shape).bfloat16().to(device=self.device, dtype=dtype)

    def step(self, model: nn.Module, update: Callable[[], object], *, autocast: bool = False) -> Step:
        """The loop that everyone writes; `update` clips, steps and drops the gradients."""

        def run() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                loss = model(*self.batch)
            loss.backward()
            update()
            return loss.detach()

        return run

    @cached_property
    def truth(self) -> list[float]:
        """The losses of plain fp32 training."""
        model = self.model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True, **HYPER)
        step = self.step(model, clipped(model, optimizer))
        return [step().item() for _ in range(CHECKED_STEPS)]

    def provider(
        self, name: str, build: Callable[[], Step], bytes_per_parameter: float, *, wiring: str = "", lossy: str = ""
    ) -> Provider:
        """`bytes_per_parameter`: what its optimizer must move, the norm included."""
        made: list[Step] = []

        def check() -> None:
            made.append(build())
            for number, want in enumerate(self.truth, 1):
                got = made[0]().item()
                if not abs(got - want) <= TOLERANCE * want:
                    raise WrongResult(f"{name}: the loss of step {number} is {got:.5f}, in fp32 it is {want:.5f}")

        return Provider(
            name=name,
            run=lambda: made[0](),
            check=check,
            nbytes=self.shape.numel * bytes_per_parameter,
            use_threads=lambda count: None,
            lossy=lossy,
            wiring=wiring or name,
        )


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What plain PyTorch does after backward."""
    params = list(model.parameters())

    def update() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update
