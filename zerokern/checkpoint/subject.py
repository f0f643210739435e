"""What is saved, and what is loaded into: a model and its optimizers, by name, whoever divided them."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.activations.tiles import Cut
from zerokern.checkpoint.optimizers import Steps, plain, steps_of
from zerokern.checkpoint.stages import Stages
from zerokern.checkpoint.storage import OnDiskPart
from zerokern.checkpoint.tiles import TilePart, in_order, told_once
from zerokern.core.errors import StateError, got
from zerokern.interop.naming import WRAPPERS
from zerokern.optim.exchange import Column
from zerokern.zero.kinds import here_of, is_divided, local_of, present, shardings_of
from zerokern.zero.shard import here_of_state, shard_of

__all__ = [
    "NamedSpan",
    "Subject",
    "aliases",
    "extra_states",
    "named_tensors",
    "parts_of",
    "refuse_meta",
    "settle",
    "spans",
    "wrote",
]

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass
class NamedSpan:
    """Elements [start, start + numel) of a named tensor, which are on this rank from element `first` of it on.

    A tensor has several where what is here of it is not consecutive (a DTensor that is divided by columns). `before`:
    how many elements of it lie before those of `tensor`, which is the rows of a tile.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    numel: int
    tensor: Tensor
    first: int
    before: int = 0

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return local_of(self.tensor).device

    @contextmanager
    def opened(self, *, written: bool = False) -> Iterator[Tensor]:
        """A view of them, 1-D, to read, or to write."""
        with present(self.tensor, written=written):
            yield local_of(self.tensor).detach().view(-1)[self.first : self.first + self.numel]


def spans(model: nn.Module) -> list[NamedSpan]:
    """Every parameter and persistent buffer as far as it is here, tied ones once. Waits for updates under way."""
    settle(model)
    parts = parts_of(model)
    return [span for name, tensor in named_tensors(model).items() for span in _spans_of(name, tensor, parts.get(name))]


def _spans_of(name: str, tensor: Tensor, part: TilePart | None) -> Iterator[NamedSpan]:
    refuse_meta(name, tensor)
    whole, shape, before = (name, tensor.shape, 0) if part is None else (part.whole, part.shape, part.begin)
    dtype, here, local = tensor.dtype, here_of(tensor), local_of(tensor).detach()
    if not local.is_contiguous():
        do = "make it contiguous before: tensor.data = tensor.data.contiguous()"
        raise ValueError(got(f"the strides of {name}", tuple(local.stride()), "those of a contiguous tensor", do))
    for start, numel, first in here.runs() or [(here.first, 0, 0)]:
        yield NamedSpan(whole, shape, dtype, before + start, numel, tensor, first, before)


def refuse_meta(name: str, tensor: Tensor) -> None:
    """A tensor without memory can be neither read nor written."""
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


def parts_of(model: nn.Module) -> dict[str, TilePart]:
    """The parameters that are rows of a tiled weight, by name; others know the weight.

    >>> parts_of(nn.Linear(2, 2))
    {}
    """
    made: dict[str, TilePart] = {}
    for prefix, module in _modules(model):
        if isinstance(module, Cut):
            first, shape = 0, torch.Size((module.out_features, module.in_features))
            for number, piece in enumerate(module.pieces):
                made[f"{prefix}tiles.{number}.weight"] = TilePart(f"{prefix}weight", first, shape, piece.shape)
                first += len(piece)
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
            transparent = transparent or isinstance(module, Stages)
            yield from _modules(child, prefix if transparent else f"{prefix}{name}.")


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep more than tensors (`get_extra_state`), by the name that a state_dict has for it.

    >>> extra_states(nn.Linear(2, 2))
    {}
    """
    own = nn.Module.get_extra_state
    return {f"{at}_extra_state": one for at, one in _modules(model) if type(one).get_extra_state is not own}


def settle(model: nn.Module, *, replaced: bool = False) -> None:
    """Returns once the parameters are those of the last step; to be called before they are read or written.

    `replaced`: they are about to be, so that an update which failed does not matter.
    """
    for sharding in shardings_of(map(shard_of, named_tensors(model).values())):
        sharding.publisher.complete()
        if replaced:
            sharding.publisher.failure = None
        sharding.publisher.finish()


@torch.no_grad()
def wrote(model: nn.Module) -> None:
    """Account for writes into the spans of a model: what optimizers keep of parameters begins anew, graphs end.

    >>> model = nn.Linear(2, 2)
    >>> with spans(model)[0].opened(written=True) as flat:
    ...     _ = flat.zero_()
    >>> wrote(model); model.weight.sum().item()
    0.0
    """
    named = named_tensors(model)
    written: list[Tensor] = []
    for tensor in named.values():
        written.append(tensor)
        if is_divided(tensor):
            written.append(local_of(tensor))
    torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])
    for sharding in shardings_of(map(shard_of, named.values())):
        if sharding.gatherer is not None:
            sharding.gatherer.settle()
        sharding.publisher.announce()


_NOT_OURS = (
    "the optimizer steps {count} parameters that are not in the model ({places}); pass the model that they are of: "
    "they have no name otherwise that another run could find them by"
)


class Subject:
    """A model and the optimizers that step it."""

    def __init__(self, model: nn.Module, opts: Any = None, elsewhere: frozenset[str] = frozenset()) -> None:
        """`elsewhere`: names that other ranks have, of the stages of a pipeline."""
        if not isinstance(model, nn.Module):
            raise TypeError(got("model", model, "a torch.nn.Module"))
        some = [] if opts is None else list(opts) if isinstance(opts, Sequence) else [opts]
        if isinstance(model, Stages):
            model.check()
        self.model, self.elsewhere = model, elsewhere
        self.steps: list[Steps] = [steps_of(opt) for opt in some]
        self.tensors = named_tensors(model)
        self.parts = parts_of(model)
        self._names = {id(tensor): name for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            home = shard_of(tensor)
            if home is not None:
                self._names.setdefault(id(home.piece), name)
        self.params = [self._named(steps) for steps in self.steps]
        every = Counter(name for names in self.params for name in names)
        twice = sorted(name for name, count in every.items() if count > 1) if len(self.steps) > 1 else []
        if twice:
            found = f"two optimizers that step {twice[0]}"
            raise ValueError(got("opt", found, "optimizers of different parameters"))

    def _named(self, steps: Steps) -> list[str]:
        """The names of an optimizer's parameters, in the order of its groups."""
        names: list[str] = []
        unknown: list[str] = []
        for number, group in enumerate(steps.opt.param_groups):
            for place, param in enumerate(group["params"]):
                name = self._names.get(id(param))
                if name is None:
                    unknown.append(f'param_groups[{number}]["params"][{place}]')
                else:
                    names.append(name)
        if unknown:
            places = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
            raise ValueError(_NOT_OURS.format(count=len(unknown), places=places))
        return names

    def numbered(self) -> list[list[str]]:
        """The names of each optimizer's parameters, as an untiled model has them, in the order of its groups."""
        made = []
        for steps, names in zip(self.steps, self.params, strict=True):
            left = iter(names)
            groups = ([next(left) for _ in group["params"]] for group in steps.opt.param_groups)
            made.append([name for some in groups for name in in_order(some, self.parts)])
        return made

    def described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is saved: by key tensors, whole or of this rank, and parts that are read from disk when their turn is;
        and all else, as JSON has it.

        Waits for updates under way. An optimizer that a step or a load left torn is refused, and what has no memory.
        """
        for name, tensor in self.tensors.items():
            refuse_meta(name, tensor)
        settle(self.model)
        for steps in self.steps:
            steps.settle()
        made: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            made[f"model.{name}"] = tensor.detach()
            home = shard_of(tensor)
            initial = None if home is None else home.initial(tensor)
            if home is not None and initial is not None:
                made[f"initial.{name}"] = home.here.show(initial, name=home.name)
        groups, optimizers = [], []
        for steps, names in zip(self.steps, self.params, strict=True):
            beside: dict[str, dict[str, Any]] = {}
            for name, param, entry in zip(names, steps.params, steps.entries(), strict=True):
                for key, value in (entry or {}).items():
                    if isinstance(value, Column):
                        value = OnDiskPart(here_of_state(param), key, value).or_empty()
                    if isinstance(value, (Tensor, OnDiskPart)):
                        made[f"optim.state.{name}.{key}"] = value
                    else:
                        said = plain(value, f"the optimizer's state {key!r} of {name}")
                        known = beside.setdefault(self.parts[name].whole if name in self.parts else name, {})
                        if known.setdefault(key, said) != said:
                            raise StateError(
                                f"the optimizer's state {key!r} of {name} is {said}, of other tiles {known[key]}; step "
                                "the tiles of a weight alike"
                            )
            groups.append(_groups(steps, names, self.parts))
            optimizers.append({**steps.values(), "beside": beside})
        extra_state = {}
        for name, module in extra_states(self.model).items():
            kept = module.get_extra_state()
            extra_state[name] = _extra(name, module, kept)
            if isinstance(kept, Tensor):
                made[f"model.{name}"] = kept.detach()
        return made, {
            "groups": groups,
            "optimizers": optimizers,
            "aliases": aliases(self.model),
            "extra_state": extra_state,
        }


_OUTSIDE = ("params", "param_names")


def _groups(steps: Steps, names: Sequence[str], parts: Mapping[str, TilePart]) -> list[dict[str, Any]]:
    left = iter(names)
    made = []
    for number, group in enumerate(steps.opt.param_groups):
        where = f"param_groups[{number}]"
        own = {key: plain(one, f"{where}[{key!r}]") for key, one in group.items() if key not in _OUTSIDE}
        made.append({**own, "params": told_once([next(left) for _ in group["params"]], parts)})
    every = Counter(name for group in made for name in group["params"])
    twice = [name for name, count in every.items() if count > 1]
    if twice:
        raise StateError(
            f"the tiles of {twice[0]} are in several param_groups; a weight is saved as one: put them into one"
        )
    return made


def _extra(name: str, module: nn.Module, kept: Any) -> Any:
    """What a module keeps beside tensors."""
    if isinstance(kept, Tensor):
        return None
    if isinstance(kept, (bytes, bytearray)):
        return {"bytes": base64.b64encode(kept).decode()}
    return {"value": plain(kept, f"what {type(module).__name__}.get_extra_state() returns for {name}")}
