"""Files that something else changed: the key that suffers is named, nothing wrong is handed out as data."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from io_cases import BLOCK, EngineCase, data_of, pattern, quick_everywhere, read, same
from tables import each

from zerokern import IoError

DATA, INDEX = "zerokern.0.data", "zerokern.index"


@quick_everywhere
def test_overwritten_bytes_are_told_by_key(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, checksum=True) as store:
        tensors = {f"{i}": pattern(3 * BLOCK, i) for i in range(4)}
        for key, tensor in tensors.items():
            store.put(key, tensor).wait()
        at = 2 * 3 * BLOCK + BLOCK + 17
        with open(data_of(store), "r+b", buffering=0) as file:
            old = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)
            os.fsync(file.fileno())
        for key, tensor in tensors.items():
            if key != "2":
                assert same(read(store, key, tensor), tensor)
        ticket = store.get("2", torch.empty_like(tensors["2"]))
        for _ in range(2):
            with pytest.raises(IoError, match="CRC32C") as caught:
                ticket.wait()
        error = caught.value
        assert (error.key, error.path, error.errno) == ("2", str(folder / DATA), errno.EBADMSG)
        assert (error.offset, error.nbytes) == (2 * 3 * BLOCK, 3 * BLOCK)
        store.put("2", tensors["2"])
        assert same(read(store, "2", tensors["2"]), tensors["2"])


def test_a_transfer_that_ends_within_the_call_is_checked_too(engine: EngineCase, folder: Path) -> None:
    """It is settled there, among others that have ended."""
    with engine.open(folder, checksum=True) as store:
        kept = pattern(3 * BLOCK, 1)
        store.put("kept", kept).wait()
        store._entries["kept"].crc ^= 1
        transfers = store._transfers
        transfers.sweep, transfers._credit = transfers.drain, -1 << 40  # after each call, once all have ended
        with pytest.raises(IoError, match="CRC32C"):
            store.get("kept", torch.empty_like(kept)).wait()
        store._entries["kept"].crc ^= 1
        assert same(read(store, "kept", kept), kept)


@each("checksum", [False, True])
def test_a_truncated_file_is_told_by_key(engine: EngineCase, folder: Path, checksum: bool) -> None:
    with engine.open(folder, checksum=checksum) as store:
        tensors = {f"{i}": pattern(3 * BLOCK, i) for i in range(4)}
        for key, tensor in tensors.items():
            store.put(key, tensor).wait()
        os.truncate(data_of(store), 2 * 3 * BLOCK + BLOCK)
        for key, tensor in tensors.items():
            if key in "01":
                assert same(read(store, key, tensor), tensor)
            else:
                with pytest.raises(IoError, match="ends too early") as caught:
                    read(store, key, tensor)
                assert (caught.value.key, caught.value.errno) == (key, errno.ENODATA)
        big = pattern(20 << 20)
        with pytest.raises(IoError, match="something has truncated it"):
            store.put("more", big)  # growing the file now would make the lost bytes read as zeros
        assert "more" not in store


@each("checksum", [False, True])
def test_a_file_truncated_while_closed(engine: EngineCase, folder: Path, checksum: bool) -> None:
    with engine.open(folder, durable=True, checksum=checksum) as store:
        for i in range(4):
            store.put(f"{i}", pattern(3 * BLOCK, i))
    os.truncate(folder / DATA, 2 * 3 * BLOCK + BLOCK)
    store = engine.open(folder, durable=True, checksum=checksum)
    for i in range(4):
        out = pattern(3 * BLOCK, 99)
        if i < 2:
            store.get(f"{i}", out).wait()
            assert same(out, pattern(3 * BLOCK, i))
        else:
            with pytest.raises(IoError, match="something has truncated the file") as caught:
                store.get(f"{i}", out)
            assert (caught.value.key, caught.value.errno) == (f"{i}", errno.ENODATA)
            assert same(out, pattern(3 * BLOCK, 99))
    store.put("2", pattern(3 * BLOCK, 7))  # makes the file as long as it was, so that it could read as zeros
    store.close()
    with engine.open(folder, durable=True) as store:
        assert store.keys() == ["0", "1", "2", "3"]
        assert same(read(store, "2", pattern(3 * BLOCK)), pattern(3 * BLOCK, 7))
        with pytest.raises(IoError, match="something has truncated the file"):
            store.get("3", pattern(3 * BLOCK))
        store.delete("3")


def test_a_file_that_is_gone(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, durable=True) as store:
        store.put("x", pattern(100))
    (folder / DATA).unlink()
    with pytest.raises(IoError, match=r"is named by zerokern.index and is not there") as caught:
        engine.open(folder, durable=True)
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(folder / DATA))
    assert (folder / INDEX).exists()


@each("how", ["a bit", "cut", "empty", "longer", "other version"])
def test_a_damaged_index_is_refused_and_nothing_is_touched(engine: EngineCase, folder: Path, how: str) -> None:
    with engine.open(folder, durable=True) as store:
        store.put("x", pattern(100))
    text = bytearray((folder / INDEX).read_bytes())
    if how == "a bit":
        text[len(text) // 2] ^= 4
    elif how == "cut":
        del text[-9:]
    elif how == "empty":
        text.clear()
    elif how == "longer":
        text += b"x"
    else:
        text = text.replace(b"index 1", b"index 2")
    (folder / INDEX).write_bytes(text)
    before = (folder / DATA).read_bytes()
    for durable in (True, False):
        with pytest.raises(IoError, match="is damaged") as caught:
            engine.open(folder, durable=durable)
        assert caught.value.errno == errno.EBADMSG
    assert (folder / DATA).read_bytes() == before and (folder / INDEX).read_bytes() == text
