"""Parses and formats numbers of parameters (7.5B) and of bytes (80GB, or a device's name); aligns Markdown tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from zerokern.core.errors import got
from zerokern.core.units import LEAST_BARE, MOST, in_units, parse_nbytes

__all__ = ["DEVICES", "Memory", "count", "gigabytes", "in_seconds", "parse_device_memory", "parse_numel"]

_THOUSANDS = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_NUMEL = re.compile(r"(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*([KMBGT]?)", re.IGNORECASE | re.ASCII)
LEAST = {str: LEAST_BARE, int: 10**4}  # bytes that anybody writes in digits alone, as text and in Python
# of a GPU "80G" is read both ways, and "80B" is a slip
_NAMED = re.compile(r"\d+|.*[KMGT]I?B", re.IGNORECASE | re.ASCII)
_ALLOWED_MEMORY = "bytes as a whole number, text with its unit (80GB is 80·10^9, 80GiB is 80·2^30), or one of "

DEVICES = {  # bytes of memory as the data sheets name them
    "t4": 16 * 10**9,
    "v100-16": 16 * 10**9,
    "v100": 32 * 10**9,
    "rtx4090": 24 * 10**9,
    "l40s": 48 * 10**9,
    "a100-40": 40 * 10**9,
    "a100": 80 * 10**9,
    "h100": 80 * 10**9,
    "h200": 141 * 10**9,
    "b200": 180 * 10**9,
    "mi300x": 192 * 10**9,
}

Memory = int | str | Sequence[int | str] | Mapping[str, int | str] | None


def parse_numel(value: int | str, argument: str = "numel") -> int:
    """Parses a number of parameters; K, M, B (or G) and T are powers of 1000.

    >>> parse_numel("7.5B"), parse_numel("1T"), parse_numel(1234)
    (7500000000, 1000000000000, 1234)
    """
    allowed = "a whole number of parameters from 1 on, or text such as '350M', '7.5B' or '1T' (powers of 1000)"
    if isinstance(value, str):
        found = _NUMEL.fullmatch(value.strip())
        digits = found[1].replace(",", "").replace("_", "") if found else "0"
        numel = in_units(digits, 10 ** _THOUSANDS[found[2].upper()]) if found else 0
    elif isinstance(value, int) and not isinstance(value, bool):
        numel = value
    else:
        raise TypeError(got(argument, value, allowed))
    if not 1 <= numel <= MOST:
        raise ValueError(got(argument, value, allowed))
    return numel


def parse_device_memory(value: Memory) -> dict[str, int]:
    """Parses the memory of each device to fit into, by name.

    >>> parse_device_memory("h100, 32GB")
    {'h100 (80 GB)': 80000000000, '32GB': 32000000000}
    >>> parse_device_memory({"mine": "24GiB"})
    {'mine': 25769803776}
    >>> parse_device_memory("80000000000") == parse_device_memory(80000000000) == {"80.0 GB": 80000000000}
    True
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(name): _one_memory(nbytes)[1] for name, nbytes in value.items()}
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()] or [value]
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, Sequence):
        raise TypeError(got("device_memory", value, _ALLOWED_MEMORY + ", ".join(DEVICES)))
    return dict(_one_memory(item) for item in value)


def parse_memory(argument: str, value: int | str) -> int:
    """Parses bytes of host memory or disk.

    >>> parse_memory("host_memory", "128GiB"), parse_memory("disk", "4TB")
    (137438953472, 4000000000000)
    """
    allowed = "bytes as a whole number, or text with its unit (4TB is 4·10^12, 128GiB is 128·2^30)"
    return _nbytes(argument, value, allowed)[1]


def _one_memory(value: object) -> tuple[str, int]:
    if isinstance(value, str):
        name = value.strip().lower()
        if name in DEVICES:
            return f"{name} ({DEVICES[name] / 1e9:g} GB)", DEVICES[name]
    return _nbytes("device_memory", value, _ALLOWED_MEMORY + ", ".join(DEVICES))


def _nbytes(argument: str, value: object, allowed: str) -> tuple[str, int]:
    try:
        nbytes = parse_nbytes(argument, value)
    except (TypeError, ValueError):
        raise ValueError(got(argument, value, allowed)) from None
    text = str(value).strip()
    if not _NAMED.fullmatch(text):
        raise ValueError(got(argument, value, allowed))
    if text.isdecimal() and nbytes < LEAST[str if isinstance(value, str) else int]:
        raise ValueError(got(argument, value, allowed, f"{text} alone are bytes; {text}GB may be meant"))
    return f"{gigabytes(nbytes)} GB" if text.isdecimal() else text, nbytes


def gigabytes(nbytes: float) -> str:
    """Formats bytes in GB (10^9), to three digits.

    >>> [gigabytes(n) for n in (16e12, 31.40625e9, 7.5e9, 117187500, 3072, 0)]
    ['16,000', '31.4', '7.50', '0.117', '0.000003', '0']
    """
    value = nbytes / 1e9
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def count(numel: int) -> str:
    """Formats a number of parameters as people say it; small ones in full.

    >>> count(7_500_000_000), count(10_774_272), count(1234)
    ('7.5B', '10.8M', '1,234')
    """
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if numel >= 10**power:
            value = numel / 10**power
            return f"{value:.{0 if value >= 100 else 1}f}".removesuffix(".0") + unit
    return f"{numel:,}"


def in_seconds(seconds: float) -> str:
    """Formats seconds, to three digits.

    >>> in_seconds(0.0123), in_seconds(12.3)
    ('12.3 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
