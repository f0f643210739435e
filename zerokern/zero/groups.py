"""The ranks that shard parameters, add up their norms and hear of their gradients: one answer for a model, or several.

By default all parameters of a model have the same. What gives other answers (tensor parallelism, experts) stands beside
the core, in zerokern/parallel, and is handed to `Sharding` as `groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zerokern.comm import Group, MeshGroups

__all__ = ["PLACE", "GroupsOf", "ModuleGroups", "RankGroups", "one_group"]

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
