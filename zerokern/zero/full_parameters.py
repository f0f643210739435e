"""Materializes full parameters in place, in the user's objects, within a context manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from zerokern.comm import during
from zerokern.core.errors import ShardError, warn
from zerokern.kernels.formats import DTYPES
from zerokern.kernels.triton.backend import capturing
from zerokern.zero import hooks
from zerokern.zero.kinds import SLOTS, is_placed, local_of, present, shardings_of
from zerokern.zero.params import BucketEntry, BucketMemory
from zerokern.zero.shard import alias, shard_of
from zerokern.zero.sharded import Sharded
from zerokern.zero.unit import Unit
from zerokern.zero.watch import prints_of

__all__ = ["full_parameters"]

_OF_THE_SHARDED = Sharded.__annotations__.keys() | {"_is_param"}


class MaterializedParameter:
    """A parameter that is full within zk.gathered. Gradients of graphs that outlive that are reduced."""

    def __init__(self, unit: Unit, entry: BucketEntry, values: Tensor) -> None:
        shard = shard_of(entry.param)
        assert shard is not None
        self._unit, self._entry, self._shard = unit, entry, shard
        self.kept = False
        self._body = nn.Parameter(entry.show(values), requires_grad=False)
        self._body.__dict__.update(_user_attributes(entry.param))
        self._node: object = None
        if values.is_floating_point():
            self._body.grad_dtype = entry.param.grad_dtype
            self._node = shard.take_from_other_leaf(self._body.requires_grad_())
            hooks.keep_user_hooks(self._body, shard.after_reduction)
            if shard.leaf is not None:
                hooks.share_hooks(shard.leaf, self._body)
        self._body.requires_grad_(entry.param.requires_grad)
        self._on_same_device = values.device == entry.param.device  # else gradients stay where their parameter rests
        self._body.grad = entry.param.grad if self._on_same_device else None
        self._was = _kind(self._body)
        self._version = self._body._version
        self._dropped = False

    def begin(self) -> None:
        _swap_contents(self._entry.param, self._body)
        self._unit.materialized += 1
        self._shard.materialized = self

    def end(self) -> None:
        """Restores the shard, with what was done to the parameter: gradients, attributes, `requires_grad`."""
        param, body = self._entry.param, self._body
        self._unit.materialized -= 1
        self._shard.materialized = None
        _swap_contents(param, body)
        param.__dict__.update(_user_attributes(body))
        if param.requires_grad != body.requires_grad:
            param.requires_grad_(body.requires_grad)
        if not self._changed:
            param.grad = body.grad if self._on_same_device else param.grad
            self._dropped = not self.kept and body._version != self._version
            if self.kept:
                self._keep_written()

    @property
    def _changed(self) -> bool:
        return _kind(self._body) != self._was

    def _keep_written(self) -> None:
        """Copies this rank's span of what was written into the shard."""
        shard = self._shard
        with torch.no_grad(), present(shard.piece, written=True):
            shard.piece.copy_(shard.here.cut(self._body))

    @property
    def lost(self) -> str:
        """The name of the parameter, if what was written into it is not kept."""
        return self._shard.name if self._dropped else ""

    def check(self) -> None:
        if self._changed:
            raise ShardError(
                f"{self._shard.name!r} was {_in_words(self._was)} and became {_in_words(_kind(self._body))} within "
                "zk.gathered; allowed: writing values into it. Convert, move and resize a model before it is sharded"
            )


@contextmanager
def full_parameters(params: Sequence[nn.Parameter], write: bool) -> Iterator[None]:
    """Context manager that gives sharded parameters their full values; `write` keeps what is written to them."""
    shardings = shardings_of(map(shard_of, params))
    for sharding in shardings:
        sharding.publisher.complete()
    asked = {id(param) for param in params if isinstance(param, Sharded)}
    made = [
        one
        for sharding in shardings
        if sharding.runner is not None
        for unit in sharding.runner.units
        for memory in unit.memories
        for one in _gather_copies(unit, memory, [entry for entry in memory.entries if id(entry.param) in asked])
    ]
    begun: list[MaterializedParameter] = []
    try:
        for one in made:
            one.begin()
            begun.append(one)
        for sharding in shardings:  # now that other ranks have what they wait for
            sharding.publisher.finish()
        before = _bits_of(params) if write else {}
        yield
        if write:
            now = _bits_of(params)
            _keep_written([one for one in params if id(one) not in before or now.get(id(one)) != before[id(one)]])
    finally:
        for one in begun:
            one.end()
    for one in made:
        one.check()
    lost = [one.lost for one in made if one.lost]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        warn(
            f"what was written to {', '.join(map(repr, lost[:3]))}{more} within zk.gathered is gone: at stage 3 the "
            "parameters there are copies. zk.gathered(..., write=True) keeps it; all ranks write the same values"
        )


def _gather_copies(unit: Unit, memory: BucketMemory, entries: Sequence[BucketEntry]) -> list[MaterializedParameter]:
    """Gathers full values into memory of their own, which lives for as long as anything refers to it."""
    if not entries:
        return []
    full = torch.empty(memory.bucket.padded_numel, dtype=memory.dtype, device=memory.device)
    with (
        during("zk.gathered", of=f"zk.gathered, from {memory.called} on"),
        nullcontext() if memory.rest is None else memory.rest.used(),
    ):
        memory.gather_into(full, alias(full, memory.group.rank * memory.bucket.shard_numel, memory.shard.shape)).wait()
        memory.settle()
    return [MaterializedParameter(unit, entry, alias(full, entry.place.offset, entry.shape)) for entry in entries]


def _keep_written(params: Sequence[nn.Parameter]) -> None:
    """Keeps what was written to these: here, or when the context ends that materialized a parameter.

    Others are not among them: what was written drops its remainder, and an update of it that is pending.
    """
    found = [getattr(shard_of(param), "materialized", None) for param in params]
    for one in filter(None, found):
        one.kept = True
    there = [param for param, one in zip(params, found, strict=True) if one is None]
    torch.autograd.graph.increment_version([param for param in there if not isinstance(param, Sharded)])


def _has_bits(mine: Tensor) -> bool:
    """Whether a fingerprint of a tensor can be taken."""
    plain = type(mine) in (Tensor, nn.Parameter) and mine.layout is torch.strided and mine.dtype in DTYPES
    return plain and mine.device.type in ("cpu", "cuda") and not mine.is_neg() and not capturing(mine.device)


@torch.no_grad()
def _bits_of(params: Sequence[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """Returns by id what changes when a full parameter is written: its version, and, as `.data` counts nothing, a
    fingerprint of its bits. Those of which none can be taken are left out."""
    if _get_current_dispatch_mode() is not None:  # of fake tensors, for one
        return {}
    there = {id(param): param for param in params if not isinstance(param, Sharded)}
    known = {key: mine.detach() for key, param in there.items() if _has_bits(mine := local_of(param))}
    prints = prints_of(list(known.values()))
    versions = [0 if there[key].is_inference() else there[key]._version for key in known]
    return dict(zip(known, zip(versions, prints, strict=True), strict=True))


def _user_attributes(param: Tensor) -> dict[str, object]:
    return {key: value for key, value in param.__dict__.items() if key not in _OF_THE_SHARDED}


def _kind(body: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return body.shape, body.dtype, body.device


def _in_words(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    return f"{kind[1]} of shape {tuple(kind[0])} on {kind[2]}"


def _swap_contents(left: Tensor, right: Tensor) -> None:
    """Swaps the contents of two tensors, as `torch.utils.swap_tensors`, which refuses what graphs refer to."""
    slots = SLOTS if is_placed(left) or is_placed(right) else ()
    left.__class__, right.__class__ = right.__class__, left.__class__
    left.__dict__, right.__dict__ = right.__dict__, left.__dict__
    for slot in slots:
        found = getattr(left, slot, None), getattr(right, slot, None)
        setattr(left, slot, found[1])
        setattr(right, slot, found[0])
    torch._C._swap_tensor_impl(left, right)
