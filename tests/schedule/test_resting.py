"""Steps whose parameters rest off the device: what moves, what runs beside what, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from zerokern.schedule import Delayed, Machine, Ref, Span, StepProgram, program_of, simulate

GB = 10**9
SCHEDULES = ("sync", "overlap", Delayed())  # of parameters in host memory
ON_DISKS = ("sync", "overlap")
EVEN = Machine("even", flops_s=1, device_gb_s=inf, down_gb_s=inf, up_gb_s=1, host_gb_s=inf, read_gb_s=1, write_gb_s=1)
HALF = replace(EVEN, up_gb_s=inf, read_both_gb_s=0.5, write_both_gb_s=0.5)
ON_HOST, ON_DISK = ("up",), ("read", "up")


def spans(count: int = 8, compute: float = 0.0, **sizes: object) -> list[Span]:
    """Backward computes three times as long as forward; sizes are of all spans together."""
    each = {name: size // count if isinstance(size, int) else size for name, size in sizes.items()}
    flops = {"forward_flops": compute / 4 / count, "backward_flops": compute * 3 / 4 / count}
    return [Span(f"{i}", 8, **flops, **each) for i in range(count)]  # type: ignore[arg-type]


def moved(program: StepProgram, lane: str) -> int:
    return sum(op.nbytes for op in program.ops if op.lane == lane)


def exact(**others: object) -> list[Span]:
    """Two bytes of parameters, ten of state and two of gradients for each of 10^9 parameters, all on disk."""
    given = {"fetch_nbytes": 2 * GB, "fetch_lanes": ON_DISK, "record_nbytes": 10 * GB, "grad_nbytes": 2 * GB}
    return spans(**(given | others))


def rows_of_bytes(schedule: object) -> Iterator[tuple[str, StepProgram, tuple[float, ...]]]:
    """What is read, written, sent up and sent down in a step, in GB."""
    # "overlap" updates parameters before their forward, which finds them in memory; others read them for the update.
    read = 14 if schedule == "overlap" else 16
    yield "all on disk", program_of(schedule, exact()), (read, 12, 4, 2)
    yield "gradients wait there", program_of(schedule, exact(spill_nbytes=2 * GB)), (read + 2, 14, 4, 2)
    # Each pass fetches anew, and sends its gradients to where they are added.
    yield "eight micro-batches", program_of(schedule, exact(), passes=8), (read + 28, 12, 32, 16)
    kept = program_of(schedule, exact(keep_nbytes=8 * GB, keep_lanes=ON_DISK))
    yield "inputs leave, but for the last", kept, (read + 7, 19, 11, 9)
    *frozen, last = (Span(str(i), 8 * (i == 3), fetch_nbytes=GB, fetch_lanes=ON_DISK) for i in range(4))
    # Of these only the last has an update that reads it.
    yield "frozen spans only come", program_of(schedule, [*frozen, last]), (8 + (schedule != "overlap"), 1, 8, 0)
    *others, last = exact()
    # In each of two passes the last is there, from forward to backward.
    stays = program_of(schedule, [*others, replace(last, stays_nbytes=last.fetch_nbytes)], passes=2)
    yield "the last stays at a turn", stays, (read + 4 - 0.5, 12, 7.5, 4)


@pytest.mark.parametrize("schedule", ON_DISKS)
def test_a_step_moves_exactly(schedule: object) -> None:
    for name, program, expected in rows_of_bytes(schedule):
        assert tuple(moved(program, lane) / GB for lane in ("read", "write", "up", "down")) == expected, name


class TestOrder:
    @pytest.mark.parametrize(
        "schedule, lanes", [*product(SCHEDULES, [ON_HOST]), *product(ON_DISKS, [ON_DISK])], ids=str
    )
    def test_a_span_is_on_its_way_while_the_one_before_computes(self, schedule: object, lanes: tuple) -> None:
        program = program_of(schedule, spans(compute=80.0, fetch_nbytes=8 * GB, fetch_lanes=lanes))
        ran = {(one.verb, one.what): one for one in reversed(simulate(program, EVEN, steps=1).events)}  # in forward
        for before, after in (("1", "2"), ("2", "3"), ("5", "6")):
            computes, fetched = ran["Forward", before], ran["Fetch", f"{after} parameters"]
            assert computes.begin_ns <= fetched.begin_ns < fetched.end_ns <= computes.end_ns

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_no_more_than_two_are_there(self, schedule: object) -> None:
        """A span comes when the one before the last has computed."""
        lanes = ON_DISK if schedule in ON_DISKS else ON_HOST
        program = program_of(schedule, exact(fetch_lanes=lanes), passes=2)
        computes = [i for i, op in enumerate(program.ops) if op.verb in ("Forward", "Backward")]
        for number, place in enumerate(computes[2:]):
            before = [program.ops[ref.index] for ref in program.ops[place].after if not ref.back]
            (fetch,) = (op for op in before if op.lane == "up")
            assert Ref(computes[number]) in fetch.after

    @pytest.mark.parametrize("schedule", ON_DISKS)
    def test_nothing_is_read_before_it_is_written(self, schedule: object) -> None:
        """Of one span the disk does one thing at a time, also over the end of a step."""
        machine = replace(HALF, flops_s=1e9)
        ran = simulate(program_of(schedule, exact(spill_nbytes=2 * GB), passes=2), machine, steps=4).events
        for number in range(8):
            mine = [one for one in ran if one.lane in ("read", "write") and one.what.split(" ")[0] == str(number)]
            written = [one for one in mine if one.what.endswith("record") and one.verb == "Store"]
            reads = [one for one in mine if one.verb == "Fetch" and not one.what.endswith("gradients")]
            assert written and reads
            for store in written:
                assert all(store.end_ns <= one.begin_ns or one.end_ns <= store.begin_ns for one in reads)


class TestTimes:
    def test_compute_hides_what_is_shorter(self) -> None:
        """Two seconds up in forward and in backward, beside ten and thirty of compute; the first fetch is seen."""
        program = program_of("overlap", spans(compute=40.0, fetch_nbytes=2 * GB, fetch_lanes=ON_HOST))
        timeline = simulate(program, EVEN)
        assert timeline.step_seconds == pytest.approx(40 + 2 / 8) and timeline.hidden == pytest.approx(15 / 16)

    @pytest.mark.parametrize("schedule, seconds", [("sync", 28), ("overlap", 26)])
    def test_where_the_disk_decides(self, schedule: object, seconds: float) -> None:
        """Reads and writes share one rate, so that a step is their sum."""
        timeline = simulate(program_of(schedule, exact(count=32)), HALF)
        assert timeline.step_seconds == pytest.approx(seconds, rel=0.02)

    @pytest.mark.parametrize("compute", [13.0, 26.0, 40.0, 80.0])
    def test_most_of_the_disk_is_beside_the_forward(self, compute: float) -> None:
        """24 of 26 seconds are, which is a quarter of the compute."""
        overlap = simulate(program_of("overlap", exact(count=32, compute=compute)), HALF).step_seconds
        assert overlap == pytest.approx(max(24, compute / 4) + max(2, compute * 3 / 4), rel=0.05)

    def test_the_vertical_order_is_worth_eight_times_the_parameters(self) -> None:
        host = {"compute": 0.0, "fetch_nbytes": 2 * GB, "fetch_lanes": ON_HOST}
        once, eight = (simulate(program_of("overlap", spans(**host), passes=n), EVEN).step_seconds for n in (1, 8))
        assert eight / once == pytest.approx(8, rel=0.01)


def test_parameters_on_a_disk_are_not_updated_late() -> None:
    with pytest.raises(ValueError, match="'sync' or 'overlap' for parameters that rest on a disk"):
        program_of(Delayed(), exact())
    assert program_of(Delayed(), exact(fetch_lanes=ON_HOST)).name == "delayed", "their state may be there"
