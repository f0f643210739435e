"""The native library is plain: no framework, no runtime of others, not a word, and one algorithm for all machines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import zerokern

from .tree import Finding, assert_clean, files, read

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INSTRUCTION_SETS = "avx2 avx512 fma f16c sse4 march mtune native".split()
FORBIDDEN = {
    r"#\s*pragma\s+omp|<omp\.h>": "uses OpenMP; the pool in cpu/pool.h is its own",
    r"Python\.h|pybind|nanobind": "knows Python; the border is a C ABI",
    r"[<\"](?:torch|ATen|c10)/": "knows torch; the border is a C ABI",
    r"\b(?:printf|fprintf|puts|fputs|perror)\s*\(|std::c(?:out|err|log)\b": "prints; errors are return codes",
    r"\bthrow\b": "throws; nothing is thrown across a C ABI",
    r"\b(?:std::)?(?:exit|abort|terminate|quick_exit)\s*\(": "ends the process; errors are return codes",
    r"\bgetenv\s*\(": "reads the environment; zerokern/core/env.py does",
}
ALLOWED_NEEDED = re.compile(r"lib(?:c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so|ld-linux")
CMAKE_COMMAND = re.compile(r"(\w+)\s*\(([^()]*)\)")
SHARED_FLAGS = ("add_compile_options", "add_definitions", "target_compile_options")
FUZZ = "cpu/fuzz/"  # a program of its own, which may print and abort


def breaches(source: str, path: str) -> list[Finding]:
    plain = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), source)
    found = [Finding(path, 1, "is not ASCII")] if not source.isascii() else []
    for pattern, says in FORBIDDEN.items():
        for match in re.finditer(pattern, plain):
            found.append(Finding(path, plain[: match.start()].count("\n") + 1, f"{match[0].strip()} {says}"))
    return found


def flag_breaches(cmake: str, path: str) -> list[Finding]:
    """Flags for an instruction set belong to that set's own source; none may loosen arithmetic."""
    plain = re.sub(r"#[^\n]*", "", cmake)
    found = []
    for command, arguments in CMAKE_COMMAND.findall(plain):
        shared = command.lower() in SHARED_FLAGS or "CMAKE_CXX_FLAGS" in arguments.split()[:1]
        flags = re.findall(rf"-m(?:{'|'.join(INSTRUCTION_SETS)})[\w=.-]*|-march[\w=.-]*", arguments)
        if shared and flags:
            found.append(Finding(path, 1, f"{command} gives {' '.join(flags)} to shared code, which must run anywhere"))
        if "native" in " ".join(flags):
            found.append(Finding(path, 1, "builds for the machine that builds; the set is picked where it runs"))
    for loose in re.findall(r"-ffast-math|-Ofast|-funsafe-math-optimizations|-fopenmp|-ffp-contract=(?!off)\w+", plain):
        found.append(Finding(path, 1, f"{loose}: results must be the same bits on every instruction set"))
    return found


def library() -> Path:
    return Path(zerokern.__file__).parent / "lib" / "libzerokern_cpu.so"


def readelf(*arguments: str) -> str:
    command = ["readelf", "--wide", *arguments, library()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_sources_are_plain() -> None:
    sources = [p for p in files(".h", ".cpp", ".def", under=("cpu/",)) if not p.startswith(FUZZ)]
    assert len(sources) > 8
    assert_clean([finding for path in sources for finding in breaches(read(path), path)])


def test_flags_are_baseline_and_strict() -> None:
    path = "cpu/CMakeLists.txt"
    assert_clean(flag_breaches(read(path), path))
    assert "-ffp-contract=off" in read(path)


def test_library_needs_the_c_and_cxx_runtimes_alone() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic"))
    assert needed
    assert [name for name in needed if not ALLOWED_NEEDED.match(name)] == []


def test_library_shows_its_abi_alone() -> None:
    rows = [line.split() for line in readelf("--dyn-syms").splitlines()]
    shown = {r[7] for r in rows if len(r) > 7 and r[4] in ("GLOBAL", "WEAK") and r[5] == "DEFAULT" and r[6] != "UND"}
    assert "zk_update" in shown
    assert [name for name in sorted(shown) if not name.startswith("zk_")] == []


def test_a_breach_is_found() -> None:
    """A comment may name what is forbidden, and one source may have flags of its own."""
    for source, says in [
        ("#pragma omp parallel\n", "cpu/pool.h"),
        ("#include <torch/torch.h>\n", "knows torch"),
        ("#include <Python.h>\n", "knows Python"),
        ('/* a\n b */ void f() { printf("x"); }', "a.cpp:2: printf( prints"),
        ("void f() { throw 1; }", "throws"),
        ("void f() { std::abort(); }", "ends the process"),
        ("// \u00e9", "not ASCII"),
    ]:
        (finding,) = breaches(source, "a.cpp")
        assert says in str(finding), source
    assert breaches("// nothing may throw or printf() here\nint snprintf_like;", "a.cpp") == []
    for cmake in (
        "target_compile_options(x PRIVATE -O3 -mavx2)",
        "set(CMAKE_CXX_FLAGS -mfma)",
        "set_source_files_properties(a.cpp PROPERTIES COMPILE_OPTIONS -march=native)",
        "target_compile_options(x PRIVATE -ffast-math)",
    ):
        assert len(flag_breaches(cmake, "CMakeLists.txt")) == 1, cmake
    own = "set_source_files_properties(isa/avx2.cpp PROPERTIES COMPILE_OPTIONS -mavx2)\n# -march=native\n"
    assert flag_breaches(own, "CMakeLists.txt") == []
