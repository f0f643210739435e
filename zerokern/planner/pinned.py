"""Host memory of tier="cpu" to the page: the tensors of an optimizer, side by side in one mapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerokern.planner.outline import Outline
from zerokern.planner.recipe import Recipe, StateRole, itemsize
from zerokern.planner.settings import Arrangement

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["pinned_nbytes"]

FINGERPRINTS_NBYTES = 16  # of each gradient, as it left and as it was in `step()`: see zerokern/optim/leaving.py


def pinned_nbytes(subject: Outline, recipe: Recipe, stage: int, settings: Arrangement) -> int:
    """Bytes that rank 0's optimizer maps: locked, and pinned where CUDA is in use. Zero where nothing lies there.

    >>> from zerokern.planner.outline import subject_of
    >>> recipe = Recipe(tier="cpu")
    >>> settings = Arrangement(1, "cuda", 32 << 20, 1, False)
    >>> pinned_nbytes(subject_of("1M", recipe, None), recipe, 2, settings) / 1e6
    14.000128
    """
    twins = recipe.has_twins(settings.device)
    if recipe.optimizer == "none" or not (twins or recipe.tier == "cpu"):
        return 0
    from zerokern.memory.layout import nbytes_of  # its package needs torch, other plans do not

    pieces = subject.pieces(stage, settings.world, settings.bucket_bytes)
    nbytes = list(_with_twins(pieces, recipe) if twins else _beside(pieces, recipe))
    if twins and settings.device != "cpu":
        everyone = subject.pieces(0, 1, settings.bucket_bytes)  # those that this rank has nothing of have one too
        nbytes.append(FINGERPRINTS_NBYTES * len(everyone))
    return nbytes_of([((one,), 1) for one in nbytes])


def _states(recipe: Recipe, dtype: str) -> list[StateRole]:
    """As the optimizers keep them: moments, then what makes the parameter exact."""
    return sorted(recipe.state_of(dtype), key=lambda one: one.role in ("master", "remainder"))


def _with_twins(pieces: Sequence[tuple[int, str]], recipe: Recipe) -> Iterator[int]:
    """All values, all gradients, then all tensors of one key after those of another."""
    yield from (numel * itemsize(dtype) for numel, dtype in pieces)
    yield from (numel * itemsize(recipe.wire_dtype(dtype)) for numel, dtype in pieces)
    states = [tensor for numel, dtype in pieces for role in _states(recipe, dtype) for tensor in role.tensors(numel)]
    yield from (nbytes for _, nbytes in sorted(states, key=lambda tensor: tensor[0]))


def _beside(pieces: Sequence[tuple[int, str]], recipe: Recipe) -> Iterator[int]:
    """State alone, parameter by parameter."""
    for numel, dtype in pieces:
        for role in _states(recipe, dtype):
            yield from (nbytes for _, nbytes in role.tensors(numel))
