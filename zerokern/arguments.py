"""What words on a command line mean: each function makes a `type` of argparse, which names what is allowed."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from zerokern.core.errors import got
from zerokern.core.units import in_units, parse_nbytes

PICTURES = (".png", ".svg", ".pdf")
EXTRA = ("rich", "matplotlib")  # what `pip install 'zerokern[cli]'` brings


def numbers(
    name: str, allowed: str, *, units: Mapping[str, int] | None = None, most: float = math.inf
) -> Callable[[str], tuple[int, ...]]:
    """A list of whole numbers; with `units` each may have a fraction and a unit.

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
    """One whole number.

    >>> from zerokern.core.units import BINARY
    >>> number("numel", "elements", units=BINARY)("64m") >> 20
    64
    """
    several = numbers(name, allowed, units=units)

    def parse(text: str) -> int:
        if "," in text:
            raise ArgumentTypeError(got(name, text, allowed))
        return several(text)[0]

    return parse


def _number(word: str, units: Mapping[str, int] | None) -> float:
    """NaN, which is above and below nothing, where the word is no number or one that 64 bits do not hold."""
    match = re.fullmatch(r"(\d+)()" if units is None else r"(\d*\.?\d+)\s*([A-Z]*)", word, re.ASCII)
    known = {"": 1} if units is None else units
    return in_units(match[1], known[match[2]]) or math.nan if match and match[2] in known else math.nan


count = number("count", "a whole number from 1 on")


def nbytes(name: str) -> Callable[[str], int]:
    """Bytes, with or without a unit.

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
    """A list of names.

    >>> names("schedule", ["sync", "overlap"])("overlap, sync")
    ('overlap', 'sync')
    """

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        if not set(found) <= set(allowed):
            raise ArgumentTypeError(got(name, text, f"a list of {', '.join(allowed)}"))
        return found

    return parse


def picture(name: str) -> Callable[[str], Path]:
    """A file for a picture, which matplotlib draws."""

    def parse(text: str) -> Path:
        if find_spec("matplotlib") is None:
            raise ArgumentTypeError(f"{text}: {needs_extra('matplotlib')}")
        path = Path(text)
        if path.suffix.lower() not in PICTURES or not path.resolve().parent.is_dir():
            raise ArgumentTypeError(got(name, text, f"a {', '.join(PICTURES)} file in a folder that exists"))
        return path

    return parse


def needs_extra(package: str) -> str:
    """What a command says that lacks a package of the extra ``cli``.

    >>> needs_extra("matplotlib")
    "matplotlib is not installed; pip install 'zerokern[cli]' brings it"
    """
    return f"{package} is not installed; pip install 'zerokern[cli]' brings it"


def new_file(text: str) -> Path:
    path = Path(text)
    if path.exists():
        raise ArgumentTypeError(f"{text} exists already, and a result is never overwritten; name another file")
    if not path.resolve().parent.is_dir():
        raise ArgumentTypeError(f"{text}: there is no folder {path.resolve().parent}")
    return path


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(got("path", text, "a folder that exists, on the disk to measure"))
    return path
