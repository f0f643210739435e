"""What a mutant is: one exact text of one source file, and the wrong text in its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Mutant", "mutated"]

ROOT = Path(__file__).parents[2]
TESTED_IN = {"debug": "comm"}  # by folder, where another folder has its tests


@dataclass(frozen=True)
class Mutant:
    """A bug as somebody might make it.

    `file`: relative to the repository's root; `old` occurs in it exactly once. `targets`: test files, or tests of them
    (`file::test`), that are expected to fail, those first that fail soonest.
    """

    name: str
    file: str
    old: str
    new: str
    says: str
    targets: tuple[str, ...]

    @property
    def area(self) -> str:
        """The part of the library that it is in; of the native sources, that of io or of the kernels."""
        first, second = Path(self.file).parts[:2]
        if first == "cpu":
            return "io" if second == "io" else "kernels"
        return TESTED_IN.get(second, second)

    @property
    def is_native(self) -> bool:
        return self.file.startswith("cpu/")


def mutated(mutant: Mutant, text: str) -> str:
    """The text of its file with the bug in it; ValueError names the mutant where the text to replace is not there once.

    >>> mutated(Mutant("example", "zerokern/io/x.py", "a + b", "a - b", "", ()), "c = a + b")
    'c = a - b'
    """
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name}: its text occurs {count} times in {mutant.file}, and must occur once; write it anew "
            f"for the code as it is now: {mutant.old!r}"
        )
    return text.replace(mutant.old, mutant.new)
