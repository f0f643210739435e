"""Whole training steps on one device: who takes part, what losses everyone must have, and what a step's time means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerokern.examples.model import Shape

from ..contest import Missing, Provider, WrongResult
from ..offload import device
from ..run import Outcome
from .clock import Clock, Run
from .report import Desk

# dense bf16 TFLOP/s as the maker's data sheets say, by a part of the name; the first that fits counts
PEAKS = {
    "GB200": 2500.0, "B200": 2250.0, "H100 PCIe": 756.0, "H100 NVL": 835.5, "H100": 989.4, "H200": 989.4, "A100": 312.0,
    "L40S": 362.05, "RTX 4090": 165.2,
}  # fmt: skip


@dataclass
class Entrant:
    """Trains from one contest to the next; checked once, on the batch whose losses are known."""

    name: str
    build: Callable[[], device.Trainer]
    truth: Callable[[], Sequence[float]]
    checked_on: Sequence[torch.Tensor]
    batch: Sequence[torch.Tensor] = ()
    trainer: device.Trainer | None = None
    why_not: str = ""

    def run(self) -> None:
        assert self.trainer is not None
        self.trainer.step(*self.batch)

    def settle(self) -> None:
        if self.trainer is not None:
            self.trainer.settle()

    def check(self) -> None:
        if self.why_not:
            raise Missing(self.why_not)
        if self.trainer is None:
            try:
                self._begin()
            except Exception as error:
                self.trainer, self.why_not = None, str(error).strip() or type(error).__name__
                raise

    def _begin(self) -> None:
        self.trainer = self.build()
        for number, want in enumerate(self.truth(), 1):
            got = self.trainer.step(*self.checked_on).item()
            if not abs(got - want) <= device.TOLERANCE * want:
                raise WrongResult(f"{self.name}: the loss of step {number} is {got:.5f}, in fp32 it is {want:.5f}")

    def provider(self, nbytes: float, *, lossy: str = "", wiring: str = "") -> Provider:
        """`nbytes`: what its optimizer must move in a step."""
        return Provider(
            name=self.name, run=self.run, check=self.check, nbytes=nbytes, use_threads=lambda count: None, lossy=lossy,
            wiring=wiring or self.name,
        )  # fmt: skip


@dataclass
class Settled:
    """A clock after whose samples nothing is under way: nobody shares the machine with the work of another."""

    clock: Clock
    entrants: Sequence[Entrant]

    def sample_ns(self, run: Run, repeats: int) -> float:
        ns = self.clock.sample_ns(run, repeats)
        for entrant in self.entrants:
            entrant.settle()
        return ns


def flops_per_token(shape: Shape) -> float:
    """Of a step of training; what is recomputed in the backward pass counts for nothing, as usual in an MFU.

    >>> flops_per_token(Shape(layers=20, width=2048, context=1024)) / 6e9  # doctest: +ELLIPSIS
    1.0933...
    """
    return 6.0 * shape.numel + 12.0 * shape.layers * shape.width * shape.context


def peak_tflops(name: str) -> float | None:
    """What the device of this name could compute at most; None where no data sheet is known.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("a new one")
    (989.4, None)
    """
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def tell_speeds(desk: Desk, title: str, outcome: Outcome, shape: Shape, tokens: int, compute: str = "") -> None:
    """Tokens per second, their share of the device's peak, and, against the row `compute`, the exposed time in %."""
    if desk.settings.rehearse:
        return
    name = torch.cuda.get_device_name(desk.settings.device)
    peak, told = peak_tflops(name), {}
    for row in outcome.rows:
        rate = tokens / row.ns.median * 1e9
        found: dict[str, float] = {"tokens_per_s": round(rate)}
        if peak is not None:
            found["mfu"] = round(rate * flops_per_token(shape) / peak / 1e12, 4)
        if compute in row.ratio:
            found["exposed_percent"] = round(100 * (1 - row.ratio[compute].median), 2)
        told[row.name] = found
    desk.fact(f"{title}: whole steps", {"device": name, "peak_tflops": peak, "tokens": tokens, "rows": told})
