"""What every layer counts state in: the block, the formats and who may have which, buffers and rings. And the words
that public arguments take, as types: a type checker finds `stage=4` and `state_format="int9"`."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = [
    "BLOCK", "BUFFERS", "MASTERS", "MASTER_FORMATS", "RING_NBYTES", "STATE_FORMATS",
    "MasterFormat", "Reduce", "Schedule", "Stage", "StateFormat", "Tier",
]  # fmt: skip

Stage = Literal[0, 1, 2, 3]
Tier = Literal["device", "cpu"]  # or zk.Nvme(path)
Schedule = Literal["sync", "overlap"]  # or zk.Delayed(after=N)
StateFormat = Literal["fp32", "bf16", "int8"]
MasterFormat = Literal["fp32", "split16", "split8", "none"]
Reduce = Literal["mean", "sum"]

BLOCK = 128
"""elements under one scale of an int8 state; a cut between two ranks falls on a multiple of it"""
MASTER_FORMATS = get_args(MasterFormat)
MASTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("own", ()),
    "bfloat16": ("split16", ("split16", "fp32", "split8", "none")),
    "float16": ("fp32", ("fp32", "none")),
}
"""by the name of a parameter's dtype: its master format unless another is chosen, and those there are to choose from"""
STATE_FORMATS = get_args(StateFormat)
BUFFERS = 2
"""of gradients: one is filled by backward while the other is reduced"""
RING_NBYTES = 64 << 20
"""of host memory that state on a disk streams through, unless told otherwise"""
