"""The benchmarks: one file per op. Each says what it updates, what its truth is and who does the same.

KERNELS work on memory, in contests that `bench.measure` runs; the others bring a measurement of their own, and those
of "zero", "offload", "infinity" and "right" are packages of these names.
"""

from __future__ import annotations

from pathlib import Path

KERNELS = ("adam", "lion", "adagrad", "sgd", "muon", "sumsq", "cast", "accumulate", "stream")
NAMES = (*KERNELS, "io", "save", "zero", "offload", "infinity", "right")

ELSEWHERE = {
    "save": "disk/save.py",
    "zero": "zero/command.py",
    "offload": "offload/command.py",
    "infinity": "infinity/command.py",
    "right": "right/command.py",
}


def described() -> list[tuple[str, str]]:
    """Each benchmark, and what it measures: the first sentence of its module, which is not imported for that.

    >>> dict(described())["sumsq"]
    'Sum of squares of a flat tensor, in float64, with non-finite elements shown by the result.'
    """
    found = []
    for name in NAMES:
        source = (Path(__file__).parents[1] / ELSEWHERE.get(name, f"ops/{name}.py")).read_text(encoding="utf-8")
        said = " ".join(source.split('"""')[1].split("\n\n")[0].split())
        found.append((name, said.removeprefix(f"`zerokern bench {name}`: ")))
    return found
