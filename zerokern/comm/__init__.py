"""Collectives between ranks: what a group of them can be asked, over torch.distributed, in memory, or not at all.

>>> from zerokern.comm import group_on
>>> group_on().size
1
"""

from __future__ import annotations

from zerokern.comm.group import Group, Handle, lonely
from zerokern.comm.joining import Team, dividing_on, group_on, joined, world_size
from zerokern.comm.operations import during
from zerokern.comm.party import Party
from zerokern.core.errors import CommError

__all__ = [
    "CommError",
    "Group",
    "Handle",
    "Party",
    "Team",
    "dividing_on",
    "during",
    "group_on",
    "joined",
    "lonely",
    "world_size",
]
