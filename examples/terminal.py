"""Where commands print: rich's console, or plain lines where rich is not installed."""

from __future__ import annotations

import sys
from typing import Any, TextIO

__all__ = ["Plain", "console"]


class Plain:
    """What the commands use of rich's Console, as lines of text: no colours, no bars.

    >>> Plain(sys.stdout).print("adam: 3/3 rounds", style="bold", markup=False)
    adam: 3/3 rounds
    """

    is_terminal = False
    width = 100

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def print(self, text: object = "", **_: Any) -> None:
        (self.file or sys.stdout).write(f"{text}\n")


def console(**settings: Any) -> Any:
    """rich's Console with these settings, or a `Plain` one without rich, which the extra `cli` brings.

    >>> console(file=sys.stdout, highlight=False).print("as it is")
    as it is
    """
    try:
        from rich.console import Console
    except ImportError:
        return Plain(settings.get("file"))
    return Console(**settings)
