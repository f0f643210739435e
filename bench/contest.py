"""What a benchmark is made of: providers that do the same work, gathered into a contest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .shapes import Shape


class WrongResult(Exception):
    """A provider's result differs from the truth: it is not timed."""


class Missing(Exception):
    """A peer cannot take part; the text says why."""


@dataclass(frozen=True)
class Provider:
    """One way to do the work. `check` runs it once from fresh inputs and raises WrongResult.

    `nbytes` is what one run must move; `streams` is how many are read, updated in place and written.
    """

    name: str
    run: Callable[[], object]
    check: Callable[[], None]
    nbytes: float
    use_threads: Callable[[int], object]
    streams: tuple[int, int, int] = (1, 1, 0)
    lossy: str = ""
    wiring: str = ""

    @property
    def resident_nbytes(self) -> float:
        """Memory that a run walks over, were its streams equally wide."""
        reads, updates, writes = self.streams
        return self.nbytes * sum(self.streams) / (reads + 2 * updates + writes)


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    op: str
    shape: Shape
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Contest:
    """Our providers against the candidates of each peer, on the same inputs.

    A peer's candidates are its possible wirings, made when asked for; the fastest, at its best thread count, competes.
    """

    name: str
    numel: int
    ours: Sequence[Provider]
    peers: Mapping[str, Callable[[], Sequence[Provider]]]
