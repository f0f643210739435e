"""`bench/FACTS.md` says each thing once, names machine and source, and puts facts under headings that fit them.

Its tables have five columns: what, machine, figure, file or commit, conclusion. A table with other columns has its
machine and its source in the text above it. Merges have brought back rows that had been removed, so doubles are
searched for, in another order of clauses too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tables import each

from .tree import Finding, assert_clean, read, tracked

PAGE = "bench/FACTS.md"
MOST_LINES, LONGEST_LINE = 700, 240

COLUMNS = ("what", "machine", "figure", "file or commit")  # the fifth says what follows
LOST = "Tried and lost"
NO_MACHINE = ("counted", "predicted", "others")
# Where a heading of a chapter has one of these words, rows of the chapter that begin with it stand below that heading.
TOPICS = ("AVX2", "Muon")

SPAN = re.compile(r"`([^`]+)`")
COMMIT = re.compile(r"[0-9a-f]{7,12}")
RESULT = re.compile(r"[\w-]+_(?:[a-z0-9]+-\d+|h200)_\d{8}(?:-\d+)?")
DAY = re.compile(r"(?:0[1-9]|1[0-2])-(?:[0-2]\d|3[01])")
COUNT = r"\d+(?:,\d{3})*(?:\.\d+)?"
WORD = re.compile(rf"[a-z][a-z0-9]*|{COUNT}|\+", re.IGNORECASE)
LINK = re.compile(r"\]\([^)]*\)")
UNIT = r"(?:ns|us|ms|s|%|x|GB/s|cycles|times (?:as|faster|slower))"
FIGURE = re.compile(rf"(?<![\w.]){COUNT}\s?{UNIT}(?![\w/])")
NUMBER = re.compile(rf"(?<![\w.]){COUNT}")
ALIKE = 0.6  # the share of common word pairs from which on two facts are one
TRIED = 0.8  # the same of all words of two attempts
FEW = 6  # fewer words than these say too little to be a double
SEPARATOR = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")


@dataclass
class Table:
    line: int
    headings: list[str]
    above: str  # the paragraph above it
    columns: list[str]
    rows: list[tuple[int, list[str]]] = field(default_factory=list)

    @property
    def is_of_facts(self) -> bool:
        return tuple(self.columns[: len(COLUMNS)]) == COLUMNS


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text: str) -> Iterator[Table]:
    headings: list[tuple[int, str]] = []
    above, table = "", None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if heading := re.match(r"(#+) (.*)", line):
            headings = [one for one in headings if one[0] < len(heading[1])] + [(len(heading[1]), heading[2])]
            above = ""
        if not line.startswith("|"):
            if table:
                yield table
                table, above = None, ""
            elif line and not heading:
                above = line if lines[number - 2 : number - 1] == [""] else f"{above}\n{line}"
        elif table is None:
            table = Table(number, [name for _, name in headings], above, cells(line))
        elif not SEPARATOR.fullmatch(line.strip()):
            table.rows.append((number, cells(line)))
    if table:
        yield table


def machines(text: str) -> dict[str, list[str]]:
    """The names of the table of machines, and what else each is called."""
    named = [table for table in tables(text) if table.headings[-1:] == ["Machines"]]
    return {
        row[0].strip("*"): [row[0].strip("*"), *filter(None, map(str.strip, row[1].split(",")))]
        for table in named[:1]
        for _, row in table.rows
    }


def machine_of(cell: str, names: dict[str, list[str]]) -> str:
    """The machine that a cell names; "" where it names none, or says more than a day and that it was simulated."""
    place, _, rest = cell.partition(",")
    name, _, day = place.strip().partition(" ")
    fits = name in (*names, *NO_MACHINE) and rest.strip() in ("", "played") and (not day or DAY.fullmatch(day))
    return name if fits and (day or name in NO_MACHINE) else ""


def sources(text: str, paths: frozenset[str]) -> list[str]:
    """What of a cell or paragraph says where a fact comes from: a commit, a result, a path or a command."""
    found = []
    for span in SPAN.findall(text):
        is_path = "/" in span and any(path == span or path.endswith(f"/{span}") for path in paths)
        is_result = f"bench/results/{span}.json" in paths
        if COMMIT.fullmatch(span) or is_path or is_result or span.startswith(("zerokern ", "python ", "make ")):
            found.append(span)
    return found


def without_certificate(text: str, paths: frozenset[str]) -> list[Finding]:
    """Figures without a machine or without a file or commit; results that do not exist."""
    names = machines(text)
    found = []
    for table in tables(text):
        if not SEPARATOR.fullmatch("".join(text.splitlines()[table.line : table.line + 1])):
            found.append(Finding(PAGE, table.line, "no line of dashes follows, so this is no table"))
        if table.headings[-1:] == ["Machines"]:
            continue
        if not table.is_of_facts:
            has_machine = any(re.search(rf"\b{name}\b", table.above, re.IGNORECASE) for name in (*names, *NO_MACHINE))
            if not has_machine or not sources(table.above, paths):
                found.append(Finding(PAGE, table.line, "this table has no machine, or no file or commit, above it"))
            continue
        for number, row in table.rows:
            if len(row) != len(COLUMNS) + 1:
                found.append(Finding(PAGE, number, f"has {len(row)} cells, not {len(COLUMNS) + 1}"))
                continue
            what, machine, figure, source, _ = row
            if not what or not figure:
                found.append(Finding(PAGE, number, "does not say what, or has no figure"))
            if not machine_of(machine, names):
                found.append(Finding(PAGE, number, f"{machine!r} is no machine of the table with a day"))
            if not sources(source, paths):
                found.append(Finding(PAGE, number, f"{source!r} is no file, commit or command"))
    for number, paragraph, is_above_table in paragraphs(text):
        if is_above_table:
            continue
        if number > len(text[: text.find("## Machines")].splitlines()) and FIGURE.search(paragraph):
            found.append(Finding(PAGE, number, "has a figure, which belongs in a row of a table"))
    for number, line in enumerate(text.splitlines(), 1):
        lost = [one for one in SPAN.findall(line) if RESULT.fullmatch(one) and f"bench/results/{one}.json" not in paths]
        found += [Finding(PAGE, number, f"bench/results/{one}.json does not exist") for one in lost]
    return found


def paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """Paragraphs and items of lists with their first lines, and whether a table follows, whose conditions they say."""
    begun, paragraph = 0, ""
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines, 1):
        if paragraph and (not line or line.startswith(("|", "#", "* "))):
            yield begun, paragraph.strip(), any(one.startswith("|") for one in lines[number - 1 : number + 1])
            paragraph = ""
        if line and not line.startswith(("|", "#")):
            begun = begun if paragraph else number
            paragraph += f" {line}"


@dataclass(frozen=True)
class Fact:
    line: int
    words: tuple[str, ...]
    numbers: frozenset[str]
    pairs: frozenset[tuple[str, str]]


def fact(line: int, text: str) -> Fact:
    words = tuple(word.lower() for word in WORD.findall(RESULT.sub("", LINK.sub("]", text))))
    return Fact(line, words, frozenset(NUMBER.findall(text)), frozenset(pairwise(words)))


def said(text: str) -> Iterator[Fact]:
    """Each row without its machine and source, and each sentence of a paragraph or a list."""
    in_tables = {}
    for table in tables(text):
        for number, row in table.rows:
            in_tables[number] = fact(number, " ".join(row[::2] if table.is_of_facts else row))
    yield from in_tables.values()
    for number, paragraph, _ in paragraphs(text):
        yield from (fact(number, one) for one in re.split(r"(?<=[.:;]) +(?=[A-Z`*])", paragraph))


def overlap(one: frozenset[object], other: frozenset[object]) -> float:
    return len(one & other) / max(1, min(len(one), len(other)))


def likeness(one: Fact, other: Fact) -> float:
    words = set(one.words), set(other.words)
    return len(words[0] & words[1]) / max(1, len(words[0] | words[1]))


def doubles(text: str) -> list[Finding]:
    """Facts that say the same: the same pairs of neighbouring words, in whatever order of clauses.

    Rows of one series differ in their figures alone. Two facts are one if what they say is alike and most figures of
    one are those of the other."""
    facts = [one for one in said(text) if len(one.words) >= FEW]
    found = []
    for index, one in enumerate(facts):
        for other in facts[:index]:
            alike = overlap(one.pairs, other.pairs) >= ALIKE
            if alike and (not one.numbers or not other.numbers or overlap(one.numbers, other.numbers) > ALIKE):
                found.append(Finding(PAGE, one.line, f"says what line {other.line} says"))
    return found


def tried_twice(text: str) -> list[Finding]:
    """Two rows of "Tried and lost" about one attempt on one machine, whatever figures or reasons they have."""
    rows: list[tuple[Fact, str]] = []
    found = []
    for table in tables(text):
        if LOST not in table.headings:
            continue
        column = table.columns.index("machine")
        for number, row in table.rows:
            tried = fact(number, row[0])
            twins = [one for one, machine in rows if machine == row[column] and likeness(one, tried) >= TRIED]
            if twins and not row[0].startswith("the same"):  # which continues the row above it
                found.append(Finding(PAGE, number, f"was tried in line {twins[0].line} already"))
            rows.append((tried, row[column]))
    return found


def named(text: str, names: dict[str, list[str]]) -> set[str]:
    """The machines that a text names, by whatever they are called."""
    return {name for name, called in names.items() if any(re.search(rf"\b{re.escape(one)}\b", text) for one in called)}


def placed(text: str) -> Iterator[tuple[int, list[str], str, str]]:
    """Each row, paragraph and item of a list: its line, the headings above it, what it is about, and its machine."""
    headings: dict[int, list[str]] = {}
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if heading := re.match(r"(#+) (.*)", line):
            above = [one for one in above if one[0] < len(heading[1])] + [(len(heading[1]), heading[2])]
        headings[number] = [name for _, name in above]
    for table in tables(text):
        for number, row in table.rows:
            yield number, table.headings, row[0], row[1] if table.is_of_facts else ""
    for number, paragraph, _ in paragraphs(text):
        yield number, headings[number], paragraph, paragraph


def misplaced(text: str) -> list[Finding]:
    """Facts of one machine below the heading of another, and of a topic that has a heading of its own elsewhere."""
    names = machines(text)
    headed = {
        (headings[1], topic)
        for _, headings, _, _ in placed(text)
        for topic in TOPICS
        if len(headings) > 2 and topic in headings[-1]
    }
    found = []
    for number, headings, about, machine in placed(text):
        heading = headings[-1] if headings else ""
        owners, others = named(heading, names), named(machine, names)
        if owners and others and not owners & others:
            found.append(Finding(PAGE, number, f"is of {', '.join(others)}, below the heading {heading!r}"))
        lead = about.split(":")[0]
        topics = {topic for chapter, topic in headed if chapter in headings[1:2] and topic in lead}
        if topics and not any(topic in heading for topic in topics):
            found.append(Finding(PAGE, number, f"is about {', '.join(topics)}, below the heading {heading!r}"))
    return found


def too_long(text: str) -> list[Finding]:
    lines = text.splitlines()
    found = [
        Finding(PAGE, number, f"has {len(line)} characters, more than {LONGEST_LINE}")
        for number, line in enumerate(lines, 1)
        if len(line) > LONGEST_LINE
    ]
    if len(lines) > MOST_LINES:
        found.append(Finding(PAGE, MOST_LINES, f"has {len(lines)} lines, more than {MOST_LINES}"))
    return found


def test_no_fact_stands_twice() -> None:
    assert_clean(doubles(read(PAGE)))


def test_nothing_was_tried_and_lost_twice() -> None:
    assert_clean(tried_twice(read(PAGE)))


def test_each_figure_has_a_machine_and_a_source() -> None:
    assert_clean(without_certificate(read(PAGE), frozenset(tracked())))


def test_facts_stand_below_headings_that_fit() -> None:
    assert_clean(misplaced(read(PAGE)))


def test_the_page_is_short() -> None:
    assert_clean(too_long(read(PAGE)))


HEAD = "| what | machine | figure | file or commit | conclusion |\n| --- | --- | --- | --- | --- |\n"
ROW = "| a loop that only reads 64 MiB | xeon-2 11-25 | 40 GB/s | `abcdef01` | it is L3 |\n"
BEGIN = "## Machines\n\n| name | also called | what |\n| --- | --- | --- |\n| **xeon-2** | Intel | 2 cores |\n"
BEGIN += "| **epyc-2** | Zen 4 | 2 cores |\n\n"
PATHS = frozenset({"bench/results/adam_xeon-2_20261125.json", "cpu/adam/adam.inl.h", "tests/a/test_b.py"})


@each(
    "again",
    [
        ROW,
        "| only reads 64 MiB, a loop that | xeon-2 11-25 | 40 GB/s | `abcdef02` | so it is L3 |\n",
        "\n* A loop that only reads 64 MiB reaches 40 GB/s: it is L3.\n",
    ],
)
def test_a_double_is_found(again: str) -> None:
    assert [finding.line for finding in doubles(HEAD + ROW + again)] == [4 + again.startswith("\n")]


@each(
    "other",
    [
        "| a loop that only reads 64 KiB | xeon-2 11-25 | 150 GB/s | `abcdef01` | it is L1 |\n",
        "| a loop that writes 64 MiB by streaming stores | xeon-2 11-25 | 40 GB/s | `abcdef01` | |\n",
        "\nA loop reads.\n",
    ],
)
def test_another_fact_is_no_double(other: str) -> None:
    assert doubles(HEAD + ROW + other) == []


@each(
    "row, wrong",
    [
        (ROW, ""),
        (ROW.replace("`abcdef01`", "`adam_xeon-2_20261125`"), ""),
        (ROW.replace("`abcdef01`", "`test_b.py`"), "no file"),
        (ROW.replace("`abcdef01`", "`a/test_b.py`"), ""),
        (ROW.replace("`abcdef01`", "`zerokern bench adam`"), ""),
        (ROW.replace("xeon-2 11-25", "xeon-2 11-25, played"), ""),
        (ROW.replace("xeon-2 11-25", "counted"), ""),
        (ROW.replace("xeon-2 11-25", ""), "'' is no machine"),
        (ROW.replace("xeon-2 11-25", "xeon-2"), "is no machine"),
        (ROW.replace("xeon-2 11-25", "xeon-3 11-25"), "is no machine"),
        (ROW.replace("xeon-2 11-25", "xeon-2 11-25, busy"), "is no machine"),
        (ROW.replace("`abcdef01`", ""), "no file, commit"),
        (ROW.replace("`abcdef01`", "`adam_xeon-2_20261126`"), "does not exist"),
        (ROW.replace("40 GB/s", ""), "has no figure"),
        (ROW.replace("| it is L3 |", "|"), "has 4 cells"),
        ("\n" + HEAD.splitlines()[0] + "\n" + ROW, "no line of dashes"),
        ("\nIt reads 40 GB/s.\n", "belongs in a row"),
        ("\n| loop | GB/s |\n| --- | --- |\n| reads | 40 |\n", "no machine, or no file"),
        ("\nOn xeon-2, `abcdef01`:\n\n| loop | GB/s |\n| --- | --- |\n| reads | 40 |\n", ""),
    ],
)
def test_a_figure_without_a_certificate_is_found(row: str, wrong: str) -> None:
    text = "\n".join(str(one) for one in without_certificate(f"{BEGIN}## Peers\n\n{HEAD}{row}", PATHS))
    assert wrong in text and bool(wrong) == bool(text)


def test_what_lost_twice_is_found() -> None:
    first = "| Muon: codes by two permutes of bytes | xeon-2 11-27 | 24.5 cycles | `abcdef01` | noise |\n"
    again = "| Muon: by two permutes of bytes, codes | xeon-2 11-27 | 31 cycles | `abcdef01` | ports |\n"
    there = again.replace("xeon-2", "epyc-2")
    lost = "## Tried and lost\n\n" + HEAD
    assert [one.line for one in tried_twice(lost + first + again)] == [6]
    assert tried_twice(lost + first + there) == []


def test_what_stands_below_a_foreign_heading_is_found() -> None:
    on_amd, muon = ROW.replace("xeon-2", "epyc-2"), ROW.replace("a loop", "Muon, a loop")
    for heading in ("Zen 4", "epyc-2", "The EPYC, a Zen 4"):
        page = f"# Facts\n\n{BEGIN}## {heading}\n\n{HEAD}"
        assert len(misplaced(page + ROW)) == 1 and misplaced(page + on_amd) == []
        assert len(misplaced(f"{page}{on_amd}\n* An Intel has 22 cycles.\n")) == 1
    page = f"# Facts\n\n{BEGIN}## Kernels\n\n### Norms\n\n{HEAD}{muon}\n### Muon on CPUs\n\n{HEAD}{muon}\n"
    assert [one.line for one in misplaced(page)] == [page[: page.find("Muon, a")].count("\n") + 1]
    assert misplaced(f"{page.replace('Norms', 'Muon, norms')}## Quality\n\n{HEAD}{muon}") == []


def test_what_is_too_long_is_found() -> None:
    assert [one.line for one in too_long("a\n" + "b" * 241)] == [2]
    assert len(too_long("a\n" * 701)) == 1 and too_long("a\n" * 700) == []
