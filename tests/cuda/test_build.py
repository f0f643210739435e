"""Sources, NVRTC and the cache: compiled once, whole or not there, by whoever comes first; what is missing is named."""

from __future__ import annotations

import builtins
import stat
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerokern.core.errors import BackendError
from zerokern.kernels import cuda_build
from zerokern.kernels.triton.backend import refuse_before


class FakeCompiler:
    """NVRTC's functions, as CuPy has them."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self, archs: Sequence[int] = (80, 90, 100), refuses: bool = False) -> None:
        self.archs, self.refuses = tuple(archs), refuses
        self.compiled: list[tuple[str, ...]] = []
        self.alive = 0
        self.version = (13, 0)

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def getSupportedArchs(self) -> tuple[int, ...]:
        return self.archs

    def createProgram(self, source: str, name: str, headers: list[bytes], names: list[bytes]) -> int:
        assert isinstance(source, str) and all(isinstance(one, bytes) for one in [*headers, *names])
        assert name == "index.cu" and len(headers) == len(names) > 3
        self.alive += 1
        return 7

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        self.compiled.append(tuple(options))
        if self.refuses:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program: int) -> str:
        return "index.cu(3): error: expected a ;"

    def getCUBIN(self, program: int) -> bytes:
        return b"\x7fELF" + bytes(1000) + str(len(self.compiled)).encode()

    def getPTX(self, program: int) -> bytes:
        return b".version 9.0"

    def destroyProgram(self, program: int) -> None:
        self.alive -= 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zerokern" / "cuda"


@pytest.fixture
def fake(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(cuda_build, "compiler", lambda: fake)
    return fake


def test_compiled_once(fake: FakeCompiler, cache: Path) -> None:
    first = cuda_build.binary((9, 0))
    assert cuda_build.binary((9, 0)) == first and len(fake.compiled) == 1 and fake.alive == 0
    (kept,) = cache.iterdir()
    assert kept.suffix == ".module" and stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert fake.compiled[0] == ("--gpu-architecture=sm_90", "--std=c++17", "--fmad=false")


def test_every_part_of_the_key_counts(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_build.binary((9, 0))
    cuda_build.binary((8, 0))
    fake.version = (13, 1)
    cuda_build.binary((9, 0))
    changed = {**cuda_build.sources(), "ptx.cuh": "// another"}
    monkeypatch.setattr(cuda_build, "sources", lambda: changed)
    cuda_build.binary((9, 0))
    assert len(fake.compiled) == 4
    cuda_build.binary((9, 0), fresh=True)
    assert len(fake.compiled) == 5


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:50] + b"x" + data[51:]]
)
def test_a_damaged_file_is_replaced(fake: FakeCompiler, cache: Path, damage) -> None:
    cuda_build.binary((9, 0))
    (kept,) = cache.iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    again = cuda_build.binary((9, 0))
    assert again.endswith(b"2\0") and cuda_build.binary((9, 0)) == again and len(fake.compiled) == 2


def test_a_folder_that_cannot_be_written_costs_the_compilation(fake: FakeCompiler, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in its place")
    assert cuda_build.binary((9, 0)).endswith(b"1\0") and cuda_build.binary((9, 0)).endswith(b"2\0")


def test_a_write_that_fails_leaves_nothing(fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(cuda_build.os, "fsync", full)
    cuda_build.binary((9, 0))
    assert list(cache.iterdir()) == []


def test_a_race_is_lost_in_peace(fake: FakeCompiler, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: cuda_build.binary((9, 0)), range(64)))
    assert all(module.startswith(b"\x7fELF") for module in modules)
    assert len(list(cache.iterdir())) == 1


def test_a_gpu_that_is_newer_than_nvrtc_gets_ptx(fake: FakeCompiler) -> None:
    assert cuda_build.binary((12, 0)) == b".version 9.0"
    assert fake.compiled[0][0] == "--gpu-architecture=compute_100"
    assert cuda_build.options((8, 6), [80, 90])[0] == "--gpu-architecture=compute_80"


@pytest.mark.parametrize("capability", [(7, 5), (7, 0)])
def test_an_old_gpu_is_named_with_what_runs_instead(capability: tuple[int, int]) -> None:
    says = r"Tesla is sm_7\d, and the kernels of cuda/ need sm_80 or newer; zerokern.memory.Copies moves"
    with pytest.raises(BackendError, match=says):
        refuse_before(capability, "Tesla", "the kernels of cuda/", cuda_build.INSTEAD)


def test_an_nvrtc_that_is_too_new_or_too_old_is_named() -> None:
    with pytest.raises(BackendError, match=r"NVRTC compiles for \[100\] and not for sm_80"):
        cuda_build.options((8, 0), [100])


def test_what_nvrtc_refuses_is_shown(fake: FakeCompiler) -> None:
    fake.refuses = True
    with pytest.raises(BackendError, match=r"refused cuda/index.cu with .*sm_90(.|\n)*error: expected a ;"):
        cuda_build.binary((9, 0))
    assert fake.alive == 0


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *others):
        if name.split(".")[0] == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BackendError, match=r"CuPy is not here .*; do: pip install 'zerokern\[cuda\]'"):
        cuda_build.compiler()


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    from cupy.cuda import nvrtc

    def missing() -> None:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(
        BackendError, match=r"CuPy found no NVRTC.*; do: pip install nvidia-cuda-nvrtc .*libnvrtc.so.13"
    ):
        cuda_build.compiler()


def test_sources_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_build, "__file__", str(tmp_path / "kernels" / "cuda_build.py"))
    with pytest.raises(BackendError, match="the CUDA sources are not beside this package"):
        cuda_build.sources()


def test_the_real_compiler_and_the_real_cache(cache: Path) -> None:
    try:
        cuda_build.compiler()
    except BackendError:
        pytest.skip("needs NVRTC")
    module = cuda_build.binary((9, 0))
    assert module[:4] == b"\x7fELF" and cuda_build._read(next(cache.iterdir())) == module
    assert cuda_build.binary((99, 0)).startswith(b"//\n// Generated by NVIDIA NVVM Compiler")


def test_the_import_is_cheap() -> None:
    program = (
        "import sys, zerokern.kernels.cuda, zerokern.memory\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'cupy', 'triton'}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
