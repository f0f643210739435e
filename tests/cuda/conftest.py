"""The tests of cuda/ share their helpers as modules, and one build of the kernels for the host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cuda_cases import Machine, build_machine


@pytest.fixture(scope="session")
def machine_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def machine(machine_library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """CPU tensors are on a GPU now: launches go to the host machine."""
    from zerokern.kernels import cuda

    machine = Machine(machine_library)
    monkeypatch.setattr(cuda, "gpu_of", lambda device: machine)
    return machine
