"""The ranks of a group that a user names beside those that share parameters: the stages of a pipeline, say."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm.group import Group, Handle
from zerokern.comm.joining import group_on
from zerokern.core.errors import got

__all__ = ["Party"]


class Party:
    """As a `Group`, whose ranks find each other the first time that one of them has something to say.

    >>> party = Party.of(None, "cpu")
    >>> party is None
    True
    """

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        self._given, self.size, self.device = group, size, device
        self._group: Group | None = None

    @staticmethod
    def of(group: Any, device: torch.device | str) -> Party | None:
        """Of a ProcessGroup, a 1-D DeviceMesh or a Group, for tensors on this device; None of None."""
        device = torch.device(device)
        if group is None:
            return None
        if isinstance(group, Group):
            return Party(group, group.size, device)
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                advice = 'Choose the one that its stages are along, as in mesh["pp"]'
                raise ValueError(got("group", group, "a mesh of one dimension", advice))
            return Party(group, group.size(), device)
        if not (dist.is_available() and dist.is_initialized() and isinstance(group, dist.ProcessGroup)):
            allowed = "a ProcessGroup, a 1-D DeviceMesh or None"
            raise TypeError(got("group", group, allowed, 'For the stages of a pipeline: mesh["pp"]'))
        return Party(group, dist.get_world_size(group), device)

    def join(self) -> list[Group]:
        """The group; all ranks come here together the first time."""
        if self._group is None:
            found = self._given
            if isinstance(found, dist.ProcessGroup):
                from torch.distributed.device_mesh import DeviceMesh

                found = DeviceMesh.from_group(found, self.device.type)
            self._group = group_on(found, self.device)
        return [self._group]

    def follow(self, key: str) -> None:
        """As `Group.follow`."""
        self.join()[0].follow(key)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """As `Group.all_reduce`."""
        return self.join()[0].all_reduce(tensor, op)
