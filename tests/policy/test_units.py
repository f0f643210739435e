"""One rule for units: text with K, M and G is read in few places, and in all of them alike."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable

import pytest

from zerokern import arguments
from zerokern.core.units import BINARY, parse_nbytes
from zerokern.planner.amounts import parse_device_memory, parse_memory, parse_numel

from .tree import Finding, assert_clean, dotted, files, nodes, read

READERS = {  # who knows a unit by its letter
    "zerokern/core/units.py",  # bytes, elements, tokens
    "zerokern/planner/amounts.py",  # parameters of models
}
LETTERS = re.compile(r"K.?M.?G|\[KMG")
TABLES = {"K", "M", "G"}, {"KB", "MB", "GB"}, {"M", "B"}  # the last counts parameters


def texts(nodes: Iterable[ast.expr | None]) -> list[str]:
    return [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def readers(source: str, path: str) -> list[Finding]:
    """Patterns and tables that tell units apart."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and dotted(node.func).startswith("re."):
            given = texts([*node.args, *(one.value for one in node.keywords)])
            told = any(LETTERS.search(text) for text in given)
        elif isinstance(node, ast.Dict):
            keys = {key.upper() for key in texts(node.keys)}
            told = any(keys >= table for table in TABLES)
        else:
            continue
        if told:
            found.append(Finding(path, node.lineno, "reads units by itself; zerokern/core/units.py does"))
    return found


def test_units_are_read_in_one_place() -> None:
    sources = [path for path in files(".py") if path.startswith(("zerokern/", "bench/", "examples/"))]
    assert_clean([found for path in sources if path not in READERS for found in readers(read(path), path)])


def test_another_reader_is_found() -> None:
    for source in (
        're.compile(r"(\\d+)([KMGT]?)")', 're.fullmatch(r"(\\d+)([KMGT]?)", text)',
        're.search(pattern="K|M|G", string=text)',
        '{"K": 10, "M": 20, "G": 30}', '{"kb": 1, "mb": 2, "gb": 3}', '{"": 1, "M": 10**6, "B": 10**9}',
    ):  # fmt: skip
        assert [finding.line for finding in readers(source, "a.py")] == [1], source


def test_bytes_mean_the_same_everywhere() -> None:
    for text, nbytes in {
        "2GB": 2 * 10**9, "2GiB": 2 << 30, "1.5 tb": 1500 * 10**9, "512mib": 512 << 20, "3kB": 3000,
        ".5GB": 500 * 10**6, "9007199254.740993 MB": 9007199254740993,
    }.items():  # fmt: skip
        assert parse_nbytes("x", text) == arguments.nbytes("x")(text) == parse_memory("x", text) == nbytes, text
        assert list(parse_device_memory(text).values()) == [nbytes], text


REFUSED = ("", "G", "-1G", "1e9", "nan", "inf", "8i", "8iB", "8GiBs", "8 G B", "1,5G", "0x10", "1e400")


def test_what_is_no_number_is_refused_everywhere() -> None:
    for text in (*REFUSED, "8\N{KELVIN SIGN}", f"{9 * 10**18}GB", "9" * 400, "9" * 5000):
        with pytest.raises(ValueError, match=r"x=.*must be"):
            parse_nbytes("x", text)
        for parse in (arguments.nbytes("x"), arguments.number("x", "elements", units=BINARY)):
            with pytest.raises(argparse.ArgumentTypeError, match=r"x=.*must be"):
                parse(text)
        with pytest.raises(ValueError, match="must be"):
            parse_memory("x", text)


def test_elements_are_binary_and_parameters_of_models_decimal() -> None:
    assert arguments.number("numel", "elements", units=BINARY)("64M") == 64 << 20
    assert (parse_numel("125M"), parse_numel("7.5B"), parse_numel(".5B")) == (125 * 10**6, 7_500 * 10**6, 5 * 10**8)


def test_digits_alone_are_bytes() -> None:
    text, nbytes = "137438953472", 128 << 30
    assert parse_nbytes("x", text) == arguments.nbytes("x")(text) == parse_memory("x", text) == nbytes
    assert parse_device_memory(text) == parse_device_memory(nbytes)


def test_every_digit_counts() -> None:
    text, number = "9007199254740993", 2**53 + 1  # which no float is
    assert parse_nbytes("x", text) == arguments.number("x", "elements")(text) == parse_numel(text) == number
    assert arguments.number("x", "elements", units=BINARY)(text) == number
    assert parse_nbytes("x", ".5G") == arguments.number("x", "elements", units=BINARY)(".5G") == 1 << 29


def test_more_than_64_bits_hold_is_refused() -> None:
    for digits in (400, 5000):
        for parse in (arguments.count, arguments.number("x", "parameters", units={"": 1, "M": 10**6})):
            with pytest.raises(argparse.ArgumentTypeError, match="must be"):
                parse("9" * digits)
        with pytest.raises(ValueError, match="must be a whole number of parameters"):
            parse_numel("9" * digits)
    for value in (10**400, 1 << 63):
        with pytest.raises(ValueError, match="must be"):
            parse_nbytes("x", value)
        with pytest.raises(ValueError, match="must be"):
            parse_numel(value)
