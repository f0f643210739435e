"""Every `zerokern plan` that a page shows is a command that works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from zerokern.cli.main import main
from zerokern.planner.transformer import PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = [
    (page.name, command.strip())
    for page in PAGES
    for command in re.findall(r"(?:^\$ |^|`)zerokern (plan --[^`\n]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    if "package.module" not in command
]


def test_pages_show_commands() -> None:
    assert {name for name, _ in COMMANDS} >= {"choose.md", "offload.md", "zero.md"}


def test_the_commands_of_pages_work(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-3-8b"]))
    monkeypatch.chdir(tmp_path)
    for page, command in COMMANDS:
        assert (main(shlex.split(command)), capsys.readouterr().err) == (0, ""), (page, command)


def test_the_answer_of_a_page_is_that_of_its_command(capsys) -> None:
    (command,) = (one for page, one in COMMANDS if page == "choose.md" and "--seq 4096" in one)
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs/choose.md").read_text(encoding="utf-8"), re.DOTALL)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.startswith(shown)
