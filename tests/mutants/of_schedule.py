"""Mutants of programs and of what runs and times them."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "forward_waits_for_another_span",
        "zerokern/schedule/policies.py",
        "return [published[place]]",
        "return [published[place - 1]]",
        'With "overlap" the forward of a span waits for the update of the span before it.',
        ("tests/schedule/test_program.py", "tests/schedule/test_races.py"),
    ),
    Mutant(
        "delayed_step_overwrites_what_is_being_stored",
        "zerokern/schedule/policies.py",
        "last = builder.step(span, [*norm, *read] if shadow else [*norm, free], ahead=ahead)",
        "last = builder.step(span, norm if shadow else [*norm, free], ahead=ahead)",
        "A delayed update writes host values that the last one's copy to the device may still read.",
        ("tests/schedule/test_program.py", "tests/schedule/test_races.py"),
    ),
    Mutant(
        "gradient_fetched_over_the_one_being_read",
        "zerokern/schedule/builder.py",
        'self.fetch(span, [*computed, OpKey("Step", span.names[-1], 1)])',
        "self.fetch(span, computed)",
        "A gradient arrives in host memory that the last update may still read.",
        ("tests/schedule/test_program.py", "tests/schedule/test_races.py"),
    ),
    Mutant(
        "device_not_gated_by_a_copy",
        "zerokern/schedule/executor.py",
        "            self._wait_for_end(task)\n        else:\n            ticket.gate()",
        "            self._wait_for_end(task)",
        "What the program gives to the device does not wait for the copies that it needs.",
        ("tests/optim/test_offload_played.py", "tests/schedule/test_executor.py"),
    ),
    Mutant(
        "failure_told_before_the_copies_have_ended",
        "zerokern/schedule/worker.py",
        "# the first failure is the one that is told\n                    self.wait_for(task)",
        "# the first failure is the one that is told\n                    self._advance(task, ENDED)",
        "A failed step is over while copies still write to memory that others take to be free.",
        ("tests/schedule/test_executor_failures.py",),
    ),
    Mutant(
        "published_before_it_is_stored",
        "zerokern/schedule/policies.py",
        '[OpKey("Backward", spans[0].name, turn=max(resting, 1) - 1), *stored]',
        '[OpKey("Backward", spans[0].name, turn=max(resting, 1) - 1)]',
        "A delayed update is put in place before all of it has come to the device.",
        ("tests/schedule/test_program.py", "tests/schedule/test_races.py"),
    ),
    Mutant(
        "needed_unit_released",
        "zerokern/schedule/passes.py",
        'moves = [("Release", number) for number in done if number not in following]',
        'moves = [("Release", number) for number in done]',
        "A unit that is about to compute again is released, and gathered once more.",
        (
            "tests/mutants/test_found.py::test_a_unit_that_computes_next_is_not_released",
            "tests/zero/test_passes.py",
            "tests/zero/test_traffic.py",
        ),
    ),
    Mutant(
        "simulator_forgets_the_step_before",
        "zerokern/schedule/simulator.py",
        "self.waits[step, index] = sum(ref.back <= step for ref in op.after)",
        "self.waits[step, index] = sum(ref.back < max(step, 1) for ref in op.after)",
        "The simulator lets the second step begin beside the first.",
        ("tests/schedule/test_simulator.py",),
    ),
    Mutant(
        "hidden_counts_time_beside_nothing",
        "zerokern/schedule/intervals.py",
        "begin, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])",
        "begin, end = min(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])",
        "Time before compute has begun counts as hidden beside it.",
        ("tests/schedule/test_simulator.py", "tests/schedule/test_timeline.py"),
    ),
    Mutant(
        "ctrl_c_breaks_an_op_off",
        "zerokern/schedule/executor.py",
        "with whole(task):",
        "if True:",
        "One Ctrl-C while a forward waits for a published bucket ends the update for good.",
        (
            "tests/schedule/test_executor_failures.py::test_a_device_op_is_finished_before_ctrl_c_and_a_second_one_fails_the_run",
        ),
    ),
)
