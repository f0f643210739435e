"""Step counters: one 0-dim float32 tensor per parameter, as torch keeps them, advanced all at once."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch

from zerokern.optim.whereabouts import Whereabouts


class StepBook:
    """The counters of all parameters of an optimizer, side by side.

    >>> entries = [{"step": torch.tensor(3.0)}, {}]
    >>> book = StepBook(entries)
    >>> book.choose([0])
    [3]
    >>> book.advance(); entries[0]["step"]
    tensor(4.)
    """

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replaces each `entries[i]["step"]` by a tensor of the book with the same value."""
        count = max(len(entries), 1)
        buffer = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._flat = torch.frombuffer(buffer, dtype=torch.float32)
        # each with a storage of its own
        each = [torch.frombuffer(buffer, dtype=torch.float32, count=1, offset=4 * i).view(()) for i in range(count)]
        self._counts = torch.zeros_like(self._flat)
        mine = []
        for number, entry in enumerate(entries):
            if "step" in entry:
                entry["step"] = each[number].copy_(torch.as_tensor(entry["step"], device="cpu").reshape(()))
                self._counts[number] = 1.0
                mine.append(each[number])
        self._whereabouts = Whereabouts(mine)
        self.choose([])

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Which counters `advance` moves; returns the steps that these have made, 0 where there is no counter."""
        self._increments = torch.zeros_like(self._flat)
        self._increments[list(numbers)] = 1.0
        self._increments.mul_(self._counts)
        self._expected = self._flat.clone()
        steps = self._flat.tolist()
        return [int(steps[number]) for number in numbers]

    def untouched(self) -> bool:
        """Whether nobody has written a counter since, or exchanged the memory of one."""
        return self._whereabouts.unchanged() and torch.equal(self._flat, self._expected)

    def advance(self) -> None:
        """One more step for the chosen."""
        self._flat.add_(self._increments)
        self._expected.add_(self._increments)
