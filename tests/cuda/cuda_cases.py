"""What the tests of cuda/ share: the host machine as a GPU, lists of tensors, tools that look at compiled kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerokern.kernels import cuda_build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = tuple(f"{op}_{name}" for op in ("gather", "scatter") for name in ("fp32", "bf16", "fp16"))
ARCHITECTURES = (80, 90, 100)
HOST = Path(__file__).parent / "host"
STRICT = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
FAULTS = {0: "none", 1: "outside", 2: "misaligned", 3: "read-only", 4: "written twice", 5: "left at a barrier"}


def sources_at() -> Path:
    """The folder that the launcher compiles."""
    package = Path(cuda_build.__file__).parents[1]
    return next(folder for folder in (package / "cuda", package.parent / "cuda") if (folder / "index.cu").is_file())


def build_machine(folder: Path) -> Path:
    library = folder / "machine.so"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    command = [
        compiler,
        *STRICT,
        "-fPIC",
        "-shared",
        f"-I{sources_at()}",
        "-o",
        str(library),
        str(HOST / "machine.cpp"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return library


class Machine:
    """The interface of `zerokern.kernels.cuda.Gpu` over the kernels as the host's compiler has made them."""

    device = torch.device("cpu")
    multiprocessors = 3

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.machine_count.restype = ctypes.c_longlong
        self.launches: list[tuple[str, int]] = []
        self.seed = 0
        self.stream = 0
        self.is_capturing = False
        self.clear()

    def clear(self) -> None:
        self._library.machine_clear()

    def allow(self, tensor: Tensor, writable: bool, link: bool = False) -> None:
        """The kernels may access this memory, on this side of the link."""
        at, nbytes = ctypes.c_ulonglong(tensor.data_ptr()), ctypes.c_longlong(tensor.numel() * tensor.itemsize)
        self._library.machine_allow(at, nbytes, int(link), int(writable))

    def count(self, *, store: bool, link: bool) -> dict[int, int]:
        """Accesses by their width in bytes."""
        counts = {n: self._library.machine_count(int(store), int(link), n) for n in (2, 4, 8, 16)}
        return {nbytes: count for nbytes, count in counts.items() if count}

    def launch(self, kernel: str, nblocks: int, job: bytes) -> None:
        self.launches.append((kernel, nblocks))
        fault = self._library.machine_launch(kernel.encode(), job, nblocks, ctypes.c_ulonglong(self.seed))
        assert fault in FAULTS, f"no kernel {kernel}"
        assert fault == 0, f"{kernel}: an access was {FAULTS[fault]}"

    def stream_key(self) -> int:
        return self.stream

    def capturing(self) -> bool:
        return self.is_capturing

    def host_address(self, name: str, tensor: Tensor) -> int:
        return tensor.data_ptr()


def aligned(numel: int, dtype: torch.dtype, margin: int = 256) -> Tensor:
    """A bucket at a multiple of 128 with that many elements, and room behind it that nobody may touch."""
    whole = torch.full((numel * dtype.itemsize + 128 + margin,), 0xA5, dtype=torch.uint8)
    begin = -whole.data_ptr() % 128
    return whole[begin : begin + numel * dtype.itemsize].view(dtype)


def values(numel: int, dtype: torch.dtype, misaligned: int = 0) -> Tensor:
    """Random elements of many sizes, subnormal ones among them, that begin some elements behind a multiple of 64."""
    spread = torch.randn(numel + misaligned) * torch.exp2(torch.randint(-30, 12, (numel + misaligned,)).float())
    return spread.to(dtype)[misaligned:]


def laid_out(numels: Sequence[int], draw: random.Random, gaps: bool) -> tuple[list[int], int]:
    """Offsets in a shuffled order, and how many elements the bucket needs."""
    offsets, at = [0] * len(numels), 0
    order = list(range(len(numels)))
    if gaps:
        draw.shuffle(order)
    for i in order:
        at += draw.choice((0, 0, 1, 3, 8, 5000)) if gaps else 0
        offsets[i] = at
        at += numels[i]
    return offsets, at


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, where every NaN is the same."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    equal = found.view(word) == expected.view(word)
    return bool((equal | (found.isnan() & expected.isnan())).all())


def nvcc() -> str:
    """The compiler of a CUDA toolkit; the test is skipped where there is none."""
    for candidate in (shutil.which("nvcc"), *sorted(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), reverse=True)):
        if candidate:
            return candidate
    pytest.skip("needs nvcc")


def triton_tool(name: str) -> str:
    """cuobjdump and its like: of a CUDA toolkit, or of Triton's wheel."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("triton")
    if not found and spec is not None and spec.submodule_search_locations:
        candidate = Path(spec.submodule_search_locations[0], "backends", "nvidia", "bin", name)
        found = str(candidate) if candidate.is_file() else None
    if not found:
        pytest.skip(f"needs {name}")
    return found


def sass(cubin: Path) -> dict[str, list[str]]:
    """The instructions of each kernel, by name."""
    told = subprocess.run([triton_tool("cuobjdump"), "-sass", str(cubin)], capture_output=True, text=True, check=True)
    kernels: dict[str, list[str]] = {}
    for line in told.stdout.splitlines():
        if match := re.search(r"Function : (\w+)", line):
            kernels[match[1]] = []
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", line):
            kernels[next(reversed(kernels))].append(match[1])
    return kernels
