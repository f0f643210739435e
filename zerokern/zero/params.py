"""The memory of parameters: a flat bucket that they are views of, whole or this rank's shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerokern.comm import Group
from zerokern.kernels import split
from zerokern.zero.homes import alias
from zerokern.zero.partition import Bucket, Piece

__all__ = ["BucketMemory", "Tenant"]


@dataclass
class Tenant:
    """A parameter in its bucket; `full` is what modules compute with while it is gathered (stage 3)."""

    name: str
    param: nn.Parameter
    shape: torch.Size
    place: Piece
    full: nn.Parameter | None = None


class BucketMemory:
    """One bucket: `shard` is always there; `full` too below stage 3 and on one rank, else its memory comes and goes."""

    def __init__(self, bucket: Bucket, group: Group, *, sharded: bool, device: torch.device) -> None:
        self.bucket, self.group, self.device = bucket, group, device
        self.dtype: torch.dtype = getattr(torch, bucket.dtype)
        self.sharded = sharded and group.size > 1
        self.tenants: list[Tenant] = []
        self.gathered = not self.sharded
        begin, numel = group.rank * bucket.shard_numel, bucket.shard_numel
        self.full = torch.empty(bucket.padded_numel, dtype=self.dtype, device=device)
        self.own = alias(self.full, begin, (numel,))
        self.shard = torch.empty(numel, dtype=self.dtype, device=device) if self.sharded else self.own

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

    def piece(self, piece: Piece | None) -> Tensor:
        """This rank's elements of a parameter, 1-D; none of them for None."""
        return alias(self.shard, 0, (0,)) if piece is None else alias(self.shard, piece.offset, (piece.numel,))

    def allocate(self) -> None:
        """Memory for the full bucket, in the storage that the views of it have."""
        self.full.untyped_storage().resize_(self.nbytes)
        self.gathered = True

    def release(self) -> None:
        """Give the full bucket's memory back; its views keep their storage, empty until it is next gathered."""
        if self.sharded:
            self.full.untyped_storage().resize_(0)
            self.gathered = False
