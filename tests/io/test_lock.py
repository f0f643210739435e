"""A folder belongs to one store at a time; the lock dies with its owner, and no child inherits it."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import time
from pathlib import Path

import pytest
import torch
from children import Nursery
from io_cases import BLOCK, EngineCase, files_of, pattern, read, same
from tables import each

from zerokern import IoError
from zerokern.io import Store, why_no_uring
from zerokern.io.lock import FolderLock


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal looks for stores in cycles first, through all that this process has imported."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


HOLD = """
store = case.open(folder)
store.put("x", pattern(5000)).wait()
print("open", flush=True)
time.sleep(600)
"""


def test_a_second_job_is_refused_with_the_pid_of_the_first(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    child = nursery.start(HOLD, engine.name, folder)
    child.wait_for("open")
    with pytest.raises(
        IoError, match=f"in use by the process with pid {child.pid} on .*del of the optimizer.*its own folder"
    ) as caught:
        engine.open(folder)
    assert (caught.value.errno, caught.value.path) == (errno.EWOULDBLOCK, str(folder / "zerokern.lock"))
    assert files_of(folder) == ["zerokern.lock"]
    child.kill()
    with engine.open(folder) as store:
        assert store.keys() == []


def test_the_same_process_is_refused_too(folder: Path, no_collection: None) -> None:
    with Store(folder, depth=4, block=BLOCK) as store:
        with pytest.raises(IoError, match=f"in use by this process \\(pid {os.getpid()}\\) itself"):
            Store(folder, depth=4, block=BLOCK)
        store.put("x", torch.ones(3)).wait()
    Store(folder, depth=4, block=BLOCK).close()


def test_files_are_private_and_gone_afterwards(engine: EngineCase, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    with engine.open(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == {"zerokern.lock": 0o600}
        for name in os.listdir("/proc/self/fd"):
            path = Path("/proc/self/fd") / name
            if path.exists() and str(folder) in os.readlink(path):
                flags = (Path("/proc/self/fdinfo") / name).read_text().split("flags:")[1].split()[0]
                assert int(flags, 8) & os.O_CLOEXEC
    assert files_of(folder) == []


def test_files_of_others_are_left_alone(engine: EngineCase, folder: Path) -> None:
    folder.mkdir()
    names = ["mine.data", "zerokern.0.data.bak", "zerokern.txt", "zerokern.data", "zerokern.00x.data"]
    for name in names:
        (folder / name).write_text("mine")
    (folder / "zerokern.7.data").write_text("left by a store that was killed")
    with engine.open(folder) as store:
        store.put("x", torch.ones(3))
    assert files_of(folder) == sorted(names)


def test_a_link_is_not_followed(engine: EngineCase, folder: Path, tmp_path: Path) -> None:
    """Somebody else's folder could lead a store to write into another file."""
    folder.mkdir()
    (tmp_path / "victim").write_text("precious")
    (folder / "zerokern.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(IoError) as caught:
        engine.open(folder)
    assert caught.value.errno == errno.ELOOP
    (folder / "zerokern.lock").unlink()
    (folder / "zerokern.0.data").symlink_to(tmp_path / "victim")
    engine.open(folder).close()  # the name is one of a store: the link is removed, not what it leads to
    assert (tmp_path / "victim").read_text() == "precious"


def test_the_ring_holds_the_lock_too(folder: Path, no_collection: None) -> None:
    """A write of a process that was killed may land later than the process ends: until then nobody else may come."""
    if why_no_uring():
        pytest.skip(f"needs io_uring ({why_no_uring()})")
    store = Store(folder, engine="uring", depth=4, block=1 << 20)
    lock = store._resources.lock
    fd, lock.fd = lock.fd, os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    with pytest.raises(IoError, match="in use by this process"):
        FolderLock(folder)
    store.close()
    assert files_of(folder) == ["zerokern.lock"]  # not the file that this store has locked, as far as it can see
    FolderLock(folder).release()


def test_waits_for_what_a_killed_owner_left_behind(nursery: Nursery, folder: Path) -> None:
    """The owner is gone, its lock is not yet: as when the kernel still ends its transfers."""
    parent = nursery.start(
        """
from zerokern.io import lock
lock._inherited.clear()
os.mkdir(folder)
held = lock.FolderLock(folder)
lock._inherited.clear()
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    time.sleep(0.4)
    os._exit(0)
print("forked", flush=True)
time.sleep(600)
""",
        "threads",
        folder,
    )
    parent.wait_for("forked")
    with pytest.raises(IoError, match=f"pid {parent.pid}"):
        FolderLock(folder)
    begun = time.monotonic()
    parent.kill()
    FolderLock(folder).release()
    assert time.monotonic() - begun > 0.3


def test_a_child_lets_go_of_the_lock(nursery: Nursery, engine: EngineCase, folder: Path) -> None:
    """The parent dies, its child lives on: the folder is free."""
    parent = nursery.start(
        """
store = case.open(folder)
store.put("x", pattern(5000)).wait()
child = os.fork()
if child == 0:
    print(f"child {os.getpid()} lives", flush=True)
    time.sleep(600)
    os._exit(0)
print("forked", flush=True)
time.sleep(600)
""",
        engine.name,
        folder,
    )
    parent.wait_for("forked")
    parent.wait_for(" lives")
    child = int(parent.said().partition("child ")[2].split()[0])
    try:
        parent.kill()
        os.kill(child, 0)  # alive
        with engine.open(folder) as store:
            store.put("x", pattern(100))
            assert same(read(store, "x", pattern(100)), pattern(100))
    finally:
        os.kill(child, 9)


@each("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(fd: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    folder.mkdir()
    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.raises(IoError, match=r"zerokern\.lock cannot be locked.*no flock.*local disk") as caught:
        FolderLock(folder)
    assert caught.value.errno == number


def test_a_lock_that_another_user_left_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "zerokern.lock").write_text("1 elsewhere 2020")
    opened = os.open

    def refused(path: object, *arguments: object, **named: object) -> int:
        if path == "zerokern.lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "zerokern.lock")
        return opened(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(IoError, match=f"user {os.getuid()} left it there"):
        FolderLock(folder)


def test_a_folder_that_is_renamed_while_it_is_in_use_keeps_nothing(engine: EngineCase, folder: Path) -> None:
    store = engine.open(folder)
    store.put("x", pattern(100)).wait()
    folder.rename(moved := folder.with_name("moved"))
    store.put("y", pattern(20 << 20)).wait()
    assert same(read(store, "x", pattern(100)), pattern(100))
    store.close()
    assert files_of(moved) == []
