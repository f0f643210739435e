"""Every `zerokern plan` that a page shows is a command that works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import zerokern as zk
from zerokern.cli.main import main
from zerokern.planner import preset
from zerokern.planner.amounts import gigabytes
from zerokern.planner.transformer import PRESETS

ROOT = Path(__file__).resolve().parents[2]
TIERS, LINK, DISK = ("device", "cpu", "nvme"), ("up", "down"), ("read", "write")
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONTINUED = re.compile(r"\\\n\s*")
COMMANDS = [
    (page.name, command.strip())
    for page in PAGES
    for command in re.findall(
        r"(?:^\$ |^|`)zerokern (plan --[^`\n]+)", CONTINUED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    if "package.module" not in command
]


def test_pages_show_commands() -> None:
    assert {name for name, _ in COMMANDS} >= {"choose.md", "offload.md", "zero.md"}


def test_the_commands_of_pages_work(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-3-8b"]))
    monkeypatch.chdir(tmp_path)
    for page, command in COMMANDS:
        assert (main(shlex.split(command)), capsys.readouterr().err) == (0, ""), (page, command)


def said(text: str) -> str:
    """Words without the lines that a page cuts them into."""
    return " ".join(text.split())


def test_the_answer_of_a_page_is_that_of_its_command(capsys) -> None:
    (command,) = (one for page, one in COMMANDS if page == "choose.md" and "--seq 4096" in one)
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs/choose.md").read_text(encoding="utf-8"), re.DOTALL)
    assert main(shlex.split(command)) == 0
    assert said(capsys.readouterr().out).startswith(said(shown))


def test_a_model_that_one_gpu_has_by_the_arithmetic_of_the_page(capsys) -> None:
    """The table, the advice and each number of the text, from the commands that the page shows."""
    page = (ROOT / "docs/offload.md").read_text(encoding="utf-8").split("### 8B parameters on one GPU of 80 GB")[1]
    page, table = page.split("## Parameters and activations")[0], page.split("eight:begin -->\n")[1].split("<!--")[0]
    head, _, *rows = table.splitlines()
    (base,) = re.findall(r"`zerokern (.*?)`", head)
    for row in rows:
        more, *shown = (cell.strip() for cell in row.strip("|").split("|"))
        assert main([*shlex.split(base), *shlex.split(more.strip("`")), "--json"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)
        tiers, moves = next(one["tiers"] for one in plan["stages"] if one["stage"] == plan["stage"]), plan["moves"]
        link, disk = (sum(one["nbytes"] for one in moves if one["lane"] in of) for of in (LINK, DISK))
        cells = [gigabytes(nbytes) for nbytes in (*(tiers.get(one, 0) for one in TIERS), link, disk)]
        assert shown == cells, f"| {more} | {' | '.join(cells)} |"
    (command,) = re.findall(r"^\$ zerokern (.*)$", CONTINUED.sub("", page), re.MULTILINE)
    (answer,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert main(shlex.split(command)) == 0
    assert said(capsys.readouterr().out).startswith(said(answer))
    plan = zk.plan(preset("llama-3-8b", batch=1, seq=4096), keep="device", stage=0, tier="cpu", schedule="overlap")
    numel, beside = plan.numel, sum(plan.roles[role] for role in ("checkpoints", "activations", "logits"))
    left = int(0.9 * 80 - (4 * numel + beside) / 1e9)
    away = numel - left * 10**9 / 10
    for word in (
        f"n = {numel / 1e9:.2f} billion", f"{4 * numel / 1e9:.1f} GB", f"{beside / 1e9:.2f} GB", f"leaves {left} GB",
        f"{left / 10} billion", f"other {away / 1e9:.2f} billion", f"host memory: {14 * away / 1e9:.1f} GB",
    ):  # fmt: skip
        assert word in said(page), word
