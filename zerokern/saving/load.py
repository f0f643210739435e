"""zk.load: everything that can be found wrong is found before anything is changed, on every rank or on none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from zerokern.core.errors import got
from zerokern.saving import rng as random_state
from zerokern.saving.background import Lane
from zerokern.saving.extra import decoded, targets_of, wanted
from zerokern.saving.foreign import open_checkpoint
from zerokern.saving.planners import LoadPlanner
from zerokern.saving.progress import Progress
from zerokern.saving.ranks import Ranks
from zerokern.saving.source import Source
from zerokern.saving.subject import Subject
from zerokern.zero.sharded import Sharded

__all__ = ["load"]

VERIFY = ("first", "reading")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
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
        extra: objects with `load_state_dict` (schedulers, GradScaler, samplers) by the names they were saved under.
        lossy: whether state may be rounded into a narrower format (`state_format`, `master_format`); otherwise that is
            refused.
        verify: "first" reads every byte once and compares checksums before anything is changed; "reading" compares
            while loading, and leaves an optimizer that refuses to step where a checksum is found wrong.
        rng: whether the random generators go on from where they were, each rank's its own. A rank that was not there
            then gets a state of its own.
        group: the ranks that load, as a ProcessGroup or a 1-D DeviceMesh; by default all.

    >>> import tempfile
    >>> from zerokern.saving import save
    >>> model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/step3", model)
    ...     load(f"{folder}/step3", other)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.StateError: ...
    """
    ranks = Ranks.of(group)

    def given() -> dict[str, Any]:
        _refuse_unusable(model, verify, lossy, rng)
        return {"path": str(Path(path).absolute()), "verify": verify, "lossy": lossy, "rng": rng}

    ranks.same("zk.load", given)
    ranks.each("the save before", Lane.of(ranks, model).rest)
    loading = Loading(Path(path).absolute(), ranks)
    ranks.each("open", loading.open)
    ranks.each("check", lambda: loading.check(model, opt, extra, lossy))
    if verify == "first":
        with loading.progress("verifying") as progress:
            ranks.each("verify", lambda: loading.source.verify(ranks.rank, ranks.size, progress))
    with loading.progress("loading") as progress:
        values, state = loading.beside(rng, progress)
        for items, after in loading.batches(lossy):
            loading.read(items, progress)
            ranks.each("take over", after)
        ranks.each("finish", lambda: loading.subject.finish(loading.source.values))
    if state is not None:
        random_state.put_back(state)
    for name, target in loading.targets.items():
        target.load_state_dict(values[name])
    return values


def _refuse_unusable(model: Any, verify: Any, lossy: Any, rng: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(got("model", model, "a torch.nn.Module"))
    if verify not in VERIFY:
        raise ValueError(got("verify", verify, "'first' or 'reading'"))
    for name, value in (("lossy", lossy), ("rng", rng)):
        if not isinstance(value, bool):
            raise TypeError(got(name, value, "True or False"))


class OwnPlanner(LoadPlanner):
    """Keeps its plan to itself: what a rank reads concerns no other, and a thousand plans take long to be sent."""

    def create_local_plan(self) -> LoadPlan:
        """The plan that is sent: nothing."""
        self._own = super().create_local_plan()
        return LoadPlan([])

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan that is carried out: this rank's."""
        return self._own


class Loading:
    """One load on this rank: the checkpoint, and what it goes into."""

    source: Source
    subject: Subject
    targets: dict[str, Any]

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks

    def open(self) -> None:
        self.source = open_checkpoint(self.path)

    def check(self, model: nn.Module, opt: Any, extra: Any, lossy: bool) -> None:
        """Raises where the checkpoint does not fit; changes nothing."""
        self.subject = Subject(model, opt)
        if self.subject.params:
            self.source.name_parameters(self.subject.params)
        self.subject.check(self.source, lossy)
        self.targets = targets_of(extra, self.source.values.get("extra") or {}, self.ranks)

    def progress(self, what: str) -> Progress:
        """Of the first rank's share."""
        return Progress(what, self.source.nbytes // self.ranks.size, None if self.ranks.rank == 0 else False)

    def beside(self, rng: bool, progress: Progress) -> tuple[dict[str, Any], bytes | None]:
        """`extra`, and the random state that this rank is to go on with: read before anything is changed."""
        tree, shape = self.source.values.get("extra") or {}, self.source.values.get("rng")
        room: dict[str, Tensor] = wanted(tree, self.source.tensors, self.ranks)
        row, world = None, 0
        if rng and shape is not None:
            world, width = shape["world"], shape["width"]
            row = torch.empty(width, dtype=torch.uint8, device="cpu")
            start = self.ranks.rank % world * width
            room["extra.rng"] = Sharded(row, torch.Size([world, width]), start, name="rng", kind="state")
        if any(self.ranks.each("extra", lambda: bool(room))):
            self.read(dict(room), progress)
        values = decoded(tree, room, self.ranks)
        if row is None:
            return values, None
        mine = bytes(row.tolist())
        return values, mine if self.ranks.rank < world else random_state.unlike(mine, self.ranks.rank)

    def batches(self, lossy: bool) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        """As the subject's, as many on every rank: who has fewer takes part in reading with nothing to read."""
        mine = self.subject.batches(self.source, lossy)
        found: list[tuple[dict[str, Any], Callable[[], None]]] = []

        def advance() -> bool:
            found[:] = [one for one in (next(mine, None),) if one is not None]
            return bool(found)

        while any(self.ranks.each("next", advance)):
            yield found[0] if found else ({}, lambda: None)

    def read(self, items: dict[str, Any], progress: Progress) -> None:
        """Fills these from the checkpoint; every rank takes part, whatever it wants."""
        reader, planner = self.source.storage_reader(progress), OwnPlanner()
        if self.ranks.pg is None:  # dcp.load would warn that there is no process group, and do the same
            self.ranks.run(lambda _: _load_state_dict(items, reader, no_dist=True, planner=planner))
        else:
            pg = self.ranks.pg
            self.ranks.run(lambda _: dcp.load(items, storage_reader=reader, planner=planner, process_group=pg))
