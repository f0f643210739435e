"""bitsandbytes' 8-bit AdamW, whose CPU path decodes, updates and encodes in separate passes over fp32 copies."""

from __future__ import annotations

import importlib.util

from ..contest import Missing, Provider
from ..step import StepProblem
from .torchao import eight_bit_step


def full_step(problem: StepProblem) -> list[Provider]:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Missing("bitsandbytes is not installed (pip install bitsandbytes)")
    from bitsandbytes.optim import AdamW8bit

    return eight_bit_step(problem, "bitsandbytes", AdamW8bit)


CANDIDATES = {"adam": full_step}
