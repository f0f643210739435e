"""Divides state on disk into records, and says what of a parameter's state lies in which.

Where elements are updated by themselves a record holds all tensors of some. A matrix is updated in two passes: averages
move and become a direction, of all of the matrix, before the direction changes parameters, masters and remainders. So
a matrix has all its state in one record, perhaps with others; or, if it is too large, records for the first pass and
then records for the second. Each is read once and written once, and one direction at a time is in memory.

Of a matrix that ranks have cut, which comes together between the passes, each rank has records for the first and others
for the second, perhaps with other matrices of the same bucket, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.io.pieces import PAGE, Width, columns, plan
from zerokern.kernels.formats import BLOCK
from zerokern.kernels.reference import SUMSQ_CHUNK
from zerokern.memory import Slot as Cell
from zerokern.memory.stream import Record
from zerokern.optim.formats import ON_DISK, Layout, Slot, begin_master, exact_of, widths_of
from zerokern.optim.matrices import Matrix, group_of, matrices_of, parts_of_matrices
from zerokern.zero.kinds import present
from zerokern.zero.shard import Shard

__all__ = ["LEAST_SLOT", "Content", "OnDisk", "RecordSpan", "StateSpan", "on_disk_of", "records_of", "state_span"]

LEAST_SLOT = 4 * SUMSQ_CHUNK  # bytes: the fp32 averages whose squares are summed together
_PIECE = 1 << 18  # elements that are rounded at once


class StateSpan(NamedTuple):
    """State of `numel` elements of a parameter, which records are to hold.

    `cut`: of matrices that ranks have cut, what is here of each. `bucket`: its number, else None: what is in one bucket
    is updated together.
    """

    numel: int
    layout: Layout
    cut: Sequence[Matrix] = ()
    bucket: int | None = None


def state_span(shard: Shard | None, numel: int, layout: Layout) -> StateSpan:
    """Returns what records need to know of the state of a parameter, of which `numel` elements are here."""
    if not layout.matrices or shard is None or group_of(shard) is None:
        return StateSpan(numel, layout)
    if shard.shape.numel() % (split := layout.matrices):
        raise ValueError(got("split", split, f"a number that divides {shard.shape.numel()}, a parameter's elements"))
    found = matrices_of(shard.name, shard.shape, shard.shape.numel(), split, in_blocks=False)
    return StateSpan(numel, layout, parts_of_matrices(shard, found), id(shard.gradients))


class RecordSpan:
    """What a record holds of a parameter: `slots` of `numel` elements from `start` on, at `offset` of the record.

    `span`: the number of the parameter. `averages`, `applies`: which passes over a matrix update it. `record`: on the
    disk, once there is room for it. `begun`: its state has first values.
    """

    __slots__ = ("applies", "averages", "begun", "numel", "offset", "record", "slots", "span", "start", "widths")

    def __init__(
        self,
        span: int,
        start: int,
        numel: int,
        offset: int,
        slots: tuple[Slot, ...],
        *,
        averages: bool = True,
        applies: bool = True,
    ) -> None:
        self.span, self.start, self.numel, self.offset, self.slots = span, start, numel, offset, slots
        self.averages, self.applies = averages, applies
        self.record: Any = None
        self.begun = False

    def put_in(self, record: Record) -> None:
        """Gives it room in a record on the disk; from then on `widths` of its slots are known."""
        self.record, self.widths = record, widths_of(self.slots)
        record.unsettled.add(self)

    @property
    def offsets(self) -> list[int]:
        """Where in its record each tensor's part begins, in bytes."""
        return [self.offset + offset for offset in columns(self.widths, self.numel)[0]]


class OnDisk:
    """Stands in `optimizer.state` for one parameter's tensors on disk; `state_dict` reads them.

    `initial`: what moments begin with. `first`: keys of moments that are yet to start from the gradient. `kept`:
    remainders were loaded that are not all zero. `exact`: what is kept of the fp32 values that the parameter began
    with, for places yet to begin.
    """

    __slots__ = ("disk", "exact", "first", "initial", "kept", "layout", "param", "places", "shape", "slots")

    def __init__(self, disk: Any, param: Tensor, layout: Layout) -> None:
        self.disk, self.param, self.layout, self.shape = disk, param, layout, param.shape
        self.slots = layout.columns
        self.initial, self.kept = 0.0, False
        self.first: frozenset[str] = frozenset()
        self.exact: Tensor | None = None
        self.places: list[RecordSpan] = []

    @property
    def has_master(self) -> bool:
        return any(slot.column in ("master", "remainder") for slot in self.slots)

    @property
    def dropped(self) -> bool:
        return any(place.record.dropped for place in self.places)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.described().values())

    def fits(self, disk: object, param: Tensor, layout: Layout) -> bool:
        """Whether this is the state of that parameter as it is now, so that nothing is left to check."""
        same = self.disk is disk and self.param is param and self.layout is layout and self.shape == param.shape
        return same and not self.dropped

    def described(self) -> dict[str, Tensor]:
        """Returns tensors without memory that have the dtypes and shapes of those on disk."""
        numel = self.shape.numel()
        shapes = {"param": self.shape, "blocks": torch.Size([-(-numel // BLOCK)])}
        return {s.key: torch.empty(shapes[s.extent], dtype=s.dtype, device="meta") for s in self.slots}

    def begin_anew(self, *, loaded: bool) -> bool:
        """Marks masters to be made from the parameter when they are next fetched. Returns whether that drops loaded
        remainders."""
        for place in self.places:
            place.record.unsettled.add(place)
        self.exact = None
        lost, self.kept = loaded and self.kept, False
        return lost

    def forget_exact(self) -> None:
        """Drops the exact first values once every place has been given its own."""
        if self.exact is not None and all(place.begun for place in self.places):
            self.exact = None

    @torch.no_grad()
    def begin_with(self, kept: Tensor | None) -> None:
        """Keeps what is left of the fp32 values that the parameter was rounded from, until its places begin with them.

        Rounded to 24 bits some of them are nearer to the next bf16: the parameter becomes that at once, as it does
        where state lies in memory.
        """
        short = next((slot for slot in self.slots if slot.key == "remainder" and slot.dtype is torch.int8), None)
        self.exact = kept
        if kept is None or short is None:
            return
        self.exact = torch.empty(kept.numel(), dtype=short.dtype, device=kept.device)
        with present(self.param, written=True):
            columns = (self.param.detach().view(-1), kept.view(-1), self.exact)
            for param, old, new in zip(*(one.split(_PIECE) for one in columns), strict=True):
                begin_master(param, short, new, exact_of(param, old))

    def begin_span(self, place: RecordSpan, cell: Cell) -> None:
        """Writes first values to a place that is in a cell of the ring; or new masters, once it has begun."""
        if not place.slots:
            return
        with present(self.param, written=self.exact is not None):
            mine = slice(place.start, place.start + place.numel)
            param = self.param.detach().reshape(-1)[mine].to("cpu")  # which a frozen one on a device is not
            kept = None if self.exact is None or place.begun else self.exact.view(-1)[mine].to("cpu")
            for slot, tensor in zip(place.slots, self.cells(place, cell).values(), strict=True):
                if slot.key == "master" and place.begun:
                    torch.where(tensor.to(param.dtype) == param, tensor, param.float(), out=tensor)
                elif slot.key == "remainder" and kept is not None and kept.dtype is slot.dtype:
                    tensor.copy_(kept)
                elif slot.key in ("master", "remainder"):
                    begin_master(param, slot, tensor.zero_(), None if kept is None else exact_of(param, kept))
                elif not place.begun:
                    tensor.fill_(self.initial if slot.extent == "param" else 0.0)

    def cells(self, place: RecordSpan, cell: Cell) -> dict[str, Tensor]:
        """Returns the tensors of a place by key, 1-D, where they lie in a cell of the ring."""
        found = {}
        for slot, width, offset in zip(place.slots, place.widths, place.offsets, strict=True):
            found[slot.key] = cell.lease.tensor(slot.dtype, (-(-place.numel // width.per),), offset=offset)
        return found

    def parts(self, place: RecordSpan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the place's part, 1-D, of those whole tensors that there are."""
        ends, found = place.start + place.numel, {}
        for slot, (_, per) in zip(place.slots, place.widths, strict=True):
            if slot.key in tensors:
                found[slot.key] = tensors[slot.key].view(-1)[place.start // per : -(-ends // per)]
        return found

    def __repr__(self) -> str:
        return f"OnDisk({', '.join(slot.key for slot in self.slots)}: {self.nbytes:,} bytes; read by state_dict())"

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "optimizer state on disk cannot be copied or pickled: two optimizers would write the same records. Take "
            "optimizer.state_dict(), which reads it back, and load that into an optimizer with a folder of its own"
        )


def on_disk_of(entry: Any) -> OnDisk | None:
    """Returns what stands for tensors on disk in a state entry, if there is something."""
    found = entry.get(ON_DISK) if isinstance(entry, dict) else None
    return found if isinstance(found, OnDisk) else None


Content = tuple[tuple[RecordSpan, ...], int]
"""What one record holds, and its bytes."""


def records_of(spans: Sequence[StateSpan], slot_nbytes: int) -> list[Content]:
    """Returns the records, of at most `slot_nbytes`, that hold the state of parameters of so many elements.

    They have the order of the parameters; what ranks have cut comes last, bucket by bucket.

    >>> from zerokern.optim import AdamW, Muon
    >>> import torch
    >>> of = lambda kind: kind._algorithm.layout({"split": 1, "master_format": None, "state_format": "fp32",
    ...     "stochastic_seed": None}, torch.bfloat16)
    >>> for held, nbytes in records_of([StateSpan(100_000, of(Muon))], 1 << 19):
    ...     print([([slot.key for slot in one.slots], one.start, one.numel) for one in held], nbytes)
    [(['momentum_buffer'], 0, 100000)] 401408
    [(['remainder'], 0, 100000)] 200704
    """
    made: list[Content] = []
    kept_whole = [number for number, span in enumerate(spans) if span.bucket is None]
    for by_matrix, some in groupby(kept_whole, key=lambda number: spans[number].layout.matrices > 0):
        numbers = list(some)
        if by_matrix:
            made += _of_matrices(numbers, spans, slot_nbytes)
        else:
            parts = [(number, 0, spans[number].numel, spans[number].layout.columns) for number in numbers]
            made += _packed(parts, slot_nbytes, cuts=True)
    buckets: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        if span.bucket is not None:
            buckets.setdefault(span.bucket, []).append(number)
    for numbers in buckets.values():
        made += _of_cut(sorted(numbers, key=lambda number: spans[number].cut[0].order), spans, slot_nbytes)
    return made


_Part = tuple[int, int, int, tuple[Slot, ...]]
"""The number of a parameter, and of its state from which element on how many, and which tensors."""


def _packed(parts: Sequence[_Part], slot_nbytes: int, *, cuts: bool, **passes: bool) -> Iterator[Content]:
    """Yields records that hold the tensors of these, side by side. `passes`: as of a `RecordSpan`."""
    numels, widths = [numel for _, _, numel, _ in parts], [widths_of(slots) for *_, slots in parts]
    for segments, nbytes in plan(numels, widths, slot_nbytes, cuts=cuts):
        found = []
        for segment in segments:
            number, start, _, slots = parts[segment.param]
            at = start + segment.start
            found.append(RecordSpan(number, at, segment.numel, segment.offset, slots, **passes))
        yield tuple(found), nbytes


def _by_size(parts: Sequence[_Part], slot_nbytes: int) -> Iterator[tuple[bool, list[_Part]]]:
    """Yields runs of parts that each fit a record, or do not."""
    for small, some in groupby(parts, key=lambda part: columns(widths_of(part[3]), part[2])[1] <= slot_nbytes):
        yield small, list(some)


def _of_matrices(numbers: Sequence[int], spans: Sequence[StateSpan], slot_nbytes: int) -> Iterator[Content]:
    parts: list[_Part] = []
    for number in numbers:
        numel, layout, *_ = spans[number]
        if numel % layout.matrices:
            raise ValueError(got("split", layout.matrices, f"a number that divides {numel}, a parameter's elements"))
        each = numel // layout.matrices
        parts += [(number, start, each, layout.columns) for start in range(0, numel, each or 1)]
    for small, some in _by_size(parts, slot_nbytes):
        if small:
            yield from _packed(some, slot_nbytes, cuts=False)
        else:
            for part in some:
                yield from _of_large(part, slot_nbytes)


def _of_cut(numbers: Sequence[int], spans: Sequence[StateSpan], slot_nbytes: int) -> Iterator[Content]:
    """Yields the records of a bucket's matrices that ranks have cut, those with most work first.

    Records of both passes never hold the same matrix: one would be written before the matrix has come together.
    """
    for averages in (True, False):
        of_pass = {"averages": averages, "applies": not averages}
        parts: list[_Part] = []
        for number in numbers:
            slots = _divided(spans[number].layout.columns)[0 if averages else 1]
            parts += [(number, one.start, one.numel, slots) for one in spans[number].cut if one.numel and slots]
        for small, some in _by_size(parts, slot_nbytes):
            if small:
                yield from _packed(some, slot_nbytes, cuts=False, **of_pass)
                continue
            for number, start, numel, slots in some:
                for begin, count, nbytes in _pieces(slots, numel, slot_nbytes):
                    yield (RecordSpan(number, start + begin, count, 0, slots, **of_pass),), nbytes


def _divided(slots: Sequence[Slot]) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Returns averages, which the first pass over a matrix updates, and all else."""
    averages = tuple(slot for slot in slots if slot.column.startswith("exp_avg"))
    return averages, tuple(slot for slot in slots if slot not in averages)


def _of_large(part: _Part, slot_nbytes: int) -> Iterator[Content]:
    """Yields the records of one matrix: of its averages, cut where sums of squares are, then of all else."""
    number, start, numel, slots = part
    averages, others = _divided(slots)
    for begin, count, nbytes in _pieces(averages, numel, slot_nbytes):
        cuts = [RecordSpan(number, start + begin, count, 0, averages, applies=False)]
        if not others and begin + count == numel:
            cuts.append(RecordSpan(number, start, numel, 0, (), averages=False))
        yield tuple(cuts), nbytes
    for begin, count, nbytes in _pieces(others, numel, slot_nbytes) if others else ():
        yield (RecordSpan(number, start + begin, count, 0, others, averages=False),), nbytes


def _pieces(slots: Sequence[Slot], numel: int, slot_nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields where pieces of these tensors that fit begin, their elements and their bytes, in whole pages."""
    widths: tuple[Width, ...] = widths_of(slots)
    most = numel if columns(widths, numel)[1] <= slot_nbytes else 0
    while most < numel and columns(widths, most + SUMSQ_CHUNK)[1] <= slot_nbytes:
        most += SUMSQ_CHUNK
    for begin in range(0, numel, most):
        count = min(most, numel - begin)
        yield begin, count, -(-columns(widths, count)[1] // PAGE) * PAGE
