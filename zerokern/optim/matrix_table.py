"""The table that updates whole matrices, batch by batch (Muon), and the memory that they are orthogonalized in."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels.captured import Captured
from zerokern.kernels.cpu import sumsq_chunks
from zerokern.kernels.formats import COLUMNS, VALUES
from zerokern.kernels.orthogonal import adjusted_lr, apply_settings, iterate_
from zerokern.kernels.products import way_of
from zerokern.kernels.reference import SUMSQ_CHUNK
from zerokern.kernels.rules import RULES
from zerokern.memory.interrupts import whole
from zerokern.memory.staging import cuda_driver
from zerokern.optim import device
from zerokern.optim.matrices import CAPTURED_NUMEL, Matrix, MatrixPart, batches_of, most_together, ns_dtype_of
from zerokern.optim.rounds import Round, UnderWay, in_pipeline, places_of, rounds_of

__all__ = ["MatrixBatch", "MatrixTable", "SpareMatrix"]

_HOST = torch.device("cpu")
_OF_AVERAGES = ("exp_avg", "exp_avg_scale")
_IN_A_GRAPH = (
    "a step of Muon cannot go into a CUDA graph; capture forward and backward alone, and call step() after each replay"
)
_NOT_IN_MEMORY = "row %d of the update goes on with a matrix that is not in memory"


class SpareMatrix:
    """Memory for matrices while they are orthogonalized, on a device as long as whoever holds it.

    In host memory it is there during an update alone; a device's addresses have to stay, for they have been sent there.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._memory = self._sums = torch.empty(0)
        self.stays = False  # whether what is in it is kept past the end of a block, for the next one

    @contextmanager
    def lent(self, nbytes: int, chunks: int) -> Iterator[None]:
        """Has room for so many bytes, and for sums of squares of so many chunks, within the block."""
        self._memory = self._grown(self._memory, nbytes, torch.uint8)
        self._sums = self._grown(self._sums, chunks, torch.float64)
        self.stays = False
        try:
            yield
        finally:
            if not self.stays:
                self.free()

    def _grown(self, memory: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if memory.numel() >= numel:
            return memory
        more = torch.empty(numel, dtype=dtype, device=self.place)
        if self.stays:
            more[: memory.numel()] = memory
        return more

    def free(self) -> None:
        """Frees host memory."""
        if self.place == _HOST:
            self._memory = self._sums = torch.empty(0)

    def memory(self, numel: int, dtype: torch.dtype, at: int = 0) -> Tensor:
        """Returns room for as many elements, whatever it holds, from this byte on."""
        return self._memory[at : at + numel * dtype.itemsize].view(dtype)

    def sums(self, chunks: int) -> Tensor:
        """Returns room for the sums of squares of as many chunks."""
        return self._sums[:chunks]


_Settings = tuple[Mapping[str, Any], torch.dtype, dict[str, Any], dict[str, Any]]
"""Of a group: its hyperparameters, in which dtype its matrices are orthogonalized, and what two tables are told."""


class _OwnRows:
    """The rows and the group that one batch has of a table on a device, with the face of a table of its own.

    Batches of an update run one after the other, the one with group 0 first: with it all that is new of the table is
    sent, and one launch prepares it for the others.
    """

    def __init__(self, table: Any, begin: int, end: int, group: int) -> None:
        self._table, self._begin, self._end, self._group = table, begin, end, group
        self.columns = {name: column[begin:end] for name, column in table.columns.items()}
        self.columns["group"][:] = array("Q", [group] * (end - begin))

    def set_group(self, index: int, hyper: Mapping[str, Any], **formats: Any) -> None:
        self._table.set_group(self._group + index, hyper, **formats)

    def set_row(self, index: int, *, group: int, numel: int) -> None:
        self._table.set_row(self._begin + index, group=self._group + group, numel=numel)

    def run(self, scale: float, control: Any = None) -> None:
        self._table.run(scale, control, self._begin, self._end, prepared=self._group > 0)


class MatrixBatch:
    """Rows that are updated together: equal matrices of one group, or one row, of a matrix or of a part of one.

    One call moves their averages and writes what is to be orthogonalized, one iteration follows, and one call applies
    the results; element for element, and product for product, with the bits that each has by itself. `averages` and
    `parameters` are the tables of these calls.
    """

    def __init__(self, tables: tuple[Any, Any], rows: Sequence[int], part: MatrixPart, groups: tuple[int, ...]) -> None:
        """`part`: what the first of the rows updates, and each of them of its own matrix. `groups`: whose each group of
        the tables is."""
        self.rows, self.part, self.groups = rows, part, groups
        # of all of their matrices: elements, and chunks of them whose squares are summed together
        self.numel = len(rows) * part.matrix.numel
        self.chunks = len(rows) * _chunks_of(part.matrix.numel)
        self.averages, self.parameters = tables
        self.shares = isinstance(self.averages, _OwnRows)
        self._settings: Any = None
        self._addresses: tuple[int, int, int] | None = None

    def prepare(
        self, settings: _Settings, columns: Mapping[str, Sequence[int]], directions: Tensor, sums: Tensor
    ) -> None:
        """Fills both tables. `columns`: of the table that these rows are of.

        The rows' directions, and the sums of their squares, begin where `directions` and `sums` do.
        """
        if self._settings is not settings:
            hyper, _, of_averages, of_parameters = self._settings = settings
            self.averages.set_group(0, **of_averages)
            self.parameters.set_group(0, _applied(hyper, self.part.matrix), **of_parameters)
        addresses = directions.data_ptr(), directions.itemsize, sums.data_ptr()
        if self._addresses != addresses:
            self._addresses = addresses
            numel = self.part.numel
            to = self._addresses_from(addresses[0], numel * directions.itemsize)
            of_averages = {name: self._of_rows(columns[name]) for name in _OF_AVERAGES}
            of_averages |= {"out": to, "exp_avg_sq": self._addresses_from(addresses[2], 8 * _chunks_of(numel))}
            of_parameters = {name: self._of_rows(columns[name]) for name in VALUES} | {"grad": to}
            for table, words in (self.averages, of_averages), (self.parameters, of_parameters):
                table.columns["numel"][:] = array("Q", [numel] * len(self.rows))
                for name, mine in words.items():
                    table.columns[name][:] = mine
                table.set_row(0, group=0, numel=numel)  # a table of a device sends all rows anew when one is set
        self.averages.columns["grad"][:] = self._of_rows(columns["grad"])

    def _of_rows(self, column: Sequence[int]) -> array[int]:
        return array("Q", [column[row] for row in self.rows])

    def _addresses_from(self, first: int, nbytes: int) -> array[int]:
        return array("Q", [first + number * nbytes for number in range(len(self.rows))])

    def view(self, matrices: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the matrices in this memory, 2-D where there is one, and the sums of their squares."""
        count = (len(self.rows),) if len(self.rows) > 1 else ()
        return matrices.view(*count, self.part.matrix.height, self.part.matrix.width), sums.view(*count, -1)


_Run = Callable[[MatrixBatch], None]


class MatrixTable:
    """Rows of an update that are matrices, or parts of them, with the face of the tables that it is made of.

    Of one batch after the other it moves the averages and writes the matrices that are to be orthogonalized,
    orthogonalizes them, and applies the results. One batch is in memory at a time, which `spare` lends. Rows of the
    parts of a matrix follow each other: first those that move averages, then those that apply the result. Matrices that
    ranks have cut are updated round by round (`rounds`); what is here of one that has rows of records has memory of its
    own from the first of these to the last one.
    """

    def __init__(self, open_table: Callable[[int, int], Any], parts: Sequence[MatrixPart]) -> None:
        self._parts, self._open_table = parts, open_table
        self.columns = {name: memoryview(bytearray(8 * max(len(parts), 1))).cast("Q")[: len(parts)] for name in COLUMNS}
        self._counts = open_table(1, 1)  # on a device: without elements; it counts the step when all rows are updated
        self.spare = SpareMatrix(getattr(self._counts, "device", _HOST))
        self._groups: dict[int, _Settings] = {}
        # by rows, and by the rows of a run: what does not change from step to step
        self._batches: dict[tuple[int, ...], MatrixBatch] = {}
        self._runs: dict[tuple[int, int], tuple[list[MatrixBatch], list[Round], int, int]] = {}
        self._squares: dict[tuple[int, torch.dtype], tuple[Any, Tensor]] = {}
        self._still: list[Tensor] = []
        self.begun = self.carried_out = False
        self._captured = Captured(self.spare.place, cache(partial(cuda_driver, self.spare.place)))
        self._next = -1  # the row that goes on with the matrix in memory
        # what is here of cut matrices with records, by ids: True, on its way to their rounds; False, back from there
        self._apart: dict[tuple[int, bool], Tensor] = {}

    def set_group(
        self, index: int, hyper: Mapping[str, Any], *, grad_dtype: torch.dtype, state_format: str, **formats: Any
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
        of_parameters = {**formats, "algorithm": "sgd", "grad_dtype": dtype, "state_format": "none"}
        settings = hyper, dtype, of_averages, of_parameters
        if index not in self._groups or self._groups[index][1] != dtype:
            self._runs.clear()  # whose memory, and rounds, are of this dtype
        # batches do not follow what is as it was; to compare a learning rate on a device would wait for that
        if isinstance(hyper["lr"], Tensor) or self._groups.get(index) != settings:
            self._groups[index] = settings

    def _settings_of(self, row: int) -> _Settings:
        return self._groups[self.columns["group"][row]]

    def run(self, scale: float = 1.0, begin: int = 0, end: int | None = None) -> None:
        """Updates rows `begin` to `end`. `begun` says of a run that raised whether anything had been written."""

        def average(batch: MatrixBatch) -> None:
            batch.averages.run(scale)
            self.begun = True

        self._update(begin, len(self._parts) if end is None else end, average, lambda batch: batch.parameters.run(1.0))

    def launch(self, scale: float, control: Any) -> None:
        """Launches the update of all rows. The device decides on each, and counts the step when all have been made."""
        if device.capturing(control.steps.device):
            raise StateError(_IN_A_GRAPH)
        if not self._still or self._still[0].shape != control.increments.shape:
            nothing = [torch.zeros_like(one) for one in (control.increments, control.outcome)]
            self._still = [*nothing, nothing[1][:1].float()]
        increments, outcome, skips = self._still

        def control_of(groups: tuple[int, ...], **others: Any) -> Any:
            witnesses = [control.witnesses[group] for group in groups]
            of_rows = {"increments": increments, "outcome": outcome, "witnesses": witnesses}
            return type(control)(**{**vars(control), **of_rows, **others})

        averaging = cache(control_of)
        applying = cache(partial(control_of, max_norm=None, sums=None, grad_scale=None, found_inf=skips))

        def average(batch: MatrixBatch) -> None:
            is_first, self.begun = not self.begun, True
            batch.averages.run(scale, averaging(batch.groups))
            if is_first:
                skips.copy_(outcome[2:3])

        def apply(batch: MatrixBatch) -> None:
            batch.parameters.run(1.0, applying(batch.groups))

        self._update(0, len(self._parts), average, apply)
        *_, (_, _, of_averages, _) = self._groups.values()
        self._counts.set_group(0, **of_averages)
        self.begun = True
        self._counts.run(scale, type(control)(**{**vars(control), "witnesses": control.witnesses[:1]}))

    def break_off(self) -> None:
        """Frees the matrices of which some rows have been updated, and no others will be."""
        self._next = -1
        self._apart.clear()
        self.spare.free()

    def _update(self, begin: int, end: int, average: _Run, apply: _Run) -> None:
        """Updates these rows. A Ctrl-C waits until that is over."""
        self.begun = self.carried_out = False
        if (begin, end) not in self._runs:
            self._runs[begin, end] = self._divided(begin, end)
        batches, rounds, nbytes, chunks = self._runs[begin, end]
        with whole("the step"), self.spare.lent(nbytes, chunks):
            for batch in batches:
                if batch.shares:  # all of them before the first one is launched
                    memory = self.spare.memory(batch.numel, self._settings_of(batch.rows[0])[1])
                    self._prepare(batch, memory, self.spare.sums(batch.chunks))
            for batch in batches:
                self._update_batch(batch, average, apply)
            in_pipeline(rounds, partial(self._update_round, average, apply))
            self.carried_out, self.spare.stays = True, self._next >= 0

    def _divided(self, begin: int, end: int) -> tuple[list[MatrixBatch], list[Round], int, int]:
        """Divides rows into batches and rounds; returns these, and how many bytes and chunks of sums they need."""
        parts, group = self._parts, self.columns["group"]
        here = [row for row in range(begin, end) if parts[row].numel and not parts[row].meets]
        alike = [row for row in here if parts[row].is_alike]
        kind_of = lambda row: (group[row], parts[row].matrix.height, parts[row].matrix.width)  # noqa: E731
        together = batches_of(alike, kind_of, most_together(self.spare.place))
        apart = [[row] for row in here if not parts[row].is_alike]
        batches = self._batches_of([*together, *apart])
        meeting = [(row, parts[row].matrix) for row in range(begin, end) if parts[row].meets]
        rounds = rounds_of([(row, one, self._settings_of(row)[1]) for row, one in meeting if one.full_numel])
        # what is here of a cut matrix has memory of its own
        in_spare = [batch for batch in batches if not batch.part.matrix.is_cut]
        nbytes = [batch.numel * self._settings_of(batch.rows[0])[1].itemsize for batch in in_spare]
        chunks = [batch.chunks for batch in batches]
        chunks += [_chunks_of(one.full_numel) for some in rounds for one in some.matrices]
        return batches, rounds, max([*nbytes, places_of(rounds)[1]]), max(chunks, default=0)

    def _batch_of(self, *rows: int) -> MatrixBatch:
        """Returns the batch of these rows, which is made once."""
        if rows not in self._batches:
            tables = self._open_table(len(rows), 1), self._open_table(len(rows), 1)
            groups = (self.columns["group"][rows[0]],)
            self._batches[rows] = MatrixBatch(tables, rows, self._parts[rows[0]], groups)
        return self._batches[rows]

    def _batches_of(self, divided: Sequence[Sequence[int]]) -> list[MatrixBatch]:
        """Returns batches of these rows.

        On a device whole matrices share two tables. On a CPU there is no launch to save, and a call looks at all groups
        of a table.
        """
        shares = [hasattr(self._counts, "device") and self._parts[rows[0]].is_whole for rows in divided]
        sharing = [rows for rows, one in zip(divided, shares, strict=True) if one]
        if not sharing:
            return [self._batch_of(*rows) for rows in divided]
        groups = tuple(self.columns["group"][rows[0]] for rows in sharing)
        nrows = sum(map(len, sharing))
        shared = [self._open_table(nrows, len(sharing)) for _ in range(2)]
        batches, at, number = [], 0, 0
        for rows, one in zip(divided, shares, strict=True):
            if not one:
                batches.append(self._batch_of(*rows))
                continue
            averages, parameters = (_OwnRows(table, at, at + len(rows), number) for table in shared)
            batches.append(MatrixBatch((averages, parameters), tuple(rows), self._parts[rows[0]], groups))
            at, number = at + len(rows), number + 1
        return batches

    def _prepare(self, batch: MatrixBatch, memory: Tensor, sums: Tensor) -> None:
        """Fills the tables of a batch, whose matrices are in this memory."""
        start = batch.part.start
        settings = self._settings_of(batch.rows[0])
        batch.prepare(settings, self.columns, memory[start:], sums[start // SUMSQ_CHUNK :])

    def _update_batch(self, batch: MatrixBatch, average: _Run, apply: _Run) -> None:
        """Updates whole matrices, or a part of one: of one that ranks have cut on the way to its round, or back."""
        row, part = batch.rows[0], batch.part
        settings, is_cut = self._settings_of(row), part.matrix.is_cut
        memory = self._memory_of(batch, settings[1])
        sums = self.spare.sums(batch.chunks)
        if not batch.shares:
            self._prepare(batch, memory, sums)
        if part.averages:
            # before anything is in this memory, for a trial loses it
            orthogonalize = None if is_cut else self._orthogonalizing(batch, *batch.view(memory, sums))
            average(batch)
            if part.ends and orthogonalize is not None:
                orthogonalize()
        if part.applies:
            apply(batch)
        if not is_cut:
            self._next = -1 if part.applies and part.ends else row + 1
        elif part.applies and part.ends:
            del self._apart[id(part.matrix), False]

    def _memory_of(self, batch: MatrixBatch, dtype: torch.dtype) -> Tensor:
        """Returns the memory of a batch's matrices, or of what is here of a cut one; it is made for the first part."""
        row, part = batch.rows[0], batch.part
        begins, key = part.averages and part.start == 0, (id(part.matrix), part.averages)
        if not part.matrix.is_cut:
            return _found(row, self.spare.memory(batch.numel, dtype) if begins or self._next == row else None)
        if begins:
            self._apart[key] = torch.empty(part.matrix.numel, dtype=dtype, device=self.spare.place)
        return _found(row, self._apart.get(key))

    def _update_round(self, average: _Run, apply: _Run, one: Round, at: int) -> UnderWay:
        """Updates this rank's parts of the matrices of a round, of which it orthogonalizes one."""
        rank = one.group.rank
        here = {owner: self._batch_of(row) for owner, row in enumerate(one.rows) if self._parts[row].numel}
        apart = {  # what records have averaged
            owner: _found(batch.rows[0], self._apart.pop((id(batch.part.matrix), True), None))
            for owner, batch in here.items()
            if not batch.part.averages
        }
        matrix, parts, mine = one.divide(self.spare.memory(one.numel, one.dtype, at), apart)
        for owner, batch in here.items():
            settings = self._settings_of(batch.rows[0])
            batch.prepare(settings, self.columns, parts[owner], self.spare.sums(batch.chunks))
            if owner not in apart:
                average(batch)
        if rank in apart:
            parts[rank].copy_(apart[rank])
        wait = one.exchange(mine, parts, "directions")
        halfway = yield
        wait()
        if len(matrix):
            sums = self.spare.sums(_chunks_of(len(matrix)))
            self._sum_squares(matrix, sums)
            self._orthogonalize(one.rows[rank], matrix.view(one.own.height, one.own.width), sums, halfway)
        else:
            halfway()
        wait = one.exchange(parts, mine, "orthogonal factors")
        yield
        wait()
        if rank in apart:
            apart[rank].copy_(parts[rank])
        for owner, batch in here.items():
            if batch.part.applies:
                apply(batch)
            else:
                self._apart[id(batch.part.matrix), False] = apart[owner]

    def _orthogonalizing(self, batch: MatrixBatch, matrices: Tensor, sums: Tensor) -> Callable[[], None]:
        """Returns what orthogonalizes a batch, in whose memory nothing is: on a GPU one launch where that is faster."""
        work = partial(self._orthogonalize, batch.rows[0], matrices, sums)
        if not batch.part.is_whole or batch.numel > CAPTURED_NUMEL or not device.is_apart(matrices):
            return work
        hyper, *_ = self._settings_of(batch.rows[0])
        how = hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"], hyper["ns_form"]
        return self._captured.of((matrices.dtype, matrices.shape, how, way_of(matrices.device)), work, matrices, sums)

    def _orthogonalize(self, row: int, matrix: Tensor, sums: Tensor, halfway: Callable[[], None] | None = None) -> None:
        """Orthogonalizes the matrix, or the batch, of a row. `halfway` is called in the middle of that."""
        hyper, *_ = self._settings_of(row)
        how = hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"]
        iterate_(matrix, sums, *how, halfway, hyper["ns_form"])

    def _sum_squares(self, matrix: Tensor, sums: Tensor) -> None:
        """Writes sums of squares of the matrix whose sum is that of all; on a CPU those of its chunks."""
        if not device.is_apart(matrix):
            sumsq_chunks(array("Q", [matrix.data_ptr()]), array("q", [matrix.numel()]), matrix.dtype, sums)
            return
        key = matrix.numel(), matrix.dtype
        if key not in self._squares:
            made = device.kernels().sums(matrix.device, [matrix.numel()], matrix.dtype)
            self._squares[key] = made, device.upload(array("q", [0]), matrix.device)
        table, distances = self._squares[key]
        table.run(distances, sums.zero_(), 0, base=matrix.data_ptr())


def _found(row: int, memory: Tensor | None) -> Tensor:
    if memory is None:
        raise StateError(_NOT_IN_MEMORY % row)
    return memory


def _chunks_of(numel: int) -> int:
    """Returns how many chunks of squares, each of which has a sum, as many elements are."""
    return -(-numel // SUMSQ_CHUNK)


def _applied(hyper: Mapping[str, Any], shape: Matrix) -> dict[str, Any]:
    """Returns with which settings the result is applied. A learning rate that lies on a device is not read."""
    lr, weight_decay, rule = hyper["lr"], hyper["weight_decay"], hyper["adjust_lr_fn"]
    size = shape.height, shape.width
    step = {"step": hyper.get("step", 1)}  # what is rounded by chance is so by the number of the step
    if isinstance(lr, Tensor):
        ratio = adjusted_lr(1.0, rule, size)
        return {"lr": lr * ratio, "weight_decay": weight_decay / ratio, **step}
    return {**apply_settings(lr, adjusted_lr(lr, rule, size), weight_decay), **step}
