"""The headers and the library for programs in C, and the wheels of `make wheel`, which need no compiler."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from forked import run_forked

import zerokern as zk
from zerokern.bench import machine
from zerokern.core import native

ROOT = Path(__file__).resolve().parents[2]


def test_headers_stand_alone_in_c_and_in_cpp(tmp_path: Path) -> None:
    for compiler, language, standard in (("cc", "c", "c99"), ("c++", "c++", "c++17")):
        for header in ("zerokern_cpu.h", "zerokern_io.h"):
            source = f'#include "{header}"\n#include "{header}"\n'
            command = [compiler, "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-std={standard}"]
            command += ["-x", language, f"-I{zk.get_include()}", "-"]
            ran = subprocess.run(command, input=source, capture_output=True, text=True)
            assert ran.returncode == 0, f"{header} as {language}: {ran.stderr}"


def test_the_library_is_the_one_that_is_loaded() -> None:
    library = Path(zk.get_library()).resolve()
    assert str(library) in Path("/proc/self/maps").read_text()


def test_a_missing_library_is_an_error_that_teaches(tmp_path: Path) -> None:
    environment = os.environ | {"ZEROKERN_LIBRARY": str(tmp_path / "none.so")}
    ran = run_forked("import zerokern as zk; zk.get_library()", env=environment)
    assert "BackendError: the native library none.so was looked for in" in ran.stderr


PROGRAM = """
import torch, zerokern as zk, zerokern.bench.run, zerokern.examples.model
from zerokern.cli.main import parser
parser()  # all commands
weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
weight.grad = torch.ones_like(weight)
zk.AdamW([weight], lr=0.5).step()
print(zk.__file__, zk.get_library(), zk.get_include(), zerokern.bench.run.__file__, zerokern.examples.__file__)
assert weight[0].item() < 0.51
"""


def clean() -> dict[str, str]:
    """The environment of somebody who has set nothing."""
    return {name: value for name, value in os.environ.items() if name not in ("ZEROKERN_LIBRARY", "PYTHONPATH")}


def test_a_program_in_the_root_of_the_clone_runs_on_its_sources() -> None:
    """`python train.py` there, after `make setup`: the folder of the program is first on its path."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=clean(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert all(Path(one).is_relative_to(ROOT) for one in ran.stdout.split()), ran.stdout


def test_these_tests_run_on_the_sources_of_this_tree() -> None:
    """Not on an older copy of them, as an environment may have."""
    assert machine._is_copy_of(ROOT)


@pytest.mark.slow
def test_installations_run_anywhere(tmp_path: Path) -> None:
    """`pip install .` and `pip install -e .` into another environment, from what `make setup` has compiled."""
    python = fresh(tmp_path)
    path = os.pathsep.join((str(python.parent), sysconfig.get_path("scripts"), os.environ["PATH"]))
    environment = clean() | {"PATH": path}
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    library = native.path()
    loaded = library.stat().st_ino
    module, command = [python, "-m", "zerokern.bench.quality", "--help"], ["zerokern", "info"]
    for install, home, places in ([ROOT], tmp_path, [tmp_path]), (["-e", ROOT], ROOT, [ROOT, tmp_path]):
        runs = itertools.product(places, (module, command, [python, "-c", PROGRAM]))
        for place, words in ((tmp_path, [*pip, *install]), *runs):
            ran = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True)
            assert ran.returncode == 0, (words, ran.stderr)
            assert PROGRAM not in words or all(Path(one).is_relative_to(home) for one in ran.stdout.split()), ran.stdout
    assert library.stat().st_ino != loaded, "written over in place: every process that has it loaded ends"


def fresh(folder: Path) -> Path:
    """The Python of an environment of its own. torch comes from here, after what is installed there."""
    venv.create(folder / "fresh", with_pip=True)
    place = next((folder / "fresh/lib").glob("python*/site-packages"))
    (place / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "fresh/bin/python"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The source distribution, unpacked; and the names of its files."""
    base = tmp_path_factory.mktemp("source")
    program = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(base)], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(base.glob("*.tar.gz"))) as archive:
        archive.extractall(base, filter="data")
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    return next(path for path in base.iterdir() if path.is_dir()), names


@pytest.fixture(scope="module")
def built(source: tuple[Path, set[str]]) -> Path:
    """What `make wheel` builds, but from its own source distribution: that must build too."""
    pytest.importorskip("auditwheel", reason="needs auditwheel, of the extra dev")
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command, dist = [source[0] / ".ci/wheel.sh", sys.executable], source[0].with_name("dist")
    ran = subprocess.run([*command, dist], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dist


def wheel_of(built: Path, machine: str) -> Path:
    """That for a machine; none asks for a newer glibc than RHEL 9 has."""
    wheel = next(built.glob(f"zerokern-*-py3-none-manylinux_*_{machine}.whl"))
    found = re.search(r"manylinux_2_(\d+)_", wheel.name)
    assert found and int(found[1]) <= 34, f"{wheel.name} asks for a newer glibc than RHEL 9 has"
    return wheel


@pytest.mark.slow
def test_the_wheel_installs_and_trains_without_a_compiler(built: Path, tmp_path: Path) -> None:
    machine = os.uname().machine
    wheel = wheel_of(built, machine)
    python = fresh(tmp_path)
    nothing = {"PATH": str(tmp_path / "fresh/bin"), "HOME": str(tmp_path)}  # no compiler, no cmake
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel]
    ran = subprocess.run(install, env=nothing, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    ran = subprocess.run([python, "-c", PROGRAM], env=nothing, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert all(Path(one).is_relative_to(tmp_path / "fresh") for one in ran.stdout.split()), ran.stdout
    package, library, include = map(Path, ran.stdout.split()[:3])
    assert (include / "cuda" / "ferry.cu").is_file() and not (library.parent / "sources.sha256").exists()
    wanted = {name for name in sources() if name.startswith(("zerokern/", "examples/"))}
    lacks = {name for name in wanted if not (package.parent / name.removeprefix("zerokern/")).exists()}
    assert not lacks
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" not in needed


@pytest.mark.slow
def test_the_wheel_for_aarch64_runs_there(built: Path, tmp_path: Path) -> None:
    """Under an emulator, without Python: the program in C on the wheel's headers and library."""
    for tool in ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "qemu-aarch64-static"):  # the first made the wheel
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}; apt-get install -y g++-aarch64-linux-gnu qemu-user-static")
    with zipfile.ZipFile(wheel_of(built, "aarch64")) as wheel:
        wheel.extractall(tmp_path)
    package, program = tmp_path / "zerokern", tmp_path / "step"
    library = package / "lib/libzerokern_cpu.so"
    build = ["aarch64-linux-gnu-gcc", "-O2", package / "examples/step.c", f"-I{package / 'include'}", library]
    subprocess.run([*build, f"-Wl,-rpath,{library.parent}", "-lm", "-o", program], check=True)
    ran = subprocess.run(
        ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", program], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"1000003 elements, norm of the gradient 306, after 200 steps", ran.stdout), ran.stdout


def sources() -> set[str]:
    """Those that git knows; a copy without git is walked."""
    folders = ("cpu", "cuda", "zerokern", "examples")
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return set(listed.stdout.split())
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {
        path.relative_to(ROOT).as_posix() for path in found if path.suffix in (".py", ".h", ".cpp", ".c", ".cu", ".cuh")
    }


@pytest.mark.slow
def test_the_source_distribution_has_what_a_build_needs(source: tuple[Path, set[str]]) -> None:
    _, names = source
    needed = {"pyproject.toml", "LICENSE", "README.md", "Makefile", ".ci/wheel.sh", ".ci/preflight.py"}
    assert needed <= names
    wanted = sources()
    assert wanted and wanted <= names
    assert not any(name.startswith(("bench/results", "build/", ".venv")) for name in names)
