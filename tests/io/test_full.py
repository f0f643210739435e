"""A disk that is full: said before anything changes where room is reserved, else by the very put that failed."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Nursery
from io_cases import EngineCase, data_of, files_of, pattern, read, same

from zerokern import BudgetError, IoError
from zerokern.io import Store, files

MEBI = 1 << 20


def no_fallocate(fd: int, offset: int, nbytes: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


LIMIT = """
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
limit = lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
"""


BEFORE = """
store = case.open(folder)
store.put("small", pattern(1000)).wait()
limit(20 << 20)
try:
    store.put("big", pattern(24 << 20))
except IoError as error:
    print(errno.errorcode[error.errno], "ulimit -f" in str(error), store.keys())
    print(os.path.getsize(data_of(store)))
limit(hard)
big, small = pattern(24 << 20, 1), pattern(1000)
store.put("big", big).wait()
print(same(read(store, "big", big), big), same(read(store, "small", small), small))
limit(1 << 20)
for open_again in (lambda: case.open(folder / "other"), lambda: case.open(folder / "other", budget="2M")):
    try:
        open_again()
    except IoError as error:
        print(errno.errorcode[error.errno], files_of(folder / "other"))
"""


def test_growing_fails_before_anything_changes(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    child = nursery.start(LIMIT + BEFORE, engine.name, folder)
    assert child.output().splitlines() == [
        "EFBIG True ['small']", f"{16 * MEBI}", "True True", "EFBIG []", "EFBIG []",
    ]  # fmt: skip


@pytest.fixture
def small_disk(engine: EngineCase, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 32 MiB: ext4 in a loop device, for the buffered engine tmpfs."""
    place, image = tmp_path / "mounted", tmp_path / "image"
    place.mkdir()
    if engine.direct:
        with open(image, "wb") as file:
            file.truncate(32 * MEBI)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], capture_output=True, check=False)
        command = ["mount", "-o", "loop", image, place]
        if made.returncode:
            pytest.skip("needs the right to mount a file system")
    else:
        command = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", place]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place / "store"
    until = time.monotonic() + 60
    while subprocess.run(["umount", place], capture_output=True, check=False).returncode:
        assert time.monotonic() < until, "still in use: the kernel closes the files of a ring a moment after the ring"
        time.sleep(0.05)


def test_a_full_file_system_without_fallocate(
    engine: EngineCase, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was reserved: the disk is full in the middle of a batch. Who succeeded reads back, who failed says so."""
    monkeypatch.setattr(files, "fallocate", no_fallocate)
    with engine.open(small_disk) as store:
        tensors = {f"{i}": pattern(MEBI + 4096 * i, i) for i in range(40)}
        tickets = {key: store.put(key, tensor) for key, tensor in tensors.items()}
        failed = []
        for key, ticket in tickets.items():
            try:
                ticket.wait()
            except IoError as error:
                failed.append((key, error))
        assert 5 < len(failed) < 35
        assert all(error.key == key and error.errno == errno.ENOSPC for key, error in failed)
        assert "or give the store a budget" in str(failed[0][1])
        lost = {key for key, _ in failed}
        for key, tensor in tensors.items():
            if key not in lost:
                assert same(read(store, key, tensor), tensor)
            else:
                with pytest.raises(IoError, match="its last put failed"):
                    store.get(key, tensor)
    assert files_of(small_disk) == []


def fill(store: Store, put: list[str]) -> None:
    """Puts until there is no room."""
    for i in range(50):
        store.put(f"{i}", pattern(MEBI, i)).wait()
        put.append(f"{i}")


def test_a_full_file_system_is_told_before_a_byte_is_written(engine: EngineCase, small_disk: Path) -> None:
    with pytest.raises(BudgetError, match=r"(?s)does not fit on the file system.*free"):
        engine.open(small_disk, budget="64M")
    assert files_of(small_disk) == []
    with engine.open(small_disk) as store:
        put: list[str] = []
        with pytest.raises(IoError, match=r"Taking .* more in .* is not possible: No space left") as caught:
            fill(store, put)
        assert caught.value.errno == errno.ENOSPC
        assert store.keys() == put and len(put) > 20
        assert data_of(store).stat().st_size == store.stats()["file_nbytes"]
        for i, key in enumerate(put):
            assert same(read(store, key, pattern(MEBI)), pattern(MEBI, i))
        store.delete("3")
        store.put("again", pattern(MEBI, 99))
        assert same(read(store, "again", pattern(MEBI)), pattern(MEBI, 99))
    with engine.open(small_disk, budget="20M") as store:
        store.put("x", pattern(20 * MEBI)).wait()


def test_without_fallocate_everything_else_works(
    engine: EngineCase, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "fallocate", no_fallocate)
    with engine.open(folder, budget="2M") as store:
        assert data_of(store).stat().st_blocks == 0
        store.put("x", pattern(MEBI))
        assert same(read(store, "x", pattern(MEBI)), pattern(MEBI))
    assert "has no fallocate" in caplog.text
