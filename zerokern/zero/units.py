"""What is gathered together: children of ModuleLists, or the modules that the user names; the rest is the root's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from zerokern.core.errors import got
from zerokern.zero.kinds import local_of
from zerokern.zero.partition import Member
from zerokern.zero.placed import largest_local_numel

__all__ = ["Owner", "Unit", "UnitModule", "UnitWrapper", "Units", "members", "owners_of", "units_of"]

Units = Iterable[nn.Module] | Callable[[nn.Module], bool] | None


class UnitModule(nn.Module):
    """A module that is a unit of its own, whatever `units=` names."""


class UnitWrapper(Protocol):
    """Wraps the forward of units, within the hooks that gather them: recomputation, slices of the batch."""

    def check(self, units: Sequence[Unit]) -> str:
        """What all ranks must have asked for alike, in words; raises where these units cannot be wrapped."""

    def begin(self, units: Sequence[Unit]) -> None:
        """Wraps the forward of those units that it is for."""


@dataclass
class Unit:
    """Modules that are gathered and released as one, with the parameters in them that no inner unit has."""

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.module]


@dataclass(frozen=True)
class Owner:
    """One place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    attribute: str


def units_of(module: nn.Module, units: Units = None) -> list[Unit]:
    """The root's unit first, then the others in the order of `named_modules`; units without parameters are left out.

    >>> units_of(nn.ModuleDict({"head": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)])}))[1].name
    'blocks.0'
    """
    chosen = _chosen(module, units) | {id(child) for child in module.modules() if isinstance(child, UnitModule)}
    found = {id(module): Unit("", module)}
    for name, child in module.named_modules():
        if id(child) in chosen and child is not module:
            found[id(child)] = Unit(name, child)
    seen: set[int] = set()
    _collect(module, "", found[id(module)], found, seen, set())
    root, *others = found.values()
    return [root, *(unit for unit in others if unit.params)]


def _chosen(module: nn.Module, units: Units) -> set[int]:
    everyone = {id(child): child for child in module.modules()}
    if units is None:
        lists = [child for child in everyone.values() if isinstance(child, nn.ModuleList)]
        return {id(child) for one in lists for child in one if not isinstance(child, nn.ModuleList)}
    if callable(units):
        return {key for key, child in everyone.items() if units(child)}
    named = list(units)
    for one in named:
        if not isinstance(one, nn.Module):
            raise TypeError(got("units", one, "modules of the model, or a function of a module that says yes or no"))
        if id(one) not in everyone:
            raise ValueError(f"units has a {type(one).__name__} that is not part of the model; allowed: its submodules")
    return {id(one) for one in named}


def _collect(
    module: nn.Module, prefix: str, unit: Unit, found: dict[int, Unit], seen: set[int], visited: set[int]
) -> None:
    """A parameter belongs to the outermost of the units that it is registered in: whoever is met first, root first."""
    if id(module) in visited:
        return
    visited.add(id(module))
    for name, param in module._parameters.items():
        if param is not None and id(param) not in seen:
            seen.add(id(param))
            unit.params.append((prefix + name, param))
    inner: list[tuple[str, nn.Module]] = []
    own: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        (inner if id(child) in found else own).append((name, child))
    for name, child in own:
        _collect(child, f"{prefix}{name}.", unit, found, seen, visited)
    for name, child in inner:
        _collect(child, f"{prefix}{name}.", found[id(child)], found, seen, visited)


def owners_of(module: nn.Module) -> dict[int, list[Owner]]:
    """Where each parameter is registered, by the parameter's id."""
    owners: dict[int, list[Owner]] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append(Owner(child, name))
    return owners


def members(
    units: Sequence[Unit], stage: int, param_dtype: torch.dtype | None = None, ranks: Mapping[int, int] | None = None
) -> list[Member]:
    """What `partition` needs of the parameters of the units, one after the other.

    Below stage 3 nothing is gathered, so that all units are one. `ranks`: which group divides each, by its id, where
    there are several. Ranks with other parts of a DTensor cut buckets alike: what is called as one is complete, such
    as users' hooks, comes in one order on all of them.
    """
    found = [(param, number if stage >= 3 else 0) for number, unit in enumerate(units) for _, param in unit.params]
    groups = {id(param): 0 for param, _ in found} if ranks is None else ranks
    return [
        Member(
            local_of(param).numel(),
            dtype_name(param, param_dtype),
            number,
            param.requires_grad,
            groups[id(param)],
            largest_local_numel(param),
        )
        for param, number in found
    ]


def dtype_name(param: Tensor, param_dtype: torch.dtype | None = None) -> str:
    """The name of the dtype that a parameter has once it is sharded."""
    dtype = param_dtype if param_dtype is not None and param.is_floating_point() else param.dtype
    return str(dtype).removeprefix("torch.")
