"""What every layer counts state in: the block, the formats and who may have which, buffers and rings."""

from __future__ import annotations

__all__ = ["BLOCK", "BUFFERS", "MASTERS", "MASTER_FORMATS", "RING_NBYTES", "STATE_FORMATS"]

BLOCK = 128
"""elements under one scale of an int8 state; a cut between two ranks falls on a multiple of it"""
MASTER_FORMATS = ("fp32", "split16", "split8", "none")
MASTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("own", ()),
    "bfloat16": ("split16", ("split16", "fp32", "split8", "none")),
    "float16": ("fp32", ("fp32", "none")),
}
"""by the name of a parameter's dtype: its master format unless another is chosen, and those there are to choose from"""
STATE_FORMATS = ("fp32", "bf16", "int8")
BUFFERS = 2
"""of gradients: one is filled by backward while the other is reduced"""
RING_NBYTES = 64 << 20
"""of host memory that state on a disk streams through, unless told otherwise"""
