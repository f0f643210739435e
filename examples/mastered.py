"""bf16 parameters beside fp32 masters, as it is usually written around torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Mastered(torch.optim.Optimizer):
    """Gradients are widened for the masters, which fused AdamW steps; then the parameters are copied from them.

    The wide gradients stay from step to step: a new one each time takes up to twice as long.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], max_grad_norm: float, **settings: Any) -> None:
        super().__init__(parameters, settings)
        self.max_grad_norm = max_grad_norm
        self.narrow = [p for group in self.param_groups for p in group["params"]]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.narrow]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **settings)
        self._show()

    def _show(self) -> None:
        """What is held now, where an optimizer's state is looked for."""
        for p, master in zip(self.narrow, self.masters, strict=True):
            held = {"master": master.detach(), "widened": master.grad}
            self.state[p] = held | self.inner.state.get(master, {})

    @torch.no_grad()
    def _widen(self) -> None:
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        narrow = [p.grad for p in self.narrow if p.grad is not None]
        torch._foreach_copy_([master.grad for master in self.masters if master.grad is not None], narrow)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        began = bool(self.inner.state)
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        try:
            self._widen()
            nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
            self.inner.step()
            torch._foreach_copy_([*self.narrow], [*self.masters])
        finally:
            if not began:
                self._show()
