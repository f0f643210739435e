"""A checkpoint beside what it is to be loaded into: what goes where, what is rounded, and everything that differs."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import torch

from zerokern.checkpoint.filling import StatePlan, TensorPlan
from zerokern.checkpoint.formats import MASTERS, is_coded, master_kind, rounds_master, rounds_moment
from zerokern.checkpoint.optimizers import Steps, Wanted, back
from zerokern.checkpoint.source import Foreign, Source
from zerokern.checkpoint.subject import Subject, aliases, extra_states
from zerokern.core.errors import StateError
from zerokern.optim.shards import PENDING
from zerokern.zero.kinds import local_of
from zerokern.zero.shard import here_of_state, shard_of

__all__ = ["Matching"]

_SHOWN = 20
_LOSSY = "; lossy=True rounds it"
_LATE = (
    "{name}: it was saved while an update waited to be published, which cannot change formats; call opt.flush() before "
    "saving, or load into the formats that it was saved in"
)
_TO_SHARD = "load it into what zk.shard has divided, which keeps that for the optimizer, or into float32"


class Matching:
    """`differences` says why the source cannot be loaded; where there are none, the rest says how it is."""

    def __init__(self, subject: Subject, source: Source, lossy: bool) -> None:
        self.subject, self.source, self.lossy = subject, source, lossy
        self.differences: list[str] = []
        self._aliases: dict[str, str] = source.values.get("aliases") or {}
        self._other_names: dict[str, list[str]] = {}
        for name, first in aliases(subject.model).items():
            self._other_names.setdefault(first, []).append(name)
        self._state = self._by_parameter()
        self.optimizers = self._optimizers()
        self.beside = self._beside()
        self.extra_states = self._extra_states()
        self.groups = self._groups()
        self.states: list[dict[int, StatePlan]] = [{} for _ in subject.steps]
        if not self.differences:
            self._match_states()
        self._kinds = {
            name: {key: dtype for key, (dtype, _) in plan.wanted.items()}
            for names, plans in zip(subject.params, self.states, strict=True)
            for name, plan in zip(names, map(plans.get, range(len(names))), strict=True)
            if plan is not None
        }
        self.extra_tensors: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self.initials: dict[str, tuple[str, torch.dtype]] = {}
        self.tensors = self._match_tensors()

    def report(self) -> str:
        """All differences in one message."""
        shown = [f"  {line}" for line in self.differences[:_SHOWN]]
        rest = len(self.differences) - len(shown)
        head = f"this checkpoint ({self.source.path}) does not fit what it is loaded into"
        more = [f"  ... and {rest} more"] if rest else []
        return "\n".join([f"{head}; nothing was changed. What differs:", *shown, *more])

    def source_of(self, name: str) -> str:
        """What the source calls a parameter: tied ones have several names."""
        tensors = self.source.tensors
        names = [name, self._aliases.get(name, name), *self._other_names.get(name, ())]
        return next((one for one in names if f"model.{one}" in tensors), name)

    def _row(self, key: str) -> tuple[torch.dtype, torch.Size]:
        row = self.source.tensors[key]
        return getattr(torch, row.dtype), torch.Size(row.shape)

    def _by_parameter(self) -> dict[str, Wanted]:
        found: dict[str, Wanted] = {}
        for key in self.source.tensors:
            if key.startswith("optim.state."):
                name, _, last = key.removeprefix("optim.state.").rpartition(".")
                found.setdefault(name, {})[last] = self._row(key)
        return found

    def _match_tensors(self) -> list[TensorPlan]:
        """Where parameters and buffers come from."""
        plans: list[TensorPlan] = []
        used: set[str] = set()
        for name, tensor in self.subject.tensors.items():
            there = self.source_of(name)
            used.add(there)
            if f"model.{there}" not in self.source.tensors:
                self.differences.append(f"{name}: missing; the model has {tuple(tensor.shape)} {tensor.dtype}")
                continue
            dtype, shape = self._row(f"model.{there}")
            if shape != tensor.shape:
                self.differences.append(f"{name}: shape {tuple(shape)}; the model has {tuple(tensor.shape)}")
                continue
            self._say_overlap(name, tensor)
            self._say_tied(name, there)
            plans.append(self._tensor_plan(name, there, tensor, dtype))
        extras = {f"model.{name}": name for name in extra_states(self.subject.model)}
        for key in self.source.tensors:
            if key in extras:
                self.extra_tensors[extras[key]] = self._row(key)
            elif key.startswith("model.") and key.removeprefix("model.") not in used:
                name = key.removeprefix("model.")
                known = self._aliases.get(name, name)
                if known in self.subject.elsewhere:
                    continue
                if known not in used and not any(name in others for others in self._other_names.values()):
                    self.differences.append(f"{name}: unexpected; the model has no parameter or buffer of that name")
        return plans

    def _tensor_plan(self, name: str, there: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorPlan:
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
        was = master_kind(dtype, {key: one for key, (_, one) in beside.items()})
        mine = self._kinds.get(name)
        kind = master_kind(tensor.dtype, mine or {})
        same = dtype is tensor.dtype and (mine is None or kind != "split8" or was == kind)
        plan = TensorPlan(tensor, f"model.{there}", dtype, kind, {} if same else beside)
        late = PENDING in saved and self._late
        if dtype is tensor.dtype:
            if late and not self.subject.steps:
                # The optimizer that would publish it is not loaded: what it holds is what the last step has made.
                if saved[PENDING] == (dtype, tensor.shape):
                    plan.source = f"optim.state.{there}.{PENDING}"
                else:
                    self.differences.append(_LATE.format(name=name))
            return plan
        try:
            rounds = rounds_master((dtype, was), (tensor.dtype, kind)) if dtype.is_floating_point else True
        except KeyError:
            rounds = True
        if not dtype.is_floating_point:
            rounds = torch.promote_types(dtype, tensor.dtype) is not tensor.dtype
        if late:
            self.differences.append(_LATE.format(name=name))
        if rounds and not self.lossy:
            self.differences.append(f"{name}: {dtype} to {tensor.dtype} rounds it{_LOSSY}")
        return plan

    def _say_overlap(self, name: str, tensor: torch.Tensor) -> None:
        local = local_of(tensor)
        if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
            self.differences.append(f"{name}: elements share memory, strides {local.stride()}; replace it by a clone")

    def _say_tied(self, name: str, there: str) -> None:
        """What is one tensor here may be several there, if these are equal."""
        for other in (name, *self._other_names.get(name, ())):
            if other != there and f"model.{other}" in self.source.tensors and not self._equal(there, other):
                self.differences.append(
                    f"{other}: it is tied to {there} here, and the checkpoint has its own value for it; untie them "
                    "here, or tie them before saving"
                )

    def _equal(self, one: str, other: str) -> bool:
        """Whether two tensors are known to be the same: somebody else's state_dict has tied ones under each name."""
        keys = [f"model.{one}", f"model.{other}"]
        source = self.source.whole
        if not isinstance(source, Foreign) or self._row(keys[0]) != self._row(keys[1]):
            return False
        fetch = source.fetch
        boxes = [{(box.offsets, box.sizes): box for box in source.tensors[key].boxes} for key in keys]
        if boxes[0].keys() != boxes[1].keys():
            return False
        return all(_same(fetch(keys[0], box), fetch(keys[1], boxes[1][place])) for place, box in boxes[0].items())

    def _optimizers(self) -> list[dict[str, Any]]:
        found = self.source.values.get("optimizers") or []
        count = len(self.subject.steps)
        return list(found) if len(found) == count else [{} for _ in range(count)]

    def _beside(self) -> list[dict[str, dict[str, Any]]]:
        """What state has that is no tensor, by parameter; decoded here, for it is too late to refuse in `finish`."""
        made = []
        for one, names in zip(self.optimizers, self.subject.params, strict=True):
            saved = {name: dict(entry.items()) for name, entry in one.get("beside", {}).items()}
            mine = {name: saved[there] for name in names if (there := self.source_of(name)) in saved}
            made.append({name: {key: back(value) for key, value in entry.items()} for name, entry in mine.items()})
        return made

    def _extra_states(self) -> dict[str, Any]:
        """What modules keep beside tensors, decoded for the same reason."""
        modules, saved = extra_states(self.subject.model), self.source.values.get("extra_state") or {}
        kept = {name: one for name, one in saved.items() if name in modules and one is not None}
        return {name: b64decode(one["bytes"]) if "bytes" in one else back(one["value"]) for name, one in kept.items()}

    def _groups(self) -> list[list[dict[str, Any]]]:
        """The saved groups of each optimizer, with values as ours have them."""
        steps, values = self.subject.steps, self.source.values
        saved = values.get("groups")
        if saved and isinstance(saved[0], dict):
            saved = [saved]
        if not steps:
            self._late = any(group.get("delayed_pending") for groups in saved or () for group in groups)
            return []
        if not saved:
            if not self._state:
                self.differences.append("it holds no optimizer; leave opt out, or load one that was saved with it")
            saved = [[{} for _ in one.opt.param_groups] for one in steps]
        self._late = any(group.get("delayed_pending") for groups in saved for group in groups)
        if len(saved) != len(steps):
            self.differences.append(f"it holds {len(saved)} optimizers; {len(steps)} were passed")
            return [[] for _ in steps]
        made = []
        for one, groups, names, own in zip(steps, saved, self.subject.params, self.optimizers, strict=True):
            fitting = self._fitting(one, groups, names)
            if fitting is not None:
                self.differences += one.differences(fitting, own)
            made.append(fitting or [])
        return made

    def _fitting(self, steps: Steps, saved: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]] | None:
        mine = steps.opt.param_groups
        if len(saved) != len(mine):
            self.differences.append(f"it has {len(saved)} param_groups; the optimizer has {len(mine)}")
            return None
        left, made = iter(names), []
        for number, (group, own) in enumerate(zip(saved, mine, strict=True)):
            here = [self.source_of(next(left)) for _ in own["params"]]
            there = group.get("params")
            if there is not None and all(isinstance(one, str) for one in there):
                there = [one for one in there if one in here or one not in self.subject.elsewhere]
            if there is not None and all(isinstance(one, str) for one in there) and set(there) != set(here):
                less, more = sorted(set(here) - set(there)), sorted(set(there) - set(here))
                said = [f"without {less[0]}" if less else "", f"with {more[0]}" if more else ""]
                which = f"{' and '.join(filter(None, said))} ({len(less) + len(more)} in all)"
                self.differences.append(f"param_groups[{number}]: other parameters than the optimizer has, {which}")
                return None
            values = {key: back(one, own.get(key)) for key, one in group.items() if key != "params"}
            made.append(values)
        return made

    def _match_states(self) -> None:
        stepped: set[str] = set()
        for steps, names, plans in zip(self.subject.steps, self.subject.params, self.states, strict=True):
            theirs = [self.source_of(name) for name in names]
            stepped.update(theirs)
            saved = [self._state.get(one) if f"model.{one}" in self.source.tensors else None for one in theirs]
            rows = zip(steps.params, names, theirs, saved, steps.wanted(saved), strict=True)
            for number, (param, name, there, found, wanted) in enumerate(rows):
                plan = self._state_plan(steps, number, param, name, there, found, *wanted) if found else None
                if plan is not None:
                    plans[number] = plan
        if self.subject.steps:
            rest = sorted(self._state.keys() - stepped - self.subject.elsewhere)
            self.differences += [f"{name}: its optimizer state is unexpected; nothing steps it here" for name in rest]

    def _state_plan(
        self,
        steps: Steps,
        number: int,
        param: torch.Tensor,
        name: str,
        there: str,
        saved: Wanted,
        wanted: Wanted,
        optional: frozenset[str],
    ) -> StatePlan | None:
        found = len(self.differences)
        say = self.differences.append
        value = (f"model.{there}", self._row(f"model.{there}")[0])
        missing = [key for key in wanted if key not in saved and key in optional]
        wanted = {key: one for key, one in wanted.items() if key not in missing}
        plan = StatePlan(steps, number, param, name, f"optim.state.{there}.", value, saved, wanted)
        was = master_kind(value[1], {key: saved[key][0] for key in MASTERS if key in saved})
        kind = master_kind(param.dtype, {key: wanted[key][0] for key in MASTERS if key in wanted})
        exact = (value[1], was), (param.dtype, kind)
        plan.masters = exact[0] != exact[1] and kind not in ("own", "none")
        for key, (dtype, shape) in wanted.items():
            if key in MASTERS or key.endswith("_scale"):
                continue
            if key not in saved:
                say(f"{name}: state {key!r} is missing; there is {', '.join(saved)}")
            elif saved[key][1] != shape and not (shape.numel() == 1 and saved[key][1].numel() == 1):
                say(f"{name}: state {key!r} has shape {tuple(saved[key][1])}; {tuple(shape)} is needed")
            elif shape != here_of_state(param).shape and saved[key] != (dtype, shape):
                plan.scalars.append(key)
            elif saved[key][0] is not dtype:
                plan.moments.append(key)
                self._say_rounding(name, key, saved[key][0], dtype)
            elif is_coded(key, dtype) and f"{key}_scale" not in saved:
                say(f"{name}: state {key!r} is codes, and its scales are missing")
        kept = {*wanted, *MASTERS, PENDING}
        kept |= {f"{key}_scale" for key in wanted if key in saved and is_coded(key, saved[key][0])}
        for key in saved:
            if key not in kept:
                say(f"{name}: state {key!r} is unexpected; {type(steps.opt).__name__} keeps {', '.join(wanted)}")
        if exact[0] != exact[1] and rounds_master(*exact) and not self.lossy:
            say(f"{name}: a {value[1]} parameter with master {was!r} to {param.dtype} with {kind!r} rounds it{_LOSSY}")
        if PENDING in saved and self._late and exact[0] != exact[1]:
            say(_LATE.format(name=name))
        return plan if len(self.differences) == found else None

    def _say_rounding(self, name: str, key: str, source: torch.dtype, target: torch.dtype) -> None:
        try:
            rounds = rounds_moment(key, source, target)
        except StateError as error:
            self.differences.append(f"{name}: {error}")
            return
        if rounds and not self.lossy:
            self.differences.append(f"{name}: state {key!r} as {source} to {target} rounds it{_LOSSY}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(flat[0], flat[1])
