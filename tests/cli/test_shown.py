"""What commands print: tables within a terminal's width, colour where they say yes or no, no Markdown unless asked."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from tables import each

import zerokern as zk
from zerokern import pages
from zerokern.cli.main import main
from zerokern.pages import columns

PLAN = ["plan", "--numel", "8B", "--world", "8", "--device-memory", "80GB", "--all"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *words: str, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(width), **environment}.items():
        monkeypatch.setenv(name, value)
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    assert main([*words]) == 0
    return shown.getvalue()


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_pipe_gets_text_and_markdown_only_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    assert not re.search(r"^\||^#|\*\*|\x1b", text, re.MULTILINE)
    assert main([*PLAN, "--markdown"]) == 0
    page = capsys.readouterr().out
    assert page.count("\n|") > 20 and "### " in page
    assert sorted(re.findall(r"\d+\.\d+", text)) == sorted(re.findall(r"\d+\.\d+", page))


@each("width", [60, 80])
def test_a_page_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = without_colour(on_terminal(monkeypatch, width, *PLAN))
    lines = [line for line in shown.splitlines() if not line.startswith(("Code: ", "    "))]
    assert max(map(len, lines)) <= width


@each("width", [60, 80])
def test_the_list_of_benchmarks_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    with pytest.raises(SystemExit):
        main(["bench", "--list"])
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= width and sum(line.startswith(" " * 12) for line in lines) >= 5


def test_yes_and_no_have_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    shown = on_terminal(monkeypatch, 100, *PLAN)
    assert re.search(r"\x1b\[32myes", shown) and re.search(r"\x1b\[1;31mno\b", shown)
    shown = on_terminal(monkeypatch, 100, *PLAN, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown), "bold is no colour"
    assert "\x1b" not in on_terminal(monkeypatch, 100, *PLAN, TERM="dumb")


@each(
    "line, coloured",
    [
        ("fits 80GB  yes, 52 %  no, 120 %", ["yes", "no"]),
        ("a: 2 GB are as they were written (1 GB/s)", ["are as they were written"]),
        ("  step-2  3 h  1 GB  broken: a block", ["broken"]),
        ("there is no room, and yes is no cell", []),
        ("stage 2 against ddp  1.15x  1.20x  yes", ["yes"]),
    ],
)
def test_words_that_are_answers(line: str, coloured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = Terminal()
    pages.show(line, shown)
    assert re.findall(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0m", shown.getvalue()) == coloured
    assert without_colour(shown.getvalue()) == f"{line}\n"


def test_columns_that_do_not_fit_stand_below() -> None:
    header, rows = ["name", "one", "two", "three"], [["a", "1", "22", "333"], ["b", "4444444", "5", "6"]]
    assert columns(header, rows, width=20) == [
        "name      one  two", "a           1   22", "b     4444444    5", "",
        "name  three", "a       333", "b         6",
    ]  # fmt: skip
    assert columns(header, rows, width=100) == columns(header, rows)
    folded = columns(["what", "GB"], [["as long as a sentence that says why", "1"]], width=30)
    assert folded == ["what                        GB", "as long as a sentence that   1", "says why"]
    assert len(columns(header, rows, width=5)) == 3 * 3 + 2, "at least one beside the first"


@each("shown", [lambda: zk.plan("1B", world=2), lambda: zk.measure(torch.nn.Linear(4, 4))])
def test_notebooks_show_tables(shown: Any) -> None:
    one = shown()
    page = one._repr_html_()
    assert page.startswith("<h4>") and "<table>" in page and "**" not in page and "|" not in page
    for tag in ("table", "tr", "td", "th", "h4", "p", "ul", "li"):
        assert page.count(f"<{tag}>") == page.count(f"</{tag}>")
    assert sorted(re.findall(r"\d+\.\d+", page)) == sorted(re.findall(r"\d+\.\d+", str(one)))
