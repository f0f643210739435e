"""What a store holds stays what it is, whatever goes wrong beside it."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
from io_cases import BLOCK, open_descriptors
from tries import Missed, in_time

from zerokern import IoError
from zerokern.io import Faults, Store
from zerokern.io.lock import FolderLock


def durable(folder: Path, **options: object) -> Store:
    return Store(folder, durable=True, depth=4, block=BLOCK, **options)  # type: ignore[arg-type]


def test_a_get_that_failed_unheard_takes_nothing_from_what_was_put(folder: Path) -> None:
    store = durable(folder, faults=Faults(fail_op=1, fail_begin=0, fail_end=4096, fail_count=1))
    store.put("a", torch.arange(6.0)).wait()
    store.put("b", torch.arange(3.0)).wait()
    ticket = store.get("a", torch.empty(6))
    with pytest.raises(IoError, match="get of 'a'"):
        store.close()
    with durable(folder) as again:
        assert again.keys() == ["a", "b"] and ticket.done()


def test_an_index_whose_publishing_failed_behind_the_rename_speaks_of_whole_extents(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = durable(folder)
    store.put("a", torch.full((6,), 1.0))
    store.sync()
    store.put("a", torch.full((6,), 2.0))
    with monkeypatch.context() as patch:
        real, calls = os.fsync, []

        def fsync(fd: int) -> None:
            calls.append(fd)
            if len(calls) == 3:  # data files aside: the new index, the folder, and after the rename the folder again
                raise OSError(5, "Input/output error")
            real(fd)

        patch.setattr(os, "fsync", fsync)
        with pytest.raises(IoError, match="Publishing the index"):
            store.sync()
    published = store._entries["a"].extent
    store.put("a", torch.full((6,), 3.0)).wait()
    assert store._entries["a"].extent != published  # which the index may name
    store.close()


def test_a_tensor_whose_storage_was_taken_away_is_refused(folder: Path) -> None:
    with Store(folder, depth=4, block=BLOCK, checksum=True) as store:
        store.put("a", torch.arange(1000.0)).wait()
        resized = torch.zeros(1000)
        resized.untyped_storage().resize_(0)
        short = torch.zeros(1000)
        short.untyped_storage().resize_(400)
        for tensor in (resized, short):
            with pytest.raises(ValueError, match="less than it needs"):
                store.put("a", tensor)
            with pytest.raises(ValueError, match="less than it needs"):
                store.get("a", tensor)
        out = torch.empty(1000)
        store.get("a", out).wait()
        assert torch.equal(out, torch.arange(1000.0))


def test_a_put_that_is_interrupted_while_it_waits_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(ticket: object) -> None:
        raise KeyboardInterrupt

    def put_and_interrupt(delay_s: float) -> None:
        slow = Faults(delay=65536, delay_us=int(delay_s * 1e6))
        with Store(folder, depth=4, block=BLOCK, faults=slow) as store:
            store.put("a", torch.ones(4)).wait()
            other = store.put("b", torch.ones(4))
            store.put("a", torch.full((4,), 2.0))
            with monkeypatch.context() as patch:
                patch.setattr(store._transfers, "await_ticket", interrupted)
                try:
                    store.put("a", torch.ones(4, dtype=torch.int32), after=other)
                except KeyboardInterrupt:
                    pass
                else:
                    raise Missed("there was nothing to wait for any more")
            out = torch.empty(4)
            store.get("a", out).wait()
            assert out.tolist() == [2.0] * 4

    in_time(put_and_interrupt, 0.2)


def test_the_folder_stays_locked_when_a_cleaner_removes_the_lock_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
    with durable(folder) as store:
        (folder / "zerokern.lock").unlink()
        with pytest.raises(IoError, match=r"zerokern\.lock somebody has removed"):
            durable(folder)
        store.put("a", torch.ones(3))
    with durable(folder) as again:
        assert again.keys() == ["a"]


def test_a_lock_that_could_not_be_written_is_let_go_of(folder: Path) -> None:
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    held = open_descriptors()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(3):
            with pytest.raises(IoError, match="File too large"):
                FolderLock(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not open_descriptors() - held
    FolderLock(folder).release()


def test_a_store_in_a_cycle_that_nobody_refers_to_gives_way(folder: Path) -> None:
    gc.disable()
    try:
        cycle = [Store(folder, depth=4, block=BLOCK)]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        with Store(folder, depth=4, block=BLOCK) as store:
            assert store.keys() == []
    finally:
        gc.enable()
