"""Collectives between ranks, over torch.distributed.

>>> from zerokern.comm import group_on
>>> group_on().size
1
"""

from __future__ import annotations

from zerokern.comm.group import Group, Handle
from zerokern.comm.joining import MeshGroups, group_of, group_on, sharding_group, user_group
from zerokern.comm.operations import during
from zerokern.core.errors import CommError

__all__ = [
    "CommError", "Group", "Handle", "MeshGroups", "during", "group_of", "group_on", "sharding_group", "user_group",
]  # fmt: skip
