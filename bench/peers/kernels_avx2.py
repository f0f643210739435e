"""Our own exact kernel with AVX2 forced: what machines without AVX-512 get, against the best that this one has."""

from __future__ import annotations

import dataclasses

from zerokern.core import native
from zerokern.kernels.dispatch import implementation

from ..contest import Missing, Provider
from ..ours import KernelStep
from ..step import Format, StepProblem

ISA = "avx2"


def full_step(problem: StepProblem) -> list[Provider]:
    if ISA not in native.isa_usable():
        raise Missing(f"this machine has {', '.join(native.isa_usable())}")
    step = KernelStep(problem, Format("split16", "fp32"))

    def run() -> None:
        with implementation(f"cpu.{ISA}"):
            step.run()

    def check() -> None:
        with implementation(f"cpu.{ISA}"):
            step.check()

    return [dataclasses.replace(step.provider(), run=run, check=check, wiring="exact, split16")]


CANDIDATES = dict.fromkeys(("adam", "lion", "adagrad", "sgd"), full_step)
