"""The name of a class means one thing: no two modules of the package define it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping

from .tree import files, nodes, read

SHARED = {  # the list may only become shorter
    "Ticket": "the protocol of whatever ends, in memory, and the ticket of a disk, which is one",
    "Slot": "a cell of a ring, which is public, and a tensor of a parameter's state",
}


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
