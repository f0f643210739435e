"""Makes a group from a mesh, from the default process group, or for this process alone."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm.common import Common
from zerokern.comm.device import DeviceGroup
from zerokern.comm.group import Group
from zerokern.comm.hybrid import GroupsInTurn, HybridGroup
from zerokern.comm.peers import PeerGroup
from zerokern.core import env
from zerokern.core.errors import got, say_once

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshGroups", "group_of", "group_on", "sharding_group", "user_group"]

# What was posted is counted per process group: messages of two groups that share one must not be mistaken.
_COMMON: weakref.WeakKeyDictionary[Any, dict[str, Common]] = weakref.WeakKeyDictionary()
_HYBRID: weakref.WeakValueDictionary[tuple[int, int], HybridGroup] = weakref.WeakValueDictionary()

_EACH_ALONE = (
    "torchrun started %d ranks, but there is no process group: call torch.distributed.init_process_group() first. "
    "Without it each of them trains a model of its own"
)
QUEUES = 32  # the most that CUDA makes, and as many as torch's pool has streams of one priority
_FEW_QUEUES = (
    "CUDA_DEVICE_MAX_CONNECTIONS {now}: two streams may share a queue, where one waits for the other. If those are of "
    "a gather and of a reduction, ranks that launch them in different orders wait for each other for ever, and copies "
    "wait for collectives anyway. Set it before the program starts: CUDA_DEVICE_MAX_CONNECTIONS={queues}"
)
# It is not set here either. With it each collective begins only when the one launched before it on this rank has begun,
# whatever its communicator. That helps where every rank launches in one order, which no queue can turn into a deadlock
# anyway. But an update's worker publishes parameters beside what the program's own thread launches, on each rank when
# it comes to it. Then two collectives of each are enough for ranks to wait for each other for ever, even with a queue
# for each stream (tests/comm/test_queues.py), and NCCL refuses launches from two threads at once
# (NCCL_LAUNCH_RACE_FATAL, on by default).
_ONE_ORDER = (
    "NCCL_LAUNCH_ORDER_IMPLICIT=1 wants one order of all launches on all ranks, from one thread. With "
    "schedule='overlap' and state in host memory or on a disk, at stages 1 and 2, a worker launches beside your "
    "program, which NCCL may refuse ('host threads racing') or never end. Unset it"
)
_TWO = "(replicate, shard), as FSDP2 has it: what is divided along the second has copies along the first"
# dimensions that divide a model's work and not the batch, as torchtitan and Accelerate call them
_OF_THE_MODEL = {"tp": "tensor", "pp": "pipeline"}


def _has_world() -> bool:
    return dist.is_available() and dist.is_initialized()


def group_on(mesh: Any = None, device: torch.device | str = "cpu") -> Group:
    """Returns the group of a 1-D ``DeviceMesh``, of the world if there is one, else of this process alone.

    A Group is returned unchanged. All ranks call this together; it returns when they have found each other. The same
    ranks on the same device are the same object, as long as somebody holds it.

    >>> group_on()
    Group('alone', rank 0 of 1, cpu)
    """
    if isinstance(mesh, Group):
        return mesh
    device = torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    pg: Any = _process_group(mesh, device)
    return Group(0, 1, device, "alone") if pg is None else _join(pg, device)


def sharding_group(mesh: Any = None, device: torch.device | str = "cpu") -> Group:
    """Returns the group to shard over, as `group_on`; for a 2-D mesh, (replicate, shard), a `HybridGroup`.

    >>> sharding_group()
    Group('alone', rank 0 of 1, cpu)
    """
    if mesh is None and not _has_world() and (ranks := env.launched_ranks()) > 1:
        say_once("zerokern.comm", _EACH_ALONE % ranks)
    if getattr(mesh, "ndim", 1) == 1 or isinstance(mesh, Tensor):
        return group_on(mesh, device)
    _check_two(mesh)
    replicas, shard = (group_on(_along(mesh, dim), device) for dim in (0, 1))
    if replicas.size == 1:
        return shard
    hybrid = _HYBRID.get((id(shard), id(replicas)))
    if hybrid is None:
        hybrid = _HYBRID[id(shard), id(replicas)] = HybridGroup(shard, replicas)
    return hybrid


def _check_two(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 2:
        last = ", ".join(map(repr, names[-2:])) or "'dp_replicate', 'dp_shard'"
        advice = f"Name its dimensions and choose some, as in mesh[{last}]; mesh[{last}]._flatten() makes one of two"
        raise ValueError(got("mesh", mesh, f"a mesh of one dimension (shard), or of two, {_TWO}", advice))
    for name in names:
        if name in _OF_THE_MODEL:
            other = next((name for name in names if name not in _OF_THE_MODEL), "dp")
            advice = (
                f"{name!r} is the dimension of {_OF_THE_MODEL[name]} parallelism; choose the other: mesh[{other!r}]"
            )
            raise ValueError(got("mesh", mesh, f"dimensions whose ranks have different batches, {_TWO}", advice))
    if len(names) == 2 and ("shard" in names[0] or "replicate" in names[1]):
        advice = f"These are the other way round; choose mesh[{names[1]!r}, {names[0]!r}], of a mesh made in that order"
        raise ValueError(got("mesh", mesh, f"a mesh of two dimensions, {_TWO}", advice))


def _along(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Returns this rank's slice of the mesh along one dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    if mesh.get_coordinate() is None:
        raise ValueError(got("mesh", mesh, f"a mesh that this rank, {dist.get_rank()}, is part of"))
    return DeviceMesh.from_group(mesh.get_group(dim), mesh.device_type)


def group_of(pg: Any) -> Group:
    """Returns the group of a process group: for CPU tensors if it moves those, else for those on this process's GPU."""
    device = torch.device("cpu")
    try:
        pg._get_backend(device)
    except RuntimeError:
        device = torch.device("cuda", torch.cuda.current_device())
    return _join(pg, device)


class MeshGroups(GroupsInTurn):
    """The groups along some dimensions of a mesh, and further groups `beside` them, as one.

    They are joined at the first use, to which all ranks come together, in their users' threads.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        dims: Sequence[int],
        beside: Sequence[Any] = (),
        device: torch.device | None = None,
    ) -> None:
        self.size = math.prod([*(mesh.size(dim) for dim in dims), *(group.size for group in beside)])
        self.device = device or torch.device(mesh.device_type)
        self._mesh, self._dims, self._beside = mesh, dims, beside

    @cached_property
    def groups(self) -> list[Any]:  # type: ignore[override]
        """The groups, each of which may consist of several."""
        meshes = [self._mesh if self._mesh.ndim == 1 else _along(self._mesh, dim) for dim in self._dims]
        return [*self._beside, *(group_on(along, self.device) for along in meshes)]

    @property
    def everyone(self) -> MeshGroups:
        """The same with all ranks that have copies of the spans of the groups beside."""
        return MeshGroups(self._mesh, self._dims, [group.everyone for group in self._beside])


def user_group(group: Any, device: torch.device | str) -> Group | MeshGroups | None:
    """Returns the group that a user passed as `group=...`, for tensors on this device; None for None.

    >>> user_group(None, "cpu") is None
    True
    """
    if group is None or isinstance(group, Group):
        return group
    from torch.distributed.device_mesh import DeviceMesh

    device = torch.device(device)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            advice = 'Choose the one that its stages are along, as in mesh["pp"]'
            raise ValueError(got("group", group, "a mesh of one dimension", advice))
    elif dist.is_available() and dist.is_initialized() and isinstance(group, dist.ProcessGroup):
        group = DeviceMesh.from_group(group, device.type)
    else:
        allowed = "a ProcessGroup, a 1-D DeviceMesh or None"
        raise TypeError(got("group", group, allowed, 'For the stages of a pipeline: mesh["pp"]'))
    return MeshGroups(group, (0,), device=device)


def _join(pg: Any, device: torch.device) -> Group:
    if dist.get_world_size(pg) == 1:
        return Group(0, 1, device, _name(pg))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(got("device", str(device), "cpu, cuda", "zk.plan(model, world=...) plans without a device"))
    _backend(pg, device)
    if device.type == "cuda":
        _check_queues()
    kinds = _COMMON.setdefault(pg, {})
    common = kinds.get(device.type) or _common(pg, device)
    known = common.groups.get(str(device))
    if known is not None:
        return known
    group = common.groups[str(device)] = _group(pg, device, common)
    if device.type not in kinds:
        _meet(pg, group, common)
        kinds[device.type] = common
    return group


def _check_queues() -> None:
    """Refuses or warns of settings with which collectives of two communicators could wait for each other for ever."""
    said = env.read("CUDA_DEVICE_MAX_CONNECTIONS")
    if said == "1":
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams into one queue, in which a reduction and a "
            f"gather of two ranks can wait for each other for ever; allowed: 2 or more, best {QUEUES}"
        )
    if said is None or not said.isdecimal() or int(said) < QUEUES:
        now = "is not set, and CUDA makes 8 queues" if said is None else f"is {said}"
        say_once("zerokern.comm", _FEW_QUEUES.format(now=now, queues=QUEUES))
    if (env.read("NCCL_LAUNCH_ORDER_IMPLICIT") or "0") != "0":
        say_once("zerokern.comm", _ONE_ORDER)


def _common(pg: Any, device: torch.device) -> Common:
    return Common(pg, device, _timeout_s(pg, device))


def _group(pg: Any, device: torch.device, common: Common) -> Group:
    return (PeerGroup if device.type == "cpu" else DeviceGroup)(pg, common, device, _name(pg))


def _meet(pg: Any, group: Group, common: Common) -> None:
    """Waits until all ranks have come here and share a page of the store that no earlier run has written to.

    Only once for each process group: later, one rank may still hold a group that another has dropped.
    """
    ranks, store = dist.get_process_group_ranks(pg), dist.distributed_c10d._get_default_store()
    name = f"{_name(pg)}/{zlib.crc32(','.join(map(str, ranks)).encode()):08x}"
    with common.observer.meeting(group, store, name, ranks):
        # on a device, the communicator of reductions: made now, not by the first backward while a gather is under way
        group.all_reduce(torch.zeros(1, device=group.device), "max").wait()


def _process_group(mesh: Any, device: torch.device) -> Any:
    if mesh is None:
        return dist.group.WORLD if _has_world() else None
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
