"""Parameters that are divided among other ranks than their model's: experts, of which each rank of a mesh has some.

Their gradients are of the tokens of all ranks, and a mean of them is that of the model's losses all the same. A rank
whose tokens go elsewhere has none: that is known where its experts' backward begins, so that on all ranks a bucket is
reduced between the same two exchanges of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Group
from zerokern.core.errors import ShardError, got
from zerokern.parallel.tensor_parallel import groups_on, mesh_of
from zerokern.zero import hooks
from zerokern.zero.units import ModuleGroups, RankGroups

__all__ = ["groups_of"]


def groups_of(
    model: nn.Module,
    params: Sequence[tuple[str, nn.Parameter]],
    group: Group,
    replicated: bool,
    apart: Mapping[nn.Module, Group] | None = None,
) -> ModuleGroups:
    """Which ranks shard which parameters: those of `group`, and for the modules `apart` those that it names.

    >>> layer, alone = nn.Linear(2, 2), Group(0, 1, torch.device("cpu"), "alone")
    >>> groups = groups_of(layer, list(layer.named_parameters()), alone, False)
    >>> len(groups.each), groups.number
    (1, None)
    """
    groups, numbers = [group], dict.fromkeys((id(param) for _, param in params), 0)
    for module, one in (apart or {}).items():
        if not any(module is child for child in model.modules()):
            do = "name modules of the model that is sharded, as they are in it"
            raise ValueError(got("mesh", f"one for a {type(module).__name__}", "{module: mesh}", do))
        if one is group:
            continue
        number = next((at for at, known in enumerate(groups) if known is one), len(groups))
        groups[number:] = [one]
        for name, param in params:
            if any(param is mine for mine in module.parameters()):
                if numbers[id(param)] not in (0, number):
                    raise ValueError(
                        f"two modules in mesh= have {name!r}, with different ranks; allowed: one entry for it"
                    )
                numbers[id(param)] = number
    each: list[RankGroups] = []
    for number, one in enumerate(groups):
        mine = [pair for pair in params if numbers[id(pair[1])] == number]
        each.append(groups_on(mesh_of(mine), one, replicated=replicated))
        if number:
            _join_ranks(each[0], each[-1], mine)
    return _ExpertGroups(each, numbers if len(groups) > 1 else None, apart or {})


def _join_ranks(root: RankGroups, experts: RankGroups, params: Sequence[tuple[str, Tensor]]) -> None:
    """Every rank of the model has a part of these, or a copy: what the others have is known by DTensors alone."""
    if experts.everyone.size != root.everyone.size:
        name = params[0][0] if params else "a module without parameters"
        raise ShardError(
            f"{name!r} would be divided among {experts.group.everyone.size} ranks"
            + ("" if experts.place is None else f", {experts.everyone.size} with its DTensor's mesh")
            + f", and the model has {root.everyone.size}; allowed: two dimensions of one mesh that together have each "
            'rank of the model once, such as init_device_mesh(.., mesh_dim_names=("efsdp", "ep")): the experts are '
            'DTensors on mesh["ep"], and zk.shard gets mesh["efsdp"] for them'
        )
    experts.hearing = experts.everyone
    for one in root.group.join():
        for other in experts.group.join():
            one.link_failures(other)


class _ExpertGroups(ModuleGroups):
    """Those of a model and of modules in it that other ranks shard."""

    def __init__(
        self, each: Sequence[RankGroups], number: Mapping[int, int] | None, apart: Mapping[nn.Module, Group]
    ) -> None:
        super().__init__(each, number)
        self._apart = apart
        self._of_buffers = {id(buffer): one for module, one in apart.items() for buffer in module.buffers()}

    def group_of_buffer(self, buffer: Tensor) -> Group:
        return self._of_buffers.get(id(buffer), self.each[0].group)

    def watch_gradients(self, sharding: Any) -> None:
        """Tells the model's reduction what will not arrive from modules `apart`, once their backward begins."""
        for module in self._apart:
            mine = set(map(id, module.parameters()))
            places = [
                (bucket, place)
                for bucket in sharding.gradient_buckets
                for place, entry in enumerate(bucket.entries)
                if id(entry.param) in mine
            ]
            if places:
                hooks.wrap_forward(module, after=partial(_tell_absent, places, sharding.reduction))
        self._apart = {}  # modules lead back to their sharding, which keeps this: a circle would outlive the model


def _tell_absent(places: Sequence[tuple[Any, int]], reduction: Any, result: Any) -> None:
    """After a module's forward: when its backward begins, tells the reduction which gradients will not arrive."""

    def tell() -> None:
        for bucket, place in places:
            leaf = bucket.inbox.leaves[place]
            if leaf.requires_grad and hooks.is_accumulated(hooks.accumulator(leaf)) is False:
                reduction.absent(bucket, place)

    if result is not None and torch.is_grad_enabled():
        hooks.when_backward_begins(result, tell)
