"""A copy of the package, laid out as an installation is, with one text replaced, which all that a run of tests starts
finds before it.

The folder of the copy is first on PYTHONPATH: pytest, the servers that it forks ranks and programs from, and fresh
interpreters read it from the environment. Nothing of the repository or of the environment is changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutant import Mutant, mutated

__all__ = ["Native", "Tree", "environment", "laid_over"]

LIBRARY = Path("lib") / "libzerokern_cpu.so"


class Tree:
    """A checkout whose tests are run, and the Python that imports its package."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        own = self.root / ".venv" / "bin" / "python"
        self.python = own if own.exists() else Path(sys.executable)
        self.package = Path(self._installed()).parent

    def _installed(self) -> str:
        """Where the package is that this Python imports when no folder of sources is in its way."""
        program = "import zerokern; print(zerokern.__file__)"
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.check_output([self.python, "-c", program], cwd="/", env=clean, text=True).strip()

    def tool(self, name: str) -> str:
        """A program of this environment, or else of the system."""
        there = self.python.parent / name
        return str(there) if there.exists() else name


class Native:
    """Builds the native library outside of the tree, each time from objects of the sources as they are.

    `folder` holds `pristine`, built once, and `work`, a copy of it in which one source is replaced: what depends on
    that alone is compiled.
    """

    def __init__(self, tree: Tree, folder: Path, through: Sequence[str] = ()) -> None:
        """`through`: a command that the compiler is started by."""
        self.tree, self._through = tree, list(through)
        self._pristine, self._work, self._kept = (folder / name for name in ("pristine", "work", "kept"))

    def build(self, mutant: Mutant | None) -> Path:
        """The library with this mutant in it; without one, as it is."""
        if not self._is_fresh():
            self._begin()
        if mutant is None:
            return self._pristine / "build" / LIBRARY.name
        kept = self._kept / f"{mutant.name}-{zlib.crc32(mutant.new.encode()):08x}.so"
        if kept.exists():
            return kept
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._pristine, self._work)
        path = self._work / "sources" / Path(mutant.file).relative_to("cpu")
        path.write_text(mutated(mutant, path.read_text()))
        self._compile()
        self._kept.mkdir(exist_ok=True)
        shutil.copy(self._work / "build" / LIBRARY.name, kept)
        return kept

    def _is_fresh(self) -> bool:
        sources = self._pristine / "sources"
        there = {path.relative_to(sources): path.read_bytes() for path in sources.rglob("*") if path.is_file()}
        wanted = self.tree.root / "cpu"
        now = {path.relative_to(wanted): path.read_bytes() for path in wanted.rglob("*") if path.is_file()}
        return there == now and (self._pristine / "build" / LIBRARY.name).exists()

    def _begin(self) -> None:
        for folder in (self._pristine, self._work, self._kept):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.tree.root / "cpu", self._work / "sources")
        ninja = self.tree.tool("ninja")
        options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]
        self._run([self.tree.tool("cmake"), *options, "-S", str(self._work / "sources"), "-B", self._built])
        self._compile()
        shutil.copytree(self._work, self._pristine)  # with the times of the files, by which ninja knows what is old

    @property
    def _built(self) -> str:
        return str(self._work / "build")

    def _compile(self) -> None:
        self._run([self.tree.tool("cmake"), "--build", self._built])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run([*self._through, *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def laid_over(tree: Tree, folder: Path, mutant: Mutant | None, library: Path | None) -> Path:
    """A folder with the package in it, this mutant in the package, and this native library, if another one.

    Beside the package lies the plugin that runs the tests in the order of the targets and tells what was imported.
    """
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "zerokern"
    shutil.copytree(tree.package, package)
    for beside in ("bench", "examples"):  # an installed copy has them
        if not (package / beside).exists():
            shutil.copytree(tree.root / beside, package / beside, ignore=shutil.ignore_patterns("results"))
    shutil.copy(Path(__file__).with_name("witness.py"), folder / "zk_mutant_witness.py")
    if library is not None:
        shutil.copy(library, package / LIBRARY)
    if mutant is not None and not mutant.is_native:
        path = package / Path(mutant.file).relative_to("zerokern")
        path.write_text(mutated(mutant, path.read_text()))
    return folder


def environment(folder: Path, seen: Path, targets: tuple[str, ...]) -> Mapping[str, str]:
    """What a run of tests is started with."""
    more = {"PYTHONPATH": str(folder), "ZK_MUTANT_SEEN": str(seen), "ZK_MUTANT_TARGETS": json.dumps(targets)}
    return {**os.environ, **more}
