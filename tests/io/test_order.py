"""Transfers of one key keep their order, `after` orders across keys, and room in use is not given to another key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from io_cases import BLOCK, PAGE, EngineCase, pattern, quick_everywhere, read, same

from zerokern.io import ticket as ticket_module
from zerokern.memory import Arena

LATE = {"seed": 3, "delay": 50000, "delay_us": 2000}  # most completions are overtaken by others


@quick_everywhere
def test_a_get_sees_the_put_before_it(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, faults=LATE) as store:
        outs = []
        for i in range(40):
            store.put("x", pattern(BLOCK + 100, i))
            outs.append(torch.zeros(BLOCK + 100, dtype=torch.uint8))
            store.get("x", outs[-1])
        store.sync()
        assert [i for i, out in enumerate(outs) if not same(out, pattern(BLOCK + 100, i))] == []


def test_after_orders_across_keys(engine: EngineCase, folder: Path) -> None:
    """The ring's pattern: a slot is fetched into when what it held is on the disk, and nobody waits in between."""
    with engine.open(folder, faults=LATE) as store:
        for i in range(30):
            store.put(f"{i}", pattern(5 * BLOCK, i))
        slot = torch.zeros(5 * BLOCK, dtype=torch.uint8)
        for i in range(29):
            store.get(f"{i}", slot).wait()
            assert same(slot, pattern(5 * BLOCK, i))
            slot += 1
            stored = store.put(f"{i}", slot)
            store.get(f"{i + 1}", slot, after=stored)
        store.sync()
        for i in range(29):
            assert same(read(store, f"{i}", slot), pattern(5 * BLOCK, i) + 1)


@quick_everywhere
def test_after_and_the_own_order_hold_together(engine: EngineCase, folder: Path) -> None:
    """A put of y behind a slow get of y, and behind a get of x that fills the memory that is put."""
    with engine.open(folder, faults=LATE) as store:
        x, y, old = pattern(3 * BLOCK, 1), pattern(3 * BLOCK, 2), torch.zeros(3 * BLOCK, dtype=torch.uint8)
        store.put("x", x).wait()
        store.put("y", y).wait()
        for _ in range(10):
            slot = torch.zeros(3 * BLOCK, dtype=torch.uint8)
            reading_y = store.get("y", old)
            reading_x = store.get("x", slot)
            store.put("y", slot, after=reading_x)
            store.sync()
            assert reading_y.done() and same(old, y)
            assert same(read(store, "y", x), x)
            store.put("y", y).wait()


def test_room_is_not_used_again_while_a_transfer_moves_in_it(engine: EngineCase, folder: Path) -> None:
    """A full budget: each put needs the room of the key that was just deleted, whose get is still under way."""
    with engine.open(folder, budget=4 * BLOCK, faults=LATE) as store:
        for i in range(30):
            tensor, out = pattern(4 * BLOCK, i), torch.zeros(4 * BLOCK, dtype=torch.uint8)
            store.put(f"{i}", tensor)
            ticket = store.get(f"{i}", out)
            store.delete(f"{i}")
            store.put("next", pattern(4 * BLOCK, 1000 + i))
            ticket.wait()
            assert same(out, tensor)
            assert same(read(store, "next", tensor), pattern(4 * BLOCK, 1000 + i))
            store.delete("next")


def test_threads_share_a_store(engine: EngineCase, folder: Path) -> None:
    failures: list[BaseException] = []

    def work(store, own: int) -> None:
        try:
            for i in range(30):
                tensor = pattern(PAGE * (1 + i % 5) + own, 100 * own + i)
                ticket = store.put(f"{own}", tensor)
                out = torch.zeros_like(tensor)
                reading = store.get(f"{own}", out)
                reading.wait()
                ticket.wait()
                assert same(out, tensor)
        except BaseException as error:
            failures.append(error)

    with engine.open(folder, faults=LATE) as store:
        threads = [threading.Thread(target=work, args=(store, own)) for own in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.stats()["pending"] == 0


def test_processors_that_reorder_loads(
    engine: EngineCase, folder: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every result is read after a native call that says it is there."""
    monkeypatch.setattr(ticket_module, "LOADS_ACQUIRE", False)
    with engine.open(folder, arena=arena) as store:
        for i in range(100):
            store.put(f"{i}", pattern(PAGE, i))
        for i in range(100):
            assert same(read(store, f"{i}", pattern(PAGE)), pattern(PAGE, i))
