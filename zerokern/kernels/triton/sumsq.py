"""Sum of squares of a list of tensors in one launch, in a fixed order. Reads every byte once: itemsize bytes/element.

A chunk of 65536 elements is summed as `reference.sumsq` does: 64 lanes, each adding the squares of its elements in
order. So a chunk is worked on by 64 lanes at a time, and it is chunks that fill the GPU: a warp takes as many as make
its loads 128 bits wide. The square of an fp32 number is exact in float64, so a fused multiply-add rounds as an addition
does. Reference: `reference_device.sumsq`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.ahead import Promises, make_job
from zerokern.kernels.triton.backend import check_device
from zerokern.kernels.triton.codecs import TYPES, widened64
from zerokern.kernels.triton.rows import add_squares, is_last_program, sum_columns, sum_halves
from zerokern.kernels.triton.upload import tile_map, upload

__all__ = ["SumsqTable", "aot_jobs", "sumsq", "sumsq_chunks"]

CHUNK = tl.constexpr(65536)
LANES = tl.constexpr(64)
ROWS = tl.constexpr(16)  # of a chunk that are loaded while as many are added
SOME_ROWS = tl.constexpr(8)
NUM_WARPS = 1
REGISTERS = 255
SHARED = 2048  # once per chunk, where whole and other rows meet


@triton.jit
def _whole_rows(start, blocks, TYPE: tl.constexpr, CHUNKS: tl.constexpr):
    """Sums of the first `blocks` * ROWS rows of aligned chunks: rows are added while the next ones are loaded."""
    at = tl.arange(0, ROWS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    pointer = tl.multiple_of(start.to(tl.pointer_type(TYPE)), [16])[None, :, None] + at
    sums = tl.zeros((CHUNKS, LANES), tl.float64)
    x = tl.load(pointer)
    for _ in range(1, blocks):
        pointer += ROWS * LANES
        following = tl.load(pointer)
        sums = add_squares(sums, x, ROWS)
        x = following
    return add_squares(sums, x, ROWS)


@triton.jit
def _other_rows(sums, start, begin, left, TYPE: tl.constexpr, VEC: tl.constexpr):
    """Adds the elements of each chunk from `begin` on."""
    lane = tl.arange(0, LANES)[None, :]
    most = tl.max(left, axis=0)
    pointer = start.to(tl.pointer_type(TYPE))
    if VEC > 1:
        pointer = tl.multiple_of(pointer, [16])
    for row in range(begin, most, SOME_ROWS * LANES):
        for i in tl.static_range(SOME_ROWS):
            at = row + i * LANES + lane
            mask = tl.max_constancy(at < left[:, None], [1, VEC])
            x = widened64(tl.load(pointer[:, None] + at, mask=mask, other=0.0))
            sums = tl.fma(x, x, sums)
    return sums


@triton.jit(
    do_not_specialize=["index", "nchunks"],
    do_not_specialize_on_alignment=["out", "pointers", "numels"],
)
def sumsq_chunks(
    out, index, partials, counter, chunks, pointers, numels, nchunks,
    TYPE: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Program i sums the chunks `chunks[i * CHUNKS ...]` = (row, chunk within the row); the last one adds them up."""
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    some = chunk < nchunks
    row = tl.load(chunks + 2 * chunk, mask=some, other=0).to(tl.int64)
    base = tl.load(chunks + 2 * chunk + 1, mask=some, other=0).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(numels + row, mask=some, other=0) - base, CHUNK).to(tl.int32)
    start = tl.load(pointers + row, mask=some, other=0) + base * WIDTH
    ragged = (start % (VEC * WIDTH)) | (left % VEC)
    sums = tl.zeros((CHUNKS, LANES), tl.float64)
    if tl.max(ragged, axis=0) == 0:
        blocks = tl.min(left, axis=0) // (ROWS * LANES)
        if blocks > 0:
            sums = _whole_rows(start, blocks, TYPE, CHUNKS)
        sums = _other_rows(sums, start, blocks * (ROWS * LANES), left, TYPE, VEC)
    else:
        sums = _other_rows(sums, start, 0, left, TYPE, 1)
    tl.store(partials + chunk, sum_halves(sums, CHUNKS, LANES), mask=some)
    if is_last_program(counter):
        tl.store(out + index, sum_columns(partials, nchunks))


class SumsqTable:
    """The sums of squares of lists of tensors of the same sizes, over and over: nothing is uploaded in between.

    ``run`` can be captured in a CUDA graph. The scratch memory is the table's own: runs of one table must be ordered.

    >>> device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    >>> x, y = torch.full((3,), 2.0, device=device), torch.ones(5, device=device)
    >>> sums = torch.zeros(2, dtype=torch.float64, device=device)
    >>> table = SumsqTable(device, [3, 5], torch.float32)
    >>> table.run(torch.tensor([x.data_ptr(), y.data_ptr()], device=device), sums, 1); sums.tolist()
    [0.0, 17.0]
    """

    def __init__(self, device: torch.device, numels: Sequence[int], dtype: torch.dtype) -> None:
        check_device(device)
        chunks = tile_map(numels, CHUNK.value)
        self.dtype = dtype
        self.nrows = len(numels)
        self.nchunks = len(chunks)
        self._chunks = upload(chunks, device)
        self._numels = upload(array("q", numels), device)
        self._partials = torch.empty(max(self.nchunks, 1), dtype=torch.float64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)

    def run(self, pointers: Tensor, out: Tensor, index: int = 0) -> None:
        """out[index] = the sum over all tensors: int64 addresses and float64 sums, both on the device."""
        width = self.dtype.itemsize
        at_once = _chunks_at_once(width)
        sumsq_chunks[(max(-(-self.nchunks // at_once), 1),)](
            out,
            index,
            self._partials,
            self._counter,
            self._chunks,
            pointers,
            self._numels,
            self.nchunks,
            TYPE=TYPES[self.dtype],
            WIDTH=width,
            CHUNKS=at_once,
            VEC=16 // width,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def sumsq(tensors: Sequence[Tensor], out: Tensor) -> None:
    """out[0] = the sum of squares of contiguous tensors on one device; one launch for each dtype, added in the order in
    which the dtypes appear."""
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    sums = out if len(dtypes) == 1 else out.new_empty(len(dtypes))
    for index, dtype in enumerate(dtypes):
        chosen = [t for t in tensors if t.dtype == dtype]
        pointers = upload(array("Q", [t.data_ptr() for t in chosen]), out.device)
        SumsqTable(out.device, [t.numel() for t in chosen], dtype).run(pointers, sums, index)
    if len(dtypes) != 1:
        out.zero_()
        for one in sums:
            out += one


def _chunks_at_once(width: int) -> int:
    """As many chunks of 64 lanes as fill 32 threads of 16 bytes."""
    return 32 * 16 // width // LANES.value


def aot_jobs(every: bool) -> list[dict[str, Any]]:
    """Jobs of `ahead`: one for each dtype."""
    return [
        make_job(
            sumsq_chunks,
            str(dtype).removeprefix("torch."),
            {
                "out": "*fp64",
                "index": "i32",
                "partials": "*fp64",
                "counter": "*i32",
                "chunks": "*i32",
                "pointers": "*i64",
                "numels": "*i64",
                "nchunks": "i32",
            },
            {
                "TYPE": kind,
                "WIDTH": dtype.itemsize,
                "CHUNKS": _chunks_at_once(dtype.itemsize),
                "VEC": 16 // dtype.itemsize,
            },
            Promises(
                REGISTERS,
                fma={"f64": 2 * (ROWS.value + SOME_ROWS.value) * 16 // dtype.itemsize},
                wide=("load",),
                shared=SHARED,
            ),
            num_warps=NUM_WARPS,
            aligned=("partials", "counter", "chunks"),
        )
        for dtype, kind in TYPES.items()
        if every or dtype != torch.float16
    ]
