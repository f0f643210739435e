"""Launchers of the native CPU kernels: they know pointers, counts and descriptors, no checks and no arithmetic."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Mapping, Sequence
from ctypes import byref, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from zerokern.core import native
from zerokern.core.errors import KernelError
from zerokern.kernels import formats
from zerokern.kernels.rules import RULES, words_of

__all__ = [
    "UpdateTable",
    "accumulate",
    "accumulate_sumsq",
    "collect",
    "convert",
    "stream",
    "sumsq_chunks",
    "sumsq_pointers",
]

_SEGMENT_NBYTES = ctypes.sizeof(native.NativeSegment)
_SEGMENT_WORDS = _SEGMENT_NBYTES // 8
_GROUP = struct.Struct("".join(kind._type_ for _, kind in native.NativeGroup._fields_))  # type: ignore[attr-defined]
_NOT_RUN = -(2**63)  # no row or group has this number, and the native call always writes one
_NEITHER = 2**63 - 1  # what zk_update names where no row and no group is at fault


class UpdateTable:
    """Rows (segments) and groups of one optimizer step; ``run`` is one native call for all of them.

    A column is a writable strided view of 64-bit words: thousands of pointers are refreshed in one assignment.

    >>> import torch
    >>> p, g = torch.ones(3), torch.ones(3)
    >>> table = UpdateTable(1, 1)
    >>> table.set_group(0, {"lr": 0.5}, algorithm="sgd", grad_dtype=torch.float32, param_dtype=torch.float32,
    ...                 master_format="fp32", state_format="none")
    >>> table.set_row(0, group=0, numel=3, master=p.data_ptr(), grad=g.data_ptr())
    >>> table.run(); p
    tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(self, nseg: int, ngroups: int) -> None:
        self.nseg = nseg
        self.ngroups = ngroups
        self._segments = (native.NativeSegment * max(nseg, 1))()
        self._address = ctypes.addressof(self._segments)
        self._groups = (native.NativeGroup * max(ngroups, 1))()
        words = memoryview(self._segments).cast("B").cast("Q")
        self.columns = {
            name: words[i : nseg * _SEGMENT_WORDS : _SEGMENT_WORDS] for i, name in enumerate(formats.COLUMNS)
        }
        self._scale = c_float(1.0)
        self._bad = c_int64(_NOT_RUN)
        self._native = native.library().zk_update

    def set_group(
        self,
        index: int,
        hyper: Mapping[str, Any],
        *,
        algorithm: str,
        grad_dtype: torch.dtype,
        param_dtype: torch.dtype,
        master_format: str,
        state_format: str,
        out_dtype: torch.dtype | None = None,
        stochastic_seed: int | None = None,
    ) -> None:
        """Fills one group: formats by name, hyperparameters as the ops name them."""
        numbers, flags, step = words_of(hyper, random=stochastic_seed is not None)
        _GROUP.pack_into(
            self._groups,
            index * _GROUP.size,
            RULES[algorithm].number,
            formats.DTYPES[grad_dtype],
            formats.DTYPES[param_dtype],
            formats.MASTERS[master_format],
            formats.STATES[state_format],
            formats.DTYPES[out_dtype] if out_dtype else 0,
            flags,
            0,
            *numbers,
            step,
            (stochastic_seed or 0) & 0xFFFFFFFFFFFFFFFF,
        )

    def set_row(self, index: int, *, group: int, numel: int, **pointers: int) -> None:
        """Fills one row: pointers by the names of the columns, 0 where a format needs none."""
        self.columns["group"][index] = group
        self.columns["numel"][index] = numel
        for name, value in pointers.items():
            self.columns[name][index] = value

    def run(self, scale: float = 1.0, begin: int = 0, end: int | None = None) -> None:
        """The native call on rows ``begin`` to ``end``; the GIL is free meanwhile. ``scale`` multiplies gradients."""
        self._bad.value = _NOT_RUN
        try:
            self._call(scale, begin, self.nseg if end is None else end)
        except KernelError:  # refused before anything was written
            self._bad.value = _NOT_RUN
            raise

    def _call(self, scale: float, begin: int, end: int) -> None:
        self._scale.value = scale
        first = self._address + begin * _SEGMENT_NBYTES
        code = self._native(first, end - begin, self._groups, self.ngroups, byref(self._scale), byref(self._bad))
        if code:
            bad = self._bad.value
            where = "the counts" if bad == _NEITHER else f"row {begin + bad}" if bad >= 0 else f"group {-1 - bad}"
            native.check(code, context=f"zk_update refused {where} of {self.nseg} rows and {self.ngroups} groups")

    @property
    def carried_out(self) -> bool:
        """Whether the last run was carried out, even when an interrupt hid that it returned."""
        return bool(self._bad.value != _NOT_RUN)


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * max(len(tensors), 1))(*(t.data_ptr() for t in tensors))


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]


def sumsq_pointers(pointers: array[int], numels: array[int], dtype: torch.dtype) -> array[float]:
    """Sums of squares of many tensors of one dtype, given as ``array("Q")`` of addresses and ``array("q")`` of counts.

    >>> x = torch.full((5,), 2.0)
    >>> sumsq_pointers(array("Q", [x.data_ptr()]), array("q", [5]), torch.float32)
    array('d', [20.0])
    """
    partials = (c_double * max(native.library().zk_sumsq_partials(_address(numels), len(numels)), 1))()
    return _sumsq(pointers, numels, dtype, ctypes.addressof(partials))


def sumsq_chunks(pointers: array[int], numels: array[int], dtype: torch.dtype, out: Tensor) -> None:
    """Writes the sums of squares of the chunks of these tensors, of 65536 elements each, to `out` in float64.

    >>> x, out = torch.ones(65537), torch.empty(2, dtype=torch.float64)
    >>> sumsq_chunks(array("Q", [x.data_ptr()]), array("q", [65537]), torch.float32, out); out
    tensor([6.5536e+04, 1.0000e+00], dtype=torch.float64)
    """
    _sumsq(pointers, numels, dtype, out.data_ptr())


def _sumsq(pointers: array[int], numels: array[int], dtype: torch.dtype, partials: int) -> array[float]:
    count = len(pointers)
    sums = array("d", bytes(8 * count))
    columns = _address(pointers), _address(numels), count, formats.DTYPES[dtype]
    native.check(native.library().zk_sumsq(*columns, partials, _address(sums)), context="zk_sumsq")
    return sums


def fingerprint(tensor: Tensor) -> int:
    """A contiguous tensor's CRC-32C.

    >>> fingerprint(torch.zeros(0)), fingerprint(torch.ones(2)) == fingerprint(torch.ones(2).neg())
    (0, False)
    """
    return native.crc32c(tensor.data_ptr(), tensor.nbytes)


def accumulate(dst: Tensor, srcs: Sequence[Tensor], add: bool, scale: float) -> None:
    """dst = cast((dst if add) + scale * s0 + scale * s1 ...)."""
    native.check(native.library().zk_accumulate(*_accumulation(dst, srcs, add, scale)), context="zk_accumulate")


def collect(
    dst: Tensor,
    sources: array[int],
    begins: array[int],
    numels: array[int],
    source_dtype: torch.dtype,
    add: bool,
) -> None:
    """Casts many contiguous tensors of one dtype, given as addresses, into spans of `dst`, or adds them there.

    >>> dst, x = torch.ones(4), torch.full((2,), 3.0)
    >>> collect(dst, array("Q", [x.data_ptr()]), array("q", [1]), array("q", [2]), torch.float32, add=True); dst
    tensor([1., 4., 4., 1.])
    """
    to = dst.data_ptr(), formats.DTYPES[dst.dtype]
    columns = _address(sources), _address(begins), _address(numels), len(sources)
    code = native.library().zk_collect(*to, *columns, formats.DTYPES[source_dtype], add)
    native.check(code, context="zk_collect")


def accumulate_sumsq(
    dst: Tensor, srcs: Sequence[Tensor], add: bool, scale: float, begins: array[int], numels: array[int]
) -> array[float]:
    """As `accumulate`; returns the sums of squares of spans of the result, which is not read again for that.

    >>> dst = torch.zeros(3)
    >>> accumulate_sumsq(dst, [torch.ones(3)], False, 2.0, array("q", [1]), array("q", [2])), dst
    (array('d', [8.0]), tensor([2., 2., 2.]))
    """
    count = len(numels)
    sums = array("d", bytes(8 * count))
    partials = (c_double * (dst.numel() // native.SUMSQ_CHUNK + count))()  # enough where spans do not overlap
    spans = _address(begins), _address(numels), count, partials, _address(sums)
    code = native.library().zk_accumulate_sumsq(*_accumulation(dst, srcs, add, scale), *spans)
    native.check(code, context="zk_accumulate_sumsq")
    return sums


def _accumulation(dst: Tensor, srcs: Sequence[Tensor], add: bool, scale: float) -> tuple[Any, ...]:
    to, sources = (dst.data_ptr(), formats.DTYPES[dst.dtype]), (_pointers(srcs), len(srcs))
    return *to, *sources, formats.DTYPES[srcs[0].dtype], dst.numel(), add, scale


def convert(codec: int, x: Tensor, codes: Tensor, aux: Tensor) -> None:
    """One of the codecs of ``zk_convert`` over whole tensors."""
    native.check(
        native.library().zk_convert(codec, x.data_ptr(), codes.data_ptr(), aux.data_ptr(), x.numel()),
        context="zk_convert",
    )


def stream(reads: Sequence[Tensor], updates: Sequence[Tensor], writes: Sequence[Tensor], nbytes: int) -> None:
    """Moves nbytes of every stream."""
    native.check(
        native.library().zk_stream(
            _pointers(reads), len(reads), _pointers(updates), len(updates), _pointers(writes), len(writes), nbytes
        ),
        context="zk_stream",
    )
