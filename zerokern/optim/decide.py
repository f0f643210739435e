"""Whether a step is carried out, and what its gradients are multiplied by: what is known when `step()` is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zerokern.optim import checks

__all__ = ["Decision"]


class Decision:
    """`take` says the scale, or None for a step that is to be skipped; it may be asked later, on another thread.

    `sums` measures the gradients, `total` makes one sum of squares of that (over all ranks, where they are divided).
    `reading` says how a tensor is read later that may lie on a device, and may be written until then.

    >>> decision = Decision(grad_scale=2.0, max_norm=1.0, sums=lambda: [16.0], total=lambda sums, skip: sums[0])
    >>> decision.take(), decision.norm
    (0.2499998750000625, 2.0)
    """

    def __init__(
        self,
        *,
        found_inf: Any = None,
        grad_scale: Any = None,
        fold: float | Tensor = 1.0,
        max_norm: float | None = None,
        sums: Callable[[], Sequence[float]],
        total: Callable[[Sequence[float], bool], float] | None,
        reading: Callable[[Any], Callable[[], Any]] | None = None,
    ) -> None:
        # GradScaler writes into its tensors after the step that it handed them to
        reading = reading or _kept
        self._found_inf, self._grad_scale, self._fold = reading(found_inf), reading(grad_scale), reading(fold)
        self._max_norm = max_norm
        self._sums, self._total = sums, total
        self.norm: float | None = None
        self.scale: float | None = None
        self.taken = self.accounted = False

    def take(self) -> float | None:
        """The factor for all gradients: loss scale undone, then clipped; None where nothing may change."""
        if not self.taken:
            self.scale = self._decide()
            self.taken = True
        return self.scale

    def _decide(self) -> float | None:
        found_inf, found, fold = self._found_inf(), self._grad_scale(), self._fold()
        skip = found_inf is not None and bool(float(found_inf))
        if skip and self._total is None:
            return None
        scale = 1.0 if found is None else 1.0 / checks.number("grad_scale", found, positive=True)
        if self._max_norm is None and self._total is None:
            return scale
        sums = self._sums()
        total = sums[0] if self._total is None else self._total(sums, skip)
        if skip:
            return None
        scale *= float(fold)
        self.norm = math.sqrt(total) * scale
        if not math.isfinite(self.norm):
            return None
        return scale if self._max_norm is None else scale * min(1.0, self._max_norm / (self.norm + 1e-6))


def _kept(value: Any) -> Callable[[], Any]:
    kept = value.detach().clone() if isinstance(value, Tensor) else value
    kept = kept.cpu() if isinstance(kept, Tensor) else kept
    return lambda: kept
