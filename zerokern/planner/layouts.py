"""How an optimizer lays its state out: the tier of each piece, what it locks in host memory, the records that it has on
a disk, and the slots that state passes through on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from zerokern.core.units import StateTensor, itemsize
from zerokern.planner.matrices import CutShape
from zerokern.planner.model import BucketSize, OwnedPart
from zerokern.planner.recipe import Recipe

if TYPE_CHECKING:
    from zerokern.io.pieces import Width
    from zerokern.optim.formats import Layout
    from zerokern.optim.records import StateSpan

__all__ = [
    "StatePiece", "by_optimizer", "pinned_nbytes", "place_state", "records_nbytes", "round_slots_nbytes",
    "slots_nbytes",
]  # fmt: skip


class StatePiece(NamedTuple):
    """A part of a parameter, the tier that its state is in, and the tensors of that with their bytes."""

    tier: str
    part: OwnedPart
    tensors: tuple[tuple[StateTensor, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.tensors)


def place_state(recipe: Recipe, parts: Sequence[OwnedPart], budgets: Sequence[tuple[str, int]]) -> list[StatePiece]:
    """Returns the tier of the state of each of these, in the order in which forwards need them. Each optimizer fills
    budgets of its own.

    >>> from zerokern.planner.matrices import MatrixShape
    >>> parts = [OwnedPart(9, "float32", MatrixShape(3, 3)), OwnedPart(9, "float32"), OwnedPart(9, "float32")]
    >>> [one.tier for one in place_state(Recipe("muon", tier="nvme"), parts, [("cpu", 72)])]
    ['cpu', 'cpu', 'nvme']
    """
    made = [_placed(recipe, some, budgets) for some in by_optimizer(recipe, parts)]
    return [next(made[0 if one.matrix is not None else -1]) for one in parts]


def _placed(recipe: Recipe, parts: Sequence[OwnedPart], budgets: Sequence[tuple[str, int]]) -> Iterator[StatePiece]:
    """Yields those of one optimizer."""
    from zerokern.memory.order import place  # its package needs torch, other plans do not

    tiers, most = zip(*budgets, (recipe.tier, None), strict=True)
    made = []
    for one in parts:
        kept = recipe.state_of(one.dtype, one.matrix is not None)
        tensors = tuple((tensor, tensor.nbytes_of(one.numel)) for tensor in kept)
        made.append(StatePiece(recipe.tier, one, tensors))
    for number, piece in zip(place([piece.nbytes for piece in made], most), made, strict=True):
        yield piece._replace(tier=tiers[number])


def records_nbytes(recipe: Recipe, parts: Sequence[OwnedPart]) -> list[int]:
    """Returns the bytes of the records on a disk that each optimizer has of these parts: whole pages, which a step
    reads and writes.

    >>> from zerokern.planner.matrices import MatrixShape
    >>> parts = [OwnedPart(30, "float32", MatrixShape(10, 3)), OwnedPart(1000, "float32")]
    >>> records_nbytes(Recipe("muon", tier="nvme", ring_nbytes=64 << 20), parts)
    [4096, 8192]
    """
    from zerokern.memory.stream import slot_nbytes_of  # packages that need torch, other plans do not
    from zerokern.optim.records import records_of

    slot = slot_nbytes_of(recipe.ring_nbytes)
    found = []
    for some in by_optimizer(recipe, parts):
        spans = [_span_of(recipe, one) for one in sorted(some, key=lambda one: one.turn)]
        found.append(sum(nbytes for _, nbytes in records_of(spans, slot)))
    return found


def _layout_of(recipe: Recipe, dtype: str, split: int) -> Layout:
    """Returns the layout that an optimizer has of a parameter. `split`: of so many matrices; 0: Muon updates none."""
    import torch

    from zerokern import optim
    from zerokern.optim.base import algorithm_of
    from zerokern.optim.formats import layout_of  # packages that need torch, other plans do not

    name = "Muon" if split else recipe.rule.called.rpartition(".")[2].split()[0]
    formats = recipe.is_muon or bool(recipe.rule.moments), recipe.state_format, recipe.master_format, False
    return layout_of(algorithm_of(getattr(optim, name)), getattr(torch, dtype), *formats, split)


def _span_of(recipe: Recipe, part: OwnedPart) -> StateSpan:
    """Returns what `records_of` is given of a part."""
    from zerokern.optim.matrices import Matrix
    from zerokern.optim.records import StateSpan as Span

    matrix = part.matrix if recipe.is_muon else None
    layout = _layout_of(recipe, part.dtype, 0 if matrix is None else matrix.split)
    if matrix is None or part.bucket is None:
        return Span(part.numel, layout)
    numels, group = part.by_matrix(), cast(Any, None)
    starts = accumulate(numels, initial=0)
    each, place = (matrix.rows, matrix.columns), f"{part.turn:09}"  # parameters are named in the order of their turns
    cut = [Matrix(start, numel, *each, place, (), group) for start, numel in zip(starts, numels, strict=False)]
    return Span(part.numel, layout, cut, part.bucket)


def by_optimizer(recipe: Recipe, parts: Sequence[OwnedPart]) -> list[list[OwnedPart]]:
    """Returns the parts that each optimizer updates: with Muon the matrices, and the rest.

    >>> from zerokern.planner.matrices import MatrixShape
    >>> [len(some) for some in by_optimizer(Recipe("muon"), [OwnedPart(9, "float32", MatrixShape(3, 3))])]
    [1, 0]
    """
    if not recipe.is_muon:
        return [list(parts)]
    return [[one for one in parts if (one.matrix is None) == is_rest] for is_rest in (False, True)]


def slots_nbytes(recipe: Recipe, parts: Sequence[OwnedPart]) -> int:
    """Returns the bytes that the state of these parts passes through on the device; that of a matrix passes as one, and
    with that of other small ones.

    >>> from zerokern.planner.matrices import MatrixShape
    >>> slots_nbytes(Recipe("muon"), [OwnedPart(1 << 20, "bfloat16", MatrixShape(1024, 1024))] * 8) >> 20
    60
    """
    from zerokern.optim.matrices import Matrix  # packages that need torch, other plans do not
    from zerokern.optim.transit import pieces_of, whole_pieces

    widths = [_widths_of(recipe, one.dtype, one.matrix is not None) for one in parts]
    if recipe.is_muon and any(one.matrix for one in parts):
        pairs = [(one.matrix, width) for one, width in zip(parts, widths, strict=True) if one.matrix is not None]
        each = [(Matrix(0, it.each.numel, it.rows, it.columns), width) for it, width in pairs for _ in range(it.split)]
        _, count, nbytes = whole_pieces([one for one, _ in each], [width for _, width in each])
    else:
        _, count, nbytes = pieces_of([one.numel for one in parts], widths)
    return count * nbytes


def _widths_of(recipe: Recipe, dtype: str, matrix: bool) -> tuple[Width, ...]:
    """Returns how wide the tensors of a parameter's state are, where it is moved in pieces."""
    from zerokern.io.pieces import Width  # its package needs torch, other plans do not

    return tuple(Width(one.nbytes, one.per) for one in recipe.state_of(dtype, matrix))


def round_slots_nbytes(
    recipe: Recipe, matrices: Sequence[CutShape], in_memory: Sequence[OwnedPart], rank: int, world: int
) -> int:
    """Returns what `slots_nbytes` does, of matrices that ranks have cut: what a rank has of a round passes as one.

    `in_memory`: those whose state is there; on the device others are updated in the same rounds.

    >>> from zerokern.planner.matrices import MatrixShape
    >>> some = [CutShape(MatrixShape(8, 8), f"{n}", "float32", n, 0, 64 * n, 128) for n in range(4)]
    >>> parts = [OwnedPart(32, "float32", turn=n) for n in range(4)]
    >>> round_slots_nbytes(Recipe("muon", tier="cpu"), some, parts, rank=0, world=2)
    1024
    """
    import torch

    from zerokern.comm import Group
    from zerokern.optim.matrices import Matrix
    from zerokern.optim.transit import whole_pieces

    group = Group(rank, world, torch.device("cpu"), "planned")
    turns_there = {one.turn for one in in_memory}
    cut = [Matrix(0, one.numel_of(rank), *one.shape[:2], one.name, (), group) for one in matrices]
    widths = [_widths_of(recipe, one.dtype, True) if one.turn in turns_there else () for one in matrices]
    turns = [one.bucket if recipe.schedule == "overlap" else 0 for one in matrices]
    _, count, nbytes = whole_pieces(cut, widths, turns)
    return count * nbytes


def pinned_nbytes(
    recipe: Recipe,
    device: str,
    parts: Sequence[OwnedPart],
    in_memory: Sequence[OwnedPart],
    copied: Sequence[BucketSize],
) -> int:
    """Returns the bytes that one optimizer locks in host memory for these parts, in whole pages.

    `in_memory`: those whose state is there. `copied`: parameters that are on the device and updated in copies.

    >>> pinned_nbytes(Recipe(tier="cpu"), "cpu", [OwnedPart(1024, "float32")], [OwnedPart(1024, "float32")], [])
    8192
    """
    from zerokern.memory.layout import nbytes_of  # its package needs torch, other plans do not

    state = [  # parameter by parameter
        (tensor.key, tensor.nbytes_of(one.numel))
        for one in in_memory
        for tensor in recipe.state_of(one.dtype, one.matrix is not None)
    ]
    nbytes = []
    has_copies = recipe.has_host_copies(device) or recipe.delays_at_rest
    if has_copies:  # all values, all gradients, then the state key by key, unless it is on disk
        nbytes = [one.numel * itemsize(one.dtype) for one in parts]
        nbytes += [one.numel * recipe.wire_itemsize(one.dtype) for one in parts]
    if has_copies or recipe.streams(device):
        state = sorted(state, key=lambda tensor: tensor[0])
    elif copied:  # of what is on the device, as one
        nbytes = [kind.own_numel * (kind.itemsize + recipe.wire_itemsize(kind.dtype)) for kind in copied]
    return nbytes_of([*nbytes, *(size for _, size in state)])
