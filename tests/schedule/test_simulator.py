"""The simulator against timelines computed by hand, against the data flow, and against what it may never do."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from zerokern.schedule import Delayed, Machine, Op, Ref, Span, StepProgram, flow_bound, program_of, resident, simulate
from zerokern.schedule.simulator import Timeline

SECOND = 10**9  # the bytes that take a second
EVEN = Machine("even", flops_s=1, device_gb_s=2, down_gb_s=1, up_gb_s=1, host_gb_s=1, net_gb_s=1)


def span(name: str, reduce: float = 0, gather: float = 0) -> Span:
    """Forward 1 s, backward 2, down 1, norm 1, update 2, up 1, in place 1."""
    exchanged = {"reduce_nbytes": int(reduce * SECOND), "gather_nbytes": int(gather * SECOND)}
    return Span(name, 1, SECOND, SECOND, 2 * SECOND, 1, 2, **exchanged)


def times(timeline: Timeline, step: int) -> dict[str, tuple[float, float]]:
    """When each op of a step ran, in seconds."""
    found = {f"{e.verb} {e.what}": (e.begin_ns / 1e9, e.end_ns / 1e9) for e in timeline.events if e.step == step}
    return {name: found[name] for name in sorted(found)}


class TestByHand:
    def test_sync_one_after_the_other(self) -> None:
        timeline = simulate(program_of("sync", [span("a"), span("b")]), EVEN, steps=2)
        assert times(timeline, 0) == {
            "Backward a": (4, 6), "Backward b": (2, 4), "Fetch a": (7, 8), "Fetch b": (6, 7), "Forward a": (0, 1),
            "Forward b": (1, 2), "Norm all": (8, 10), "Publish a": (16, 16), "Publish b": (16, 16), "Step a": (10, 12),
            "Step b": (12, 14), "Store a": (14, 15), "Store b": (15, 16),
        }  # fmt: skip
        assert times(timeline, 1)["Forward a"] == (16, 17)
        assert (timeline.step_seconds, timeline.hidden, timeline.seconds) == (16, 0, 32)
        assert timeline.busy == {"device": 6 / 16, "down": 2 / 16, "cpu": 6 / 16, "up": 2 / 16}

    def test_overlap(self) -> None:
        timeline = simulate(program_of("overlap", [span("a"), span("b")]), EVEN)
        first, second = times(timeline, 0), times(timeline, 1)
        assert [first[op] for op in ("Fetch b", "Fetch a", "Norm all")] == [(4, 5), (6, 7), (7, 9)]
        updates = [(9, 11), (11, 12), (11, 13), (13, 14)]
        assert [first[op] for op in ("Step a", "Store a", "Step b", "Store b")] == updates
        assert second["Forward a"] == (12, 13), "as soon as its own parameters are there"
        assert second["Forward b"] == (14, 15), "which the others' are not yet"
        assert [second[op] for op in ("Backward b", "Backward a")] == [(15, 17), (17, 19)]
        # from one "Forward a" to the next: 1 and 1 waiting, 1 and 4 computing, 1 down, 2 norm, 2 update, 1 up
        assert timeline.step_seconds == 13
        # beside compute: a second of the second update; the first gradient going down
        assert timeline.hidden == pytest.approx(2 / 10)

    def test_overlap_of_plain_tensors(self) -> None:
        timeline = simulate(program_of("overlap", [span("a"), span("b")], at_once=True), EVEN)
        first = times(timeline, 0)
        assert [first[op] for op in ("Fetch b", "Fetch a", "Norm all")] == [(6, 7), (7, 8), (8, 10)]
        assert times(timeline, 1)["Forward a"] == (15, 16), "nothing is beside compute"
        assert timeline.step_seconds == 15 and timeline.hidden == 0

    def test_pieces(self) -> None:
        """Four of a second each: what stood in a row, 4 down, 8 of update and 4 up, takes the longest and a piece."""
        large = Span("a", 4, 4 * SECOND, 4 * SECOND, 8 * SECOND, 1, 2, measured=True)
        whole, apart = (
            times(simulate(program_of("overlap", [replace(large, pieces=pieces)]), EVEN, steps=2), 1)
            for pieces in (1, 4)
        )
        backward = whole["Backward a"][1] - whole["Forward a"][0]
        assert backward == 1 + 2 + 2, "the device reads it to sum its squares"
        assert whole["Store a"][1] - whole["Backward a"][1] == 4 + 8 + 4
        assert apart["Store a, piece 4 of 4"][1] - apart["Backward a"][1] == 1 + 8 + 1
        names = [f"a, piece {number} of 4" for number in range(1, 5)]
        begin = apart["Backward a"][1]
        assert [apart[f"Fetch {name}"][1] - begin for name in names] == [1, 2, 3, 4]
        assert [apart[f"Step {name}"][1] - begin for name in names] == [3, 5, 7, 9]
        bounds = [flow_bound(program_of("overlap", [replace(large, pieces=pieces)]), EVEN) for pieces in (1, 4)]
        assert bounds == [5 + 16, 5 + 10]

    def test_pieces_whose_norm_the_host_reads(self) -> None:
        """All of them have come before the first is updated."""
        large = Span("a", 4, 4 * SECOND, 4 * SECOND, 8 * SECOND, 1, 2, pieces=4)
        found = times(simulate(program_of("overlap", [large]), EVEN, steps=1), 0)
        assert found["Norm all"][0] == found["Fetch a, piece 4 of 4"][1] == 3 + 4
        assert found["Store a, piece 4 of 4"][1] == 3 + 4 + 4 + 8 + 1

    def test_delayed(self) -> None:
        timeline = simulate(program_of(Delayed(), [span("a"), span("b")]), EVEN)
        first, second = times(timeline, 0), times(timeline, 1)
        assert [first[op] for op in ("Fetch b", "Fetch a", "Norm all")] == [(4, 5), (6, 7), (7, 9)]
        assert [first[op] for op in ("Publish a", "Publish b")] == [(6, 7), (7, 8)]
        updates = [(9, 11), (11, 12), (11, 13), (13, 14)]
        assert [first[op] for op in ("Step b", "Store b", "Step a", "Store a")] == updates
        assert [second[op] for op in ("Forward a", "Forward b")] == [(8, 9), (9, 10)], "no update is waited for"
        assert second["Publish a"] == (14, 15)
        assert timeline.step_seconds == 8
        # one of two seconds that gradients take, and one of the norm's, lie beside publishing
        assert timeline.hidden == pytest.approx(8 / 10)

    def test_delayed_without_room_on_the_device(self) -> None:
        """Published straight from the host's copy, which the next update then may change."""
        spans = [replace(span(name), param_nbytes=0) for name in "ab"]
        timeline = simulate(program_of(Delayed(), spans, shadow=False), replace(EVEN, host_gb_s=0.5))
        # norm 4 and updates of 4 each; the gradient of a is fetched when its update is over, 1, before the norm
        assert timeline.step_seconds == 4 + 4 + 4 + 1

    def test_ranks(self) -> None:
        timeline = simulate(program_of("overlap", [span("a", 0.5, 0.5), span("b", 3, 1)]), EVEN)
        first = times(timeline, 0)
        assert [first[op] for op in ("Reduce b", "Reduce a")] == [(4, 7), (7, 7.5)], "one by one"
        assert [first[op] for op in ("Fetch b", "Fetch a")] == [(7, 8), (8, 9)]
        assert [first[op] for op in ("Store a", "Gather a", "Gather b")] == [(13, 14), (14, 14.5), (16, 17)]
        assert times(timeline, 1)["Forward a"] == (14.5, 15.5)

    def test_no_offload(self) -> None:
        timeline = simulate(resident([span("a"), span("b")]), EVEN)
        assert timeline.step_seconds == 6 + 2 and timeline.hidden == 1.0, "nothing to hide"
        assert timeline.busy == {"device": 1.0}


def at_once(*ops: Op) -> StepProgram:
    """Ops that begin together when all of the step before are over."""
    before = tuple(Ref(index, back=1) for index in range(len(ops)))
    return StepProgram("at once", tuple(op._replace(after=before) for op in ops))


class TestRates:
    def test_links_that_are_slower_together(self) -> None:
        machine = replace(EVEN, down_gb_s=10, up_gb_s=8, down_both_gb_s=5, up_both_gb_s=5)
        down, up = Op("Fetch", "a", "down", nbytes=10 * SECOND), Op("Store", "a", "up", nbytes=5 * SECOND)
        found = times(simulate(at_once(down, up), machine, steps=1), 0)
        assert found == {"Fetch a": (0, 1.5), "Store a": (0, 1)}, "5 GB together in 1 s, 5 more alone in half"

    def test_memory_that_copies_share(self) -> None:
        machine = replace(EVEN, host_gb_s=10, host_all_gb_s=12, down_gb_s=5)
        down, step = Op("Fetch", "a", "down", nbytes=5 * SECOND), Op("Step", "a", "cpu", nbytes=10 * SECOND)
        found = times(simulate(at_once(down, step), machine, steps=1), 0)
        assert found == {"Fetch a": (0, 1), "Step a": (0, 1.3)}, "7 GB in the first second, 3 at full rate"

    def test_arithmetic_that_is_slower_than_memory(self) -> None:
        machine = replace(EVEN, host_gb_s=100, cores=4, update_numel_s=1e9)
        step = Op("Step", "a", "cpu", nbytes=12 * SECOND, numel=SECOND)
        assert simulate(at_once(step), machine).step_seconds == 0.25
        assert simulate(at_once(step), replace(machine, cores=16)).step_seconds == pytest.approx(0.12)

    def test_what_costs_besides_its_bytes(self) -> None:
        machine = replace(EVEN, copy_us=10, net_us=20, step_us=5)
        lanes = {"Fetch": "down", "Store": "up", "Reduce": "net", "Step": "cpu"}
        ops = [Op(verb, "a", lane, nbytes=10**6) for verb, lane in lanes.items()]
        assert [round(1e6 * machine.seconds(op)) for op in ops] == [1010, 1010, 1020, 1005]
        assert [machine.seconds(op._replace(nbytes=0)) for op in ops] == [0, 0, 0, 0]


def random_spans(seed: int) -> list[Span]:
    rng = random.Random(seed)

    def some(share: float = 1.0) -> int:
        return rng.randint(1, 5 * SECOND) if rng.random() < share else 0

    return [
        Span(str(k), 1, some(0.9), some(0.9), some(), rng.random() * 3, rng.random() * 6, some(0.5), some(0.5))
        for k in range(rng.randint(1, 6))
    ]


SCHEDULES = ["sync", "overlap", Delayed(), Delayed(after=1)]


class TestAlways:
    @pytest.mark.parametrize("seed", range(8))
    def test_nothing_runs_early_or_twice_at_once(self, seed: int) -> None:
        machine = replace(EVEN, down_both_gb_s=0.7, up_both_gb_s=0.6, host_gb_s=2, host_all_gb_s=2.5)
        for schedule in SCHEDULES:
            program = program_of(schedule, random_spans(seed), shadow=bool(seed % 2))
            timeline = simulate(program, machine, steps=5)
            ran = {(e.step, program.index(e.verb, e.what)): e for e in timeline.events}
            assert len(ran) == 5 * len(program.ops)
            for (step, index), event in ran.items():
                before = [ran[step - ref.back, ref.index] for ref in program.ops[index].after if ref.back <= step]
                assert all(other.end_ns <= event.begin_ns for other in before)
            for lane in ("net", "down", "cpu", "up"):
                own = sorted((e.begin_ns, e.end_ns) for e in ran.values() if e.lane == lane)
                assert all(this[1] <= following[0] for this, following in itertools.pairwise(own))

    @pytest.mark.parametrize("seed", range(8))
    def test_without_sharing_it_is_the_flow_of_data(self, seed: int) -> None:
        """Two ways to the same number: events one by one, and the recurrence over what waits for what."""
        for schedule in SCHEDULES:
            program = program_of(schedule, random_spans(100 + seed))
            assert simulate(program, EVEN).step_seconds == pytest.approx(flow_bound(program, EVEN), rel=1e-9)


class TestOrderOfUpdates:
    def test_forward_order_is_the_best_for_overlap(self) -> None:
        spans = [Span(str(k), 1, SECOND, SECOND, (1 + k % 3) * SECOND, 1.5, 2) for k in range(4)]
        bounds = [flow_bound(reordered(program_of("overlap", spans), order), EVEN) for order in orders(4)]
        assert min(bounds) == bounds[0] < max(bounds)

    def test_backward_order_is_the_best_for_delayed(self) -> None:
        """The next gradients arrive in it, each where its predecessor was read from."""
        spans = [Span(str(k), 1, SECOND, SECOND, (3 + k % 3) * SECOND, 1.5, 2) for k in range(4)]
        bounds = {order: flow_bound(reordered(program_of(Delayed(), spans), order), EVEN) for order in orders(4)}
        assert min(bounds.values()) == bounds[3, 2, 1, 0] < bounds[0, 1, 2, 3]


def orders(count: int) -> list[tuple[int, ...]]:
    return list(itertools.permutations(range(count)))


def reordered(program: StepProgram, order: tuple[int, ...]) -> StepProgram:
    """The same ops, updated and stored in another order of spans."""
    late = ("Step", "Store") if program.name == "delayed" else ("Step", "Store", "Publish")
    head = [index for index, op in enumerate(program.ops) if op.verb not in late]
    tail = [program.index(verb, str(name)) for name in order for verb in late]
    places = {old: new for new, old in enumerate(head + tail)}

    def moved(op: Op) -> Op:
        return op._replace(after=tuple(Ref(places[ref.index], ref.back) for ref in op.after))

    return StepProgram(program.name, tuple(moved(program.ops[old]) for old in head + tail))


class TestRefused:
    def test_steps_empty_programs_and_no_network(self) -> None:
        for steps in (0, -1, True, 1.5):
            with pytest.raises(ValueError, match="must be a whole number from 1 on"):
                simulate(resident([span("a")]), EVEN, steps=steps)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'none' has no ops"):
            simulate(StepProgram("none", ()), EVEN)
        with pytest.raises(ValueError, match=r"net_gb_s=None: must be.*several ranks"):
            simulate(program_of("sync", [span("a", 1, 1)]), replace(EVEN, net_gb_s=None))
