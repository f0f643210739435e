"""zk.shard, zk.no_sync, zk.shards, zk.build and zk.gathered: what users call around a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern.activations.recompute import Repeated
from zerokern.activations.tiles import cut
from zerokern.building.construction import Construction
from zerokern.comm import Group, during, sharding_group
from zerokern.core.errors import StateError, got
from zerokern.core.units import BUCKET_BYTES, Publish, Reduce, Stage, Tier
from zerokern.memory import TierConfig
from zerokern.memory.heap import mmap_large_blocks, trim_heap
from zerokern.memory.order import TierOrder
from zerokern.parallel.experts import groups_of
from zerokern.parallel.halves import refuse_half_backwards
from zerokern.zero.full_parameters import full_parameters
from zerokern.zero.partition import check_stage, shards_parameters
from zerokern.zero.shard import shard_of
from zerokern.zero.sharding import Sharding
from zerokern.zero.units import Units, Whole

__all__ = ["BUCKET_BYTES", "build", "gathered", "no_sync", "shard", "sharding_of", "shards"]

Module = TypeVar("Module", bound=nn.Module)


Meshes = DeviceMesh | Group | Mapping[nn.Module, DeviceMesh | Group] | None


def group_of(mesh: DeviceMesh | Group | None, module: nn.Module) -> Group:
    """The ranks that share a module."""
    param = next(iter(module.parameters()), None)
    return sharding_group(mesh, "cpu" if param is None or param.is_meta else param.device)


def shard(
    module: Module,
    *,
    stage: Stage = 2,
    mesh: Meshes = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    tier: Tier | TierConfig | Sequence[str | TierConfig] = "device",
    keep: Tier | TierConfig | Sequence[str | TierConfig] | None = None,
    micro: int = 1,
    replicated: DeviceMesh | Group | None = None,
    units: Units = None,
    bucket_bytes: int = BUCKET_BYTES,
    reduce: Reduce = "mean",
    whole: Whole = None,
    publish: Publish = "all",
) -> Module:
    """Shards optimizer state (stage 1), gradients (2) and parameters (3) among ranks, in place.

    The same module is returned. Its parameters keep their identity, names and shapes, and the training loop does not
    change. All ranks start from rank 0's values. If there is no process group, this process is the only rank.

    Args:
        module: any module. If `parallelize_module` has divided it, shard it over the other dimension of its mesh:
            `mesh=mesh["dp"]`. The local tensor of each DTensor is divided, plain parameters count as replicated along
            the tensor-parallel dimension, and norms cover the ranks of both dimensions.
        stage: 0 (each rank has everything; gradients are averaged), 1, 2 or 3.
        mesh: the ranks; by default those of the default process group. A mesh of two dimensions is `(replicate,
            shard)`, as in FSDP2: everything is divided along the second, and gradients are then summed along the first.
            `mesh["dp", "cp"]._flatten()` makes one dimension of several. For mixtures of experts it is a dict, `{model:
            mesh["dp"], block.experts: sparse["efsdp"]}`: the parameters of `block.experts`, DTensors along
            `sparse["ep"]`, are sharded over ranks of their own. The model's own entry may be left out. Such a module
            must compute on every rank, even one that gets no tokens.
        mp_policy: FSDP2's `MixedPrecisionPolicy`. `param_dtype` becomes the dtype of the parameters; the optimizer gets
            the fp32 values that they had, exactly.
        tier: where shards rest at stage 3. `zk.Nvme(path)`: in a folder below `path`; a unit is read before it
            computes, and host memory holds only the units at work and gradients. "cpu", for a model on a GPU: shards
            and reduced gradients lie in pinned host memory, so `param.device` is the CPU. Each unit is copied to the
            GPU one ahead of its turn, and the update runs on the host, whatever the optimizer's tier. `zk.Nvme(path)`
            for a model on a GPU works the same way, through a pinned ring of `ring_nbytes`. A list is filled in its
            order: `["device:2GiB", "cpu:16GiB", zk.Nvme(path)]`; a budget is bytes of shards that one rank keeps there.
            Each bucket goes to the first tier that has room for all of it, in the order of the forward.
        keep: units keep only their inputs until backward, in this place ("device", "cpu", `zk.Nvme(path)`), and compute
            the rest again. In a list, such as `["device:2GiB", "cpu:8GiB", zk.Nvme(path)]`, the latest inputs are in
            the first tier: where its budget is full, the oldest there move on to the next. A budget is bytes of
            inputs that one rank keeps there for this model. See `zk.recompute`.
        micro: units compute in this many slices of the batch, so that the activations of one slice are alive at a time.
            Forward hooks of modules in a unit run once for each slice; what they or an attribute keep of a slice is
            refused in a loss. See `zk.recompute`.
        replicated: a mesh dimension whose ranks have the same inputs, as in tensor parallelism. Each rank keeps its
            part of the inputs. `micro` above 1, or `replicated` alone, implies `keep="device"`. Of nested units the
            outermost counts; the root never does.
        units: what stage 3 gathers together: modules, or a function that decides for each module. By default the
            children of `ModuleList`s; everything else belongs to the root. `units=lambda module: isinstance(module,
            Block)` chooses by class, as for a `Sequential`.
        bucket_bytes: the most that one collective moves, unless a single parameter is larger.
        reduce: gradients become the "mean" over the ranks, or their "sum" for losses that are divided by the tokens of
            all ranks.
        whole: matrices that are updated whole: parameters, patterns of their names, or the param_groups that
            `zk.muon_groups` proposes. At stages 1 and 2 each lies on one rank, and the ranks have equally many elements
            and equally much to compute, as far as the shapes allow. Their buckets are as large as that takes: equal
            matrices go together, one for each rank.
        publish: what ranks send each other of updated parameters at stages 1 and 2: "all" of them, or as a "delta" the
            elements whose bits an update has changed, bucket by bucket, where that is less. Parameters have the same
            bits. At learning rates of fine-tuning most bf16 values keep theirs in a step. Ranks do so for parameters
            on a CPU; on a GPU, at every stage, it is what the host sends up that has updated them (`tier="cpu"`).

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(4, 2), stage=3)
    >>> opt = zk.AdamW(model.parameters(), lr=1e-2)
    >>> model(torch.ones(1, 4)).sum().backward(); opt.step(); opt.zero_grad()
    >>> model.weight
    Sharded(parameter 'weight', shape (2, 4), all 8 elements, torch.float32)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(got("module", type(module).__name__, "an nn.Module"))
    if shards_parameters(check_stage(stage)):
        cut(module)
    meshes = dict(mesh) if isinstance(mesh, Mapping) else {module: mesh}
    with during("zk.shard", of="zk.shard"):
        group = group_of(meshes.pop(module, None), module)
        apart = {part: group_of(one, part) for part, one in meshes.items()}
        sharding = Sharding(
            module,
            stage=check_stage(stage),
            group=group,
            mp_policy=mp_policy,
            tier=tier,
            wrapper=Repeated(keep, micro, replicated),
            units=units,
            bucket_bytes=bucket_bytes,
            reduce=reduce,
            groups=partial(groups_of, apart=apart),
            whole=whole,
            publish=publish,
        )
        refuse_half_backwards(sharding)
    return module


def sharding_of(module: nn.Module) -> Sharding:
    """What zk.shard keeps of a module that it has sharded."""
    for param in module.parameters():
        home = shard_of(param)
        if home is not None:
            return home.sharding
    raise StateError(f"{type(module).__name__} is not sharded; call zk.shard(model) first")


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Context manager in which gradients add up on each rank; the next backward pass outside of it reduces the sum.

    This saves one reduction of all gradients for each pass in the block. Stage 3 still gathers parameters. From stage 2
    on it costs memory for whole gradients until the reduction. On several ranks an optimizer step before the reduction
    is refused.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(2, 1))
    >>> with zk.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model(torch.ones(1, 2)).sum().backward(); model.weight.grad.local
    tensor([2., 2.])
    """
    return sharding_of(model).no_sync()


def shards(model: nn.Module) -> list[nn.Parameter]:
    """Returns this rank's shard of each trained parameter: 1-D parameters with `.grad`, in the order of `parameters()`.

    Any element-wise torch optimizer can step them. A part may be empty. All ranks must step together: the step ends
    when each rank sees what the others wrote. After this call gradients appear on these parts, no longer on the model's
    parameters. `zk_name` is the name of the parameter. Clip with `zk.clip_grad_norm_(model, ...)`; torch's own function
    would see one rank only, and is refused. What torch's GradScaler finds on one rank counts on all.

    >>> import torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(2, 1))
    >>> opt = torch.optim.SGD(zk.shards(model), lr=1.0)
    >>> model(torch.ones(1, 2)).sum().backward(); opt.step()
    >>> [(piece.zk_name, piece.numel()) for piece in zk.shards(model)]
    [('weight', 2), ('bias', 1)]
    """
    pieces = {id(shard_of(piece)): piece for piece in sharding_of(model).expose()}
    homes = [shard_of(param) for param in model.parameters()]
    return [pieces[id(home)] for home in homes if home is not None and id(home) in pieces]


def build(fn: Callable[[], Module], *, device: torch.device | str | None = None, **shard_kwargs: Any) -> Module:
    """`zk.shard(fn(), **shard_kwargs)` for a model that does not fit into memory: it exists one unit at a time.

    Values and random numbers are those of `fn()`. `fn` runs once, unchanged. The operations that it runs are recorded,
    and memory that has not been used for a while is given back. A value is computed again when somebody reads it, and
    when its unit is sharded, so each weight is initialised twice. What cannot be computed again, such as values read
    from a file or through numpy, stays in memory. Rank 0's values count. Parameters on the meta device are filled by
    the `reset_parameters` of their module.

    >>> import torch, zerokern as zk
    >>> model = zk.build(lambda: torch.nn.Linear(4, 2), stage=3)
    >>> model.weight.shape
    torch.Size([2, 4])
    """
    keywords = inspect.signature(shard).parameters.values()
    settings = {one.name: one.default for one in keywords if one.kind is one.KEYWORD_ONLY}
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
        group = sharding_group(mesh, torch.get_default_device() if device is None else device)
    if TierOrder.of("tier", settings["tier"]).config is not None and group.device.type == "cpu":
        mmap_large_blocks()
    construction = Construction(group.device)
    module = construction.run(fn)
    if shards_parameters(stage):
        cut(module)
    with during("zk.build", of="zk.shard"):
        build = construction.materialize
        sharding = Sharding(module, stage=stage, group=group, wrapper=repeated, materialize=build, **settings)
        refuse_half_backwards(sharding)
    trim_heap()
    return module


@contextmanager
def gathered(module_or_params: nn.Module | Tensor | Iterable[Tensor], write: bool = False) -> Iterator[None]:
    """Context manager in which parameters are full tensors on every rank. All ranks enter and leave together.

    Tensors taken from them, by `state_dict()` or a copy, stay valid afterwards. With `write=True` what is written into
    the parameters is kept; each rank keeps its own part of it, so all ranks must write the same values. Parameters
    that no operation wrote to, and whose bits are the same, keep their masters, remainders and pending updates. Without
    it, writes are lost at stage 3, where the parameters are copies.

    A backward pass works inside the block, and gradients are reduced as usual. Once the whole model is gathered, a rank
    computes without the others: one rank may evaluate or generate alone, and `copy.deepcopy` makes a plain model.

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
    with full_parameters(params, write):
        yield
