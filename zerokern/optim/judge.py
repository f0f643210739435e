"""What the device decides in a step by itself: whether it is skipped, and what gradients are multiplied by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.optim import checks
from zerokern.optim.device import refuse_capture

__all__ = ["Judge"]

AddUp = Callable[[Sequence[Tensor], Tensor, Tensor | None], None]


class Judge:
    """What one optimizer asks of its device, and the device's answers, which are waited for only when they are read.

    >>> judge = Judge(torch.device("cpu"))
    >>> judge.ask(max_norm=1.0, grad_scale=2.0, found_inf=None); judge.grad_scale
    tensor(2.)
    >>> judge.skipped_steps
    0
    """

    def __init__(self, device: torch.device) -> None:
        refuse_capture(device)
        self.device = device
        self.outcome = torch.zeros(4, dtype=torch.float64, device=device)
        self.ask(max_norm=None, grad_scale=None, found_inf=None)
        self.has_norm = False
        self.graphs: list[
            Any
        ] = []  # what launches in CUDA graphs refer to by address, for as long as there may be some

    def ask(
        self,
        *,
        max_norm: float | None,
        grad_scale: Any,
        found_inf: Any,
        fold: float | Tensor = 1.0,
        add_up: AddUp | None = None,
    ) -> None:
        """What is to be considered in the next step; numbers, or tensors as torch.amp.GradScaler hands them in.

        `fold`: a factor of the gradients. `add_up` makes sums of squares those of all ranks, and asks for a norm.
        """
        self.max_norm = math.inf if max_norm is None and add_up is not None else max_norm
        self.add_up = add_up
        self.grad_scale = None if grad_scale is None else self._scalar("grad_scale", grad_scale)
        if isinstance(fold, Tensor) or fold != 1.0:
            undone = 1.0 if self.grad_scale is None else self.grad_scale
            self.grad_scale = undone / self._scalar("fold", fold)
        self.found_inf = None if found_inf is None else self._scalar("found_inf", found_inf)

    def _scalar(self, name: str, value: Any) -> Tensor:
        """One fp32 element on the device. What is there already is not looked at: that would wait for it."""
        if isinstance(value, Tensor) and (value.device == self.device or not value.is_cpu):
            return value.detach().to(self.device, torch.float32, non_blocking=True)
        found = checks.number(name, value, positive=True) if name == "grad_scale" else float(value)
        return torch.full((), found, dtype=torch.float32, device=self.device)

    @property
    def may_skip(self) -> bool:
        """Whether the next step may turn out, on the device alone, to be skipped."""
        return self.max_norm is not None or self.found_inf is not None

    @property
    def grad_norm(self) -> float:
        return float(self.outcome[0])

    @property
    def skipped_steps(self) -> int:
        return int(self.outcome[1])

    @property
    def skipped_last(self) -> bool:
        return bool(self.outcome[2])
