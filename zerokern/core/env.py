"""The only reader of the environment: one table of names, and the counts derived from it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ENV",
    "EnvVar",
    "cache_folder",
    "cpu_list",
    "cpu_numbers",
    "default_threads",
    "given_cpus",
    "launched_ranks",
    "local_ranks",
    "process_cpus",
    "read",
    "switched_on",
    "usable_cpus",
]


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: what it is when unset, and what it does."""

    name: str
    default: str
    meaning: str


ENV: dict[str, EnvVar] = {
    var.name: var
    for var in (
        EnvVar(
            "ZEROKERN_CPU_ISA",
            "best usable",
            "forces scalar, avx2, avx512, avx512vbmi or avx512vnni; raises where it is missing",
        ),
        EnvVar("ZEROKERN_THREADS", "usable CPUs / LOCAL_WORLD_SIZE", "threads of the native pool"),
        EnvVar("ZEROKERN_CPUS", "all usable ones", "CPUs that the native pool's threads keep to, as in 2-7,10"),
        EnvVar(
            "ZEROKERN_LIBRARY", "beside the package", "path of another build of libzerokern_cpu.so, for development"
        ),
        EnvVar(
            "ZEROKERN_MEMORY",
            "what the system says is free",
            "host memory that this process may fill in all, as in 64G, where the system has more than it says",
        ),
        EnvVar("ZEROKERN_POISON", "0", "1 fills arena memory with 0xFF when it is leased and when it is released"),
        EnvVar(
            "XDG_CACHE_HOME",
            "~/.cache",
            "where measurements of disks and compiled kernels are kept, in a folder zerokern",
        ),
        EnvVar(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "CUDA's own",
            "read, not set: with 1 several GPUs are refused, for their gathers and reductions could block each other",
        ),
        EnvVar("LOCAL_WORLD_SIZE", "1", "set by torchrun: ranks that share this machine"),
        EnvVar("WORLD_SIZE", "1", "set by torchrun: all ranks; read to warn where they have no process group"),
    )
}


def read(name: str) -> str | None:
    """The value of a variable of the table, or None where it is unset or empty.

    >>> read("ZEROKERN_NOT_IN_TABLE")
    Traceback (most recent call last):
    ...
    KeyError: 'ZEROKERN_NOT_IN_TABLE'
    """
    return os.environ.get(ENV[name].name) or None


def switched_on(name: str) -> bool:
    """Whether a variable of the table that is a switch is 1.

    >>> switched_on("ZEROKERN_POISON") in (False, True)
    True
    """
    text = read(name) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}: must be 0 or 1")
    return text == "1"


def cache_folder() -> Path:
    """Where what was measured of this machine or compiled for it is kept between runs; it need not exist.

    >>> cache_folder().name
    'zerokern'
    """
    base = read("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "zerokern"


def _positive(name: str, fallback: int) -> int:
    text = read(name)
    if text is None:
        return fallback
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name}={text!r}: must be a whole number from 1 on")
    return int(text)


def _cgroup_cpus() -> float:
    """CPUs that the control group grants (version 2, then version 1), or infinity."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and no more than its control group grants.

    >>> usable_cpus() >= 1
    True
    """
    return min(len(os.sched_getaffinity(0)), _granted_cpus())


def _granted_cpus() -> int:
    """Whole CPUs of the control group, or more than there can be."""
    return max(1, int(min(_cgroup_cpus(), 1 << 20)))


def cpu_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list as the kernel writes it, in order.

    >>> cpu_numbers("2-4,10"), cpu_numbers("")
    ((2, 3, 4, 10), ())
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or int(first) > int(last or first):
            raise ValueError(f"{text!r} is no list of CPUs; allowed: numbers and ranges like 2-7,10")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def cpu_list(numbers: Iterable[int]) -> str:
    """Numbers in order, as the kernel writes them.

    >>> cpu_list([2, 3, 4, 10])
    '2-4,10'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def process_cpus() -> tuple[int, ...]:
    """The CPUs that this process's first thread may use, in order.

    >>> len(process_cpus()) >= 1
    True
    """
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def given_cpus() -> tuple[int, ...] | None:
    """The CPUs that ``ZEROKERN_CPUS`` gives to the native pool, or None.

    >>> given_cpus() is None or len(given_cpus()) > 0
    True
    """
    text = read("ZEROKERN_CPUS")
    if text is None:
        return None
    try:
        return cpu_numbers(text) or None
    except ValueError as error:
        raise ValueError(f"ZEROKERN_CPUS={error}") from None


def local_ranks() -> int:
    """Ranks that share this machine, as torchrun says.

    >>> local_ranks() >= 1
    True
    """
    return _positive("LOCAL_WORLD_SIZE", 1)


def launched_ranks() -> int:
    """Ranks that torchrun says it has started in all; 1 where nobody says it, or says what is no number.

    >>> launched_ranks() >= 1
    True
    """
    text = read("WORLD_SIZE") or "1"
    return max(1, int(text)) if text.isdecimal() else 1


def default_threads() -> int:
    """Threads of the native pool: ``ZEROKERN_THREADS``, else this rank's share of the CPUs, usable or given.

    ``OMP_NUM_THREADS``, which torchrun sets to 1, has no say.

    >>> default_threads() >= 1
    True
    """
    given = given_cpus()
    cpus = usable_cpus() if given is None else min(len(given), _granted_cpus())
    share = max(1, cpus // local_ranks())
    return _positive("ZEROKERN_THREADS", share)
