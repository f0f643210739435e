"""zk.shard in the place of torchtitan's FSDP2 and DDP: its own parallelize_fn and pipelining_fn, and us after them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import pipeline_parallel, utils
from torchtitan.tools.utils import device_type

import zerokern as zk
from zerokern.comm import Group
from zerokern.core.errors import StateError, got
from zerokern.zero import shard_of
from zerokern.zero.kinds import is_placed
from zerokern.zero.partition import shards_parameters

__all__ = ["check", "parallelized", "pipelined"]

ALONE = (
    "data_parallel_replicate_degree alone makes copies: each rank has all of the model's state (stage 0), where "
    "stage={stage} was asked for. data_parallel_shard_degree is what zk.shard divides along"
)
clip_theirs = utils.clip_grad_norm_


def parallelized(build: Callable[..., nn.Module], stage: int, shard: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """That parallelize_fn, for tensor and context parallelism, checkpointing and compile; zk.shard divides the rest."""

    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        check(job_config, stage)
        if utils.clip_grad_norm_ is clip_theirs:
            utils.clip_grad_norm_ = clip
        model = build(model, _Undivided(parallel_dims), job_config, *args, **kwargs)
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise StateError(
                "this model's parallelize_fn has called fully_shard; leave stage= out, and FSDP2 divides it"
            )
        _divide(model, parallel_dims, job_config, stage, shard)
        return model

    return parallelize


def pipelined(build: Callable[..., Any]) -> Callable[..., Any]:
    """That pipelining_fn, with zk.PipelineStage for torch's."""

    def pipeline(model: nn.Module, parallel_dims: Any, job_config: Any, *args: Any, **kwargs: Any) -> Any:
        whole = {"always": False, "never": True}.get(job_config.parallelism.fsdp_reshard_after_forward)
        with _stages_of_ours(whole) as made:
            found = build(model, parallel_dims, job_config, *args, **kwargs)
        if not made:
            raise StateError(
                "this model's pipelining_fn makes stages of its own; let it call torchtitan's pipeline_llm"
            )
        return found

    return pipeline


def check(job_config: Any, stage: int) -> None:
    """Raises what is asked of FSDP2 alone, or of parts that know nothing of zk.shard."""
    parallelism, training = job_config.parallelism, job_config.training
    reshard = parallelism.fsdp_reshard_after_forward
    refused = [
        ("model.converters", job_config.model.converters, [], "float8 and the like exchange modules and gathers"),
        ("parallelism.enable_async_tensor_parallel", parallelism.enable_async_tensor_parallel, False, ""),
        ("parallelism.expert_parallel_degree", parallelism.expert_parallel_degree, 1, ""),
        ("training.enable_cpu_offload", training.enable_cpu_offload, False, "use(..., shard={'tier': 'cpu'}) does it"),
        ("optimizer.early_step_in_backward", job_config.optimizer.early_step_in_backward, False, ""),
    ]
    for name, found, allowed, do in refused:
        if found != allowed:
            raise ValueError(got(name, found, f"{allowed} with zk.shard", do))
    if reshard == "never" and shards_parameters(stage) and parallelism.pipeline_parallel_degree == 1:
        do = "use(..., stage=2) keeps parameters whole"
        raise ValueError(got("parallelism.fsdp_reshard_after_forward", reshard, "default or always at stage 3", do))


class _Undivided:
    """What a parallelize_fn is told of the dimensions: all, but for those that zk.shard divides along."""

    fsdp_enabled = dp_replicate_enabled = dp_shard_enabled = dp_enabled = False

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def _divide(model: nn.Module, dims: Any, job_config: Any, stage: int, shard: Mapping[str, Any]) -> None:
    """Values for the model's parameters, one unit at a time where no DTensor is among them, divided at once."""
    training, device = job_config.training, torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    settings: dict[str, Any] = {
        "stage": stage,
        "units": _units(model),
        "reduce": "sum",
    }  # losses: divided by all tokens
    if dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
        dtypes = training.mixed_precision_param, training.mixed_precision_reduce
        param, reduce = (TORCH_DTYPE_MAP[name] for name in dtypes)
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        settings |= {"mesh": dims.get_mesh(names), "mp_policy": policy}
    elif dims.dp_replicate_enabled:
        settings |= {"mesh": dims.get_mesh("dp_replicate"), "stage": 0}  # copies are what was asked for
        if stage:
            warnings.warn(ALONE.format(stage=stage), stacklevel=2)
    else:
        settings["mesh"] = Group(0, 1, device, "alone")
    settings |= shard

    def made() -> nn.Module:
        if not any(map(is_placed, model.parameters())):  # as to_empty, in operators that zk.build can do again
            model._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device))
        else:
            model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)  # type: ignore[operator]
        return model

    if any(map(is_placed, model.parameters())):
        zk.shard(made(), **settings)
    else:
        zk.build(made, device=device, **settings)
    for name in ("to_empty", "init_weights"):
        _once(model, name)


def _units(model: nn.Module) -> list[nn.Module] | None:
    """Blocks, embeddings and output, as torchtitan's apply_fsdp has them; None: zk.shard's own choice."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict | nn.ModuleList):
        return None
    ends = [getattr(model, name, None) for name in ("tok_embeddings", "output")]
    return [*layers.children(), *(end for end in ends if end is not None)]


def _once(model: nn.Module, name: str) -> None:
    """The next call of a method does nothing: the Trainer calls it for what has its values already."""

    def nothing(*_: Any, **__: Any) -> nn.Module:
        del model.__dict__[name]
        return model

    model.__dict__[name] = nothing


def clip(parameters: Any, max_norm: float, *args: Any, pp_mesh: Any = None, **kwargs: Any) -> Tensor:
    """torchtitan's clip_grad_norm_, which leaves parameters of zk.shard to zk.clip_grad_norm_."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not any(shard_of(param) is not None for param in params):
        return clip_theirs(params, max_norm, *args, pp_mesh=pp_mesh, **kwargs)
    kwargs.pop("ep_enabled", None)
    return zk.clip_grad_norm_(params, max_norm, *args, **kwargs, group=pp_mesh)


@contextmanager
def _stages_of_ours(whole: bool | None) -> Iterator[list[Any]]:
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
