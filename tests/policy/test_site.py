"""The documentation site has every page, each page an example, and one sentence says everywhere what this is."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import zerokern as zk

from .tree import ROOT, files, read

TAGLINE = "Exact AdamW for bf16 models in 14 bytes per parameter: on GPU, host memory or NVMe, sharded or not."
PLACES = ("README.md", "docs/index.md", "mkdocs.yml", "pyproject.toml", "zerokern/__init__.py", "zerokern/cli/main.py")
README_LINES = 235
COLUMNS = 88  # of code beside both menus of the site
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> set[str]:
    return {path.removeprefix("docs/") for path in files(".md") if path.startswith("docs/")}


def links() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/site/links.py"))


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", read("mkdocs.yml"), re.MULTILINE))
    assert listed == pages() | links()["ELSEWHERE"].keys()


def test_pages_from_elsewhere_exist() -> None:
    assert [path for path in links()["ELSEWHERE"].values() if path not in files(".md")] == []


def test_every_page_has_an_example() -> None:
    assert [page for page in sorted(pages()) if "```" not in read(f"docs/{page}")] == []


def test_arguments_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    shown = runpy.run_path(str(ROOT / "docs/site/docstrings.py"))["shown"]
    page = shown("What it does.\n\nArgs:\n    one: what it\n        is.\n    two, three: both.\n\n>>> one")
    listed = "**Arguments**\n\n- **one**: what it\n    is.\n- **two, three**: both."
    assert page == f"What it does.\n\n{listed}\n\n```pycon\n>>> one\n```"


def cut_off(page: str) -> list[str]:
    """Lines of code that the site cannot show as a whole."""
    return [line for block in BLOCK.findall(page) for line in block.splitlines() if len(line) > COLUMNS]


def test_code_is_not_cut_off() -> None:
    shown = ["README.md", *(f"docs/{page}" for page in sorted(pages()))]
    assert {page: lines for page in shown if (lines := cut_off(read(page)))} == {}


def test_wide_code_is_found() -> None:
    wide = "x" * (COLUMNS + 1)
    assert cut_off(f"{wide}\n\n```python\n{wide}\n{wide[1:]}\n```\n\n```\n{wide}\n```\n") == [wide, wide]


def test_links_work_in_the_site() -> None:
    inside = links()["inside"]
    repository = "https://github.com/zerokern/zerokern/blob/main"
    page = inside("[a](zero.md#x) [b](../cpu/README.md) ![c](../bench/results/adam.png)", "docs/how.md")
    assert page == f"[a](zero.md#x) [b]({repository}/cpu/README.md) ![c](results/adam.png)"
    page = inside("[d](#e) [f](https://g.h) [i](../CHANGELOG.md)", "docs/how.md")
    assert page == "[d](#e) [f](https://g.h) [i](changelog.md)"
    assert inside("[a](docs/zero.md) `[b](c)[0](d)`", "CHANGELOG.md").startswith("[a](zero.md)")
    assert inside("[a](FACTS.md#gpus) [b](../docs/right.md)", "bench/README.md") == "[a](facts.md#gpus) [b](right.md)"
    assert inside("```\n[a](b)\n```\n", "docs/how.md") == "```\n[a](b)\n```\n"


def test_a_table_of_the_readme_is_on_the_front_page() -> None:
    front = links()["included"](read("docs/index.md"))
    assert "| machine | exact, ns |" in front and "<!-- from README.md" not in front
    with pytest.raises(ValueError, match="has no part between"):
        links()["included"]("<!-- from README.md: nothing -->\n")


def test_the_front_page_shows_what_counts() -> None:
    front = read("docs/index.md")
    assert "](pictures/" in front and "bytes per parameter" in front and "## Install" in front


def test_the_picture_shows_the_numbers_of_the_table_and_of_kept_results() -> None:
    """After a change of README's table or of a result: python docs/pictures/beside.py"""
    beside = runpy.run_path(str(ROOT / "docs/pictures/beside.py"))
    assert read("docs/pictures/beside.svg") == beside["drawn"]()
    fits, speeds = list(beside["counted"]()), list(beside["measured"]())
    assert [value for value, _ in fits[0].values.values()] == [14, 16, 18]
    for bars in fits + speeds:
        ours, *others = (value for value, _ in bars.values.values())
        assert others and min(others) > ours, bars.title
    assert "](docs/pictures/beside.svg)" in read("README.md") and "](pictures/beside.svg)" in read("docs/index.md")


def test_no_line_of_code_is_cut_off_by_the_style() -> None:
    style = read("docs/site/site.css")
    assert "white-space: pre-wrap" in style.partition(".md-typeset pre > code {")[2].partition("}")[0]


def internal_names(text: str) -> list[str]:
    """Names in a text under which no user writes what is public as zk.X. Python itself shows where an error is
    defined, so the last line of a traceback is left out."""
    public = "|".join(name for name in zk.__all__ if name[0].isalpha() and name not in ("io", "kernels"))
    written = re.sub(r"^\s*zerokern\.core\.errors\.\w+: ", "", text, flags=re.MULTILINE)
    return re.findall(rf"\bzerokern(?:\.[a-z_]+)+\.(?:{public})\b(?!\.| import)", written)


def test_readers_see_public_names_alone() -> None:
    """In docstrings, which `help` and the API pages show, in messages, and on pages but for what a directive names."""
    texts = {
        f"{path}:{node.lineno}": node.value
        for path in files(".py", under=("zerokern/", "bench/", "examples/"))
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2
    }
    texts |= {page: re.sub(r"^::: .*$", "", read(page), flags=re.MULTILINE) for page in files(".md")}
    assert {place: found for place, text in texts.items() if (found := internal_names(text))} == {}
    assert internal_names("As `zerokern.optim.Adam` says.") == ["zerokern.optim.Adam"]
    assert internal_names("As zk.Adam and zerokern.zero.shard.x say.") == []


def test_a_directive_of_the_site_shows_the_public_name() -> None:
    api = "".join(read(page) for page in files(".md") if page.startswith("docs/api-"))
    for named, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", api, re.MULTILINE):
        if internal_names(named):
            assert f"heading: zerokern.{named.rpartition('.')[2]}\n" in options, named


def test_a_name_in_a_table_stays_in_one_piece() -> None:
    unbroken = runpy.run_path(str(ROOT / "docs/site/shown.py"))["unbroken"]
    long = "zk.plan(model, stage=2, world=1, mesh=None)"
    page = unbroken(f"<code>a</code><td>a <code>--param-tier</code> <code>{long}</code></td>")
    assert page == f'<code>a</code><td>a <code class="name">--param-tier</code> <code>{long}</code></td>'


def test_a_long_word_in_a_table_breaks_after_dots() -> None:
    """A table with one of them was wider than its page, and its last column was cut off."""
    unbroken = runpy.run_path(str(ROOT / "docs/site/shown.py"))["unbroken"]
    page = unbroken(
        "<td><code>use actor.optim.impl.of.the.framework=zerokern</code> <strong>1.2x</strong> (1.1 to 1.3)</td>"
    )
    word = "actor.<wbr>optim.<wbr>impl.<wbr>of.<wbr>the.<wbr>framework=<wbr>zerokern"
    assert page == f"<td><code>use {word}</code> <strong>1.2x</strong><br>(1.1 to 1.3)</td>"


def test_the_site_shows_its_version() -> None:
    config = SimpleNamespace(site_name="zerokern")
    runpy.run_path(str(ROOT / "docs/site/shown.py"))["on_config"](config)
    assert re.fullmatch(r"zerokern \d+\.\d+\.\d+", config.site_name)


def test_one_sentence_says_what_this_is() -> None:
    assert [place for place in PLACES if TAGLINE not in read(place)] == []


def test_the_readme_is_short_and_begins_with_what_counts() -> None:
    lines = read("README.md").splitlines()
    first, last = "\n".join(lines[:55]), "\n".join(lines[-35:])
    assert len(lines) < README_LINES
    begins = (
        TAGLINE,
        "It is for",
        "make demo",
        "import zerokern",
        "](docs/pictures/",
        "## Does it fit?",
        "## Is it faster?",
    )
    assert [part for part in begins if part not in first] == []
    status = read("README.md").partition("## Status")[2].partition("\n## ")[0]
    assert "never run on more than one GPU" in status and "Use something else when" in status
    assert [part for part in ("Who maintains this", "promised", "gpu.json") if part not in last] == []
