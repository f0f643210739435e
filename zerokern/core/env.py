"""Reads the environment, and nothing else does: one table of names, and the counts derived from them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ENV", "EnvVar", "cache_folder", "cpu_list", "cpu_numbers", "default_threads", "given_cpus", "launched_ranks",
    "local_ranks", "process_cpus", "read", "source_tree", "switched_on", "usable_cpus",
]  # fmt: skip


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
        EnvVar("ZEROKERN_LIBRARY", "in the package", "path of another build of libzerokern_cpu.so, for development"),
        EnvVar(
            "ZEROKERN_MEMORY",
            "what the system says is free",
            "host memory that this process may fill in all, as in 64G, where the system has more than it says",
        ),
        EnvVar("ZEROKERN_POISON", "0", "1 fills arena memory with 0xFF when it is leased and when it is released"),
        EnvVar(
            "ZEROKERN_SMALL_COPIES",
            "measured at first use",
            "a kernel makes copies between host and GPU below this size, as in 28K, if a call has many; 0: none",
        ),
        EnvVar(
            "XDG_CACHE_HOME",
            "~/.cache",
            "where measurements of disks and compiled kernels are kept, in a folder zerokern",
        ),
        EnvVar(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "CUDA's own, 8",
            "read, not set: several GPUs want 32. Fewer are warned of, and 1 is refused: gathers and reductions could "
            "block each other",
        ),
        EnvVar(
            "NCCL_LAUNCH_ORDER_IMPLICIT",
            "NCCL's own, 0",
            "read, not set: 1 is warned of, for it wants one order of all launches on all ranks",
        ),
        EnvVar("LOCAL_WORLD_SIZE", "1", "set by torchrun: ranks that share this machine"),
        EnvVar("WORLD_SIZE", "1", "set by torchrun: all ranks; read to warn where they have no process group"),
    )
}


def read(name: str) -> str | None:
    """Returns the value of a variable of the table; None if it is unset or empty.

    >>> read("ZEROKERN_NOT_IN_TABLE")
    Traceback (most recent call last):
    ...
    KeyError: 'ZEROKERN_NOT_IN_TABLE'
    """
    return os.environ.get(ENV[name].name) or None


def switched_on(name: str) -> bool:
    """Returns whether a variable of the table, which is a switch, is 1.

    >>> switched_on("ZEROKERN_POISON") in (False, True)
    True
    """
    text = read(name) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}: must be 0 or 1")
    return text == "1"


def cache_folder() -> Path:
    """Returns the folder for measurements of this machine and compiled kernels; it need not exist.

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
    """Returns the CPUs that the control group grants (version 2, then version 1), or infinity."""
    first, second = "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_"
    for names in ([first], [f"{second}quota_us", f"{second}period_us"]):
        with suppress(OSError, ValueError):
            quota, period = " ".join(Path(name).read_text() for name in names).split()[:2]
            return int(quota) / int(period) if quota != "max" and int(quota) > 0 else math.inf
    return math.inf


def usable_cpus() -> int:
    """Returns how many CPUs this process may use: its affinity, and no more than its control group grants.

    >>> usable_cpus() >= 1
    True
    """
    return min(len(os.sched_getaffinity(0)), _granted_cpus())


def _granted_cpus() -> int:
    """Returns the whole CPUs of the control group; without a limit, more than there can be."""
    return max(1, int(min(_cgroup_cpus(), 1 << 20)))


def cpu_numbers(text: str) -> tuple[int, ...]:
    """Parses a list of CPUs as the kernel writes it.

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
    """Formats numbers in order, as the kernel writes them.

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
    """Lists the CPUs that this process's first thread may use, in order.

    >>> len(process_cpus()) >= 1
    True
    """
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def given_cpus() -> tuple[int, ...] | None:
    """Returns the CPUs that ``ZEROKERN_CPUS`` gives to the native pool; None if it is unset.

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
    """Returns how many ranks share this machine, as torchrun says.

    >>> local_ranks() >= 1
    True
    """
    return _positive("LOCAL_WORLD_SIZE", 1)


def launched_ranks() -> int:
    """Returns how many ranks torchrun has started in all; 1 if it does not say, or says no number.

    >>> launched_ranks() >= 1
    True
    """
    text = read("WORLD_SIZE") or "1"
    return max(1, int(text)) if text.isdecimal() else 1


def default_threads() -> int:
    """Returns the threads of the native pool: ``ZEROKERN_THREADS``, else this rank's share of the CPUs.

    ``OMP_NUM_THREADS``, which torchrun sets to 1, has no say.

    >>> default_threads() >= 1
    True
    """
    given = given_cpus()
    cpus = usable_cpus() if given is None else min(len(given), _granted_cpus())
    share = max(1, cpus // local_ranks())
    return _positive("ZEROKERN_THREADS", share)


def source_tree() -> Path | None:
    """Returns the source tree that this package is imported from; None where it is an installed copy.

    >>> tree = source_tree()
    >>> tree is None or (tree / "cpu").is_dir()
    True
    """
    tree = Path(__file__).resolve().parents[2]
    return tree if (tree / "cpu" / "CMakeLists.txt").is_file() else None
