"""What a pass cost besides time: CPU seconds and the bytes that the kernel sent to devices, as it counts them."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

SECTOR_NBYTES = 512  # of ru_inblock and ru_oublock, whatever the device


@dataclass(frozen=True)
class Usage:
    """A reading of the counters, or the difference of two."""

    cpu_s: float
    disk_nbytes: int

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(self.cpu_s - earlier.cpu_s, self.disk_nbytes - earlier.disk_nbytes)


def of_process() -> Usage:
    """This process with all its threads, the kernel's workers for its io_uring among them."""
    return Usage(time.process_time(), disk_nbytes(Path("/proc/self/io").read_text()))


def of_children() -> Usage:
    """The children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage(used.ru_utime + used.ru_stime, (used.ru_inblock + used.ru_oublock) * SECTOR_NBYTES)


def disk_nbytes(counters: str) -> int:
    """Bytes read from and written to devices, of the text of a /proc/<pid>/io.

    >>> disk_nbytes("rchar: 9\\nread_bytes: 4096\\nwrite_bytes: 512\\ncancelled_write_bytes: 0")
    4608
    """
    values = dict(line.split(": ") for line in counters.splitlines() if line)
    return int(values["read_bytes"]) + int(values["write_bytes"])
