"""CPU seconds of a process and of all that it has started, by /proc: no cgroup of its own is needed."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["cpu_seconds"]

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and of those below it. A process that has ended counts with the one that waited for it."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                said = _stat(folder)
            except OSError:  # it has just ended
                continue
            parents[int(folder.name)], ticks[int(folder.name)] = int(said[1]), sum(map(int, said[11:15]))
    own = os.getpid()
    ended = sum(map(int, _stat(Path("/proc/self"))[13:15]))
    below = sum(spent for pid, spent in ticks.items() if pid != own and _is_below(pid, own, parents))
    return time.process_time() + TICK_S * (below + ended)


def _stat(folder: Path) -> list[str]:
    """What is known of a process, behind its name."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid > 1 and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor
