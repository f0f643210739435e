"""A machine of ranks whose GPUs have hardware queues: what NCCL's kernels and waits of streams do to each other there.

Each stream lies in one queue, and each queue is worked off in the order in which the host launched. A collective
begins when it is at the head of its queue and what its stream waits for has ended; it holds that head until it has
begun on all ranks. A wait holds it until the collective has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Call", "apart", "launch", "one_queue", "stuck", "wait"]

Communicator = tuple[str, int]  # which ranks, and which of their communicators
Queues = Callable[[int, str], str]  # the queue of a rank's stream


class Call(NamedTuple):
    """What a host calls: it launches a collective of a communicator, or makes a stream wait for it."""

    verb: str  # "launch" or "wait"
    communicator: Communicator
    count: int  # the how manyth of the communicator's collectives
    stream: str  # the current one: a collective begins after what that has been given


def launch(communicator: Communicator, count: int, stream: str = "compute") -> Call:
    """A collective that is launched."""
    return Call("launch", communicator, count, stream)


def wait(communicator: Communicator, count: int, stream: str = "compute") -> Call:
    """A stream that waits for a collective."""
    return Call("wait", communicator, count, stream)


def one_queue(rank: int, stream: str) -> str:
    """The worst assignment of streams to queues: all share one."""
    return ""


def apart(rank: int, stream: str) -> str:
    """A queue for each stream."""
    return stream


@dataclass(eq=False)
class Entry:
    call: Call
    stream: str  # that it is queued on
    after: list[Entry] = field(default_factory=list)  # entries of this rank that must have ended
    behind: Entry | None = None  # what was launched before it, which must have begun
    begun: bool = False
    ended: bool = False

    @property
    def collective(self) -> tuple[Communicator, int]:
        return self.call.communicator, self.call.count


def stuck(
    programs: Sequence[Sequence[Call]],
    queues: Queues,
    *,
    ranks: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ordered: bool = False,
    room: int | None = None,
    seed: int = 0,
) -> list[str]:
    """What the ranks wait for when nothing moves any more; empty: all has ended.

    `ranks`: by the name of a group, who form one; default: all. `ordered`: as with NCCL_LAUNCH_ORDER_IMPLICIT=1, a
    collective begins only when what its rank launched before it, on any communicator, has begun. `room`: how many run
    on a GPU at once, for want of multiprocessors; which of those that could begin does so is drawn from the seed.
    """
    rng = random.Random(seed)
    entries = [_entries(program, ordered) for program in programs]
    lines = [_lines(rank, row, queues) for rank, row in enumerate(entries)]
    there: dict[tuple, dict[int, Entry]] = {}
    for rank, row in enumerate(entries):
        for entry in row:
            if entry.call.verb == "launch":
                there.setdefault((entry.collective, _peers(rank, entry, ranks, len(programs))), {})[rank] = entry
    running = [0] * len(programs)
    while ready := [(rank, queue) for rank, row in enumerate(lines) for queue in row.values() if _may_begin(queue)]:
        rng.shuffle(ready)
        for rank, queue in ready:
            entry = queue[0]
            if entry.call.verb == "launch":
                if running[rank] == room:
                    continue
                running[rank] += 1
            entry.begun, entry.ended = True, entry.call.verb == "wait"
        if not any(queue[0].begun for _, queue in ready):
            break  # there is no room for any of them
        for (_, peers), mine in there.items():
            if {*mine} == {*peers} and all(one.begun and not one.ended for one in mine.values()):
                for rank, one in mine.items():
                    one.ended = True
                    running[rank] -= 1
        for row in lines:
            for queue in row.values():
                while queue and queue[0].ended:
                    queue.pop(0)
    return [
        f"rank {rank}: {queue[0].call.verb} {queue[0].collective}"
        for rank, row in enumerate(lines)
        for queue in row.values()
        if queue
    ]


def _may_begin(queue: Sequence[Entry]) -> bool:
    entry = queue[0] if queue else None
    if entry is None or entry.begun:
        return False
    return all(one.ended for one in entry.after) and (entry.behind is None or entry.behind.begun)


def _peers(rank: int, entry: Entry, ranks: Mapping[str, Sequence[Sequence[int]]] | None, size: int) -> tuple[int, ...]:
    every = [range(size)] if ranks is None else ranks[entry.call.communicator[0]]
    return next(tuple(row) for row in every if rank in row)


def _entries(program: Sequence[Call], ordered: bool) -> list[Entry]:
    made: list[Entry] = []
    launched: dict[tuple[Communicator, int], Entry] = {}
    last: dict[str, Entry] = {}  # by stream
    before: Entry | None = None
    for call in program:
        if call.verb == "wait":
            entry = Entry(call, call.stream, [launched[call.communicator, call.count]])
        else:
            entry = Entry(call, f"communicator {call.communicator}", behind=before if ordered else None)
            if call.stream in last:
                entry.after.append(last[call.stream])
            launched[entry.collective] = before = entry
        if entry.stream in last:
            entry.after.append(last[entry.stream])
        last[entry.stream] = entry
        made.append(entry)
    return made


def _lines(rank: int, row: Sequence[Entry], queues: Queues) -> dict[str, list[Entry]]:
    lines: dict[str, list[Entry]] = {}
    for entry in row:
        lines.setdefault(queues(rank, entry.stream), []).append(entry)
    return lines
