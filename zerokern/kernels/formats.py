"""Numbers and names of dtypes, formats and algorithms, as the C ABI has them."""

from __future__ import annotations

import torch

from zerokern.core.units import BLOCK, MASTER_FORMATS, STATE_FORMATS

__all__ = [
    "ALGORITHMS",
    "BLOCK",
    "COLUMNS",
    "DTYPES",
    "MASTER_FORMATS",
    "PER_BLOCK",
    "STATES",
    "STATE_FORMATS",
    "blocks",
    "bytes_per_parameter",
]

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
STATES = {"none": 0, "fp32": 1, "bf16": 2, "int8": 4}
MASTERS = {"fp32": 1, "split16": 2, "split8": 3, "none": 4}
ALGORITHMS = {"adam": 1, "lion": 2, "adagrad": 3, "sgd": 4, "muon": 5}
FLAGS = {"decoupled": 1, "maximize": 2, "nesterov": 4, "first_step": 8, "stochastic": 16}
MOMENTS = {"adam": 2, "lion": 1, "adagrad": 1, "sgd": 1, "muon": 1}
COLUMNS = {"sums": "exp_avg_sq"}
"""of a table, that hold what an op calls otherwise: Muon has no second average, and sums of squares"""
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


def bytes_per_parameter(
    algorithm: str, grad: torch.dtype, master: str, state: str, param: torch.dtype, out: torch.dtype | None = None
) -> float:
    """Bytes that one update must move per parameter, each counted once when read and once when written.

    >>> bytes_per_parameter("adam", torch.bfloat16, "split16", "fp32", torch.bfloat16)
    26.0
    >>> bytes_per_parameter("adam", torch.bfloat16, "split8", "int8", torch.bfloat16)
    12.125
    """
    value = {"fp32": 4, "split16": 4, "split8": 3, "none": param.itemsize}[master]
    width = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK, "none": 0.0}[state]
    return float(grad.itemsize + 2 * value + 2 * width * MOMENTS[algorithm] + (out.itemsize if out else 0))
