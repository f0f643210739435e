"""`Shard`: what this rank holds of one parameter: a plain one, one of `zk.shard`, or a DTensor (FSDP2)."""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerokern.comm import MeshGroups
from zerokern.core.errors import ShardError, StateError, got
from zerokern.kernels import join
from zerokern.memory.here import Here
from zerokern.zero import hooks
from zerokern.zero.kinds import Placed, here_of, is_divided, is_placed, over, present, take, version_of
from zerokern.zero.partition import shards_parameters
from zerokern.zero.sharded import Sharded, Spanned, known_shard

__all__ = ["DTensorRanks", "Shard", "alias", "gradients_of_dtensors", "here_of_state", "shard_of"]
__all__ += ["give_shard", "plain_shard", "refuse_unfrozen", "seen_versions", "shard_changes", "shards_of"]

_PLAIN = (Tensor, nn.Parameter)


class _Reference(weakref.ref):
    """A parameter's reference to its shard, which the sharding keeps: shards refer to parameters and gradient buckets,
    and the other way round it would be a cycle. A copy of the parameter, or what is pickled of it, is nobody's."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_changes = 0


def shard_changes() -> int:
    """Returns how often, in this process, a parameter was given a shard or a shard another number of copies."""
    return _changes


def give_shard(param: Tensor, shard: Shard) -> None:
    """Makes `shard_of(param)` return the shard, as long as its sharding lives."""
    global _changes
    _changes += 1
    param._zk_shard = _Reference(shard)  # type: ignore[attr-defined]


shard_of: Callable[[Tensor | None], Shard | None] = known_shard


def alias(memory: Tensor, offset: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Elements of `memory`'s storage as a tensor with a version counter of its own.

    Views of one bucket share a counter: a write to one parameter would read as a write to all of them.
    """
    fresh = torch.tensor([], dtype=memory.dtype, device=memory.device)
    return fresh.set_(memory.untyped_storage(), int(memory.storage_offset()) + offset, shape)  # type: ignore[call-overload]  # it knows of no default


def here_of_state(param: Tensor) -> Here:
    """Returns which elements of a parameter's state are on this rank; at stages 1 and 2 those of its span.

    >>> here_of_state(torch.nn.Parameter(torch.ones(2, 3))).runs()
    [(0, 6, 0)]
    """
    shard = shard_of(param)
    return here_of(param) if shard is None else shard.here


class Shard:
    """What this rank holds of one parameter: which elements, in which memory, and with which ranks it shares them.

    A plain parameter is a shard that covers everything: its `piece` is the parameter. Else `piece` is 1-D, over this
    rank's span of a bucket, or over a DTensor's local tensor. `here`: its elements, in the parameter's logical shape.
    `sharding`: what is published and clipped together; None for a plain parameter. `team`: the ranks that the norm of
    its gradient is summed over; None where each has all of it.

    >>> Shard("weight", Here.span(torch.Size([2]), 0, 2), torch.nn.Parameter(torch.ones(2)))
    Shard('weight', elements 0:2 of (2,))
    """

    team: Any = None
    _stages = 1  # of a pipeline, that have copies of it
    materialized: Any = None  # while it is whole in the user's object (stage 3)
    leaf: Tensor | None = None  # stage 3: what modules compute with, which autograd meets
    place = 0  # among the parameters of its gradient bucket
    placed: Placed | None = None  # of a DTensor, whose local tensor is divided
    #: users' hooks on the accumulation of a gradient, by handle: they are called when it has been reduced
    after_reduction: dict[int, Callable[[Tensor], None]]
    _before: dict[int, Callable[[Tensor], None]]  # those that there were before zk.shard; their handles know this
    _gradients: Callable[[], Any] = staticmethod(lambda: None)  # a reference to the bucket, which the sharding keeps
    _sharding: Any = None  # a reference to it
    _copies = 1
    _initial: Tensor | None = None
    _initial_version = 0
    _param: DTensor | None = None  # of a DTensor that zk.shard does not know
    _where: Any = None

    def __init__(self, name: str, here: Here, piece: Tensor) -> None:
        self.name, self.here = name, here
        self.piece: Any = piece
        self.shape, self.start, self.numel = here.shape, here.first, here.numel
        self._seen, self._at = array("q", [0]), 0

    @staticmethod
    def of_model(
        name: str,
        param: nn.Parameter,
        start: int,
        piece: Tensor,
        sharding: Any,
        initial: Tensor | None,
        ranks: Any,
    ) -> Shard:
        """Makes the shard of a parameter of zk.shard's. `ranks`: those that share it. `initial`: what rounding has lost
        of its values."""
        there = here_of(param)
        placed = there if isinstance(there, Placed) else None
        here = replace(there, group=ranks.team)
        if not sharding.replicated:
            box = there.shape, there.offsets, there.sizes
            here = Spanned(*box, start, piece.numel(), ranks.everyone, placed)
        made = Shard(name, here, _parameter(piece, name, param))
        made.placed, made.team = placed, ranks.team
        made._copies = ranks.copies if placed is None else placed.copies
        # the sharding keeps autograd's nodes, and these refer to the parameter where no collector sees it: a strong
        # reference from here would keep the model for ever. The module's hooks keep the sharding
        made._sharding = weakref.ref(sharding)
        made.after_reduction, found = OrderedDict(), hooks.hooks_after_accumulation(param)
        made._before = getattr(found, "kept", found) or {}
        hooks.keep_user_hooks(param, made.after_reduction)
        made.keep_initial(initial)
        give_shard(made.piece, made)
        hooks.keep_user_hooks(made.piece, made.after_reduction)
        return made

    @staticmethod
    def of_dtensor(name: str, param: DTensor, ranks: DTensorRanks) -> Shard:
        """Makes the shard of a DTensor that another program (FSDP2) shards and gathers."""
        local, here = _local_of(name, param), Placed.by(param, ranks.group)
        if local.numel() != here.numel:
            do = "every rank must hold what its placements say"
            raise ValueError(got(f"{name}.to_local()", tuple(local.shape), f"{here.sizes}", do))
        made = Shard(name, here, _parameter(alias(local, 0, (here.numel,)), name, param))
        if hasattr(made.piece, "grad_dtype"):
            made.piece.grad_dtype = None  # whatever the gradients come in
        made.team, made._sharding, made._param = ranks.team, lambda: ranks, param
        made._where, made.seen_version = _where(param), version_of(param)
        return made

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {self.here})"

    @property
    def seen_version(self) -> int:
        """The version of the parameter as of the last look."""
        return self._seen[self._at]

    @seen_version.setter
    def seen_version(self, version: int) -> None:
        self._seen[self._at] = version

    @property
    def gradients(self) -> Any:
        """The bucket that its gradient is reduced in; None: zk.shard does not know it, or it was frozen then."""
        return self._gradients()

    @gradients.setter
    def gradients(self, bucket: Any) -> None:
        self._gradients = weakref.ref(bucket)

    @property
    def sharding(self) -> Any:
        """The `Sharding` of the model, which lives as long as the model does, or the `DTensorRanks`."""
        if self._sharding is None:
            return None
        sharding = self._sharding()
        if sharding is None:
            raise StateError(
                f"{self.name!r} is of a sharded model that is gone; keep the model as long as its parameters"
            )
        return sharding

    @property
    def copies(self) -> int:
        """How many of the ranks that its gradient is summed over have the same elements."""
        return self._copies * self._stages

    def set_stage_count(self, stages: int) -> None:
        """Sets how many stages of a pipeline have copies of it."""
        global _changes
        _changes += 1
        self._stages = stages

    @property
    def param_in_bucket(self) -> Tensor | None:
        """The model's parameter, where its values lie in the same memory as the piece."""
        if self.gradients is None or shards_parameters(self.sharding.stage):
            return None
        found: Tensor = self.gradients.entries[self.place].param
        return found

    def fits(self, param: Tensor) -> bool:
        """Whether this is that parameter still, divided as it was and, of a DTensor, where it was."""
        known = shard_of(param)
        if known is not None or self._param is None:
            return known is self if known is not None else param is self.piece and not is_divided(param)
        return param is self._param and isinstance(param, DTensor) and _where(param) == self._where

    def count_writes(self, param: Tensor) -> None:
        """Counts writes to the parameter as writes to the piece; our own have been accounted for by `publish`."""
        source = self.param_in_bucket if param is self.piece else param
        if source is None or self.materialized is not None:  # that is another body, whose versions count from 0
            return
        version = version_of(source)
        if version != self.seen_version:
            torch.autograd.graph.increment_version(self.piece)
            self.seen_version = version

    def local_gradient(self, param: Tensor, *, landed: bool = True) -> Tensor | None:
        """This rank's elements of the parameter's gradient, as the piece has them; None where it has none.

        A plain gradient of the whole shape, set by hand, counts as reduced already. `landed`: what is on its way from
        a device to host memory is waited for.
        """
        grad = param.grad
        if grad is None:
            return None
        bucket = self.gradients
        if bucket is not None and bucket.local:
            bucket.refuse_unreduced()
        if landed and bucket is not None:
            bucket.shown.land()
        if param is self.piece:
            return grad
        if self._param is None:
            return self.part_of(grad)
        if not self.sharding.replicated:
            self.sharding.group.join()  # here, not on a thread of the update
        return _divided_gradient(self._param, self.name)

    def part_of(self, grad: Tensor) -> Tensor:
        """This rank's elements of a gradient that is shown, or was set by hand."""
        if isinstance(grad, Sharded):
            return grad.span
        if grad.shape != self.shape or is_placed(grad) is not (self.placed is not None):
            allowed = "" if self.placed is None else ", as a DTensor"
            raise StateError(
                f"the gradient of {self.name!r} is a {type(grad).__name__} of shape {tuple(grad.shape)}; allowed: "
                f"{tuple(self.shape)}{allowed}"
            )
        return self.here.cut(grad)

    def take(self, key: str, value: Any, *, own: bool = False) -> Any:
        """This rank's elements of a value of the parameter's state, as it is shown or was loaded."""
        if self._sharding is None or key == "step" or not isinstance(value, Tensor):
            return value
        return take(self.here.of(key), value, f"{self.name}: state {key!r}", own=own)

    def show(self, key: str, value: Any, before: Any = None) -> Any:
        """State of the piece under its parameter's name; `before`, if it shows that already."""
        if self._sharding is None or key == "step" or not isinstance(value, Tensor):
            return value
        return self.here.of(key).show(value, before, f"{self.name}.{key}")

    def initial(self, param: Tensor) -> Tensor | None:
        """Returns what the parameter's dtype rounded away, unless it was taken or the parameter written since."""
        known = (self.piece._version, version_of(param)) == (self._initial_version, self.seen_version)
        return self._initial if known else None

    def take_initial(self, *, kept: bool = False) -> Tensor | None:
        """The fp32 values that the piece began with, if its dtype rounded them and nobody has written since.

        `kept`: what is kept of them, a bf16 remainder or the values themselves; it is forgotten then.
        """
        initial = self._initial
        if initial is not None and self.piece._version != self._initial_version:
            initial = None
        if initial is not None and not kept and initial.dtype is not torch.float32:
            with present(self.piece):
                return join(self.piece.detach(), initial)
        if kept or initial is None:
            self._initial = None
        return initial

    def keep_initial(self, initial: Tensor | None) -> None:
        """Keeps what the parameter's dtype has rounded away: a bf16 remainder, or the fp32 values."""
        self._initial, self._initial_version = initial, self.piece._version

    def take_arrived(self, leaf: Tensor) -> None:
        """Hooks accumulation into the leaf that modules compute with: its gradients go to the sharding's reduction."""
        bucket, number, place = self.gradients, self.gradients.number, self.place
        # a graph may outlive the model
        arrived = hooks.weakly(self.sharding.reduction.gradient_arrived, hooks.refuse_gradients)
        waits, arrivals = bucket.inbox.waits[place], bucket.inbox.arrivals
        note = hooks.on_accumulation(arrivals, place, partial(arrived, number), waits=waits)
        hooks.keep_user_hooks(leaf, self.after_reduction, note)

    def take_from_other_leaf(self, leaf: Tensor) -> object:
        """Gradients of another leaf go to the sharding's reduction while the result, or a graph, is held."""
        if self.gradients is None:
            return hooks.before_accumulation(leaf, self._refuse_gradient)
        return hooks.before_accumulation(
            leaf, partial(self.sharding.reduction.take_from_other_leaf, self.gradients, self.place)
        )

    def is_frozen_or_thawed(self) -> None:
        """Makes later gradients of a running pass be checked: the parameter was frozen or thawed."""
        if self.gradients is not None:
            self.gradients.inbox.arrivals.task = hooks.NO_PASS

    def _refuse_gradient(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None]:
        if grads[0] is not None:
            refuse_unfrozen(self.name)
        return (None,)

    @property
    def hooks(self) -> tuple[dict[int, Callable[[Tensor], None]], ...]:
        """By handle, those that wait for the reduced gradient."""
        return self._before, self.after_reduction

    @property
    def has_hooks(self) -> bool:
        """Whether there are any."""
        return any(self.hooks)

    def call_hooks(self, param: Tensor) -> None:
        """Calls users' hooks with the parameter, whose gradient has been reduced."""
        for call in [*self._before.values(), *self.after_reduction.values()]:
            call(param)


class DTensorRanks:
    """The DTensors of one optimizer that are divided over the same ranks; what a `Sharding` is to its model."""

    # nothing moves, nothing rests elsewhere, and others watch and reduce
    publisher = rests = seen_versions = reduction = None
    memories: Sequence[Any] = ()
    gradient_buckets: Sequence[Any] = ()
    splits = at_rest = publishes_changes = False

    def __init__(self, mesh: DeviceMesh, dims: Sequence[int]) -> None:
        self.replicated = not dims
        self.stage = 0 if self.replicated else 3
        self.group = MeshGroups(mesh, dims)
        self.team = None if self.replicated else self.group
        self.teams = [] if self.replicated else [self.group]
        self.everyone = MeshGroups(mesh, range(mesh.ndim))  # those with copies too
        self.shards: list[Shard] = []

    @property
    def zero_order(self) -> list[DTensor]:
        """The parameters."""
        return [shard._param for shard in self.shards if shard._param is not None]

    def publish(self, *_: Any) -> None:
        """Count an update as a write to the parameters; what others wrote before is left for their owner to notice."""
        pairs = [(p, shard) for p, shard in zip(self.zero_order, self.shards, strict=True) if p.requires_grad]
        known = [(p, shard) for p, shard in pairs if shard.seen_version == version_of(p)]
        torch.autograd.graph.increment_version([t for p, _ in pairs for t in (p, p._local_tensor)])
        for param, shard in known:
            shard.seen_version = version_of(param)

    begin_publishing = publish

    def fold(self, factor: float | Tensor) -> None:
        """Scale the gradients by a factor, now: any optimizer may step a DTensor, and most would not know of it."""
        with torch.no_grad():
            for param in self.zero_order:
                grad = _divided_gradient(param, "a parameter")
                if grad is not None:
                    grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)

    def take_fold(self) -> float:
        """No factor is ever pending."""
        return 1.0


def shards_of(params: Sequence[Tensor], names: Sequence[str], before: Sequence[Shard] = ()) -> list[Shard]:
    """The shard of each parameter. Of those `before`, the ones of DTensors that still fit are kept.

    >>> shards_of([nn.Parameter(torch.ones(2))], ["weight"])
    [Shard('weight', elements 0:2 of (2,))]
    """
    known = {id(shard._param): shard for shard in before if shard._param is not None}
    ranks: dict[Any, DTensorRanks] = {(one.here.mesh, one.here.dims): one.sharding for one in known.values()}  # type: ignore[attr-defined]
    found: list[Shard] = []
    for name, param in zip(names, params, strict=True):
        last, own = known.get(id(param)), shard_of(param)
        if own is not None:
            found.append(own)
        elif not isinstance(param, DTensor):
            found.append(plain_shard(name, param))
        elif last is not None and last.fits(param):
            found.append(last)
        else:
            mesh, dims = param.device_mesh, _dims(name, param)
            if (mesh, dims) not in ranks:
                ranks[mesh, dims] = DTensorRanks(mesh, dims)
            found.append(Shard.of_dtensor(name, param, ranks[mesh, dims]))
    for one in ranks.values():
        one.shards = [shard for shard in found if shard._param is not None and shard.sharding is one]
    return found


def seen_versions(shards: Sequence[Shard]) -> array[int]:
    """Keeps the versions of parameters that these shards have seen in one array from now on, which it returns."""
    found = array("q", [shard.seen_version for shard in shards])
    for at, shard in enumerate(shards):
        shard._seen, shard._at = found, at
    return found


def plain_shard(name: str, param: Tensor) -> Shard:
    """Makes a shard that covers all of a parameter."""
    return Shard(name, Here.span(param.shape, 0, param.numel()), param)


def gradients_of_dtensors(params: Iterable[Tensor]) -> list[tuple[MeshGroups, list[Tensor]]]:
    """Returns this rank's elements of gradients of DTensors that zk.shard does not know, grouped by ranks."""
    found: dict[Any, list[Tensor]] = {}
    for number, param in enumerate(params):
        if not isinstance(param, DTensor) or shard_of(param) is not None:
            continue
        name = f"parameter {number}"
        grad = _divided_gradient(param, name)
        if grad is not None:
            found.setdefault((param.device_mesh, _dims(name, param)), []).append(grad)
    return [(MeshGroups(mesh, dims), grads) for (mesh, dims), grads in found.items()]


def refuse_unfrozen(name: str) -> NoReturn:
    """Raises: a parameter is trained that has no place in any gradient bucket."""
    raise ShardError(
        f"{name!r} was frozen when the model was sharded, and has no place for gradients; "
        "shard it with requires_grad=True, and freeze it afterwards for as long as it is to be frozen"
    )


def _parameter(piece: Tensor, name: str, param: Tensor) -> nn.Parameter:
    made = nn.Parameter(piece, requires_grad=param.requires_grad)
    made.zk_name = name  # type: ignore[attr-defined]
    return made


def _where(param: DTensor) -> tuple[Any, ...]:
    local = param._local_tensor
    return local.data_ptr(), local.shape, local.dtype, local.device, param._spec


def _divided_gradient(param: DTensor, name: str) -> Tensor | None:
    """This rank's elements of a DTensor's gradient, 1-D and in the gradient's own memory; None where it has none.

    A gradient that is divided in another way (a partial sum) is divided as the parameter is, once.
    """
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, DTensor):
        do = "DTensor.from_local makes one of this rank's part"
        raise StateError(got(f"{name}.grad", type(grad).__name__, "a DTensor, as the parameter is", do))
    local = grad._local_tensor
    same = grad._spec is param._spec or tuple(grad.placements) == tuple(param.placements)
    if not same or not local.is_contiguous() or type(local) not in _PLAIN:
        with torch.no_grad():
            there = grad.redistribute(param.device_mesh, param.placements)
            local = there.to_local().contiguous()  # waits for what is under way
            param.grad = over(local, param.device_mesh, param.placements, param.shape, param.stride())
    return local.detach().view(-1)


def _dims(name: str, param: DTensor) -> tuple[int, ...]:
    """The dimensions of the mesh that the parameter is divided along."""
    if any(placement.is_partial() for placement in param.placements):
        do = f"{name}.redistribute(placements=...) sums it up"
        raise ValueError(got(f"{name}.placements", tuple(param.placements), "Shard and Replicate", do))
    return tuple(dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())


def _local_of(name: str, param: DTensor) -> Tensor:
    """The tensor within, without the padding that FSDP2 keeps behind it."""
    local = param._local_tensor
    if type(local) not in _PLAIN:
        raise TypeError(got(f"{name}.to_local()", type(local).__name__, "torch.Tensor", "pass the tensor it wraps"))
    if not local.is_contiguous():
        do = "make the DTensor of a contiguous local tensor"
        raise ValueError(got(f"{name}.to_local().stride()", tuple(local.stride()), "a contiguous one", do))
    return local
