"""Monte Carlo arithmetic: each operation of torch is off by a random part of what its rounding may be.

A program that runs a few times like this shows how far rounding alone can carry its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .training import Training

RUNS = 2
# how far off rounding to nearest is at most, of the value: half a step at 1.0, the worst place of each binade
ELEMENTWISE, BF16 = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.bfloat16))
SUMS = 8 * ELEMENTWISE
EXACT = ("copy", "clone", "detach", "alias", "lift", "zero", "fill", "set_", "resize", "new_", "empty", "cat", "stack")


class Noise(TorchDispatchMode):
    """While it is entered, results are off; `is_update` says that an optimizer works, in fp32 and elementwise."""

    def __init__(self, seed: int, is_narrow: bool) -> None:
        super().__init__()
        self.made = torch.Generator().manual_seed(seed)
        self.is_narrow, self.is_update = is_narrow, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, returns = func.__name__, func._schema.returns
        if func.namespace != "aten" or name.removeprefix("_").startswith(EXACT):
            return out
        if not any(isinstance(one, (Tensor, list, tuple)) for one in args):  # made from nothing
            return out
        is_written = bool(returns) and all(one.alias_info is not None and one.alias_info.is_write for one in returns)
        if is_written or all(one.alias_info is None for one in returns):  # a view has no roundings of its own
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                self.disturb(tensor)
        return out

    def disturb(self, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        noise = torch.rand(value.shape, generator=self.made).mul_(2).sub_(1).mul_(self.unit(value))
        with torch.no_grad():
            value.copy_((value.float() * (1 + noise.double())).to(value.dtype))

    def unit(self, value: Tensor) -> float:
        if value.dtype == torch.bfloat16 or (self.is_narrow and not self.is_update):
            return BF16
        return ELEMENTWISE if self.is_update else SUMS


def noisy(library: type[Training], noise: Noise) -> type[Training]:
    """`library`, which tells the noise when its optimizer works."""

    class NoisyTraining(library):  # type: ignore[valid-type, misc]
        def apply(self) -> None:
            noise.is_update = True
            super().apply()
            noise.is_update = False

    return NoisyTraining
