"""zk.deltas: follows a model in training, and says exactly what has changed of it since it was last asked."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.training_state import aliases, finish_updates, named_tensors, refuse_meta
from zerokern.comm import Group, during, group_of, group_on
from zerokern.core.errors import StateError, got
from zerokern.interop.delta import Delta, Difference
from zerokern.interop.tensorfile import code_of
from zerokern.kernels.changed import PARTS, Packed, changed_mask, pack_changed, unpack_changed, weighted_sum
from zerokern.kernels.formats import BLOCK, DTYPES
from zerokern.memory.here import Here
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.chained import unchained
from zerokern.optim.changed import Reader
from zerokern.optim.survey import params_of
from zerokern.zero.kinds import present, shardings_of
from zerokern.zero.shard import Shard, shards_of

__all__ = ["Deltas", "deltas"]

_TOGETHER = 64 << 20  # bytes of all ranks that are exchanged at once
_DENSE = -1
_MOST = 1.0  # of a tensor's bytes, that what is packed of it may take
_ANEW = "call zk.deltas(model, opt) anew, and begin from a full copy"
Header = list[int]  # of a tensor's part on one rank: the packed bytes, or _DENSE; those of places; its checksum
Sent = tuple[int, bool, list[int]]
"""Of one tensor: its place; whether all values are sent; how many bytes each rank sends."""


def deltas(model: nn.Module, opt: Any, *, group: Any = None) -> Deltas:
    """Follows a model from now on: each `take()` returns exactly what has changed since the last one.

    At the rates of fine-tuning most bf16 parameters keep their bits in a step. The update knows which do not, so that
    nothing is compared and no second copy is kept: it takes a bit for each parameter, and another one for those that
    wait to be taken. Under `zk.shard` all ranks call this, and `take()`, together; each gets all that has changed.

    What anything but these optimizers writes (`load_state_dict`, `copy_`, an average that is swapped in, a buffer) is
    in the next delta whole.

    Args:
        model: any module, sharded or not.
        opt: the optimizer of this library that steps it, a chain, a list of several, or None: then all that changes is
            whole.
        group: the ranks that call it, as a ProcessGroup or a DeviceMesh; by default all, as for `zk.save`.

    >>> import torch, zerokern as zk
    >>> model = torch.nn.Linear(1000, 1, bias=False, dtype=torch.bfloat16)
    >>> opt = zk.AdamW(model.parameters(), lr=1e-5)
    >>> follower = zk.deltas(model, opt)
    >>> model(torch.ones(1, 1000, dtype=torch.bfloat16)).sum().backward(); opt.step()
    >>> delta = follower.take()
    >>> delta.names, 0 < delta.nbytes < delta.dense_nbytes, follower.take().names
    (['weight'], True, [])
    """
    return Deltas(model, opt, group=group)


class Deltas:
    """Follows a model; `zk.deltas` makes it. It ends when nobody refers to it any more.

    >>> import torch, zerokern as zk
    >>> zk.deltas(torch.nn.Linear(2, 1), None).take()
    Delta(0 of 2 tensors, 0 of 12 bytes, ... to ...)
    """

    def __init__(self, model: nn.Module, opt: Any, *, group: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(got("model", type(model).__name__, "an nn.Module"))
        self.model = model
        self._optimizers: list[FusedOptimizer] = []
        for one in unchained(opt):
            if isinstance(one, FusedOptimizer):
                self._optimizers.append(one)
            else:
                allowed = "optimizers of zerokern, or None: what others write is sent whole"
                raise TypeError(got("opt", type(one).__name__, allowed))
        self._tensors = named_tensors(model)
        for name, tensor in self._tensors.items():
            refuse_meta(name, tensor)
            code_of(name, tensor.dtype)
        self._names = list(self._tensors)
        self._kinds = [_kind(tensor) for tensor in self._tensors.values()]
        shards = [one for opt in self._optimizers for one in opt.holdings.shards.shards]
        self._shards = shards_of(list(self._tensors.values()), self._names, shards)
        self._reader = Reader(list(zip(self._tensors.values(), self._shards, strict=True)))
        self._group = _group_of(group, self._shards)
        with during("zk.deltas", of="zk.deltas"):
            self._settle()
            self._parts = self._divide()
            self._mine = [any(rank == self._group.rank for rank, _ in some) for some in self._parts]
            for optimizer in self._optimizers:
                self._follow(optimizer)
            self._reader.note(whole=True)
            self._reader.places.clear()
            with torch.no_grad():
                self._sums = [self._sum(place) if mine else 0 for place, mine in enumerate(self._mine)]
            everyone = self._group.exchange(self._sums)
            self._before = [sum(some) % (1 << 64) for some in zip(*everyone, strict=True)]

    def __repr__(self) -> str:
        return f"Deltas(of {len(self._names)} tensors, rank {self._group.rank} of {self._group.size})"

    def take(self) -> Delta:
        """Returns what has changed since the last time, or since the follower was made. Waits for updates under way.

        An update that `zk.Delayed` has yet to publish is not part of it: its parameters are not seen yet. After an
        error the next delta has everything, whole.
        """
        try:
            with during("take() of zk.deltas", of="zk.deltas"), torch.no_grad():
                return self._take()
        except BaseException:
            self._reader.places.update(range(len(self._names)))
            raise

    def _take(self) -> Delta:
        headers: list[Header] = []
        packs: list[Packed | None] = []
        failure: Exception | None = None
        try:
            self._settle()
            self._collect()
            for place in range(len(self._names)):
                header, packed = self._pack(place)
                headers.append(header)
                packs.append(packed)
        except Exception as error:  # the other ranks wait in the exchange
            failure = error
        everyone = self._group.exchange(headers if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(everyone):
            if isinstance(theirs, str):
                raise StateError(f"rank {rank} could not say what has changed: {theirs}")
        after = [sum(theirs[place][-1] for theirs in everyone) % (1 << 64) for place in range(len(self._names))]
        made = {}
        for place, name in enumerate(self._names):
            tensor = self._tensors[name]
            made[name] = Difference(tuple(tensor.shape), tensor.dtype, self._before[place], after[place])
        for batch in self._batches(everyone):
            for (place, *_), part in zip(batch, self._gather(batch, everyone, packs), strict=True):
                made[self._names[place]].part = part
        self._before, self._sums = after, [header[-1] for header in headers]
        self._reader.places.clear()
        return Delta(made, aliases(self.model))

    # What has changed here.

    def _settle(self) -> None:
        """Returns once nothing is under way, and parameters are those of the last step."""
        for optimizer in self._optimizers:
            if not optimizer.holdings.closed:
                optimizer.runner.wait_until_whole(optimizer.param_groups)
        finish_updates(self.model)
        now = named_tensors(self.model)
        for kind, name, shard in zip(self._kinds, self._names, self._shards, strict=True):
            tensor = self._tensors[name]
            if now.get(name) is not tensor or not shard.fits(tensor) or _kind(tensor) != kind:
                raise StateError(f"{name!r} was exchanged, moved or divided since it is followed; {_ANEW}")
            if shard.materialized is not None:
                raise StateError(f"{name!r} is whole within zk.gathered; call take() outside of it")
        if len(now) != len(self._names):
            raise StateError(f"{next(name for name in now if name not in self._tensors)!r} came later; {_ANEW}")

    def _follow(self, optimizer: FusedOptimizer) -> None:
        here = optimizer.holdings
        if not here.delays:
            here.changes.tell(here.shards)  # what was changed before is of no delta of this one
        here.changes.add(self._reader)

    def _collect(self) -> None:
        """Has all optimizers tell what their updates have changed."""
        for optimizer in list(self._optimizers):
            here = optimizer.holdings
            if self._reader not in here.changes.readers or here.closed:  # and what was there is gone
                for param in params_of(optimizer.param_groups):
                    self._reader.doubt(param)
                if here.closed:
                    self._optimizers.remove(optimizer)
                    continue
                self._follow(optimizer)
            if not here.delays:
                here.changes.tell(here.shards)
        self._reader.note(whole=True)

    def _flat(self, place: int) -> Tensor:
        return self._shards[place].piece.detach().contiguous().view(-1)

    def _sum(self, place: int) -> int:
        shard, total = self._shards[place], 0
        with present(shard.piece):
            flat = self._flat(place)
            for start, numel, first in shard.here.runs():
                total += weighted_sum(flat[first : first + numel], start)
        return total % (1 << 64)

    def _pack(self, place: int) -> tuple[Header, Packed | None]:
        """Returns the header of this rank's part of a tensor, and the part, unless it is dense."""
        bits, is_dense = self._reader.take(place), place in self._reader.places
        if not self._mine[place]:
            return [_DENSE if is_dense else 0, 0, 0], None
        total, piece, packed = self._sum(place), self._shards[place].piece, None
        if bits is None:
            is_dense = is_dense or total != self._sums[place]  # whoever has written it
        elif not is_dense and piece.dtype in DTYPES:
            with present(piece):
                flat = self._flat(place)
                packed = pack_changed(bits.to(flat.device), flat)  # bits are where the update ran
        if packed is not None and packed.nbytes < _MOST * piece.nbytes:
            return [packed.nbytes, packed.places.numel(), total], packed
        return [_DENSE if is_dense or bits is not None else 0, 0, total], None

    # Which ranks have what.

    def _divide(self) -> list[list[tuple[int, Here]]]:
        """Returns by tensor which ranks say something of it, each with its elements: of ranks that have the same ones
        it is the first."""
        described = [(name, str(one.dtype), list(one.shape)) for name, one in self._tensors.items()]
        digest = zlib.crc32(json.dumps(described).encode())
        rows = [[one.here.offsets, one.here.sizes, one.here.start, one.here.numel] for one in self._shards]
        everyone = self._group.exchange([digest, rows])
        if any(theirs[0] != digest for theirs in everyone):
            raise StateError(
                "ranks have models with other tensors (names, shapes or dtypes differ); allowed: zk.deltas on ranks "
                "that have one model together (group=... names them)"
            )
        parts: list[list[tuple[int, Here]]] = []
        for place, (name, tensor) in enumerate(self._tensors.items()):
            ranks: dict[Here, int] = {}
            for rank, (_, theirs) in enumerate(everyone):
                offsets, sizes, start, numel = theirs[place]
                if numel:
                    ranks.setdefault(Here(tensor.shape, tuple(offsets), tuple(sizes), start, numel), rank)
            if sum(here.numel for here in ranks) != tensor.numel():
                raise StateError(
                    f"the ranks that call zk.deltas have not each element of {name!r} once; allowed: all ranks that "
                    "have a part of the model (group=... names them)"
                )
            parts.append([(rank, here) for here, rank in sorted(ranks.items(), key=lambda pair: pair[0].first)])
        return parts

    def _sent(self, place: int, headers: Sequence[Header]) -> Sent:
        """Returns how a tensor is sent. `headers`: of it, of all ranks."""
        tensor, nbytes = self._tensors[self._names[place]], [header[0] for header in headers]
        is_dense = _DENSE in nbytes or sum(nbytes) >= _MOST * tensor.numel() * tensor.itemsize
        if is_dense:
            numels = {rank: here.numel for rank, here in self._parts[place]}
            nbytes = [numels.get(rank, 0) * tensor.itemsize for rank in range(self._group.size)]
        return place, is_dense, nbytes

    def _batches(self, everyone: Sequence[Sequence[Header]]) -> Iterator[list[Sent]]:
        """Yields the tensors that have changed, as many at once as are exchanged together."""
        batch: list[Sent] = []
        total = 0
        for one in (self._sent(place, headers) for place, headers in enumerate(zip(*everyone, strict=True))):
            nbytes = sum(one[-1])
            if batch and total + nbytes > _TOGETHER:
                yield batch
                batch, total = [], 0
            if nbytes:
                batch.append(one)
                total += nbytes
        if batch:
            yield batch

    def _gather(
        self, batch: Sequence[Sent], everyone: Sequence[Sequence[Header]], packs: Sequence[Packed | None]
    ) -> Iterator[Tensor | Packed]:
        """Yields what has changed of these tensors, in their whole shape. All ranks send what they have of them."""
        mine = []
        for place, is_dense, nbytes in batch:
            packed, sent = packs[place], torch.empty(0, dtype=torch.uint8, device="cpu")
            if is_dense and nbytes[self._group.rank]:
                with present(self._shards[place].piece):
                    sent = self._flat(place).clone().view(torch.uint8)
            elif packed is not None and not is_dense:
                sent = torch.empty(packed.nbytes, dtype=torch.uint8, device=packed.values.device)
                packed.write(sent)
            mine.append(sent)
        received = self._move(mine, [nbytes for *_, nbytes in batch])
        for number, (place, is_dense, _) in enumerate(batch):
            tensor, found = self._tensors[self._names[place]], list[tuple[Here, Any]]()
            for rank, here in self._parts[place]:
                sent, nplaces = received[rank][number], everyone[rank][place][1]
                if is_dense:
                    found.append((here, sent.view(tensor.dtype)))
                elif sent.numel():
                    found.append((here, Packed.read(sent, here.numel, tensor.dtype, nplaces)))
                else:
                    found.append((here, Packed.none(here.numel, tensor.dtype, sent.device)))
            yield _joined(tensor, found)

    def _move(self, mine: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Returns by rank what each has sent of each tensor, as bytes. `sizes`: by tensor how many, of each rank."""
        group = self._group
        if group.size == 1:
            return [list(mine)]
        # each at a multiple of any element
        begins = [
            [*accumulate((-(-nbytes // 16) * 16 for nbytes in rank), initial=0)] for rank in zip(*sizes, strict=True)
        ]
        longest = max(rank[-1] for rank in begins)
        senders = [rank for rank, some in enumerate(begins) if some[-1]]
        span = torch.zeros(longest, dtype=torch.uint8, device=group.device)
        for begin, sent in zip(begins[group.rank], mine, strict=False):
            span[begin : begin + sent.numel()].copy_(sent)
        if len(senders) == 1:
            group.broadcast(span, senders[0]).wait()
            spans = [span] * group.size
        else:
            whole = torch.empty(longest * group.size, dtype=torch.uint8, device=group.device)
            group.all_gather(whole, span).wait()
            spans = list(whole.split(longest))
        return [
            [spans[rank][begin : begin + some[rank]] for begin, some in zip(begins[rank], sizes, strict=False)]
            for rank in range(group.size)
        ]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _joined(tensor: Tensor, parts: Sequence[tuple[Here, Any]]) -> Tensor | Packed:
    """Joins the parts of a tensor that ranks have: all values, or what has changed of them."""
    numel, known = tensor.numel(), parts[0][1]
    if isinstance(known, Tensor):
        whole = torch.empty(numel, dtype=tensor.dtype, device=known.device)
        for here, part in parts:
            _put(here, part, whole)
        return whole
    runs = [here.runs() for here, _ in parts]
    if all(len(some) == 1 and some[0][0] % BLOCK == 0 for some in runs):  # in order, and no block is of two ranks
        return Packed(numel, *(torch.cat([getattr(part, name) for _, part in parts]) for name in PARTS))
    # a 1 where anything has changed, and what it is now
    marks, whole = (torch.zeros(numel, dtype=tensor.dtype, device=known.values.device) for _ in range(2))
    for here, part in parts:
        for to, values in ((marks, torch.ones_like(part.values)), (whole, part.values)):
            flat = to.new_zeros(here.numel)
            unpack_changed(replace(part, values=values), flat)
            _put(here, flat, to)
    return pack_changed(changed_mask(torch.zeros_like(marks), marks), whole)


def _put(here: Here, part: Tensor, whole: Tensor) -> None:
    for start, count, first in here.runs():
        whole[start : start + count] = part[first : first + count]


def _group_of(group: Any, shards: Sequence[Shard]) -> Group:
    """Returns the ranks that take together: those that were named, all, or those that the model is sharded over."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        over = [one.group for one in shardings_of(shards)]
        group = over[0] if over else group_on()
    if isinstance(group, Group):
        return getattr(group, "shard", group)  # of replicas, too, one has everything
    pg = Ranks.of(group, "zk.deltas").pg
    return group_on() if pg is None else group_of(pg)
