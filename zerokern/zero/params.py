"""Lays parameters out in flat buckets, whole or this rank's shard, and makes the tensors that modules compute with.

The parameter object that the user knows stays; what it consists of changes. At stage 3 modules compute with leaves of
autograd's over the gathered bucket. While it is not gathered, a leaf stands for the parameter.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerokern.comm import Group, Handle
from zerokern.core.errors import ShardError
from zerokern.kernels import split
from zerokern.memory import HostTier, Rest
from zerokern.memory.addresses import storage_references
from zerokern.memory.copies import Copy
from zerokern.memory.pages import on_huge_pages
from zerokern.memory.tier import DevicePool
from zerokern.schedule.recorder import SpanRecorder
from zerokern.zero import hooks
from zerokern.zero.containers import mapped
from zerokern.zero.kinds import Distributed, Placed, ShardedDTensor, here_of, is_placed, local_of, version_of
from zerokern.zero.partition import Bucket, Piece
from zerokern.zero.shard import Shard, alias, give_shard
from zerokern.zero.sharded import Sharded
from zerokern.zero.tiers import DiskCopier
from zerokern.zero.units import Owner

__all__ = [
    "BucketEntry",
    "BucketMemory",
    "Gathered",
    "exchange_bodies",
    "gather_full",
    "leaf_over",
    "mark_gathered",
    "mark_released",
    "place",
    "sharded_parameter_of",
]


class Gathered(nn.Parameter):
    """A full parameter over its gathered bucket. Writes through `.data` count, and assigning it writes in place."""

    sharded_parameter: nn.Parameter  # what the user knows

    @property
    def data(self) -> Tensor:
        return self.detach()  # torch's own has a version of its own: what is written to it would be lost

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise ShardError(
                f"`.data =` would make a parameter {value.dtype} of shape {tuple(value.shape)} on {value.device}; "
                f"allowed: what it is, {self.dtype} of shape {tuple(self.shape)} on {self.device}. Convert a model "
                "before zk.shard"
            )
        with torch.no_grad():
            self.copy_(value)


_sharded_of = attrgetter("sharded_parameter")


class _Absent:
    """Makes functions that are given this leaf get the user's parameter instead."""

    __slots__ = ()
    sharded_parameter: nn.Parameter

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*mapped(args, _sharded_of, _Absent), **mapped(dict(kwargs or {}), _sharded_of, _Absent))


class ReleasedParameter(_Absent, Gathered):
    """The class of a `Gathered` while its bucket has no memory; a module may have kept it."""


class ReleasedDTensor(_Absent, Distributed):
    """The same for a DTensor, which is of torch's own class while it is full: any other costs more in each call."""


_RELEASED: dict[type, type] = {Gathered: ReleasedParameter, Distributed: ReleasedDTensor}
_GATHERED: dict[type, type] = {rests: whole for whole, rests in _RELEASED.items()}


def leaf_over(view: Tensor, param: nn.Parameter) -> Any:
    """Makes the leaf over gathered memory that modules compute with in the place of a parameter."""
    kind = nn.Parameter if is_placed(view) else Gathered
    leaf: Any = kind(view, requires_grad=param.requires_grad)
    leaf.__dict__.update(param.__dict__)
    leaf.sharded_parameter = param
    return leaf


def mark_gathered(leaves: Iterable[Tensor]) -> None:
    """Says that the bucket of these leaves has memory."""
    for leaf in leaves:
        leaf.__class__ = _GATHERED.get(type(leaf), type(leaf))


def mark_released(leaves: Iterable[Tensor]) -> None:
    """Says that the bucket of these leaves has no memory: they stand for the user's parameters."""
    for leaf in leaves:
        leaf.__class__ = _RELEASED.get(type(leaf), type(leaf))


def sharded_parameter_of(param: Tensor) -> nn.Parameter | None:
    """Returns the user's parameter that this leaf stands for; None where it is no such leaf.

    >>> sharded_parameter_of(nn.Parameter(torch.ones(1))) is None
    True
    """
    return getattr(param, "sharded_parameter", None)


@dataclass
class BucketEntry:
    """A parameter in its bucket; `full` is what modules compute with while it is gathered (stage 3).

    `shape`: what lies in the bucket, which of a DTensor that is `placed` is this rank's local tensor.
    """

    name: str
    param: nn.Parameter
    shape: torch.Size
    place: Piece
    placed: Placed | None = None
    full: Any = None

    @staticmethod
    def of(name: str, param: nn.Parameter, place: Piece) -> BucketEntry:
        here = here_of(param)
        return BucketEntry(name, param, torch.Size(here.sizes), place, here if isinstance(here, Placed) else None)

    @property
    def leaf(self) -> Any:
        """What autograd meets: at stage 3 `full`, else the parameter itself."""
        return self.param if self.full is None else self.full

    def show(self, local: Tensor) -> Tensor:
        """Returns a tensor of its shape as a DTensor, if the parameter is one."""
        return local if self.placed is None else self.placed.show(local)


def gather_full(group: Group, shard_numel: int, place: Piece, placed: Placed | None, one: Sharded) -> Tensor:
    """Gathers all elements of a tensor that is sharded as a parameter of a bucket is; all ranks call it.

    Of a DTensor, `placed` as that is, all that this rank has of it without zk.shard.
    """
    shape = one.shape if placed is None else torch.Size(placed.sizes)
    if group.size == 1:
        whole = one.local.detach().view(shape)
        return whole if placed is None else placed.show(whole)
    window = min(shard_numel, place.numel)
    mine = torch.zeros(window, dtype=one.span.dtype, device=group.device)
    mine[: one.span.numel()] = one.span.detach()
    everyone = torch.empty(window * group.size, dtype=mine.dtype, device=mine.device)
    group.all_gather(everyone, mine).wait()
    spans = []
    for rank, part in enumerate(everyone.split(window)):
        first = max(place.offset, rank * shard_numel)
        last = min(place.offset + place.numel, (rank + 1) * shard_numel)
        spans.append(part[: max(0, last - first)])
    whole = torch.cat(spans).view(shape).to(one.device, one.dtype)
    return whole if placed is None else placed.show(whole)


class BucketMemory:
    """The memory of one bucket: this rank's `shard`, and `full`, which stage 3 allocates while it is gathered.

    `kept`: memory of the shard, if it has any by then. With a `rest` it has that while it is used, and rests in another
    tier; on one rank it is all there is. With a `host` the shard stays in host memory, and a gather copies it to the
    compute device; or a `disk_copier` copies it from where it rests.
    """

    recorder: SpanRecorder | None = None  # of the optimizer that steps it
    label = "bucket"  # in profiles: the name of its unit where that is gathered, else its number

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        *,
        sharded: bool,
        pool: DevicePool,
        rest: Rest | None = None,
        host: HostTier | None = None,
        kept: Tensor | None = None,
        disk_copier: DiskCopier | None = None,
    ) -> None:
        self.bucket, self.group, self.device = bucket, group, pool.device
        self.pool = pool
        self.dtype: torch.dtype = getattr(torch, bucket.dtype)
        self.nbytes = bucket.padded_numel * self.dtype.itemsize
        self.rest = rest
        self.host, self.disk_copier = host, disk_copier
        self.sharded = sharded and (not group.alone or self.rest is not None or host is not None)
        self.entries: list[BucketEntry] = []
        self.called = "nothing"  # the name of its first parameter, for messages
        self.gathered = not self.sharded
        begin, numel = group.rank * bucket.shard_numel, bucket.shard_numel
        self._fetched = False
        self.fetch()
        if self.rest is not None and group.alone and disk_copier is None:
            self.full = self.rest.memory
        elif self.sharded:
            with pool.allocating():
                self.full = torch.empty(bucket.padded_numel, dtype=self.dtype, device=self.device)
        else:
            self.full = pool.empty(bucket.padded_numel, self.dtype)
        self.own = alias(self.full, begin, (numel,))
        if self.full is kept or not self.sharded:
            self.shard = self.own
        else:
            self.shard = pool.empty(numel, self.dtype) if kept is None else kept
        self._references = 0  # to the storage of `full`, from here
        self._views: list[Tensor] = []  # that are kept for whoever reads what autograd saved
        self._stays = False
        self._reading: Copy | None = None  # the last copy to the device, of a shard in host memory
        self._parts = [] if disk_copier is None else disk_copier.parts(self.own)

    def fill(self, entries: Sequence[BucketEntry], *, keeps_initial: bool, replicated: bool) -> dict[int, Tensor]:
        """Copies rank 0's values in, on every rank; returns what rounding lost of this rank's pieces, by place.

        A remainder where bf16 was rounded to as the optimizers do, else the values themselves.
        """
        self.entries = list(entries)
        self.called = repr(entries[0].name) if entries else "nothing"
        self.full.zero_()  # the padding too: what is never written would differ between ranks
        wide = any(entry.param.dtype != self.dtype for entry in entries)
        source = torch.zeros_like(self.full, dtype=torch.float32) if wide else self.full
        for entry in entries:
            span = source[entry.place.offset : entry.place.offset + entry.place.numel]
            span.view(entry.shape).copy_(local_of(entry.param).detach())
        self.group.broadcast(source).wait()
        lost: dict[int, Tensor] = {}
        if wide:
            remainder = self._round(source)
            lost = self._lost(source if remainder is None else remainder, replicated) if keeps_initial else {}
        if self.rest is not None:
            self.rest.change()
        if self.sharded and self.shard is not self.own:
            self.shard.copy_(self.own)
        return {number: one.to(self.shard.device) for number, one in lost.items()}

    def _round(self, source: Tensor) -> Tensor | None:
        """Rounds fp32 values into the bucket; returns a remainder for bf16, which is rounded as the optimizers do."""
        if self.dtype is not torch.bfloat16:
            self.full.copy_(source)
            return None
        high, remainder = split(source, "split16")
        self.full.copy_(high)
        return remainder

    def _lost(self, whole: Tensor, replicated: bool) -> dict[int, Tensor]:
        if replicated:
            places = self.bucket.places
            return {place.param: whole[place.offset : place.offset + place.numel].clone() for place in places}
        mine = whole[self.group.rank * self.bucket.shard_numel :]
        return {
            piece.param: mine[piece.offset : piece.offset + piece.numel].clone()
            for piece in self.bucket.pieces(self.group.rank)
        }

    def view(self, entry: BucketEntry) -> Tensor:
        """Returns the view of a parameter in the full bucket, in its shape."""
        return alias(self.full, entry.place.offset, entry.shape)

    def full_at(self, offset: int) -> Any:
        """Returns the leaf that the element at this offset belongs to (stage 3)."""
        before = (entry for entry in self.entries if entry.place.offset <= offset)
        full = max(before, key=lambda entry: (entry.place.offset, entry.place.numel)).full
        assert full is not None
        return full

    def piece(self, piece: Piece | None) -> Tensor:
        """Returns this rank's elements of a parameter, 1-D; none of them for None."""
        return alias(self.shard, 0, (0,)) if piece is None else alias(self.shard, piece.offset, (piece.numel,))

    def fetch(self) -> None:
        """Begins to fetch the shard, if it rests in another tier."""
        if self.rest is not None and not self._fetched:
            self.rest.fetch()
            self._fetched = True
            if self.recorder is not None and self.disk_copier is None:
                self.recorder.fetching("read", self.bucket.shard_numel * self.dtype.itemsize)

    def let_go(self) -> None:
        """Lets the shard go back to its tier: it has been gathered, or need not be."""
        if self._fetched:
            assert self.rest is not None
            self._fetched = False
            self.rest.leave()

    def gather(self) -> Handle:
        """Gathers the shards of all ranks into `full`."""
        handle = self.gather_into(self.full, self.own)
        return handle if self.recorder is None else self.recorder.sent("Gather", self.nbytes, self.group.size, handle)

    def gather_into(self, full: Tensor, own: Tensor) -> Handle:
        """Gathers the shards of all ranks into this memory, of which `own` is this rank's part.

        A shard in host memory is copied to that part first, while the device computes.
        """
        if self.host is None:
            return self.group.all_gather(full, self.shard)
        copied = self._copied(self.host, own)
        if self.group.alone:
            return copied
        assert self.host.copies is not None
        with self.host.copies.driver.aside("gather"):
            copied.wait()
            return self.group.all_gather(full)

    def _copied(self, host: HostTier, own: Tensor) -> Handle:
        """Starts to copy the shard to the device; a stream that waits for the handle waits for the copy."""
        if self.disk_copier is None:
            copy: Copy = host.fetch(self.shard, own)
            self._reading = copy
            return Handle(copy.gate, copy.done, copy.gate)
        assert self.rest is not None
        return self.disk_copier.start(self.rest, self._parts if own is self.own else self.disk_copier.parts(own))

    def settle(self) -> None:
        """Waits until no copy to the device reads the shard, so that it may be written."""
        reading, self._reading = self._reading, None
        if reading is not None:  # what rests on a disk waits for its users by itself
            reading.wait()

    def allocate(self) -> bool:
        """Allocates the full bucket in the storage of its views; returns whether somebody had kept it allocated."""
        if self.rest is not None:
            self.fetch()
        if self.shard is self.own:
            self.gathered = True
            return False
        storage = self.full.untyped_storage()
        kept = bool(storage.nbytes())
        if not kept and self.full.is_cpu:
            storage.resize_(self.nbytes)
            on_huge_pages(self.full)
        elif not kept:
            with self.pool.allocating():
                storage.resize_(self.nbytes)
        self.gathered = True
        return kept

    def keep(self, view: Tensor) -> Tensor | None:
        """Keeps a view of `full` as long as this, which is none of the program's; returns it, or None for what rests.

        In the list first: a Ctrl-C at any line leaves a view that is kept and counted, or none.
        """
        if self.rest is not None:  # what rests is given back by what refers to it, too
            return None
        self._views.append(view)
        return view

    def release(self) -> None:
        """Frees the full bucket; its views keep their storage, empty until it is next gathered.

        Where somebody else refers to the storage (a view that a module has kept, hooks of others for what autograd
        saves), it stays until that has ended: the first time that this is called there is nobody else. Where NumPy has
        seen it, torch changes its size no more.
        """
        if self.sharded and self.shard is self.own:
            self.gathered = False
        if self._fetched:
            self.let_go()
        if self.sharded and self.shard is not self.own:
            self.gathered = False
            storage = self.full.untyped_storage()
            references = storage_references(self.full)
            self._references = self._references or references
            if references <= self._references + len(self._views) * references_of_a_view() and storage.nbytes():
                if storage.resizable():
                    storage.resize_(0)
                elif not self._stays:
                    self._stays = True
                    logging.getLogger("zerokern").warning(
                        "the memory of %s and of what is gathered with it (%d bytes) is not given back from now on: "
                        "a forward has handed it to NumPy; there, hand a copy: weight.detach().clone().numpy()",
                        self.called,
                        self.nbytes,
                    )


@functools.cache
def references_of_a_view() -> int:
    """Returns how many references to a leaf's storage a view of some of its elements is, which notes keep."""
    leaf = nn.Parameter(torch.zeros(2, device="cpu"))
    before = storage_references(leaf)
    view = leaf.detach().as_strided((1,), (1,), 1)
    return storage_references(view) - before


def place(sharding: Any, memory: BucketMemory, lost: dict[int, Tensor], owners: dict[int, list[Owner]]) -> list[Shard]:
    """Points parameters at their filled bucket, or at this rank's span of it; returns their shards."""
    mine = {piece.param: piece for piece in memory.bucket.pieces(memory.group.rank)}
    shards = []
    for entry in memory.entries:
        number, param = entry.place.param, entry.param
        if sharding.replicated:
            start, span = 0, memory.view(entry).view(-1)
        else:
            piece = mine.get(number)
            start, span = (0, memory.piece(None)) if piece is None else (piece.start, memory.piece(piece))
        ranks = sharding.groups.each[memory.bucket.ranks]
        shard = Shard.of_model(entry.name, param, start, span, sharding, lost.get(number), ranks)
        if sharding.stage >= 3:
            _forget_weak_references(owners[id(param)])
            _forget_graphs(owners[id(param)])
            _shard(entry, memory, shard)
        else:
            _lay(entry, memory)
            give_shard(param, shard)
            shard.seen_version = version_of(param)
        shards.append(shard)
    memory.release()
    return shards


def _forget_weak_references(owners: list[Owner]) -> None:
    """Drops the weak references of recurrent modules: a parameter that has any cannot be swapped."""
    for owner in owners:
        if isinstance(owner.module, nn.RNNBase):
            owner.module._flat_weight_refs = [None] * len(owner.module._flat_weights_names)


def _forget_graphs(owners: list[Owner]) -> None:
    """Detaches what hooks have made of parameters before the first forward (old weight_norm, pruning)."""
    for module in {id(owner.module): owner.module for owner in owners}.values():
        for attribute in hooks.made_anew(module):
            made = module.__dict__.get(attribute)
            if isinstance(made, Tensor) and made.grad_fn is not None:
                module.__dict__[attribute] = made.detach().requires_grad_()
                hooks.on_gradient(module.__dict__[attribute], partial(_refuse_early, attribute))


def _refuse_early(attribute: str, _: Tensor) -> NoReturn:
    raise ShardError(
        f"a gradient reached a module's {attribute!r}, which a hook computes from its parameters before each forward; "
        "this value is from before zk.shard. Run the module's forward first, then compute with it"
    )


def _lay(entry: BucketEntry, memory: BucketMemory) -> None:
    """Moves a parameter into its bucket."""
    param, view = entry.param, entry.show(memory.view(entry))
    if entry.placed is None:
        param.data = view
        return
    body = nn.Parameter(view, requires_grad=param.requires_grad)
    body.__dict__.update(param.__dict__)
    hooks.share_hooks(param, body)
    exchange_bodies(param, body, entry.name)


def _shard(entry: BucketEntry, memory: BucketMemory, shard: Shard) -> None:
    param, view = entry.param, entry.show(memory.view(entry))
    full = leaf_over(view, param)
    give_shard(full, shard)
    entry.full = shard.leaf = full
    hooks.share_hooks(param, full)
    local = shard.piece.detach()
    body = (Sharded if entry.placed is None else ShardedDTensor).of(local, shard.here, name=shard.name)
    if memory.rest is not None:
        shard.piece.zk_rest = local.zk_rest = memory.rest
    body.gather_full = partial(gather_full, memory.group, memory.bucket.shard_numel, entry.place, entry.placed)
    body.requires_grad_(param.requires_grad)
    body.__dict__.update(param.__dict__)
    body._is_param = True
    give_shard(body, shard)
    exchange_bodies(param, body, shard.name)


def exchange_bodies(param: Tensor, body: Tensor, name: str) -> None:
    """Swaps the contents of two tensor objects, so that whoever holds `param` has the new ones."""
    try:
        torch.utils.swap_tensors(param, body)
    except RuntimeError as error:
        raise ShardError(
            f"{name!r} cannot be exchanged while something else holds it ({error}): drop losses and outputs of earlier "
            "forwards, and weak references to it, before"
        ) from error
