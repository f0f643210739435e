"""What is asked of a disk: the patterns of `zerokern bench io`, and how many bytes one pass of each moves."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEPTH = 32


@dataclass(frozen=True)
class Pattern:
    """One pass over a file. `block` 0 is sequential: each contestant cuts as it likes, as deep as it likes.

    Otherwise every request has `block` bytes at a random place, `depth` of them in flight from one submitting thread.
    A mixed pass reads half of its bytes and writes as many over the same span, both at once.
    """

    name: str
    kind: str
    nbytes: int
    block: int = 0
    depth: int = 0

    @property
    def reads(self) -> bool:
        return self.kind != "write"

    @property
    def writes(self) -> bool:
        return self.kind != "read"

    @property
    def requests(self) -> int:
        """How many a pass consists of; 0 where the contestant decides."""
        return self.nbytes // self.block if self.block else 0


def patterns(*, smoke: bool) -> list[Pattern]:
    """
    >>> [pattern.name for pattern in patterns(smoke=True)][2]
    'mixed: as many reads as writes'
    """
    large, medium, small = (64 * MIB, 16 * MIB, 4 * MIB) if smoke else (2 * GIB, 2 * GIB, 512 * MIB)
    return [
        Pattern("sequential read", "read", large),
        Pattern("sequential write", "write", large),
        Pattern("mixed: as many reads as writes", "mixed", large),
        *(
            Pattern(f"random {kind}, {block // KIB} KiB", kind, nbytes, block, DEPTH)
            for block, nbytes in ((64 * KIB, medium), (4 * KIB, small))
            for kind in ("read", "write")
        ),
    ]


def size_text(nbytes: float) -> str:
    """
    >>> size_text(4096), size_text(3 << 20), size_text(2 << 30)
    ('4 KiB', '3 MiB', '2 GiB')
    """
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
