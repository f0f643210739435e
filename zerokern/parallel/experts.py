"""Parameters that are divided among other ranks than their model's: experts, of which each rank of a mesh has some.

Their gradients are of the tokens of all ranks, and a mean of them is that of the model's losses all the same. A rank
whose tokens go elsewhere has none: that is known where its experts' backward begins, so that on all ranks a bucket is
reduced between the same two exchanges of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Group
from zerokern.core.errors import ShardError, got
from zerokern.parallel.tensor_parallel import Beside, mesh_of
from zerokern.zero import hooks

__all__ = ["MeshParts", "watch_experts"]


class MeshParts:
    """Which ranks divide which parameters: those of the model, and of modules `apart` others.

    >>> layer, alone = nn.Linear(2, 2), Group(0, 1, torch.device("cpu"), "alone")
    >>> parts = MeshParts(layer, list(layer.named_parameters()), alone, {}, replicated=False)
    >>> len(parts.each), parts.worlds, parts.number
    (1, [1], None)
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        apart: Mapping[nn.Module, Group],
        *,
        replicated: bool,
    ) -> None:
        groups, numbers = [group], dict.fromkeys((id(param) for _, param in params), 0)
        self._of_buffers: dict[int, Group] = {}
        for module, one in apart.items():
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
                        raise ValueError(f"mesh names two modules that have {name!r}, and for each of them other ranks")
                    numbers[id(param)] = number
            self._of_buffers.update((id(buffer), one) for buffer in module.buffers())
        self.number: dict[int, int] | None = numbers if len(groups) > 1 else None
        self.worlds = [one.size for one in groups]
        self.each: list[Beside] = []
        for number, one in enumerate(groups):
            mine = [pair for pair in params if numbers[id(pair[1])] == number]
            self.each.append(Beside(mesh_of(mine), one, replicated=replicated))
            if number:
                self._check(self.each[-1], mine)
        self.teams = [beside.team for beside in self.each if beside.team is not None]

    def _check(self, beside: Beside, params: Sequence[tuple[str, Tensor]]) -> None:
        """Every rank of the model has a part of these, or a copy: what the others have is known by DTensors alone."""
        root = self.each[0]
        name = params[0][0] if params else "a module without parameters"
        if beside.everyone.size != root.everyone.size:
            raise ShardError(
                f"{name!r} is to be divided among {beside.group.everyone.size} ranks"
                + ("" if beside.place is None else f", beside its DTensor's mesh {beside.everyone.size} together")
                + f", and the model has {root.everyone.size}; allowed: experts that are DTensors of a mesh which has "
                "each rank of the model once, together with the ranks they are divided among: of one that "
                'init_device_mesh makes as ("efsdp", "ep"), DTensors on mesh["ep"] and mesh["efsdp"] for zk.shard'
            )
        beside.hearing = beside.everyone
        for one in root.group.join():
            for other in beside.group.join():
                one.tie(other)

    def group_of_buffer(self, buffer: Tensor) -> Group:
        """The ranks that have the same."""
        return self._of_buffers.get(id(buffer), self.each[0].group)

    @property
    def losses(self) -> int:
        """How many of them a mean is of."""
        return self.each[0].group.everyone.size


def watch_experts(modules: Sequence[nn.Module], sharding: Any) -> None:
    """Tell a model's reduction of what will not arrive from these modules, once their backward begins."""
    for module in modules:
        mine = set(map(id, module.parameters()))
        buckets = sharding.gradient_buckets
        places = [
            (bucket, place)
            for bucket in buckets
            for place, tenant in enumerate(bucket.tenants)
            if id(tenant.param) in mine
        ]
        if places:
            _Watch(places, sharding.reduction).begin(module)


class _Watch:
    """Of one module: parameters by bucket and place."""

    def __init__(self, places: Sequence[tuple[Any, int]], reduction: Any) -> None:
        self._places, self._reduction = places, reduction

    def begin(self, module: nn.Module) -> None:
        hooks.wrap_forward(module, _unchanged, self._after)

    def _after(self, result: Any) -> None:
        if result is not None and torch.is_grad_enabled():
            for output in hooks.graph_tensors(result):
                hooks.when_gradient_is_there(output, self._look)

    def _look(self) -> None:
        for bucket, place in self._absent():
            self._reduction.absent(bucket, place)

    def _absent(self) -> Iterator[tuple[Any, int]]:
        for bucket, place in self._places:
            leaf = bucket.leaves[place]
            if leaf.requires_grad and hooks.is_accumulated(hooks.accumulator(leaf)) is False:
                yield bucket, place


def _unchanged(args: tuple, kwargs: dict[str, Any]) -> None:
    pass
