"""Activations that are computed again in backward: torch's own checkpoint, with inputs that rest in a place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from zerokern.activations.batches import keep_running_statistics, module_of, norms_in_training, refuse_batch_norm
from zerokern.activations.dividing import keeper_for
from zerokern.activations.keeping import Keeper, Turn
from zerokern.activations.slices import sliced
from zerokern.activations.tiles import Tile
from zerokern.comm import Group
from zerokern.core.errors import StateError, got
from zerokern.memory.tier import AnyTier, check_tier, name_of
from zerokern.zero import hooks
from zerokern.zero.containers import mapped
from zerokern.zero.reads import Reads
from zerokern.zero.units import Unit

__all__ = ["Call", "Repeated", "check_micro", "keeping", "recompute", "turn_of"]

TORCHS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Keywords of torch's checkpoint, which it gets, as it does in torch"""
_here = threading.local()


def recompute(
    fn: Callable[..., Any],
    *args: Any,
    keep: AnyTier = "device",
    micro: int = 1,
    replicated: DeviceMesh | Group | None = None,
    **kwargs: Any,
) -> Any:
    """Runs `fn(*args, **kwargs)` and keeps only its inputs; the rest is computed again in backward.

    Like `torch.utils.checkpoint.checkpoint(fn, ..., use_reentrant=False)`, with the same keywords and three more.
    If `fn` is a module or a method of one, BatchNorm counts a batch once in its running statistics, as without it; in
    any other function it counts it twice, as with torch's.

    Args:
        fn: a module or a function, which gets `args` and `kwargs`.
        keep: where the inputs wait for backward. "device": where they are. "cpu": they move from a GPU to pinned host
            memory, and return one call ahead of their use, while the GPU computes. `zk.Nvme(path)`: they move to a
            disk. Parameters, tensors below 1 MiB and the inputs of the latest call stay where they are. Inside another
            checkpoint, or other saved-tensor hooks, those decide.
        micro: the number of slices that the batch is cut into. Each is computed, and later computed again, by itself,
            so the activations of one slice are alive at a time. The bits are those of a loop over as many
            micro-batches. The batch is dimension 0 of the first tensor argument. Tensors of that length are cut as by
            `torch.chunk`; all others are shared. Results must have the batch in dimension 0 too. If each slice returns
            a number, such as a loss, the result is a vector of them. What cannot be cut is refused by name.
        replicated: a mesh dimension (`mesh["tp"]`) whose ranks all have the same inputs, as in tensor parallelism. Each
            rank keeps a part of them, and they are gathered in backward, one call ahead. DTensors say by their
            placement whether they are replicated. Plain tensors of 1 MiB and more are taken to be the same on all
            ranks; if they are not, all ranks raise.

    >>> import torch, zerokern as zk
    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    >>> zk.recompute(layer, x, keep="cpu").sum().backward()
    >>> torch.equal(x.grad, layer.weight.detach().sum(0).expand(3, 2))
    True
    >>> zk.recompute(layer, x, micro=2).shape, zk.recompute(lambda x: layer(x).sum(), x, micro=2).shape
    (torch.Size([3, 2]), torch.Size([2]))
    """
    if kwargs.pop("use_reentrant", False):
        raise ValueError(got("use_reentrant", True, "False", "The other form runs a backward within the backward"))
    check_tier("keep", keep)
    plain = check_micro(micro) == 1 and keep == "device" and replicated is None
    module = module_of(fn)
    if plain and (torch.compiler.is_compiling() or module is None or not norms_in_training(module)):
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)
    settings = {name: kwargs.pop(name) for name in TORCHS if name in kwargs}
    return keeping(_keeper(keep, replicated), micro, fn, args, kwargs, settings, module)


def check_micro(micro: object) -> int:
    """The number of slices, or an error.

    >>> check_micro(4)
    4
    """
    if isinstance(micro, bool) or not isinstance(micro, int) or micro < 1:
        raise ValueError(got("micro", micro, "a whole number from 1 on"))
    return micro


class Repeated:
    """Units whose inputs alone are kept: all but the root, which comes first, those that lie in others, and tiles.

    >>> layer = nn.Linear(2, 2)
    >>> units, repeated = [Unit("", nn.ModuleList([layer])), Unit("0", layer)], Repeated(None, 4)
    >>> repeated.check(units)
    'device, 4'
    >>> repeated.begin(units); hasattr(layer.forward, "__wrapped__")
    True
    """

    def __init__(self, keep: AnyTier | None, micro: int, replicated: DeviceMesh | Group | None = None) -> None:
        self.micro, self.replicated = check_micro(micro), replicated
        if keep is None and (micro > 1 or replicated is not None):
            keep = "device"
        self.keep = None if keep is None else check_tier("keep", keep)

    def check(self, units: Sequence[Unit]) -> str:
        """What all ranks are to have asked for, in words; or an error."""
        if self.keep is not None and not _repeatable(units):
            raise ValueError(
                f"keep={self.keep!r}, micro={self.micro} are for units, and this model is one with its root: name some "
                "by units="
            )
        parts = "" if self.replicated is None else ", in parts"
        return f"{name_of(self.keep)}, {self.micro}{parts}"

    def begin(self, units: Sequence[Unit]) -> None:
        """From now on, whenever gradients are wanted."""
        if self.keep is None:
            return
        keeper = keeper_for(self.keep, self.replicated)
        within: set[int] = set()
        for unit in _repeatable(units):
            if id(unit.module) not in within:
                within.update(map(id, unit.module.modules()))
                hooks.around_forward(unit.module, partial(_forward, keeper, self.micro, weakref.ref(unit.module)))


def _repeatable(units: Sequence[Unit]) -> list[Unit]:
    """Without the root, and without tiles: a Linear keeps its input and no more."""
    return [unit for unit in units[1:] if not isinstance(unit.module, Tile)]


def _forward(
    keeper: Keeper | None,
    micro: int,
    module: weakref.ref[nn.Module],
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return keeping(keeper, micro, forward, args, kwargs, {}, module())


def _keeper(keep: AnyTier, replicated: DeviceMesh | Group | None) -> Keeper | None:
    """What keeps inputs in this place, for calls of this thread."""
    if keep == "device" and replicated is None:
        return None
    keepers: dict[Any, Keeper | None] = _here.__dict__.setdefault("keepers", {})
    if (keep, replicated) not in keepers:
        keepers[keep, replicated] = keeper_for(keep, replicated)
    return keepers[keep, replicated]


class Call:
    """A function and its arguments, whose tensors are handed over apart: those that autograd is to keep.

    >>> call = Call(lambda x, more: x + more[0], (torch.ones(2), [torch.ones(2)]), {})
    >>> tensors = call.take()
    >>> call(*tensors), call(torch.zeros(2), torch.zeros(2))
    (tensor([2., 2.]), tensor([0., 0.]))
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_slices: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        """`module`: the one that `fn` runs, if it is known."""
        self.fn, self._in_slices, self._module = fn, in_slices, module
        self.is_new = True  # what is called now is no repetition
        self._tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = None if in_slices else (args, kwargs)
        self._given = mapped((args, kwargs), self._place)
        self._places.clear()

    def _place(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return _Place(self._places[id(tensor)])

    def take(self) -> list[Tensor]:
        """The tensors, which are not kept here."""
        found, self._tensors = self._tensors, []
        return found

    def __call__(self, *tensors: Tensor) -> Any:
        """The first time with the very arguments, or else with these tensors in the places of theirs."""
        if self._in_slices and not self.is_new and not hooks.is_within_pass():
            raise StateError(
                "a tensor of one slice's graph was kept by a function that is computed in slices (micro > 1), as an "
                "auxiliary loss in an attribute is, and used outside: the others are not in it. Return it as a result"
            )
        given, self._first = self._first, None
        args, kwargs = given or mapped(self._given, lambda place: tensors[place.number], _Place)
        if self.is_new or self._module is None:
            return self.fn(*args, **kwargs)
        with keep_running_statistics(self._module):
            return self.fn(*args, **kwargs)


class _Place:
    """Of a tensor among arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@torch._disable_dynamo
def keeping(
    keeper: Keeper | None,
    micro: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: dict[str, Any],
    module: nn.Module | None = None,
) -> Any:
    """torch's checkpoint, of slices of the batch, with inputs that the keeper keeps. `module`: the one that `fn` runs,
    if it is known."""
    if micro > 1 and module is not None:
        refuse_batch_norm(module)
    if torch.is_grad_enabled():
        _refuse_caches([*args, *kwargs.values()])
    call = Call(fn, args, kwargs, in_slices=micro > 1, module=module)
    turn = turn_of(keeper)

    def compute(tensors: Sequence[Tensor]) -> Any:
        call.is_new = True
        if turn is not None:
            hooks.hear_saved(turn.pack, turn.unpack)
        try:
            return checkpoint(call, *tensors, use_reentrant=False, **settings)
        finally:
            call.is_new = False
            if turn is not None:
                hooks.hear_saved_no_more()

    return compute(call.take()) if micro == 1 else sliced(compute, call.take(), micro)


def _refuse_caches(values: Sequence[Any]) -> None:
    """What a function writes to would have been written to when it is called again: keys and values of attention."""
    found = [value for value in values if any(kind.__name__ == "Cache" for kind in type(value).__mro__)]
    if found:
        raise StateError(
            f"a {type(found[0]).__name__} was handed to a function that is called again in backward, and would be "
            "added to a second time; train without: model.config.use_cache = False"
        )


def turn_of(keeper: Keeper | None) -> Turn | None:
    """A turn of this call, where autograd may be told of it, and nobody else keeps what it saves."""
    if keeper is None or not torch.is_grad_enabled() or not hooks.hears_of_saved():
        return None
    top = hooks.hears_saved()
    mine = top is None or isinstance(getattr(top[0], "__self__", None), Reads)
    return keeper.begin() if mine else None
