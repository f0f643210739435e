"""Sum of squares of a list of tensors in one launch, in a fixed order. Reads every byte once: itemsize bytes/element.

A chunk of 65536 elements is summed as `reference.sumsq` does: 64 lanes, each adding the squares of its elements in
order. So 64 threads at most can work on a chunk, and it is chunks that fill the GPU. A long list is summed `WIDE`: a
warp takes as many chunks as make its loads 128 bits wide. A shorter one would leave multiprocessors idle that way; it
is summed `NARROW`, one thread for each lane, with more rows in flight. Both have the same bits. The square of an fp32
number is exact in float64, so a fused multiply-add rounds as an addition does. Reference: `reference_device.sumsq`.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.backend import check_device
from zerokern.kernels.triton.codecs import TYPES
from zerokern.kernels.triton.rows import is_last_program, sum_columns, sum_halves
from zerokern.kernels.triton.upload import Sent, tile_map, upload
from zerokern.kernels.triton.wide import FAST_FLOAT64, add_squares

__all__ = ["Shape", "SumsqTable", "is_short", "multiprocessors", "shape_of", "sumsq", "sumsq_chunks"]

CHUNK = tl.constexpr(65536)
LANES = tl.constexpr(64)
SOME_ROWS = 8
MULTIPROCESSORS = 132  # of an H100 and an H200; where nobody can be asked
PROGRAMS_EACH = 4  # wide ones that a multiprocessor has before their loads cover the memory's latency


class Shape(NamedTuple):
    """How chunks are divided: so many in each program, of whose rows so many are loaded while as many are added."""

    chunks: int
    rows: int
    num_warps: int

    @property
    def lanes(self) -> int:
        """Lanes of each thread."""
        return self.chunks * LANES.value // (32 * self.num_warps)


NARROW = Shape(1, 64, 2)
WIDE = {2: Shape(4, 16, 1), 4: Shape(2, 16, 1)}  # by bytes of an element
# where additions are integers, which take 60 instructions: fewer rows, so that a loop fits into the instruction cache
SHORT_NARROW = Shape(1, 8, 2)
SHORT_WIDE = {2: Shape(4, 2, 1), 4: Shape(2, 4, 1)}


def shape_of(nchunks: int, width: int, multiprocessors: int = MULTIPROCESSORS, *, short: bool = False) -> Shape:
    """The shape in which so many chunks of elements of `width` bytes keep all multiprocessors busy.

    `short`: of a GPU that adds in integers (`wide.float64_is_scarce`).

    >>> shape_of(5000, 2), shape_of(400, 2)
    (Shape(chunks=4, rows=16, num_warps=1), Shape(chunks=1, rows=64, num_warps=2))
    """
    wide = (SHORT_WIDE if short else WIDE)[width]
    if nchunks >= PROGRAMS_EACH * multiprocessors * wide.chunks:
        return wide
    return SHORT_NARROW if short else NARROW


@triton.jit
def _whole_rows(start, blocks, TYPE: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, VEC: tl.constexpr):
    """Sums of the first `blocks` * ROWS rows of aligned chunks: rows are added while the next ones are loaded."""
    at = tl.arange(0, ROWS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    pointer = start.to(tl.pointer_type(TYPE))
    if VEC > 1:
        pointer = tl.multiple_of(pointer, [16])
    pointer = pointer[None, :, None] + at
    sums = tl.zeros((CHUNKS, LANES), tl.float64)
    x = tl.load(pointer)
    for _ in range(1, blocks):
        pointer += ROWS * LANES
        following = tl.load(pointer)
        sums = add_squares(sums, x, ROWS)
        x = following
    return add_squares(sums, x, ROWS)


@triton.jit
def _other_rows(sums, start, begin, left, TYPE: tl.constexpr, ROWS: tl.constexpr, VEC: tl.constexpr):
    """Adds the elements of each chunk from `begin` on."""
    lane = tl.arange(0, LANES)[None, :]
    most = tl.max(left, axis=0)
    pointer = start.to(tl.pointer_type(TYPE))
    if VEC > 1:
        pointer = tl.multiple_of(pointer, [16])
    for row in range(begin, most, ROWS * LANES):
        for i in tl.static_range(ROWS):
            at = row + i * LANES + lane
            mask = tl.max_constancy(at < left[:, None], [1, VEC])
            x = tl.load(pointer[:, None] + at, mask=mask, other=0.0)
            sums = add_squares(sums, x[None, :, :], 1)
    return sums


@triton.jit
def squares_of_chunks(
    start, left, TYPE: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """The lanes of CHUNKS chunks, of which `left` elements from the address `start` on are there."""
    blocks = tl.min(left, axis=0) // (ROWS * LANES)
    if VEC > 1:
        ragged = (start % (VEC * WIDTH)) | (left % VEC)
        blocks = tl.where(tl.max(ragged, axis=0) == 0, blocks, -1)
    sums = tl.zeros((CHUNKS, LANES), tl.float64)
    if blocks > 0:
        sums = _whole_rows(start, blocks, TYPE, CHUNKS, ROWS, VEC)
    if VEC == 1:
        sums = _other_rows(sums, start, blocks * (ROWS * LANES), left, TYPE, SOME, 1)
    elif blocks >= 0:
        sums = _other_rows(sums, start, blocks * (ROWS * LANES), left, TYPE, SOME, VEC)
    else:
        sums = _other_rows(sums, start, 0, left, TYPE, SOME, 1)
    return sums


@triton.jit(
    do_not_specialize=["index", "base", "nchunks"],
    do_not_specialize_on_alignment=["out", "partials", "pointers", "numels"],
)
def sumsq_chunks(
    out, index, partials, counter, chunks, pointers, base: tl.int64, numels, nchunks,
    TYPE: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Program i sums the chunks `chunks[i * CHUNKS ...]` = (row, chunk within the row); the last one adds them up.

    A row begins at `base` + its pointer. ROWS are loaded at once, and SOME where not all of them are there. VEC is 1
    where a thread has one lane.
    """
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    some = chunk < nchunks
    row = tl.load(chunks + 2 * chunk, mask=some, other=0).to(tl.int64)
    first = tl.load(chunks + 2 * chunk + 1, mask=some, other=0).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(numels + row, mask=some, other=0) - first, CHUNK).to(tl.int32)
    start = base + tl.load(pointers + row, mask=some, other=0) + first * WIDTH
    sums = squares_of_chunks(start, left, TYPE, WIDTH, CHUNKS, ROWS, SOME, VEC)
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
        self._shape = shape_there(device, self.nchunks, dtype)
        self._chunks = upload(chunks, device)
        self._numels = upload(array("q", numels), device)
        self._partials = torch.empty(max(self.nchunks, 1), dtype=torch.float64, device=device)
        self._total = torch.empty(1, dtype=torch.float64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._distances = Sent(device)

    def measure(self, addresses: Sequence[int], chunks: Tensor) -> None:
        """Writes the sum of each chunk of tensors that lie there, in their order, to `chunks` in float64.

        Addresses go up as distances from the first: memory that moves as one needs no upload.
        """
        distances = self._distances.of(array("q", [address - addresses[0] for address in addresses]))
        self.run(distances, base=addresses[0], chunks=chunks)

    def run(
        self,
        pointers: Tensor,
        out: Tensor | None = None,
        index: int = 0,
        *,
        base: int = 0,
        chunks: Tensor | None = None,
    ) -> None:
        """out[index] = the sum over all tensors: int64 addresses and float64 sums, both on the device.

        `base` is added to each address. `chunks`: gets the sum of each chunk, in the order of the tensors.
        """
        shape = self._shape
        sumsq_chunks[(max(-(-self.nchunks // shape.chunks), 1),)](
            self._total if out is None else out,
            index,
            self._partials if chunks is None else chunks,
            self._counter,
            self._chunks,
            pointers,
            base,
            self._numels,
            self.nchunks,
            **constants(shape, self.dtype),
            num_warps=shape.num_warps,
            enable_fp_fusion=False,
        )


def shape_there(device: torch.device, nchunks: int, dtype: torch.dtype) -> Shape:
    """`shape_of` on a device."""
    count, short = _gpu(device)
    return shape_of(nchunks, dtype.itemsize, count, short=short)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a device has.

    >>> multiprocessors(torch.device("cpu"))
    132
    """
    return _gpu(device)[0]


def is_short(device: torch.device) -> bool:
    """Whether a device has few float64 units.

    >>> is_short(torch.device("cpu"))
    False
    """
    return _gpu(device)[1]


@functools.cache
def _gpu(device: torch.device) -> tuple[int, bool]:
    """How many multiprocessors a device has, and whether it adds in integers."""
    if device.type != "cuda":
        return MULTIPROCESSORS, False
    found = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count), 10 * found.major + found.minor not in FAST_FLOAT64


def constants(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of a kernel that sums chunks."""
    vec = 1 if shape.lanes == 1 else 16 // dtype.itemsize
    rows = {"ROWS": shape.rows, "SOME": min(shape.rows, SOME_ROWS)}
    return {"TYPE": TYPES[dtype], "WIDTH": dtype.itemsize, "CHUNKS": shape.chunks, **rows, "VEC": vec}


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
