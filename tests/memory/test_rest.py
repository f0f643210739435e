"""Memory that is there while somebody uses it: contents, users, views that others keep, failures."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from tables import each

from zerokern.core.errors import IoError
from zerokern.io.tier import Nvme, NvmeTier
from zerokern.memory import HostTier, Rest, Rests


@pytest.fixture(params=["host", "nvme"])
def rests(request: pytest.FixtureRequest, tmp_path: Path) -> Rests:
    place: Any = HostTier("a test") if request.param == "host" else NvmeTier(Nvme(tmp_path), "a test")
    return Rests(place, leaving_nbytes=8192)


def filled(rests: Rests, value: float, numel: int = 3000) -> Rest:
    one = rests.make("parameters", numel, torch.float32)
    with one.used():
        one.memory.fill_(value)
        one.change()
    return one


def test_contents_come_back_at_the_same_address(rests: Rests) -> None:
    ones = [filled(rests, value) for value in range(8)]
    rests.drain()
    assert not any(one.is_here for one in ones) and not rests.nbytes
    addresses = [one.memory.data_ptr() for one in ones]
    for value, one in enumerate(ones):
        with one.used():
            assert torch.equal(one.memory, torch.full((3000,), float(value)))
    assert addresses == [one.memory.data_ptr() for one in ones]


@each("numel", [0, 1, 1024, 1025, (2 << 20) // 4, (2 << 20) // 4 + 1])
def test_any_length(rests: Rests, numel: int) -> None:
    one = filled(rests, 2.0, numel)
    rests.drain()
    with one.used():
        assert one.memory.shape == (numel,) and torch.equal(one.memory, torch.full((numel,), 2.0))


def test_what_was_never_written_is_zero(rests: Rests) -> None:
    one = rests.make("parameters", 100, torch.bfloat16)
    for _ in range(2):
        with one.used():
            assert not one.memory.any()


def test_the_last_user_to_leave_lets_go(rests: Rests) -> None:
    one = filled(rests, 1.0)
    rests.drain()
    one.fetch()
    one.fetch()
    one.wait()
    one.leave()
    assert one.is_here and one.memory[0] == 1.0
    one.leave()
    assert not one.is_here


def test_a_view_that_somebody_keeps_keeps_the_memory(rests: Rests) -> None:
    one = filled(rests, 1.0)
    rests.drain()
    with one.used():
        kept = one.memory[5:]
    assert one.is_here and rests.nbytes
    kept.fill_(7.0)
    with one.used():
        one.change()
        assert one.memory[4] == 1.0 and one.memory[5] == 7.0
    del kept
    rests.sweep()
    rests.drain()
    assert not one.is_here
    with one.used():
        assert one.memory[5] == 7.0


def test_at_most_so_much_is_on_its_way(rests: Rests) -> None:
    for value in range(16):
        filled(rests, value)
        assert rests.nbytes <= rests.leaving_nbytes + 12288


def test_a_change_is_stored_and_nothing_else(tmp_path: Path) -> None:
    place = NvmeTier(Nvme(tmp_path), "a test")
    one = filled(Rests(place), 1.0)
    one.rests.drain()
    before = place.swap.stats()
    for _ in range(3):
        with one.used():
            pass
    after = place.swap.stats()
    assert after["written_nbytes"] == before["written_nbytes"]
    assert after["read_nbytes"] - before["read_nbytes"] == 3 * one.nbytes


def test_a_fetch_that_fails_tells_every_user_and_the_next_one_reads_again(tmp_path: Path) -> None:
    place = NvmeTier(Nvme(tmp_path, checksum=True), "a test")
    one = filled(Rests(place), 1.0)
    one.rests.drain()
    entry = next(iter(place.swap._entries.values()))
    good, entry.crc = entry.crc, 1
    one.fetch()
    one.fetch()
    for _ in range(2):
        with pytest.raises(IoError, match="CRC32C"):
            one.wait()
    one.leave()
    one.leave()
    assert not one.is_here
    entry.crc = good
    with one.used():
        assert one.memory[0] == 1.0


TOUCHES = """
import torch
from zerokern.memory import HostTier, Rests
one = Rests(HostTier("a test")).make("parameters", 1024, torch.float32)
print("made", flush=True)
one.memory.sum()
"""


def test_memory_that_is_not_there_cannot_be_taken_for_values() -> None:
    ran = run_forked(TOUCHES)
    assert ran.stdout == "made\n" and ran.returncode == -signal.SIGSEGV


def test_what_is_lent_is_told_apart_from_views_that_come_and_go(rests: Rests) -> None:
    one = filled(rests, 1.0)
    always = [one.memory[1:], one.memory[2:]]
    one.is_viewed()
    with one.used():
        lent = one.lend(one.memory[5:])
    del always  # fewer than there were, and one that somebody has
    rests.sweep()
    assert one.is_here and lent[0] == 1.0 and lent.data_ptr() == one.memory[5:].data_ptr()
    version = one.memory._version
    lent.fill_(3.0)
    assert one.memory._version == version + 1
    with one.used():
        one.change()
    del lent
    rests.sweep()
    rests.drain()
    assert not one.is_here
    with one.used():
        assert one.memory[4] == 1.0 and one.memory[5] == 3.0


PAGE = 2 << 20
LARGE = 3 * PAGE // 4 + 1000  # elements: three huge pages and a little


def resident_nbytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def test_the_next_one_takes_the_pages_of_the_one_before(rests: Rests) -> None:
    """No page is new then, and what was in it is not to be seen."""
    ones = [filled(rests, value, LARGE) for value in range(6)]
    rests.drain()
    for one in ones[:2]:
        with one.used():
            pass
    before, faults = rests.pages.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert before == 3 * PAGE
    for value, one in enumerate(ones[2:], start=2):
        with one.used():
            assert rests.pages.nbytes == 0 and one.memory.min() == one.memory.max() == value
        rests.sweep()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 64
    empty = rests.make("parameters", LARGE, torch.float32)
    with empty.used():
        assert rests.pages.nbytes == 0 and not empty.memory.any()


def test_pages_are_kept_for_two_at_most_and_given_back_by_drain(rests: Rests) -> None:
    ones = [filled(rests, value, LARGE) for value in range(6)]
    rests.drain()
    before = resident_nbytes()
    for one in ones:
        one.fetch()
    for one in ones:
        one.wait()
        one.leave()
    rests.sweep()
    assert rests.pages.nbytes == 6 * PAGE == rests.nbytes
    rests.drain()
    assert rests.nbytes == 0 and resident_nbytes() - before < PAGE


def test_without_a_system_that_moves_pages_nothing_else_changes(rests: Rests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests.pages, "_move", lambda source, target: False)
    ones = [filled(rests, value, LARGE) for value in range(3)]
    for _ in range(2):
        for value, one in enumerate(ones):
            with one.used():
                assert torch.equal(one.memory, torch.full((LARGE,), float(value)))
    rests.drain()
    assert rests.nbytes == 0


MAPPINGS = """
import torch
from zerokern.memory import HostTier, Rests
rests = Rests(HostTier("a test"))
ones = [rests.make("parameters", (5 << 19) + 512 * i, torch.float32) for i in range(20)]
def count():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)
def turn():
    for one in ones:
        with one.used():
            one.memory.fill_(1.0)
            one.change()
turn()
before = count()
for _ in range(10):
    turn()
print(count() - before)
"""


def test_mappings_do_not_grow_in_number() -> None:
    """A system allows a process 65,530 of them."""
    ran = run_forked(MAPPINGS)
    assert ran.returncode == 0 and int(ran.stdout) < 20, ran.stderr
