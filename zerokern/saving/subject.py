"""What is saved and loaded: a model and its optimizers, as items by name, and how these come back into place."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.core.errors import StateError, got
from zerokern.io import Nvme
from zerokern.optim.exchange import Column
from zerokern.optim.local import PENDING
from zerokern.saving.filling import Straight, converted, on_disk, refuse_without_room, waiting
from zerokern.saving.matching import Matching
from zerokern.saving.optimizers import Steps, back, plain, steps_of
from zerokern.saving.parameters import (
    aliases,
    extra_states,
    initial_of,
    keep_initial,
    named_tensors,
    refuse_meta,
    settle,
    wrote,
)
from zerokern.saving.planners import OnDiskPart, Region
from zerokern.zero.homes import home_of
from zerokern.zero.sharded import Sharded

__all__ = ["Subject"]

_NOT_OURS = (
    "the optimizer steps {count} parameters that are not in the model ({places}); pass the model that they are of: "
    "they have no name otherwise that another run could find them by"
)


class Subject:
    """A model and the optimizers that step it.

    >>> model = nn.Linear(2, 2); subject = Subject(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> list(subject.items()), subject.values()["groups"][0][0]["params"]
    (['model.weight', 'model.bias'], ['weight', 'bias'])
    """

    def __init__(self, model: nn.Module, opts: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(got("model", model, "a torch.nn.Module"))
        some = [] if opts is None else list(opts) if isinstance(opts, Sequence) else [opts]
        self.model = model
        self.steps: list[Steps] = [steps_of(opt) for opt in some]
        self.tensors = named_tensors(model)
        self._matching: Matching | None = None
        self._names = {id(tensor): name for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            home = home_of(tensor)
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

    def items(self) -> dict[str, Any]:
        """What is saved, by key: tensors, whole or of this rank, and parts that are read from disk when their turn is.

        Waits for updates under way. An optimizer that a step or a load left torn is refused, and what has no memory.
        """
        for name, tensor in self.tensors.items():
            refuse_meta(name, tensor)
        settle(self.model)
        for steps in self.steps:
            steps.settle()
        made: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            made[f"model.{name}"] = tensor if isinstance(tensor, Sharded) else tensor.detach()
            initial = initial_of(tensor)
            if initial is not None:
                made[f"initial.{name}"] = _shown_initial(tensor, initial)
        for steps, names in zip(self.steps, self.params, strict=True):
            params = [param for group in steps.opt.param_groups for param in group["params"]]
            for name, param, entry in zip(names, params, steps.entries(), strict=True):
                for key, value in (entry or {}).items():
                    if isinstance(value, Column):
                        value = OnDiskPart(Region.of_state(param), key, value)
                    if isinstance(value, (Tensor, OnDiskPart)):
                        made[f"optim.state.{name}.{key}"] = value
        for name, module in extra_states(self.model).items():
            kept = module.get_extra_state()
            if isinstance(kept, Tensor):
                made[f"model.{name}"] = kept.detach()
        return made

    def values(self) -> dict[str, Any]:
        """What else is saved, as JSON has it."""
        optimizers, groups = [], []
        for steps, names in zip(self.steps, self.params, strict=True):
            left = iter(names)
            mine = []
            for number, group in enumerate(steps.opt.param_groups):
                where = f"param_groups[{number}]"
                own = {key: plain(one, f"{where}[{key!r}]") for key, one in group.items() if key not in _OUTSIDE}
                mine.append({**own, "params": [next(left) for _ in group["params"]]})
            groups.append(mine)
            optimizers.append({**steps.values(), "beside": self._beside(steps, names)})
        return {
            "groups": groups,
            "optimizers": optimizers,
            "aliases": aliases(self.model),
            "extra_state": {name: _extra(name, one) for name, one in extra_states(self.model).items()},
        }

    def _beside(self, steps: Steps, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What state has that is no tensor."""
        made: dict[str, dict[str, Any]] = {}
        for name, entry in zip(names, steps.entries(), strict=True):
            rest = {key: one for key, one in (entry or {}).items() if not isinstance(one, (Tensor, Column))}
            if rest:
                made[name] = {key: plain(one, f"the optimizer's state {key!r} of {name}") for key, one in rest.items()}
        return made

    def check(self, source: Any, lossy: bool = False) -> None:
        """Refuses a source that does not fit, with everything that differs; changes nothing."""
        for name, tensor in self.tensors.items():
            refuse_meta(name, tensor)
        matching = Matching(self, source, lossy)
        if matching.differences:
            raise StateError(matching.report())
        for steps, plans in zip(self.steps, matching.states, strict=True):
            refuse_without_room(steps, plans)
        self._matching = matching

    def batches(self, source: Any, lossy: bool = False) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        """Items to be read together with `LoadPlanner`, and what to call then. After `check` alone.

        The first is all that goes straight into place. How many there are depends on what this rank holds: where
        reading is collective, ranks ask each other whether anybody has another one. Optimizers are torn from the first
        to `finish`.
        """
        matching = self._matching
        if matching is None or matching.source is not source or matching.lossy != lossy:
            self.check(source, lossy)
        matching = self._matching
        assert matching is not None
        settle(self.model)
        straight = Straight()
        for one in matching.tensors:
            if not one.converts:
                straight.put(one.source, one.tensor if isinstance(one.tensor, Sharded) else one.tensor.detach())
        self._extra_tensors = {
            name: torch.empty(row.shape, dtype=_dtype(row), device="cpu")
            for name, row in matching.extra_tensors.items()
        }
        for name, kept in self._extra_tensors.items():
            straight.put(f"model.{name}", kept)
        initials: dict[str, Tensor] = {}
        for name, (key, dtype) in matching.initials.items():
            home = home_of(self.tensors[name])
            assert home is not None
            initials[name] = torch.empty(home.numel, dtype=dtype, device=home.piece.device)
            straight.put(key, _shown_initial(self.tensors[name], initials[name]))
        by_steps = list(zip(self.steps, matching.states, matching.groups, strict=True))
        entries: dict[int, list[dict[str, Any] | None]] = {}
        # Room on disk may be refused: first, while the others still have what they had.
        for steps, plans, groups in sorted(
            by_steps, key=lambda one: not isinstance(getattr(one[0].opt, "tier", 0), Nvme)
        ):
            count = sum(len(group["params"]) for group in steps.opt.param_groups)
            steps.lay_out(groups, [plans[i].wanted if i in plans else None for i in range(count)])
            entries[id(steps)] = steps.entries()
            for number, plan in plans.items():
                for key, one in (entries[id(steps)][number] or {}).items():
                    if key in plan.scalars:
                        straight.of(f"{plan.prefix}{key}").scalar(f"{plan.prefix}{key}", plan.saved[key], one)
                    elif isinstance(one, Tensor) and plan.straight(key) and key != PENDING:
                        straight.put(f"{plan.prefix}{key}", one)
        for batch in straight.batches:
            yield batch.items, batch.after
        convert = [one for one in matching.tensors if one.converts]
        far = {id(steps): steps.inflow() is not None for steps in self.steps}
        every = [plan for _, plans, _ in by_steps for plan in plans.values()]
        near = [plan for plan in every if plan.converts and not far[id(plan.steps)]]
        for batch in converted(convert, near, lambda plan: entries[id(plan.steps)][plan.number] or {}):
            yield batch.items, batch.after
        for steps, plans, _ in by_steps:
            for batch in on_disk(steps, plans):
                yield batch.items, batch.after
        wrote(self.model)
        for name, lost in initials.items():
            keep_initial(self.tensors[name], lost)
        for steps, plans, _ in by_steps:
            steps.look()
            late = {number: plan for number, plan in plans.items() if steps.late and PENDING in plan.saved}
            if late:
                batch = waiting(steps, late, PENDING)
                yield batch.items, batch.after

    def finish(self, values: dict[str, Any]) -> None:
        """All batches have been read: optimizers go on from there."""
        matching = self._matching
        assert matching is not None
        saved = matching.optimizers
        for steps, names, mine in zip(self.steps, self.params, saved, strict=True):
            params = [param for group in steps.opt.param_groups for param in group["params"]]
            for name, param in zip(names, params, strict=True):
                for key, one in mine.get("beside", {}).get(matching.source_of(name), {}).items():
                    steps.opt.state[param][key] = back(one)
            steps.complete(mine)
        modules = extra_states(self.model)
        for name, kept in self._extra_tensors.items():
            modules[name].set_extra_state(kept)
        for name, kept in (values.get("extra_state") or {}).items():
            if name in modules and name not in self._extra_tensors and kept is not None:
                modules[name].set_extra_state(_restored(kept))


_OUTSIDE = ("params", "param_names")


def _shown_initial(tensor: Tensor, initial: Tensor) -> Tensor:
    home = home_of(tensor)
    assert home is not None
    if home.sharding.replicated:
        return initial.view(home.shape)
    return Sharded(initial, home.shape, home.start, name=home.name, kind="state", group=home.sharding.group)


def _dtype(row: Any) -> torch.dtype:
    return row.dtype if isinstance(row.dtype, torch.dtype) else getattr(torch, row.dtype)


def _extra(name: str, module: nn.Module) -> Any:
    """What a module keeps beside tensors."""
    kept = module.get_extra_state()
    if isinstance(kept, Tensor):
        return None
    if isinstance(kept, (bytes, bytearray)):
        return {"bytes": base64.b64encode(kept).decode()}
    return {"value": plain(kept, f"what {type(module).__name__}.get_extra_state() returns for {name}")}


def _restored(kept: dict[str, Any]) -> Any:
    return base64.b64decode(kept["bytes"]) if "bytes" in kept else back(kept["value"])
