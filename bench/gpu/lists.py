"""The problem of flatten and unflatten: a list of uneven tensors, a bucket, and what the bytes and the norm must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..contest import Provider, WrongResult
from ..shapes import Shape
from .turns import COPY, in_turn

Making = Callable[[], Sequence[Provider]]
Check = Callable[["Lists", str], None]
Before = Callable[["Lists"], None]
Way = Callable[["Lists"], Callable[[], object]]
NORM_RTOL = 1e-3  # torch sums in fp32, and rounds a bf16 bucket's norm last


class Lists:
    """One set of inputs. The tensors lie in memory of their own, in odd places; the bucket holds them back to back."""

    def __init__(
        self,
        shape: Shape,
        source: torch.dtype,
        target: torch.dtype,
        device: torch.device,
        bucket: torch.Tensor | None = None,
    ) -> None:
        """`bucket`: host memory in place of memory on the device."""
        self.shape, self.device, self.crosses = shape, device, bucket is not None
        draw = torch.Generator(device).manual_seed(3)
        self.values = [torch.randn(n, device=device, generator=draw).to(source) for n in shape.numels]
        self.tensors = [value.clone() for value in self.values]
        self.bucket = torch.empty(shape.numel, dtype=target, device=device) if bucket is None else bucket
        self.want = torch.cat(self.values).to(target).to(self.bucket.device)
        self.stats = torch.empty(2, dtype=torch.float64, device=device)
        self.norm: Callable[[], float] | None = None  # read after a run, where the run makes one

    @property
    def nbytes(self) -> int:
        """Each element read once and written once; over a link, what crosses it."""
        return self.shape.numel * (self.bucket.itemsize + (0 if self.crosses else self.tensors[0].itemsize))

    def views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        return list(bucket.split(self.shape.numels))

    def root_of_stats(self) -> float:
        """The norm, from what ours reports."""
        return math.sqrt(self.stats[0].item())

    def before_flatten(self) -> None:
        self.bucket.fill_(math.nan)
        self.norm = None

    def before_unflatten(self) -> None:
        self.bucket.copy_(self.want)
        for tensor in self.tensors:
            tensor.fill_(math.nan)
        self.norm = None

    def check_bucket(self, who: str) -> None:
        _same(who, self.bucket, self.want)

    def check_tensors(self, who: str) -> None:
        _same(who, torch.cat(self.tensors), self.want.to(self.device).to(self.tensors[0].dtype))

    def check_norm(self, who: str, norm: float) -> None:
        truth = math.sqrt(sum(part.double().square().sum().item() for part in self.want.split(1 << 26)))
        if not math.isclose(norm, truth, rel_tol=NORM_RTOL):
            raise WrongResult(f"{who}: the norm is {norm:.9g}, the float64 truth is {truth:.9g}")

    def provider(self, wiring: str, run: Callable[[], object], check: Check, before: Before) -> Provider:
        """A contestant on this set; `before` poisons what it must write."""

        def checked() -> None:
            before(self)
            self._settle()
            run()
            self._settle()
            check(self, wiring)
            if self.norm is not None:
                self.check_norm(wiring, self.norm())

        return Provider(wiring, run, checked, self.nbytes, lambda count: None, COPY, wiring=wiring)

    def _settle(self) -> None:
        """The host may look at what the device has written, or write what it reads."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def making(lists: Sequence[Lists], wiring: str, way: Way, check: Check, before: Before) -> Making:
    """The maker of a contestant that takes the sets in turn."""
    return lambda: [in_turn([one.provider(wiring, way(one), check, before) for one in lists])]


def _same(who: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        at = int((got != want).nonzero()[0])
        raise WrongResult(f"{who}: element {at} is {got[at].item():.9g}, it should be {want[at].item():.9g}")
