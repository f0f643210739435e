"""Which engine runs, and why not the other: asked of the kernel, told by name, never swapped in silence."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import torch
from children import Nursery
from io_cases import ENGINES, EngineCase, direct_here, files_of, pattern, read, same, slow_but
from tables import each

import zerokern as zk
from zerokern import BackendError
from zerokern.core import native
from zerokern.core.errors import say_once
from zerokern.io import Store, files, why_no_uring
from zerokern.memory import Arena

# What a container's seccomp profile does: the system calls of io_uring fail with an errno, real ones of the kernel.
FORBID = """
import ctypes, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
def forbid(number):
    rows = [(0x20, 0, 0, 0)]  # load the number of the call
    rows += [(0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | number)] if (call := 425) else []
    rows += [(0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("HP", len(rows), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0, ctypes.get_errno()
forbid(int(sys.argv[2]))
"""

FORCED = """
import logging
from zerokern import BackendError, info
from zerokern.io import Store, probe
logging.basicConfig(stream=sys.stdout, format="LOG %(name)s: %(message)s")
try:
    Store(folder, engine="uring", depth=4, block=1 << 20)
except BackendError as error:
    print("FORCED", error)
print("LEFT", files_of(folder))
for _ in range(2):
    with Store(folder, depth=4, block=1 << 20) as store:
        x = torch.arange(1000.0)
        store.put("x", x)
        print("AUTO", store.engine, same(read(store, "x", x), x), store.stats()["why"])
print("INFO", info()["disk engine"])
"""


@pytest.mark.parametrize("number, name, hint", [(1, "EPERM", "seccomp"), (38, "ENOSYS", "without io_uring")])
def test_a_kernel_that_refuses_io_uring(nursery: Nursery, folder: Path, number: int, name: str, hint: str) -> None:
    child = nursery.start(FORBID + FORCED, "threads", folder, number)
    lines = child.output().splitlines()
    (forced,) = [line for line in lines if line.startswith("FORCED")]
    assert "engine='uring' was asked for" in forced and name in forced and hint in forced and "'threads'" in forced
    assert "LEFT []" in lines
    assert [line.split(": ")[0] for line in lines if line[:4] == "AUTO"] == [f"AUTO threads True {name}"] * 2
    (logged,) = [line for line in lines if line.startswith("LOG") and "io_uring" in line]
    assert logged.startswith(f"LOG zerokern.io: disk engine: threads instead of io_uring, which was refused: {name}")
    (told,) = [line for line in lines if line.startswith("INFO")]
    assert told.startswith(f"INFO threads; io_uring was refused: {name}")


def test_auto_takes_uring_where_it_runs(folder: Path) -> None:
    if why_no_uring():
        pytest.skip(f"needs io_uring ({why_no_uring()})")
    with Store(folder, depth=4, block=1 << 20) as store:
        assert store.engine == "uring" and store.stats()["why"] == ""
        assert store.stats()["fixed_files"] >= 1
    assert zk.info()["disk engine"] == "uring"


def test_the_page_cache_is_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    buffered = next(case for case in ENGINES if case.name == "buffered")
    with caplog.at_level(logging.WARNING, "zerokern.io"):
        for _ in range(3):
            with buffered.open(folder) as store:
                assert store.stats()["direct"] is False
    assert caplog.text.count("has no O_DIRECT; transfers go through the page cache") == 1


def test_tmpfs_has_no_o_direct(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs tmpfs at /dev/shm")
    place = Path("/dev/shm") / f"zerokern-test-{tmp_path.parent.name}-{tmp_path.name}"
    try:
        with Store(place, depth=4, block=1 << 20) as store:
            assert not store.direct
            store.put("x", pattern(12345))
            assert same(read(store, "x", pattern(12345)), pattern(12345))
    finally:
        place.rmdir()


@each("memory_align, offset_align", [(4096, 4096), (512, 4096), (8192, 8192)])
@pytest.mark.parametrize("engine", [one for one in slow_but("uring", "threads") if one.values[0].direct], indirect=True)
def test_disks_with_other_rules(
    engine: EngineCase, folder: Path, monkeypatch: pytest.MonkeyPatch, memory_align: int, offset_align: int
) -> None:
    """4Kn disks, and larger sectors: extents and padding follow what the kernel tells, not a guess."""
    monkeypatch.setattr(files, "alignment", lambda fd, folder: (memory_align, offset_align))
    arena = Arena(4 << 20, poison=True)
    with engine.open(folder, arena=arena) as store:
        for nbytes in (1, 511, 512, 513, 4095, 4097, 8191, 100_001):
            lease = arena.lease(nbytes, "x")
            lease.tensor().copy_(pattern(nbytes, 1))
            store.put(f"{nbytes}", lease.tensor()).wait()
            behind = arena.lease(4096, "behind")
            behind.tensor().fill_(0x5C)
            store.get(f"{nbytes}", lease.tensor()).wait()
            assert same(lease.tensor(), pattern(nbytes, 1)) and (behind.tensor() == 0x5C).all()
            store.put("foreign", pattern(nbytes, 2))
            assert same(read(store, "foreign", pattern(nbytes)), pattern(nbytes, 2))
            behind.release()
        assert store.stats()["taken_nbytes"] % max(4096, offset_align) == 0
    arena.close(force=True)


def test_old_kernels_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.1 nothing tells the alignment: reads of growing alignment do."""
    if not direct_here():
        pytest.skip("needs a file system with O_DIRECT")
    monkeypatch.setattr(native.library(), "zk_io_alignment", lambda fd, memory, offset: errno.ENOTSUP)
    with Store(folder, engine="threads", depth=4, block=1 << 20) as store:
        assert store.direct and store._files.offset_align in (512, 4096)
        store.put("x", pattern(70001))
        assert same(read(store, "x", pattern(70001)), pattern(70001))


REFUSED = """
import logging
logging.basicConfig(stream=sys.stdout, format="LOG %(name)s: %(message)s")
from zerokern.memory import Arena
os.makedirs(folder)
os.chmod(folder, 0o777)
arena = Arena(4 << 20)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for _ in range(2):
    with case.open(folder, arena=arena) as store:
        lease = arena.lease(100000, "x")
        lease.tensor().copy_(pattern(100000))
        store.put("x", lease.tensor())
        print(same(read(store, "x", pattern(100000)), pattern(100000)), store.stats()["fixed_buffers"])
        lease.release()
"""


def test_memory_that_may_not_be_registered_is_named_once(nursery: Nursery, folder: Path) -> None:
    """RLIMIT_MEMLOCK: the engine goes on without, and says so."""
    if why_no_uring():
        pytest.skip(f"needs io_uring ({why_no_uring()})")
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and parent.stat().st_mode & 0o777 == 0o700:
            parent.chmod(0o711)
    child = nursery.start(REFUSED, "uring", folder)
    lines = child.output().splitlines()
    assert [line for line in lines if line[:3] != "LOG"] == ["True 0", "True 0"]
    (logged,) = [line for line in lines if "registered" in line]
    assert "Cannot allocate memory" in logged and "ulimit -l" in logged


def test_an_arena_that_is_closed_under_a_store(engine: EngineCase, folder: Path) -> None:
    """Its addresses may soon be somebody else's: the ring must not go on with the pages that were there before."""
    arena = Arena(4 << 20)
    with engine.open(folder, arena=arena) as store:
        base = arena.base
        arena.close()
        del arena
        for i in range(4):
            tensor = pattern(4 << 20, i)
            assert not base <= tensor.data_ptr() < base + (4 << 20)
            store.put("x", tensor)
            assert same(read(store, "x", tensor), tensor)


def test_nothing_is_left_behind_by_a_store_that_does_not_open(
    engine: EngineCase, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails while it opens: the lock is free and no file is left."""
    for name in ("zerokern.io.store.Space", "zerokern.io.store.Transfers", "zerokern.io.store.Engine"):
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda *a, **k: (_ for _ in ()).throw(BackendError("broken")))
            with pytest.raises(BackendError, match="broken"):
                engine.open(folder)
        assert files_of(folder) == []
    engine.open(folder).close()
    assert torch.is_grad_enabled()
