"""Helpers of the memory tests: children that say what they saw, and what the kernel says about a mapping."""

from __future__ import annotations

import re
from pathlib import Path

from forked import run_forked

PRELUDE = """
import errno, gc, logging, mmap, os, resource, sys
import torch
from zerokern.core import native
from zerokern.core.errors import BudgetError, ZerokernError
from zerokern.memory import Arena
native.library()
"""


def in_child(program: str) -> str:
    """What the program writes to stdout, in a process of its own; it must end well."""
    ran = run_forked(PRELUDE + program)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def mapping_at(address: int) -> dict[str, str] | None:
    """The lines of /proc/self/smaps about the mapping that holds an address."""
    text = Path("/proc/self/smaps").read_text()
    heads = list(re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) .*$", text, flags=re.MULTILINE))
    for head, behind in zip(heads, [*heads[1:], None], strict=True):
        if int(head[1], 16) <= address < int(head[2], 16):
            body = text[head.end() : behind.start() if behind else None]
            rows = {name: value.strip() for name, value in re.findall(r"^(\w+):(.*)$", body, flags=re.MULTILINE)}
            return {**rows, "nbytes": str(int(head[2], 16) - int(head[1], 16))}
    return None
