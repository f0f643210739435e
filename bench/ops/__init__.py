"""The benchmarks: one file per op. Each says what it updates, what its truth is and who does the same.

KERNELS work on memory, in contests that `bench.measure` runs; the others bring a measurement of their own, and those
of "zero", "offload", "infinity" and "right" are packages of these names.
"""

from __future__ import annotations

import importlib

KERNELS = ("adam", "lion", "adagrad", "sgd", "muon", "sumsq", "cast", "accumulate", "stream")
NAMES = (*KERNELS, "io", "save", "zero", "offload", "infinity", "right")

ELSEWHERE = {
    "save": "..disk.save",
    "zero": "..zero.command",
    "offload": "..offload.command",
    "infinity": "..infinity.command",
    "right": "..right.command",
}


def described() -> list[tuple[str, str]]:
    """Each benchmark, and what it measures: the first sentence of its module.

    >>> dict(described())["sumsq"]
    'Sum of squares of a flat tensor, in float64, with non-finite elements shown by the result.'
    """
    found = []
    for name in NAMES:
        module = importlib.import_module(ELSEWHERE.get(name, f".{name}"), __package__)
        said = " ".join((module.__doc__ or "").split("\n\n")[0].split())
        found.append((name, said.removeprefix(f"`zerokern bench {name}`: ")))
    return found
