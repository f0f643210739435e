"""What every layer counts state in: the block, the names of formats, and how many buffers buckets pass through."""

from __future__ import annotations

__all__ = ["BLOCK", "BUFFERS", "MASTER_FORMATS", "STATE_FORMATS"]

BLOCK = 128
"""elements under one scale of an int8 state; a cut between two ranks falls on a multiple of it"""
MASTER_FORMATS = ("fp32", "split16", "split8", "none")
STATE_FORMATS = ("fp32", "bf16", "int8")
BUFFERS = 2
"""of gradients: one is filled by backward while the other is reduced"""
