"""What the optimizer tests share: `optim_cases` beside this file, and a count of native calls."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))
sys.path.insert(0, str(Path(__file__).parent))

from device_double import Double
from played_cases import cut
from ran_cases import submitted

from zerokern.examples.played_device import PlayedDevice
from zerokern.io import Faults, Nvme, Store
from zerokern.io import tier as tiers
from zerokern.kernels.cpu import UpdateTable

__all__ = ["cut", "submitted"]
RING_NBYTES = 1 << 20  # 8 slots of 128 KiB: 16,000 parameters of fp32 Adam each


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each native update since the test began."""
    calls: list[int] = []
    run = UpdateTable._call

    def counted(self: UpdateTable, scale: float, begin: int, end: int) -> None:
        calls.append(end - begin)
        run(self, scale, begin, end)

    monkeypatch.setattr(UpdateTable, "_call", counted)
    return calls


@pytest.fixture
def double() -> Double:
    """A stand-in for a device."""
    return Double()


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nvme]:
    """Makes tiers, each with a folder of its own and a small ring. No test waits for a probe of the disk.

    `faults` are of the device; `engine` is one of the Store's.
    """
    numbers = itertools.count()

    def make(*, faults: Faults | None = None, **settings: object) -> Nvme:
        def open_store(*arguments: object, **keywords: object) -> Store:
            return Store(*arguments, depth=8, block=1 << 16, faults=faults, **keywords)

        monkeypatch.setattr(tiers, "Store", open_store)
        monkeypatch.setattr(tiers, "LEAST_RING", 1)
        return Nvme(tmp_path / f"tier{next(numbers)}", **{"ring_nbytes": RING_NBYTES, **settings})

    return make


@pytest.fixture
def devices() -> Iterator[Callable[..., PlayedDevice]]:
    """Makes devices that threads play."""
    made: list[PlayedDevice] = []

    def make(kind: type[PlayedDevice] = PlayedDevice, **settings: object) -> PlayedDevice:
        made.append(kind(**{"poison": True, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def device(devices: Callable[..., PlayedDevice]) -> PlayedDevice:
    return devices()


@pytest.fixture
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update takes its time, and begins late."""
    run = UpdateTable._call

    def slowly(self: UpdateTable, *arguments: object, **settings: object) -> None:
        time.sleep(0.003)
        run(self, *arguments, **settings)

    monkeypatch.setattr(UpdateTable, "_call", slowly)
