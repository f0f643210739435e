"""Programs of the schedules: golden text, what waits for what, and what is refused."""

from __future__ import annotations

import pytest

from zerokern.schedule import Delayed, Op, Ref, Span, StepProgram, check_schedule, program_of, resident

# two spans, of which the second is also shared by ranks
SPANS = (
    Span("a", 1000, 2000, 2000, 26_000, 2e9, 4e9),
    Span("b", 3000, 6000, 6000, 78_000, 6e9, 12e9, reduce_nbytes=6000, gather_nbytes=6000),
)

SYNC = """\
sync
  0 device Forward  a    2e+09 flops              after -1:14
  1 device Forward  b    6e+09 flops              after 0
  2 device Backward b    1.2e+10 flops            after 1
  3 net    Reduce   b    6.0 kB                   after 2
  4 device Backward a    4e+09 flops              after 2
  5 down   Fetch    b    6.0 kB                   after 3, 4
  6 down   Fetch    a    2.0 kB                   after 5
  7 cpu    Norm     all  8.0 kB, 4,000 elements   after 6
  8 cpu    Step     a    26.0 kB, 1,000 elements  after 7
  9 cpu    Step     b    78.0 kB, 3,000 elements  after 8
 10 up     Store    a    2.0 kB                   after 9
 11 up     Store    b    6.0 kB                   after 10
 12 net    Gather   b    6.0 kB                   after 11
 13 device Publish  a                             after 12
 14 device Publish  b                             after 13"""

OVERLAP = """\
overlap
  0 device Forward  a    2e+09 flops              after -1:10
  1 device Forward  b    6e+09 flops              after 0, -1:14
  2 device Backward b    1.2e+10 flops            after 1
  3 net    Reduce   b    6.0 kB                   after 2
  4 down   Fetch    b    6.0 kB                   after 3, -1:11
  5 device Backward a    4e+09 flops              after 2
  6 down   Fetch    a    2.0 kB                   after 5, -1:8
  7 cpu    Norm     all  8.0 kB, 4,000 elements   after 4, 6
  8 cpu    Step     a    26.0 kB, 1,000 elements  after 7
  9 up     Store    a    2.0 kB                   after 8
 10 device Publish  a                             after 9
 11 cpu    Step     b    78.0 kB, 3,000 elements  after 7
 12 up     Store    b    6.0 kB                   after 11
 13 net    Gather   b    6.0 kB                   after 12
 14 device Publish  b                             after 13"""

DELAYED = """\
delayed
  0 device Forward  a    2e+09 flops              after -1:7, -1:9
  1 device Forward  b    6e+09 flops              after 0
  2 device Backward b    1.2e+10 flops            after 1
  3 net    Reduce   b    6.0 kB                   after 2
  4 down   Fetch    b    6.0 kB                   after 3, -1:11
  5 device Backward a    4e+09 flops              after 2
  6 down   Fetch    a    2.0 kB                   after 5, -1:13
  7 device Publish  a    2.0 kB                   after 5, -1:12, -1:14
  8 device Publish  b    6.0 kB                   after 7
  9 net    Gather   b    6.0 kB                   after 7, 8
 10 cpu    Norm     all  8.0 kB, 4,000 elements   after 4, 6
 11 cpu    Step     b    78.0 kB, 3,000 elements  after 10, -1:12
 12 up     Store    b    6.0 kB                   after 8, 11
 13 cpu    Step     a    26.0 kB, 1,000 elements  after 10, -1:14
 14 up     Store    a    2.0 kB                   after 7, 13"""

RESIDENT = """\
resident
 0 device Forward  a    2e+09 flops               after -1:5
 1 device Forward  b    6e+09 flops               after 0, -1:6
 2 device Backward b    1.2e+10 flops             after 1
 3 net    Reduce   b    6.0 kB                    after 2
 4 device Backward a    4e+09 flops               after 2
 5 device Step     all  104.0 kB, 4,000 elements  after 3, 4
 6 net    Gather   b    6.0 kB                    after 5"""

UNITS = tuple(
    Span(name, 10, reduce_nbytes=8, gather_nbytes=16, gathered_again=True, unit=unit)
    for name, unit in (("root", 0), ("a", 1), ("b", 2), ("b's other", 2), ("c", 3))
)

BY_UNITS = """\
overlap
  0 net    Gather   root           8 B          after -1:25
  1 net    Gather   a              8 B          after -1:27
  2 net    Gather   b              8 B          after -1:29
  3 net    Gather   b's other      8 B          after -1:31
  4 device Forward  a                           after 0, 1, -1:27
  5 net    Gather   c              8 B          after 4, -1:33
  6 device Forward  b                           after 0, 2..4, -1:29
  7 device Forward  b's other                   after 0, 2, 3, 6, -1:31
  8 device Forward  c                           after 0, 5, 7, -1:33
  9 device Forward  root                        after 0, 8, -1:25
 10 device Backward root                        after 0, 9
 11 net    Gather   b (2)          8 B          after 10
 12 net    Gather   b's other (2)  8 B          after 10
 13 device Backward c                           after 0, 5, 10
 14 net    Reduce   c              8 B          after 13
 15 net    Gather   a (2)          8 B          after 13
 16 device Backward b's other                   after 0, 11..13
 17 device Backward b                           after 0, 11, 12, 16
 18 net    Reduce   b's other      8 B          after 17
 19 net    Reduce   b              8 B          after 17
 20 device Backward a                           after 0, 15, 17
 21 net    Reduce   a              8 B          after 20
 22 net    Reduce   root           8 B          after 20
 23 cpu    Norm     all            50 elements  after 14, 18, 19, 21, 22
 24 cpu    Step     root           10 elements  after 23
 25 device Publish  root                        after 24
 26 cpu    Step     a              10 elements  after 23
 27 device Publish  a                           after 26
 28 cpu    Step     b              10 elements  after 23
 29 device Publish  b                           after 28
 30 cpu    Step     b's other      10 elements  after 23
 31 device Publish  b's other                   after 30
 32 cpu    Step     c              10 elements  after 23
 33 device Publish  c                           after 32"""


class TestText:
    @pytest.mark.parametrize(
        "program, text",
        [
            (program_of("sync", SPANS), SYNC),
            (program_of("overlap", SPANS), OVERLAP),
            (program_of(Delayed(after=3), SPANS), DELAYED),
            (resident(SPANS), RESIDENT),
            (program_of("overlap", UNITS), BY_UNITS),
        ],
        ids=lambda value: value.name if isinstance(value, StepProgram) else "",
    )
    def test_golden(self, program: StepProgram, text: str) -> None:
        assert str(program) == text

    def test_runs_are_joined_within_one_step_only(self) -> None:
        after = (Ref(0), Ref(1), Ref(2), Ref(3, 1), Ref(4, 1), Ref(4, 2))
        ops = tuple(Op("Step", str(number), "cpu") for number in range(5))
        program = StepProgram("runs", (*ops, Op("Norm", "all", "cpu", after)))
        assert str(program).splitlines()[-1].endswith("after 0..2, -1:3, -1:4, -2:4")


def waits(program: StepProgram, verb: str, what: str) -> set[str]:
    """What an op waits for: "Fetch a", or "Fetch a-1" of the step before."""
    op = program.ops[program.index(verb, what)]
    named = [(program.ops[ref.index], ref.back) for ref in op.after]
    return {f"{other.verb} {other.what}" + (f"-{back}" if back else "") for other, back in named}


def reaches(program: StepProgram, later: tuple[str, str], earlier: tuple[str, str], back: int) -> bool:
    """Whether `later` of a step can only run when `earlier`, of `back` steps before, is over."""
    goal, seen, todo = (program.index(*earlier), back), set(), [(program.index(*later), 0)]
    while todo:
        index, steps = todo.pop()
        for ref in program.ops[index].after:
            there = (ref.index, steps + ref.back)
            if there == goal:
                return True
            if there[1] <= back and there not in seen:
                seen.add(there)
                todo.append(there)
    return False


MANY = tuple(Span(str(k), 10, 20, 20, 260, 1.0, 2.0, *((20, 20) if k % 2 else (0, 0))) for k in range(5))
ALL = [program_of("sync", MANY), program_of("overlap", MANY), program_of("overlap", MANY, at_once=True)]
LATE = [program_of(Delayed(), MANY), program_of(Delayed(), MANY, shadow=False)]


class TestOrder:
    @pytest.mark.parametrize("program", ALL, ids=["sync", "overlap", "at_once"])
    def test_a_forward_follows_the_update_made_of_the_step_before(self, program: StepProgram) -> None:
        for span in MANY:
            for verb in ("Fetch", "Norm", "Step", "Store", "Publish"):
                what = "all" if verb == "Norm" else span.name
                assert reaches(program, ("Forward", span.name), (verb, what), back=1), (verb, span)

    @pytest.mark.parametrize("program", LATE, ids=["shadow", "host"])
    def test_a_delayed_forward_follows_the_update_of_two_steps_before_and_not_of_one(
        self, program: StepProgram
    ) -> None:
        for span in MANY:
            for other in MANY:
                assert reaches(program, ("Forward", span.name), ("Store", other.name), back=2), "never torn"
                assert not reaches(program, ("Forward", span.name), ("Step", other.name), back=1)
            assert not reaches(program, ("Forward", span.name), ("Norm", "all"), back=1)

    @pytest.mark.parametrize("program", ALL + LATE, ids=["sync", "overlap", "at_once", "shadow", "host"])
    def test_what_is_overwritten_has_been_read(self, program: StepProgram) -> None:
        for span in MANY:
            name = span.name
            assert reaches(program, ("Fetch", name), ("Step", name), back=1), "one buffer for gradients"
            assert reaches(program, ("Norm", "all"), ("Fetch", name), back=0)
            assert reaches(program, ("Step", name), ("Norm", "all"), back=0), "the factor of clipping is known"
            for other in MANY:
                writes = ("Publish", name) if program in LATE else ("Store", name)
                assert reaches(program, writes, ("Backward", other.name), back=0), "nothing visible changes before"

    def test_what_lies_on_the_host_does_not_move(self) -> None:
        spans = [Span("a", 10, step_nbytes=260), Span("b", 0)]
        for schedule in ("sync", "overlap", Delayed()):
            program = program_of(schedule, spans)
            assert {op.verb for op in program.ops} == {"Forward", "Backward", "Norm", "Step", "Publish"}
            assert reaches(program, ("Norm", "all"), ("Backward", "a"), back=0)
            assert {op.lane for op in program.ops} == {"device", "cpu"}


@pytest.mark.parametrize("options", [{}, {"shadow": False}, {"on_disk": True}, {"at_once": True}], ids=str)
@pytest.mark.parametrize("schedule", ["sync", "overlap", Delayed()], ids=str)
@pytest.mark.parametrize("rests", [(), ("read", "up")], ids=["there", "resting"])
def test_edges_grow_with_the_spans_and_not_with_their_square(schedule: object, options: dict, rests: tuple) -> None:
    if schedule == Delayed():
        rests = rests[1:]  # it takes no parameters on a disk

    def edges(count: int) -> int:
        sizes = {"grad_nbytes": 8, "param_nbytes": 8, "reduce_nbytes": 8, "gather_nbytes": 8, "record_nbytes": 8}
        one = {**sizes, "fetch_lanes": rests, "fetch_nbytes": 8 * len(rests), "spill_nbytes": 4 * len(rests)}
        program = program_of(schedule, [Span(f"{number}", 1, **one) for number in range(count)], **options)
        return sum(len(op.after) for op in program.ops)

    few, more, most = edges(100), edges(200), edges(400)
    assert most - more == pytest.approx(2 * (more - few), rel=0.01)


class TestRefused:
    def test_schedules(self) -> None:
        assert check_schedule("sync") == "sync" and check_schedule(Delayed(2)) == Delayed(after=2)
        with pytest.raises(ValueError, match=r"schedule='Delayed': must be.*zk.Delayed\(after=40\)"):
            check_schedule("Delayed")
        with pytest.raises(TypeError, match=r"'sync', 'overlap' or zk.Delayed\(after=N\). It holds how many"):
            check_schedule(Delayed)
        with pytest.raises(TypeError, match="schedule=None: must be"):
            check_schedule(None)

    def test_delayed(self) -> None:
        for after, error in [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("3", TypeError)]:
            with pytest.raises(error, match="exact steps"):
                Delayed(after=after)  # type: ignore[arg-type]

    def test_programs(self) -> None:
        for op, says in [
            (Op("Step", "b", "gpu"), r"ops\[1\].lane='gpu': must be device, net"),
            (Op("Step", "b", "cpu", (Ref(1),)), r"ops\[1\].after='1': must be.*\(< 1\)"),
            (Op("Step", "b", "cpu", (Ref(2, 1),)), r"after='-1:2': must be.*index < 2"),
            (Op("Step", "b", "cpu", (Ref(0, -1),)), "must be"),
            (Op("Step", "b", "cpu", nbytes=-1), "not negative"),
            (Op("Step", "a", "cpu"), r"ops='Step a': must be.*unique"),
        ]:
            with pytest.raises(ValueError, match=says):
                StepProgram("bad", (Op("Step", "a", "cpu"), op))

    def test_spans(self) -> None:
        with pytest.raises(ValueError, match=r"spans=\[\]: must be at least one span"):
            program_of("sync", [])
        with pytest.raises(ValueError, match=r"Span\.numel=-3"):
            Span("a", -3)
        for wrong in ({"pieces": 0}, {"pieces": 2, "record_nbytes": 8}, {"pieces": 2, "fetch_lanes": ("up",)}):
            with pytest.raises(ValueError, match=rf"Span\.pieces={wrong['pieces']}: must be 1 where anything rests on"):
                Span("a", 3, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="Names of spans are unique"):
            program_of("overlap", [Span("a", 1), Span("a", 2)])

    def test_an_op_that_is_not_there(self) -> None:
        with pytest.raises(KeyError, match="Gather a is not in program 'sync'; Gather: b"):
            program_of("sync", SPANS).index("Gather", "a")


def test_a_sync_step_has_put_its_state_away_before_other_ranks_are_told() -> None:
    program = program_of("sync", SPANS, on_disk=True)
    order = [(op.verb, op.what) for op in program.ops]
    assert order.index(("Store", "b")) < order.index(("Store", "state")) < order.index(("Gather", "b"))
    assert reaches(program, ("Gather", "b"), ("Store", "state"), back=0)
