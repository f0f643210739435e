"""The pages on the API have one line for each public name, also where nobody renders them."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter

import pytest

import zerokern as zk
from zerokern.optim.base import FusedOptimizer

from .tree import ROOT, read

BEGIN, END = "<!-- names:begin -->\n", "<!-- names:end -->"
MADE = {"Delta", "Deltas", "Plan", "Probe", "Saving", "Ticket"}  # by the library, and not by who reads this
IO, KERNELS = (tuple(f"{module}.{name}" for name in getattr(zk, module).__all__) for module in ("io", "kernels"))
ERRORS = tuple(name for name in zk.__all__ if name.endswith("Error"))
PAGES = {  # the names of each, as they are said behind "zk."
    "api": ("__version__", *ERRORS),
    "api-optimizers": (
        *("AdamW", "Adam", "Lion", "Adagrad", "SGD", "Muon", "muon_groups", "ChainedOptimizer"),
        *("clip_grad_norm_", "convert_state", "Delayed", "Nvme"),
    ),
    "api-zero": (
        *("shard", "build", "gathered", "no_sync", "shards", "recompute", "tile", "PipelineStage", "from_deepspeed"),
    ),
    "api-checkpoints": ("save", "load", "latest", "Saving", "export", "load_pretrained", "deltas", "Deltas", "Delta"),
    "api-plans": ("plan", "Plan", "measure", "trace", "info"),
    "api-io": ("io", *IO),
    "api-kernels": ("kernels", *KERNELS, "get_include", "get_library"),
}
# of every optimizer
MEMBERS = ("statistics", "grad_norm", "skipped_steps", "max_grad_norm", "flush", "refresh_masters", "close")


def first_sentence(doc: str) -> str:
    """Of a docstring, as the cell of a table."""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    found = re.match(r".*?[\w`)'\"]\.(?= |$)", paragraph)
    return (found[0] if found else paragraph).rstrip(".")


def call_of(name: str, one: object) -> str:
    """The name with its arguments, where it is called by a user."""
    called = callable(one) and not (isinstance(one, type) and issubclass(one, BaseException))
    if not called or name.rpartition(".")[2] in MADE:
        return f"zk.{name}"
    plain = inspect.signature(one)  # type: ignore[arg-type]
    bare = [each.replace(annotation=each.empty) for each in plain.parameters.values()]
    return f"zk.{name}{plain.replace(parameters=bare, return_annotation=plain.empty)}"


def row(name: str) -> str:
    one = attrgetter(name)(zk)
    said = "The version of the package." if name == "__version__" else inspect.getdoc(one) or ""
    return f"| `{call_of(name, one)}` | {first_sentence(said)} |"


def members() -> list[str]:
    ours = {name: getattr(FusedOptimizer, name) for name in MEMBERS}
    calls = {name: f"opt.{name}{'' if isinstance(one, property) else '()'}" for name, one in ours.items()}
    return [f"| `{calls[name]}` | {first_sentence(inspect.getdoc(one) or '')} |" for name, one in ours.items()]


def table(page: str) -> str:
    """The names of a page; on that of optimizers also what every optimizer has."""
    rows = [row(name) for name in PAGES[page]] + (members() if page == "api-optimizers" else [])
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows, ""])


def parts(page: str) -> list[str]:
    """What stands before the table, the table, and what stands behind it."""
    before, _, rest = read(f"docs/{page}.md").partition(BEGIN)
    within, _, behind = rest.partition(END)
    return [before + BEGIN, within, END + behind]


def test_every_public_name_is_on_a_page() -> None:
    public = [*zk.__all__, *IO, *KERNELS]
    assert sorted(name for names in PAGES.values() for name in names) == sorted(public)


@pytest.mark.parametrize("page", PAGES)
def test_each_public_name_has_its_line(page: str) -> None:
    """To write the tables of all pages anew: python -m tests.policy.test_api_page."""
    assert parts(page)[1] == table(page)


@pytest.mark.parametrize("page", PAGES)
def test_each_is_also_told_in_full(page: str) -> None:
    """By its public name, which is its heading on the site."""
    full = re.findall(r"^::: zerokern\.(\S+)$", read(f"docs/{page}.md"), re.MULTILINE)
    internal = [name for name in full if name not in PAGES[page] and not name.startswith("AdamW.")]
    assert internal == [] and set(PAGES[page]) - set(full) <= {"__version__", "io", "kernels", "io.Nvme"}


def test_a_sentence_ends_where_it_ends() -> None:
    assert first_sentence("Takes `a.b`. And more.\n\nRest.") == "Takes `a.b`"
    assert first_sentence("As ``torch.nn``\nhas it") == "As `torch.nn` has it"


if __name__ == "__main__":
    for page in PAGES:
        before, _, behind = parts(page)
        (ROOT / f"docs/{page}.md").write_text(before + table(page) + behind, encoding="utf-8")
