"""What a model consists of on this rank: named spans of memory, whoever divided it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.core.errors import got
from zerokern.saving.naming import WRAPPERS
from zerokern.zero.homes import home_of
from zerokern.zero.kinds import here_of, is_divided, local_of, shardings_of

__all__ = [
    "NamedSpan",
    "aliases",
    "extra_states",
    "named_tensors",
    "refuse_meta",
    "settle",
    "spans",
    "wrote",
]

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass
class NamedSpan:
    """Elements [start, start + numel) of a named tensor, which are `flat` on this rank: 1-D, a view to read and write.

    A tensor has several where what is here of it is not consecutive (a DTensor that is divided by columns).
    """

    name: str
    param: Tensor
    shape: torch.Size
    dtype: torch.dtype
    start: int
    numel: int
    flat: Tensor


def spans(model: nn.Module) -> list[NamedSpan]:
    """Every parameter and persistent buffer as far as it is here, tied ones once. Waits for updates under way.

    >>> [(one.name, one.start, one.numel) for one in spans(nn.Linear(3, 2))]
    [('weight', 0, 6), ('bias', 0, 2)]
    """
    settle(model)
    return [span for name, tensor in named_tensors(model).items() for span in _spans_of(name, tensor)]


def _spans_of(name: str, tensor: Tensor) -> Iterator[NamedSpan]:
    refuse_meta(name, tensor)
    shape, dtype, here, local = tensor.shape, tensor.dtype, here_of(tensor), local_of(tensor).detach()
    if not local.is_contiguous():
        do = "make it contiguous before: tensor.data = tensor.data.contiguous()"
        raise ValueError(got(f"the strides of {name}", tuple(local.stride()), "those of a contiguous tensor", do))
    flat = local.view(-1)
    for start, numel, first in here.runs() or [(here.first, 0, 0)]:
        yield NamedSpan(name, tensor, shape, dtype, start, numel, flat[first : first + numel])


def refuse_meta(name: str, tensor: Tensor) -> None:
    """A tensor without memory can be neither read nor written.

    >>> refuse_meta("weight", torch.ones(2))
    """
    if tensor.is_meta:
        do = "give it memory first: zk.build(constructor) makes a model that is partitioned from the start"
        raise ValueError(got(f"the device of {name}", tensor.device, "a device that has memory", do))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once and under its first name, without what wrappers add to it.

    >>> list(named_tensors(nn.BatchNorm1d(2)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    known: set[int] = set()
    made: dict[str, Tensor] = {}
    for name, tensor in _named(model):
        if id(tensor) not in known:
            known.add(id(tensor))
            made[name] = tensor
    return made


def aliases(model: nn.Module) -> dict[str, str]:
    """The other names of tied parameters and buffers, and the first name of each.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)); model[1].weight = model[0].weight
    >>> aliases(model)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    return {name: known for name, tensor in _named(model) if (known := first.setdefault(id(tensor), name)) != name}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, under every name that they have."""
    modules = list(_modules(model))
    for prefix, module in modules:
        yield from ((prefix + name, param) for name, param in module._parameters.items() if param is not None)
    for prefix, module in modules:
        kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        yield from ((prefix + name, buffer) for name in kept if (buffer := module._buffers[name]) is not None)


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with the prefix of its members' names; wrappers add nothing to it."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            transparent = name in WRAPPERS or (name == "module" and isinstance(module, _PARALLEL))
            yield from _modules(child, prefix if transparent else f"{prefix}{name}.")


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep more than tensors (`get_extra_state`), by the name that a state_dict has for it.

    >>> extra_states(nn.Linear(2, 2))
    {}
    """
    own = nn.Module.get_extra_state
    return {f"{at}_extra_state": one for at, one in _modules(model) if type(one).get_extra_state is not own}


def settle(model: nn.Module) -> None:
    """Returns once the parameters are those of the last step; to be called before they are read or written.

    >>> settle(nn.Linear(2, 2))
    """
    for sharding in shardings_of(map(home_of, named_tensors(model).values())):
        sharding.publisher.finish()


@torch.no_grad()
def wrote(model: nn.Module, exact: Mapping[str, Any] | None = None) -> None:
    """Account for writes into the spans of a model: what optimizers keep of parameters begins anew, graphs end.

    `exact`: by name, what the dtypes have just rounded away of whole spans under zk.shard: fp32 values, or a
    remainder (`zerokern.kernels.split`) for bf16. Masters of optimizers begin with it.

    >>> model = nn.Linear(2, 2); spans(model)[0].flat.zero_(); wrote(model)
    tensor([0., 0., 0., 0.])
    """
    named = named_tensors(model)
    written: list[Tensor] = []
    for tensor in named.values():
        written.append(tensor)
        if is_divided(tensor):
            written.append(local_of(tensor))
    torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])
    for sharding in shardings_of(map(home_of, named.values())):
        if sharding.gatherer is not None:
            sharding.gatherer.settle()
        sharding.publisher.announce()
    for name, lost in (exact or {}).items():
        home = home_of(named[name])
        if home is not None and lost is not None:
            mine = lost if is_divided(named[name]) else home.here.cut(lost.reshape(home.shape))
            home.look(named[name])
            home.keep_initial(mine.clone())
