"""Options are few and stay: a new one is a decision, seen in the diff of options.txt and told on a page of the docs.

What docs/building-blocks.md calls stable in `zerokern.comm`, `zerokern.schedule` and `zerokern.memory` is frozen with
them: authors of frameworks build on these names, and on no others there.

A page is where users look an option up. The changelog tells what differs between releases; names are not listed there.
"""

from __future__ import annotations

import argparse
import difflib
import re

import pytest

from .options import (
    BLOCKS,
    argument_names,
    collect,
    command_line,
    environment,
    of_blocks,
    of_parser,
    public_callables,
    stable_names,
    subcommands,
)
from .test_docs import code
from .tree import files, read

FROZEN = "tests/policy/options.txt"
DO = f"""
If the change is meant: python tests/policy/options.py > {FROZEN}
and a place on a page of docs/ that tells users."""


def changes(frozen: list[str], now: list[str]) -> str:
    return "\n".join(difflib.unified_diff(frozen, now, FROZEN, "this tree", lineterm="", n=0))


def untold(names: list[str], pages: str) -> list[str]:
    """Names that no page mentions as code."""
    told = set(re.findall(r"[\w$-]+", code(pages)))
    return [name for name in names if name not in told]


def test_options_are_frozen() -> None:
    difference = changes(read(FROZEN).splitlines(), collect())
    assert not difference, f"\n{difference}\n{DO}"


def test_the_docs_tell_every_name() -> None:
    names = [name.rpartition(".")[2] for name, _ in public_callables()]
    pages = "\n".join(read(path) for path in files(".md") if path.startswith("docs/"))
    assert untold([*names, *subcommands(command_line()), *environment()], pages) == []


def test_fewer_than_ten_environment_names() -> None:
    # torchrun sets some, nobody else; of NCCL's own the user is only warned
    ours = [name for name in environment() if not name.endswith("WORLD_SIZE") and not name.startswith("NCCL_")]
    assert len(ours) < 10


def test_the_page_of_building_blocks_shows_calls_as_they_are() -> None:
    page = BLOCKS.read_text(encoding="utf-8")
    assert [line for line in of_blocks(page) if f"`{line}`" not in page] == []
    modules = {module for module, _, _ in stable_names(page)}
    assert modules == {"zerokern.comm", "zerokern.memory", "zerokern.schedule", "zerokern.schedule.executor"}


def test_a_change_of_a_building_block_is_found() -> None:
    page = "| `zerokern.comm.Group.broadcast(tensor, src, gone)`, `zerokern.comm.Group.rank` | one |\n"
    page += "| `zerokern.comm.Group.all_reduce(op)` | lacks one that a call needs |\n`zerokern.comm.Handle` is no row\n"
    assert list(of_blocks(page)) == [
        "zerokern.comm.Group.broadcast(tensor, src)",
        "zerokern.comm.Group.rank",
        "zerokern.comm.Group.all_reduce(tensor, op)",
    ]
    for gone in ("comm.Group.no_such", "comm.Group.no_such()", "comm.Group.weakref", "comm.no_such()", "schedule.Op.x"):
        with pytest.raises(AttributeError, match=gone.rpartition(".")[2].removesuffix("()")):
            list(of_blocks(f"| `zerokern.{gone}` | gone |\n"))


def test_a_new_option_is_found() -> None:
    parser = argparse.ArgumentParser()
    below = parser.add_subparsers().add_parser("bench")
    below.add_argument("op")
    below.add_argument("--json")
    frozen = ["zerokern bench", "zerokern bench op"]
    assert changes(frozen, list(of_parser("zerokern", parser))).endswith("+zerokern bench --json")
    assert argument_names(lambda a, *b, c=1, **d: a) == "a, *b, c, **d"
    assert untold(["AdamW", "Lion"], "new: `zk.AdamW(fused)`, Lion") == ["Lion"]
