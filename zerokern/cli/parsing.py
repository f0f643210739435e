"""A parser whose errors name the nearest thing that there is, and show the usage of the command that they are about."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """As argparse's.

    >>> parser = Parser(prog="zerokern bench")
    >>> _ = parser.add_argument("--pairs", type=int)
    >>> parser.refuse_unknown(["--pears"])
    Traceback (most recent call last):
    ...
    SystemExit: 2
    """

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Words that nothing of this command asks for."""
        options = [name for action in self._actions for name in action.option_strings]
        near = nearest(words[0], options) if words[0].startswith("-") else ""
        self.error(f"{' '.join(words)} is not an option here.{near}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(one) for one in action.choices]
            said = f"{value!r} is not one of {', '.join(names)}.{nearest(str(value), names)}"
            raise argparse.ArgumentError(action, said)


def nearest(word: str, names: Iterable[str]) -> str:
    """What was probably meant, as a sentence.

    >>> nearest("adm", ["adam", "lion"]), nearest("xyz", ["adam"])
    (' Did you mean adam?', '')
    """
    found = difflib.get_close_matches(word, list(names), n=1)
    return f" Did you mean {found[0]}?" if found else ""
