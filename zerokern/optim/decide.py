"""Whether a step is carried out, and what its gradients are multiplied by: loss scale undone, then clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import warn
from zerokern.optim import checks
from zerokern.optim.device import refuse_capture

__all__ = ["Decision", "kept", "of_scaler"]

IN_A_ROW = 10  # steps that change nothing before a warning says so
_SKIPPED = (
    "{count} steps in a row changed nothing, for their gradients were not finite: {why}. This is said once; "
    "opt.skipped_steps counts them. With float16 parameters use torch.amp.GradScaler, which lowers its scale until "
    "gradients fit; if it does and this goes on, or without one, find the first loss that is not finite"
)

Total = Callable[..., float]  # (sums, *, skip: bool)
AddUp = Callable[[Sequence[Tensor], Tensor, Tensor | None], None]


def kept(value: Any) -> Callable[[], Any]:
    """Returns a function that returns what a number is now, in host memory."""
    now = value.detach().clone().cpu() if isinstance(value, Tensor) else value
    return lambda: now


def of_scaler(opt: Any) -> tuple[Any, Any]:
    """Returns what torch.amp.GradScaler has told an optimizer of the step at hand: `found_inf` and `grad_scale`."""
    return getattr(opt, "found_inf", None), getattr(opt, "grad_scale", None)


class Decision:
    """What one optimizer decides, step by step, and what became of its steps.

    `scale`: the factor for all gradients, or None where nothing may change, once `take` has decided; that may be called
    later, on another thread. On a `device` all of it is decided there, and waited for only when it is read.

    >>> decision = Decision()
    >>> decision.ask(grad_scale=2.0, max_norm=1.0, sums=lambda: [16.0], total=lambda sums, *, skip: sums[0])
    >>> decision.take(); decision.scale, decision.grad_norm
    (0.2499998750000625, 2.0)
    """

    def __init__(self, grad_norm: float | None = None, skipped_steps: int = 0) -> None:
        self.begin(grad_norm, skipped_steps)
        self.scale: float | None = None
        self.known = True  # whether what was asked for last has been decided
        self._asked: Any = None
        self._why: Callable[[], str]  # a step was skipped

    def begin(self, grad_norm: float | None, skipped_steps: int) -> None:
        """Go on from these."""
        self._norm, self._skipped = grad_norm, skipped_steps  # as far as they are known here
        self._in_a_row, self._warned = 0, False
        # on a device: steps, and (steps, those skipped) at the last look
        self._asked_there, self._looked_at = 0, (0, 0)
        self.device: torch.device | None = None

    @property
    def grad_norm(self) -> float | None:
        """The last norm before clipping."""
        return self._norm if self.device is None or not self.has_norm else float(self.outcome[0])

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing."""
        if self.device is None:
            return self._skipped
        there, (steps, skipped) = int(self.outcome[1]), self._looked_at
        new, self._looked_at = there - skipped, (self._asked_there, there)
        all_of_them = new == self._asked_there - steps and not self.graphs  # which replay steps uncounted
        self._in_a_row = self._in_a_row + new if all_of_them else 0
        self._warn_of(self._in_a_row, "so the device found")
        return self._skipped + there

    def move(self, device: torch.device | None) -> None:
        """Decide on this device from here on, or in host memory: what another has answered until then is kept."""
        if device == self.device:
            return
        if device is not None:
            refuse_capture(device)
        self._norm, self._skipped = self.grad_norm, self.skipped_steps
        if device is not None:
            self.outcome = torch.zeros(4, dtype=torch.float64, device=device)
            self.has_norm, self._asked_there, self._looked_at = False, 0, (0, 0)
            # what launches in CUDA graphs refer to by address, for as long as there may be some
            self.graphs: list[Any] = []
        self.device = device

    def ask(
        self,
        *,
        sums: Callable[[], Sequence[float]],
        max_norm: float | None = None,
        found_inf: Any = None,
        grad_scale: Any = None,
        fold: float | Tensor = 1.0,
        total: Total | None = None,
        add_up: AddUp | None = None,
        reading: Callable[[Any], Callable[[], Any]] = kept,
    ) -> None:
        """What is to be decided next, from numbers or tensors as torch.amp.GradScaler hands them in.

        `sums` measures the gradients, `total` makes one sum of squares of that over all ranks, where they are divided;
        on a device `add_up` does, which asks for a norm. `fold`: a factor of the gradients. `reading` says how a tensor
        is read later that may lie on a device, and may be written until then: GradScaler writes into its tensors after
        the step that it handed them to.
        """
        if self.device is not None:
            self._ask_there(max_norm, found_inf, grad_scale, fold, add_up)
            return
        self._asked = reading(found_inf), reading(grad_scale), reading(fold), sums, max_norm, total
        self.known = False

    def _decide(self) -> float | None:
        inf_of, scale_of, fold_of, sums, max_norm, total = self._asked
        found_inf, found, fold = inf_of(), scale_of(), fold_of()
        skip = found_inf is not None and bool(float(found_inf))
        self._why = partial(_why, skip, self._norm, found)
        if skip and total is None:
            return None
        scale = 1.0 if found is None else 1.0 / checks.number("grad_scale", found, positive=True)
        if max_norm is None and total is None:
            return scale
        measured = sums()
        squares = measured[0] if total is None else total(measured, skip=skip)
        if skip:
            return None
        scale *= float(fold)
        self._norm = math.sqrt(squares) * scale
        self._why = partial(_why, skip, self._norm, found)
        if not math.isfinite(self._norm):
            return None
        return scale if max_norm is None else scale * min(1.0, max_norm / (self._norm + 1e-6))

    def take(self) -> None:
        """Decides what was asked, once. On a device the scale is 1.0, and what it decides."""
        if not self.known:
            self.scale = self._decide()
            self._skipped += self.scale is None
            self._in_a_row = self._in_a_row + 1 if self.scale is None else 0
            self.known, self._asked = True, None  # which refers to gradients, and to the model
            self._warn_of(self._in_a_row, self._why())

    def _warn_of(self, in_a_row: int, why: str) -> None:
        """Say once that nothing is trained any more."""
        if in_a_row >= IN_A_ROW and not self._warned:
            self._warned = True
            warn(_SKIPPED.format(count=in_a_row, why=why))

    def _ask_there(
        self, max_norm: float | None, found_inf: Any, grad_scale: Any, fold: float | Tensor, add_up: AddUp | None
    ) -> None:
        self.max_norm = math.inf if max_norm is None and add_up is not None else max_norm
        self.add_up = add_up
        self.grad_scale = None if grad_scale is None else self._scalar("grad_scale", grad_scale)
        if isinstance(fold, Tensor) or fold != 1.0:
            undone = 1.0 if self.grad_scale is None else self.grad_scale
            self.grad_scale = undone / self._scalar("fold", fold)
        self.found_inf = None if found_inf is None else self._scalar("found_inf", found_inf)
        self.scale, self.known = 1.0, True
        self._asked_there += 1

    def _scalar(self, name: str, value: Any) -> Tensor:
        """One fp32 element on the device. What is there already is not looked at: that would wait for it."""
        assert self.device is not None
        if isinstance(value, Tensor) and (value.device == self.device or not value.is_cpu):
            return value.detach().to(self.device, torch.float32, non_blocking=True)
        found = checks.number(name, value, positive=True) if name == "grad_scale" else float(value)
        return torch.full((), found, dtype=torch.float32, device=self.device)

    def launched(self) -> None:
        """The device has been given what was asked."""
        self.has_norm |= self.max_norm is not None


def _why(found_inf: bool, norm: float | None, loss_scale: Any) -> str:
    said = "the GradScaler found an infinity or NaN" if found_inf else f"their norm is {norm}"
    return said if loss_scale is None else f"{said}, with a loss scale of {float(loss_scale):g}"
