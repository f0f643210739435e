"""aarch64: built by a cross compiler and run under an emulator, its library gives this machine's bits.

The program is the fuzzer of the C ABI (`cpu/fuzz/`): random formats, sizes and values, each kernel on each instruction
set against the scalar one, and a digest of the results, in which every NaN is the same.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from zerokern.core import native

CPU = Path(__file__).resolve().parents[2] / "cpu"
PROGRAMS = {"race.cpp", "io_race.cpp"}  # of their own, for ThreadSanitizer
ARITHMETIC = ("zk_update", "zk_sumsq", "zk_accumulate", "zk_convert")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


BUILD = """
cmake_minimum_required(VERSION 3.20)
project(fuzz LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(Threads REQUIRED)
add_executable(fuzz {sources})
{library}
target_compile_options(fuzz PRIVATE -O1)
target_link_libraries(fuzz {linked} Threads::Threads)
"""
CROSS = ("SYSTEM_NAME=Linux", "SYSTEM_PROCESSOR=aarch64", f"CXX_COMPILER={COMPILER}", "BUILD_TYPE=Emulated")


def ran(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(folder: Path, library: str, linked: str, *settings: str) -> str:
    """The fuzzer; what has not changed since the last build in that folder is not compiled again."""
    folder.mkdir(exist_ok=True)
    sources = " ".join(str(path) for path in sorted((CPU / "fuzz").glob("*.cpp")) if path.name not in PROGRAMS)
    (folder / "CMakeLists.txt").write_text(BUILD.format(sources=sources, library=library, linked=linked))
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    ran(["cmake", "-S", str(folder), "-B", str(folder / "made"), *(f"-DCMAKE_{one}" for one in settings)], PATH=path)
    ran(["cmake", "--build", str(folder / "made"), "--parallel", "2"], PATH=path)
    return str(folder / "made" / "fuzz")


def fuzzers(level: str, config: pytest.Config, folder: Path) -> tuple[list[str], list[str]]:
    """The fuzzer for this machine, with the library under test, and for aarch64, as CMake builds it.

    With -O3, as it is shipped, the compiler takes twice as long as with -O1.
    """
    for tool in (COMPILER, EMULATOR):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}; apt-get install -y g++-aarch64-linux-gnu qemu-user-static")
    kept = getattr(config, "cache", None)
    folder = kept.mkdir("aarch64") if kept else folder
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        here = built(folder / "here", "", str(native.path()))
        library = f'add_subdirectory("{CPU}" library)'
        there = built(folder / level, library, "zerokern_cpu", *CROSS, f"CXX_FLAGS_EMULATED={level}")
    return [here], [EMULATOR, "-L", "/usr/aarch64-linux-gnu", there]


def digests(output: str) -> dict[str, tuple[str, int]]:
    """Of each entry: the digest, and of how many bytes."""
    rows = re.findall(r"^(\w+) .* digest (\w+) of (\d+) bytes$", output, re.MULTILINE)
    return {entry: (digest, int(nbytes)) for entry, digest, nbytes in rows}


@pytest.mark.parametrize(
    "level, executions, seed", [("-O1", 8_000, 1), pytest.param("-O3", 20_000, 2, marks=pytest.mark.slow)]
)
def test_neon_has_the_bits_of_scalar_there_and_of_this_machine(
    level: str, executions: int, seed: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """A finding within a processor ends the fuzzer; between processors the digests would differ."""
    here, there = fuzzers(level, pytestconfig, tmp_path)
    arguments = [str(executions), str(seed), *ARITHMETIC]
    found, expected = ran(there + arguments), ran(here + arguments)
    assert found.startswith("instruction sets: scalar neon;")
    assert digests(found) == digests(expected)
    assert list(digests(found)) == list(ARITHMETIC)
    assert digests(found)["zk_update"][1] > 1000 * executions
    # Threads, checksums and the disk engine, which has no io_uring under the emulator.
    said = ran([*there, "1000", "3", "zk_stream", "zk_gradients", "control", "zk_crc32c", "zk_io"])
    assert re.search(r"^zk_io +\d+ executions: +[1-9]", said, re.MULTILINE)
