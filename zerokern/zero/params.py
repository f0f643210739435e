"""The memory of parameters: a flat bucket that they are views of, whole or this rank's shard of it."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Group
from zerokern.core.errors import ShardError
from zerokern.kernels import split
from zerokern.memory.place import DevicePool
from zerokern.zero.homes import alias
from zerokern.zero.partition import Bucket, Piece
from zerokern.zero.sharded import Sharded

__all__ = ["BucketMemory", "Gathered", "Tenant", "whole_like"]


@dataclass
class Tenant:
    """A parameter in its bucket; `full` is what modules compute with while it is gathered (stage 3)."""

    name: str
    param: nn.Parameter
    shape: torch.Size
    place: Piece
    full: Gathered | None = None


_DATA: Any = Tensor.data


class Gathered(nn.Parameter):
    """What `Tenant.full` is: a write by way of `.data` raises no version, so that whoever asks for it is noted."""

    touched: bool = False
    resting_for: nn.Parameter  # what the user knows

    @property
    def data(self) -> Tensor:
        self.touched = True
        return _DATA.__get__(self)

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


def whole_like(group: Group, shard_numel: int, place: Piece, one: Sharded) -> Tensor:
    """All elements of a tensor that is sharded as the parameter at a place of a bucket is; all ranks call it."""
    if group.size == 1:
        return one.local.detach().view(one.shape)
    window = min(shard_numel, place.numel)
    mine = torch.zeros(window, dtype=one.span.dtype, device=one.span.device)
    mine[: one.span.numel()] = one.span.detach()
    everyone = torch.empty(window * group.size, dtype=mine.dtype, device=mine.device)
    group.all_gather(everyone, mine).wait()
    spans = []
    for rank, part in enumerate(everyone.split(window)):
        first = max(place.offset, rank * shard_numel)
        last = min(place.offset + place.numel, (rank + 1) * shard_numel)
        spans.append(part[: max(0, last - first)])
    return torch.cat(spans).view(one.shape).to(one.dtype)


class BucketMemory:
    """One bucket: `shard` is always there; `full` too below stage 3 and on one rank, else its memory comes and goes."""

    def __init__(self, bucket: Bucket, group: Group, *, sharded: bool, pool: DevicePool) -> None:
        self.bucket, self.group, self.device = bucket, group, pool.device
        self._pool = pool
        self.dtype: torch.dtype = getattr(torch, bucket.dtype)
        self.sharded = sharded and not group.alone
        self.tenants: list[Tenant] = []
        self._sorted: list[Tenant] = []
        self._begins: list[int] = []
        self.gathered = not self.sharded
        begin, numel = group.rank * bucket.shard_numel, bucket.shard_numel
        with pool.allocating() if self.sharded else nullcontext():
            self.full = torch.empty(bucket.padded_numel, dtype=self.dtype, device=self.device)
        self.own = alias(self.full, begin, (numel,))
        self.shard = torch.empty(numel, dtype=self.dtype, device=self.device) if self.sharded else self.own
        self._references = 0  # to the storage of `full`, from here
        self._stays = False

    @property
    def called(self) -> str:
        """The name of its first parameter, for messages."""
        return repr(self.tenants[0].name) if self.tenants else "nothing"

    @property
    def nbytes(self) -> int:
        return self.bucket.padded_numel * self.dtype.itemsize

    def fill(self, tenants: Sequence[Tenant], *, keeps_initial: bool, replicated: bool) -> dict[int, Tensor]:
        """Take rank 0's values in, on every rank; returns what rounding lost of this rank's pieces, by place.

        A remainder where bf16 was rounded to as the optimizers do, else the values themselves.
        """
        self.tenants = list(tenants)
        self.full.zero_()  # the padding too: what is never written would differ between ranks
        wide = any(tenant.param.dtype != self.dtype for tenant in tenants)
        source = torch.zeros_like(self.full, dtype=torch.float32) if wide else self.full
        for tenant in tenants:
            span = source[tenant.place.offset : tenant.place.offset + tenant.place.numel]
            span.view(tenant.shape).copy_(tenant.param.detach())
        self.group.broadcast(source).wait()
        lost: dict[int, Tensor] = {}
        if wide:
            remainder = self._round(source)
            lost = self._lost(source if remainder is None else remainder, replicated) if keeps_initial else {}
        if self.sharded:
            self.shard.copy_(self.own)
        return lost

    def _round(self, source: Tensor) -> Tensor | None:
        """fp32 values into the bucket; a remainder for bf16, whose rounding rule is the optimizers' own."""
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

    def view(self, tenant: Tenant) -> Tensor:
        """A parameter of the full bucket, in its shape."""
        return alias(self.full, tenant.place.offset, tenant.shape)

    def full_at(self, offset: int) -> Gathered:
        """What modules compute with that the element at this offset belongs to (stage 3)."""
        if not self._begins:
            self._sorted = sorted(self.tenants, key=lambda one: (one.place.offset, one.place.numel))
            self._begins = [tenant.place.offset for tenant in self._sorted]
        full = self._sorted[bisect_right(self._begins, offset) - 1].full
        assert full is not None
        return full

    def piece(self, piece: Piece | None) -> Tensor:
        """This rank's elements of a parameter, 1-D; none of them for None."""
        return alias(self.shard, 0, (0,)) if piece is None else alias(self.shard, piece.offset, (piece.numel,))

    def allocate(self) -> bool:
        """Memory for the full bucket, in the storage that the views of it have; whether somebody else has kept it."""
        storage = self.full.untyped_storage()
        kept = bool(storage.nbytes())
        if not kept:
            with self._pool.allocating():
                storage.resize_(self.nbytes)
        self.gathered = True
        return kept

    def release(self) -> None:
        """Give the full bucket's memory back; its views keep their storage, empty until it is next gathered.

        Where somebody else refers to the storage (a view that a module has kept, hooks of others for what autograd
        saves), it stays until that has ended: the first time that this is called there is nobody else. Where NumPy has
        seen it, torch changes its size no more.
        """
        if self.sharded:
            storage = self.full.untyped_storage()
            references = torch._C._storage_Use_Count(storage._cdata)
            self._references = self._references or references
            if references <= self._references and storage.nbytes():
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
            self.gathered = False
