"""The parser of the command line, and types for its options: each function makes an argparse `type`, whose errors say
what is allowed."""

from __future__ import annotations

import argparse
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from zerokern.core.errors import did_you_mean, got, nearest
from zerokern.core.units import in_units, parse_nbytes

PICTURES = (".png", ".svg", ".pdf")
EXTRA = ("rich", "matplotlib")  # what `pip install 'zerokern[cli]'` brings


class Help(argparse.HelpFormatter):
    """Formats help as argparse does, but leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Parses as argparse does; its errors name the nearest option or choice, and show the usage of their own command.

    `siblings`: commands beside this one, whose options a user may have meant.

    >>> parser = Parser(prog="zerokern bench")
    >>> _ = parser.add_argument("--pairs", type=int)
    >>> parser.parse_args(["--pears", "3"])
    Traceback (most recent call last):
    ...
    SystemExit: 2
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, **settings})
        self.siblings: Mapping[str, Parser] = {}

    def add_examples(self, *lines: str) -> None:
        """Shows commands below the options."""
        self.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but the command that does not know a word refuses it, not the one above.

        A command that needs another one behind it, and has no word, prints its help."""
        if args == [] and any(isinstance(one, argparse._SubParsersAction) and one.required for one in self._actions):
            self.print_help()
            self.exit()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown)
        return found, unknown

    def _refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Ends the program with words that nothing of this command asks for."""
        options = self._option_string_actions
        near = _nearest(words[0], options) if words[0].startswith("-") else ""
        owners = ", ".join(name for name, one in self.siblings.items() if words[0] in one._option_string_actions)
        belongs = f" It belongs to {owners}." if owners else near
        self.error(f"{' '.join(words)} is not an option here.{belongs}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(one) for one in action.choices]
            said = f"{value!r} is not one of {', '.join(names)}.{_nearest(str(value), names)}"
            raise argparse.ArgumentError(action, said)


def _nearest(word: str, names: Iterable[str]) -> str:
    """
    >>> _nearest("adm", ["adam", "lion"]), _nearest("xyz", ["adam"])
    (' Did you mean adam?', '')
    """
    found = nearest(word, names)
    return f" Did you mean {found}?" if found else ""


def numbers(
    name: str, allowed: str, *, units: Mapping[str, int] | None = None, most: float = math.inf
) -> Callable[[str], tuple[int, ...]]:
    """Reads a list of whole numbers; with `units` each may have a fraction and a unit.

    >>> from zerokern.core.units import BINARY
    >>> numbers("tokens", "numbers", units=BINARY)("4k,16k,4k")
    (4096, 16384)
    """

    def parse(text: str) -> tuple[int, ...]:
        found = [_number(word.strip().upper(), units) for word in text.split(",")]
        if not all(1 <= one <= most for one in found):
            raise ArgumentTypeError(got(name, text, allowed))
        return tuple(dict.fromkeys(int(one) for one in found))

    return parse


def number(name: str, allowed: str, *, units: Mapping[str, int] | None = None) -> Callable[[str], int]:
    """Reads one whole number.

    >>> from zerokern.core.units import BINARY
    >>> number("numel", "elements", units=BINARY)("64m") >> 20
    64
    """

    def parse(text: str) -> int:
        if "," in text:
            raise ArgumentTypeError(got(name, text, allowed))
        return numbers(name, allowed, units=units)(text)[0]

    return parse


def _number(word: str, units: Mapping[str, int] | None) -> float:
    """NaN, which no comparison accepts, where the word is no number or one that 64 bits do not hold."""
    match = re.fullmatch(r"(\d+)()" if units is None else r"(\d*\.?\d+)\s*([A-Z]*)", word, re.ASCII)
    known = {"": 1} if units is None else units
    return in_units(match[1], known[match[2]]) or math.nan if match and match[2] in known else math.nan


count = number("count", "a whole number from 1 on")


def nbytes(name: str) -> Callable[[str], int]:
    """Reads bytes, with or without a unit.

    >>> nbytes("cap")("1.5 GB"), nbytes("cap")("1KiB")
    (1500000000, 1024)
    """

    def parse(text: str) -> int:
        try:
            return parse_nbytes(name, text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return parse


def names(name: str, allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads a list of names.

    >>> names("schedule", ["sync", "overlap"])("overlap, sync")
    ('overlap', 'sync')
    """

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        if not set(found) <= set(allowed):
            unknown = next(word for word in found if word not in allowed)
            raise ArgumentTypeError(got(name, text, f"a list of {', '.join(allowed)}", did_you_mean(unknown, allowed)))
        return found

    return parse


def picture(name: str, *, needed: bool = True) -> Callable[[str], Path]:
    """Reads the file name of a picture; refuses it without matplotlib, unless the command can do without (`needed`)."""

    def parse(text: str) -> Path:
        if needed and find_spec("matplotlib") is None:
            raise ArgumentTypeError(f"{text}: {needs_extra('matplotlib')}")
        path = Path(text)
        if path.suffix.lower() not in PICTURES or not path.resolve().parent.is_dir():
            raise ArgumentTypeError(got(name, text, f"a {', '.join(PICTURES)} file in a folder that exists"))
        return path

    return parse


def needs_extra(package: str) -> str:
    """Returns what a command says that lacks a package of the extra ``cli``.

    >>> needs_extra("matplotlib")
    "matplotlib is not installed; pip install 'zerokern[cli]' brings it"
    """
    return f"{package} is not installed; pip install 'zerokern[cli]' brings it"


def new_file(text: str) -> Path:
    """Reads the name of a file to write, which must not exist."""
    path = Path(text)
    if path.exists():
        raise ArgumentTypeError(f"{text} exists already, and a result is never overwritten; name another file")
    if not path.resolve().parent.is_dir():
        raise ArgumentTypeError(f"{text}: there is no folder {path.resolve().parent}")
    return path


def folder(text: str) -> Path:
    """Reads the name of a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(got("path", text, "a folder that exists, on the disk to measure"))
    return path
