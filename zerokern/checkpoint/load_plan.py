"""Compares a checkpoint with the model and optimizers it is loaded into, and plans how each tensor is loaded."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerokern.checkpoint.formats import MASTERS, master_kind, rounds_master, rounds_moment
from zerokern.checkpoint.optimizers import AnyOptimizer, Wanted, from_plain
from zerokern.checkpoint.source import Source, reject_invalid
from zerokern.checkpoint.training_state import TrainingState, aliases, extra_states
from zerokern.core.errors import StateError
from zerokern.optim.formats import is_coded
from zerokern.optim.shown import PENDING
from zerokern.zero.kinds import local_of
from zerokern.zero.shard import here_of_state, shard_of

__all__ = ["LoadPlan", "StatePlan", "TensorPlan"]

_SHOWN = 20
_LOSSY = "; lossy=True allows it"
_LATE = (
    "{name}: it was saved while an update waited to be published, which cannot change formats; call opt.flush() before "
    "saving, or load into the formats that it was saved in"
)
_TO_SHARD = "load it into what zk.shard has sharded, which keeps that for the optimizer, or into float32"


@dataclass
class TensorPlan:
    """How one parameter or buffer is loaded. `beside`: saved masters that its exact value is computed from."""

    tensor: Tensor
    source: str
    dtype: torch.dtype
    kind: str = "none"
    beside: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)

    @property
    def converts(self) -> bool:
        return self.dtype is not self.tensor.dtype or bool(self.beside)

    @property
    def exact(self) -> dict[str, tuple[str, torch.dtype]]:
        """What its exact value is computed from: keys and dtypes in the source."""
        return {"param": (self.source, self.dtype), **self.beside}


@dataclass
class StatePlan:
    """How the state of one parameter is loaded: dtypes and shapes as `saved` and as `wanted`, and what needs a
    conversion."""

    param: Tensor
    prefix: str
    value: tuple[str, torch.dtype]  # the parameter itself, in the source
    saved: Wanted
    wanted: Wanted
    moments: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    masters: bool = False

    @property
    def converts(self) -> bool:
        return bool(self.moments) or self.masters

    @property
    def exact(self) -> dict[str, tuple[str, torch.dtype]]:
        """What the parameter's exact value is computed from: keys and dtypes in the source."""
        kept = {key: (f"{self.prefix}{key}", self.saved[key][0]) for key in MASTERS if key in self.saved}
        return {"param": self.value, **kept}

    def makes(self, key: str) -> bool:
        """Returns whether this key is computed from other values."""
        return key.removesuffix("_scale") in self.moments or (key in MASTERS and self.masters)

    def copies(self, key: str) -> bool:
        """Returns whether this key is read without a conversion."""
        return key in self.saved and not self.makes(key)


class LoadPlan:
    """Plans a load. Raises StateError that lists all differences if the checkpoint does not fit."""

    def __init__(self, target: TrainingState, source: Source, lossy: bool) -> None:
        self.target, self.source, self.lossy = target, source, lossy
        self.differences: list[str] = []  # why the checkpoint does not fit
        self._aliases: dict[str, str] = source.values.get("aliases") or {}
        self._other_names: dict[str, list[str]] = {}
        for name, first in aliases(target.model).items():
            self._other_names.setdefault(first, []).append(name)
        self._state: dict[str, Wanted] = {}
        for key in source.tensors:
            if key.startswith("optim.state."):
                name, _, last = key.removeprefix("optim.state.").rpartition(".")
                self._state.setdefault(name, {})[last] = self._row(key)
        saved, count = list(source.values.get("optimizers") or ()), len(target.optimizers)
        saved = saved if len(saved) == count else [{} for _ in target.optimizers]
        # Decoded here, for it is too late to refuse when all else is loaded.
        with reject_invalid(source.path, TypeError, of="'optimizers'"):
            self.beside = self._plan_beside(saved)  # the optimizer state that is not a tensor, by parameter
        modules, states = extra_states(target.model), source.values.get("extra_state") or {}
        with reject_invalid(source.path, TypeError, ValueError, of="'extra_state'"):
            self.extra_states = {  # what modules keep besides tensors (`get_extra_state`)
                name: b64decode(state["bytes"]) if "bytes" in state else from_plain(state["value"])
                for name, state in states.items()
                if name in modules and state is not None
            }
        with reject_invalid(source.path, TypeError, of="'groups' and 'optimizers'"):
            self.groups = self._plan_groups(saved)
        self.states: list[dict[int, StatePlan]] = [{} for _ in target.optimizers]
        self._kinds: dict[str, dict[str, torch.dtype]] = {}  # what state parameters will have, by name
        if not self.differences:
            self._plan_states()
        self.extra_tensors: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self.initials: dict[str, tuple[str, torch.dtype]] = {}
        self.tensors = self._plan_tensors()
        if self.differences:
            self._refuse_differences()

    def _refuse_differences(self) -> NoReturn:
        head = f"this checkpoint ({self.source.path}) does not fit what it is loaded into"
        rest = len(self.differences) - _SHOWN
        more = [f"  ... and {rest} more"] if rest > 0 else []
        shown = [f"  {line}" for line in self.differences[:_SHOWN]]
        raise StateError("\n".join([f"{head}; nothing was changed. What differs:", *shown, *more]))

    def _saved_name(self, name: str) -> str:
        """Returns the name of a parameter in the checkpoint; tied parameters have several."""
        names = [name, self._aliases.get(name, name), *self._other_names.get(name, ())]
        return next((name for name in names if f"model.{name}" in self.source.tensors), name)

    def _row(self, key: str) -> tuple[torch.dtype, torch.Size]:
        row = self.source.tensors[key]
        return getattr(torch, row.dtype), torch.Size(row.shape)

    def _plan_tensors(self) -> list[TensorPlan]:
        """Plans parameters and buffers."""
        plans: list[TensorPlan] = []
        used: set[str] = set()
        for name, tensor in self.target.tensors.items():
            there = self._saved_name(name)
            used.add(there)
            if f"model.{there}" not in self.source.tensors:
                self.differences.append(f"{name}: missing; the model has {tuple(tensor.shape)} {tensor.dtype}")
                continue
            dtype, shape = self._row(f"model.{there}")
            if shape != tensor.shape:
                self.differences.append(f"{name}: shape {tuple(shape)}; the model has {tuple(tensor.shape)}")
                continue
            local = local_of(tensor)
            if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
                self.differences.append(
                    f"{name}: elements share memory, strides {local.stride()}; replace it by a clone"
                )
            self._check_tied(name, there)
            plans.append(self._tensor_plan(name, there, tensor, dtype))
        extras = {f"model.{name}": name for name in extra_states(self.target.model)}
        tied = {name for others in self._other_names.values() for name in others}
        for key in self.source.tensors:
            if key in extras:
                self.extra_tensors[extras[key]] = self._row(key)
            elif key.startswith("model."):
                name = key.removeprefix("model.")
                known = self._aliases.get(name, name)
                if not {name, known} & used and name not in tied and known not in self.target.elsewhere:
                    self.differences.append(f"{name}: unexpected; the model has no parameter or buffer of that name")
        return plans

    def _tensor_plan(self, name: str, there: str, tensor: Tensor, dtype: torch.dtype) -> TensorPlan:
        saved = self._state.get(there, {})
        beside = {key: (f"optim.state.{there}.{key}", saved[key][0]) for key in MASTERS if key in saved}
        initial = f"initial.{there}"  # what zk.shard rounded away, and no optimizer has taken
        if initial in self.source.tensors and not beside:
            lost = self._row(initial)[0]
            beside = {"master" if lost is torch.float32 else "remainder": (initial, lost)}
            if dtype is tensor.dtype:
                if shard_of(tensor) is not None:
                    self.initials[name] = initial, lost
                elif not self.lossy:
                    self.differences.append(f"{name}: it is kept more exactly than {dtype} has it; {_TO_SHARD}{_LOSSY}")
                return TensorPlan(tensor, f"model.{there}", dtype)
        was = master_kind(dtype, {key: kept_dtype for key, (_, kept_dtype) in beside.items()})
        mine = self._kinds.get(name)
        kind = master_kind(tensor.dtype, mine or {})
        same = dtype is tensor.dtype and (mine is None or kind != "split8" or was == kind)
        plan = TensorPlan(tensor, f"model.{there}", dtype, kind, {} if same else beside)
        late = PENDING in saved and self._late
        if dtype is tensor.dtype:
            if late and not self.target.optimizers:
                # The optimizer that would publish it is not loaded: what it holds is what the last step has made.
                if saved[PENDING] == (dtype, tensor.shape):
                    plan.source = f"optim.state.{there}.{PENDING}"
                else:
                    self.differences.append(_LATE.format(name=name))
            return plan
        if dtype.is_floating_point:
            try:
                rounds = rounds_master((dtype, was), (tensor.dtype, kind))
            except KeyError:
                rounds = True
        else:
            rounds = torch.promote_types(dtype, tensor.dtype) is not tensor.dtype
        if late:
            self.differences.append(_LATE.format(name=name))
        if rounds and not self.lossy:
            self.differences.append(f"{name}: {dtype} to {tensor.dtype} rounds it{_LOSSY}")
        return plan

    def _check_tied(self, name: str, there: str) -> None:
        """Reports tensors that are tied in the model and have different values in the checkpoint."""
        for other in (name, *self._other_names.get(name, ())):
            key = f"model.{other}"
            separate = other != there and key in self.source.tensors
            if separate and not self.source.whole.tensors_equal(f"model.{there}", key):
                self.differences.append(
                    f"{other}: it is tied to {there} here, and the checkpoint has its own value for it; untie them "
                    "here, or tie them before saving"
                )

    def _plan_beside(self, kept: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
        made = []
        for optimizer, names in zip(kept, self.target.params, strict=True):
            saved = {name: dict(entry.items()) for name, entry in optimizer.get("beside", {}).items()}
            mine = {name: saved[there] for name in names if (there := self._saved_name(name)) in saved}
            made.append(
                {name: {key: from_plain(value) for key, value in entry.items()} for name, entry in mine.items()}
            )
        return made

    def _plan_groups(self, kept: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Returns the saved param_groups of each optimizer, with values converted to the types that the optimizer
        uses."""
        optimizers, saved = self.target.optimizers, self.source.values.get("groups")
        if saved and isinstance(saved[0], dict):
            saved = [saved]
        self._late = any(group.get("delayed_pending") for groups in saved or () for group in groups)
        if not optimizers:
            return []
        if not saved:
            if not self._state:
                self.differences.append("it holds no optimizer; leave opt out, or load one that was saved with it")
            saved = [[{} for _ in optimizer.opt.param_groups] for optimizer in optimizers]
        if len(saved) != len(optimizers):
            holds = f"it holds {len(saved)} optimizer{'' if len(saved) == 1 else 's'}"
            were = "was" if len(optimizers) == 1 else "were"
            self.differences.append(f"{holds}; {len(optimizers)} {were} passed. opt= takes all of them, in their order")
            return [[] for _ in optimizers]
        if (order := self._other_order(saved)) is not None:
            passed = ", ".join(f"opt[{place}]" for place in order)
            self.differences.append(f"it holds the same optimizers in other order; pass {passed}")
            return [[] for _ in optimizers]
        made = []
        for optimizer, groups, names, own in zip(optimizers, saved, self.target.names_by_group, kept, strict=True):
            fitting = self._match_groups(optimizer, groups, names)
            if fitting is not None:
                self.differences += optimizer.differences(fitting, own)
            made.append(fitting or [])
        return made

    def _other_order(self, saved: Sequence[Any]) -> list[int] | None:
        """Returns the places of the optimizers that were passed in the order in which they were saved; None where it is
        theirs, or they have other parameters."""
        theirs = [[name for group in groups for name in group.get("params") or ()] for groups in saved]
        mine = [[self._saved_name(name) for some in names for name in some] for names in self.target.names_by_group]
        if not all(isinstance(name, str) for names in theirs for name in names):
            return None
        left, right = [sorted(names) for names in mine], [sorted(names) for names in theirs]
        return [left.index(names) for names in right] if left != right and sorted(left) == sorted(right) else None

    def _match_groups(
        self, optimizer: AnyOptimizer, saved: Sequence[Any], names: Sequence[Sequence[str]]
    ) -> list[dict[str, Any]] | None:
        mine = optimizer.opt.param_groups
        if len(saved) != len(mine):
            self.differences.append(f"it has {len(saved)} param_groups; the optimizer has {len(mine)}")
            return None
        made = []
        for number, (group, own, some) in enumerate(zip(saved, mine, names, strict=True)):
            here = {self._saved_name(name) for name in some}
            there = group.get("params")
            if there is not None and all(isinstance(name, str) for name in there):
                there = {name for name in there if name in here or name not in self.target.elsewhere}
                if there != here:
                    less, more = sorted(here - there), sorted(there - here)
                    said = [f"without {less[0]}" if less else "", f"with {more[0]}" if more else ""]
                    which = f"{' and '.join(filter(None, said))} ({len(less) + len(more)} in all)"
                    self.differences.append(f"param_groups[{number}]: other parameters than the optimizer has, {which}")
                    return None
            made.append({key: from_plain(value, own.get(key)) for key, value in group.items() if key != "params"})
        return made

    def _plan_states(self) -> None:
        stepped: set[str] = set()
        for optimizer, names, plans in zip(self.target.optimizers, self.target.params, self.states, strict=True):
            theirs = [self._saved_name(name) for name in names]
            stepped.update(theirs)
            saved = [self._state.get(name) if f"model.{name}" in self.source.tensors else None for name in theirs]
            rows = zip(optimizer.params, names, theirs, saved, optimizer.wanted(saved), strict=True)
            for number, (param, name, there, saved_state, (wanted, optional)) in enumerate(rows):
                if not saved_state:
                    continue
                value = f"model.{there}", self._row(f"model.{there}")[0]
                wanted = {key: spec for key, spec in wanted.items() if key in saved_state or key not in optional}
                plan = StatePlan(param, f"optim.state.{there}.", value, saved_state, wanted)
                if self._complete_state_plan(plan, name, type(optimizer.opt).__name__):
                    plans[number] = plan
                    self._kinds[name] = {key: dtype for key, (dtype, _) in wanted.items()}
        if self.target.optimizers:
            rest = sorted(self._state.keys() - stepped - self.target.elsewhere)
            self.differences += [f"{name}: its optimizer state is unexpected; nothing steps it here" for name in rest]

    def _complete_state_plan(self, plan: StatePlan, name: str, rule: str) -> bool:
        """Fills in a plan for an optimizer of the class `rule`; returns False if there are differences."""
        before, say, saved, wanted = len(self.differences), self.differences.append, plan.saved, plan.wanted
        dtypes = [{key: some[key][0] for key in MASTERS if key in some} for some in (saved, wanted)]
        was = plan.value[1], master_kind(plan.value[1], dtypes[0])
        now = plan.param.dtype, master_kind(plan.param.dtype, dtypes[1])
        plan.masters = was != now and now[1] not in ("own", "none")
        for key, (dtype, shape) in wanted.items():
            if key in MASTERS or key.endswith("_scale"):
                continue
            if key not in saved:
                say(f"{name}: state {key!r} is missing; there is {', '.join(saved)}")
            elif saved[key][1] != shape and not (shape.numel() == 1 and saved[key][1].numel() == 1):
                say(f"{name}: state {key!r} has shape {tuple(saved[key][1])}; {tuple(shape)} is needed")
            elif shape != here_of_state(plan.param).shape and saved[key] != (dtype, shape):
                plan.scalars.append(key)
            elif saved[key][0] is not dtype:
                plan.moments.append(key)
                self._check_rounding(name, key, saved[key][0], dtype)
            elif is_coded(key, dtype) and f"{key}_scale" not in saved:
                say(f"{name}: state {key!r} is codes, and its scales are missing")
        kept = {*wanted, *MASTERS, PENDING}
        kept |= {f"{key}_scale" for key in wanted if key in saved and is_coded(key, saved[key][0])}
        for key in saved:
            if key not in kept:
                say(f"{name}: state {key!r} is unexpected; {rule} keeps {', '.join(wanted)}")
        if was != now and rounds_master(was, now) and not self.lossy:
            say(f"{name}: a {was[0]} parameter with master {was[1]!r} to {now[0]} with {now[1]!r} rounds it{_LOSSY}")
        if PENDING in saved and self._late and was != now:
            say(_LATE.format(name=name))
        return len(self.differences) == before

    def _check_rounding(self, name: str, key: str, source: torch.dtype, target: torch.dtype) -> None:
        try:
            rounds = rounds_moment(key, source, target)
        except StateError as error:
            self.differences.append(f"{name}: {error}")
            return
        if rounds and not self.lossy:
            self.differences.append(f"{name}: state {key!r} as {source} to {target} rounds it{_LOSSY}")
