"""A durable store: what the last sync() left is what is found, whole, whenever the owner died."""

from __future__ import annotations

import errno
import random
import time
from pathlib import Path

import pytest
import torch
from children import Nursery
from io_cases import BLOCK, ENGINES, PAGE, EngineCase, files_of, pattern, read, same
from tables import each

from zerokern import BudgetError, IoError
from zerokern.io import Store

KEPT = ["zerokern.0.data", "zerokern.index"]


def test_is_found_again_as_it_was_closed(engine: EngineCase, folder: Path) -> None:
    tensors = {
        "a": pattern(3 * BLOCK + 5).view(-1),
        "matrix": torch.randn(7, 11, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "mask": torch.tensor([True, False]),
        "schlüssel \ud800\n": torch.ones(3),
    }
    with engine.open(folder, durable=True, checksum=True) as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
        store.reserve("room", torch.float32, (100,))
    assert files_of(folder) == KEPT
    for _ in range(2):
        with engine.open(folder, durable=True, checksum=True) as store:
            assert store.keys() == list(tensors)
            for key, tensor in tensors.items():
                assert same(read(store, key, tensor), tensor)
            with pytest.raises(ValueError, match=r"\(7, 11\)"):
                store.get("matrix", torch.empty(11, 7, dtype=torch.bfloat16))


def test_is_found_by_any_other_engine(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, durable=True, checksum=True) as store:
        store.put("x", pattern(BLOCK + 77))
    for other in ENGINES:
        if not other.requirement():
            with other.open(folder, durable=True, checksum=True) as store:
                assert same(read(store, "x", pattern(BLOCK + 77)), pattern(BLOCK + 77))


def test_is_never_wiped_by_a_store_that_is_not(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, durable=True) as store:
        store.put("x", pattern(100))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(IoError, match=r"holds a durable store with 1 keys.*durable=True") as caught:
        engine.open(folder)
    assert (caught.value.errno, caught.value.path) == (errno.EEXIST, str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def change_half(store: Store) -> None:
    store.put("x", pattern(5000, 3))
    store.delete("y")
    raise RuntimeError("half way")


def test_an_exception_publishes_nothing(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, durable=True) as store:
        store.put("x", pattern(5000, 1))
        store.put("y", pattern(5000, 2))
    with pytest.raises(RuntimeError, match="half way"), engine.open(folder, durable=True) as store:
        change_half(store)
    with engine.open(folder, durable=True) as store:
        assert same(read(store, "x", pattern(5000)), pattern(5000, 1))
        assert same(read(store, "y", pattern(5000)), pattern(5000, 2))


def test_room_comes_back_after_a_sync(engine: EngineCase, folder: Path) -> None:
    """A key that is put again takes its room twice until the index without the old one is published."""
    with engine.open(folder, durable=True, budget=4 * PAGE) as store:
        store.put("x", pattern(2 * PAGE, 1))
        store.put("x", pattern(2 * PAGE, 2))  # not published yet: in place
        store.sync()
        store.put("x", pattern(2 * PAGE, 3))
        with pytest.raises(BudgetError):
            store.put("y", pattern(1))
        store.sync()
        store.put("y", pattern(2 * PAGE, 4))
        store.sync()
        store.delete("x")
        with pytest.raises(BudgetError):
            store.put("z", pattern(1))
        store.sync()
        store.put("z", pattern(2 * PAGE, 5)).wait()
    with engine.open(folder, durable=True, budget=4 * PAGE) as store:
        assert store.keys() == ["y", "z"]
        assert same(read(store, "y", pattern(2 * PAGE)), pattern(2 * PAGE, 4))
        assert store.stats()["file_nbytes"] == store.stats()["taken_nbytes"] == 4 * PAGE
    with pytest.raises(BudgetError, match="is less than what"):
        engine.open(folder, durable=True, budget=3 * PAGE)
    with engine.open(folder, durable=True, budget=8 * PAGE) as store:
        store.put("w", pattern(4 * PAGE, 6))
        assert same(read(store, "z", pattern(2 * PAGE)), pattern(2 * PAGE, 5))


def test_a_failed_put_keeps_the_state_before_it(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, durable=True) as store:
        store.put("x", pattern(5000, 1))
    faults = {"fail_begin": 0, "fail_end": 1 << 40, "fail_errno": errno.EIO, "fail_op": 2}
    store = engine.open(folder, durable=True, faults=faults)
    ticket = store.put("x", pattern(5000, 2))
    with pytest.raises(IoError):
        ticket.wait()
    for close in (store.sync, store.close):
        with pytest.raises(IoError, match=r"the last put of 'x' failed.*Put it again or delete it"):
            close()
    with engine.open(folder, durable=True) as store:
        assert same(read(store, "x", pattern(5000)), pattern(5000, 1))


def test_without_close_the_last_sync_is_kept(
    engine: EngineCase, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = engine.open(folder, durable=True)
    store.put("x", pattern(100, 1))
    store.sync()
    store.put("x", pattern(100, 2))
    del store
    assert "not closed; what was put since the last sync() is not kept" in caplog.text
    with engine.open(folder, durable=True) as store:
        assert same(read(store, "x", pattern(100)), pattern(100, 1))


@each("step", ["os.fdatasync", "os.open", "os.fsync", "os.rename", "zerokern.io.renaming.Folder.sync"])
def test_a_failure_while_the_index_is_published_leaves_one_of_both(
    engine: EngineCase, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before the rename the old state is found, after it the new one; also where there was none before."""
    for old in (None, 1):
        if old:
            with engine.open(folder, durable=True) as store:
                store.put("x", pattern(5000, old))
        store = engine.open(folder, durable=True)
        store.put("x", pattern(5000, 2)).wait()
        with monkeypatch.context() as patch:
            patch.setattr(step, broken)
            with pytest.raises(IoError, match=r"(Syncing|Publishing).*Input/output error"):
                store.close()
        with engine.open(folder, durable=True) as store:
            if old:
                assert same(read(store, "x", pattern(5000)), pattern(5000, 1))
            else:
                assert store.keys() == []


def broken(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "broken")


def test_a_failed_fsync_is_not_forgotten(engine: EngineCase, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells it once; a second fsync that succeeds says nothing about what the first one lost."""
    with engine.open(folder, durable=True) as store:
        store.put("x", pattern(5000, 1))
    store = engine.open(folder, durable=True)
    store.put("x", pattern(5000, 2))
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", broken)
        with pytest.raises(IoError, match="Syncing"):
            store.sync()
    for again in (store.sync, store.close):
        with pytest.raises(IoError, match="It is unknown since then what the disk holds"):
            again()
    with engine.open(folder, durable=True) as store:
        assert same(read(store, "x", pattern(5000)), pattern(5000, 1))


ROUNDS = """
import random
chance = random.Random(sys.argv[2])
store = case.open(folder, durable=True, checksum=True, budget="8M")
begin = max([int(key[1:]) for key in store.keys() if key[0] == "r"], default=0)
print("open", begin, flush=True)
for i in range(begin + 1, begin + 10000):
    for key in store.keys():
        if key[0] == "r" or chance.random() < 0.2:
            store.delete(key)
    for k in range(6):
        store.put(f"k{k}", pattern(30000 + 997 * k + i % 3, i * 10 + k))
    store.put(f"r{i}", pattern(8, i))
    if chance.random() < 0.5:
        store.put("k3", pattern(12345, i * 10 + 3))
        store.put("k3", pattern(30000 + 997 * 3 + i % 3, i * 10 + 3))
    store.sync()
    print(i, flush=True)
"""


def test_killed_at_random_moments_the_last_sync_is_found_whole(
    nursery: Nursery, engine: EngineCase, folder: Path
) -> None:
    chance = random.Random(engine.name)
    last = 0
    for i in range(5):
        child = nursery.start(ROUNDS, engine.name, folder, i)
        child.wait_for(f"\n{last + 2}\n")
        time.sleep(chance.random() * 0.15)
        child.kill()
        told = int(child.printed().split("\n")[-2].split()[-1])
        with engine.open(folder, durable=True, checksum=True, budget="8M") as store:
            keys = store.keys()
            (found,) = [int(key[1:]) for key in keys if key[0] == "r"] or [0]
            # A sync whose end nobody was told may be through as well; one that was told is, and none is half there.
            assert max(told, last) <= found <= max(told, last) + 1
            if found:
                assert sorted(keys) == sorted([*(f"k{k}" for k in range(6)), f"r{found}"])
                for k in range(6):
                    tensor = pattern(30000 + 997 * k + found % 3, found * 10 + k)
                    assert same(read(store, f"k{k}", tensor), tensor)
            last = found
    assert last > 5
