"""The loader: what it refuses, and what it says."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_forked
from tables import each

from zerokern.core import native, units
from zerokern.core.errors import BackendError

# A fork of a process that has all of it imported; what it imports of these then, it runs anew.
ANEW = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("zerokern", "triton")]:
    del sys.modules[name]
"""


def forked(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(code, env={**os.environ, **variables})


def test_structs_have_the_size_of_the_header(tmp_path: Path) -> None:
    import ctypes

    compiler, header = shutil.which("cc"), Path(__file__).parents[2] / "cpu" / "zerokern_io.h"
    assert compiler and header.exists()
    source = tmp_path / "sizes.c"
    structs = "segment group tensor_list pair_calls pairs io_request io_faults io_options io_stats".split()
    numbers = [f"sizeof(zk_{name})" for name in structs]
    numbers += [f"offsetof(zk_io_request, {name})" for name in ("state", "after", "error_at")]
    numbers += [f"(size_t){name}" for name in ("ZK_ABI", "ZK_BLOCK", "ZK_SUMSQ_CHUNK", "ZK_IO_DONE", "ZK_IO_THREADS")]
    program = f'int main(void) {{ printf("{"%zu " * len(numbers)}", {", ".join(numbers)}); return 0; }}'
    source.write_text(f'#include "{header}"\n#include <stddef.h>\n#include <stdio.h>\n{program}\n')
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "sizes")], check=True)
    found = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True).stdout.split()
    request = native.IoRequest
    lists = native.TensorList, native.PairCalls, native.PairList
    classes = (
        native.NativeSegment, native.NativeGroup, *lists, request, native.IoFaults, native.IoOptions, native.IoStats,
    )  # fmt: skip
    expected = [
        *map(ctypes.sizeof, classes),
        *(field.offset for field in (request.state, request.after, request.error_at)),
        native.ABI,
        units.BLOCK,
        native.SUMSQ_CHUNK,
        native.IO_DONE,
        native.IO_THREADS,
    ]
    assert [int(x) for x in found] == expected


def library(folder: Path, program: str) -> Path:
    source, made = folder / "program.c", folder / "libprogram.so"
    source.write_text(program + "\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    return made


def test_another_abi_number_is_refused(tmp_path: Path) -> None:
    other = library(tmp_path, "int zk_abi(void) { return 999; }")
    with pytest.raises(BackendError, match=rf"has ABI 999, and this package needs ABI {native.ABI}; reinstall"):
        native._open(other)


def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    early = library(tmp_path, f"int zk_abi(void) {{ return {native.ABI}; }}")
    with pytest.raises(BackendError, match=r"lacks zk_\w+: it is of another build; reinstall"):
        native._open(early)


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    stranger = library(tmp_path, "int nothing(void) { return 0; }")
    with pytest.raises(BackendError, match="is no zerokern library"):
        native._open(stranger)
    text = tmp_path / "libtext.so"
    text.write_text("not a library")
    with pytest.raises(BackendError, match="does not load"):
        native._open(text)
    with pytest.raises(BackendError, match="is not there; reinstall zerokern"):
        native._open(tmp_path / "libmissing.so")


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda tree: None, ""),
        (lambda tree: (tree / "cpu/pool.cpp").write_text("// another\n"), "cpu/pool.cpp has changed since"),
        (lambda tree: (tree / "cpu/pool.cpp").unlink(), "cpu/pool.cpp is gone"),
        (lambda tree: (tree / "zerokern/lib/sources.sha256").unlink(), "sources.sha256 is not there"),
        (lambda tree: (tree / "zerokern/lib/libprogram.so").unlink(), "is not there"),
    ],
)
def test_a_source_tree_takes_no_library_of_other_sources(wrong: Callable, says: str, tmp_path: Path) -> None:
    made, source = tmp_path / "zerokern/lib/libprogram.so", tmp_path / "cpu/pool.cpp"
    for path in (made, source):
        path.parent.mkdir(parents=True)
    shutil.copy(native.path(), made)
    source.write_text("// as it was built\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    made.with_name("sources.sha256").write_text(f"{digest}  cpu/pool.cpp\n")
    wrong(tmp_path)
    if not says:
        assert native._open(made, tmp_path).zk_abi() == native.ABI
        return
    with pytest.raises(BackendError, match=f"{says}.*; run `make setup` or `pip install -e .` in {tmp_path}"):
        native._open(made, tmp_path)


def test_import_does_not_load_the_library() -> None:
    result = forked(ANEW + "import zerokern; print(zerokern.__version__)", ZEROKERN_LIBRARY="/nonexistent/lib.so")
    assert result.returncode == 0, result.stderr
    result = forked("import zerokern.core.native as n; n.library()", ZEROKERN_LIBRARY="/nonexistent/lib.so")
    assert "BackendError" in result.stderr and "/nonexistent" in result.stderr


def test_import_needs_no_triton() -> None:
    code = (
        "sys.modules['triton'] = None\n"
        "import zerokern as zk, torch\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3); zk.AdamW([p]).step()"
    )
    result = forked(ANEW + code)
    assert result.returncode == 0, result.stderr


def test_forcing_by_environment_is_in_force_and_a_missing_set_raises() -> None:
    code = "from zerokern.core import native; print(native.isa_active())"
    for name in native.isa_usable():
        assert forked(code, ZEROKERN_CPU_ISA=name).stdout.strip() == name
    result = forked(code, ZEROKERN_CPU_ISA="neon9")
    assert "BackendError" in result.stderr and "'neon9'" in result.stderr and "scalar" in result.stderr


def test_the_last_one_that_suits_this_maker_is_active() -> None:
    """avx512vnni orders its instructions for Intel's divider; on other cores it runs where it is forced."""
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    suiting = [name for name in native.isa_usable() if intel or name != "avx512vnni"]
    assert native.isa_active() == suiting[-1]
    assert native.isa_names()[0] == "scalar"
    assert set(native.isa_usable()) <= set(native.isa_names())


@each("count", [0, -1, 1025, True, 1.0, "2"])
def test_thread_counts_that_are_none(count: object) -> None:
    before = native.threads()
    with pytest.raises(ValueError, match=r"count=.*1 to 1024"):
        native.set_threads(count)  # type: ignore[arg-type]
    assert native.threads() == before
