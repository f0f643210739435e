"""A model and its optimizers by name: what is saved, and what is loaded into."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.checkpoint.layout import SavedLayout
from zerokern.checkpoint.optimizers import AnyOptimizer, optimizer_of, to_plain
from zerokern.checkpoint.partial import PartialModel
from zerokern.checkpoint.storage import Column
from zerokern.core.errors import StateError, got
from zerokern.core.ports import plugs
from zerokern.optim.chained import unchained
from zerokern.zero.kinds import here_of, is_divided, local_of, present, shardings_of
from zerokern.zero.shard import shard_of

__all__ = [
    "WRAPPERS", "NamedSpan", "TrainingState", "aliases", "announce_writes", "extra_states", "finish_updates",
    "layout_of", "named_tensors", "refuse_meta", "spans",
]  # fmt: skip

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # around modules, as torch calls them
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_UNSAVED = ("params", "param_names")  # of param_groups


@dataclass
class NamedSpan:
    """Elements [start, start + numel) of a named tensor, stored on this rank from element `first` of `tensor` on.

    A tensor has several spans if this rank's elements are not consecutive (a DTensor that is sharded by columns).
    `before`: elements of the saved tensor before `tensor`, if that is a tile of it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    numel: int
    tensor: Tensor
    first: int
    before: int = 0

    @contextmanager
    def opened(self, *, written: bool = False) -> Iterator[Tensor]:
        """Context manager that yields a 1-D view of the elements, for reading or writing."""
        with present(self.tensor, written=written):
            yield local_of(self.tensor).detach().view(-1)[self.first : self.first + self.numel]


def spans(model: nn.Module) -> list[NamedSpan]:
    """Lists this rank's spans of all parameters and persistent buffers, tied ones once. Waits for running updates."""
    finish_updates(model)
    layout = layout_of(model)
    return [span for name, tensor in named_tensors(model).items() for span in _spans_of(name, tensor, layout)]


def _spans_of(name: str, tensor: Tensor, layout: SavedLayout) -> Iterator[NamedSpan]:
    refuse_meta(name, tensor)
    whole, shape, before = layout.place(name, tensor.shape)
    dtype, here, local = tensor.dtype, here_of(tensor), local_of(tensor).detach()
    if not local.is_contiguous():
        do = "make it contiguous before: tensor.data = tensor.data.contiguous()"
        raise ValueError(got(f"the strides of {name}", tuple(local.stride()), "those of a contiguous tensor", do))
    for start, numel, first in here.runs() or [(here.first, 0, 0)]:
        yield NamedSpan(whole, shape, dtype, before + start, numel, tensor, first, before)


def refuse_meta(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor on the meta device, which cannot be read or written."""
    if tensor.is_meta:
        do = "give it memory first: zk.build(constructor) makes a model that is partitioned from the start"
        raise ValueError(got(f"the device of {name}", tensor.device, "a device that has memory", do))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers, each once, by their first name without the prefixes of wrappers.

    >>> list(named_tensors(nn.BatchNorm1d(2)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    others = aliases(model)
    return {name: tensor for name, tensor in _named(model) if name not in others}


def aliases(model: nn.Module) -> dict[str, str]:
    """Returns the other names of tied parameters and buffers, and the first name of each.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)); model[1].weight = model[0].weight
    >>> aliases(model)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    return {name: known for name, tensor in _named(model) if (known := first.setdefault(id(tensor), name)) != name}


def layout_of(model: nn.Module) -> SavedLayout:
    """Returns how the parameters of a model lie in the tensors of a checkpoint.

    >>> layout_of(nn.Linear(2, 2)).saved_names(["weight"])
    ['weight']
    """
    for plug in plugs("checkpoint layout"):
        layout: SavedLayout | None = plug(_modules(model))
        if layout is not None:
            return layout
    return SavedLayout()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters, then buffers, under every name that they have."""
    modules = list(_modules(model))
    for prefix, module in modules:
        yield from ((prefix + name, param) for name, param in module._parameters.items() if param is not None)
    for prefix, module in modules:
        kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        yield from ((prefix + name, buffer) for name in kept if (buffer := module._buffers[name]) is not None)


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields every module with the prefix of its members' names; wrappers add nothing to it."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            transparent = name in WRAPPERS or (name == "module" and isinstance(module, _PARALLEL))
            transparent = transparent or isinstance(module, PartialModel)
            yield from _modules(child, prefix if transparent else f"{prefix}{name}.")


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Returns modules that implement `get_extra_state`, by the key that a state_dict has for it.

    >>> extra_states(nn.Linear(2, 2))
    {}
    """
    own = nn.Module.get_extra_state
    return {f"{at}_extra_state": module for at, module in _modules(model) if type(module).get_extra_state is not own}


def finish_updates(model: nn.Module, *, replaced: bool = False) -> None:
    """Waits until the parameters are those of the last step; call it before they are read or written.

    `replaced`: they are about to be overwritten, so a failed update does not matter.
    """
    for sharding in shardings_of(map(shard_of, named_tensors(model).values())):
        sharding.publisher.complete()
        if replaced:
            sharding.publisher.failure = None
        sharding.publisher.finish()


@torch.no_grad()
def announce_writes(model: nn.Module) -> None:
    """Accounts for writes to a model's tensors: versions are bumped, and optimizers read masters from them again.

    >>> model = nn.Linear(2, 2)
    >>> with spans(model)[0].opened(written=True) as flat:
    ...     _ = flat.zero_()
    >>> announce_writes(model); model.weight.sum().item()
    0.0
    """
    named = named_tensors(model)
    written: list[Tensor] = []
    for tensor in named.values():
        written += [tensor, local_of(tensor)] if is_divided(tensor) else [tensor]
    torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])
    for sharding in shardings_of(map(shard_of, named.values())):
        if sharding.runner is not None:
            sharding.runner.reshard_all()
        sharding.publisher.announce()


class TrainingState:
    """A model and the optimizers that step it."""

    def __init__(self, model: nn.Module, opts: Any = None, elsewhere: frozenset[str] = frozenset()) -> None:
        """`elsewhere`: names that other ranks have, of the stages of a pipeline."""
        if not isinstance(model, nn.Module):
            raise TypeError(got("model", model, "a torch.nn.Module"))
        if isinstance(model, PartialModel):
            model.check()
        self.model, self.elsewhere = model, elsewhere
        self.optimizers: list[AnyOptimizer] = [optimizer_of(opt) for opt in unchained(opts)]
        self.tensors = named_tensors(model)
        self.layout = layout_of(model)
        self._names = {id(tensor): name for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            home = shard_of(tensor)
            if home is not None:
                self._names.setdefault(id(home.piece), name)
        self.names_by_group = [self._names_of(optimizer) for optimizer in self.optimizers]
        self.params = [[name for some in groups for name in some] for groups in self.names_by_group]
        every = Counter(name for names in self.params for name in names)
        twice = sorted(name for name, count in every.items() if count > 1)
        if twice and len(self.optimizers) > 1:
            given = f"two optimizers that step {twice[0]}"
            raise ValueError(got("opt", given, "optimizers of different parameters"))

    def _names_of(self, optimizer: AnyOptimizer) -> list[list[str]]:
        """Returns the names of the parameters in each param_group."""
        groups = [[self._names.get(id(param), "") for param in group["params"]] for group in optimizer.opt.param_groups]
        unknown = [
            f'param_groups[{number}]["params"][{place}]'
            for number, names in enumerate(groups)
            for place, name in enumerate(names)
            if not name
        ]
        if unknown:
            places = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
            raise ValueError(
                f"the optimizer steps {len(unknown)} parameters that are not in the model ({places}); pass the model "
                "that they are of: they have no name otherwise that another run could find them by"
            )
        return groups

    def names_by_number(self) -> list[list[str]]:
        """Returns the parameter names of each optimizer in the order that an untiled model has them in."""
        return [[name for some in groups for name in self.layout.saved_order(some)] for groups in self.names_by_group]

    def described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what is saved: tensors by key, and everything else as JSON.

        Waits for running updates. Raises for optimizers that a failed step or load left inconsistent, and for meta
        tensors.
        """
        for name, tensor in self.tensors.items():
            refuse_meta(name, tensor)
        finish_updates(self.model)
        for optimizer in self.optimizers:
            optimizer.settle()
        items: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            items[f"model.{name}"] = tensor.detach()
            home = shard_of(tensor)
            initial = None if home is None else home.initial(tensor)
            if home is not None and initial is not None:
                items[f"initial.{name}"] = home.here.show(initial, name=home.name)
        groups, optimizers = [], []
        for optimizer, names, by_group in zip(self.optimizers, self.params, self.names_by_group, strict=True):
            optimizers.append({**optimizer.values(), "beside": self._describe_state(optimizer, names, items)})
            groups.append(self._describe_groups(optimizer, by_group))
        extra_state = {}
        for name, module in extra_states(self.model).items():
            kept = module.get_extra_state()
            extra_state[name] = _extra(name, module, kept)
            if isinstance(kept, Tensor):
                items[f"model.{name}"] = kept.detach()
        values = {"groups": groups, "optimizers": optimizers}
        return items, {**values, "aliases": aliases(self.model), "extra_state": extra_state}

    def _describe_state(self, optimizer: AnyOptimizer, names: Sequence[str], items: dict[str, Any]) -> dict[str, Any]:
        """Adds the state tensors of an optimizer to `items`; returns its other state, by parameter."""
        beside: dict[str, dict[str, Any]] = {}
        for name, entry in zip(names, optimizer.entries(), strict=True):
            for key, value in entry.items():
                if isinstance(value, Column) and not value.shape.numel():  # it lies nowhere
                    value = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                if isinstance(value, (Tensor, Column)):
                    items[f"optim.state.{name}.{key}"] = value
                    continue
                said = to_plain(value, f"the optimizer's state {key!r} of {name}")
                known = beside.setdefault(self.layout.saved_names([name])[0], {})
                if known.setdefault(key, said) != said:
                    raise StateError(
                        f"the optimizer's state {key!r} of {name} is {said}, of other tiles {known[key]}; step the "
                        "tiles of a weight alike"
                    )
        return beside

    def _describe_groups(self, optimizer: AnyOptimizer, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        made = []
        for number, (group, mine) in enumerate(zip(optimizer.opt.param_groups, names, strict=True)):
            where = f"param_groups[{number}]"
            own = {key: to_plain(value, f"{where}[{key!r}]") for key, value in group.items() if key not in _UNSAVED}
            made.append({**own, "params": self.layout.saved_names(mine)})
        every = Counter(name for group in made for name in group["params"])
        twice = [name for name, count in every.items() if count > 1]
        if twice:
            raise StateError(
                f"the tiles of {twice[0]} are in several param_groups; a weight is saved as one: put them into one"
            )
        return made


def _extra(name: str, module: nn.Module, kept: Any) -> Any:
    """Returns a module's extra state as JSON; None if it is a tensor."""
    if isinstance(kept, Tensor):
        return None
    if isinstance(kept, (bytes, bytearray)):
        return {"bytes": base64.b64encode(kept).decode()}
    return {"value": to_plain(kept, f"what {type(module).__name__}.get_extra_state() returns for {name}")}
