"""Numbers, names and dtypes of formats, as the C ABI has them."""

from __future__ import annotations

import torch

from zerokern.core.native import NativeSegment
from zerokern.core.units import BLOCK, MASTER_FORMATS, STATE_FORMATS

__all__ = [
    "BLOCK",
    "CODES",
    "COLUMNS",
    "DTYPES",
    "MASTER_FORMATS",
    "MASTER_OF",
    "PER_BLOCK",
    "POINTERS",
    "REMAINDERS",
    "STATES",
    "STATE_DTYPES",
    "STATE_FORMATS",
    "VALUES",
    "blocks",
]

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
STATES = {"none": 0, "fp32": 1, "bf16": 2, "int8": 4}
MASTERS = {"fp32": 1, "split16": 2, "split8": 3, "none": 4}
FLAGS = {"decoupled": 1, "maximize": 2, "nesterov": 4, "first_step": 8, "stochastic": 16}
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
"""by the column of a table that points at a moment, the dtype of its codes of 8 bits: they have a sign, or are roots"""
REMAINDERS = {"split16": torch.int16, "split8": torch.int8}
COLUMNS = tuple(name for name, _ in NativeSegment._fields_)
"""of a table of an update: one word for each row"""
POINTERS = tuple(name for name in COLUMNS[: COLUMNS.index("numel")] if name != "grad")
"""those that point at what the rows keep; gradients lie elsewhere in each step"""
VALUES = tuple(name for name in COLUMNS if name not in ("grad", "numel", "group") and not name.startswith("exp_avg"))
"""those that say where a parameter's values are, and how they are written: no moments"""
MASTER_OF = {dtype: name for name, dtype in REMAINDERS.items()}
CODECS = {
    ("encode", "exp_avg"): 1,
    ("decode", "exp_avg"): 2,
    ("encode", "exp_avg_sq"): 3,
    ("decode", "exp_avg_sq"): 4,
    ("split", "split16"): 5,
    ("join", "split16"): 6,
    ("split", "split8"): 7,
    ("join", "split8"): 8,
}

PER_BLOCK = f"one for each started block of {BLOCK}"


def blocks(numel: int) -> int:
    """Scales of an int8 state of that many elements.

    >>> blocks(129)
    2
    """
    return -(-numel // BLOCK)
