"""Moving bytes between a file and memory: in order, both ways at once, and small blocks at random; then the tickets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zerokern as zk
from zerokern.memory import Arena

from ..disk import tickets
from ..disk.contest import Mover, Outcome, Say, Task, run
from ..disk.ours import RING_NBYTES, EngineMover, StoreMover
from ..disk.pattern import MIB, Pattern, patterns
from ..disk.workfile import SPARE_NBYTES, Workfile
from ..peers import candidates
from ..timers import whole_contests

PAIRS, SMOKE_PAIRS = 15, 3
TRIALS_PER_PASS = 8


@dataclass(frozen=True)
class DiskRequest:
    """What the user asked for."""

    folder: Path
    peers: tuple[str, ...]
    smoke: bool = False
    pairs: int = 0

    @property
    def rounds(self) -> int:
        return self.pairs or (SMOKE_PAIRS if self.smoke else PAIRS)


def measure(request: DiskRequest, say: Say, advance: Callable[[str, int, int], None]) -> tuple[list[Outcome], str]:
    """The outcomes, and after what Ctrl-C came, if it did; `advance(pattern, done, of)` is called after every round."""
    probe = zk.io.probe(request.folder)
    say(f"zerokern takes what its probe found: {probe.line()}")
    wanted = patterns(smoke=request.smoke)
    largest = max(pattern.nbytes for pattern in wanted)
    # the Store has files of its own, torch.save too
    with Workfile(request.folder, largest, spare=2 * largest + SPARE_NBYTES) as file:
        contests = [functools.partial(_contest, request, file, probe, pattern, say, advance) for pattern in wanted]
        of_tickets = functools.partial(tickets.outcome, file.folder / "store", probe, request.rounds)
        return whole_contests([*contests, of_tickets])


def _contest(
    request: DiskRequest,
    file: Workfile,
    probe: zk.io.Probe,
    pattern: Pattern,
    say: Say,
    advance: Callable[[str, int, int], None],
) -> Outcome:
    say(f"{pattern.name}:")
    trial_nbytes = max(MIB, pattern.nbytes // TRIALS_PER_PASS)
    task = Task(pattern, file, trial_nbytes, not request.smoke, say)
    peers = {peer: candidates(peer, "io", task) for peer in request.peers}
    with ours(task, probe) as movers:
        return run(task, movers, peers, request.rounds, functools.partial(advance, pattern.name))


@contextlib.contextmanager
def ours(task: Task, probe: zk.io.Probe) -> Iterator[list[Mover]]:
    """The engine, and where the size of requests is free the Store above it; both let go of everything at the end."""
    arena = Arena(2 * RING_NBYTES)
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close)
        engine = zk.io.Engine(depth=task.pattern.depth or probe.depth, block=probe.block)
        found = [EngineMover(task, engine, probe, arena)]
        stack.callback(found[0].close)
        movers = [found[0].mover()]
        if not task.pattern.block:
            store = StoreMover(task, probe, arena)
            stack.callback(store.close)
            movers.append(store.mover())
        yield movers
