"""What NVRTC makes of `cuda/` for each architecture: bulk copies where they are promised, and nothing spilled."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from coroutine_machine import SOURCES
from tables import each

pytest.importorskip("triton", reason="needs triton")

import triton

from zerokern.kernels.cuda import loader, nvrtc, rows

if nvrtc.missing():
    pytest.skip("needs nvidia-cuda-nvrtc, of the extra dev", allow_module_level=True)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHITECTURES = (80, 90, 100, 103, 120)
FEW = (80, 90)  # the slow lane has all
PROMISES = re.compile(r"// promises: registers (\d+), stack (\d+), spills (\d+)(; bulk from sm_(\d+) on)?\n")
MOST_ARGUMENTS = 32_764


class Facts(NamedTuple):
    """What one kernel of a cubin is made of; `opcodes` with their widths, as in LDG.E.128."""

    registers: int
    stack: int
    arguments: int
    opcodes: Counter[str]


def facts(cubin: Path) -> dict[str, Facts]:
    command = [TOOLS / "cuobjdump", "-res-usage", "-sass", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {}
    for name, words in re.findall(r"Function (\w+):\s*\n\s*(REG:.*)", text):
        found = dict(re.findall(r"(REG|STACK|CONSTANT\[0\]):(\d+)", words))
        usage[name] = [int(found[key]) for key in ("REG", "STACK", "CONSTANT[0]")]
    made = {}
    for name, sass in re.findall(r"Function : (\w+)\n(.*?)(?=\n\s*\.{10}|\Z)", text, re.DOTALL):
        lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE)
        words = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines]
        made[name] = Facts(*usage[name], Counter(words))
    return made


def count(found: Facts, pattern: str) -> int:
    return sum(number for word, number in found.opcodes.items() if re.fullmatch(pattern, word))


def compiled(source: str, architecture: int) -> dict[str, Facts]:
    return facts(loader.cubin(source, architecture))


def assert_promises(source: str, architecture: int) -> None:
    registers, stack, spills, _, bulk = PROMISES.search((SOURCES / source).read_text()).groups()
    found = compiled(source, architecture)
    assert found
    for name, one in found.items():
        says = f"{name}, sm_{architecture}: {one}"
        assert one.registers <= int(registers) and one.stack <= int(stack), says
        assert count(one, r"(STL|LDL)\b.*") <= int(spills), says
        assert bool(count(one, r"UBLKCP\b.*")) == bool(bulk and architecture >= int(bulk)), says
        assert count(one, r"(FFMA|FFMA2)\b.*") == 0, f"nothing is contracted: {says}"
        assert one.arguments < MOST_ARGUMENTS + 8192, says  # and what the driver has in this bank
    if architecture < 90:
        assert all(count(one, r"LDG\..*128.*") + count(one, r"STG\..*128.*") for one in found.values())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Cubins are kept from run to run: their names say what they were made from."""
    kept = getattr(pytestconfig, "cache", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept.mkdir("cubins") if kept else tmp_path))
    monkeypatch.setattr(loader, "_SOURCES", SOURCES)


@each("architecture", FEW)
def test_ferry_keeps_its_promises(architecture: int) -> None:
    assert_promises("ferry.cu", architecture)


@pytest.mark.slow
@each("architecture", ARCHITECTURES)
def test_all_kernels_keep_their_promises(architecture: int) -> None:
    assert_promises("ferry.cu", architecture)


def test_names_that_launchers_ask_for_are_there() -> None:
    assert {*compiled("ferry.cu", 90)} == {"ferry_few", "ferry_many"}


def test_arguments_are_as_many_as_a_kernel_may_have() -> None:
    assert MOST_ARGUMENTS - 500 <= rows.layout(rows.MANY).itemsize <= MOST_ARGUMENTS


def test_an_architecture_that_it_does_not_know_is_named() -> None:
    assert nvrtc.missing(90) is None
    assert re.search(r"NVRTC \d+.\d+ does not know sm_35; do: pip install", nvrtc.missing(35))


def test_a_source_that_does_not_compile_is_named_with_what_is_wrong() -> None:
    with pytest.raises(loader.BackendError, match=r"(?s)refused broken.cu for sm_90 .*broken.cu\(1\): error"):
        nvrtc.compile_cubin("__global__ void broken() { nothing; }", "broken.cu", 90, (), {})
