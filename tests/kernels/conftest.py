"""The kernel tests run once for each implementation that this machine has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import ALL_SIZES, INTERPRETED_SIZES, SIZES, cases

from zerokern.core import native
from zerokern.kernels.dispatch import available

STATES = {
    "adam": ("fp32", "bf16", "int8"),
    "lion": ("fp32", "bf16", "int8"),
    "adagrad": ("fp32", "bf16"),
    "sgd": ("none", "fp32", "bf16"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--all", default=False)
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", [name for name in available() if name != "reference"])
    if "native_impl" in metafunc.fixturenames:  # tests of many steps, too long for the interpreter
        metafunc.parametrize("native_impl", [f"cpu.{name}" for name in native.isa_usable()])
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(STATES[algorithm_of(metafunc.module)], every), ids=str)


def algorithm_of(module: ModuleType) -> str:
    """test_adam.py tests adam."""
    return Path(module.__file__).stem.removeprefix("test_")


@pytest.fixture
def every(request: pytest.FixtureRequest) -> bool:
    """Whether the full matrix was asked for."""
    return request.config.getoption("--all", default=False)


@pytest.fixture
def sizes(request: pytest.FixtureRequest, every: bool) -> tuple[int, ...]:
    """A few sizes around everything that a kernel cuts at; under --all, every size for the representative formats."""
    if "impl" in request.fixturenames and request.getfixturevalue("impl") == "triton":
        return INTERPRETED_SIZES
    if not every:
        return SIZES
    if "case" not in request.fixturenames:
        return ALL_SIZES
    representative = cases(STATES[algorithm_of(request.module)], every=False)
    return ALL_SIZES if request.getfixturevalue("case") in representative else SIZES


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
