"""How long training stands still for a save in the background: one copy of the state, if nothing is wasted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

import zerokern as zk

from .contest import Mover, Outcome, Pass, fastest_of, measured, rounds, row

if TYPE_CHECKING:
    from .save import Training

NAME = "training stands still"
COPY = "one copy of the state"


def measure(
    training: Training, folder: Path, pairs: int, advance: Callable[[int, int], None], against_dcp: bool
) -> Outcome:
    """Time until the call returns; what goes on in the background has ended before the next turn begins."""
    nbytes = training.nbytes
    under_way: list[Any] = []

    def turn(start: Callable[[], Any]) -> Pass:
        found = measured(nbytes, lambda: under_way.append(start()))
        one = under_way.pop()
        one.result() if isinstance(one, Future) else one.wait() if hasattr(one, "wait") else None
        return found

    def ours() -> Any:
        return zk.save(folder / "zerokern", training.model, training.optimizer, wait=False)

    def copied() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in training.tensors().values()]

    def theirs() -> Any:
        return dcp.async_save(training.tensors(), checkpoint_id=folder / "dcp", no_dist=True)

    movers = [
        Mover("zk.save(wait=False)", "until it returns", lambda: turn(ours), lambda: None),
        Mover(COPY, "into new memory", lambda: turn(copied), lambda: None),
    ]
    if against_dcp:
        movers.append(Mover("dcp.async_save", "until it returns", lambda: turn(theirs), lambda: None))
    passes = rounds(movers, pairs, lambda done: advance(done, pairs))
    rivals = {mover.name: passes[mover.name] for mover in movers[1:]}
    best = passes[fastest_of(passes)]
    rows = [row(movers[0], passes[movers[0].name], best, rivals)]
    rows += [row(mover, passes[mover.name], best, None) for mover in movers[1:]]
    return Outcome(NAME, rows, {}, "", 0.0, passes.interrupted)
