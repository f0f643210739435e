"""cuda/ compiled without a GPU: not a warning for any architecture, by nvcc and by NVRTC; machine code with wide
accesses, nothing spilled, and nothing contracted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cuda_cases import ARCHITECTURES, KERNELS, nvcc, sass, sources_at, triton_tool

from zerokern.core.errors import BackendError
from zerokern.kernels import cuda_build

ROWS = [
    pytest.param(arch, id=f"sm_{arch}", marks=pytest.mark.slow if number else ())
    for number, arch in enumerate(ARCHITECTURES)
]
MOST_REGISTERS = 80  # of 65536 for 256 threads: three blocks of a kernel on a multiprocessor


@pytest.fixture(scope="session", params=ROWS)
def arch(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="session")
def compiled(arch: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By NVRTC, as at run time; without it, by nvcc."""
    cubin = tmp_path_factory.mktemp("cubin") / f"sm_{arch}.cubin"
    try:
        compiler = cuda_build.compiler()
    except BackendError:
        run_nvcc(arch, cubin)
        return cubin
    files = cuda_build.sources()
    cubin.write_bytes(cuda_build._compile(compiler, files, cuda_build.options((arch // 10, arch % 10), [arch])))
    return cubin


def run_nvcc(arch: int, cubin: Path, *flags: str) -> str:
    source = sources_at() / "index.cu"
    command = [nvcc(), "-std=c++17", f"-arch=sm_{arch}", "-cubin", "-fmad=false", "-Werror", "all-warnings", *flags]
    ran = subprocess.run([*command, "-o", str(cubin), str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def test_nvcc_has_nothing_to_say(arch: int, tmp_path: Path) -> None:
    strict = "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror"
    told = run_nvcc(arch, tmp_path / "index.cubin", strict, "-Xcompiler=-Wall,-Wextra")
    assert sorted(re.findall(r"Compiling entry function '(\w+)'", told)) == sorted(KERNELS)
    assert len(re.findall(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", told)) == len(KERNELS)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", told)]
    assert len(registers) == len(KERNELS) and max(registers) <= MOST_REGISTERS


def test_nvrtc_has_nothing_to_say(arch: int) -> None:
    try:
        nvrtc = cuda_build.compiler()
    except BackendError:
        pytest.skip("needs NVRTC")
    files = cuda_build.sources()
    headers = {name: text.encode() for name, text in files.items() if name != "index.cu"}
    names = [name.encode() for name in headers]
    program = nvrtc.createProgram(files["index.cu"], "index.cu", list(headers.values()), names)
    nvrtc.compileProgram(program, cuda_build.options((arch // 10, arch % 10), nvrtc.getSupportedArchs()))
    assert nvrtc.getProgramLog(program) == ""
    ptx = nvrtc.getPTX(program).decode()
    nvrtc.destroyProgram(program)
    assert sorted(re.findall(r"\.visible \.entry (\w+)", ptx)) == sorted(KERNELS)
    for _, body in re.findall(r"\.visible \.entry (\w+)(.*?)\n}", ptx, flags=re.DOTALL):
        assert body.count("ld.global.v4.u32") >= 4 and body.count("st.global.v4.u32") >= 4
        assert "fma" not in body and ".ftz" not in body and "approx" not in body
        assert ".local" not in body


def test_machine_code(compiled: Path) -> None:
    """Each kernel loads and stores 16 bytes at a time, keeps its registers, and multiplies once for each element."""
    kernels = sass(compiled)
    assert sorted(kernels) == sorted(KERNELS)
    for name, instructions in kernels.items():
        assert sum(one.startswith("LDG.E.128") for one in instructions) >= 4, name
        assert sum(one.startswith("STG.E.128") for one in instructions) >= 4, name
        assert not [one for one in instructions if one.startswith(("LDL", "STL"))], f"{name} spills"
        assert not [one for one in instructions if one.startswith(("FFMA", "DFMA", "MUFU"))], f"{name} contracts"
        assert [one for one in instructions if one.startswith("FMUL")], name


def test_resources(compiled: Path) -> None:
    command = [triton_tool("cuobjdump"), "-res-usage", str(compiled)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", told.stdout + told.stderr)
    assert len(rows) == len(KERNELS)
    for registers, stack, shared, local in rows:
        assert int(registers) <= MOST_REGISTERS and (stack, local) == ("0", "0")
        assert int(shared) <= 4096


def test_the_index_includes_every_header() -> None:
    files = cuda_build.sources()
    reached, left = set(), ["index.cu"]
    while left:
        name = left.pop()
        reached.add(name)
        left += [one for one in re.findall(r'#include "(.+)"', files[name]) if one not in reached]
    assert reached == set(files)
    assert all(text.isascii() for text in files.values())
    assert not [name for name, text in files.items() if "#include <" in text], "NVRTC would need a toolkit"
