"""What the kernel tests stand on: one torch thread, and no forced instruction set that outlives its test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from zerokern.core import native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `every` runs a few formats and sizes quickly, and all of them among the slow."""
    if "every" in metafunc.fixturenames:
        slow = pytest.param(True, id="every", marks=pytest.mark.slow)
        metafunc.parametrize("every", [pytest.param(False, id="some"), slow])


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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that the interpreter has run since the test began, by name."""
    from triton.runtime.interpreter import InterpretedFunction

    found: list[str] = []
    run = InterpretedFunction.run

    def counted(self: InterpretedFunction, *arguments: object, **settings: object) -> object:
        found.append(self.fn.__name__)
        return run(self, *arguments, **settings)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    return found
