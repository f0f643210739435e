"""torchtitan trains with zerokern: a TrainSpec whose optimizers are replaced, and whose models `zk.shard` shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

try:
    from torchtitan.components.optimizer import (
        FTOptimizersContainer,
        OptimizersContainer,
        OptimizersInBackwardContainer,
    )
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed import pipeline_parallel, utils
    from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
    from torchtitan.tools.utils import device_type
except ImportError as error:
    raise ImportError(
        "zerokern.integrations.torchtitan stands on the TrainSpec of torchtitan 0.2, which later ones do not have; "
        "allowed: pip install 'torchtitan>=0.2.2,<0.3', or with 0.3, for the optimizer alone, "
        "--override.imports zerokern.examples.torchtitan_override.optimizers"
    ) from error

import zerokern as zk
from zerokern.comm import Group
from zerokern.core.errors import StateError, got, warn
from zerokern.integrations.sharded_model import check_settings
from zerokern.optim.base import FusedOptimizer
from zerokern.zero.kinds import is_placed
from zerokern.zero.partition import check_stage, shards_parameters
from zerokern.zero.shard import shard_of

__all__ = ["exchanged", "train_spec", "use"]

KINDS: dict[type, type[FusedOptimizer]] = {torch.optim.AdamW: zk.AdamW, torch.optim.Adam: zk.Adam}
KEPT = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}
OF_MUON = {"lr", "weight_decay", "maximize"}  # of these, what is the same for Muon
ALONE = (
    "data_parallel_replicate_degree alone makes copies: each rank has all of the model's state (stage 0), where "
    "stage={stage} was asked for. data_parallel_shard_degree is what zk.shard shards along"
)
Options = Callable[[str, Tensor], dict[str, Any]]  # of one parameter, by its name in the model
torchtitans_clip = utils.clip_grad_norm_


def use(
    model: str,
    options: Options | None = None,
    *,
    stage: int | None = None,
    shard: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Makes torchtitan train this model with `zk.AdamW(**settings)`; the rest of it and the configuration stay.

    Call it in a module of your own that `--experimental.custom_import` names: torchtitan imports it before it looks
    for the model. `options` returns what is different for some parameters, such as those too small for int8.

    `stage`: `zk.shard` shards the model in the place of FSDP2 or DDP, along the dimensions that they would divide it
    along (`data_parallel_shard_degree` times `context_parallel_degree`; `data_parallel_replicate_degree` makes copies);
    tensor, context and pipeline parallelism, activation checkpointing and compile are torchtitan's. `shard` has more
    keywords of `zk.shard`: `{"tier": "cpu"}`. None: FSDP2 divides it.

    `options` that return `{"rule": "muon"}` give a parameter to `zk.Muon`, with rate and weight decay of torchtitan's
    [optimizer], and more keywords of Muon's groups beside it (`adjust_lr_fn="match_rms_adamw"`, with which AdamW's
    rates fit, `split`). At stages 1 and 2 these matrices are also named in `shard={"whole": [...]}`.

    >>> def options(name, param):
    ...     return {} if param.ndim > 1 else {"state_format": "fp32", "weight_decay": 0.0}
    >>> use("llama3", options, stage=3, tier="cpu", state_format="int8")
    """
    register_train_spec(model, train_spec(get_train_spec(model), options, stage=stage, shard=shard, **settings))


def train_spec(
    spec: TrainSpec,
    options: Options | None = None,
    *,
    stage: int | None = None,
    shard: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrainSpec:
    """Returns the TrainSpec with the optimizers that it builds replaced; the hooks that it has put on them stay.

    `stage` and `shard`: as `use` has them.

    >>> spec = train_spec(get_train_spec("qwen3"), tier="cpu")
    >>> spec.model_cls.__name__
    'Qwen3Model'
    """
    check_settings(
        settings,
        "The rate, betas, eps and weight decay come from torchtitan's [optimizer]; it clips by training.max_norm",
    )
    built: Callable[..., OptimizersContainer] = spec.build_optimizers_fn

    def build_optimizers(*arguments: Any, **keywords: Any) -> OptimizersContainer:
        return exchanged(built(*arguments, **keywords), options, **settings)

    changed: dict[str, Any] = {"build_optimizers_fn": build_optimizers}
    if stage is not None:
        changed["parallelize_fn"] = parallelized(spec.parallelize_fn, check_stage(stage), dict(shard or {}))
        if spec.pipelining_fn is not None:
            changed["pipelining_fn"] = pipelined(spec.pipelining_fn)
    elif shard:
        raise ValueError(got("shard", dict(shard), "None where zk.shard does not shard the model", "Say stage= too"))
    return dataclasses.replace(spec, **changed)


def exchanged(container: OptimizersContainer, options: Options | None = None, **settings: Any) -> OptimizersContainer:
    """Replaces each of torch's optimizers in a container by one of zerokern, before any of them has stepped.

    Step, clipping, schedulers, hooks and checkpoints are torchtitan's own and know the container only.

    >>> model = torch.nn.Linear(2, 1)
    >>> container = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1})
    >>> [opt] = exchanged(container, tier="cpu")
    >>> type(opt).__name__, opt.tier, opt.param_groups[0]["weight_decay"]
    ('AdamW', 'cpu', 0.1)
    """
    if isinstance(container, OptimizersInBackwardContainer):
        do = "zk.AdamW(schedule='overlap') fetches gradients during backward, and still clips"
        raise ValueError(got("optimizer.early_step_in_backward", True, "False with zerokern", do))
    if isinstance(container, FTOptimizersContainer):
        raise ValueError(got("fault_tolerance.enable", True, "False with zerokern: torchft keeps copies of its own"))
    names = {param: name for part in container.model_parts for name, param in part.named_parameters()}
    container.optimizers = [_replacement(optimizer, names, options, settings) for optimizer in container.optimizers]
    container._zk_shards = True  # it is an Optimizer itself, whose step is that of ours
    return container


def _replacement(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], options: Options | None, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    kind = KINDS.get(type(optimizer))
    if kind is None:
        raise ValueError(got("optimizer.name", type(optimizer).__name__, "AdamW or Adam"))
    if optimizer.state:
        raise StateError(f"this {type(optimizer).__name__} has stepped; exchange it before, where it is built")
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], kind.__name__.lower(): []}
    for group in optimizer.param_groups:
        parts: list[tuple[dict[str, Any], list[Tensor]]] = []  # parameters by their own options
        for param in group["params"]:
            own = {} if options is None else options(names[param], param)
            alike = next((params for others, params in parts if others == own), None)
            if alike is None:
                parts.append((own, [param]))
            else:
                alike.append(param)
        for own, params in parts:
            rule = own.get("rule", kind.__name__.lower())
            if rule not in groups:
                raise ValueError(got("rule", rule, " or ".join(groups)))
            kept = {name: group[name] for name in (OF_MUON if rule == "muon" else KEPT) if name in group}
            rest = {name: value for name, value in own.items() if name != "rule"}
            groups[rule].append({**kept, **rest, "params": params})
    kinds: dict[str, type[FusedOptimizer]] = {"muon": zk.Muon, kind.__name__.lower(): kind}
    made = [kinds[rule](mine, **settings) for rule, mine in groups.items() if mine]
    return made[0] if len(made) == 1 else zk.ChainedOptimizer(made)


def parallelized(build: Callable[..., nn.Module], stage: int, shard: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Wraps a parallelize_fn, which then leaves data parallelism to `zk.shard`."""

    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        check(job_config, stage)
        if utils.clip_grad_norm_ is torchtitans_clip:
            utils.clip_grad_norm_ = clip
        model = build(model, _WithoutDataParallel(parallel_dims), job_config, *args, **kwargs)
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise StateError(
                "this model's parallelize_fn has called fully_shard; leave stage= out, and FSDP2 shards it"
            )
        _shard(model, parallel_dims, job_config, stage, shard)
        return model

    return parallelize


def pipelined(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a pipelining_fn, which then makes stages of `zk.PipelineStage`."""

    def pipeline(model: nn.Module, parallel_dims: Any, job_config: Any, *args: Any, **kwargs: Any) -> Any:
        whole = {"always": False, "never": True}.get(job_config.parallelism.fsdp_reshard_after_forward)
        with _pipeline_stages(whole) as made:
            built = build(model, parallel_dims, job_config, *args, **kwargs)
        if not made:
            raise StateError(
                "this model's pipelining_fn makes stages of its own; let it call torchtitan's pipeline_llm"
            )
        return built

    return pipeline


@contextmanager
def _pipeline_stages(whole: bool | None) -> Iterator[list[Any]]:
    """Context manager in which torchtitan's pipeline makes stages of `zk.PipelineStage`; yields them."""
    made: list[Any] = []

    @functools.wraps(zk.PipelineStage, updated=())
    def stage(*args: Any, **kwargs: Any) -> Any:
        made.append(zk.PipelineStage(*args, **kwargs, whole=whole))
        return made[-1]

    before = pipeline_parallel.PipelineStage
    pipeline_parallel.PipelineStage = stage
    try:
        yield made
    finally:
        pipeline_parallel.PipelineStage = before


def check(job_config: Any, stage: int) -> None:
    """Raises where something is asked of FSDP2 alone, or of parts that know nothing of `zk.shard`."""
    parallelism, training = job_config.parallelism, job_config.training
    reshard = parallelism.fsdp_reshard_after_forward
    refused = [
        ("model.converters", job_config.model.converters, [], "float8 and the like exchange modules and gathers"),
        ("parallelism.enable_async_tensor_parallel", parallelism.enable_async_tensor_parallel, False, ""),
        ("parallelism.expert_parallel_degree", parallelism.expert_parallel_degree, 1, ""),
        ("training.enable_cpu_offload", training.enable_cpu_offload, False, "use(..., shard={'tier': 'cpu'}) does it"),
        ("optimizer.early_step_in_backward", job_config.optimizer.early_step_in_backward, False, ""),
    ]
    for name, given, allowed, do in refused:
        if given != allowed:
            raise ValueError(got(name, given, f"{allowed} with zk.shard", do))
    if reshard == "never" and shards_parameters(stage) and parallelism.pipeline_parallel_degree == 1:
        do = "use(..., stage=2) keeps parameters whole"
        raise ValueError(got("parallelism.fsdp_reshard_after_forward", reshard, "default or always at stage 3", do))


class _WithoutDataParallel:
    """ParallelDims that hide the dimensions that `zk.shard` shards along from a parallelize_fn."""

    fsdp_enabled = dp_replicate_enabled = dp_shard_enabled = dp_enabled = False

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def _shard(model: nn.Module, dims: Any, job_config: Any, stage: int, shard: Mapping[str, Any]) -> None:
    """Gives the model's parameters their values, one unit at a time unless there are DTensors, and divides them."""
    training, device = job_config.training, torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    # reduce: torchtitan divides losses by all tokens itself
    settings: dict[str, Any] = {"stage": stage, "units": _units(model), "reduce": "sum"}
    if dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
        param, reduce = (
            TORCH_DTYPE_MAP[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce)
        )
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        settings |= {"mesh": dims.get_mesh(names), "mp_policy": policy}
    elif dims.dp_replicate_enabled:
        settings |= {"mesh": dims.get_mesh("dp_replicate"), "stage": 0}  # copies are what was asked for
        if stage:
            warn(ALONE.format(stage=stage))
    else:
        settings["mesh"] = Group(0, 1, device, "alone")
    settings |= shard
    has_dtensors = any(map(is_placed, model.parameters()))

    def with_values() -> nn.Module:
        if has_dtensors:
            model.to_empty(device=device)
        else:  # as to_empty, in operators that zk.build can do again
            model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        with torch.no_grad():
            model.init_weights(buffer_device=None)  # type: ignore[operator]
        return model

    if has_dtensors:
        zk.shard(with_values(), **settings)
    else:
        zk.build(with_values, device=device, **settings)
    for name in ("to_empty", "init_weights"):
        _skip_next_call(model, name)


def _units(model: nn.Module) -> list[nn.Module] | None:
    """Returns blocks, embeddings and output, as torchtitan's apply_fsdp has them; None leaves the choice to
    `zk.shard`."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict | nn.ModuleList):
        return None
    ends = [getattr(model, name, None) for name in ("tok_embeddings", "output")]
    return [*layers.children(), *(end for end in ends if end is not None)]


def _skip_next_call(model: nn.Module, name: str) -> None:
    """Makes the next call of a method do nothing: the Trainer calls it for what has its values already."""

    def nothing(*_: Any, **__: Any) -> nn.Module:
        del model.__dict__[name]
        return model

    model.__dict__[name] = nothing


def clip(parameters: Any, max_norm: float, *args: Any, pp_mesh: Any = None, **kwargs: Any) -> Tensor:
    """Clips as torchtitan does, and gradients of `zk.shard` by `zk.clip_grad_norm_`."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not any(shard_of(param) is not None for param in params):
        return torchtitans_clip(params, max_norm, *args, pp_mesh=pp_mesh, **kwargs)
    kwargs.pop("ep_enabled", None)
    return zk.clip_grad_norm_(params, max_norm, *args, **kwargs, group=pp_mesh)
