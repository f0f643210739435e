"""Numbers of bytes as users write them."""

from __future__ import annotations

import re

from zerokern.core.errors import got

__all__ = ["parse_nbytes"]

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_nbytes(argument: str, value: int | str) -> int:
    """Bytes from a whole number, or from text with a unit; K, M, G and T are powers of 1024.

    >>> parse_nbytes("budget", "8G") == parse_nbytes("budget", 8 * 2**30) == parse_nbytes("budget", "8 GiB")
    True
    """
    allowed = "a positive number of bytes, or text such as '8G' or '512MiB' (powers of 1024)"
    if isinstance(value, str):
        found = FORM.fullmatch(value.strip())
        nbytes = int(float(found[1]) * 2 ** UNITS[found[2].upper()]) if found else 0
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise TypeError(got(argument, value, allowed))
    if nbytes < 1:
        raise ValueError(got(argument, value, allowed))
    return nbytes
