"""The page on the API has one line for each public name, also where nobody renders it."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import zerokern as zk
from zerokern.optim.base import FusedOptimizer

from .tree import read

BEGIN, END = "<!-- names:begin -->\n", "<!-- names:end -->"
MADE = {"Plan", "Probe", "Saving", "Ticket"}  # by the library, and not by who reads this
MODULES = {"zk": zk, "zk.io": zk.io, "zk.kernels": zk.kernels}
# of every optimizer
MEMBERS = ("statistics", "grad_norm", "skipped_steps", "max_grad_norm", "flush", "refresh_masters", "close")


def first_sentence(doc: str) -> str:
    """Of a docstring, as the cell of a table."""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    found = re.match(r".*?[\w`)'\"]\.(?= |$)", paragraph)
    return (found[0] if found else paragraph).rstrip(".")


def call_of(prefix: str, name: str, one: object) -> str:
    """The name with its arguments, where it is called by a user."""
    called = callable(one) and not (isinstance(one, type) and issubclass(one, BaseException))
    if not called or name in MADE:
        return f"{prefix}.{name}"
    plain = inspect.signature(one)  # type: ignore[arg-type]
    bare = [each.replace(annotation=each.empty) for each in plain.parameters.values()]
    arguments = plain.replace(parameters=bare, return_annotation=plain.empty)
    return f"{prefix}.{name}{arguments}"


def rows(prefix: str, module: ModuleType) -> list[str]:
    said = {name: inspect.getdoc(getattr(module, name)) or "" for name in module.__all__}
    said["__version__"] = "The version of the package."
    names = {name: call_of(prefix, name, getattr(module, name)) for name in module.__all__}
    return [f"| `{names[name]}` | {first_sentence(said[name])} |" for name in module.__all__]


def members() -> list[str]:
    ours = {name: getattr(FusedOptimizer, name) for name in MEMBERS}
    calls = {name: f"opt.{name}{'' if isinstance(one, property) else '()'}" for name, one in ours.items()}
    return [f"| `{calls[name]}` | {first_sentence(inspect.getdoc(one) or '')} |" for name, one in ours.items()]


def table() -> str:
    """All names, module by module, and what every optimizer has."""
    parts = [*(rows(prefix, module) for prefix, module in MODULES.items()), members()]
    return "\n".join(line for part in parts for line in ["| name | what it is |", "| --- | --- |", *part, ""])


def test_each_public_name_has_its_line() -> None:
    """Replace what stands between the markers by what this says: python -m tests.policy.test_api_page."""
    assert read("docs/api.md").split(BEGIN)[1].split(END)[0] == table()


def test_each_is_also_told_in_full() -> None:
    page = read("docs/api.md")
    full = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    errors = {name for name in zk.__all__ if name.endswith("Error")}
    known = full | errors | {"__version__", "io", "kernels"}
    assert [name for module in MODULES.values() for name in module.__all__ if name not in known] == []


def test_a_sentence_ends_where_it_ends() -> None:
    assert first_sentence("Takes `a.b`. And more.\n\nRest.") == "Takes `a.b`"
    assert first_sentence("As ``torch.nn``\nhas it") == "As `torch.nn` has it"


if __name__ == "__main__":
    print(table(), end="")
