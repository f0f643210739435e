"""From what a user has (a mesh, a world, nothing) to a group: which ranks, which transport, which store."""

from __future__ import annotations

import secrets
import weakref
import zlib
from typing import Any

import torch
import torch.distributed as dist

from zerokern.comm import collectives
from zerokern.comm.agreement import Board
from zerokern.comm.group import Group
from zerokern.comm.watch import Watch
from zerokern.core.errors import got

__all__ = ["Common", "join", "world_size"]

AGREEMENT_S = 60.0  # for an agreement of ranks that are all there


class Common:
    """What all groups of one process group share, on one kind of device: counts of what was posted, board, watch.

    It must not hold the process group, which is the key that it is found by.
    """

    def __init__(self, pg: Any, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self.counts: dict[str, int] = {}
        self.groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self.lane: Any = None
        patience = min(_timeout_s(pg, device), AGREEMENT_S)
        self.board = Board(dist.HashStore(), self.rank, self.size, patience)  # a store of its own until all are here
        found = weakref.ref(pg)

        def sever() -> None:
            living = found()
            if living is None:
                return
            if device.type == "cpu":
                collectives.sever(living, self.rank, self.size)
            else:
                collectives.abort(*(one for one in (living, self.lane) if one is not None))

        def closed() -> list[int]:
            living = found()
            if living is None or device.type != "cpu":
                return []
            return collectives.closed_peers(living, self.rank, self.size)

        self.watch = Watch(self.board, sever, closed, polls=device.type != "cpu")

    def next(self, kind: str) -> int:
        """The number of the next operation of a kind; the same on all ranks."""
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        return count


# What was posted is counted per process group: messages of two groups that share one must not be mistaken.
_COMMON: weakref.WeakKeyDictionary[Any, dict[str, Common]] = weakref.WeakKeyDictionary()


def world_size() -> int:
    """The ranks of the default process group, 1 where there is none; asks nobody, unlike `Group.of`.

    >>> world_size()
    1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join(mesh: Any, device: torch.device) -> Group:
    """`Group.of`, for what is not a Group yet."""
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    pg: Any = _process_group(mesh, device)
    if pg is None:
        return Group(0, 1, device, "alone")
    if dist.get_world_size(pg) == 1:
        return Group(0, 1, device, _name(pg))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(got("device", str(device), "cpu, cuda", "zerokern.comm.lonely(rank, size) serves plans"))
    _backend(pg, device)
    kinds = _COMMON.setdefault(pg, {})
    common = kinds.get(device.type) or Common(pg, device)
    found = common.groups.get(str(device))
    if found is not None:
        return found
    group = common.groups[str(device)] = _group(pg, device, common)
    if device.type not in kinds:
        _meet(pg, group, common)
        kinds[device.type] = common
    return group


def _group(pg: Any, device: torch.device, common: Common) -> Group:
    from zerokern.comm.device import DeviceGroup
    from zerokern.comm.peers import PeerGroup

    return (PeerGroup if device.type == "cpu" else DeviceGroup)(pg, common, device, _name(pg))


def _meet(pg: Any, group: Group, common: Common) -> None:
    """Returns when all ranks have come here and have a page of the store that no earlier run has written on.

    Once for each process group: later, one rank may still hold a group that another has let go.
    """
    page = group.exchange(secrets.token_hex(8))[0]
    ranks = ",".join(map(str, dist.get_process_group_ranks(pg)))
    prefix = f"zerokern/{_name(pg)}/{zlib.crc32(ranks.encode()):08x}/{page}"
    common.board.move(dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store()))


def _process_group(mesh: Any, device: torch.device) -> Any:
    if mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not dist.is_available():
        raise ValueError(got("mesh", mesh, "None", "This build of torch has no torch.distributed"))
    from torch.distributed.device_mesh import DeviceMesh

    advice = "Make one with torch.distributed.device_mesh.init_device_mesh"
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(got("mesh", mesh, "a 1-D DeviceMesh, a zerokern.comm.Group or None for the world", advice))
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        advice = f"Choose one dimension, as in mesh[{names[0]!r}]" if names else "Name its dimensions and choose one"
        raise ValueError(got("mesh", mesh, "a mesh of one dimension", advice))
    if mesh.device_type != device.type:
        raise ValueError(
            f"mesh is one of {mesh.device_type} devices and the parameters are on {device}; allowed: a mesh of "
            f"{device.type} devices (move the model first, or make the mesh with {device.type!r})"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(got("mesh", mesh, f"a mesh that this rank, {dist.get_rank()}, is part of"))
    return mesh.get_group()


def _backend(pg: Any, device: torch.device) -> Any:
    try:
        backend = pg._get_backend(device)
        if device.type != "cpu" and backend.name() == "gloo":
            raise RuntimeError("gloo moves CPU tensors")
        return backend
    except RuntimeError as error:
        raise ValueError(
            f"the process group {_name(pg)!r} has no backend for {device.type} tensors; allowed: one that has, as "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl") makes it'
        ) from error


def _timeout_s(pg: Any, device: torch.device) -> float:
    options = getattr(_backend(pg, device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    return timeout.total_seconds()


def _name(pg: Any) -> str:
    return f"{getattr(pg, 'group_desc', '') or 'group'} {pg.group_name}"
