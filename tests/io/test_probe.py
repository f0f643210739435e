"""The probe: quick, once per device, kept whole or not at all, and never in the way of a store."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from io_cases import direct_here, files_of
from tables import each
from tries import best

import zerokern as zk
from zerokern import IoError
from zerokern.io import Probe, Store, files, probe, probes, probing
from zerokern.io.probing import cached

KEPT = {
    "folder": "/there", "depth": 24, "block": 1 << 19, "engine": "uring", "direct": True, "read_gb_s": 3.5,
    "write_gb_s": 1.5, "memory_align": 512, "offset_align": 512, "why": "", "date": "2026-11-20",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zerokern"


@pytest.fixture
def place(tmp_path: Path, cache: Path) -> Path:
    """Where the probe of the file system of tmp_path is kept."""
    system = os.statvfs(tmp_path)
    name = f"disk-{os.stat(tmp_path).st_dev:x}-{system.f_fsid:x}-{os.uname().release}.json"
    cache.mkdir(parents=True)
    return cache / name


def test_measures_once_and_keeps_it(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a part of the time that it takes otherwise."""
    monkeypatch.setattr(probing, "FILL_S", 0.2)
    monkeypatch.setattr(probing, "TRIAL_S", 0.02)
    if not direct_here():
        pytest.skip("needs a file system with O_DIRECT")
    folder = tmp_path / "disk"
    folder.mkdir()

    probed: list[Probe] = []

    def seconds() -> float:
        shutil.rmtree(cache, ignore_errors=True)
        caplog.clear()
        begun = time.monotonic()
        probed.append(probe(folder))
        return time.monotonic() - begun

    drawn = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "zerokern.io"):
        assert best(seconds, 10) < 10
    assert torch.equal(torch.get_rng_state(), drawn)  # it may run within a forward, whose dropout draws from there
    found = probed[-1]
    assert caplog.text.count("measuring the disk, once") == 1
    assert files_of(folder) == [] and len(list(cache.iterdir())) == 1
    assert found.direct and found.read_gb_s > 0 and found.write_gb_s > 0 and found.offset_align >= 512
    assert 8 <= found.depth <= 128 and 256 << 10 <= found.block <= 4 << 20
    assert probe(folder) == found == cached(tmp_path)
    assert zk.info()["disks"] == {str(folder): found.line()}
    with Store(tmp_path / "store") as store:
        assert (store.stats()["depth"], store.stats()["block"]) == (found.depth, found.block)


def test_a_store_takes_what_is_kept(tmp_path: Path, place: Path) -> None:
    place.write_text(json.dumps(KEPT | {"folder": str(tmp_path)}))
    with Store(tmp_path / "a") as store:
        assert (store.stats()["depth"], store.stats()["block"]) == (24, 1 << 19)
    with Store(tmp_path / "a", depth=3) as store:
        assert (store.stats()["depth"], store.stats()["block"]) == (3, 1 << 19)
    assert probes() == {str(tmp_path): Probe(**{k: v for k, v in KEPT.items() if k != "folder"})}


def test_a_removed_folder_is_no_disk_and_what_is_left_of_its_path_is(tmp_path: Path, place: Path) -> None:
    place.write_text(json.dumps(KEPT | {"folder": str(tmp_path / "gone" / "swap")}))
    assert list(probes()) == [str(tmp_path)]
    place.with_name(f"disk-1-2-{os.uname().release}.json").write_text(json.dumps(KEPT))  # a disk that was taken out
    assert list(probes()) == [str(tmp_path)]


def test_given_settings_need_no_probe(tmp_path: Path, cache: Path) -> None:
    with Store(tmp_path / "a", depth=3, block=8192) as store:
        assert (store.stats()["depth"], store.stats()["block"]) == (3, 8192)
    assert not cache.exists()


@each(
    "text",
    ["", "{", "[]", "null", '"x"', "{}", json.dumps({**KEPT, "depth": 0}), json.dumps({**KEPT, "block": 5000}),
     json.dumps({**KEPT, "depth": "many"}), "\x00\xff"],
)  # fmt: skip
def test_a_damaged_cache_is_no_cache(tmp_path: Path, place: Path, text: str) -> None:
    place.write_text(text)
    assert cached(tmp_path) is None
    assert probes() == {}


def test_a_cache_that_cannot_be_written_costs_only_the_next_probe(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    found = Probe(8, 1 << 20, "uring", True, 1.0, 1.0)
    monkeypatch.setattr(probing, "_measure", lambda folder, fd: found)
    assert probe(tmp_path) == found
    assert cached(tmp_path) is None and cache.read_text() == "a file where the folder should be"


def test_the_cache_is_replaced_whole(tmp_path: Path, place: Path) -> None:
    """Readers beside writers see one of the probes, never half of one."""
    written = [Probe(depth, depth << 16, "uring", True, depth / 8, 1.0) for depth in (8, 16, 32, 64)]
    probing._keep(tmp_path, written[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for one in written:
                probing._keep(tmp_path, one)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {cached(tmp_path) for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= set(written) and None not in seen
    assert [path for path in place.parent.iterdir() if path != place] == []


def test_nothing_is_measured_without_o_direct(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "alignment", lambda fd, folder: (0, 0))
    found = probe(tmp_path)
    assert not found.direct and found.read_gb_s == 0 and not found.date
    assert found.line().endswith(f"through the page cache, depth {found.depth}, block 1024 KiB")
    assert not cache.exists()


def test_a_full_disk_is_not_measured(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probing, "fallocate", full)
    found = probe(tmp_path)
    assert found.read_gb_s == 0 and found.depth >= 8
    assert not cache.exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"A probe in .* is not possible: No such file"):
        probe(tmp_path / "nowhere")
