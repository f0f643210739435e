"""Launchers of the CUDA C++ kernels: a list of tensors on a GPU, and one bucket in pinned host memory, in one launch.

The kernels run on torch's current stream. Nothing waits: who reads the bucket, or gives it back, first waits for a mark
on that stream (`zerokern.memory.Copies.here`).
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import KernelError, got
from zerokern.kernels import checks, cuda_build, cuda_checks
from zerokern.kernels.formats import DTYPES
from zerokern.kernels.triton import backend
from zerokern.kernels.triton.upload import upload

__all__ = ["Gpu", "HostTable", "gather", "gpu_of", "scatter"]

THREADS = 256
TILE_NBYTES = 16 << 10  # of the bucket: 256 threads, 4 accesses of 16 bytes each
LINE = 128  # what a bucket begins on, so that the link carries whole lines
MOST = 2**31 - 1  # rows and tiles: the kernels count both in int
_JOB = struct.Struct("=4Q3qQd3Q")  # Job of cuda/spans.cuh
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Gpu:
    """What the kernels need of one GPU: their module, loaded; a launch on torch's stream; addresses of host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        capability = torch.cuda.get_device_capability(device)
        backend.refuse_before(
            capability, torch.cuda.get_device_name(device), "the kernels of cuda/", cuda_build.INSTEAD
        )
        cuda_build.compiler()
        self._cupy = _cupy()
        with self._cupy.cuda.Device(device.index):
            self._functions = self._load(capability)
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def _load(self, capability: tuple[int, int]) -> dict[str, Any]:
        driver_error = self._cupy.cuda.driver.CUDADriverError
        for fresh in (False, True):
            module = self._cupy.cuda.function.Module()
            try:
                module.load(cuda_build.binary(capability, fresh=fresh))
                return {
                    f"{op}_{name}": module.get_function(f"{op}_{name}")
                    for op in ("gather", "scatter")
                    for name in _NAMES.values()
                }
            except driver_error as error:
                if fresh:
                    where = f"{torch.cuda.get_device_name(self.device)}, sm_{capability[0]}{capability[1]}"
                    raise KernelError(f"the driver refused the kernels of cuda/ on {where}: {error}") from error
        raise AssertionError  # the loop returns or raises

    def launch(self, kernel: str, nblocks: int, job: bytes) -> None:
        """Queues a kernel on torch's current stream; a refusal is raised here."""
        import numpy

        argument = numpy.frombuffer(job, dtype=f"V{len(job)}")
        stream = _Stream(torch.cuda.current_stream(self.device).cuda_stream)
        with self._cupy.cuda.Device(self.device.index):
            try:
                self._functions[kernel]((nblocks,), (THREADS,), (argument,), stream=stream)
            except RuntimeError as error:
                raise KernelError(f"{kernel} could not be launched with {nblocks} blocks: {error}") from error

    def stream_key(self) -> int:
        """A number for torch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capturing(self) -> bool:
        """Whether that stream is being captured into a CUDA graph."""
        return backend.capturing(self.device)

    def host_address(self, name: str, tensor: Tensor) -> int:
        """Where the GPU sees a tensor in pinned host memory."""
        if not tensor.numel():
            return 0
        runtime = self._cupy.cuda.runtime
        begin = tensor.data_ptr()
        with self._cupy.cuda.Device(self.device.index):
            ends = [runtime.pointerGetAttributes(at) for at in (begin, begin + tensor.numel() * tensor.itemsize - 1)]
        pinned = runtime.memoryTypeHost
        if any(end.type != pinned for end in ends):
            raise ValueError(
                f"{name} is not pinned, so {self.device} cannot reach it; allowed: leases of a zerokern.memory.Arena "
                "taken while CUDA is in use, or tensors made with pin_memory=True"
            )
        if any(end.devicePointer == 0 for end in ends):
            raise ValueError(
                f"{name} is pinned but not mapped into the memory of {self.device}; allowed: leases of a "
                "zerokern.memory.Arena, or memory registered with cudaHostRegisterMapped"
            )
        return int(ends[0].devicePointer)


@dataclass(frozen=True)
class _Stream:
    """A stream of torch, as CuPy takes one."""

    ptr: int


def _cupy() -> Any:
    import cupy

    return cupy


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device, its kernels compiled and loaded at the first call; an error names what is missing.

    >>> gpu_of(torch.device("cpu"))
    Traceback (most recent call last):
    ...
    ValueError: the tensors are on device cpu; allowed: cuda devices from sm_80 on (host tensors need no gather)
    """
    if device.type != "cuda":
        raise ValueError(
            f"the tensors are on device {device}; allowed: cuda devices from sm_80 on (host tensors need no gather)"
        )
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu(index: int) -> Gpu:
    return Gpu(torch.device("cuda", index))


@dataclass
class _Resident:
    """A table in device memory, for one stream: what another stream uses may not be written below it."""

    pointers: array[int]
    addresses: Tensor
    rows: Tensor
    first: Tensor
    partials: Tensor
    counter: Tensor


class HostTable:
    """Where a list of tensors lies in a bucket of host memory: made once, used each step with tensors of these shapes.

    ``offsets`` count elements of the bucket; without them the tensors lie back to back. What is between them is left
    alone. Dtypes may be mixed. Pointers are uploaded when they have changed, and the rest once for each stream. A
    table that was used in a CUDA graph is kept for as long as the graph is.

    >>> HostTable([torch.ones(2)], torch.bfloat16)
    Traceback (most recent call last):
    ...
    ValueError: the tensors are on device cpu; allowed: cuda devices from sm_80 on (host tensors need no gather)
    """

    def __init__(
        self, tensors: Sequence[Tensor], bucket_dtype: torch.dtype, *, offsets: Sequence[int] | None = None
    ) -> None:
        if bucket_dtype not in DTYPES:
            raise TypeError(got("bucket_dtype", bucket_dtype, ", ".join(map(str, DTYPES))))
        tensors = checks.as_list("tensors", tensors) or []
        self.bucket_dtype = bucket_dtype
        self.device = cuda_checks.device_of(tensors)
        self._gpu = None if self.device is None else gpu_of(self.device)
        self._like = [cuda_checks.facts(name, tensor) for name, tensor in cuda_checks.named(tensors)]
        self._offsets = cuda_checks.placed_at(self._like, offsets)
        self.extent = max((o + one.numel for o, one in zip(self._offsets, self._like, strict=True)), default=0)
        self._ntiles = -(-self.extent * bucket_dtype.itemsize // TILE_NBYTES)
        filled = [i for i, one in enumerate(self._like) if one.numel]
        self._order = sorted(filled, key=lambda i: self._offsets[i])
        if max(len(self._order), self._ntiles) > MOST:
            found = f"{len(self._order):,} tensors in {self._ntiles:,} tiles of 16 KiB"
            raise ValueError(got("the list", found, f"at most {MOST:,} of each", "Pass the list in parts"))
        self._apart: array[int] | None = None  # pointers of tensors that are known not to overlap
        self._residents: dict[int, _Resident] = {}
        self._captured: list[_Resident] = []

    def gather(
        self, tensors: Sequence[Tensor], bucket: Tensor, *, scale: float | Tensor = 1.0, stats: Tensor | None = None
    ) -> None:
        """bucket[o : o + n] = cast(scale * tensor) for each tensor; see `gather`."""
        self._run("gather", tensors, bucket, scale, stats)

    def scatter(
        self, bucket: Tensor, tensors: Sequence[Tensor], *, scale: float | Tensor = 1.0, stats: Tensor | None = None
    ) -> None:
        """tensor = cast(scale * bucket[o : o + n]) for each tensor; see `scatter`."""
        self._run("scatter", tensors, bucket, scale, stats)

    def _run(
        self, op: str, tensors: Sequence[Tensor], bucket: Tensor, scale: float | Tensor, stats: Tensor | None
    ) -> None:
        pointers = self._pointers(op, checks.as_list("tensors", tensors) or [])
        self._check_bucket(bucket)
        gpu = self._gpu
        if gpu is None:
            if stats is not None:
                stats.zero_()
            return
        host = gpu.host_address("bucket", bucket)
        number, scale_at = cuda_checks.scale_of(scale, gpu.device)
        reported = 0 if stats is None else _stats_address(stats, gpu)
        if not self._order and not reported:
            return
        resident = self._resident(gpu, pointers)
        words = (resident.addresses, resident.rows, resident.first)
        job = _JOB.pack(
            *(t.data_ptr() for t in words), host, bucket.numel(), len(self._order), self._ntiles,
            scale_at, number, resident.partials.data_ptr(), resident.counter.data_ptr(), reported,
        )  # fmt: skip
        nblocks = max(1, min(self._ntiles, gpu.multiprocessors))
        gpu.launch(f"{op}_{_NAMES[self.bucket_dtype]}", nblocks, job)

    def _pointers(self, op: str, tensors: list[Tensor]) -> array[int]:
        found = cuda_checks.pointers(tensors, self._like)
        if found is None:
            cuda_checks.refuse(tensors, self._like)
        pointers = array("Q", [found[i] for i in self._order])
        if op == "scatter" and pointers != self._apart:
            checks.no_overlap(cuda_checks.named(tensors))
            self._apart = pointers
        return pointers

    def _check_bucket(self, bucket: Tensor) -> None:
        checks.tensor("bucket", bucket, (self.bucket_dtype,))
        if bucket.dim() != 1 or bucket.numel() < self.extent:
            raise ValueError(
                f"bucket has shape {tuple(bucket.shape)}; allowed: one dimension of at least {self.extent} elements"
            )
        if bucket.numel() and bucket.data_ptr() % LINE:
            raise ValueError(
                f"bucket lies at {bucket.data_ptr() % LINE} modulo {LINE}; allowed: multiples of {LINE} bytes, "
                "as leases of an Arena are"
            )

    def _resident(self, gpu: Gpu, pointers: array[int]) -> _Resident:
        if gpu.capturing():
            # What a graph uploads is there at each replay and not now, so no other launch may count on it. It can count
            # on what is there already, whose memory stays: new pointers get new memory.
            known = next((one for one in self._residents.values() if one.pointers == pointers), None)
            self._captured.append(self._uploaded(gpu, pointers) if known is None else self._beside(gpu, known))
            return self._captured[-1]
        key = gpu.stream_key()
        resident = self._residents.get(key)
        if resident is None:
            resident = self._residents[key] = self._uploaded(gpu, pointers)
        elif resident.pointers != pointers:
            resident.addresses, resident.pointers = upload(pointers, gpu.device), pointers
        return resident

    def _uploaded(self, gpu: Gpu, pointers: array[int]) -> _Resident:
        rows, first = self._layout()
        addresses = upload(pointers, gpu.device)
        words = upload(rows, gpu.device), upload(first, gpu.device)
        return _Resident(pointers, addresses, *words, *self._scratch(gpu))

    def _beside(self, gpu: Gpu, known: _Resident) -> _Resident:
        return _Resident(known.pointers, known.addresses, known.rows, known.first, *self._scratch(gpu))

    def _scratch(self, gpu: Gpu) -> tuple[Tensor, Tensor]:
        """Sums of the tiles, and how many blocks are through."""
        partials = torch.empty(max(self._ntiles, 1), dtype=torch.float64, device=gpu.device)
        return partials, torch.zeros(1, dtype=torch.int32, device=gpu.device)

    def _layout(self) -> tuple[Tensor, Tensor]:
        """(begin, end, dtype) of each row, and for each tile the first row that ends behind its beginning."""
        rows = array("q")
        for i in self._order:
            one = self._like[i]
            rows.extend((self._offsets[i], self._offsets[i] + one.numel, DTYPES[one.dtype]))
        if not rows:
            none = torch.zeros(1, 3, dtype=torch.int64, device="cpu")
            return none, torch.zeros(1, dtype=torch.int32, device="cpu")
        words = torch.frombuffer(rows, dtype=torch.int64).view(-1, 3)
        begins = torch.arange(self._ntiles + 1, device="cpu") * (TILE_NBYTES // self.bucket_dtype.itemsize)
        first = torch.searchsorted(words[:, 1].contiguous(), begins, right=True)
        return words, first.to(torch.int32)


def _stats_address(stats: Tensor, gpu: Gpu) -> int:
    if stats.dtype != torch.float64 or stats.shape != (2,) or not stats.is_contiguous():
        raise ValueError(
            f"stats has shape {tuple(stats.shape)} and dtype {stats.dtype}; allowed: two contiguous torch.float64"
        )
    if stats.device == gpu.device:
        return stats.data_ptr()
    if stats.device.type != "cpu":
        raise ValueError(f"stats is on {stats.device}; allowed: {gpu.device}, or pinned host memory")
    return gpu.host_address("stats", stats)


def gather(
    tensors: Sequence[Tensor],
    bucket: Tensor,
    *,
    offsets: Sequence[int] | None = None,
    scale: float | Tensor = 1.0,
    stats: Tensor | None = None,
) -> None:
    """bucket[o : o + n] = cast(scale * tensor) for each tensor on a GPU; the bucket is pinned host memory. One launch.

    ``scale``: a number, or one fp32 in device memory. ``stats``: float64 [2] on the device or in pinned host memory,
    which gets the sum of squares of what was written and 1.0 where an element is not finite; the same bits on every
    run. The next step is the same list again? Then a `HostTable` saves building the table.

    >>> gather([torch.ones(2)], torch.empty(2))
    Traceback (most recent call last):
    ...
    ValueError: the tensors are on device cpu; allowed: cuda devices from sm_80 on (host tensors need no gather)
    """
    checks.tensor("bucket", bucket)
    tensors = checks.as_list("tensors", tensors) or []
    HostTable(tensors, bucket.dtype, offsets=offsets).gather(tensors, bucket, scale=scale, stats=stats)


def scatter(
    bucket: Tensor,
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None = None,
    scale: float | Tensor = 1.0,
    stats: Tensor | None = None,
) -> None:
    """tensor = cast(scale * bucket[o : o + n]) for each tensor on a GPU; the bucket is pinned host memory. One launch.

    The bucket is read when the stream gets there, not now. ``scale`` and ``stats`` as in `gather`.

    >>> scatter(torch.ones(2), [torch.empty(2)])
    Traceback (most recent call last):
    ...
    ValueError: the tensors are on device cpu; allowed: cuda devices from sm_80 on (host tensors need no gather)
    """
    checks.tensor("bucket", bucket)
    tensors = checks.as_list("tensors", tensors) or []
    HostTable(tensors, bucket.dtype, offsets=offsets).scatter(bucket, tensors, scale=scale, stats=stats)
