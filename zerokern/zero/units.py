"""Groups a model's parameters: into units that are gathered together, and by the ranks that share them.

Units are the children of ModuleLists, or the modules that the user names; the rest is the root's. By default all
parameters have the same ranks. What gives other answers (tensor parallelism, experts) stands beside the core, in
zerokern/parallel, and is handed to `Sharding` as `groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerokern.comm import Group, MeshGroups
from zerokern.core.errors import got, nearest, whole_number
from zerokern.zero.kinds import is_placed, largest_local_numel, local_of
from zerokern.zero.partition import Member, work_of

__all__ = [
    "PLACE",
    "GroupsOf",
    "ModuleGroups",
    "Owner",
    "RankGroups",
    "UnitModule",
    "UnitSpec",
    "UnitWrapper",
    "Units",
    "Whole",
    "check_split",
    "members",
    "one_group",
    "owners_of",
    "uncut_of",
    "units_of",
    "whole_of",
]


Units = Iterable[nn.Module] | Callable[[nn.Module], bool] | None
Whole = Iterable[nn.Parameter | str | Mapping[str, Any]] | None


class UnitModule(nn.Module):
    """A module that is a unit of its own, whatever `units=` names."""


class UnitWrapper(Protocol):
    """Wraps the forward of units, within the hooks that gather them: recomputation, slices of the batch."""

    def check(self, units: Sequence[UnitSpec]) -> dict[str, Any]:
        """What all ranks must have asked for alike, by name; raises where these units cannot be wrapped."""

    def begin(self, units: Sequence[UnitSpec]) -> None:
        """Wraps the forward of those units that it is for."""


@dataclass
class UnitSpec:
    """Modules that are gathered and released as one, with the parameters in them that no inner unit has."""

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


@dataclass(frozen=True)
class Owner:
    """One place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    attribute: str


def units_of(module: nn.Module, units: Units = None) -> list[UnitSpec]:
    """The root's unit first, then the others in the order of `named_modules`; units without parameters are left out.

    >>> units_of(nn.ModuleDict({"head": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)])}))[1].name
    'blocks.0'
    """
    chosen = _chosen(module, units) | {id(child) for child in module.modules() if isinstance(child, UnitModule)}
    found = {id(module): UnitSpec("", module)}
    for name, child in module.named_modules():
        if id(child) in chosen and child is not module:
            found[id(child)] = UnitSpec(name, child)
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
            raise TypeError(_no_unit(module, units if isinstance(units, str) else one))
        if id(one) not in everyone:
            raise ValueError(f"units has a {type(one).__name__} that is not part of the model; allowed: its submodules")
    return {id(one) for one in named}


def _no_unit(module: nn.Module, given: object) -> str:
    """Returns the message about what is no module, with the modules that text names: those of a class, or one."""
    names = [name for name, _ in module.named_modules() if name]
    kinds = {type(child).__name__ for child in module.modules()}
    found = nearest(given, [*kinds, *names])
    do = f"For the module {found!r}: units=[model.get_submodule({found!r})]" if found else ""
    if found in kinds:
        do = f"For each {found}: units=lambda module: type(module).__name__ == {found!r}"
    return got("units", given, "modules of the model, or a function of a module that says yes or no", do)


def _collect(
    module: nn.Module, prefix: str, unit: UnitSpec, found: dict[int, UnitSpec], seen: set[int], visited: set[int]
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
    units: Sequence[UnitSpec],
    stage: int,
    param_dtype: torch.dtype | None = None,
    ranks: Mapping[int, int] | None = None,
    whole: Mapping[int, int] | None = None,
) -> list[Member]:
    """What `partition` needs of the parameters of the units, one after the other.

    Below stage 3 nothing is gathered, so that all units are one. `ranks`: which group divides each, by its id, where
    there are several. Ranks with other parts of a DTensor cut buckets alike: what is called as one is complete, such
    as users' hooks, comes in one order on all of them. `whole`: the work of
    matrices that are updated whole, by their ids.
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
            (whole or {}).get(id(param), 0),
        )
        for param, number in found
    ]


def check_split(split: object) -> int:
    """Raises unless a parameter may consist of so many matrices.

    >>> check_split(3)
    3
    """
    return whole_number("split", split, "a whole number of 1 or more")


def whole_of(whole: Whole, units: Sequence[UnitSpec]) -> dict[int, int]:
    """Returns the work of the matrices that are named here, by their ids.

    >>> layer = nn.Linear(2, 2)
    >>> whole_of(["*weight"], units_of(layer)) == whole_of([{"params": [layer.weight]}], units_of(layer))
    True
    """
    return {id(one): max(1, work_of(one.shape, split)) for one, split in uncut_of(whole, units)}


def uncut_of(whole: Whole, units: Sequence[UnitSpec]) -> list[tuple[nn.Parameter, int]]:
    """Returns the matrices that are named here, each once, and of how many it consists.

    >>> [split for _, split in uncut_of([{"params": ["weight"], "split": 3}], units_of(nn.Linear(4, 6)))]
    [3]
    """
    named = {name: param for unit in units for name, param in unit.params}
    known, found = {id(param) for param in named.values()}, dict[int, tuple[nn.Parameter, int]]()
    for one, split in _each_of(whole):
        if isinstance(one, str):
            mine = {id(param): param for name, param in named.items() if fnmatchcase(name, one)}
        else:
            mine = {id(one): one} if id(one) in known else {}
        if not mine:
            said = repr(one) if isinstance(one, str) else f"a parameter of shape {tuple(one.shape)}"
            raise ValueError(f"whole has {said}, which no parameter of the model is; allowed: {', '.join(named)}")
        for param in mine.values():
            if is_placed(param) or param.dim() < 2:
                name = next(name for name, other in named.items() if other is param)
                what = "a DTensor, which no rank has whole" if is_placed(param) else f"of shape {tuple(param.shape)}"
                raise ValueError(f"whole has {name!r}, {what}; allowed: matrices")
            found[id(param)] = param, split
    return list(found.values())


def _each_of(whole: Whole) -> Iterator[tuple[Any, int]]:
    """Yields parameters, and patterns of names, with the number of matrices that they consist of."""
    listed: Any = [whole] if isinstance(whole, str | Tensor | Mapping) else whole or ()
    allowed = "parameters of the model, patterns of their names, or param_groups"
    if not isinstance(listed, Iterable):
        raise TypeError(got("whole", whole, allowed))
    for one in listed:
        if isinstance(one, Mapping) and "params" in one:
            params = one["params"]
            for item in [params] if isinstance(params, str | Tensor) else params:
                yield item[1] if isinstance(item, tuple) else item, check_split(one.get("split", 1))
        elif isinstance(one, str | Tensor):
            yield one, 1
        else:
            raise TypeError(got("whole", type(one).__name__, allowed))


def dtype_name(param: Tensor, param_dtype: torch.dtype | None = None) -> str:
    """The name of the dtype that a parameter has once it is sharded."""
    dtype = param_dtype if param_dtype is not None and param.is_floating_point() else param.dtype
    return str(dtype).removeprefix("torch.")


PLACE = "place in the mesh of DTensors"  # of a rank, as ranks compare it


@dataclass
class RankGroups:
    """The ranks that one set of parameters concerns.

    `group` shards them; `everyone`: all ranks that have some of them, copies included. `team`: the ranks that norms are
    summed over, None where each rank has all; `copies`: how many of these have the same elements of a parameter that is
    no DTensor. `hearing`: those that have a gradient where one of them has. `place`: this rank's in the DTensors' mesh.

    >>> import torch
    >>> groups = RankGroups.of(Group(0, 1, torch.device("cpu"), "alone"), replicated=False)
    >>> groups.copies, groups.place, groups.team is groups.everyone, groups.is_first
    (1, None, True, True)
    """

    group: Group
    team: Group | MeshGroups | None
    everyone: Any
    hearing: Any
    copies: int = 1
    place: Sequence[int] | None = None

    @staticmethod
    def of(group: Group, *, replicated: bool) -> RankGroups:
        """Those of parameters that are no DTensors; `replicated`: nothing is sharded."""
        return RankGroups(group, None if replicated else group, group.everyone, group.everyone)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all."""
        return self.group.everyone.rank == 0 and not any(self.place or ())


class ModuleGroups:
    """Which ranks shard which parameters of a model: `each` has one entry for each answer, the model's own first.

    `number`: the entry of a parameter by its id; None where there is one answer for all.

    >>> import torch
    >>> alone = RankGroups.of(Group(0, 1, torch.device("cpu"), "alone"), replicated=False)
    >>> groups = ModuleGroups([alone])
    >>> groups.sizes, groups.losses, groups.group_of_buffer(torch.ones(1)) is alone.group
    ([1], 1, True)
    """

    def __init__(self, each: Sequence[RankGroups], number: Mapping[int, int] | None = None) -> None:
        self.each, self.number = list(each), number
        self.teams = [one.team for one in self.each if one.team is not None]

    @property
    def sizes(self) -> list[int]:
        """How many ranks shard, for each answer."""
        return [one.group.size for one in self.each]

    @property
    def losses(self) -> int:
        """The number of losses that a mean gradient is the mean of."""
        return self.each[0].group.everyone.size

    def group_of_buffer(self, buffer: Tensor) -> Group:
        """The ranks that have the same values in a buffer."""
        return self.each[0].group

    def watch_gradients(self, sharding: Any) -> None:
        """Called once the model's gradients are hooked; here nothing is to be watched."""


GroupsOf = Callable[[nn.Module, Sequence[tuple[str, nn.Parameter]], Group, bool], ModuleGroups]
"""From a model, its named parameters, the ranks that shard it and whether it is replicated (stage 0)."""


def one_group(
    module: nn.Module, params: Sequence[tuple[str, nn.Parameter]], group: Group, replicated: bool
) -> ModuleGroups:
    """The same ranks for all parameters.

    >>> import torch
    >>> layer, alone = nn.Linear(2, 2), Group(0, 1, torch.device("cpu"), "alone")
    >>> len(one_group(layer, list(layer.named_parameters()), alone, False).each)
    1
    """
    return ModuleGroups([RankGroups.of(group, replicated=replicated)])
