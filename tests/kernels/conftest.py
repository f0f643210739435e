"""The kernel tests run once for each implementation that this machine has."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import ALL_SIZES, INTERPRETED_SIZES, SIZES, cases
from products import where_they_meet

from zerokern.core import native
from zerokern.kernels.dispatch import available

STATES = {
    "adam": ("fp32", "bf16", "int8"),
    "lion": ("fp32", "bf16", "int8"),
    "adagrad": ("fp32", "bf16"),
    "sgd": ("none", "fp32", "bf16"),
}
SLOW = pytest.mark.slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    if "every" in names:
        metafunc.parametrize("every", [pytest.param(False, id="some"), pytest.param(True, id="every", marks=SLOW)])
    taken = [name for name in ("case", "sizes", "impl") if name in names]
    if taken:
        rows = list(rows_of(taken, metafunc.module, metafunc.config.slow_rows))
        metafunc.parametrize(taken, rows, indirect=["sizes"] if "sizes" in taken else False)
    if "native_impl" in names:  # tests of many steps, too long for the interpreter
        metafunc.parametrize("native_impl", [f"cpu.{name}" for name in native.isa_usable()])


def rows_of(taken: Sequence[str], module: ModuleType, slow_rows: bool) -> Iterator[Any]:
    """The representative formats at a few sizes on each implementation; slow are those at all sizes, and of all formats
    and implementations the rows in which any three settings meet.

    The implementations of a case follow each other, so that the reference computes it once.
    """
    states = STATES.get(algorithm_of(module), ())
    chosen, every = (cases(states, every) if "case" in taken else [None] for every in (False, True))
    impls = [name for name in available() if name != "reference"] if "impl" in taken else [None]
    met = set(where_they_meet(list(itertools.product(every, impls)), 3)) if slow_rows else set()
    for case, sizes, impl in itertools.product(every, ("few", "all") if "sizes" in taken else (None,), impls):
        quick = case in chosen and sizes != "all"
        if quick or (slow_rows and (case in chosen or ((case, impl) in met and sizes != "all"))):
            values = [value for value in (case, sizes, impl) if value is not None]
            yield pytest.param(*values, id="-".join(map(str, values)), marks=() if quick else SLOW)


def algorithm_of(module: ModuleType) -> str:
    """test_adam.py tests adam."""
    return Path(module.__file__).stem.removeprefix("test_")


@pytest.fixture
def sizes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """A few sizes around everything that a kernel cuts at, or every size."""
    few = request.param == "few"
    if "impl" in request.fixturenames and request.getfixturevalue("impl") == "triton":
        return INTERPRETED_SIZES[:: 2 if few else 1]
    return SIZES if few else ALL_SIZES


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """The reference works on small tensors, where more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def restored_native() -> Iterator[None]:
    """No test leaves a forced instruction set or a thread count behind."""
    threads = native.threads()
    yield
    native.force_isa(None)
    native.set_threads(threads)
