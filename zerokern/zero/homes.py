"""Where a parameter lives: which of its elements this rank owns, and what stands for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerokern.core.errors import ShardError, StateError
from zerokern.memory.here import Here
from zerokern.zero import hooks
from zerokern.zero.kinds import Placed, Residence, here_of, is_placed, version_of
from zerokern.zero.partition import shards_parameters
from zerokern.zero.sharded import Sharded, Spanned

if TYPE_CHECKING:
    from zerokern.zero.gradients import GradientBucket
    from zerokern.zero.sharding import Sharding
    from zerokern.zero.whole import Loan

__all__ = ["Home", "alias", "give_home", "here_of_state", "home_of"]


class _Reference(weakref.ref):
    """A parameter's reference to its home, which the sharding keeps: homes refer to parameters and gradient buckets,
    and the other way round it would be a cycle. A copy of the parameter, or what is pickled of it, is nobody's."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def give_home(param: Tensor, home: Home) -> None:
    """From now on `home_of` finds it, as long as its sharding lives."""
    param._zk_home = _Reference(home)  # type: ignore[attr-defined]


def home_of(param: Tensor) -> Home | None:
    """What zk.shard knows of a parameter; None for one that it has never seen, or whose sharded model is gone.

    >>> home_of(torch.nn.Parameter(torch.ones(2))) is None
    True
    """
    reference = getattr(param, "_zk_home", None)
    return None if reference is None else reference()


def alias(memory: Tensor, offset: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Elements of `memory`'s storage as a tensor with a version counter of its own.

    Views of one bucket share a counter: a write to one parameter would read as a write to all of them.
    """
    fresh = torch.tensor([], dtype=memory.dtype, device=memory.device)
    return fresh.set_(memory.untyped_storage(), int(memory.storage_offset()) + offset, shape, strides(shape))


def strides(shape: torch.Size | tuple[int, ...]) -> list[int]:
    """Those of a tensor whose elements follow each other.

    >>> strides((2, 3, 4))
    [12, 4, 1]
    """
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return found[::-1]


def here_of_state(param: Tensor) -> Here:
    """Which elements of a parameter's state are here: zk.shard divides it where the parameter itself is whole.

    >>> here_of_state(torch.nn.Parameter(torch.ones(2, 3))).runs()
    [(0, 6, 0)]
    """
    home = home_of(param)
    return here_of(param) if home is None else home.here


class Home(Residence):
    """Of a parameter that zk.shard divides, or replicates: its piece is a view of this rank's shard of the bucket."""

    piece: nn.Parameter

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        start: int,
        piece: Tensor,
        sharding: Sharding,
        initial: Tensor | None,
        beside: Any = None,
    ) -> None:
        """`beside`: the ranks that share it, where they are not those of all of the model."""
        ranks = sharding if beside is None else beside
        there = here_of(param)
        self.placed = there if isinstance(there, Placed) else None  # of a DTensor, whose local tensor is divided
        here = replace(there, group=ranks.team)
        if not sharding.replicated:
            box = there.shape, there.offsets, there.sizes
            here = Spanned(*box, start, piece.numel(), ranks.everyone, self.placed)
        self._copies = ranks.copies if self.placed is None else self.placed.copies
        self.stages = 1  # of a pipeline, that have copies of it
        self._team = ranks.team
        super().__init__(name, here, piece, param.requires_grad)
        # the sharding keeps autograd's nodes, and these refer to the parameter where no collector sees it: a strong
        # reference from here would keep the model for ever. The module's hooks keep the sharding
        self._sharding = weakref.ref(sharding)
        self.seen_version = 0
        self._gradients: weakref.ref[GradientBucket] | None = None
        self.place = 0  # among the parameters of its gradient bucket
        self.loan: Loan | None = None  # while it is whole in the user's object (stage 3)
        self.leaf: Tensor | None = None  # stage 3: what modules compute with, which autograd meets
        self.after_reduction: list[dict[int, Callable[[Tensor], None]]] = []  # hooks by handle, as torch keeps them
        self.adopt_hooks(param)
        self._initial: Tensor | None = None
        self._initial_version = 0
        self.keep_initial(initial)
        give_home(self.piece, self)

    @property
    def sharding(self) -> Sharding:
        """The sharding of the model, which lives as long as the model does."""
        sharding = self._sharding()
        if sharding is None:
            raise StateError(
                f"{self.name!r} is of a sharded model that is gone; keep the model as long as its parameters"
            )
        return sharding

    @property
    def gradients(self) -> GradientBucket | None:
        """The bucket that its gradient is reduced in; None: the parameter was frozen when it was sharded."""
        return None if self._gradients is None else self._gradients()

    @gradients.setter
    def gradients(self, bucket: GradientBucket | None) -> None:
        self._gradients = None if bucket is None else weakref.ref(bucket)  # the sharding keeps it

    @property
    def team(self) -> Any:
        return self._team

    @property
    def copies(self) -> int:  # type: ignore[override]
        return self._copies * self.stages

    def intercept(self, leaf: Tensor, *, beside: bool = False) -> object:
        """The sharding's reduction is handed the gradients of a leaf while the result, or a graph, is held.

        Of the leaf that modules compute with, or of one `beside` that: then two of them may arrive in one pass.
        """
        if self.gradients is None:
            return hooks.before_accumulation(leaf, self._refuse_gradient)
        return hooks.before_accumulation(
            leaf, partial(self.sharding.reduction.arrived, self.gradients, self.place, beside)
        )

    def _refuse_gradient(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None]:
        if grads[0] is not None:
            raise ShardError(
                f"{self.name!r} was frozen when the model was sharded, and has no place for gradients; "
                "shard it with requires_grad=True, and freeze it afterwards for as long as it is to be frozen"
            )
        return (None,)

    def adopt_hooks(self, param: Tensor) -> None:
        """Hooks on the accumulation of a gradient are called when it has been reduced."""
        found = hooks.take_hooks(param)
        if found is not None:
            self.after_reduction.append(found)

    def call_after_reduction(self, call: Callable[[Tensor], None]) -> Any:
        """What to call when the gradient has been reduced; the result's `remove()` ends that."""
        return hooks.keep_hook(self.after_reduction, call)

    def call_hooks(self, param: Tensor) -> None:
        """Those that wait for the gradient: it has been reduced, and is `param`'s."""
        for call in [call for found in self.after_reduction for call in found.values()]:
            call(param)

    @property
    def whole(self) -> Tensor | None:
        if self.gradients is None or shards_parameters(self.sharding.stage):
            return None
        return self.gradients.tenants[self.place].param

    def look(self, param: Tensor) -> None:
        if self.loan is not None:  # another body, whose versions count from 0
            return
        version = version_of(param)
        if version != self.seen_version:
            torch.autograd.graph.increment_version(self.piece)
            self.seen_version = version

    def stays(self, param: Tensor) -> bool:
        reference = getattr(param, "_zk_home", None)
        return reference is not None and reference() is self

    def local_gradient(self, param: Tensor) -> Tensor | None:
        """As everywhere; a plain gradient of the whole shape, set by hand, counts as reduced already."""
        grad = param.grad
        if grad is None:
            return None
        bucket = self.gradients
        if bucket is not None and bucket.local:
            bucket.refuse_unreduced()
        if param is self.piece:
            return grad
        if isinstance(grad, Sharded):
            return grad.span
        if bucket is not None and not bucket.shows(self.place, grad):
            self.sharding.watch.refuse_lost(self, param)
        if grad.shape != self.shape or is_placed(grad) is not (self.placed is not None):
            allowed = "" if self.placed is None else ", as a DTensor"
            raise StateError(
                f"the gradient of {self.name!r} is a {type(grad).__name__} of shape {tuple(grad.shape)}; allowed: "
                f"{tuple(self.shape)}{allowed}"
            )
        return self.here.cut(grad)

    def initial(self, param: Tensor) -> Tensor | None:
        """What the parameter's dtype rounded away, as long as nobody has taken it, or written since."""
        known = (self.piece._version, version_of(param)) == (self._initial_version, self.seen_version)
        return self._initial if known else None

    def take_initial(self) -> Tensor | None:
        initial, self._initial = self._initial, None
        if initial is None or self.piece._version != self._initial_version:  # written since: those values are gone
            return None
        return initial

    def keep_initial(self, initial: Tensor | None) -> None:
        """What the parameter's dtype has just rounded away of its values: a remainder, or the values themselves."""
        self._initial, self._initial_version = initial, self.piece._version
