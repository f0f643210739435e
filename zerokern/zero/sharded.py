"""The tensor that users see for a sharded parameter, gradient or state: full shape, this rank's span of elements."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.memory.here import Cuboid, Here, chunk_list, write_items
from zerokern.memory.rest import Rest
from zerokern.zero import hooks
from zerokern.zero.containers import mapped
from zerokern.zero.sharded_ops import (
    BELOW_DISPATCH,
    FREEZING,
    METADATA,
    SET_DATA,
    UNFETCHED_CALLS,
    UNFETCHED_RULES,
    UNTRACED,
    ShardedUseError,
    advice_for,
    found_by_any,
    leaves,
    refuse,
    rule_for,
    targets,
    written_arguments,
)
from zerokern.zero.tiers import by_rests, fetched, rest_of

__all__ = ["Sharded", "ShardedUseError", "SpanGradient", "Spanned", "known_shard", "leaves"]


ADD_ = torch.ops.aten.add_.Tensor
KINDS = ("parameter", "gradient", "state")


def known_shard(tensor: Tensor | None) -> Any:
    """Returns the `Shard` of a parameter, or of a piece of one; None if it has none, or its sharded model is gone.

    >>> known_shard(torch.ones(2)) is None
    True
    """
    reference = getattr(tensor, "_zk_shard", None)
    return None if reference is None else reference()


@dataclass(frozen=True)
class Spanned(Here):
    """This rank's span of a whole tensor, or of a box of it, as zk.shard cuts it; it is shown as a `Sharded`.

    `placed`: what a DTensor has here, of which this is a span.
    """

    placed: Any = field(default=None, compare=False)

    @property
    def misaligned(self) -> str:
        return "" if self.placed is None else self.placed.misaligned

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        if self.placed is None or not self.placed.is_alike(whole):
            return super().cut(whole)
        return self.placed.cut(whole)[self.start : self.start + self.numel]

    def show(self, local: torch.Tensor, before: Any = None, name: str = "") -> torch.Tensor:
        if isinstance(before, Sharded) and before.span is local and before.here == self:
            return before
        return Sharded.of(local, self, name=name, kind="state")


class Sharded(torch.Tensor):
    """A tensor of full logical ``shape`` of which this rank holds the elements from ``start`` on, flat, in ``local``.

    Writes through it are counted, as versions of ``span``. Who takes ``local`` may write where nobody counts.

    Element-wise work needs no other rank and is done on ``local``; whatever would need the other ranks' elements raises
    a ``TypeError`` that says what to do. ``dtype`` is the one that is shown, where ``local`` is kept in another.

    >>> import torch
    >>> weight = Sharded(torch.ones(4), torch.Size([2, 3]), 0, name="head.weight")
    >>> weight
    Sharded(parameter 'head.weight', shape (2, 3), elements 0:4 of 6 here, torch.float32)
    >>> weight.mul_(2.0).local
    tensor([2., 2., 2., 2.])
    >>> weight.sum()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.zero.sharded_ops.ShardedUseError: aten.sum needs elements of other ranks: Sharded(parameter ...
    """

    span: torch.Tensor
    last_hand_out: ClassVar[object] = None  # another object each time that anybody is given the `local` of any of them
    here: Here
    name: str = ""  # over torch's own property, which cannot be set
    kind: str
    #: asked for a result where the full tensor is needed: ``use(func, args, kwargs)``, which may return NotImplemented
    use: Callable[[Callable, tuple, dict], Any] | None = None
    #: says that a forward is running, where even element-wise results have to meet full tensors
    in_forward: Callable[[], bool] = staticmethod(lambda: False)
    settle: Callable[[], None] = staticmethod(lambda: None)  # returns once no update of it is under way
    land: Callable[[], None] = staticmethod(lambda: None)  # returns once its values are in its memory
    #: gathers all elements of it, or of another tensor that is sharded alike, from all ranks
    gather_full: Callable[[Sharded], torch.Tensor] | None = None
    original: Sharded | None = None  # what it was detached of
    receive: Callable[[torch.Tensor], None] | None = None  # a gradient is given what autograd adds to it

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        shape: torch.Size,
        start: int,
        *,
        name: str = "",
        kind: str = "parameter",
        group: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Sharded:
        shape = torch.Size(shape)
        if local.ndim != 1 or start < 0 or start + local.numel() > shape.numel():
            advice = f"start={start} and shape={tuple(shape)} were given with it."
            raise ValueError(got("local", tuple(local.shape), "a 1-D tensor that lies within the shape", advice))
        here = Spanned(shape, (0,) * len(shape), tuple(shape), start, local.numel(), group)
        return Sharded.of(local, here, name=name, kind=kind, dtype=dtype)

    @classmethod
    def of(
        cls, local: torch.Tensor, here: Here, *, name: str = "", kind: str = "parameter", dtype: Any = None
    ) -> Sharded:
        """Makes the tensor of which ``local`` has these elements."""
        if kind not in KINDS:
            raise ValueError(got("kind", kind, "'parameter', 'gradient' or 'state'"))
        made = torch.Tensor._make_wrapper_subclass(cls, here.shape, dtype=dtype or local.dtype, device=local.device)
        made.span, made.here, made.name, made.kind = local, here, name, kind
        return made

    @property
    def zk_rest(self) -> Rest | None:
        """Where `span` is while nobody uses it."""
        return rest_of(self.span)

    @property
    def start(self) -> int:
        """The first of the elements that are here."""
        return self.here.first

    @property
    def group(self) -> Any:
        """The ranks that it is divided among, where that is known."""
        return self.here.group

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements, flat, for whoever asks, with the values of the last step."""
        self.settle()
        return self._shown(counts=False)

    def _shown(self, counts: bool = True) -> torch.Tensor:
        """Returns the span, in memory while it is held. `counts`: the caller bumps its version when it writes."""
        self.land()
        self.span.zk_handed_out = True  # type: ignore[attr-defined]
        Sharded.last_hand_out = object()  # last: who has seen this one sees the mark
        if self.zk_rest is None:
            return self.span
        with self.zk_rest.used():
            self.zk_rest.watch(self.span) if counts else self.zk_rest.change()
            return self.zk_rest.lend(self.span)

    def is_same_layout(self, other: object) -> bool:
        """Whether ``other`` is sharded and holds the same elements of the same shape here.

        >>> import torch
        >>> one = Sharded(torch.ones(4), torch.Size([2, 3]), 0)
        >>> one.is_same_layout(one.clone()), one.is_same_layout(torch.ones(2, 3))
        (True, False)
        """
        if not isinstance(other, Sharded) or self.shape != other.shape or self.span.device != other.span.device:
            return False
        mine, theirs = self.here, other.here
        return mine is theirs or mine == theirs or mine.numel == theirs.numel == 0

    def span_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's elements, flat, of a plain tensor of the logical shape; a view of it where that is possible.

        >>> import torch
        >>> Sharded(torch.zeros(2), torch.Size([2, 3]), 4).span_of(torch.arange(6).view(2, 3))
        tensor([4, 5])
        """
        return self.here.cut(full)

    def like(self, local: torch.Tensor, dtype: torch.dtype | None = None) -> Sharded:
        """Another tensor of this layout, name and kind, over ``local``.

        >>> import torch
        >>> Sharded(torch.zeros(2), torch.Size([2, 3]), 4, kind="state").like(torch.ones(2))
        Sharded(state, shape (2, 3), elements 4:6 of 6 here, torch.float32)
        """
        made = Sharded.of(local, self.here, name=self.name, kind=self.kind, dtype=dtype)
        made.gather_full, made.in_forward, made.receive = self.gather_full, self.in_forward, self.receive
        if self.zk_rest is not None and local.untyped_storage()._cdata == self.span.untyped_storage()._cdata:
            local.zk_rest = self.zk_rest  # type: ignore[attr-defined]
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = f" {self.name!r}" if self.name else ""
        part, whole = self.span.numel(), self.numel()
        here = f"elements {self.start}:{self.start + part} of {whole} here" if part < whole else f"all {whole} elements"
        kept = f" (kept as {self.span.dtype})" if self.span.dtype != self.dtype else ""
        return f"Sharded({self.kind}{name}, shape {tuple(self.shape)}, {here}, {self.dtype}{kept})"

    def register_hook(self, hook: Callable) -> Any:
        """As torch's, of a parameter: the hook sees, and may change, this rank's gradient before it is reduced."""
        if self._leaf is None:
            refuse("Tensor.register_hook", self, "hook")
        return hooks.on_gradient(self._leaf, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable) -> Any:
        """As torch's, of a parameter: the hook is called with it when its reduced gradient is there."""
        if self._leaf is None:
            refuse("Tensor.register_post_accumulate_grad_hook", self, "hook")
        return hooks.keep_hook(known_shard(self).after_reduction, hook)

    @property
    def _leaf(self) -> torch.Tensor | None:
        return getattr(known_shard(self), "leaf", None)

    def __deepcopy__(self, memo: dict) -> Sharded:
        """Copies a tensor of a state_dict. Parameters are refused: a copied module would have parts of them."""
        if isinstance(self, torch.nn.Parameter):
            refuse("copy.deepcopy", self, "copy")
        self.settle()
        with fetched([self], written=()):
            memo[id(self)] = copied = self.like(self.span.clone(), self.dtype)
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickling (torch.save, copy.copy, multiprocessing)", self, "save")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        self.settle()
        return write_items(fqn, self.shape, self.span.dtype, self._boxes())

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self._boxes())

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Returns a box as a view of this rank's memory."""
        self.settle()
        for at, sizes, first in self._boxes():
            if index.offset is None or at == tuple(index.offset):
                return self._shown().detach()[first : first + torch.Size(sizes).numel()].view(sizes)
        raise StateError(f"{self!r} has no box that begins at {index.offset}: what was planned was another tensor")

    def _boxes(self) -> list[Cuboid]:
        """Returns the boxes on this rank. A tensor without elements has one everywhere, so that it is saved."""
        if not self.numel():
            return [((0,) * self.ndim, tuple(self.shape), 0)]
        return self.here.boxes()

    @classmethod
    @torch._disable_dynamo  # it waits, or asks other ranks: a graph would hold what it found once
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                if func in FREEZING and (shard := known_shard(args[0])) is not None:
                    shard.is_frozen_or_thawed()
                    # autograd meets the leaf. Within a pass it stays as it is: a gradient that comes for a frozen
                    # parameter is then noted, and the next forward makes both alike
                    if shard.leaf is not None and not hooks.in_backward():
                        func(shard.leaf, *args[1:], **(kwargs or {}))
                return func(*args, **(kwargs or {}))
        if func == SET_DATA:  # a new method wrapper at each look-up
            return rebind(*args)
        given = dict(kwargs or {})
        if func in UNFETCHED_CALLS or not rests((args, given)):
            return Sharded.perform(func, args, given)
        return with_values(Sharded.perform, targets, func, args, given)

    @staticmethod
    def perform(func: Callable, args: tuple, given: dict) -> Any:
        """Calls a function on this rank's elements, or on gathered tensors where that needs all elements."""
        sharded = sharded_among((args, given))
        op, topic = BELOW_DISPATCH.get(func, ("", ""))
        if topic not in ("", "values", "autograd"):
            refuse(op, sharded[0], topic)
        for one in sharded:
            one.settle()
        users = [one for one in sharded if one.use is not None]
        # done on a gathered copy, what is written into a sharded tensor would be lost
        writes = any(isinstance(one, Sharded) for one in targets(func, args, given))
        if writes and not any(one.in_forward() for one in users):
            users = []
        if any(wants_full(func, one) for one in users):
            result = ask(users, func, *with_full((args, given)))
            if result is not NotImplemented:
                return result
            users = []
        elif not users and not writes and is_traced((args, given)):
            args, given = with_full((args, given))
        try:
            if topic:
                refuse(op, sharded[0], topic)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **given)
        except ShardedUseError:
            # a plain tensor that is written to takes all (SAM's `p.add_(p.grad)` below stage 3), and so does a forward
            if not writes and (any(one.in_forward() for one in sharded) or targets(func, args, given)):
                args, given = with_full((args, given))
            result = ask(users, func, args, given)
            if result is not NotImplemented:
                return result
            if sharded_among((args, given)):
                raise
            return func(*args, **given)
        # torch's operators do not let a TypeError through
        return ask(users, func, args, given) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is ADD_ and isinstance(args[0], Sharded) and args[0].receive is not None and hooks.in_backward():
            # what autograd adds, or a custom Function: this rank's own, of the whole parameter
            own = type(args[1]) is torch.Tensor and args[1].shape == args[0].shape and not kwargs
            if own or hooks.accumulates_here():
                args[0].receive(args[1])
                return args[0]
        if not all(issubclass(one, Sharded) for one in types):
            return NotImplemented
        given = dict(kwargs or {})
        if rule_for(func) in UNFETCHED_RULES:
            return Sharded.operate(func, args, given)
        for one in sharded_among((args, given)):
            one.land()  # who comes here past __torch_function__ (autograd's own sums, zero_grad) has waited for nothing
        if not rests((args, given)):
            return Sharded.operate(func, args, given)
        return with_values(Sharded.operate, written_arguments, func, args, given)

    @staticmethod
    def operate(func: Any, args: tuple, given: dict) -> Any:
        """What an operator does below autograd."""
        return rule_for(func)(Sharded, func, args, given)


def sharded_among(arguments: Any) -> list[Sharded]:
    return [one for one in leaves(arguments) if isinstance(one, Sharded)]


def rests(arguments: Any) -> bool:
    """Whether any of these rests elsewhere while nobody uses it."""
    return any(one.zk_rest is not None for one in sharded_among(arguments))


Call = Callable[[Any, tuple, dict], Any]


def with_values(run: Call, written: Call, func: Any, args: tuple, given: dict) -> Any:
    """Calls `run` when what it is given has been fetched; for a foreach op, for one part of its lists after the other.

    `written`: what of it the call writes to. Within DisableTorchFunctionSubclass operators alone know what to fetch.
    """

    def call(args: tuple, given: dict) -> Any:
        sharded = sharded_among((args, given))
        with fetched(sharded, written=leaves(written(func, args, given))):
            return run(func, args, given) if sharded else func(*args, **given)

    is_foreach = getattr(func, "__name__", "").startswith("_foreach_")
    return by_rests(call, args, given) if is_foreach else call(args, given)


def wants_full(func: Callable, one: Sharded) -> bool:
    """A result that autograd will trace, or that a running forward asks for, has to be a full tensor from the start."""
    return one.in_forward() or (one.requires_grad and torch.is_grad_enabled() and func not in UNTRACED)


def is_traced(arguments: Any) -> bool:
    """Whether autograd records the call because of a plain tensor in it."""
    plain = (one for one in leaves(arguments) if isinstance(one, torch.Tensor) and not isinstance(one, Sharded))
    return torch.is_grad_enabled() and any(one.requires_grad for one in plain)


def with_full(arguments: Any) -> Any:
    """Gathers what stands beside parameters: averages and gradients of them."""

    def full(one: Sharded) -> torch.Tensor:
        return one if one.use is not None or one.gather_full is None else one.gather_full(one)

    return mapped(arguments, full, Sharded)


def ask(users: list[Sharded], func: Callable, args: tuple, kwargs: dict) -> Any:
    answers = (one.use(func, args, kwargs) for one in users if one.use is not None)
    return next((answer for answer in answers if answer is not NotImplemented), NotImplemented)


def rebind(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.data = value``: nothing to do where that is so already (``model.to`` with nothing to move)."""
    if isinstance(target, Sharded):
        if isinstance(value, Sharded) and value.span is target.span:
            return
        alike = (value.shape, value.dtype, value.device) == (target.shape, target.dtype, target.device)
        if alike and target.in_forward():  # momentum encoders are written so
            with torch.no_grad():
                target.copy_(value)
            return
        refuse("`.data = tensor`", target, "rebind")
    refuse("`.data = sharded tensor`", value, "rebind")


def operator(name: str) -> Callable:
    """torch's operators turn every TypeError into NotImplemented: `==` would be False then, and `+=` a new tensor."""
    torchs = getattr(torch.Tensor, name)

    @functools.wraps(torchs, ("__name__", "__qualname__", "__doc__"))
    def operate(self: Sharded, other: object) -> Any:
        result = torchs(self, other)
        if result is NotImplemented and isinstance(other, torch.Tensor):
            beside = "" if isinstance(other, Sharded) else f"a plain {other.dtype} tensor of shape "
            detail = f", beside {beside}{tuple(other.shape) if beside else other}"
            refuse(f"Tensor.{name}", self, "whole" if "matmul" in name else "alike", detail)
        return result

    return operate


for binary in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split():
    for way in ("", "r", "i"):
        if hasattr(torch.Tensor, f"__{way}{binary}__"):
            setattr(Sharded, f"__{way}{binary}__", operator(f"__{way}{binary}__"))
for comparison in "__eq__ __ne__ __lt__ __le__ __gt__ __ge__".split():
    setattr(Sharded, comparison, operator(comparison))


_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_NORM = (
    "{op} would take the norm of this rank's part of the gradient of {name!r} for that of the whole; "
    "zk.clip_grad_norm_(model, max_norm) clips by the norm over all ranks and returns it. For the norm of the part: "
    "grad.detach().norm()"
)


class SpanGradient(Tensor):
    """Gradient of a rank's span. Refuses torch's clipping, which would use another norm on each rank; a GradScaler's
    overflow on one rank counts on all."""

    name: str = ""  # over torch's own property, which cannot be set
    group: Any = None

    @classmethod
    def of(cls, span: Tensor, name: str, group: Any) -> Tensor:
        """Makes a gradient span one of these, in place, if other ranks of `group` have other spans."""
        if group is not None and group.size > 1 and type(span) is Tensor:
            span.__class__ = cls
            named: Any = span
            named.name, named.group = name, group
        return span

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            asked = next(_among(args), None) if "norm" in name else None
            if asked is not None and advice_for(name, random=False) == "norm":
                raise ShardedUseError(_NORM.format(op=name, name=asked.name))
            result = func(*args, **(kwargs or {}))
            for group in {one.group for one in _among(args[:1])} if func is _UNSCALE else ():
                found_by_any(group, args[1])
            return result

    def __deepcopy__(self, memo: dict) -> Tensor:
        """What is copied, or pickled, is nobody's part."""
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _among(values: Iterable[Any]) -> Iterator[SpanGradient]:
    lists = (one if isinstance(one, (list, tuple)) else (one,) for one in values)
    return (one for many in lists for one in many if isinstance(one, SpanGradient))
