"""The changelog has the form of Keep a Changelog, and one page holds it."""

from __future__ import annotations

import re

from .tree import read

LINES = 150
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def faults(text: str) -> list[str]:
    """What differs from the form: headings of versions with a date, headings of the six kinds, a link for each."""
    found = []
    for version in re.findall(r"^## (.+)$", text, re.MULTILINE):
        if not re.fullmatch(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|not released yet)", version):
            found.append(version)
        elif f"\n{version.partition(' ')[0]}: https://" not in text:
            found.append(f"no link for {version}")
    return found + [kind for kind in re.findall(r"^### (.+)$", text, re.MULTILINE) if kind not in KINDS]


def test_the_changelog_has_its_form() -> None:
    assert faults(read("CHANGELOG.md")) == []


def test_the_changelog_is_short() -> None:
    """Until a second version is released; what was corrected before the first is in the Git history."""
    assert len(read("CHANGELOG.md").splitlines()) <= LINES


def test_another_form_is_found() -> None:
    sound = "## [0.1.0] - 2026-01-02\n### Added\n\n[0.1.0]: https://a.b/c\n"
    assert faults(sound) == []
    assert faults("## 0.1.0 (unreleased)\n### News\n") == ["0.1.0 (unreleased)", "News"]
    assert faults(sound.replace("[0.1.0]:", "")) == ["no link for [0.1.0] - 2026-01-02"]
