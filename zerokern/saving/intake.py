"""A checkpoint on its way into a model and its optimizers: refused whole, or read batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.io import Nvme
from zerokern.optim.local import PENDING
from zerokern.saving.filling import Batch, Straight, converted, on_disk, refuse_without_room, waiting
from zerokern.saving.matching import Matching
from zerokern.saving.parameters import extra_states, refuse_meta, settle, wrote
from zerokern.saving.source import Source, Told, untold
from zerokern.saving.subject import Subject
from zerokern.zero.homes import home_of

__all__ = ["Intake"]


class Intake:
    """Refuses a source that does not fit, with everything that differs; nothing is changed before `fill`."""

    def __init__(self, subject: Subject, source: Source, lossy: bool = False) -> None:
        self._subject, self._source = subject, source
        for name, tensor in subject.tensors.items():
            refuse_meta(name, tensor)
        self._matching = Matching(subject, source, lossy)
        if self._matching.differences:
            raise StateError(self._matching.report())
        for steps, plans in zip(subject.steps, self._matching.states, strict=True):
            refuse_without_room(steps, plans)

    def fill(self, told: Told = untold) -> None:
        """Reads it all into place. Optimizers are torn from here to `finish`."""
        for batch in self.batches():
            self._source.read(batch.items, told)
            batch.after()

    def batches(self) -> Iterator[Batch]:
        """What is to be read together, and then done. The first is all that goes straight into place."""
        matching = self._matching
        settle(self._subject.model)
        straight = Straight()
        for one in matching.tensors:
            if not one.converts:
                straight.put(one.source, one.tensor.detach())
        self._extra_tensors = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (dtype, shape) in matching.extra_tensors.items()
        }
        for name, kept in self._extra_tensors.items():
            straight.put(f"model.{name}", kept)
        initials: dict[str, Tensor] = {}
        for name, (key, dtype) in matching.initials.items():
            home = home_of(self._subject.tensors[name])
            assert home is not None
            initials[name] = torch.empty(home.numel, dtype=dtype, device=home.piece.device)
            straight.put(key, home.here.show(initials[name], name=home.name))
        by_steps = list(zip(self._subject.steps, matching.states, matching.groups, strict=True))
        entries: dict[int, list[dict[str, Any] | None]] = {}
        # Room on disk may be refused: first, while the others still have what they had.
        for steps, plans, groups in sorted(
            by_steps, key=lambda one: not isinstance(getattr(one[0].opt, "tier", 0), Nvme)
        ):
            steps.lay_out(groups, [plans[i].wanted if i in plans else None for i in range(len(steps.params))])
            entries[id(steps)] = steps.entries()
            for number, plan in plans.items():
                for key, one in (entries[id(steps)][number] or {}).items():
                    if key in plan.scalars:
                        straight.of(f"{plan.prefix}{key}").scalar(f"{plan.prefix}{key}", plan.saved[key], one)
                    elif isinstance(one, Tensor) and plan.straight(key) and key != PENDING:
                        straight.put(f"{plan.prefix}{key}", one)
        yield from straight.batches
        convert = [one for one in matching.tensors if one.converts]
        far = {id(steps): steps.inflow() is not None for steps in self._subject.steps}
        every = [plan for _, plans, _ in by_steps for plan in plans.values()]
        near = [plan for plan in every if plan.converts and not far[id(plan.steps)]]
        yield from converted(convert, near, lambda plan: entries[id(plan.steps)][plan.number] or {})
        for steps, plans, _ in by_steps:
            yield from on_disk(steps, plans)
        wrote(self._subject.model)
        for name, lost in initials.items():
            home = home_of(self._subject.tensors[name])
            assert home is not None
            home.look(self._subject.tensors[name])
            home.keep_initial(lost)
        for steps, plans, _ in by_steps:
            steps.look()
            late = {number: plan for number, plan in plans.items() if steps.late and PENDING in plan.saved}
            if late:
                yield waiting(steps, late, PENDING)

    def finish(self) -> None:
        """All batches have been read: optimizers go on from there."""
        matching = self._matching
        for steps, names, beside in zip(self._subject.steps, self._subject.params, matching.beside, strict=True):
            for name, param in zip(names, steps.params, strict=True):
                if name in beside:
                    steps.opt.state[param].update(beside[name])
            steps.complete()
        modules = extra_states(self._subject.model)
        for name, kept in {**matching.extra_states, **self._extra_tensors}.items():
            modules[name].set_extra_state(kept)
