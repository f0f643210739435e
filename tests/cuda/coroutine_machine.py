"""A played CuPy whose kernels run on the coroutine machine of `machine.h`: those of `cuda/`, compiled for the CPU.

The launchers are the real ones, and so are their arguments. What a kernel may read and write is what its rows say.
Stages are small here, so that small lists go around a ring several times.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from zerokern.kernels.cuda import loader, rows, spans

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
SOURCES = ROOT / "cuda"
STAGE = 1024
READ, WRITE = 1, 2
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


class Edit(NamedTuple):
    """A text of a source that is something else for this test."""

    source: str
    old: str
    new: str


class Machine:
    """What was launched, and with which seed the next launch plays. `said` is what the machine found wrong."""

    def __init__(self, folder: Path, architecture: int, edits: Sequence[Edit]) -> None:
        self.seed = 1
        self.launched: list[tuple[str, int, int]] = []
        self._folder, self._architecture, self._edits = folder, architecture, tuple(edits)

    def RawModule(self, path: str) -> Any:  # a name of CuPy
        name = Path(path).name.partition("-")[0]
        return _Module(self, build(self._folder, name, self._architecture >= 90, self._edits))


class _Module:
    def __init__(self, machine: Machine, library: ctypes.CDLL) -> None:
        self._machine, self._library = machine, library

    def get_function(self, name: str) -> _Kernel:
        return _Kernel(self._machine, self._library, name)


class _Kernel:
    def __init__(self, machine: Machine, library: ctypes.CDLL, name: str) -> None:
        self._machine, self._library, self._name = machine, library, name
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any], *, shared_mem: int) -> None:
        (raw,) = args
        assert raw.size == 1 and raw.dtype.names is None  # with fields a launch takes CuPy several times as long
        given = raw.view(rows.layout(rows.FEW if self._name.endswith("few") else rows.MANY))
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        self._machine.launched.append((self._name, grid[0], int(given["rows"][0])))
        self._library.machine_clear()
        for begin, nbytes, may in regions(given[0]):
            self._library.machine_region(ctypes.c_uint64(begin), ctypes.c_uint64(nbytes), may)
        self._machine.seed += 1
        found = self._library.machine_run(
            self._name.encode(), ctypes.c_void_p(given.ctypes.data), grid[0], block[0], shared_mem,
            ctypes.c_uint64(self._machine.seed),
        )  # fmt: skip
        if found:
            raise AssertionError(f"{self._name}, seed {self._machine.seed}: {found.decode()}")


def regions(given: Any) -> Iterable[tuple[int, int, int]]:
    """What a launch may touch: (begin, bytes, how)."""
    for row in given["row"][: given["rows"]]:
        to, begin, size = int(row["to"]), int(row["from"]), int(row["size"])
        if to == begin:
            yield to, size, READ | WRITE
        else:
            yield to, size, WRITE
            yield begin, size, READ


def build(folder: Path, name: str, bulk: bool, edits: Sequence[Edit] = ()) -> ctypes.CDLL:
    """The library of a kernel file for the machine, compiled unless it is there."""
    return _built(folder, name, bulk, tuple(edits))


@functools.cache
def _built(folder: Path, name: str, bulk: bool, edits: tuple[Edit, ...]) -> ctypes.CDLL:
    texts = {path.name: path.read_text() for path in (*SOURCES.glob("*.cu*"), *HERE.glob("*.h"))}
    for edit in edits:
        count = texts[edit.source].count(edit.old)
        assert count == 1, f"{edit.source} has {edit.old!r} {count} times"
        texts[edit.source] = texts[edit.source].replace(edit.old, edit.new)
    words = (
        *FLAGS,
        "-O0" if edits else "-O1",
        "-DZK_MACHINE",
        f"-DZK_BULK={int(bulk)}",
        f"-DZK_STAGE={STAGE}",
    )
    key = hashlib.sha256(repr((sorted(texts.items()), words, name)).encode()).hexdigest()[:24]
    library = folder / f"{name}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as place:
            for file, text in texts.items():
                Path(place, file).write_text(text)
            command = ["c++", *words, "-x", "c++", f"{place}/{name}.cu", "-o", f"{place}/made.so", "-ldl"]
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == 0 and "warning" not in ran.stderr, ran.stderr
            fresh = library.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(Path(place, "made.so").read_bytes())
            fresh.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.machine_run.restype = ctypes.c_char_p
    return loaded


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, architecture: int = 90, edits: Sequence[Edit] = ()
) -> Machine:
    """From here on `zerokern.kernels.cuda` has a GPU: CPU tensors are on it."""
    machine = Machine(folder, architecture, edits)
    forget()
    monkeypatch.setattr(loader, "_cupy", lambda: machine)
    monkeypatch.setattr(loader, "reason", lambda device: None)
    monkeypatch.setattr(loader, "cubin", lambda source, found: Path(f"{Path(source).stem}-sm_{found}"))
    for module in (loader, spans):
        monkeypatch.setattr(module, "architecture", lambda device: architecture)
        monkeypatch.setattr(module, "stage_bytes", lambda found: STAGE)
    return machine


def forget() -> None:
    """Modules and kernels are those of one machine."""
    for cached in (loader._module, loader._kernel):
        cached.cache_clear()


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Its memory as bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
