"""A bad device: whatever it does, the transfer that suffers says so, and every other one is right."""

from __future__ import annotations

import errno
import gc
from pathlib import Path

import pytest
import torch
from io_cases import BLOCK, CHANCE, ENGINES, PAGE, EngineCase, pattern, read, same
from tables import each
from tries import Missed, in_time

from zerokern import IoError
from zerokern.io import Ticket

READ, WRITE = 1, 2


def failing(number: int, begin: int, end: int, op: int = 0, count: int = -1) -> dict[str, int]:
    return {"fail_errno": number, "fail_op": op, "fail_begin": begin, "fail_end": end, "fail_count": count}


@pytest.mark.parametrize("case", [one for one in ENGINES if one.faults], ids=lambda one: one.name)
def test_the_faults_are_real(case: EngineCase, folder: Path) -> None:
    """Proof that the cases named so do run on a bad day: things are tried again, and later ones end first."""
    if case.requirement():
        pytest.skip(case.requirement())
    with case.open(folder) as store:
        overtaken = 0
        for i in range(2000):  # one that is overtaken is seen only by who looks in time
            tickets = [store.put(f"{i % 40}.{k}", pattern(BLOCK, k)) for k in range(6)]
            while not all(seen := [ticket.done() for ticket in tickets]):
                overtaken += seen != sorted(seen, reverse=True)
            if i >= 39 and overtaken:
                break
        stats = store.stats()
        assert stats["retries"] > 30 and stats["blocks"] >= 240 and overtaken > 0


@each(
    "faults",
    [
        {"shorten": CHANCE * 9 // 10},
        {"interrupt": CHANCE // 2},
        {"again": CHANCE // 2},
        {"full": CHANCE * 9 // 10},
        {"delay": CHANCE // 2, "delay_us": 3000},
    ],
)
def test_what_a_device_may_do_is_not_an_error(engine: EngineCase, folder: Path, faults: dict[str, int]) -> None:
    quiet = dict.fromkeys(engine.faults, 0)
    with engine.open(folder, faults={**quiet, "seed": 5, **faults}, checksum=True) as store:
        tensors = {f"{i}": pattern(7 * BLOCK + 100 * i + 1, i) for i in range(8)}
        for key, tensor in tensors.items():
            store.put(key, tensor)
        for key, tensor in tensors.items():
            assert same(read(store, key, tensor), tensor)
        assert {"delay", "full"} & faults.keys() or store.stats()["retries"] > 20


@each("number", [errno.EIO, errno.ENOSPC, errno.EREMOTEIO])
def test_a_failed_put_names_itself_and_only_itself(engine: EngineCase, folder: Path, number: int) -> None:
    """The fourth block of the third of six puts, in the middle of a batch."""
    broken = 2 * 5 * BLOCK + 3 * BLOCK
    with engine.open(folder, faults=failing(number, broken, broken + 1, WRITE, 1)) as store:
        tensors = {f"{i}": pattern(5 * BLOCK, i) for i in range(6)}
        tickets = {key: store.put(key, tensor) for key, tensor in tensors.items()}
        for key, ticket in tickets.items():
            if key != "2":
                ticket.wait()
        with pytest.raises(IoError) as caught:
            tickets["2"].wait()
        error = caught.value
        assert (error.key, error.offset, error.nbytes, error.errno) == ("2", broken, BLOCK, number)
        assert error.path == str(folder / "zerokern.0.data")
        for part in ("'2'", error.path, str(broken), str(BLOCK), errno.errorcode[number]):
            assert part in str(error)
        with pytest.raises(IoError, match="its last put failed"):
            store.get("2", torch.zeros(5 * BLOCK, dtype=torch.uint8))
        for key, tensor in tensors.items():
            if key != "2":
                assert same(read(store, key, tensor), tensor)
        store.put("2", tensors["2"])
        assert same(read(store, "2", tensors["2"]), tensors["2"])


def test_a_get_queued_behind_a_failing_put_gives_no_stale_bytes(engine: EngineCase, folder: Path) -> None:

    def queued(delay_s: float) -> None:
        """The put has not failed yet when the get is asked for."""
        late = {"delay": CHANCE, "delay_us": int(delay_s * 1e6)}
        with engine.open(folder, faults={**failing(errno.EIO, BLOCK, BLOCK + 1, WRITE, 1), **late}) as store:
            out = torch.zeros(3 * BLOCK, dtype=torch.uint8)
            put = store.put("x", pattern(3 * BLOCK, 1))
            try:
                got = store.get("x", out)
            except IoError as error:
                raise Missed("the put had failed before the get was asked for") from error
            with pytest.raises(IoError, match="what it should read was never written") as caught:
                got.wait()
            assert (caught.value.key, caught.value.errno) == ("x", errno.EIO)
            with pytest.raises(IoError, match="Input/output error"):
                put.wait()

    in_time(queued, 0.02)


def test_a_failed_get_leaves_the_key_readable(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, faults=failing(errno.EIO, 2 * BLOCK, 2 * BLOCK + 1, READ, 1)) as store:
        tensor = pattern(4 * BLOCK)
        store.put("x", tensor).wait()
        ticket = store.get("x", torch.zeros(4 * BLOCK, dtype=torch.uint8))
        for _ in range(2):  # each wait tells it
            with pytest.raises(IoError) as caught:
                ticket.wait()
            assert (caught.value.offset, caught.value.errno) == (2 * BLOCK, errno.EIO)
        assert same(read(store, "x", tensor), tensor)


def test_what_nobody_waited_for_is_told_by_sync(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, faults=failing(errno.EIO, 0, 10 * BLOCK, WRITE)) as store:
        for i in range(12):
            store.put(f"{i}", pattern(BLOCK, i))
        gc.collect()
        with pytest.raises(IoError, match="9 more transfers failed that nobody waited for") as caught:
            store.sync()
        assert caught.value.errno == errno.EIO
        store.sync()
        assert same(read(store, "11", pattern(BLOCK)), pattern(BLOCK, 11))


def test_what_nobody_waited_for_is_told_by_close(engine: EngineCase, folder: Path) -> None:
    store = engine.open(folder, faults=failing(errno.EIO, 0, 1, WRITE))
    store.put("x", pattern(PAGE))
    with pytest.raises(IoError, match="put of 'x'"):
        store.close()
    assert list(folder.iterdir()) == []
    store.close()


def outcome(ticket: Ticket) -> IoError | None:
    """How a transfer ended."""
    try:
        ticket.wait()
    except IoError as error:
        return error
    return None


def test_a_device_that_fails_now_and_then(engine: EngineCase, folder: Path) -> None:
    """What returned success reads back, what failed raises with its own key, and so does reading what it was to be."""
    with engine.open(folder, faults={"seed": 21, "fail": CHANCE // 30, "fail_errno": errno.EIO}) as store:
        known: dict[str, torch.Tensor | None] = {}
        keys: dict[str, list[str | None]] = {"put": [], "get": []}
        for i in range(40):
            key, tensor = f"{i % 7}", pattern(10 * BLOCK + i, i)
            error = outcome(store.put(key, tensor))
            known[key] = None if error else tensor
            keys["put"] += [error.key] if error else []
            assert error is None or error.key == key
            for other, value in known.items():
                if value is None:
                    with pytest.raises((IoError, ValueError)):
                        store.get(other, tensor)
                    continue
                out = torch.zeros_like(value)
                error = outcome(store.get(other, out))
                keys["get"] += [error.key] if error else []
                assert same(out, value) if error is None else error.key == other
        assert len(keys["put"]) > 5 and len(keys["get"]) > 15
