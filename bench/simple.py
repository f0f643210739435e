"""The problems of the ops that are no optimizer step: sum of squares, cast and accumulate on flat tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .buffers import Buffers
from .contest import Provider, WrongResult

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SAMPLE = 1 << 20


class Squares:
    """Sum of the squares of one tensor."""

    op = "sumsq"

    def __init__(self, numel: int, dtype: torch.dtype, buffers: Buffers) -> None:
        self.numel, self.dtype = numel, dtype
        self.source = buffers.take("source", dtype).copy_(noise(numel, 1))
        self.source32 = self.source if dtype == torch.float32 else buffers.take("cast", torch.float32)
        self.truth = sum(part.double().square().sum().item() for part in self.source.split(SAMPLE))

    def provider(
        self, name: str, wiring: str, run: Callable[[], float], use_threads: Callable[[int], object], rtol: float
    ) -> Provider:
        def check() -> None:
            got = run()
            if not math.isclose(got, self.truth, rel_tol=rtol):
                raise WrongResult(f"{name} ({wiring}): sum of squares {got:.9g}, the float64 truth is {self.truth:.9g}")

        nbytes = self.numel * self.dtype.itemsize
        return Provider(name, run, check, nbytes, use_threads, streams=(1, 0, 0), wiring=wiring)


class Cast:
    """One tensor rounded or widened into another."""

    op = "cast"

    def __init__(self, numel: int, source: torch.dtype, target: torch.dtype, buffers: Buffers) -> None:
        self.numel = numel
        self.source = buffers.take("source", source).copy_(noise(numel, 1))
        self.target = buffers.take("target", target)

    def provider(
        self, name: str, wiring: str, run: Callable[[], object], use_threads: Callable[[int], object]
    ) -> Provider:
        def check() -> None:
            self.target.zero_()
            run()
            same(f"{name} ({wiring})", self.target, self.source.to(self.target.dtype))

        nbytes = self.numel * (self.source.dtype.itemsize + self.target.dtype.itemsize)
        return Provider(name, run, check, nbytes, use_threads, streams=(1, 0, 1), wiring=wiring)


class Accumulation:
    """Tensors of one dtype summed into one of another, which takes part itself if `add`."""

    op = "accumulate"

    def __init__(self, numel: int, count: int, total: torch.dtype, *, add: bool, buffers: Buffers) -> None:
        self.numel, self.add = numel, add
        self.sources = [buffers.take(f"source {i}", torch.bfloat16).copy_(noise(numel, 2 + i)) for i in range(count)]
        self.total = buffers.take("total", total)

    def provider(
        self, name: str, wiring: str, run: Callable[[], object], use_threads: Callable[[int], object]
    ) -> Provider:
        def check() -> None:
            start = noise(self.numel, 1).to(self.total.dtype)
            self.total.copy_(start)
            run()
            want = start.float() if self.add else torch.zeros(self.numel)
            for source in self.sources:
                want += source
            same(f"{name} ({wiring})", self.total, want.to(self.total.dtype))
            self.total.zero_()

        own = self.total.dtype.itemsize * (2 if self.add else 1)
        streams = (len(self.sources), int(self.add), int(not self.add))
        nbytes = self.numel * (2 * len(self.sources) + own)
        return Provider(name, run, check, nbytes, use_threads, streams=streams, wiring=wiring)


class Directions:
    """Muon's average moved by a gradient, and the bf16 direction with the sum of its squares."""

    op = "muon"
    momentum = 0.95

    def __init__(self, numel: int, dtype: torch.dtype, buffers: Buffers) -> None:
        self.numel, self._buffers = numel, buffers
        self.grad = buffers.take("grad", dtype).copy_(noise(numel, 1))
        self.out = buffers.take("out", torch.bfloat16)

    def average(self, dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.take(f"average {dtype}", dtype).zero_()

    def provider(
        self,
        name: str,
        wiring: str,
        start: Callable[[], object],
        run: Callable[[], torch.Tensor],
        use_threads: Callable[[int], object],
        width: float,
        lossy: str = "",
        rtol: float = 1e-9,
    ) -> Provider:
        """`start` makes the average 0; `run` returns sums of squares that make the whole; `width`: the average's."""

        def check() -> None:
            start()
            sums = run()
            kept = 1.0 - self.momentum
            # from an average of 0: m = (1 - momentum) g, and u = (1 - momentum) g + momentum m
            factor = kept + self.momentum * kept
            for some, grads in zip(self.out.split(SAMPLE), self.grad.split(SAMPLE), strict=True):
                off = (some.double() - factor * grads.double()).abs() > 3 * 2**-8 * (factor * grads.double()).abs()
                if off.any():
                    at = int(off.nonzero()[0])
                    raise WrongResult(f"{name} ({wiring}): element {at} is {some[at].item()}, not {factor} * gradient")
            want = sum(part.double().square().sum().item() for part in self.out.split(SAMPLE))
            if not math.isclose(sums.sum().item(), want, rel_tol=rtol):
                raise WrongResult(f"{name} ({wiring}): sum of squares {sums.sum().item():.9g}, it should be {want:.9g}")

        nbytes = self.numel * (self.grad.dtype.itemsize + 2 * width + 2)
        return Provider(name, run, check, nbytes, use_threads, streams=(1, 1, 1), lossy=lossy, wiring=wiring)


def noise(numel: int, seed: int) -> torch.Tensor:
    """Random values that repeat, so that a large tensor is filled quickly."""
    values = torch.randn(min(numel, SAMPLE), generator=torch.Generator().manual_seed(seed))
    return values.repeat(-(-numel // values.numel()))[:numel]


def same(who: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bit by bit: these ops are exact in everyone's hands."""
    if not torch.equal(got, want):
        at = (got != want).nonzero()[0].item()
        raise WrongResult(f"{who}: element {at} is {got[at].item():.9g}, it should be {want[at].item():.9g}")
