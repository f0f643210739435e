"""Lists of spans between device memory and pinned host memory, copied by the kernel of `cuda/ferry.cu`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.kernels import checks
from zerokern.kernels.cuda.loader import Stream, architecture, kernel, placed, refuse_without, stage_bytes
from zerokern.kernels.cuda.rows import parameters, parts_of
from zerokern.kernels.spans import WORDS, Span, rows_of

__all__ = ["FERRY_THREADS", "ferry", "ferry_shared", "ferry_spans"]

Pairs = Sequence[tuple[Tensor, Tensor]]
FERRY_THREADS = 256
STAGES, BARRIER = 4, 8
INSTEAD = "Tensor.copy_(..., non_blocking=True)"


def ferry(pairs: Pairs, stream: Stream | None = None, ctas: int | None = None) -> None:
    """Queues copies of (dst, src) between a device and pinned host memory on a stream, a launch for 1,344 of them.

    Either way, and both in one list. The tensors are contiguous, and dst has the dtype and the number of elements of
    src; what is written overlaps nothing else. ``ctas`` thread blocks move them, by default 4, or 8 before sm_90; each
    takes an SM while it runs. As with copies of torch, memory must stay as it is until the stream has passed.

    >>> ferry([]) is None
    True
    """
    device = _check_pairs(pairs)
    if device is not None:
        ferry_spans([(dst.data_ptr(), src.data_ptr(), src.nbytes) for dst, src in pairs], device, stream, ctas)


def ferry_spans(
    spans: Sequence[Span] | array[int], device: torch.device, stream: Stream | None = None, ctas: int | None = None
) -> None:
    """`ferry` of addresses: to where, from where, how many bytes; or rows of them. Nothing is checked but the device.

    >>> ferry_spans([], torch.device("cpu"))
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: ferry: CUDA kernels run on cuda devices, not on cpu; what runs instead: ...
    """
    refuse_without(device, "ferry", INSTEAD)
    grid, found = _ctas(ctas, device), architecture(device)
    rows = rows_of(spans)
    with placed(device, stream):
        for part in parts_of(rows[::WORDS], rows[1::WORDS], rows[2::WORDS], stage_bytes(found)):
            launch = kernel("ferry.cu", f"ferry_{part.size}", device, ferry_shared(found))
            launch(min(grid, part.tasks), FERRY_THREADS, parameters(part))


def ferry_shared(architecture: int) -> int:
    """Returns the bytes of shared memory that a CTA of `ferry` takes: a ring of stages from sm_90 on.

    >>> ferry_shared(80), ferry_shared(90)
    (0, 131104)
    """
    return STAGES * (stage_bytes(architecture) + BARRIER) if architecture >= 90 else 0


def _ctas(ctas: int | None, device: torch.device) -> int:
    return checks.count("ctas", ctas, 1) if ctas is not None else 4 if architecture(device) >= 90 else 8


def _check_pairs(pairs: Pairs) -> torch.device | None:
    """Returns the device of all pairs, None for none of them."""
    if not pairs:
        return None
    for i, pair in enumerate(pairs):
        for name, one in zip(("dst", "src"), pair, strict=True):
            checks.tensor(f"{name} of pairs[{i}]", one, (one.dtype,) if isinstance(one, Tensor) else None)
    devices = [t.device for pair in pairs for t in pair if t.device.type != "cpu"] or [pairs[0][0].device]
    refuse_without(devices[0], "ferry", INSTEAD)
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
