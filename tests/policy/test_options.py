"""Options are few and stay: a new one is a decision, seen in the diff of options.txt and told on a page of the docs.

A page is where users look an option up. The changelog tells what differs between releases; names are not listed there.
"""

from __future__ import annotations

import argparse
import difflib
import re

from .options import argument_names, collect, command_line, environment, of_parser, public_callables, subcommands
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


def test_a_new_option_is_found() -> None:
    parser = argparse.ArgumentParser()
    below = parser.add_subparsers().add_parser("bench")
    below.add_argument("op")
    below.add_argument("--json")
    frozen = ["zerokern bench", "zerokern bench op"]
    assert changes(frozen, list(of_parser("zerokern", parser))).endswith("+zerokern bench --json")
    assert argument_names(lambda a, *b, c=1, **d: a) == "a, *b, c, **d"
    assert untold(["AdamW", "Lion"], "new: `zk.AdamW(fused)`, Lion") == ["Lion"]
