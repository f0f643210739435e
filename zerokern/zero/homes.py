"""Where a parameter lives: which of its elements this rank owns, and what stands for them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zerokern.core.errors import StateError
from zerokern.kernels import join
from zerokern.zero import hooks
from zerokern.zero.sharded import Sharded

if TYPE_CHECKING:
    from zerokern.zero.gradients import GradientBucket
    from zerokern.zero.sharding import Sharding

__all__ = ["Home", "alias", "give_home", "home_of"]


def give_home(param: Tensor, home: Home) -> None:
    """From now on `home_of` finds it."""
    param._zk_home = home  # type: ignore[attr-defined]


def home_of(param: Tensor) -> Home | None:
    """What zk.shard knows of a parameter; None for one that it has never seen.

    >>> home_of(torch.nn.Parameter(torch.ones(2))) is None
    True
    """
    return getattr(param, "_zk_home", None)


def alias(memory: Tensor, offset: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Elements of `memory`'s storage as a tensor with a version counter of its own.

    Views of one bucket share a counter: a write to one parameter would read as a write to all of them.
    """
    fresh = torch.tensor([], dtype=memory.dtype, device=memory.device)
    return fresh.set_(memory.untyped_storage(), int(memory.storage_offset()) + offset, shape, _strides(shape))


def _strides(shape: torch.Size | tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


class Home:
    """Elements [start, start + numel) of a parameter are this rank's: `piece`, a view of its shard of the bucket."""

    def __init__(
        self, name: str, param: nn.Parameter, start: int, piece: Tensor, sharding: Sharding, initial: Tensor | None
    ) -> None:
        self.name = name
        self.shape = param.shape
        self.start = start
        self.numel = piece.numel()
        self.piece = nn.Parameter(piece, requires_grad=param.requires_grad)
        # the sharding keeps autograd's nodes, and these refer to the parameter where no collector sees it: a strong
        # reference from here would keep the model for ever. The module's hooks keep the sharding
        self._sharding = weakref.ref(sharding)
        self.seen_version = 0
        self.gradients: GradientBucket | None = None  # None: the parameter was frozen when it was sharded
        self.place = 0  # among the parameters of its gradient bucket
        self._initial: Tensor | None = None
        self._initial_version = 0
        self.keep_initial(initial)
        give_home(self.piece, self)
        self.piece.zk_name = name  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"Home({self.name!r}, elements {self.start}:{self.start + self.numel} of {tuple(self.shape)})"

    @property
    def sharding(self) -> Sharding:
        """The sharding of the model, which lives as long as the model does."""
        sharding = self._sharding()
        if sharding is None:
            raise StateError(
                f"{self.name!r} is of a sharded model that is gone; keep the model as long as its parameters"
            )
        return sharding

    def intercept(self, leaf: Tensor) -> object:
        """The sharding is handed the gradients of the leaf that modules compute with, while the result is held."""
        return hooks.before_accumulation(leaf, self._hand_over)

    def _hand_over(self, grad: Tensor) -> None:
        assert self.gradients is not None
        self.sharding.arrived(self.gradients, self.place, grad)

    def local_gradient(self, param: Tensor) -> Tensor | None:
        """This rank's span of the parameter's gradient, 1-D; None where it has none.

        A plain gradient of the whole shape, set by hand, counts as reduced already.
        """
        grad = param.grad
        if grad is None:
            return None
        if self.gradients is not None:
            self.gradients.refuse_unreduced()
        if param is self.piece:
            return grad
        if isinstance(grad, Sharded):
            return grad.local
        if grad.shape != self.shape:
            raise StateError(
                f"the gradient of {self.name!r} has shape {tuple(grad.shape)}; allowed: {tuple(self.shape)}"
            )
        return grad.detach().reshape(-1)[self.start : self.start + self.numel]

    def take_initial(self) -> Tensor | None:
        """The fp32 values that this rank's span began with, where its dtype rounded them. Handed over once."""
        initial, self._initial = self._initial, None
        if initial is None or self.piece._version != self._initial_version:  # written since: those values are gone
            return None
        return initial if initial.dtype is torch.float32 else join(self.piece.detach(), initial)

    def keep_initial(self, initial: Tensor | None) -> None:
        """What the parameter's dtype has just rounded away of its values: a remainder, or the values themselves."""
        self._initial, self._initial_version = initial, self.piece._version
