"""zk.load: finds all errors before it changes anything, on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerokern.checkpoint import rng as random_state
from zerokern.checkpoint.background import PendingSaves
from zerokern.checkpoint.extra import check_targets, decode_extra, empty_tensors
from zerokern.checkpoint.filling import Restore
from zerokern.checkpoint.optimizers import AnyOptimizer
from zerokern.checkpoint.partial import PartialModel, model_of, names_elsewhere
from zerokern.checkpoint.progress import Progress
from zerokern.checkpoint.ranks import Ranks, absolute_path, open_same, refuse_unusable
from zerokern.checkpoint.source import Source, open_checkpoint, reject_invalid
from zerokern.checkpoint.training_state import TrainingState, named_tensors
from zerokern.core.errors import one_of
from zerokern.zero.sharded import Sharded

__all__ = ["load"]


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
    """Loads what `zk.save` has saved, straight into model and optimizer; every rank calls it. Returns `extra`.

    A checkpoint loads on any number of ranks, at any stage, tier, bucket size and format. Files of torch's `dcp.save`,
    of `torch.save` and of DeepSpeed (universal) are read too. Nothing is unpickled except tensors, by torch's
    restricted reader.

    Args:
        path: the folder of one checkpoint, or a file or folder that torch or DeepSpeed has written.
        model: a module; for a pipeline the stages of this rank, one or several, with the names of the whole model.
        opt: its optimizer, or several; without it the optimizer's state is not read.
        extra: objects with `load_state_dict` (schedulers, GradScaler, samplers) by the names they were saved under.
        lossy: whether state may be rounded to a narrower format (`state_format`, `master_format`); otherwise that is
            refused.
        verify: "first" compares all checksums, on every rank, before anything changes. It reads the state once if the
            optimizer has none yet, and twice if it has stepped. "reading" compares while it loads, and always reads
            once; if a checksum is wrong, the optimizer is left in a state in which it refuses to step.
        rng: whether to restore each rank's random generators. A rank that the saved run did not have gets a state of
            its own.
        group: the ranks that load, as a ProcessGroup or a DeviceMesh of one dimension or of all ranks; by default all.

    >>> import tempfile
    >>> from zerokern.checkpoint.saver import save
    >>> model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zk.save(f"{folder}/step3", model)
    ...     zk.load(f"{folder}/step3", other)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.StateError: ...
    """
    ranks, model = Ranks.of(group, "zk.load"), model_of(model)

    def given() -> dict[str, Any]:
        refuse_unusable(model, lossy=lossy, rng=rng)
        one_of("verify", verify, ("first", "reading"))
        stages = {"stages": isinstance(model, PartialModel)}
        return {"path": str(absolute_path(path)), "verify": verify, "lossy": lossy, "rng": rng, **stages}

    ranks.check_same(given)
    ranks.all_gather("the save before", PendingSaves.of(ranks, model).wait)
    loading = Loading(absolute_path(path), ranks)
    try:
        open_same(ranks, loading.path, loading.open)
        elsewhere = names_elsewhere(ranks, model, lambda: named_tensors(model))
        ranks.all_gather("check", lambda: loading.check(model, opt, extra, lossy, elsewhere))
        once = verify == "first" and loading.source.counts_checked
        if verify == "first":
            with loading.progress("verifying") as progress:
                if once:
                    ranks.all_gather("values", lambda: loading.read_values(rng, progress))
                    loading.source.leave_out(ranks.all_gather("read ahead", lambda: loading.read_ahead(progress)))
                ranks.all_gather("verify", lambda: loading.source.verify(ranks.rank, ranks.size, progress))
        with loading.progress("loading") as progress:
            if not once:
                ranks.all_gather("values", lambda: loading.read_values(rng, progress))
            ranks.all_gather("reading", lambda: loading.restore.fill(progress))
            ranks.all_gather("finish", loading.restore.finish)
    except BaseException:
        loading.give_up()
        raise
    finally:
        loading.close()
    if loading.random is not None:
        random_state.set_state(loading.random)
    for name, target in loading.targets.items():
        target.load_state_dict(loading.values[name])
    return loading.values


class Loading:
    """One load on this rank: the checkpoint, and the objects it is loaded into."""

    source: Source  # after `open`
    restore: Restore  # after `check`
    targets: dict[str, Any]  # objects that take over what they were saved as, by name
    values: dict[str, Any]  # of extra
    random: bytes | None = None  # the state of the random generators
    optimizers: Sequence[AnyOptimizer] = ()

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks

    def open(self) -> str:
        """Opens the checkpoint; returns a fingerprint that must be the same on all ranks."""
        self.close()
        self.source = open_checkpoint(self.path)
        return self.source.fingerprint() if self.ranks.size > 1 else ""

    def close(self) -> None:
        """Closes the checkpoint."""
        if hasattr(self, "source"):
            self.source.close()

    def check(self, model: nn.Module, opt: Any, extra: Any, lossy: bool, elsewhere: frozenset[str]) -> None:
        """Raises if the checkpoint does not fit; changes nothing."""
        target = TrainingState(model, opt, elsewhere)
        self.optimizers = target.optimizers
        with reject_invalid(self.path, TypeError):
            if target.params:
                self.source.name_parameters(target.names_by_number())
            self.restore = Restore(target, target.layout.source(self.source), lossy)
        with reject_invalid(self.path, of="'extra'"):
            self.targets = check_targets(extra, self.source.values.get("extra") or {}, self.ranks)

    def read_ahead(self, progress: Progress) -> bytes:
        """Reads what may be read before all was checked; returns what that has checked."""
        self.restore.read_ahead(progress)
        return self.source.checked()

    def give_up(self) -> None:
        """Frees what was read ahead, if it was not taken, and room on disk for state that is not loaded."""
        if hasattr(self, "restore"):
            self.restore.give_up()
        for optimizer in self.optimizers:
            optimizer.give_up()

    def progress(self, what: str) -> Progress:
        """Returns a Progress that shows the share of the first rank."""
        return Progress(what, self.source.nbytes // self.ranks.size, None if self.ranks.rank == 0 else False)

    def read_values(self, rng: bool, progress: Progress) -> None:
        """Reads `extra`, and the random state that this rank continues with, before anything is changed."""
        tree, shape = self.source.values.get("extra") or {}, self.source.values.get("rng")
        with reject_invalid(self.path, TypeError, ValueError, of="'extra'"):
            room: dict[str, Any] = {**empty_tensors(tree, self.source.tensors, self.ranks)}
        if rng and shape is not None:
            with reject_invalid(self.path, TypeError, ValueError, of="'rng'"):
                world, width = shape["world"], shape["width"]
                row = torch.empty(width, dtype=torch.uint8, device="cpu")
                start = self.ranks.rank % world * width
                room["extra.rng"] = Sharded(row, torch.Size([world, width]), start, name="rng", kind="state")
        self.source.read(room, progress)
        with reject_invalid(self.path, TypeError, ValueError, of="'extra'"):
            self.values = decode_extra(tree, room, self.ranks)
        if rng and shape is not None:
            with reject_invalid(self.path, TypeError, ValueError, of="'rng'"):
                mine = bytes(row.tolist())
                self.random = mine if self.ranks.rank < world else random_state.derive_state(mine, self.ranks.rank)
                random_state.parse_state(self.random)
