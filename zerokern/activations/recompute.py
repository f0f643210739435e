"""Recomputes activations in backward: torch's checkpoint, whose inputs rest in a tier, over slices of the batch."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.checkpoint import checkpoint

from zerokern.activations.batches import IN_SLICES
from zerokern.activations.dividing import keeper_for
from zerokern.activations.keeping import Keeper, Turn
from zerokern.activations.module_state import ModuleState
from zerokern.activations.slices import KEPT_OUTSIDE, in_slices, refuse_statistics
from zerokern.activations.tiles import Tile
from zerokern.comm import Group
from zerokern.core.errors import ShardError, StateError, got, whole_number
from zerokern.memory.order import TierOrder
from zerokern.memory.tier import AnyTier
from zerokern.zero import hooks, saved_hooks
from zerokern.zero.containers import fill_slots, take_tensors
from zerokern.zero.kinds import is_placed
from zerokern.zero.saved_tensors import SavedTensors
from zerokern.zero.units import UnitSpec

__all__ = ["Repeated", "recompute"]

TORCH_KEYWORDS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_here = threading.local()


def recompute(
    fn: Callable[..., Any],
    *args: Any,
    keep: AnyTier | Sequence[AnyTier] = "device",
    micro: int = 1,
    replicated: DeviceMesh | Group | None = None,
    **kwargs: Any,
) -> Any:
    """Runs `fn(*args, **kwargs)` and keeps only its inputs; the rest is computed again in backward.

    Like `torch.utils.checkpoint.checkpoint(fn, ..., use_reentrant=False)`, with the same keywords and three more.
    If `fn` is a module or a method of one, buffers that its forward writes to, such as BatchNorm's running statistics,
    count a batch once, as without it; in any other function they count it twice, as with torch's.

    Args:
        fn: a module or a function, which gets `args` and `kwargs`.
        keep: where the inputs wait for backward. "device": where they are. "cpu": they move from a GPU to pinned host
            memory, and return one call ahead of their use, while the GPU computes. `zk.Nvme(path)`: they move to a
            disk. Parameters, tensors below 1 MiB and the inputs of the latest call stay where they are. Inside another
            checkpoint, or other saved-tensor hooks, those decide. A list of tiers with budgets keeps the latest inputs
            in the first: `["device:2GiB", "cpu:8GiB", zk.Nvme(path)]`. Where a budget is full, the oldest inputs there
            move on to the next tier; the last one takes what is left. A budget is bytes of all inputs that calls of
            this thread with the same list keep in that tier.
        micro: the number of slices that the batch is cut into. Each is computed, and later computed again, by itself,
            so the activations of one slice are alive at a time. The bits are those of a loop over as many
            micro-batches. The batch is dimension 0 of the first tensor argument. Tensors of that length are cut as by
            `torch.chunk`; all others are shared, and so is what `fn` uses without getting it as an argument. Results
            must have the batch in dimension 0 too. If each slice returns a number, such as a loss, the result is a
            vector of them. Forward hooks within `fn` run once for each slice, with its rows, and again when it is
            recomputed. What a hook or an attribute keeps of a slice is refused in a loss: return it instead. What
            cannot be cut is refused by name.
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
    order = TierOrder.of("keep", keep)
    module = module_of(fn)
    plain = whole_number("micro", micro) == 1 and order.tiers == ("device",) and replicated is None
    if plain and (torch.compiler.is_compiling() or module is None or not ModuleState(module)):
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)
    settings = {name: kwargs.pop(name) for name in TORCH_KEYWORDS if name in kwargs}
    return recompute_with(_keeper(order, replicated), micro, fn, args, kwargs, settings, module)


class Repeated:
    """Recomputes units in backward: the outermost ones, but not the root, which comes first, and no tiles.

    >>> layer = nn.Linear(2, 2)
    >>> units, repeated = [UnitSpec("", nn.ModuleList([layer])), UnitSpec("0", layer)], Repeated(None, 4)
    >>> repeated.check(units)
    {'keep': 'device', 'micro': 4, 'replicated': False}
    >>> repeated.begin(units); hasattr(layer.forward, "__wrapped__")
    True
    """

    def __init__(
        self, keep: AnyTier | Sequence[AnyTier] | None, micro: int, replicated: DeviceMesh | Group | None = None
    ) -> None:
        self.micro, self.replicated = whole_number("micro", micro), replicated
        if keep is None and (micro > 1 or replicated is not None):
            keep = "device"
        self.keep = keep
        self._order = None if keep is None else TierOrder.of("keep", keep)

    def check(self, units: Sequence[UnitSpec]) -> dict[str, Any]:
        """Returns the settings by name, for a comparison with other ranks; raises where units cannot be recomputed."""
        if self.micro > 1:
            found = next((name for unit in units for name, param in unit.params if is_placed(param)), None)
            if found is not None:
                raise ShardError(
                    f"{found!r} is a DTensor, and micro above 1 computes in slices of plain tensors; allowed: micro=1, "
                    "and micro-batches in a loop"
                )
        if self.keep is not None and not _recomputable(units):
            raise ValueError(
                f"keep={self.keep!r}, micro={self.micro} are for units, and this model is one with its root: name some "
                "by units="
            )
        keep = None if self._order is None else self._order.name
        return {"keep": keep, "micro": self.micro, "replicated": self.replicated is not None}

    def begin(self, units: Sequence[UnitSpec]) -> None:
        """Wraps the forwards of the units, which recompute from now on whenever gradients are wanted."""
        if self._order is None:
            return
        keeper = keeper_for(self._order, self.replicated)
        within: set[int] = set()
        for unit in _recomputable(units):
            if id(unit.module) not in within:
                within.update(map(id, unit.module.modules()))
                hooks.around_forward(unit.module, partial(_forward, keeper, self.micro, weakref.ref(unit.module)))


def _recomputable(units: Sequence[UnitSpec]) -> list[UnitSpec]:
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
    if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return forward(*args, **kwargs)  # within torch.func's transforms there is no checkpoint
    return recompute_with(keeper, micro, forward, args, kwargs, {}, module())


def _keeper(order: TierOrder, replicated: DeviceMesh | Group | None) -> Keeper | None:
    """Returns what keeps inputs in a tier, one for all calls of this thread; None: they stay where they are."""
    if order.tiers == ("device",) and replicated is None:
        return None
    keepers: dict[Any, Keeper | None] = _here.__dict__.setdefault("keepers", {})
    key = order.tiers, order.budgets, replicated
    if key not in keepers:
        keepers[key] = keeper_for(order, replicated)
    return keepers[key]


@torch._disable_dynamo
def recompute_with(
    keeper: Keeper | None,
    micro: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: dict[str, Any],
    module: nn.Module | None = None,
) -> Any:
    """Returns `fn(*args, **kwargs)`, in torch's checkpoint with these `settings`, slice by slice.

    `keeper` keeps its inputs. `module` is the one that `fn` runs, if it is known.
    """
    if micro > 1 and module is not None:
        refuse_batch_norm(module)
    if torch.is_grad_enabled():
        _refuse_caches([*args, *kwargs.values()])
    arguments, tensors = take_tensors((args, kwargs), leave=nn.Parameter)
    turn = _turn_of(keeper)

    def compute(tensors: Sequence[Tensor]) -> Any:
        call = _Call(fn, arguments, (args, kwargs) if micro == 1 else None, ModuleState(module))
        try:
            if turn is not None:
                saved_hooks.push_saved_hooks(turn.pack, turn.unpack)
            result = checkpoint(call, *tensors, use_reentrant=False, **settings)
        finally:
            if turn is not None:
                saved_hooks.remove_saved_hooks(turn.unpack)
            call.end_forward()
        call.raise_error()
        return result

    return compute(tensors) if micro == 1 else in_slices(compute, tensors, micro, fn)


class _Call:
    """Calls a function with its arguments, of which autograd keeps the tensors: `arguments` has slots for them.

    `given`: the very arguments of the first call, to which a function may write; None for a slice of the batch.

    >>> arguments, tensors = take_tensors(((torch.ones(2), [torch.ones(2)]), {}))
    >>> call = _Call(lambda x, more: x + more[0], arguments, None, ModuleState(None))
    >>> call(torch.zeros(2), torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: tuple[Any, dict[str, Any]],
        given: tuple[Any, dict[str, Any]] | None,
        state: ModuleState,
    ) -> None:
        self._fn, self._arguments, self._given, self._state = fn, arguments, given, state
        self._in_slices, self._is_over = given is None, False
        self._error: BaseException | None = None

    def end_forward(self) -> None:
        """Makes further calls recomputations."""
        self._given, self._is_over = None, True
        self._state.end_forward()

    def raise_error(self) -> None:
        """Raises what the forward has raised, which torch's checkpoint did not see: before 2.13 it would have left its
        hooks on saved tensors in force for as long as somebody holds the error."""
        error, self._error = self._error, None
        if error is not None:
            context = error.__context__  # for which Python puts the error that is being handled around this call
            try:
                raise error
            finally:
                error.__context__ = context
                del error, context  # whose tracebacks hold this frame

    def __call__(self, *tensors: Tensor) -> Any:
        if self._is_over:
            if self._in_slices and not hooks.is_within_pass():
                raise StateError(KEPT_OUTSIDE)
            args, kwargs = fill_slots(self._arguments, tensors)
            with self._state.restored():
                return self._fn(*args, **kwargs)
        try:
            return self._forward(tensors)
        except BaseException as error:
            self._error = error
            return None

    def _forward(self, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self._given or fill_slots(self._arguments, tensors)
        if not self._in_slices:
            return self._fn(*args, **kwargs)
        recorded = _recorded_by_transformers()
        result = self._fn(*args, **kwargs)
        if recorded != _recorded_by_transformers():
            _refuse_recorded(recorded)
        self._check_containers((args, kwargs), tensors)
        return result

    def _check_containers(self, given: tuple[Any, dict[str, Any]], tensors: Sequence[Tensor]) -> None:
        """Refuses writes to containers of tensors: a slice has copies of them, which nobody looks at."""
        _, found = take_tensors(given, leave=nn.Parameter)
        if len(found) != len(tensors) or any(one is not other for one, other in zip(found, tensors, strict=True)):
            raise StateError(
                f"{IN_SLICES} wrote to a list, dict or dataclass among its arguments, which had tensors of one slice "
                "of the batch. Return them as a result, or use micro=1"
            )


def _turn_of(keeper: Keeper | None) -> Turn | None:
    """Returns the keeper's hooks for one call; None if autograd takes no hooks now, or those of others decide."""
    if keeper is None or not torch.is_grad_enabled() or not saved_hooks.allows_saved_hooks():
        return None
    top = saved_hooks.top_saved_hooks()
    decides = top is None or isinstance(getattr(top[0], "__self__", None), SavedTensors)
    return keeper.begin() if decides else None


def _refuse_caches(values: Sequence[Any]) -> None:
    """Refuses Hugging Face's caches of keys and values: the second call would add to them once more."""
    found = [value for value in values if any(kind.__name__ == "Cache" for kind in type(value).__mro__)]
    if found:
        raise StateError(
            f"a {type(found[0]).__name__} was handed to a function that is called again in backward, and would be "
            "added to a second time; train without: model.config.use_cache = False"
        )


def _recorded_by_transformers() -> dict[str, int]:
    """Returns how many tensors of each kind the hooks of transformers 5 have collected of the forward that runs."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collected: Any = getattr(getattr(module, "_active_collector", None), "get", dict)()
    return {name: len(found) for name, found in (collected or {}).items() if isinstance(found, list)}


def _refuse_recorded(before: dict[str, int]) -> None:
    names = [f"output_{name}" for name, count in _recorded_by_transformers().items() if count != before.get(name)]
    raise StateError(
        f"{' and '.join(names)} of transformers would collect tensors of single slices in {IN_SLICES}, and the model "
        "takes them for those of the whole batch; leave it out, or use micro=1"
    )


def module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """Returns the module that `fn` is, or whose method it is; None for any other function.

    >>> layer = nn.Linear(2, 2)
    >>> module_of(layer) is layer, module_of(partial(layer.forward)) is layer, module_of(len)
    (True, True, None)
    """
    while isinstance(fn, partial):
        fn = fn.func
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def refuse_batch_norm(module: nn.Module) -> None:
    """Raises if a module normalizes over the batch, and would over each slice of it.

    >>> refuse_batch_norm(nn.BatchNorm1d(2).eval())
    """
    for name, one in module.named_modules():
        if isinstance(one, BatchNorm) and (one.training or not one.track_running_stats):
            refuse_statistics(f"{name or 'the module'} ({type(one).__name__})")
