"""Lists of spans between device memory and pinned host memory: `ferry`, and `depart` with sums on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels import checks
from zerokern.kernels.cuda.loader import Stream, architecture, kernel, placed, refuse_without, stage_bytes
from zerokern.kernels.cuda.rows import NAMES, parameters, parts_of, scratch
from zerokern.kernels.formats import DTYPES

__all__ = [
    "CHUNK",
    "DEPART_THREADS",
    "FERRY_THREADS",
    "depart",
    "depart_shared",
    "ferry",
    "ferry_shared",
    "ferry_spans",
]

Pairs = Sequence[tuple[Tensor, Tensor]]
FERRY_THREADS = DEPART_THREADS = 256
CHUNK = 65536  # elements that one warp sums up: `reference.SUMSQ_CHUNK`
STAGES, BARRIER, WARPS = 4, 8, 8
SUMS_SHARED = 1024 * 8 + 16
INSTEAD = "Tensor.copy_(..., non_blocking=True)"


def ferry(pairs: Pairs, stream: Stream | None = None, ctas: int | None = None) -> None:
    """Queues copies of (dst, src) between a device and pinned host memory on a stream, a launch for 1,344 of them.

    Either way, and both in one list. The tensors are contiguous, and dst has the dtype and the number of elements of
    src; what is written overlaps nothing else. ``ctas`` thread blocks move them, by default 4, or 8 before sm_90; each
    takes an SM while it runs. As with copies of torch, memory must stay as it is until the stream has passed.

    >>> ferry([]) is None
    True
    """
    device = _check_pairs("ferry", pairs, None)
    if device is not None:
        ferry_spans([(dst.data_ptr(), src.data_ptr(), src.nbytes) for dst, src in pairs], device, stream, ctas)


def ferry_spans(
    spans: Sequence[tuple[int, int, int]], device: torch.device, stream: Stream | None = None, ctas: int | None = None
) -> None:
    """`ferry` of addresses: to where, from where, how many bytes. Nothing is checked but the device.

    >>> ferry_spans([], torch.device("cpu"))
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: ferry: CUDA kernels run on cuda devices, not on cpu; what runs instead: ...
    """
    refuse_without(device, "ferry", INSTEAD)
    grid, found = _ctas(ctas, device), architecture(device)
    to, source, sizes = zip(*spans, strict=True) if spans else ((), (), ())
    with placed(device, stream):
        for part in parts_of(to, source, sizes, (1, 1), stage_bytes(found)):
            launch = kernel("ferry.cu", f"ferry_{part.size}", device, ferry_shared(found))
            launch(min(grid, part.tasks), FERRY_THREADS, parameters("ferry", part))


def depart(
    pairs: Pairs,
    sums_out: Tensor,
    finite_out: Tensor,
    stream: Stream | None = None,
    ctas: int | None = None,
    *,
    chunks_out: Tensor | None = None,
) -> None:
    """`ferry`, with the sum of squares of all that was copied, read once: for gradients that leave the device.

    ``sums_out``, one float64, becomes the sum of the sources' squares with the bits of `reference_device.sumsq`, which
    are those of Triton's `sumsq`; ``finite_out``, one bool, whether it is finite. Both are on the device or in pinned
    host memory. The tensors are float32, bfloat16 or float16; a launch is of one dtype. ``chunks_out``, for tensors of
    one dtype: float64 that become the sums of chunks as `ChunkSums` has them, from which each tensor's own is added up.

    >>> depart([], torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bool))
    Traceback (most recent call last):
    ...
    ValueError: pairs=[]: must be at least one pair
    """
    device = _check_pairs("depart", pairs, tuple(DTYPES))
    if device is None:
        raise ValueError(got("pairs", [], "at least one pair"))
    checks.tensor("sums_out", sums_out, (torch.float64,), 1, why="the sum of squares")
    checks.tensor("finite_out", finite_out, (torch.bool,), 1, why="whether it is finite")
    for name, one in (("sums_out", sums_out), ("finite_out", finite_out)):
        _check_reached(name, one, device)
    if chunks_out is not None:
        count = sum(-(-src.numel() // CHUNK) for _, src in pairs)
        checks.tensor("chunks_out", chunks_out, (torch.float64,), count, why="one for each chunk")
        _check_reached("chunks_out", chunks_out, device)
        if len({src.dtype for _, src in pairs}) > 1:
            raise ValueError("chunks_out was given for tensors of several dtypes; allowed: a call for each dtype")
    grid, found, follows = _ctas(ctas, device), architecture(device), 0
    own = scratch(device, stream)
    with placed(device, stream):
        for dtype in dict.fromkeys(src.dtype for _, src in pairs):
            some = [(dst, src) for dst, src in pairs if src.dtype == dtype]
            to, source = [dst.data_ptr() for dst, _ in some], [src.data_ptr() for _, src in some]
            width = dtype.itemsize
            parts = parts_of(to, source, [src.numel() for _, src in some], (width, width), CHUNK)
            count = sum(part.tasks for part in parts)
            partials = own.room(count) if chunks_out is None else chunks_out
            for part in parts:
                given = parameters("depart", part)
                given["finite"] = finite_out.data_ptr()
                given["sums"] = (
                    sums_out.data_ptr(), partials.data_ptr(), own.counter.data_ptr(),
                    part.first, count, part is parts[-1], follows,
                )  # fmt: skip
                launch = kernel("depart.cu", f"depart_{NAMES[dtype]}_{part.size}", device, depart_shared(found))
                launch(min(grid, -(-part.tasks // WARPS)), DEPART_THREADS, given)
            follows |= bool(parts)
        if not follows:
            sums_out.zero_()
            finite_out.fill_(True)


def ferry_shared(architecture: int) -> int:
    """Returns the bytes of shared memory that a CTA of `ferry` takes: a ring of stages from sm_90 on.

    >>> ferry_shared(80), ferry_shared(90)
    (0, 131104)
    """
    return STAGES * (stage_bytes(architecture) + BARRIER) if architecture >= 90 else 0


def depart_shared(architecture: int) -> int:
    """Returns the bytes of shared memory that a CTA of `depart` takes: a ring for each warp from sm_90 on.

    >>> depart_shared(80), depart_shared(90)
    (40976, 139536)
    """
    if architecture < 90:
        return stage_bytes(architecture) + SUMS_SHARED
    return STAGES * (stage_bytes(architecture) + WARPS * BARRIER) + SUMS_SHARED


def _ctas(ctas: int | None, device: torch.device) -> int:
    return checks.count("ctas", ctas, 1) if ctas is not None else 4 if architecture(device) >= 90 else 8


def _check_pairs(what: str, pairs: Pairs, dtypes: tuple[torch.dtype, ...] | None) -> torch.device | None:
    """Returns the device of all pairs, None for none of them."""
    if not pairs:
        return None
    for i, pair in enumerate(pairs):
        for name, one in zip(("dst", "src"), pair, strict=True):
            allowed = (one.dtype,) if dtypes is None and isinstance(one, Tensor) else dtypes
            checks.tensor(f"{name} of pairs[{i}]", one, allowed)
    devices = [t.device for pair in pairs for t in pair if t.device.type != "cpu"] or [pairs[0][0].device]
    refuse_without(devices[0], what, INSTEAD)
    written = []
    for i, (dst, src) in enumerate(pairs):
        for name, one in (("dst", dst), ("src", src)):
            _check_reached(f"{name} of pairs[{i}]", one, devices[0])
        if dst.dtype != src.dtype or dst.numel() != src.numel():
            found = f"{dst.numel()} elements of {dst.dtype} from {src.numel()} of {src.dtype}"
            raise ValueError(f"pairs[{i}] copies {found}; allowed: the same number and dtype on both sides")
        written.append((f"dst of pairs[{i}]", dst))
    checks.no_overlap(written, [(f"src of pairs[{i}]", src) for i, (_, src) in enumerate(pairs)])
    return devices[0]


def _check_reached(name: str, one: Tensor, device: torch.device) -> None:
    if one.device != device and not one.is_pinned():
        raise ValueError(f"{name} is in pageable memory of {one.device}; allowed: {device}, or pinned host memory")
