"""The name of a class means one thing: no two modules of the package define it. What sets it apart from the class that
is most like it stands on a page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping

from .tree import files, nodes, read

SHARED = {  # the list may only become shorter
    "Ticket": "the protocol of whatever ends, in memory, and the ticket of a disk, which is one",
    "Slot": "a cell of a ring, which is public, and a tensor of a parameter's state",
}
PAGE = "docs/classes.md"
SECTIONS = ("optim", "zero", "memory", "planner", "checkpoint", "schedule")  # folders whose classes the page lists
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \| [^|]+ \|$", re.MULTILINE)


def homes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """By the name of a class, the files that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for name in {node.name for node in nodes(source) if isinstance(node, ast.ClassDef)}:
            found[name].append(path)
    return found


def test_a_class_has_a_name_of_its_own() -> None:
    several = {name: at for name, at in homes({path: read(path) for path in files(".py", under=("zerokern/",))}).items()
               if len(at) > 1}  # fmt: skip
    says = "defined in several modules; say in the name what sets each apart"
    new = [f"{name} is {says}: {', '.join(at)}" for name, at in several.items() if name not in SHARED]
    assert not new, "\n".join(new)
    gone = SHARED.keys() - several.keys()
    assert not gone, f"{', '.join(gone)}: one class has the name now; take it out of SHARED"


def test_a_namesake_is_found() -> None:
    made = homes({"a.py": "class Row: ...", "b.py": "def f():\n    class Row: ...\nclass Column: ..."})
    assert made == {"Row": ["a.py", "b.py"], "Column": ["b.py"]}


def said_of(folder: str, page: str) -> dict[str, str]:
    """By class, the nearest other one, as the page's section on a folder has it."""
    section = re.search(rf"^## {folder}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return dict(ROW.findall(section[1])) if section else {}


def test_each_class_is_set_apart_from_its_nearest() -> None:
    package = homes({path: read(path) for path in files(".py", under=("zerokern/",))})
    for folder in SECTIONS:
        rows = said_of(folder, read(PAGE))
        here = {name for name, at in package.items() if any(path.startswith(f"zerokern/{folder}/") for path in at)}
        new = ", ".join(sorted(here - rows.keys()))
        assert not new, f"{new}: say on {PAGE} which class is nearest and why it is not that one"
        gone = ", ".join(sorted(rows.keys() - here))
        assert not gone, f"{gone}: {folder} has no such class any more; take its row out of {PAGE}"
        lost = ", ".join(f"{name} ({nearest})" for name, nearest in rows.items() if nearest not in {*package} - {name})
        assert not lost, f"{lost}: {PAGE} compares it with what is no other class"


def test_a_row_is_read() -> None:
    page = "# Classes\n\n## a\n\n| class | is |\n| --- |\n| `Row` | a row | `Column` | it is not |\n\n## b\n\n| `B` |\n"
    assert said_of("a", page) == {"Row": "Column"} and said_of("b", page) == {} == said_of("c", page)
