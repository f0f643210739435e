"""Whole matrices: which ones parameters are made of, and the table that updates them one at a time (Muon)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.core.units import BLOCK
from zerokern.kernels.orthogonal import adjusted_lr, apply_settings, orthogonalize_
from zerokern.kernels.reference import SUMSQ_CHUNK
from zerokern.memory.interrupts import whole
from zerokern.optim import device
from zerokern.zero.kinds import Placed
from zerokern.zero.shard import Shard
from zerokern.zero.units import check_split

__all__ = ["Matrix", "MatrixTable", "SpareMatrix", "check_matrix", "check_shard", "matrices_of"]

_HOST = torch.device("cpu")
_OF_PARAMETERS = ("param", "remainder", "master", "out", "key", "first")
_UNUSED = ("exp_avg_sq", "exp_avg_sq_scale")
_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
_IN_A_GRAPH = (
    "a step of Muon cannot go into a CUDA graph; capture forward and backward alone, and call step() after each replay"
)
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

    @property
    def record(self) -> None:
        """The record that holds its state: none, for records would cut it."""


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
    if shard.numel in (0, shard.shape.numel()) and not _is_cut(shard):
        return
    do = "zk.shard(model, stage=0), or whole= for matrices, keeps each whole on one rank; zk.AdamW steps parts"
    what = f"{tuple(shard.shape)}, of which ranks have parts (stage {shard.sharding.stage})"
    raise ValueError(got(shard.name, what, "a matrix that one rank has all of", do))


def _is_cut(shard: Shard) -> bool:
    """Whether a cut between two ranks falls into it, on whichever rank this is asked."""
    bucket = shard.gradients
    if bucket is None or shard.sharding.replicated:
        return False
    place, each = bucket.entries[shard.place].place, bucket.bucket.shard_numel
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


class MatrixTable:
    """Rows of an update that are whole matrices, with the face of the tables that it is made of.

    Of one row after the other it moves the average and writes the matrix that is to be orthogonalized, orthogonalizes
    it, and applies the result. There is one such matrix at a time, in memory that `spare` holds. `shapes`: of all rows.
    """

    def __init__(self, open_table: Callable[[int, int], Any], shapes: Sequence[Matrix], ngroups: int) -> None:
        self._shapes, self.nseg, self.ngroups = shapes, len(shapes), ngroups
        # for each row the table of its average, and that of its parameter, whose learning rate depends on its shape
        self._tables = [(open_table(1, 1), open_table(1, 1)) for _ in shapes]
        self._arranged: list[Any] = [None] * self.nseg
        self._iterations: list[dict[str, Any]] = [{}] * self.nseg
        names = ("group", "numel", "grad", *_OF_PARAMETERS, "exp_avg", "exp_avg_scale", *_UNUSED)
        self.columns = {name: memoryview(bytearray(8 * max(self.nseg, 1))).cast("Q")[: self.nseg] for name in names}
        self.spare = SpareMatrix(getattr(self._tables[0][0], "device", _HOST) if self._tables else _HOST)
        self._decides = lambda: open_table(1, 1)  # on a device: a table without elements, which counts the step
        self._decided: Any = None
        self._nothing: list[Tensor] = []
        self.begun = self.carried_out = False

    def set_group(
        self,
        index: int,
        *,
        grad_dtype: torch.dtype,
        state_format: str,
        lr: Any,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        maximize: bool,
        ns_coefficients: tuple[float, float, float],
        eps: float,
        ns_steps: int,
        adjust_lr_fn: str | None,
        ns_dtype: str | None,
        **formats: Any,
    ) -> None:
        """Fills one group, as `UpdateTable.set_group` does; Muon's other settings are by torch's names."""
        dtype = _NS_DTYPES[ns_dtype] or default_ns_dtype(self.spare.place)
        of_averages = {
            "algorithm": "muon",
            "grad_dtype": grad_dtype,
            "param_dtype": torch.bfloat16,  # there is none
            "master_format": "none",
            "state_format": state_format,
            "out_dtype": dtype,
            "lr": 0.0,
            "first_step": False,
            "momentum": momentum,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        formats = {**formats, "algorithm": "sgd", "grad_dtype": dtype, "state_format": "none"}
        iteration = {"dtype": dtype, "coefficients": ns_coefficients, "steps": ns_steps, "eps": eps}
        for row, group in enumerate(self.columns["group"]):
            if group == index and self._shapes[row].numel:
                averages, parameters = self._tables[row]
                averages.set_group(0, **of_averages)
                parameters.set_group(0, **formats, **_applied(lr, weight_decay, adjust_lr_fn, self._shapes[row]))
                self._iterations[row] = iteration
        self._decided_as = of_averages

    def run(self, scale: float = 1.0, begin: int = 0, end: int | None = None) -> None:
        """Updates rows `begin` to `end`. `begun` says of a run that raised whether anything had been written."""
        with self._prepared(range(begin, self.nseg if end is None else end)) as rows:
            for row in rows:
                self._update(row, scale)

    @contextmanager
    def _prepared(self, rows: range) -> Iterator[list[int]]:
        """Around a run: those of the rows that have elements. A Ctrl-C waits until it is over."""
        self.begun = self.carried_out = False
        there = [row for row in rows if self._shapes[row].numel]
        wanted = [(self._shapes[row], self._iterations[row]["dtype"]) for row in there]
        with whole("the step"), self.spare.lent(wanted):
            yield there
            self.carried_out = True

    def launch(self, scale: float, control: Any) -> None:
        """Launches the update of all rows. The device decides on each, and counts the step when all have been made."""
        if device.capturing(control.steps.device):
            raise StateError(_IN_A_GRAPH)
        with self._prepared(range(self.nseg)) as rows:
            self._launch(rows, scale, control)

    def _launch(self, rows: Sequence[int], scale: float, control: Any) -> None:
        if not self._nothing or self._nothing[0].shape != control.increments.shape:
            self._nothing = [torch.zeros_like(control.increments), torch.zeros_like(control.outcome)]
        still, outcome = self._nothing
        skips: Tensor | None = None
        for row in rows:
            witness = [control.witnesses[self.columns["group"][row]]]
            counting = {"steps": control.steps, "increments": still, "witnesses": witness, "outcome": outcome}
            matrix, sums = self._arrange(row)
            averages, parameters = self._tables[row]
            self.begun = True
            averages.run(scale, type(control)(**{**vars(control), **counting}))
            skips = outcome[2:3].float() if skips is None else skips
            self._orthogonalize(row, matrix, sums)
            of_sums = {"max_norm": None, "sums": None, "grad_scale": None, "found_inf": skips}
            parameters.run(1.0, type(control)(**counting, **of_sums))
        if self._decided is None:
            self._decided = self._decides()
        self._decided.set_group(0, **self._decided_as)
        self.begun = True
        self._decided.run(scale, type(control)(**{**vars(control), "witnesses": control.witnesses[:1]}))

    def _update(self, row: int, scale: float) -> None:
        matrix, sums = self._arrange(row)
        averages, parameters = self._tables[row]
        averages.run(scale)
        self.begun = True
        self._orthogonalize(row, matrix, sums)
        parameters.run(1.0)

    def _orthogonalize(self, row: int, matrix: Tensor, sums: Tensor) -> None:
        how = self._iterations[row]
        orthogonalize_(matrix, sums, coefficients=how["coefficients"], steps=how["steps"], eps=how["eps"])

    def _arrange(self, row: int) -> tuple[Tensor, Tensor]:
        """Points the tables of a row at what it is about; returns the matrix between them, and its sums of squares."""
        shape, columns = self._shapes[row], self.columns
        matrix, sums = self.spare.take(shape, self._iterations[row]["dtype"])
        mine = {name: columns[name][row] for name in ("exp_avg", "exp_avg_scale")}
        mine |= {"out": matrix.data_ptr(), "exp_avg_sq": sums.data_ptr()}
        others = {name: columns[name][row] for name in _OF_PARAMETERS}
        averages, parameters = self._tables[row]
        if self._arranged[row] != (mine, others):
            averages.set_row(0, group=0, numel=shape.numel, **mine)
            parameters.set_row(0, group=0, numel=shape.numel, **others)
            self._arranged[row] = (mine, others)
        averages.columns["grad"][0] = columns["grad"][row]
        parameters.columns["grad"][0] = matrix.data_ptr()
        return matrix, sums


class SpareMatrix:
    """Memory for the one matrix that is orthogonalized, on a device as long as whoever holds it.

    In host memory it is there during an update alone; a device's addresses have to stay, for they have been sent there.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._memory = self._sums = torch.empty(0)

    @contextmanager
    def lent(self, wanted: Sequence[tuple[Matrix, torch.dtype]]) -> Iterator[None]:
        """Has room for each of these matrices, one at a time, within the block."""
        numel = max((shape.numel for shape, _ in wanted), default=0)
        nbytes = max((shape.numel * dtype.itemsize for shape, dtype in wanted), default=0)
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self.place)
        if self._sums.numel() < -(-numel // SUMSQ_CHUNK):
            self._sums = torch.empty(-(-numel // SUMSQ_CHUNK), dtype=torch.float64, device=self.place)
        try:
            yield
        finally:
            if self.place == _HOST:
                self._memory = self._sums = torch.empty(0)

    def take(self, shape: Matrix, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the matrix, and room for its sums of squares, whatever they hold."""
        flat = self._memory[: shape.numel * dtype.itemsize].view(dtype)
        return flat.view(shape.height, shape.width), self._sums[: -(-shape.numel // SUMSQ_CHUNK)]


def default_ns_dtype(place: torch.device) -> torch.dtype:
    """Returns what matrices are orthogonalized in, unless their group says it: bf16 where that is multiplied."""
    return torch.bfloat16 if place != _HOST or _cpu_multiplies_bf16() else torch.float32


@cache
def _cpu_multiplies_bf16() -> bool:
    """Whether this CPU has tiles for products of bf16 (AMX). With AVX-512's instruction alone fp32 is faster."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())


def _applied(lr: Any, weight_decay: float, rule: str | None, shape: Matrix) -> dict[str, Any]:
    """Returns with which settings the result is applied. A learning rate that lies on a device is not read."""
    size = shape.height, shape.width
    if isinstance(lr, Tensor):
        ratio = adjusted_lr(1.0, rule, size)
        return {"lr": lr * ratio, "weight_decay": weight_decay / ratio}
    return apply_settings(lr, adjusted_lr(lr, rule, size), weight_decay)
