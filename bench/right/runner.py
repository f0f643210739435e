"""Runs each library's cells in a process that has imported that library alone, and judges them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zerokern.core.errors import ZerokernError

from . import judge, known, noise
from .libraries import LIBRARIES
from .programs import Program
from .worker import ends_of

RANKS = 2  # a sum of two has one order; three would differ by roundings alone
SECONDS = 20.0  # a cell takes less than one; what is not over by then waits for ever
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",  # torchao and DeepSpeed compile parts of theirs: half a minute in each cell
}
WORK = "import sys; from zerokern.bench.right.worker import serve; serve(*sys.argv[1:])"
Advance = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program through one library."""

    program: str
    library: str
    verdict: str
    why: str
    seconds: float


def measure(
    libraries: Sequence[str],
    programs: Sequence[Program],
    advance: Advance,
    seconds: float = SECONDS,
) -> tuple[list[Cell], str]:
    """All cells, and what interrupted them, if something did."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="zerokern-right-") as place:
        folder = Path(place)
        references: dict[str, dict[str, judge.Reference]] = {}
        try:
            for library in libraries:
                plain = LIBRARIES[library].reference
                if plain not in references:
                    references[plain] = references_of(plain, programs, folder, seconds, advance)
                for done, (name, told, ends) in enumerate(ran(library, programs, folder, seconds), 1):
                    judged = judge.verdict(ends, references[plain][name], LIBRARIES[library].lossy)
                    verdict, why = known.confirmed(library, name, *judged)
                    cells.append(Cell(name, library, verdict, why, round(told["seconds"], 2)))
                    advance(library, done, len(programs))
        except KeyboardInterrupt:
            return cells, f"after {len(cells)} of {len(libraries) * len(programs)} cells"
    return cells, ""


def references_of(
    name: str, programs: Sequence[Program], folder: Path, seconds: float, advance: Advance
) -> dict[str, judge.Reference]:
    """What is right, by program: the reference `name` once as it is, and a few times under noise."""
    runs: list[dict[str, judge.Results]] = []
    for seed in range(1 + noise.RUNS):
        runs.append({})
        for program, _, ends in ran(f"{name}~{seed}" if seed else name, programs, folder, seconds):
            runs[-1][program] = results_of(program, ends)
            advance(name, seed * len(programs) + len(runs[-1]), (1 + noise.RUNS) * len(programs))
    return {
        one.name: judge.Reference.of(runs[0][one.name], [run[one.name] for run in runs[1:]], one.narrow)
        for one in programs
    }


def results_of(name: str, ends: Sequence[judge.Ended]) -> judge.Results:
    found = [one.result for one in ends if one.result is not None]
    if len(found) < len(ends):
        raise ZerokernError(
            f"the reference has no result of {name}: {[one.error or one.died or 'late' for one in ends]}"
        )
    return found


def ran(
    library: str, programs: Sequence[Program], folder: Path, seconds: float
) -> Iterator[tuple[str, dict[str, Any], list[judge.Ended]]]:
    """Each program as it ends: its name, what the worker tells of it, and how its ranks ended."""
    place = folder / library.replace(":", "-")
    left = [program.name for program in programs]
    command = [sys.executable, "-c", WORK, library, str(place), str(RANKS), str(seconds), *left]
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    said = folder / "worker.log"
    with said.open("wb") as log:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env=env)
    try:
        for line in worker.stdout or ():
            told = json.loads(line)
            name = told["program"]
            left.remove(name)
            yield name, told, ends_of(place / name, RANKS, told["died"])
    finally:
        worker.kill()
        worker.wait()
    last = " ".join(said.read_text(errors="replace").splitlines()[-1:])
    for name in left:  # its library cannot be imported
        yield name, {"seconds": 0.0}, [judge.Ended(died=last or "the worker died")] * RANKS
