"""How an optimizer lays its state out: what it locks in host memory, and the slots that state passes through on a
device."""

from __future__ import annotations

from collections.abc import Sequence

from zerokern.core.units import BLOCK, itemsize
from zerokern.planner.model import BucketSize, OwnedPart
from zerokern.planner.recipe import Recipe

__all__ = ["by_optimizer", "pinned_nbytes", "slots_nbytes"]


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
    """Returns the bytes that the state of these parts passes through on the device; that of a matrix passes as one.

    >>> from zerokern.planner.matrices import MatrixShape
    >>> slots_nbytes(Recipe("muon"), [OwnedPart(1 << 20, "bfloat16", MatrixShape(1024, 1024))] * 8) >> 20
    24
    """
    from zerokern.io.pieces import Width  # packages that need torch, other plans do not
    from zerokern.optim.matrices import Matrix
    from zerokern.optim.streamed import pieces_of, whole_pieces

    widths = [
        tuple(
            width
            for role in recipe.state_of(one.dtype, one.matrix is not None)
            for width in (Width(role.per_element, 1), Width(role.per_block, BLOCK))
            if width.nbytes
        )
        for one in parts
    ]
    if recipe.is_muon and any(one.matrix for one in parts):
        pairs = [(one.matrix, width) for one, width in zip(parts, widths, strict=True) if one.matrix is not None]
        each = [(Matrix(0, it.rows, it.columns), width) for it, width in pairs for _ in range(it.split)]
        _, count, nbytes = whole_pieces([one for one, _ in each], [width for _, width in each])
    else:
        _, count, nbytes = pieces_of([one.numel for one in parts], widths)
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

    state = [  # parameter by parameter: moments, then what makes the parameter exact
        tensor
        for one in in_memory
        for role in sorted(
            recipe.state_of(one.dtype, one.matrix is not None),
            key=lambda role: role.role in ("master", "remainder"),
        )
        for tensor in role.tensors(one.numel)
    ]
    nbytes = []
    if recipe.has_host_copies(device):  # all values, all gradients, then the state key by key, unless it is on disk
        nbytes = [one.numel * itemsize(one.dtype) for one in parts]
        nbytes += [one.numel * itemsize(recipe.wire_dtype(one.dtype)) for one in parts]
    if recipe.has_host_copies(device) or recipe.streams(device):
        state = sorted(state, key=lambda tensor: tensor[0])
    elif copied:  # of what is on the device, as one
        nbytes = [kind.own_numel * (kind.itemsize + itemsize(recipe.wire_dtype(kind.dtype))) for kind in copied]
    return nbytes_of([((size,), 1) for size in [*nbytes, *(size for _, size in state)]])
