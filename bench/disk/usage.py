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
    read_nbytes: int
    written_nbytes: int

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            self.cpu_s - earlier.cpu_s,
            self.read_nbytes - earlier.read_nbytes,
            self.written_nbytes - earlier.written_nbytes,
        )

    @property
    def disk_nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes


def of_process() -> Usage:
    """This process with all its threads, the kernel's workers for its io_uring among them."""
    return Usage(time.process_time(), *disk_nbytes(Path("/proc/self/io").read_text()))


def of_children() -> Usage:
    """The children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage(used.ru_utime + used.ru_stime, used.ru_inblock * SECTOR_NBYTES, used.ru_oublock * SECTOR_NBYTES)


def disk_nbytes(counters: str) -> tuple[int, int]:
    """Bytes read from devices and written to them, of the text of a /proc/<pid>/io.

    >>> disk_nbytes("rchar: 9\\nread_bytes: 4096\\nwrite_bytes: 512\\ncancelled_write_bytes: 0")
    (4096, 512)
    """
    values = dict(line.split(": ") for line in counters.splitlines() if line)
    return int(values["read_bytes"]), int(values["write_bytes"])
