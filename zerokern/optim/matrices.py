"""Which matrices parameters are made of, what is here of each, and which of them are updated together (Muon)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch

from zerokern.comm import Group
from zerokern.core.errors import got
from zerokern.core.units import BLOCK
from zerokern.zero.kinds import Placed
from zerokern.zero.partition import shards_parameters, sides_of, work_of
from zerokern.zero.shard import Shard
from zerokern.zero.units import check_split

__all__ = [
    "Matrix", "MatrixPart", "batches_of", "check_matrix", "check_shard", "exchange_groups", "group_of", "is_cut",
    "matrices_of", "most_together", "ns_dtype_of", "part_of", "parts_in_rows", "parts_of_matrices",
]  # fmt: skip

BATCH_NUMEL = 1 << 19
"""The elements of matrices that are orthogonalized together, at most: in bf16 a MiB, which a core's own cache holds."""
BATCH_NUMEL_ON_GPU = 1 << 23
"""The same on a GPU, where launches take longer: 16 MiB in bf16."""
CAPTURED_NUMEL = 1 << 24
"""The elements of matrices whose launches are captured, at most. The products of larger ones take longer than their
launches (of 4096 x 4096 some 2e15 operations, 3 ms of an H200), and the memory beside them would be kept."""
_HOST = torch.device("cpu")
_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
_NO_MATRIX = (
    "embeddings, heads, biases and norms belong into another optimizer: matrices, rest = zk.muon_groups(model), then "
    "zk.Muon(matrices) and zk.AdamW(rest)"
)


class Matrix(NamedTuple):
    """A matrix, and what is here of it: `numel` elements, from `start` of what is here of its parameter on.

    It is a row of its own in the table of an update. If ranks have cut it, `group` is these ranks, and `ends` says of
    each of them where its part of the matrix ends; the next one's begins there.
    """

    start: int
    numel: int
    height: int
    width: int
    name: str = ""
    ends: tuple[int, ...] = ()
    group: Group | None = None

    @property
    def full_numel(self) -> int:
        return self.height * self.width

    @property
    def is_cut(self) -> bool:
        return self.group is not None

    @property
    def order(self) -> tuple[int, str]:
        """Sorts matrices: those with most work come first, and names decide between equals."""
        return -work_of((self.height, self.width)), self.name

    def span(self, rank: int) -> slice:
        """Returns which elements of the matrix a rank has."""
        return slice(self.ends[rank - 1] if rank else 0, self.ends[rank])


def is_cut(place: Any) -> bool:
    """Whether a row is a matrix that ranks have cut, and now bring together."""
    return isinstance(place, Matrix) and place.is_cut


class MatrixPart(NamedTuple):
    """What one row updates of a matrix: `numel` elements, from `start` of what is here of the matrix on.

    It is all of it, or what one record on a disk holds of its state. Rows that `averages` move the average; with the
    last of them the matrix is orthogonalized; rows that `applies` apply the result. In a row that `meets` ranks bring
    the matrix together; it does what is left for it of either, for rows of records come before it and after it.
    """

    matrix: Matrix
    start: int
    numel: int
    averages: bool = True
    applies: bool = True
    meets: bool = False

    @property
    def ends(self) -> bool:
        """Whether it is the last one of its pass over the matrix."""
        return self.start + self.numel == self.matrix.numel

    @property
    def is_whole(self) -> bool:
        """Whether it is all that is done to a matrix, which no rank has cut."""
        return self.averages and self.applies and self.numel == self.matrix.numel and not self.matrix.is_cut

    @property
    def is_alike(self) -> bool:
        """Whether it is updated together with others of the same size.

        A single row or column never is: its products are sums whose order may depend on where it lies in memory.
        """
        return self.is_whole and min(self.matrix.height, self.matrix.width) > 1


def part_of(matrices: Sequence[Matrix], place: Any) -> MatrixPart:
    """Returns what a row updates of a parameter's matrices: `place` is one of them, or a `RecordSpan`.

    >>> part_of([], Matrix(64, 32, 4, 8))[1:]
    (0, 32, True, True, False)
    """
    if isinstance(place, Matrix):
        return MatrixPart(place, 0, place.numel, meets=place.is_cut)
    matrix = next(one for one in matrices if one.start <= place.start < one.start + one.numel)
    return MatrixPart(matrix, place.start - matrix.start, place.numel, place.averages, place.applies)


def parts_in_rows(rows: Iterable[tuple[Sequence[Matrix], Any]]) -> list[MatrixPart]:
    """Returns what each row of a table updates: those of records, and those in which ranks meet, do not do the same."""
    parts = [part_of(*row) for row in rows]
    averaged = {id(part.matrix) for part in parts if part.averages and not part.meets}
    applied = {id(part.matrix) for part in parts if part.applies and not part.meets}
    return [
        part._replace(averages=id(part.matrix) not in averaged, applies=id(part.matrix) not in applied)
        if part.meets
        else part
        for part in parts
    ]


def check_matrix(name: str, shape: Sequence[int], split: int, *, placed: bool = False) -> None:
    """Raises unless a parameter is a matrix, or so many of them along its first dimension. `placed`: it is a DTensor.

    >>> check_matrix("qkv", (12, 4), 3)
    >>> check_matrix("bias", (4,), 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: bias.shape=(4,): must be two dimensions: Muon updates whole matrices. ...
    """
    shape, split = tuple(shape), check_split(split)
    if placed:
        do = "Tensor parallelism and fully_shard shard matrices; zk.AdamW steps parts, zk.shard(whole=) makes none"
        raise TypeError(got(name, f"a DTensor of shape {shape}", "a plain parameter, or one of zk.shard's", do))
    if len(shape) == 3:
        if split == (height := max(1, shape[0])):
            return
        do = f'A stack is updated matrix by matrix where its group says so: {{"params": ..., "split": {height}}}'
        raise ValueError(got(f"{name}.shape", shape, f"two dimensions, or three with split={height}", do))
    if len(shape) != 2:
        raise ValueError(got(f"{name}.shape", shape, "two dimensions: Muon updates whole matrices", _NO_MATRIX))
    if shape[0] % split:
        raise ValueError(got("split", split, f"a number that divides {shape[0]}, the height of {name}"))


def check_shard(shard: Shard, split: int) -> None:
    """Raises as `check_matrix` does; and, on all ranks, if ranks have parts of the parameter."""
    check_matrix(shard.name, shard.shape, split, placed=shard.placed is not None or isinstance(shard.here, Placed))
    if group_of(shard) is not None or (shard.numel in (0, shard.shape.numel()) and not _is_divided(shard)):
        return
    if shard.gradients is None:
        do = "freeze it after zk.shard, or leave it out"
        raise ValueError(got(shard.name, "frozen when zk.shard sharded it", "a matrix that is trained", do))
    do = "zk.shard(model, stage=0), or whole= for matrices, keeps each whole on one rank; zk.AdamW steps parts"
    what = f"{tuple(shard.shape)}, of which ranks have parts (stage {shard.sharding.stage})"
    raise ValueError(got(shard.name, what, "a matrix that one rank has all of", do))


def _is_divided(shard: Shard) -> bool:
    """Whether a cut between two ranks falls into it, on whichever rank this is asked."""
    bucket = shard.gradients
    if bucket is None or shard.sharding.replicated:
        return False
    place, each = bucket.entries[shard.place].place, bucket.memory.bucket.shard_numel
    return bool(place.numel and place.offset // each != (place.offset + place.numel - 1) // each)


def matrices_of(name: str, shape: Sequence[int], numel: int, split: int, *, in_blocks: bool) -> list[Matrix]:
    """Returns the matrices that this rank has of a parameter of this shape: all of them, or none.

    `in_blocks`: their state is int8, of which 128 elements share a scale.

    >>> [one[:4] for one in matrices_of("qkv", (12, 64), 768, 3, in_blocks=True)]
    [(0, 256, 4, 64), (256, 256, 4, 64), (512, 256, 4, 64)]
    """
    if not numel:
        return [Matrix(0, 0, 0, 0)]
    height, width = sides_of(shape, split)
    each = height * width
    if in_blocks and split > 1 and each % BLOCK:
        do = f"{BLOCK} elements share a scale"
        what = f"'int8' with {split} matrices of {height} x {width} in {name}"
        raise ValueError(got("state_format", what, f"'fp32' or 'bf16', or matrices of a multiple of {BLOCK}", do))
    return [Matrix(number * each, each, height, width) for number in range(split)]


def group_of(shard: Shard) -> Group | None:
    """Returns the ranks that have parts of a parameter and bring its matrices together; None: nobody does."""
    bucket = shard.gradients
    if bucket is None or not shards_parameters(shard.sharding.stage) or bucket.group.size == 1:
        return None
    return cast(Group, bucket.group)


def exchange_groups(shards: Sequence[Shard]) -> list[Group]:
    """Returns the groups of ranks that bring matrices of these parameters together."""
    return list({id(group): group for group in map(group_of, shards) if group is not None}.values())


def parts_of_matrices(shard: Shard, matrices: Sequence[Matrix]) -> list[Matrix]:
    """Returns a parameter's matrices, which ranks have cut, with what this rank has of each, if anything."""
    group, bucket, found = shard.gradients.group, shard.gradients, []
    offset, each = bucket.entries[shard.place].place.offset, bucket.memory.bucket.shard_numel
    for number, one in enumerate(matrices):
        ends = tuple(min(max((rank + 1) * each - offset - one.start, 0), one.numel) for rank in range(group.size))
        begin = ends[group.rank - 1] if group.rank else 0
        numel = ends[group.rank] - begin
        start = one.start + begin - shard.start if numel else 0
        name = shard.name if len(matrices) == 1 else f"{shard.name}[{number}]"
        found.append(Matrix(start, numel, one.height, one.width, name, ends, group))
    return found


def most_together(place: torch.device) -> int:
    """Returns how many elements are orthogonalized together at most on a device.

    >>> most_together(torch.device("cpu")), most_together(torch.device("cuda", 0))
    (524288, 8388608)
    """
    return BATCH_NUMEL if place.type == "cpu" else BATCH_NUMEL_ON_GPU


def batches_of(rows: Iterable[int], kind_of: Callable[[int], tuple[int, int, int]], most: int) -> list[list[int]]:
    """Divides rows into those that are updated together, `most` elements at a time. `kind_of` a row: its group, and its
    matrix's two sizes.

    >>> batches_of(range(4), lambda row: (0, 512, 512) if row < 3 else (1, 512, 512), 1 << 19)
    [[0, 1], [2], [3]]
    """
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row)
    found = []
    for (_, height, width), mine in kinds.items():
        count = max(1, most // (height * width))
        found += [mine[at : at + count] for at in range(0, len(mine), count)]
    return found


def ns_dtype_of(setting: str | None, place: torch.device = _HOST) -> torch.dtype:
    """Returns what matrices of a group with this `ns_dtype` are orthogonalized in, on this device.

    None is fp32 on every CPU: a run must not have other numbers where the host multiplies bf16 well.

    >>> ns_dtype_of("bf16")
    torch.bfloat16
    """
    return _NS_DTYPES[setting] or (torch.float32 if place == _HOST else torch.bfloat16)
