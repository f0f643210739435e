"""zk.save: every rank describes its state, the ranks compare it, each writes one file, the first publishes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerokern.checkpoint import rng as random_state
from zerokern.checkpoint.background import PendingSaves, Saving, StagedPlanner, wait_for_devices
from zerokern.checkpoint.extra import encode_extra
from zerokern.checkpoint.folder import Draft
from zerokern.checkpoint.partial import PartialModel, model_of, shared_weights
from zerokern.checkpoint.progress import Progress, refuse_no_progress
from zerokern.checkpoint.ranks import Ranks, absolute_path, digests, refuse_differences, refuse_unusable
from zerokern.checkpoint.storage import SavePlanner, write_checkpoint
from zerokern.checkpoint.training_state import TrainingState, named_tensors
from zerokern.core.errors import ShardError, got
from zerokern.zero.kinds import here_of, is_divided
from zerokern.zero.sharded import Sharded

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module | Any,
    opt: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    extra: dict[str, Any] | None = None,
    *,
    wait: bool = True,
    rng: bool = True,
    staging_budget: int | None = None,
    group: Any = None,
    progress: bool | Callable[[int, int], None] | None = None,
) -> Saving | None:
    """Saves model, optimizer state in its format, random state and `extra` into the folder `path`; every rank calls it.

    At any moment the folder holds a whole checkpoint: the old one until the new one is published. It can be loaded by
    any number of ranks, at any stage and tier (`zk.load`), and by torch's `dcp.load`.

    Args:
        path: a folder for this checkpoint alone.
        model: a module; for a pipeline the stages of this rank, one or several (`zk.PipelineStage`). They are saved as
            one model, so each must have the names of the whole model, and the same optimizers and param_groups.
        opt: its optimizer, or several.
        extra: numbers, strings, containers, tensors, and objects with `state_dict` (schedulers, GradScaler, samplers).
            Values that differ between ranks are saved for each rank.
        wait: False returns once this rank's data has been copied into host memory, and writes it in the background; the
            `Saving` that it returns says when that has ended. State on NVMe is not copied: it is written before this
            returns.
        rng: whether to save the state of every rank's random generators.
        staging_budget: the most bytes that the copy of `wait=False` may take on this rank; by default what is free.
        group: the ranks that save, as a ProcessGroup or a DeviceMesh of one dimension or of all ranks; by default all.
        progress: None shows it if the save takes long, True always, False never; or a function of
            (bytes done, bytes in all).

    `torch.distributed.destroy_process_group` waits for the saves that still run, as Python's exit does.

    >>> import tempfile
    >>> from zerokern.checkpoint.loader import load
    >>> model = torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zk.save(f"{folder}/step3", model, extra={"step": 3})
    ...     zk.load(f"{folder}/step3", model)
    {'step': 3}
    """
    ranks, model = Ranks.of(group, "zk.save"), model_of(model)

    def given() -> dict[str, Any]:
        _refuse_unusable(model, wait, rng, staging_budget, progress)
        return {"path": str(absolute_path(path)), "wait": wait, "rng": rng, "stages": isinstance(model, PartialModel)}

    ranks.check_same(given)
    folder = absolute_path(path)  # os.chdir while it is written changes nothing
    saves = PendingSaves.of(ranks, model)
    ranks.all_gather("the save before", saves.finish)
    described: dict[str, Any] = {}

    def describe() -> dict[str, str]:
        described.update(_describe(model, opt, ranks))
        return digests(described["items"], described["values"])

    each = ranks.all_gather("describe", describe)
    items = described["items"]
    shared_weights(ranks, model, lambda: named_tensors(model)).leave_out(items, described["values"])
    nbytes = _nbytes(items)
    if isinstance(model, PartialModel):
        described.update(model.merge_saved(ranks, each[ranks.rank], described, nbytes))
        nbytes = described["nbytes"]
    else:
        refuse_differences(ranks, each, items, described["values"])
    values = described["values"]
    values["extra"], tensors = encode_extra(extra, ranks)
    if rng:
        tensors["extra.rng"], values["rng"] = _rng_table(ranks)
    items |= tensors
    total = nbytes + _nbytes(tensors)
    draft = _begin_draft(folder, total, ranks)

    def write(among: Ranks, planner: SavePlanner) -> None:
        try:
            with Progress("saving", total, progress if ranks.rank == 0 else False) as moved:
                write_checkpoint(draft, items, values, planner, among, moved, described["places"])
        except BaseException:
            draft.abandon()
            raise

    if wait:
        write(ranks, SavePlanner())
        return None
    try:
        separate = saves.separate_ranks(ranks)
        planner = StagedPlanner(separate, staging_budget)
        wait_for_devices(items.values())  # a thread has streams of its own
        saving = Saving(folder, lambda: planner.run(lambda: write(separate, planner)))
        saves.start(saving, shared=ranks.pg is not None)
    except BaseException:
        if saves.last is None:  # else it runs, whatever came meanwhile (Ctrl-C), and the next save waits for it
            draft.abandon()
        raise
    planner.wait_until_free(saving)
    return saving


def _nbytes(items: dict[str, Any]) -> int:
    return sum(item.shape.numel() * item.dtype.itemsize for item in items.values())


def _refuse_unusable(model: Any, wait: Any, rng: Any, staging_budget: Any, progress: Any) -> None:
    refuse_unusable(model, wait=wait, rng=rng)
    if staging_budget is not None and (isinstance(staging_budget, bool) or not isinstance(staging_budget, int)):
        raise TypeError(got("staging_budget", staging_budget, "None or a number of bytes"))
    if staging_budget is not None and wait:
        raise ValueError(got("staging_budget", staging_budget, "None with wait=True", "That save needs no copy"))
    refuse_no_progress(progress)


def _describe(model: nn.Module, opt: Any, ranks: Ranks) -> dict[str, Any]:
    state = TrainingState(model, opt)
    items, values = state.described()
    items, places = state.layout.items_to_save(items)
    for name, item in items.items():
        group = here_of(item).group if is_divided(item) else None
        if group is not None and group.size > ranks.size:
            raise ShardError(
                f"{name} is divided among {group.size} ranks, {ranks.size} save it; allowed: that all ranks that "
                "hold a part of it call zk.save. Start torch.distributed, or leave group= out"
            )
    return {"items": items, "values": values, "places": places}


def _rng_table(ranks: Ranks) -> tuple[Any, dict[str, Any]]:
    """Returns a table of random states with one row per rank, of which this rank holds its own."""
    mine = random_state.get_state()
    width = max(ranks.all_gather("random state", lambda: len(mine)))
    row = random_state.to_row(mine, width)
    table = Sharded(row, torch.Size([ranks.size, width]), ranks.rank * width, name="rng", kind="state")
    return (table if ranks.size > 1 else row.view(1, width)), {"world": ranks.size, "width": width}


def _begin_draft(path: Path, total: int, ranks: Ranks) -> Draft:
    """Begins a draft on the first rank and joins it on the others."""
    kept: list[Draft] = []

    def begin() -> str:
        kept.append(Draft.begin(path, total))
        return kept[0].save_id

    save_id = ranks.broadcast("the folder", begin)

    def join() -> None:
        if not kept:
            kept.append(Draft.join(path, save_id, ranks.rank))

    try:
        ranks.all_gather("the folder on every rank", join)
    except BaseException:
        for draft in kept:
            draft.abandon()
        raise
    return kept[0]
