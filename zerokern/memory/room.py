"""How much more memory this process may use under everything that limits it, and the refusal of more."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

from zerokern.core import env
from zerokern.core.errors import BudgetError
from zerokern.core.units import parse_nbytes

__all__ = ["amount", "check_fits", "exceeds_half_of_memory", "memory_left"]

_FREE, _GROUP = "free memory and swap", "control group"
_SHARED = (_FREE, _GROUP)  # by all ranks of a machine
_GROUP_FILES = (  # version 2, then version 1: limit, usage, and the cache in it that the kernel gives back
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def amount(nbytes: int) -> str:
    """Formats a number of bytes for people.

    >>> amount(1000), amount(5 * 2**20), amount(3 * 2**29)
    ('1,000 B', '5.0 MiB', '1.5 GiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):,.1f} {unit}"
    return f"{nbytes:,} B"


def memory_left() -> dict[str, int]:
    """Returns the bytes that are left under each limit.

    >>> memory_left()["free memory and swap"] > 0
    True
    """
    left = {}
    machine, process = _kilobytes("/proc/meminfo"), _kilobytes("/proc/self/status")
    given = env.read("ZEROKERN_MEMORY")
    if given is not None:  # for machines that grow on demand and report less than they can have
        left["ZEROKERN_MEMORY"] = max(0, parse_nbytes("ZEROKERN_MEMORY", given) - process.get("VmRSS", 0))
    elif "MemAvailable" in machine:
        left[_FREE] = machine["MemAvailable"] + machine.get("SwapFree", 0)
    for name, limit, used in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and used in process:
            left[name] = max(0, most - process[used])
    group = _group_room()
    if group is not None:
        left[_GROUP] = group
    return left


def exceeds_half_of_memory(nbytes: int, left: Mapping[str, int] | None = None, ranks: int | None = None) -> bool:
    """Returns whether nbytes on each of the `ranks` of this machine take more than half of the memory that is left.

    Gradients then wait on a disk, where there is one, and freed memory is not kept.

    >>> exceeds_half_of_memory(5 << 30, {"ZEROKERN_MEMORY": 8 << 30})
    True
    >>> exceeds_half_of_memory(5 << 30, {"control group": 16 << 30})
    False
    """
    left = memory_left() if left is None else left
    ranks = env.local_ranks() if ranks is None else ranks
    shares = {name: most // ranks if name in _SHARED else most for name, most in left.items()}
    return 2 * nbytes > min(shares.values(), default=2 * nbytes)


def check_fits(nbytes: int, what: str, because: str = "") -> None:
    """Raises BudgetError if nbytes do not fit under every limit, or if the system already said so (``because``)."""
    left = memory_left()
    most = min(left.values(), default=nbytes)
    if nbytes <= most and not because:
        return
    lines = [f"{what} of {amount(nbytes)} does not fit{': ' + because if because else ''}. What is left:"]
    lines += [f"  {name:<22}{amount(nbytes_left):>12}" for name, nbytes_left in left.items()]
    grows = "; where the system has more to give than it says, ZEROKERN_MEMORY=64G (or what is true) says so"
    do = f"Ask for less than {amount(min(most, nbytes))}, or raise the limit"
    raise BudgetError("\n".join([*lines, do + (grows if most == left.get(_FREE) else "")]))


def _kilobytes(path: str) -> dict[str, int]:
    """Returns the lines "name: 123 kB" of a file of /proc, in bytes."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _group_room() -> int | None:
    """Returns the bytes that the control group still grants; None if it sets no limit."""
    for mount, limit, usage, cache in _GROUP_FILES:
        for folder in (Path(mount) / _own_group(mount), Path(mount)):
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such file, or the limit is "max"
                continue
            if most < 1 << 60:  # version 1 writes "none" as the largest number of pages
                return max(
                    0, most - used + sum(int(stat.get(name, 0)) for name in (cache, cache.replace("inact", "act")))
                )
    return None


def _own_group(mount: str) -> str:
    """Returns the path of this process's group below a mount of the memory controller."""
    wanted = "memory" if mount.endswith("memory") else ""
    try:
        rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return ""
    return next((path.lstrip("/") for _, controllers, path in rows if wanted in controllers.split(",")), "")
