"""Which mutants the tests find: `.venv/bin/python tests/mutants/run.py [--only NAME...] [--whole] [--jobs N]`.

Each mutant is put into a copy of the package, and its targets run on that. With `--whole`, what these do not
find is looked for by all quick tests of its folder and then by the slow rows of its targets. A run that does not end in
time counts as found. Before, all targets run on the package as it is: a test that fails there finds nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from all_mutants import MUTANTS
from mutant import ROOT, Mutant
from overlay import Native, Tree, environment, laid_over
from report import RESULTS, write
from server import Server

HERE = Path(__file__).parent
LIMIT_S = {"quick": 150, "slow": 400}  # of targets
WHOLE_S = 1800  # of a folder
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?|\S+)(?: - .*)?$", re.MULTILINE)
TOOK = re.compile(r" in ([\d.]+)s")
SURVIVED = "survived"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `lane`: quick, slow or survived; `by`: the test that failed first."""

    name: str
    lane: str
    by: str = ""
    seconds: float = 0.0
    note: str = ""


class Runner:
    """Runs targets of one tree on copies of its package."""

    def __init__(self, tree: Tree, folder: Path, *, through: Sequence[str], jobs: int) -> None:
        """`through`: a command that every run is started by, such as `nice -n 19`."""
        self.tree, self._folder, self._through, self._jobs = tree, folder, list(through), jobs
        self._native, self._building = Native(tree, folder / "native", through), Lock()
        self._servers: SimpleQueue[Server] = SimpleQueue()
        for _ in range(jobs):
            self._servers.put(Server(tree.python, through))

    def close(self) -> None:
        """Ends the processes that runs of tests are forked from."""
        while not self._servers.empty():
            self._servers.get().close()

    def verdicts(self, mutants: Sequence[Mutant], *, whole: bool) -> Iterator[Verdict]:
        """Of each, as they come in their order."""
        with ThreadPoolExecutor(self._jobs) as pool:
            yield from pool.map(lambda one: self.verdict(one, whole=whole), mutants)

    def verdict(self, mutant: Mutant, *, whole: bool) -> Verdict:
        """Looks for it, first where it is expected to be found."""
        folder, seconds = self._laid_over(mutant), 0.0
        for lane, targets in self._looks(mutant, whole=whole):
            by, note, taken = self._run(folder, lane, targets, limit_s=WHOLE_S * any(map(is_folder, targets)))
            seconds += taken
            if by:
                return Verdict(mutant.name, lane, by, round(seconds, 1), note)
        return Verdict(mutant.name, SURVIVED, "", round(seconds, 1))

    def _looks(self, mutant: Mutant, *, whole: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        targets = tuple(one for one in mutant.targets if self._is_there(one))
        if targets:
            yield "quick", targets
        if whole:
            yield "quick", (*targets, f"tests/{mutant.area}")
            yield "slow", targets or (f"tests/{mutant.area}",)

    def _is_there(self, target: str) -> bool:
        file, *classes_and_test = target.split("::")
        path = self.tree.root / file
        return path.exists() and (not classes_and_test or f"def {classes_and_test[-1]}(" in path.read_text())

    def _laid_over(self, mutant: Mutant | None, *, native: bool = False) -> Path:
        folder = self._folder / ("control" if mutant is None else mutant.name)
        if not native and (mutant is None or not mutant.is_native):
            return laid_over(self.tree, folder, mutant, None)
        with self._building:
            return laid_over(self.tree, folder, mutant, self._native.build(mutant))

    def _run(self, folder: Path, lane: str, targets: tuple[str, ...], *, limit_s: int = 0) -> tuple[str, str, float]:
        """The test that failed first, what else there is to say, and seconds; no test where none did."""
        seen = folder / "seen.json"
        seen.unlink(missing_ok=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "zk_mutant_witness", *["--rest"] * (lane == "slow")]
        limit_s = limit_s or LIMIT_S[lane]
        output = folder / "output.txt"
        output.unlink(missing_ok=True)
        env = environment(folder, seen, targets)
        server = self._servers.get()
        try:
            code = server.run([*options, *targets], self.tree.root, env, output, limit_s)
        finally:
            self._servers.put(server)
        said = output.read_text(errors="replace") if output.exists() else ""
        if code < 0:
            return targets[0], f"hung: ended after {limit_s} s", limit_s
        took = TOOK.findall(said)
        seconds = float(took[-1]) if took else 0.0
        found = FAILED.findall(said)
        if code in (0, 5) or (code == 1 and not found and "NOT LISTED" in said):
            self._refuse_elsewhere(folder, seen)
            return "", "", seconds
        if not found and code == 4:
            raise RuntimeError(f"pytest could not run {targets}:\n{said[-3000:]}")
        if not found:
            return targets[0], f"the process died (exit status {code})", seconds
        self._refuse_elsewhere(folder, seen)
        return found[0], "found while tests were collected" if "::" not in found[0] else "", seconds

    def _refuse_elsewhere(self, folder: Path, seen: Path) -> None:
        """The tests ran on this very copy."""
        said = json.loads(seen.read_text())
        for what, path in said.items():
            if not Path(path).is_relative_to(folder):
                raise RuntimeError(f"the tests ran on the {what} {path}, and not on the copy in {folder}")

    def prove(self) -> None:
        """Ranks, forked programs and fresh interpreters of a run of tests import the copy too."""
        folder = self._laid_over(None)
        program = (HERE / "prove.py").read_text()
        done = subprocess.run(
            [*self._through, str(self.tree.python), "-c", program, str(HERE), str(self.tree.root / "tests" / "comm")],
            cwd=tempfile.gettempdir(),  # the working folder comes before the copy, as tests/conftest.py says
            env=environment(folder, folder / "seen.json", ()),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the proof could not run:\n{done.stderr[-3000:]}")
        for who, path in json.loads(done.stdout.splitlines()[-1]).items():
            print(f"{who} imports {path}")
            if not Path(path).is_relative_to(folder):
                raise RuntimeError(f"{who} imports {path}, and not the copy in {folder}")

    def control(self, mutants: Sequence[Mutant], known: Path) -> None:
        """All targets pass on copies without any mutant: those of native mutants with the library built anew.

        What has passed once, as git describes the tree, is not run again.
        """
        state = self._state()
        passed = json.loads(known.read_text()) if known.exists() else {}
        for native in (False, True):
            wanted = {one for mutant in mutants if mutant.is_native is native for one in mutant.targets}
            there = sorted(filter(self._is_there, wanted))
            left = [one for one in there if passed.get(f"{one} {native}") != state]
            if not left:
                continue
            folder = self._laid_over(None, native=native)
            for begin in range(0, len(left), 8):
                some = tuple(left[begin : begin + 8])
                by, note, _ = self._run(folder, "quick", some, limit_s=900)
                if by:
                    raise RuntimeError(f"{by} fails without any mutant ({note or 'a failure'}): it finds nothing")
                passed |= {f"{one} {native}": state for one in some}
                known.write_text(json.dumps(passed))
                print(f"control: {', '.join(some)} pass{' on a library built anew' * native}", flush=True)

    def _state(self) -> str:
        """The commit, and what has been changed since."""
        asked = (["rev-parse", "HEAD"], ["diff", "HEAD", "--", "zerokern", "cpu", "tests", ":!tests/mutants"])
        said = [subprocess.check_output(["git", *one], cwd=self.tree.root, text=True) for one in asked]
        return f"{said[0].strip()} {zlib.crc32(said[1].encode()):08x}"


def is_folder(target: str) -> bool:
    return ".py" not in target


def hash_of(text: str) -> str:
    """Eight digits.

    >>> hash_of("")
    '00000000'
    """
    import zlib

    return f"{zlib.crc32(text.encode()):08x}"


def chosen(names: Sequence[str]) -> list[Mutant]:
    """The mutants of these names, or of these parts of the library; all without any."""
    if not names:
        return list(MUTANTS)
    unknown = set(names) - {one.name for one in MUTANTS} - {one.area for one in MUTANTS}
    if unknown:
        raise SystemExit(f"no mutant and no part of the library is called {', '.join(sorted(unknown))}")
    return [one for one in MUTANTS if one.name in names or one.area in names]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="mutants, or parts of the library")
    parser.add_argument("--whole", action="store_true", help="look further for what the targets do not find")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants at a time")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose tests run, with its own .venv")
    parser.add_argument("--through", default="", help="a command that every run is started by: 'nice -n 19'")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where verdicts go; those there of others stay")
    parser.add_argument("--no-control", action="store_true", help="the targets are known to pass")
    parser.add_argument("--folder", type=Path, default=None, help="for copies and objects; kept if it is given")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    mutants = chosen(asked.only)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        runner = Runner(Tree(asked.tree), folder, through=shlex.split(asked.through), jobs=asked.jobs)
        runner.prove()
        if not asked.no_control:
            runner.control(mutants, folder / "passed.json")
        survivors = []
        for verdict in runner.verdicts(mutants, whole=asked.whole):
            keep(asked.json, verdict)
            print(f"{verdict.lane:<9}{verdict.seconds:7.1f} s  {verdict.name}  {verdict.by} {verdict.note}", flush=True)
            survivors += [verdict.name] * (verdict.lane == SURVIVED)
        runner.close()
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants found" + f"; not: {survivors}" * bool(survivors))
    if asked.json == RESULTS:
        write()
    sys.exit(bool(survivors))


def keep(path: Path, verdict: Verdict) -> None:
    """Writes a verdict beside those that are there, in the order of the table."""
    there = json.loads(path.read_text()) if path.exists() else {}
    there[verdict.name] = {key: value for key, value in asdict(verdict).items() if key != "name" and value != ""}
    order = {one.name: place for place, one in enumerate(MUTANTS)}
    ordered = {name: there[name] for name in sorted(there, key=lambda name: order.get(name, len(order)))}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(ordered, indent=1) + "\n")
    os.replace(new, path)


if __name__ == "__main__":
    main()
