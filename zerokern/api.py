"""zk.shard, zk.no_sync, zk.shards, zk.build and zk.gathered: what users call around a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern.comm import Group, dividing_on, during
from zerokern.core.errors import StateError, got
from zerokern.core.units import Reduce, Stage, Tier
from zerokern.io import Nvme
from zerokern.memory.heap import give_back, map_large
from zerokern.zero import home_of
from zerokern.zero.construction import Construction
from zerokern.zero.partition import check_stage, shards_parameters
from zerokern.zero.recompute import Repeated
from zerokern.zero.sharding import Sharding
from zerokern.zero.tiles import cut
from zerokern.zero.units import Units
from zerokern.zero.whole import whole

__all__ = ["BUCKET_BYTES", "build", "gathered", "no_sync", "shard", "sharding_of", "shards"]

BUCKET_BYTES = 32 << 20
Module = TypeVar("Module", bound=nn.Module)


Meshes = DeviceMesh | Group | Mapping[nn.Module, DeviceMesh | Group] | None


def group_of(mesh: DeviceMesh | Group | None, module: nn.Module) -> Group:
    """The ranks that share a module."""
    param = next(iter(module.parameters()), None)
    return dividing_on(mesh, "cpu" if param is None or param.is_meta else param.device)


def shard(
    module: Module,
    *,
    stage: Stage = 2,
    mesh: Meshes = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    tier: Tier | Nvme = "device",
    keep: Tier | Nvme | None = None,
    micro: int = 1,
    replicated: DeviceMesh | Group | None = None,
    units: Units = None,
    bucket_bytes: int = BUCKET_BYTES,
    reduce: Reduce = "mean",
) -> Module:
    """ZeRO in place: optimizer state (stage 1), gradients (2) and parameters (3) divided among the ranks of `mesh`.

    Returns the same module; its tree, its parameters as objects, their names and shapes stay as they are, and the
    training loop too. All ranks begin with rank 0's values. Without a `mesh` the ranks are the default process
    group's, or this process alone where there is none. A mesh of two dimensions is `(replicate, shard)`, as FSDP2 has
    it: all is divided along the second, and gradients are reduced there; what is left of them is then added up along
    the first, beside the next bucket. Several dimensions become one by `mesh["dp", "cp"]._flatten()`. Gradients become
    the ranks' `"mean"`, or with `reduce="sum"` their sum, for losses that are divided by the tokens of all ranks.

    `mesh` is also a dict of modules, `{model: mesh["dp"], block.experts: sparse["efsdp"], ...}`: parameters of such a
    module, DTensors of which each rank of `sparse["ep"]` has some, are divided among other ranks than the model's,
    which without an entry are all. Their gradients, of the tokens of all ranks, are divided by as many as the model's.
    Such a module computes on every rank, with no tokens too.

    A model that `parallelize_module` has divided is sharded by `mesh=mesh["dp"]`, the dimension beside that one. Of a
    DTensor parameter the local tensor is divided, and modules compute with the DTensor. Parameters that are none count
    as replicated there, and norms and decisions are those of all ranks of both dimensions.

    `units`: what is gathered together at stage 3: modules, or a function that says yes or no to each; by default the
    children of `ModuleList`s, and the rest with the root. `bucket_bytes`: how much one collective moves, at most,
    unless one parameter is larger. `tier`: where shards rest at stage 3. With `zk.Nvme(path)` they are fetched from a
    folder below `path` before their unit computes, and before they are updated; host memory holds the units at work,
    and gradients. With `"cpu"`, of a model on a device, shards and reduced gradients lie in pinned host memory, and so
    `param.device` is the CPU: a unit is copied to the device one ahead of its turn, a bucket's gradients leave once
    they are reduced, and the optimizer updates in host memory, whatever its tier. So it is with `zk.Nvme(path)` for a
    model on a device, whose units pass a pinned ring of `ring_nbytes`. `keep`: units keep their inputs alone until
    backward, there (`"device"`, `"cpu"`, `zk.Nvme(path)`), and are computed again; `micro`: in so many slices of the
    batch, one after the other, while the parameters are there; `replicated`: in parts, on the ranks of a dimension of a
    mesh beside this one, as tensor parallelism has it. All as `zk.recompute` says; of units that lie in each other the
    outermost, and not the root. `micro` above 1 or `replicated` alone mean `keep="device"`.
    `mp_policy.param_dtype` becomes the parameters' dtype; the fp32 values that they had are handed to the optimizer
    exactly.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(4, 2), stage=3)
    >>> opt = zk.AdamW(model.parameters(), lr=1e-2)
    >>> model(torch.ones(1, 4)).sum().backward(); opt.step(); opt.zero_grad()
    >>> model.weight
    Sharded(parameter 'weight', shape (2, 4), elements 0:8 of 8 here, torch.float32)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(got("module", type(module).__name__, "an nn.Module"))
    if shards_parameters(check_stage(stage)):
        cut(module)
    meshes = dict(mesh) if isinstance(mesh, Mapping) else {module: mesh}
    with during("zk.shard", of="zk.shard"):
        Sharding(
            module,
            stage=check_stage(stage),
            group=group_of(meshes.pop(module, None), module),
            apart={part: group_of(one, part) for part, one in meshes.items()},
            mp_policy=mp_policy,
            tier=tier,
            repeated=Repeated(keep, micro, replicated),
            units=units,
            bucket_bytes=bucket_bytes,
            reduce=reduce,
        )
    return module


def sharding_of(module: nn.Module) -> Sharding:
    """What zk.shard keeps of a module that it has sharded."""
    for param in module.parameters():
        home = home_of(param)
        if home is not None:
            return home.sharding
    raise StateError(f"{type(module).__name__} is not sharded; call zk.shard(model) first")


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate the gradients of the backward passes within on this rank; the first one outside reduces the sum.

    What it saves is a reduction of all gradients for each pass within; at stage 3 parameters are gathered all the same.
    What it costs from stage 2 on is memory for the whole gradients until that reduction. A step in between is refused.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(2, 1))
    >>> with zk.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model(torch.ones(1, 2)).sum().backward(); model.weight.grad.local
    tensor([2., 2.])
    """
    return sharding_of(model).no_sync()


def shards(model: nn.Module) -> list[nn.Parameter]:
    """This rank's span of each trained parameter, as 1-D parameters with `.grad`, in the order of `parameters()`.

    Any element-wise torch optimizer may step them; a span may be empty. All ranks step together: the step ends when
    each sees what the others wrote. From now on gradients appear here, and no longer as `.grad` of the model's
    parameters; `zk_name` is the name of the parameter. Clip by `zk.clip_grad_norm_(model, ...)`: torch's own would know
    this rank's spans alone, and is refused. What torch's GradScaler finds on one rank counts on all.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(2, 1))
    >>> opt = torch.optim.SGD(zk.shards(model), lr=1.0)
    >>> model(torch.ones(1, 2)).sum().backward(); opt.step()
    >>> [(piece.zk_name, piece.numel()) for piece in zk.shards(model)]
    [('weight', 2), ('bias', 1)]
    """
    pieces = {id(piece._zk_home): piece for piece in sharding_of(model).expose()}  # type: ignore[attr-defined]
    homes = [home_of(param) for param in model.parameters()]
    return [pieces[id(home)] for home in homes if home is not None and id(home) in pieces]


def build(fn: Callable[[], Module], *, device: torch.device | str | None = None, **shard_kwargs: Any) -> Module:
    """`zk.shard(fn(), **shard_kwargs)`, with the parameters of one unit in memory at a time.

    The same bits, from the same random numbers. `fn` runs once, as it is; what its operators compute is noted, and
    memory that has not been used for a while is emptied. It is computed again when somebody reads it, and, on every
    rank, when its unit is sharded. So a weight is initialised twice. What cannot be computed again (read from a file,
    looked at through numpy) stays in memory. Rank 0's values count. Parameters on the meta device get theirs by
    `reset_parameters`.

    >>> import torch, zerokern as zk
    >>> model = zk.build(lambda: torch.nn.Linear(4, 2), stage=3)
    >>> model.weight.shape
    torch.Size([2, 4])
    """
    settings: dict[str, Any] = {
        "stage": 2,
        "mesh": None,
        "mp_policy": None,
        "tier": "device",
        "keep": None,
        "micro": 1,
        "replicated": None,
        "units": None,
        "bucket_bytes": BUCKET_BYTES,
        "reduce": "mean",
    }
    if isinstance(fn, nn.Module):
        do = "zk.build(lambda: Model()) makes it from the start; zk.shard(model) takes one that is there"
        raise TypeError(got("fn", f"a {type(fn).__name__}", "a function without arguments that makes the model", do))
    unknown = sorted(set(shard_kwargs) - set(settings))
    if unknown:
        raise TypeError(f"zk.build got {', '.join(unknown)}; allowed: the keywords of zk.shard, and device")
    settings.update(shard_kwargs)
    stage = check_stage(settings.pop("stage"))
    mesh = settings.pop("mesh")
    if isinstance(mesh, Mapping):
        do = "build, then zk.shard(model, mesh={...}): modules have no names before they are there"
        raise TypeError(got("mesh", "a dict", "a mesh or None", do))
    repeated = Repeated(settings.pop("keep"), settings.pop("micro"), settings.pop("replicated"))
    with during("zk.build", of="zk.shard"):
        group = dividing_on(mesh, torch.get_default_device() if device is None else device)
    if isinstance(settings["tier"], Nvme) and group.device.type == "cpu":
        map_large()
    construction = Construction(group.device)
    module = construction.run(fn)
    if shards_parameters(stage):
        cut(module)
    with during("zk.build", of="zk.shard"):
        Sharding(module, stage=stage, group=group, repeated=repeated, materialize=construction.materialize, **settings)
    give_back()
    return module


@contextmanager
def gathered(module_or_params: nn.Module | Tensor | Iterable[Tensor], write: bool = False) -> Iterator[None]:
    """Within, the parameters are ordinary full tensors, on every rank; all ranks enter and leave together.

    What is taken from them (`state_dict()`, copies) stays valid afterwards. With `write=True` what was written into
    them is kept: each rank keeps its own span of what it wrote, so write the same on all of them. Without, it is
    dropped at stage 3, where they are copies.

    Gradients of what is computed with them are reduced, then or later. A model that is gathered whole computes without
    the other ranks, so one of them may evaluate or generate alone, and `copy.deepcopy` makes a plain model of it.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(2, 1, bias=False), stage=3)
    >>> with zk.gathered(model, write=True):
    ...     _ = torch.nn.init.ones_(model.weight)
    >>> model.weight.local
    tensor([1., 1.])
    """
    if isinstance(module_or_params, nn.Module):
        params = list(module_or_params.parameters())
    else:
        listed = [module_or_params] if isinstance(module_or_params, Tensor) else list(module_or_params)
        strangers = [one for one in listed if not isinstance(one, nn.Parameter)]
        if strangers:
            raise TypeError(got("module_or_params", type(strangers[0]).__name__, "a module, or parameters of one"))
        params = [one for one in listed if isinstance(one, nn.Parameter)]
    with whole(params, write):
        yield
