"""The arena: exact leases of resident, unshared memory; what is wrong is refused, with a table of who holds what."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from errno import EINVAL, ENOMEM

import pytest
import torch
from memory_cases import mapping_at
from tables import each

from zerokern.core.errors import BudgetError, ZerokernError, say_once
from zerokern.memory import Arena
from zerokern.memory import arena as arena_module

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def arena():
    arena = Arena(MIB, poison=False)
    yield arena
    arena.close(force=True)


@each("nbytes", [1, 100, 4095, 4096, 4097, 3 * PAGE, 3 * PAGE + 1])
def test_a_lease_is_exact(arena: Arena, nbytes: int) -> None:
    first, second = arena.lease(nbytes, "a"), arena.lease(nbytes, "b")
    reserved = -(-nbytes // PAGE) * PAGE
    assert (first.ptr, first.nbytes, first.owner, first.align) == (arena.base, nbytes, "a", PAGE)
    assert second.ptr == first.ptr + reserved
    assert arena.free_nbytes == MIB - 2 * reserved
    assert first.tensor().shape == (nbytes,) and first.tensor().data_ptr() == first.ptr
    first.release()
    with arena.lease(reserved, "c") as third:
        assert third.ptr == arena.base
    second.release()


@each("nbytes", [1, PAGE, MIB + 1, 5 * MIB + 12345])
def test_an_arena_has_no_rounding_beyond_a_page(nbytes: int) -> None:
    arena = Arena(nbytes)
    assert arena.base % (2 * MIB) == 0
    assert arena.nbytes == -(-nbytes // PAGE) * PAGE == arena.free_nbytes
    found = mapping_at(arena.base)
    assert found is not None and int(found["Rss"].split()[0]) * 1024 == arena.nbytes == int(found["nbytes"])
    arena.close()


def test_memory_is_resident_huge_locked_and_unshared() -> None:
    arena = Arena(8 * MIB)
    found = mapping_at(arena.base)
    assert found is not None and found["Rss"].split()[0] == str(8 * 1024)
    flags = set(found["VmFlags"].split())
    assert {"dc", "hg"} <= flags  # MADV_DONTFORK, MADV_HUGEPAGE
    assert ("lo" in flags) == arena.locked
    arena.close()


def test_tensors_are_views_of_the_lease(arena: Arena) -> None:
    lease = arena.lease(1000, "a")
    lease.tensor().fill_(0)
    floats = lease.tensor(torch.float32, (3, 5), offset=8)
    floats.copy_(torch.arange(15.0).view(3, 5))
    assert floats.data_ptr() == lease.ptr + 8
    assert lease.tensor(torch.float32, offset=8)[:15].tolist() == list(range(15))
    assert lease.tensor(torch.bfloat16, (2, 2), offset=996 - 8).shape == (2, 2)
    assert lease.tensor(torch.int64).numel() == 125
    assert lease.tensor(torch.float32, (0, 7)).shape == (0, 7)
    assert lease.tensor(torch.float64, (), offset=992).shape == ()
    assert lease.tensor(offset=1000).numel() == 0


@each(
    "arguments, says",
    [
        ((torch.float32, None, 2), "offset=2: must be multiples of 4"),
        ((torch.float32, None, -4), "offset=-4: must be"),
        ((torch.uint8, None, 1001), "offset=1001: must be multiples of 1 .* from 0 to 1000"),
        ((torch.float32, (251,), 0), "shape=.251,.: must be shapes of at most 250 elements"),
        ((torch.float32, (250,), 4), "at most 249 elements"),
        ((torch.float32, (-1, 5), 0), "shape=.-1, 5.: must be"),
        ((torch.complex128, None, 0), "dtype=torch.complex128: must be one whose elements fill 1000"),
    ],
)
def test_a_tensor_beyond_the_lease_is_refused(arena: Arena, arguments: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        arena.lease(1000, "a").tensor(*arguments)


def test_a_lease_ends_once(arena: Arena) -> None:
    with arena.lease(100, "exp_avg") as lease:
        view = lease.tensor()
    assert arena.free_nbytes == MIB
    with pytest.raises(ZerokernError, match="'exp_avg' was released already"):
        lease.release()
    with pytest.raises(ZerokernError, match="'exp_avg' was released: its memory may belong to another owner"):
        lease.tensor()
    assert arena.free_nbytes == MIB and view.numel() == 100


@each("poison", [True, False])
def test_poison_when_a_lease_begins_and_ends(poison: bool) -> None:
    arena = Arena(MIB, poison=poison)
    whole = arena.lease(MIB, "whole")
    everything = whole.tensor()
    everything.fill_(1)
    whole.release()
    assert everything.eq(255 if poison else 1).all()
    everything.fill_(2)
    lease = arena.lease(100, "one")
    assert lease.tensor().eq(255 if poison else 2).all()
    assert everything[PAGE:].eq(2).all(), "poison beyond the lease"
    assert lease.tensor(torch.float32).isnan().all() == poison
    assert lease.tensor(torch.bfloat16).isnan().all() == poison
    arena.close(force=True)


def test_the_environment_decides_about_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, poison in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("ZEROKERN_POISON", value)
        arena = Arena(MIB)
        assert arena.poison is poison
        arena.close()


def test_a_lease_that_does_not_fit_names_the_holders(arena: Arena) -> None:
    held = [arena.lease(100_000, "exp_avg") for _ in range(3)] + [arena.lease(500_000, "ring slot 0")]
    held[1].release()
    free = arena.free_nbytes
    with pytest.raises(BudgetError) as caught:
        arena.lease(240_000, "scales")
    text = str(caught.value)
    assert "240,000 bytes for 'scales' does not fit into the arena of 1.0 MiB" in text
    assert f"the longest free span has {MIB - 3 * 102400 - 503808:,} bytes" in text
    rows = [line.split() for line in text.splitlines()[1:]]
    assert rows == [
        ["owner", "leases", "bytes"],
        ["ring", "slot", "0", "1", "500,000"],
        ["exp_avg", "2", "200,000"],
        ["free", f"{free:,}"],
    ]
    assert arena.free_nbytes == free and arena.table() == "\n".join(text.splitlines()[1:])


def test_find_knows_live_leases_only(arena: Arena) -> None:
    a, b, c = (arena.lease(5000, name) for name in "abc")
    b.release()
    assert arena.find(a.ptr, 5000) is a and arena.find(a.ptr + 4999, 1) is a
    assert arena.find(a.ptr, 5001) is None and arena.find(a.ptr + 5000, 1) is None
    assert arena.find(a.ptr - 1, 1) is None and arena.find(a.ptr - 1, 5001) is None
    assert arena.find(b.ptr, 1) is None and arena.find(b.ptr, 3 * PAGE) is None
    assert arena.find(c.ptr + 1, 4999) is c
    a.release(), c.release()
    assert arena.find(a.ptr, 1) is None


def test_a_dropped_lease_leaves_its_bytes_taken(arena: Arena) -> None:
    """Something may still move there; reference counts alone end it, and the arena with the last of its leases."""
    gc.disable()
    try:
        lease = arena.lease(5000, "dropped")
        known = weakref.ref(lease)
        ptr = lease.ptr
        del lease
        assert known() is None and arena.find(ptr, 1) is None
        assert arena.free_nbytes == MIB - 2 * PAGE and ["dropped", "1", "5,000"] in [
            line.split() for line in arena.table().splitlines()
        ]
        other = Arena(MIB)
        lease, gone = other.lease(100, "a"), weakref.ref(other)
        del other
        assert gone() is lease.arena
        del lease
        assert gone() is None
    finally:
        gc.enable()


def test_close_names_what_is_out() -> None:
    arena = Arena(MIB)
    lease = arena.lease(100, "exp_avg")
    with pytest.raises(ZerokernError, match=r"cannot close: 1 leases are out(.|\n)*exp_avg +1 +100"):
        arena.close()
    assert lease.tensor().numel() == 100
    arena.close(force=True)
    arena.close()
    assert lease.released
    for use in (lease.release, lambda: arena.lease(1, "late"), arena.table):
        with pytest.raises(ZerokernError, match="the arena is closed"):
            use()
    assert arena.find(lease.ptr, 1) is None


@each("how", ["close", "drop"])
def test_a_tensor_keeps_the_memory_and_its_end_unmaps_it(how: str) -> None:
    arena = Arena(MIB, poison=False)
    lease = arena.lease(MIB, "a")
    base, view = arena.base, lease.tensor()
    if how == "close":
        lease.release()
        arena.close()
    del arena, lease
    assert view.fill_(7).eq(7).all()
    del view
    found = mapping_at(base)
    assert found is None or "dc" not in found["VmFlags"].split()


@each("nbytes", [0, -1, 1.5, True, None])
def test_bad_sizes_are_refused(arena: Arena, nbytes: object) -> None:
    for make in (Arena, lambda nbytes: arena.lease(nbytes, "a")):
        with pytest.raises(ValueError, match=f"nbytes={nbytes}: must be a whole number from 1 on"):
            make(nbytes)


@each("pieces", [1, 4])
def test_memory_that_cannot_be_touched_is_a_budget_error(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_populate", lambda address, nbytes: ENOMEM)
    monkeypatch.setattr(arena_module, "_STEP", MIB // pieces)
    said = f"an arena of 1.0 MiB does not fit: the system said {os.strerror(ENOMEM)}"
    with pytest.raises(BudgetError, match=rf"{said} while touching it(.|\n)*free memory"):
        arena_module._make_resident(mmap.mmap(-1, MIB), 0, MIB)


@each("pieces", [1, 4])
def test_old_kernels_touch_by_writing(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_populate", lambda address, nbytes: EINVAL)
    monkeypatch.setattr(arena_module, "_STEP", MIB // pieces)
    memory = mmap.mmap(-1, MIB)
    memory[:] = b"\7" * MIB
    arena_module._make_resident(memory, 0, MIB)
    assert memory[:] == bytes(MIB)


def test_several_threads_touch_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core clears 100 GB in most of a minute. Two pieces meet here, which one thread never lets happen."""
    both, spans = threading.Barrier(2, timeout=20), []

    def populate(address: int, nbytes: int) -> int:
        both.wait()
        spans.append((address, nbytes))
        return 0

    monkeypatch.setattr(arena_module, "_populate", populate)
    monkeypatch.setattr(arena_module, "_STEP", MIB)
    monkeypatch.setattr(arena_module.env, "usable_cpus", lambda: 2)
    memory = mmap.mmap(-1, 4 * MIB)
    arena_module._make_resident(memory, 0, 4 * MIB)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert sorted(spans) == [(first + at * MIB, MIB) for at in range(4)]


def test_ctrl_c_ends_the_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not begun is left alone."""
    touched = []

    def populate(address: int, nbytes: int) -> int:
        touched.append(address)
        if len(touched) == 1:
            raise KeyboardInterrupt
        time.sleep(0.05)
        return 0

    monkeypatch.setattr(arena_module, "_populate", populate)
    monkeypatch.setattr(arena_module, "_STEP", PAGE)
    monkeypatch.setattr(arena_module.env, "usable_cpus", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        arena_module._make_resident(mmap.mmap(-1, MIB), 0, MIB)
    assert len(touched) < MIB // PAGE


def test_missing_huge_pages_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class NoHugePages(mmap.mmap):
        def madvise(self, option, *span):
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(EINVAL, "not in this kernel")

    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="zerokern.memory"):
        for _ in range(3):
            arena_module._make_resident(NoHugePages(-1, MIB), 0, MIB)
    assert [record.message for record in caplog.records] == [
        "arena memory has no huge pages (madvise: not in this kernel)"
    ]


def test_what_follows_touching_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last two pieces end at once."""
    both = threading.Barrier(2)

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *raised: object) -> None:
            self._lock.release()
            if getattr(ended, "touched", False):
                both.wait(10)

    def touch(piece: tuple[int, int]) -> None:
        ended.touched = True

    ended, done = threading.local(), []
    with ThreadPoolExecutor(2) as pool:
        touching = arena_module._TouchLater(pool)
        monkeypatch.setattr(touching, "_lock", Lock())
        touching.add([(0, 1), (1, 1)], touch, lambda: done.append(1))
    for one in touching.touched:
        one.result()
    assert done == [1]
