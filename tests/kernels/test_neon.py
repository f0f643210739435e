"""aarch64: built by a cross compiler and run under an emulator, its library gives this machine's bits.

The program is the fuzzer of the C ABI (`cpu/fuzz/`): random formats, sizes and values, each kernel on each instruction
set against the scalar one, and a digest of the results, in which every NaN is the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from zerokern.core import native

CPU = Path(__file__).resolve().parents[2] / "cpu"
PROGRAMS = {"race.cpp", "io_race.cpp"}  # of their own, for ThreadSanitizer
ARITHMETIC = ("zk_update", "zk_sumsq", "zk_accumulate", "zk_convert")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@dataclass(frozen=True)
class Fuzzers:
    here: list[str]
    there: list[str]


def ran(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(compiler: str, library: Path, program: Path) -> str:
    sources = [str(path) for path in sorted((CPU / "fuzz").glob("*.cpp")) if path.name not in PROGRAMS]
    link = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lzerokern_cpu", "-pthread"]
    ran([compiler, "-std=c++17", "-O1", "-o", str(program), *sources, *link])
    return str(program)


@pytest.fixture(scope="module")
def fuzzers(tmp_path_factory: pytest.TempPathFactory) -> Fuzzers:
    """The fuzzer for this machine, with the library under test, and for aarch64, as CMake builds it."""
    for tool in (COMPILER, EMULATOR):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}; apt-get install -y g++-aarch64-linux-gnu qemu-user-static")
    folder = tmp_path_factory.mktemp("aarch64")
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    cross = ["SYSTEM_NAME=Linux", "SYSTEM_PROCESSOR=aarch64", f"CXX_COMPILER={COMPILER}", "BUILD_TYPE=Release"]
    ran(["cmake", "-S", str(CPU), "-B", str(folder), *(f"-DCMAKE_{one}" for one in cross)], PATH=path)
    ran(["cmake", "--build", str(folder), "--parallel", "2"], PATH=path)
    here = built("c++", native.path(), folder / "fuzz-here")
    there = built(COMPILER, folder / "libzerokern_cpu.so", folder / "fuzz-there")
    return Fuzzers([here], [EMULATOR, "-L", "/usr/aarch64-linux-gnu", there])


def digests(output: str) -> dict[str, tuple[str, int]]:
    """Of each entry: the digest, and of how many bytes."""
    rows = re.findall(r"^(\w+) .* digest (\w+) of (\d+) bytes$", output, re.MULTILINE)
    return {entry: (digest, int(nbytes)) for entry, digest, nbytes in rows}


@pytest.mark.parametrize(
    "executions, seed", [(30_000, 1), pytest.param(400_000, 2, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_neon_has_the_bits_of_scalar_there_and_of_this_machine(fuzzers: Fuzzers, executions: int, seed: int) -> None:
    """A finding within a processor ends the fuzzer; between processors the digests would differ."""
    arguments = [str(executions), str(seed), *ARITHMETIC]
    there, here = (ran(program + arguments) for program in (fuzzers.there, fuzzers.here))
    assert there.startswith("instruction sets: scalar neon;")
    assert digests(there) == digests(here)
    assert list(digests(there)) == list(ARITHMETIC)
    assert digests(there)["zk_update"][1] > 1000 * executions


def test_all_else_of_the_library_works_there(fuzzers: Fuzzers) -> None:
    """Threads, checksums and the disk engine, which has no io_uring under the emulator."""
    said = ran([*fuzzers.there, "1000", "3", "zk_stream", "zk_gradients", "control", "zk_crc32c", "zk_io"])
    assert re.search(r"^zk_io +\d+ executions: +[1-9]", said, re.MULTILINE)
