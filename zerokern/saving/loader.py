"""zk.load: everything that can be found wrong is found before anything is changed, on every rank or on none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerokern.core.errors import got
from zerokern.saving import rng as random_state
from zerokern.saving.background import Lane
from zerokern.saving.extra import decoded, targets_of, wanted
from zerokern.saving.foreign import open_checkpoint
from zerokern.saving.intake import Intake
from zerokern.saving.progress import Progress
from zerokern.saving.ranks import Ranks, absolute, open_alike, refuse_unusable
from zerokern.saving.source import Source, sound
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
    ranks = Ranks.of(group, "zk.load")

    def given() -> dict[str, Any]:
        refuse_unusable(model, lossy=lossy, rng=rng)
        if verify not in VERIFY:
            raise ValueError(got("verify", verify, "'first' or 'reading'"))
        return {"path": str(absolute(path)), "verify": verify, "lossy": lossy, "rng": rng}

    ranks.same("zk.load", given)
    ranks.each("the save before", Lane.of(ranks, model).rest)
    loading = Loading(absolute(path), ranks)
    try:
        loading.open()
        return _loaded(loading, ranks, model, opt, extra, lossy, verify, rng)
    finally:
        loading.close()


def _loaded(
    loading: Loading, ranks: Ranks, model: nn.Module, opt: Any, extra: Any, lossy: bool, verify: str, rng: bool
) -> dict[str, Any]:
    ranks.each("check", lambda: loading.check(model, opt, extra, lossy))
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

    intake: Intake
    targets: dict[str, Any]  # objects that take over what they were saved as, by name
    values: dict[str, Any]  # of extra
    state: bytes | None = None  # random

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        assert self._source is not None  # after `open`
        return self._source

    def open(self) -> None:
        """The same checkpoint on every rank."""
        open_alike(self.ranks, self.path, self._open)

    def _open(self) -> str:
        self.close()
        self._source = open_checkpoint(self.path)
        return self._source.likeness() if self.ranks.size > 1 else ""

    def close(self) -> None:
        """Lets go of it."""
        if self._source is not None:
            self._source.close()

    def check(self, model: nn.Module, opt: Any, extra: Any, lossy: bool) -> None:
        """Raises where the checkpoint does not fit; changes nothing."""
        subject = Subject(model, opt)
        with sound(self.path, TypeError):
            if subject.params:
                self.source.name_parameters(subject.params)
            self.intake = Intake(subject, self.source, lossy)
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
