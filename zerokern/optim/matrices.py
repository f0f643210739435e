"""Whole matrices: which ones parameters are made of, and the table that updates them one at a time (Muon)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.core.units import BLOCK
from zerokern.kernels.cpu import sumsq_chunks
from zerokern.kernels.orthogonal import adjusted_lr, apply_settings, iterate_
from zerokern.kernels.reference import SUMSQ_CHUNK
from zerokern.kernels.rules import RULES
from zerokern.memory.interrupts import whole
from zerokern.optim import device
from zerokern.optim.cut_matrices import (
    CutMatrix,
    Round,
    RoundUnderWay,
    group_of,
    in_pipeline,
    parts_of_matrices,
    rounds_nbytes,
    rounds_of,
)
from zerokern.optim.formats import Layout
from zerokern.optim.records import StateSpan
from zerokern.optim.small_matrices import SmallMatrices, batches_of, most_together
from zerokern.optim.spare_matrix import SpareMatrix
from zerokern.zero.kinds import Placed
from zerokern.zero.shard import Shard
from zerokern.zero.units import check_split

__all__ = [
    "Matrix", "MatrixPart", "MatrixTable", "check_matrix", "check_shard", "matrices_of", "ns_dtype_of", "part_of",
    "state_span",
]  # fmt: skip

_HOST = torch.device("cpu")
_OF_PARAMETERS = ("param", "remainder", "master", "out", "key", "first")
_UNUSED = ("exp_avg_sq", "exp_avg_sq_scale")
_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
_IN_A_GRAPH = (
    "a step of Muon cannot go into a CUDA graph; capture forward and backward alone, and call step() after each replay"
)
_NOT_IN_MEMORY = "row %d of the update goes on with a matrix that is not in memory"
_NO_MATRIX = (
    "embeddings, heads, biases and norms belong into another optimizer: matrices, rest = zk.muon_groups(model), then "
    "zk.Muon(matrices) and zk.AdamW(rest)"
)


class Matrix(NamedTuple):
    """A matrix among a parameter's elements, from `start` on. It is a row of its own in the table of an update."""

    start: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        return self.height * self.width


class MatrixPart(NamedTuple):
    """What one row updates of a matrix: all of it, or what one record on a disk holds of its state.

    Rows that `averages` move the average of `numel` elements from `start` of the matrix on; with the last of them the
    matrix is orthogonalized; rows that `applies` apply the result to these elements. Of a matrix that ranks have cut
    `start` counts from what is here of it, and a row of the `CutMatrix` itself comes between the two.
    """

    matrix: Matrix | CutMatrix
    start: int
    numel: int
    averages: bool = True
    applies: bool = True

    @property
    def ends(self) -> bool:
        """Whether it is the last one of its pass over the matrix."""
        return self.start + self.numel == self.matrix.numel


def part_of(matrices: Sequence[Any], place: Any) -> MatrixPart | CutMatrix:
    """Returns what a row updates of a parameter's matrices: `place` is one of them, or a `RecordSpan`.

    >>> part_of([], Matrix(64, 4, 8))
    MatrixPart(matrix=Matrix(start=64, height=4, width=8), start=0, numel=32, averages=True, applies=True)
    """
    if isinstance(place, CutMatrix):
        return place
    if isinstance(place, Matrix):
        return MatrixPart(place, 0, place.numel)
    if isinstance(matrices[0], CutMatrix):
        matrix = next(one for one in matrices if one.start <= place.start < one.start + one.numel)
    else:
        matrix = matrices[place.start // matrices[0].numel]
    return MatrixPart(matrix, place.start - matrix.start, place.numel, place.averages, place.applies)


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
        do = "Tensor parallelism and fully_shard divide matrices; zk.AdamW steps parts, zk.shard(whole=) makes none"
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
    if group_of(shard) is not None or (shard.numel in (0, shard.shape.numel()) and not _is_cut(shard)):
        return
    if shard.gradients is None:
        do = "freeze it after zk.shard, or leave it out"
        raise ValueError(got(shard.name, "frozen when zk.shard divided it", "a matrix that is trained", do))
    do = "zk.shard(model, stage=0), or whole= for matrices, keeps each whole on one rank; zk.AdamW steps parts"
    what = f"{tuple(shard.shape)}, of which ranks have parts (stage {shard.sharding.stage})"
    raise ValueError(got(shard.name, what, "a matrix that one rank has all of", do))


def _is_cut(shard: Shard) -> bool:
    """Whether a cut between two ranks falls into it, on whichever rank this is asked."""
    bucket = shard.gradients
    if bucket is None or shard.sharding.replicated:
        return False
    place, each = bucket.entries[shard.place].place, bucket.memory.bucket.shard_numel
    return bool(place.numel and place.offset // each != (place.offset + place.numel - 1) // each)


def matrices_of(name: str, shape: Sequence[int], numel: int, split: int, *, in_blocks: bool) -> list[Matrix]:
    """Returns the matrices that this rank has of a parameter of this shape: all of them, or none.

    `in_blocks`: their state is int8, of which 128 elements share a scale.

    >>> matrices_of("qkv", (12, 64), 768, 3, in_blocks=True)
    [Matrix(start=0, height=4, width=64), Matrix(start=256, height=4, width=64), Matrix(start=512, height=4, width=64)]
    """
    if not numel:
        return [Matrix(0, 0, 0)]
    *_, rows, width = shape
    height = rows * (shape[0] if len(shape) == 3 else 1) // split
    if in_blocks and split > 1 and height * width % BLOCK:
        do = f"{BLOCK} elements share a scale"
        what = f"'int8' with {split} matrices of {height} x {width} in {name}"
        raise ValueError(got("state_format", what, f"'fp32' or 'bf16', or matrices of a multiple of {BLOCK}", do))
    return [Matrix(number * height * width, height, width) for number in range(split)]


def state_span(shard: Shard | None, numel: int, layout: Layout) -> StateSpan:
    """Returns what records need to know of the state of a parameter, of which `numel` elements are here."""
    if not layout.matrices or shard is None or group_of(shard) is None:
        return StateSpan(numel, layout)
    if shard.shape.numel() % (split := layout.matrices):
        raise ValueError(got("split", split, f"a number that divides {shard.shape.numel()}, a parameter's elements"))
    found = matrices_of(shard.name, shard.shape, shard.shape.numel(), split, in_blocks=False)
    return StateSpan(numel, layout, parts_of_matrices(shard, found), id(shard.gradients))


class MatrixTable:
    """Rows of an update that are matrices, or parts of them, with the face of the tables that it is made of.

    Of one row after the other it moves the average and writes the matrix that is to be orthogonalized, orthogonalizes
    it, and applies the result. There is one such matrix at a time, in memory that `spare` holds; equal
    small ones are updated together (`small_matrices`). Rows of its parts follow each other: first those that move
    averages, then those that apply the result. Of matrices that ranks have cut (`cut_matrices`) a round is updated
    together; what is here of them has memory of its own from the first row that a record has of it to the last one.
    """

    def __init__(
        self, open_table: Callable[[int, int], Any], parts: Sequence[MatrixPart | CutMatrix], ngroups: int
    ) -> None:
        self._parts, self.nseg, self.ngroups = parts, len(parts), ngroups
        self._open_table = open_table
        place = getattr(open_table(1, 1), "device", _HOST)
        self._most = most_together(place)
        # rows that are updated with others like them
        self._small = {row for row, part in enumerate(parts) if _is_small(part, self._most)}
        # of the others the table of the average, and that of the parameter, whose learning rate depends on its shape
        others = [row for row in range(len(parts)) if row not in self._small]
        self._tables = {row: (open_table(1, 1), open_table(1, 1)) for row in others}
        self._batches: dict[tuple[int, ...], list[SmallMatrices]] = {}
        self._settings: dict[int, tuple[Any, ...]] = {}
        self._arranged: list[Any] = [None] * self.nseg
        self._iterations: list[dict[str, Any]] = [{}] * self.nseg
        names = ("group", "numel", "grad", *_OF_PARAMETERS, "exp_avg", "exp_avg_scale", *_UNUSED)
        self.columns = {name: memoryview(bytearray(8 * max(self.nseg, 1))).cast("Q")[: self.nseg] for name in names}
        self.spare = SpareMatrix(place)
        self._decides = lambda: open_table(1, 1)  # on a device: a table without elements, which counts the step
        self._decided: Any = None
        self._nothing: list[Tensor] = []
        self.begun = self.carried_out = False
        self._next = -1  # the row that goes on with the matrix in memory
        # by the id of a cut matrix whose state is in records: the last rows that average and that apply
        self._averaged_by: dict[int, int] = {}
        self._applied_by: dict[int, int] = {}
        for row, part in enumerate(parts):
            if isinstance(part, MatrixPart) and isinstance(part.matrix, CutMatrix):
                (self._averaged_by if part.averages else self._applied_by)[id(part.matrix)] = row
        self._directions: dict[int, Tensor] = {}  # what is here of these, on its way to a round
        self._factors: dict[int, Tensor] = {}  # and back from it

    def set_group(
        self,
        index: int,
        hyper: Mapping[str, Any],
        *,
        grad_dtype: torch.dtype,
        state_format: str,
        **formats: Any,
    ) -> None:
        """Fills one group, as `UpdateTable.set_group` does; Muon's other settings are by torch's names."""
        dtype = ns_dtype_of(hyper["ns_dtype"], self.spare.place)
        of_averages = {
            "hyper": {name: hyper[name] for name in RULES["muon"].hyper},
            "algorithm": "muon",
            "grad_dtype": grad_dtype,
            "param_dtype": torch.bfloat16,  # there is none
            "master_format": "none",
            "state_format": state_format,
            "out_dtype": dtype,
        }
        formats = {**formats, "algorithm": "sgd", "grad_dtype": dtype, "state_format": "none"}
        iteration = {"dtype": dtype, "coefficients": hyper["ns_coefficients"], "steps": hyper["ns_steps"]}
        iteration["eps"] = hyper["eps"]
        applied = partial(_applied, hyper)
        self._settings[index] = of_averages, formats, applied
        for row, group in enumerate(self.columns["group"]):
            if group == index and (matrix := _matrix_of(self._parts[row])).numel:
                self._iterations[row] = iteration
                if row not in self._small:
                    averages, parameters = self._tables[row]
                    averages.set_group(0, **of_averages)
                    parameters.set_group(0, applied(matrix), **formats)
        self._decided_as = of_averages

    def run(self, scale: float = 1.0, begin: int = 0, end: int | None = None) -> None:
        """Updates rows `begin` to `end`. `begun` says of a run that raised whether anything had been written."""
        with self._prepared(range(begin, self.nseg if end is None else end)) as (rows, rounds):
            for batch in self._batches_of(rows):
                self._update_small(batch, partial(self._average, scale), self._apply)
            for row in rows:
                if row not in self._small:
                    self._update(row, scale)
            self._update_together(rounds, partial(self._average, scale), self._apply)

    @contextmanager
    def _prepared(self, rows: range) -> Iterator[tuple[list[int], list[Round]]]:
        """Around a run: those of the rows that have elements and are no matrices to be brought together, and the rounds
        of those that are.

        A Ctrl-C waits until it is over.
        """
        self.begun = self.carried_out = False
        there = [(row, part) for row in rows if isinstance(part := self._parts[row], MatrixPart) and part.numel]
        # what is here of a cut matrix has memory of its own, but not the sums of its squares
        sizes = [part.numel if isinstance(part.matrix, CutMatrix) else part.matrix.numel for _, part in there]
        wanted = [(numel, self._iterations[row]["dtype"]) for numel, (row, _) in zip(sizes, there, strict=True)]
        batches = self._batches_of([row for row, _ in there])
        wanted += [(batch.numel, self._iterations[batch.rows[0]]["dtype"]) for batch in batches]
        rounds = self._rounds_of(rows)
        numel = max((numel for numel, _ in wanted), default=0)
        nbytes = max((numel * dtype.itemsize for numel, dtype in wanted), default=0)
        numel = max([numel, *(part.height * part.width for one in rounds for part in one.parts)])
        nbytes = max(nbytes, rounds_nbytes(rounds))
        with whole("the step"), self.spare.lent(numel, nbytes):
            yield [row for row, _ in there], rounds
            self.carried_out = True
            if self._next >= 0:
                self.spare.stay()

    def break_off(self) -> None:
        """Frees the matrices of which some rows have been updated, and no others will be."""
        self._next = -1
        self._directions.clear()
        self._factors.clear()
        self.spare.free()

    def _rounds_of(self, rows: range) -> list[Round]:
        """Returns the rounds of those of the rows whose matrices are cut, the same on all ranks."""
        parts = [(row, part) for row in rows if isinstance(part := self._parts[row], CutMatrix)]
        return rounds_of([(row, part, self._iterations[row]["dtype"]) for row, part in parts if _matrix_of(part).numel])

    def launch(self, scale: float, control: Any) -> None:
        """Launches the update of all rows. The device decides on each, and counts the step when all have been made."""
        if device.capturing(control.steps.device):
            raise StateError(_IN_A_GRAPH)
        with self._prepared(range(self.nseg)) as (rows, rounds):
            self._launch(rows, rounds, scale, control)

    def _launch(self, rows: Sequence[int], rounds: Sequence[Round], scale: float, control: Any) -> None:
        if not self._nothing or self._nothing[0].shape != control.increments.shape:
            self._nothing = [torch.zeros_like(control.increments), torch.zeros_like(control.outcome)]
        still, outcome = self._nothing
        skips: Tensor | None = None

        def counting(row: int) -> dict[str, Any]:
            witness = [control.witnesses[self.columns["group"][row]]]
            return {"steps": control.steps, "increments": still, "witnesses": witness, "outcome": outcome}

        def average(row: int, table: Any = None) -> None:
            nonlocal skips
            self.begun = True
            (table or self._tables[row][0]).run(scale, type(control)(**{**vars(control), **counting(row)}))
            skips = outcome[2:3].float() if skips is None else skips

        def apply(row: int, table: Any = None) -> None:
            of_sums = {"max_norm": None, "sums": None, "grad_scale": None, "found_inf": skips}
            (table or self._tables[row][1]).run(1.0, type(control)(**counting(row), **of_sums))

        for batch in self._batches_of(rows):
            self._update_small(batch, average, apply)
        for row in rows:
            if row not in self._small:
                matrix, sums = self._arrange(row)
                average(row)
                self._orthogonalize(row, matrix, sums)
                apply(row)
        self._update_together(rounds, average, apply)
        if self._decided is None:
            self._decided = self._decides()
        self._decided.set_group(0, **self._decided_as)
        self.begun = True
        self._decided.run(scale, type(control)(**{**vars(control), "witnesses": control.witnesses[:1]}))

    def _update(self, row: int, scale: float) -> None:
        part = self._parts[row]
        assert isinstance(part, MatrixPart)
        if isinstance(part.matrix, CutMatrix):
            self._update_cut(row, part, scale)
            return
        if self._next != row and not (part.averages and part.start == 0):
            raise StateError(_NOT_IN_MEMORY % row)
        matrix, sums = self._arrange(row)
        if part.averages:
            self._average(scale, row)
            if part.ends:
                self._orthogonalize(row, matrix, sums)
        if part.applies:
            self._apply(row)
        self._next = -1 if part.applies and part.ends else row + 1

    def _batches_of(self, rows: Sequence[int]) -> list[SmallMatrices]:
        """Returns those of the rows that are updated with others like them, in batches that are made once."""
        small = tuple(row for row in rows if row in self._small)
        if small not in self._batches:
            groups = self.columns["group"]
            found = batches_of(small, lambda row: (groups[row], *_matrix_of(self._parts[row])[1:]), self._most)
            shapes = [_matrix_of(self._parts[some[0]])[1:] for some in found]
            made = [
                SmallMatrices(self._open_table, some, (height, width), _OF_PARAMETERS, self.spare.place)
                for some, (height, width) in zip(found, shapes, strict=True)
            ]
            self._batches[small] = made
        return self._batches[small]

    def _update_small(
        self, batch: SmallMatrices, average: Callable[[int, Any], None], apply: Callable[[int, Any], None]
    ) -> None:
        row = batch.rows[0]
        settings = self._settings[self.columns["group"][row]]
        if batch.settings is not settings:
            of_averages, formats, applied = settings
            batch.set_group(of_averages, {**formats, "hyper": applied(_matrix_of(self._parts[row]))})
            batch.settings = settings
        how = self._iterations[row]
        matrices, sums = batch.arrange(self.columns, self.spare.memory(batch.numel, how["dtype"]))
        average(row, batch.averages)
        iterate_(matrices, sums, how["coefficients"], how["steps"], how["eps"])
        apply(row, batch.parameters)

    def _update_cut(self, row: int, part: MatrixPart, scale: float) -> None:
        """Updates what a record has of a cut matrix: on the way to the matrix's round, or back from it."""
        key, kept = id(part.matrix), self._directions if part.averages else self._factors
        if part.averages and part.start == 0:
            kept[key] = torch.empty(part.matrix.numel, dtype=self._iterations[row]["dtype"], device=self.spare.place)
        if key not in kept:
            raise StateError(_NOT_IN_MEMORY % row)
        memory = kept[key][part.start : part.start + part.numel]
        self._arrange_memory(row, memory, self.spare.sums(part.numel))
        if part.averages:
            self._average(scale, row)
            return
        self._apply(row)
        if self._applied_by[key] == row:
            del kept[key]

    def _average(self, scale: float, row: int, table: Any = None) -> None:
        (table or self._tables[row][0]).run(scale)
        self.begun = True

    def _apply(self, row: int, table: Any = None) -> None:
        (table or self._tables[row][1]).run(1.0)

    def _update_together(
        self, rounds: Sequence[Round], average: Callable[[int], None], apply: Callable[[int], None]
    ) -> None:
        """Updates this rank's parts of the matrices of these rounds, of each of which it orthogonalizes one."""

        def send(one: Round, at: int) -> RoundUnderWay:
            memory = self.spare.memory(one.numel, one.dtype, at)
            going = RoundUnderWay(one, memory, self._take_directions(one))
            for rank, row, part in going.here:
                self._arrange_memory(row, part, self.spare.sums(part.numel()))
                if rank not in going.apart:
                    average(row)
            going.gather()
            return going

        def orthogonalize(going: RoundUnderWay, halfway: Callable[[], None]) -> None:
            going.wait()
            one, matrix = going.round, going.matrix
            if one.own is None:
                halfway()
            else:
                sums = self.spare.sums(matrix.numel())
                _sum_squares(matrix, sums)
                shape = one.own.height, one.own.width
                self._orthogonalize(one.rows[one.group.rank], matrix.view(shape), sums, halfway)
            going.scatter()

        def receive(going: RoundUnderWay) -> None:
            going.wait()
            going.give_back()
            for rank, row, _ in going.here:
                key = id(self._parts[row])
                if key not in self._applied_by:
                    apply(row)
                else:
                    self._factors[key] = going.apart[rank]

        in_pipeline(rounds, send, orthogonalize, receive)

    def _take_directions(self, one: Round) -> dict[int, Tensor]:
        """Returns by rank what is here of a round's matrices whose averages have moved already, in records."""
        found = {}
        for rank, part in enumerate(one.parts):
            if part.numel and id(part) in self._averaged_by:
                if id(part) not in self._directions:
                    raise StateError(_NOT_IN_MEMORY % one.rows[rank])
                found[rank] = self._directions.pop(id(part))
        return found

    def _orthogonalize(self, row: int, matrix: Tensor, sums: Tensor, halfway: Callable[[], None] | None = None) -> None:
        """Orthogonalizes the matrix of a row. `halfway` is called in the middle of that."""
        how = self._iterations[row]
        iterate_(matrix, sums, how["coefficients"], how["steps"], how["eps"], halfway)

    def _arrange(self, row: int) -> tuple[Tensor, Tensor]:
        """Points the tables of a row at what it is about; returns the matrix between them, and its sums of squares."""
        part = self._parts[row]
        assert isinstance(part, MatrixPart)
        whole_one = part.matrix
        matrix = self.spare.memory(whole_one.numel, self._iterations[row]["dtype"])
        sums = self.spare.sums(whole_one.numel)
        own = matrix[part.start : part.start + part.numel]
        self._arrange_memory(row, own, sums[part.start // SUMSQ_CHUNK :])
        return matrix.view(whole_one.height, whole_one.width), sums

    def _arrange_memory(self, row: int, memory: Tensor, sums: Tensor) -> None:
        part, columns = self._parts[row], self.columns
        mine = {name: columns[name][row] for name in ("exp_avg", "exp_avg_scale")}
        mine |= {"out": memory.data_ptr(), "exp_avg_sq": sums.data_ptr()}
        others = {name: columns[name][row] for name in _OF_PARAMETERS}
        averages, parameters = self._tables[row]
        if self._arranged[row] != (mine, others):
            if id(part) not in self._averaged_by if isinstance(part, CutMatrix) else part.averages:
                averages.set_row(0, group=0, numel=part.numel, **mine)
            if id(part) not in self._applied_by if isinstance(part, CutMatrix) else part.applies:
                parameters.set_row(0, group=0, numel=part.numel, **others)
            self._arranged[row] = (mine, others)
        averages.columns["grad"][0] = columns["grad"][row]
        parameters.columns["grad"][0] = memory.data_ptr()


def _is_small(part: MatrixPart | CutMatrix, most: int) -> bool:
    """Whether a row is a whole matrix of which several are orthogonalized together.

    A single row or column never is: its products are sums whose order may depend on where it lies in memory.
    """
    if isinstance(part, CutMatrix) or isinstance(part.matrix, CutMatrix) or min(part.matrix[1:]) < 2:
        return False
    return part.averages and part.applies and part.start == 0 and part.ends and 0 < 2 * part.numel <= most


def _matrix_of(part: MatrixPart | CutMatrix) -> Matrix:
    """Returns the matrix that a row updates a part of, whole."""
    one = part.matrix if isinstance(part, MatrixPart) else part
    return one if isinstance(one, Matrix) else Matrix(0, one.height, one.width)


def _sum_squares(matrix: Tensor, sums: Tensor) -> None:
    """Writes sums of squares of the matrix whose sum is that of all; on a CPU those of its chunks."""
    pointers = array("Q", [matrix.data_ptr()])
    if device.is_apart(matrix):
        made = device.kernels().sums(matrix.device, [matrix.numel()], matrix.dtype)
        made.run(device.upload(pointers, matrix.device), sums.zero_(), 0)
    else:
        sumsq_chunks(pointers, array("q", [matrix.numel()]), matrix.dtype, sums)


def ns_dtype_of(setting: str | None, place: torch.device = _HOST) -> torch.dtype:
    """Returns what matrices of a group with this `ns_dtype` are orthogonalized in, on this device.

    None is fp32 on every CPU: a run must not have other numbers where the host multiplies bf16 well.

    >>> ns_dtype_of("bf16")
    torch.bfloat16
    """
    return _NS_DTYPES[setting] or (torch.float32 if place == _HOST else torch.bfloat16)


def _applied(hyper: Mapping[str, Any], shape: Matrix | CutMatrix) -> dict[str, Any]:
    """Returns with which settings the result is applied. A learning rate that lies on a device is not read."""
    lr, weight_decay, rule, size = (
        hyper["lr"],
        hyper["weight_decay"],
        hyper["adjust_lr_fn"],
        (shape.height, shape.width),
    )
    step = {"step": hyper.get("step", 1)}  # what is rounded by chance is so by the number of the step
    if isinstance(lr, Tensor):
        ratio = adjusted_lr(1.0, rule, size)
        return {"lr": lr * ratio, "weight_decay": weight_decay / ratio, **step}
    return {**apply_settings(lr, adjusted_lr(lr, rule, size), weight_decay), **step}
