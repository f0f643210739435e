"""Inputs that are the same on all ranks of a group, kept for a recomputation: each rank keeps its part of them, and
they are gathered when they are needed, one call ahead.

Which collectives are launched, and in which order, follows from the program alone, never from what happens to be alive:
a graph that somebody still holds on one rank, and nobody on another, changes nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from zerokern.activations.comparing import Compared, Comparing, aside, combined, fingerprint, refuse_unlike
from zerokern.activations.keeping import Keeper, Kept, Turn, View
from zerokern.activations.stretch import has_gaps, stretch
from zerokern.activations.version import Version
from zerokern.comm import Group, Handle, group_on
from zerokern.core.errors import got
from zerokern.memory.order import TierOrder
from zerokern.memory.tier import AnyTier, DevicePool
from zerokern.zero.kinds import is_replicated, local_of, shown_as

__all__ = ["Dividing", "keeper_for"]

ALIGN = 512  # bytes: a part begins where any dtype may, and a disk likes to


def keeper_for(keep: AnyTier | TierOrder, replicated: DeviceMesh | Group | None) -> Keeper | None:
    """What keeps inputs there, in parts where several ranks have them alike; None where they stay as they are.

    >>> keeper_for("device", None) is None
    True
    """
    order = TierOrder.of("keep", keep)
    if replicated is None:
        return None if order.tiers == ("device",) else Keeper(order)
    if isinstance(replicated, DeviceMesh) and replicated.ndim == 1:
        group = group_on(replicated, replicated.device_type)
        ranks = get_process_group_ranks(replicated.get_group())
    elif isinstance(replicated, Group):
        group, ranks = replicated, []
    else:
        advice = 'Choose the one of tensor parallelism, as in mesh["tp"]'
        raise ValueError(
            got("replicated", replicated, "one dimension of a DeviceMesh, or a zerokern.comm.Group", advice)
        )
    return keeper_for(order, None) if group.size == 1 else Dividing(order, group, ranks)


class Dividing(Keeper):
    """What the ranks of a group keep in parts, in one place: `"device"`, where they are, or as of any `Keeper`.

    `ranks`: their numbers in the world, by which dimensions of a DTensor's mesh are known.

    >>> x = torch.ones(1 << 19)
    >>> keeper = Dividing("device", Group(0, 1, x.device, "alone"), [0])
    >>> turn = keeper.begin(); packed = turn.pack(x); following = keeper.begin()
    >>> [part.piece.nbytes for part in turn.parts]
    [2097152]
    """

    def __init__(self, keep: AnyTier | TierOrder, group: Group, ranks: Sequence[int]) -> None:
        super().__init__(keep)
        self.group, self.ranks = group, list(ranks)
        self._stays = self.order.tiers == ("device",)
        self.latest: TurnMark | None = None
        self._under_way: list[tuple[weakref.ref[Whole], Handle]] = []
        self._pools: dict[torch.device, DevicePool] = {}
        self.comparing = Comparing(group, self.copies_of)

    def moves(self, tensor: Tensor) -> bool:
        return not self._stays and super().moves(tensor)

    def begin(self) -> DividedTurn:
        with self.lock:
            self._sweep()
            latest, turn = self.latest, DividedTurn(self)
            self.latest = turn.mark
            if latest is not None:
                latest.leave()
            return turn

    def before(self, turn: Turn) -> TurnMark | None:
        assert isinstance(turn, DividedTurn)
        return turn.before

    def part_of(self, tensor: Tensor) -> Kept | None:
        """What stands for this rank's part of the memory of a tensor; of one with gaps, in which others have theirs,
        all of it, as of a tensor that is not the same everywhere."""
        if tensor.device.type != self.group.device.type or has_gaps(tensor):
            return self.of(tensor)
        return self.found(tensor, KeptPart)

    def room(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for a part, beside nothing that is short-lived if it may stay on its device."""
        if "device" not in self.order.tiers:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device not in self._pools:
            self._pools[device] = DevicePool(device)
        with self._pools[device].lasting():
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def gather(self, whole: Whole, piece: Tensor | None = None) -> Handle:
        """All ranks' parts are on their way into it."""
        handle = self.group.all_gather(whole.out, piece)
        self._under_way.append((weakref.ref(whole), handle))
        return handle

    def _sweep(self) -> None:
        """What was gathered for graphs that are gone has to end before its memory does."""
        waiting, self._under_way = self._under_way, []
        for whole, handle in waiting:
            found = whole()
            if found is None:
                handle.wait()
            elif not found.has_come:
                self._under_way.append((whole, handle))


class KeptPart(Kept):
    """A stretch of memory of which this rank keeps its part: `piece`, on its device, or elsewhere as any `Kept`."""

    _keeper: Dividing

    def __init__(self, keeper: Dividing, tensor: Tensor, begin: int, nbytes: int) -> None:
        super().__init__(keeper, tensor, begin, nbytes)
        size = keeper.group.size
        self.each = -(-nbytes // (size * ALIGN)) * ALIGN
        self.print = torch.zeros((), dtype=torch.int64)
        self._is_divided = False

    @property
    def piece(self) -> Tensor | None:
        """This rank's part, while that has not left."""
        return self._here if self._is_divided else None

    def leave(self) -> None:
        """All but this rank's part is let go."""
        if not self._is_divided:
            whole, self._is_divided = self._here, True
            assert whole is not None
            self.print = fingerprint(whole)
            own = whole[self._keeper.group.rank * self.each :][: self.each]
            piece = self._here = self._keeper.room(self.each, self.device)
            piece[: own.numel()].copy_(own)
            piece[own.numel() :].zero_()
        self._keeper.rest(self, self.each)


class Whole:
    """What is gathered of a part of each rank, for one turn; `unread` views of it are to be read."""

    def __init__(self, part: KeptPart, unread: int) -> None:
        self._keeper: Dividing = part._keeper
        self.unread, self.has_come = unread, False
        group = self._keeper.group
        self.out = torch.empty(part.each * group.size, dtype=torch.uint8, device=part.device)
        self._handle: Handle | None = None
        self._piece, self._coming = part.piece, None
        if self._piece is None:
            self._coming = part.come(self.out[group.rank * part.each :][: part.each])
        if self._keeper.in_stream_order:  # of all ranks, whichever tier has the part of each
            with nullcontext() if self._coming is None else aside(self._keeper.copies_of(self.out), "gather"):
                self.launch()

    def launch(self) -> None:
        """This rank's part comes from where it rests; then the others'."""
        if self._handle is None:
            if self._coming is not None:
                self._coming()
            self._handle = self._keeper.gather(self, self._piece)
            self._piece = None

    def read(self) -> Tensor:
        """All of it, for the current stream."""
        assert self._handle is not None
        self._handle.wait()
        self.has_come = True
        self.unread -= 1
        return self.out


class TurnMark:
    """What is known of a turn on all ranks alike, whether or not somebody still holds its graph here."""

    def __init__(self, turn: DividedTurn, keeper: Dividing) -> None:
        self.has_left = self.was_used = False
        self.shapes: list[str] = []
        self.nbytes: list[tuple[int, torch.device]] = []  # of what is gathered
        self._turn, self._keeper = weakref.ref(turn), keeper
        self._compared: Compared | None = None
        self._prints: list[Tensor] | None = None

    def leave(self) -> None:
        """Its inputs are divided; all ranks say what they were."""
        if self.was_used:
            return
        turn, number = self._turn(), None
        self.has_left = True
        if turn is not None:
            turn.leave()
            self._prints = [part.print for part in turn.parts]
            number = combined(self._prints, self.shapes, self._keeper.group.device)
        self._compared = self._keeper.comparing.begin(number)

    def use(self) -> None:
        """Its inputs are needed. Raises on all ranks where they were not the same on all of them."""
        self.was_used = True
        if self._compared is not None and self._compared.differs():
            prints = None if self._prints is None else [int(one) for one in self._prints]
            refuse_unlike(self._keeper.group.exchange([self.shapes, prints]))

    def fetch(self) -> None:
        """Its inputs are needed next."""
        if not self.has_left or self.was_used:
            return
        self.use()
        turn = self._turn()
        if turn is not None:
            turn.fetch()
            turn.gather()
        elif self._keeper.in_stream_order:  # alive elsewhere perhaps
            for nbytes, device in self.nbytes:
                self._keeper.group.all_gather(torch.zeros(nbytes, dtype=torch.uint8, device=device)).wait()


class Shown:
    """What autograd holds in the place of a DTensor: its local tensor's view, and what makes a DTensor of that."""

    __slots__ = ("show", "version", "view")

    def __init__(self, saved: Tensor, view: View) -> None:
        self.show, self.version, self.view = shown_as(saved), Version(saved), view


class DividedTurn(Turn):
    """What one call keeps, some of it in parts."""

    def __init__(self, keeper: Dividing) -> None:
        super().__init__(keeper)
        self.before = keeper.latest
        self.mark = TurnMark(self, keeper)
        self._dividing = keeper
        self._here: dict[KeptPart, Tensor] = {}  # until it leaves: another turn may have divided the same memory before
        self._views: Counter[KeptPart] = Counter()
        self._coming: dict[KeptPart, Whole] = {}

    @property
    def parts(self) -> list[KeptPart]:
        """In the order in which they were kept."""
        return list(self._views)

    def pack(self, saved: Tensor) -> Any:
        with self._dividing.lock:
            local = local_of(saved)
            is_dtensor = local is not saved
            alike = not is_dtensor or is_replicated(saved, self._dividing.ranks)
            stays = is_dtensor and saved.is_leaf and saved.requires_grad
            kept = None if stays else self._dividing.part_of(local) if alike else self._dividing.of(local)
            if kept is None:
                return self.pack_as_it_is(saved)
            if isinstance(kept, KeptPart):
                self._add(kept, local)
            else:
                self.kept.append(kept)
            view = View(local, kept, self)
            return Shown(saved, view) if is_dtensor else view

    def _add(self, part: KeptPart, tensor: Tensor) -> None:
        if part not in self._views:
            self._here[part] = stretch(tensor.untyped_storage(), part.begin, part.nbytes, part.device)
            self.mark.shapes.append(f"{tuple(tensor.shape)} {tensor.dtype} of {part.nbytes} bytes")
            self.mark.nbytes.append((part.each * self._dividing.group.size, part.device))
        self._views[part] += 1

    def unpack(self, packed: Any) -> Tensor:
        with self._dividing.lock:
            self.mark.use()
            if type(packed) is not Shown:
                return super().unpack(packed)
            packed.version.check(packed.view.shape)
            return packed.show(super().unpack(packed.view))

    def leave(self) -> None:
        super().leave()
        for part in self._views:
            part.leave()
        self._here.clear()

    def gather(self) -> None:
        """What it has in parts is on its way, from all ranks, unless it is already."""
        for part, views in self._views.items():
            if part not in self._coming:
                self._coming[part] = Whole(part, views)

    def bytes_of(self, kept: Kept) -> Tensor:
        if not isinstance(kept, KeptPart):
            return super().bytes_of(kept)
        if not self.mark.has_left:
            return self._here[kept]
        if kept not in self._coming:
            self.gather()
        for whole in self._coming.values():
            whole.launch()
        found = self._coming[kept]
        if found.unread == 1:
            del self._coming[kept]
        return found.read()
