"""Gradients that are reduced on a device, and then rest in host memory."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from zerokern.comm import Group, Handle
from zerokern.kernels.casts import Squares
from zerokern.memory import HostTier, Wanted
from zerokern.memory.copies import Copy

__all__ = ["IntoHost"]


class IntoHost:
    """Where one bucket's reduced gradients go: `host`, by one copy for each reduction, beside what computes."""

    def __init__(self, group: Group, host: HostTier) -> None:
        self._group, self._host = group, host
        self._last: Copy | None = None

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that copies reach."""
        return self._host.lay_out([Wanted("gradients", torch.Size([numel]), dtype)])[0]

    def reduce_scatter(
        self, buffer: Tensor, out: Tensor, *, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        """As `Group.reduce_scatter`, with `out` in host memory: once the handle is waited for, the buffer is free.

        What is added to goes to the device before, and is added there by what adds where nothing leaves. `squares`
        are not measured: the sum is made on the device.
        """
        copies = self._host.copies
        assert copies is not None
        first = self._group.rank * out.numel()
        span = buffer[first : first + out.numel()]
        given = copies.here()
        with copies.driver.aside() if add or not self._group.everyone.alone else nullcontext():
            given.gate()
            if add:
                span = torch.empty_like(span)
                self._host.fetch(out, span).gate()
            self._group.reduce_scatter(buffer, span, scale=scale, add=add, scratch=scratch).wait()
            copy = self._last = self._host.store(out, span)
        return Handle(copy.gate, copy.done, copy.gate)

    def wait(self) -> None:
        """Returns once what was reduced is in host memory."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()
