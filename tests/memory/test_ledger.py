"""The ledger: every byte that is added is found again, by any of its names, from any thread."""

from __future__ import annotations

import threading

import pytest

from zerokern.memory import Ledger


def filled() -> Ledger:
    ledger = Ledger()
    for tier, role, direction, nbytes in [
        ("nvme", "state", "read", 100),
        ("nvme", "state", "write", 10),
        ("cpu", "bounce", "copy", 7),
        ("nvme", "state", "read", 1000),
        ("cpu", "state", "read", 3),
    ]:
        ledger.add(tier, role, direction, nbytes)
    return ledger


@pytest.mark.parametrize(
    "names, nbytes",
    [
        ({}, 1120),
        ({"tier": "nvme"}, 1110),
        ({"role": "state"}, 1113),
        ({"direction": "read"}, 1103),
        ({"tier": "nvme", "direction": "read"}, 1100),
        ({"tier": "cpu", "role": "bounce", "direction": "copy"}, 7),
        ({"tier": "device"}, 0),
        ({"role": "nobody"}, 0),
    ],
)
def test_totals_by_name(names: dict[str, str], nbytes: int) -> None:
    assert filled().total(**names) == nbytes


def test_rows_and_table() -> None:
    assert filled().rows() == [
        ("cpu", "bounce", "copy", 7),
        ("cpu", "state", "read", 3),
        ("nvme", "state", "read", 1100),
        ("nvme", "state", "write", 10),
    ]
    lines = str(filled()).splitlines()
    assert lines[0].split() == ["tier", "role", "direction", "bytes"]
    assert lines[3].split() == ["nvme", "state", "read", "1,100"]
    assert len({len(line) for line in lines}) == 1
    assert Ledger().rows() == [] and str(Ledger()).count("\n") == 0


def test_ledgers_are_apart() -> None:
    filled()
    assert Ledger().total() == 0


def test_no_count_is_lost_between_threads() -> None:
    ledger = Ledger()

    def add() -> None:
        for _ in range(2000):
            ledger.add("nvme", "state", "read", 3)
            ledger.add("nvme", threading.current_thread().name, "write", 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.total(role="state") == 4 * 2000 * 3
    assert ledger.total(direction="write") == 4 * 2000


@pytest.mark.parametrize(
    "row, says",
    [
        (("disk", "state", "read", 1), "tier='disk' is not possible; allowed: 'device', 'cpu', 'nvme'"),
        (("nvme", "state", "in", 1), "direction='in' is not possible; allowed: 'read', 'write', 'copy'"),
        (("nvme", "state", "read", -1), "nbytes=-1 is not possible"),
    ],
)
def test_a_bad_row_is_refused(row: tuple[str, str, str, int], says: str) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match=says):
        ledger.add(*row)
    assert ledger.rows() == []
