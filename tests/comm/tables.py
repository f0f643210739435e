"""Many rows in one test: a table runs to its end, then the test fails with the name of every row that failed."""

from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from products import where_they_meet

MOST_TOLD = 20


def each(names: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """As `pytest.mark.parametrize`, but all rows run in one test. Several above each other are a product.

    Each row draws random numbers of its own, whatever ran before it, and has its own `monkeypatch` and `tmp_path`.
    """
    own, table = [name.strip() for name in names.split(",")], list(values)
    axis = [(value if len(own) > 1 else (value,)) for value in table]
    assert axis, f"{names}: a table without rows proves nothing"

    def decorate(test: Callable) -> Callable:
        inner, axes, taken = getattr(test, "table", (test, [], []))
        axes, taken = [axis, *axes], [*own, *taken]
        assert len(set(taken)) == len(taken), taken

        @functools.wraps(inner)
        def whole_table(*place: Any, **fixtures: Any) -> None:
            table = [tuple(itertools.chain(*row)) for row in itertools.product(*axes)]
            if whole_table.pairs and not fixtures.get("every"):  # type: ignore[attr-defined]
                table = where_they_meet(table, 2)
            run_table(inner, taken, table, place, fixtures)

        signature = inspect.signature(inner)
        missing = set(taken) - set(signature.parameters)
        assert not missing, f"{inner.__name__} takes no {', '.join(missing)}"
        left = [parameter for name, parameter in signature.parameters.items() if name not in taken]
        whole_table.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        whole_table.table = (inner, axes, taken)  # type: ignore[attr-defined]
        whole_table.pairs = False  # type: ignore[attr-defined]
        return whole_table

    return decorate


def pairwise(test: Callable) -> Callable:
    """Above several `each`: only rows in which any two values meet, or all of them where the test takes `every`."""
    assert len(test.table[1]) > 1, "one column has no pairs"  # type: ignore[attr-defined]
    test.pairs = True  # type: ignore[attr-defined]
    return test


def run_table(
    test: Callable, names: list[str], table: list[tuple], place: tuple = (), fixtures: dict[str, Any] | None = None
) -> None:
    """test(*place, **row, **fixtures) for every row, and a failure that names all rows that failed."""
    failed: list[tuple[str, BaseException]] = []
    for number, row in enumerate(table):
        name = ", ".join(f"{key}={told(value)}" for key, value in zip(names, row, strict=True))
        torch.manual_seed(zlib.crc32(name.encode()))
        try:
            with ExitStack() as stack:
                given = dict(fixtures or {})
                if isinstance(given.get("tmp_path"), Path):
                    given["tmp_path"] = given["tmp_path"] / str(number)
                    given["tmp_path"].mkdir()
                if isinstance(given.get("folder"), Path):  # which is not there yet
                    given["folder"] = given["folder"].with_name(f"{given['folder'].name}-{number}")
                if "caplog" in given:
                    given["caplog"].clear()
                if "capsys" in given:
                    given["capsys"].readouterr()
                if "monkeypatch" in given:
                    given["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                test(*place, **given, **dict(zip(names, row, strict=True)))
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            failed.append((name, error))
    if failed:
        what = [f"{name}: {type(error).__name__}: {error}" for name, error in failed[:MOST_TOLD]]
        raise AssertionError("\n".join([f"{len(failed)} of {len(table)} rows failed:", *what])) from failed[0][1]


def told(value: Any) -> str:
    name = getattr(value, "__name__", None) if callable(value) else None
    text = name or (str(value) if type(value).__repr__ is object.__repr__ or hasattr(value, "name") else repr(value))
    return text if len(text) < 100 else f"{text[:97]}..."
