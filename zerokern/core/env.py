"""The only reader of the environment: one table of names, and the counts derived from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENV", "EnvVar", "cache_folder", "default_threads", "read", "switched_on", "usable_cpus"]


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
            "ZEROKERN_CPU_ISA", "best usable", "forces scalar, avx2, avx512 or avx512vbmi; raises where it is missing"
        ),
        EnvVar("ZEROKERN_THREADS", "usable CPUs / LOCAL_WORLD_SIZE", "threads of the native pool"),
        EnvVar(
            "ZEROKERN_LIBRARY", "beside the package", "path of another build of libzerokern_cpu.so, for development"
        ),
        EnvVar("ZEROKERN_POISON", "0", "1 fills arena memory with 0xFF when it is leased and when it is released"),
        EnvVar(
            "XDG_CACHE_HOME",
            "~/.cache",
            "where measurements of disks and compiled kernels are kept, in a folder zerokern",
        ),
        EnvVar("LOCAL_WORLD_SIZE", "1", "set by torchrun: ranks that share this machine"),
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
        raise ValueError(f"{name}={text!r} is not possible; allowed: 0 or 1")
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
        raise ValueError(f"{name}={text!r} is not possible; allowed: a whole number from 1 on")
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
    affinity = len(os.sched_getaffinity(0))
    return max(1, min(affinity, int(min(_cgroup_cpus(), 1 << 20))))


def default_threads() -> int:
    """Threads of the native pool: ``ZEROKERN_THREADS``, else this rank's share of the usable CPUs.

    ``OMP_NUM_THREADS``, which torchrun sets to 1, has no say.

    >>> default_threads() >= 1
    True
    """
    share = max(1, usable_cpus() // _positive("LOCAL_WORLD_SIZE", 1))
    return _positive("ZEROKERN_THREADS", share)
