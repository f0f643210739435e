"""What the tests of benchmarks share: a file on a disk, a world of one rank, turns that wait for nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """What a module of the disk benchmark measures."""
    from disk_cases import MIB, workfile

    with workfile.Workfile(tmp_path_factory.mktemp("disk"), 64 * MIB) as made:
        yield made


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The disk is not measured, which takes seconds, and nothing comes into anybody's cache."""
    from zerokern.io import Probe, probing

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(probing, "_measure", lambda folder, fd: Probe(8, 1 << 20, "auto", True, 1.0, 1.0))
        yield


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """One rank in this process, with one thread as in the command's ranks."""
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each turn a benchmark collects garbage and waits until the process is idle: seconds, of no use here."""
    for name in ("zero.turns", "timers", "disk.contest", "gpu.turns"):
        module = import_module(f"zerokern.bench.{name}")
        monkeypatch.setattr(module, "settle", lambda: 0.0, raising=False)
        monkeypatch.setattr(module, "gc", SimpleNamespace(**{**vars(gc), "collect": lambda: 0}), raising=False)
