"""A note for later has a door: the issue, the version or the event that closes it, as in NOTE(torch>=2.14)."""

from __future__ import annotations

import re

from .tree import Finding, assert_clean, read, texts

WORDS = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"))
NOTE = re.compile(rf"\b(?:{WORDS})\b(?P<door>\([^)\s][^)]*\))?")
DOOR = re.compile(r"\(#\d+\)|\([\w.-]+\s*[<>=]=?\s*[\d.]+\)|\(when [^)]+\)")


def doorless(text: str, path: str) -> list[Finding]:
    found = [match for match in NOTE.finditer(text) if not DOOR.fullmatch(match["door"] or "")]
    says = "is a note without a door; name the issue (#12), the version (torch>=2.14) or the event (when ...)"
    return [Finding(path, text[: match.start()].count("\n") + 1, f"{match[0]} {says}") for match in found]


def test_every_note_has_a_door() -> None:
    assert_clean([finding for path in texts() for finding in doorless(read(path), path)])


def test_a_doorless_note_is_found() -> None:
    word = "TO" + "DO"
    assert len(doorless(f"# {word}: tidy\n# {word}(me) tidy", "a.py")) == 2
    assert doorless(f"# {word}(#12), {word}(torch>=2.14), {word}(when the wheel has it)\nautodoc", "a.py") == []
