"""zk.load: everything that can be found wrong is found before anything is changed, on every rank or on none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.checkpoint import rng as random_state
from zerokern.checkpoint.background import Lane
from zerokern.checkpoint.extra import decoded, targets_of, wanted
from zerokern.checkpoint.filling import Batch, Straight, converted, on_disk, refuse_without_room, waiting
from zerokern.checkpoint.matching import Matching
from zerokern.checkpoint.optimizers import Steps
from zerokern.checkpoint.progress import Progress
from zerokern.checkpoint.ranks import Ranks, absolute, open_alike, refuse_unusable
from zerokern.checkpoint.source import Source, Told, sound, untold
from zerokern.checkpoint.stages import Stages, names_elsewhere, whole_of
from zerokern.checkpoint.subject import Subject, extra_states, named_tensors, refuse_meta, settle, wrote
from zerokern.checkpoint.tiles import Untiled
from zerokern.core.errors import StateError, got
from zerokern.interop.foreign import open_checkpoint
from zerokern.io import Nvme
from zerokern.optim.shards import PENDING
from zerokern.zero.kinds import rest_of
from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.sharded import Sharded

__all__ = ["Intake", "load"]

VERIFY = ("first", "reading")


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Any,
    opt: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    lossy: bool = False,
    verify: str = "first",
    rng: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """Load what `zk.save` has saved, straight into model and optimizer; every rank calls it. Returns `extra`.

    Any number of ranks, stage, tier, bucket size and format goes into any other. What torch's `dcp.save`, `torch.save`
    and DeepSpeed (universal) have written is read too. Nothing is unpickled but tensors, by torch's restricted reader.

    Args:
        path: the folder of one checkpoint, or what torch or DeepSpeed have written there.
        model: a module; of a pipeline its stages here, one or several, each with the names that the whole model has.
        opt: its optimizer, or several; without it the optimizer's state is not read.
        extra: objects with `load_state_dict` (schedulers, GradScaler, samplers) by the names they were saved under.
        lossy: whether state may be rounded into a narrower format (`state_format`, `master_format`); otherwise that is
            refused.
        verify: "first" reads every byte once and compares checksums before anything is changed; "reading" compares
            while loading, and leaves an optimizer that refuses to step where a checksum is found wrong.
        rng: whether the random generators go on from where they were, each rank's its own. A rank that was not there
            then gets a state of its own.
        group: the ranks that load, as a ProcessGroup or a DeviceMesh of one dimension or of all ranks; by default all.

    >>> import tempfile
    >>> from zerokern.checkpoint import save
    >>> model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/step3", model)
    ...     load(f"{folder}/step3", other)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.StateError: ...
    """
    ranks, model = Ranks.of(group, "zk.load"), whole_of(model)

    def given() -> dict[str, Any]:
        refuse_unusable(model, lossy=lossy, rng=rng)
        if verify not in VERIFY:
            raise ValueError(got("verify", verify, "'first' or 'reading'"))
        stages = {"stages": isinstance(model, Stages)}
        return {"path": str(absolute(path)), "verify": verify, "lossy": lossy, "rng": rng, **stages}

    ranks.same("zk.load", given)
    ranks.each("the save before", Lane.of(ranks, model).rest)
    loading = Loading(absolute(path), ranks)
    try:
        loading.open()
        return _loaded(loading, ranks, model, opt, extra, lossy, verify, rng)
    except BaseException:
        loading.give_room_back()
        raise
    finally:
        loading.close()


def _loaded(
    loading: Loading, ranks: Ranks, model: nn.Module, opt: Any, extra: Any, lossy: bool, verify: str, rng: bool
) -> dict[str, Any]:
    elsewhere = names_elsewhere(ranks, model, lambda: named_tensors(model))
    ranks.each("check", lambda: loading.check(model, opt, extra, lossy, elsewhere))
    if verify == "first":
        with loading.progress("verifying") as progress:
            ranks.each("verify", lambda: loading.source.verify(ranks.rank, ranks.size, progress))
    with loading.progress("loading") as progress:
        ranks.each("values", lambda: loading.beside(rng, progress))
        ranks.each("reading", lambda: loading.intake.fill(progress))
        ranks.each("finish", loading.intake.finish)
    if loading.state is not None:
        random_state.put_back(loading.state)
    for name, target in loading.targets.items():
        target.load_state_dict(loading.values[name])
    return loading.values


class Loading:
    """One load on this rank: the checkpoint, and what it goes into."""

    source: Source  # after `open`
    intake: Intake
    targets: dict[str, Any]  # objects that take over what they were saved as, by name
    values: dict[str, Any]  # of extra
    state: bytes | None = None  # random
    steps: Sequence[Steps] = ()

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks

    def open(self) -> None:
        """The same checkpoint on every rank."""
        open_alike(self.ranks, self.path, self._open)

    def _open(self) -> str:
        self.close()
        self.source = open_checkpoint(self.path)
        return self.source.likeness() if self.ranks.size > 1 else ""

    def close(self) -> None:
        """Lets go of it."""
        if hasattr(self, "source"):
            self.source.close()

    def give_room_back(self) -> None:
        """What disks hold for state that is not going to come."""
        for steps in self.steps:
            if steps.disk is not None and steps.disk.is_open:
                steps.disk.hold([])

    def check(self, model: nn.Module, opt: Any, extra: Any, lossy: bool, elsewhere: frozenset[str]) -> None:
        """Raises where the checkpoint does not fit; changes nothing."""
        subject = Subject(model, opt, elsewhere)
        self.steps = subject.steps
        with sound(self.path, TypeError):
            if subject.params:
                self.source.name_parameters(subject.numbered())
            source = Untiled(self.source, subject.parts) if subject.parts else self.source
            self.intake = Intake(subject, source, lossy)
        with sound(self.path):
            self.targets = targets_of(extra, self.source.values.get("extra") or {}, self.ranks)

    def progress(self, what: str) -> Progress:
        """Of the first rank's share."""
        return Progress(what, self.source.nbytes // self.ranks.size, None if self.ranks.rank == 0 else False)

    def beside(self, rng: bool, progress: Progress) -> None:
        """`extra`, and the random state that this rank is to go on with: read before anything is changed."""
        with sound(self.path):
            tree, shape = self.source.values.get("extra") or {}, self.source.values.get("rng")
            room: dict[str, Any] = {**wanted(tree, self.source.tensors, self.ranks)}
            if rng and shape is not None:
                world, width = shape["world"], shape["width"]
                row = torch.empty(width, dtype=torch.uint8, device="cpu")
                start = self.ranks.rank % world * width
                room["extra.rng"] = Sharded(row, torch.Size([world, width]), start, name="rng", kind="state")
        self.source.read(room, progress)
        with sound(self.path):
            self.values = decoded(tree, room, self.ranks)
            if rng and shape is not None:
                mine = bytes(row.tolist())
                self.state = mine if self.ranks.rank < world else random_state.unlike(mine, self.ranks.rank)
                random_state.checked(self.state)


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
        settle(self._subject.model, replaced=True)
        straight = Straight()
        for one in matching.tensors:
            if not one.converts:
                straight.put(one.source, one.tensor.detach() if rest_of(one.tensor) is None else one.tensor)
        self._extra_tensors = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (dtype, shape) in matching.extra_tensors.items()
        }
        for name, kept in self._extra_tensors.items():
            straight.put(f"model.{name}", kept)
        initials: list[tuple[Shard, Tensor, Tensor]] = []
        for name, (key, dtype) in matching.initials.items():
            tensor = self._subject.tensors[name]
            home = shard_of(tensor)
            assert home is not None
            lost = torch.empty(home.numel, dtype=dtype, device=home.piece.device)
            straight.put(key, home.here.show(lost, name=home.name))
            initials.append((home, tensor, lost))
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
        for home, tensor, lost in initials:
            home.look(tensor)
            home.keep_initial(lost)
        for steps, plans, _ in by_steps:
            steps.look()
            late = {number: plan for number, plan in plans.items() if steps.late and PENDING in plan.saved}
            if late:
                yield from waiting(steps, late, PENDING)

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
