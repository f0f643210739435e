"""A figure of a GPU has a file in `bench/results/` that says so: all of them on one page, the others beside a link.

A block is a paragraph, an item of a list or a table. It tells of a GPU where it, or a heading above it, names one.
A number without a unit needs no link, but is held against the file where there is one. Figures of plans, of counts and
of others are none of ours, and the block or the start of its section says so in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tables import each

from .tree import ROOT, read, tracked

pages = import_module("zerokern.bench.gpu.pages")

GPU = re.compile(r"\b(?:[AHBL]\d{2,3}S?|GB\d{2,3}|GH200|RTX)\b")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?<![\w.,-])({NUMBER})(?:(x)\b|\s?(ns|us|ms|s|GB/s|%)(?![\w/])|\s(?=times as|of (?:its )?\d+ (?:GPU )?tests))"
    r"|(?<![\w.,-])(\d+\.\d+)(?![\w.-]|\s?[GM]i?B\b)"
)
OURS = re.compile(r"\((?:\.\./)*(?:bench/)?results/(gpu[\w-]+\.json)\)")
NOT_OURS = re.compile(
    r"\b(?:plans?|predict\w*|simulat\w*|counted|assumed|played|arithmetic|by others|[\w/-]+ #\d{4,}|blob/\w+)\b",
    re.IGNORECASE,
)
SKIPPED = {"CHANGELOG.md", pages.PAGE}
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->|^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
PARTS = re.compile(r"\n[ \t]*\n|\n(?=[ \t]*[*-] )")
TO_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def blocks(text: str) -> Iterator[tuple[list[str], str, str]]:
    """Each block with its headings and what its section begins with; a table follows the paragraph above it."""
    headings: list[tuple[int, str]] = []
    begins, before = "", ""
    for part in PARTS.split(GENERATED.sub("", text)):
        for block in re.split(r"\n(?=#)|(?<=#)\n", part.strip("\n")):
            if heading := re.match(r"(#+) (.*)", block):
                headings = [one for one in headings if one[0] < len(heading[1])] + [(len(heading[1]), heading[2])]
                begins, before, block = "", "", block[heading.end() :]
            if not block.strip():
                continue
            begins = begins or block
            whole = f"{before}\n{block}" if block.lstrip().startswith("|") else block
            yield [name for _, name in headings], begins, whole
            before = block


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a result, those in its sentences too."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, str):
        yield from (float(one) for one in re.findall(r"\d+(?:\.\d+)?", value.replace(",", "")))
    elif isinstance(value, (int, float)):
        yield float(value)


def shown(figure: re.Match[str], known: list[float]) -> bool:
    """Whether one of the numbers, in the unit of the figure, is rounded to it."""
    text = (figure[1] or figure[4]).replace(",", "")
    unit = figure[3] or ""
    slack = 0.5001 * 10.0 ** -len(text.partition(".")[2])
    scales = {1.0, 1 / TO_NS.get(unit, 1.0), 100.0 if unit == "%" else 1.0}
    return any(abs(scale * value - float(text)) <= slack for value in known for scale in scales)


def unproven(text: str, known: dict[str, list[float]]) -> list[str]:
    """What is wrong with the figures of GPUs in a page."""
    found = []
    for headings, begins, block in blocks(text):
        figures = list(FIGURE.finditer(block))
        if not figures or not any(map(GPU.search, [*headings, block])):
            continue
        if any(map(NOT_OURS.search, [*headings, begins, block])):
            continue
        files = OURS.findall(block)
        said = " ".join(block.split())[:70]
        measured = [one[0] for one in figures if one[1]]
        if measured and not files:
            found.append(f"{said!r} has the figure {measured[0]!r} and no link to bench/results/gpu*.json")
        values = [value for file in files for value in known.get(file, [])]
        found += [
            f"{said!r}: {one[0]!r} is not in {', '.join(files)}" for one in figures if files and not shown(one, values)
        ]
    return found


def results() -> dict[str, list[float]]:
    return {name: list(numbers(content)) for name, content in pages.kept(ROOT).items()}


def test_each_figure_of_a_gpu_is_in_the_file_that_stands_beside_it() -> None:
    known = results()
    wrong = [
        f"{path}: {one}"
        for path in tracked()
        if path.endswith(".md") and path not in SKIPPED
        for one in unproven(read(path), known)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_of_all_figures_is_that_of_the_files() -> None:
    """`python -m zerokern.bench.gpu.pages` writes it."""
    assert (ROOT / pages.PAGE).read_text(encoding="utf-8") == pages.page(pages.kept(ROOT))


@each(
    "text, wrong",
    [
        ("An H200 takes 2.6 ms.", "no link"),
        ("### H200\n\n* Muon: 11.0x.", "no link"),
        ("An H200: 124 of 127 GPU tests passed.", "'124 ' and no link"),
        ("11 times as fast on an H200.", "'11 ' and no link"),
        ("An H200 takes 2.6 ms ([r](bench/results/gpu_a.json)).", ""),
        ("An H200 takes 2.7 ms ([r](bench/results/gpu_a.json)).", "'2.7 ms' is not in gpu_a.json"),
        ("On an H200 ([r](results/gpu_a.json)):\n\n| a |\n| --- |\n| 2.6 ms |", ""),
        ("On an H200 ([r](results/gpu_a.json)):\n\n| a |\n| --- |\n| 2.5 ms |", "'2.5 ms' is not in gpu_a.json"),
        ("A plan for an H200: 2.6 ms.", ""),
        ("A CPU takes 2.6 ms.", ""),
    ],
)
def test_what_is_found(text: str, wrong: str) -> None:
    said = "\n".join(unproven(text, {"gpu_a.json": [2_600_123.0]}))
    assert wrong in said and bool(wrong) == bool(said)
