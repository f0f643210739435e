"""Bugs as data: what is wrong in a source of `cuda/`, the kernel that shows it, and what the machine says of it."""

from __future__ import annotations

from typing import NamedTuple

from coroutine_machine import Edit

__all__ = ["FAULTS", "Fault"]


class Fault(NamedTuple):
    """`said` is a part of what the machine finds; an empty one means that bits differ from the reference."""

    name: str
    kernel: str
    edit: Edit
    said: str = ""
    architecture: int = 90


FAULTS = (
    Fault(
        "stage_loaded_before_its_store_has_read_it", "ferry",
        Edit("ring.cuh", "bulk_wait_group_read<STAGES - AHEAD>();", "bulk_wait_group_read<STAGES>();"),
        "loads into a stage before wait_group.read",
    ),
    Fault(
        "parity_of_the_first_round_for_all", "ferry",
        Edit("ring.cuh", "stores / STAGES & 1)", "0)"),
        "uses a stage before the phase of its barrier is seen complete",
    ),
    Fault(
        "load_not_waited_for", "ferry",
        Edit("ring.cuh", "while (!mbarrier_try_wait_parity(", "while (stores > AHEAD && !mbarrier_try_wait_parity("),
        "uses a stage before the phase of its barrier is seen complete",
    ),
    Fault(
        "barriers_not_shown_to_the_copy_engine", "ferry",
        Edit("ring.cuh", "        fence_mbarrier_init();\n", ""),
        "without fence.mbarrier_init",
    ),
    Fault(
        "last_barrier_not_made", "ferry",
        Edit("ring.cuh", "i < STAGES; ++i) mbarrier_init", "i < STAGES - 1; ++i) mbarrier_init"),
        "a barrier that was not initialised",
    ),
    Fault(
        "fewer_bytes_expected_than_come", "ferry",
        Edit("ring.cuh", "BARRIER, nbytes);\n        bulk_load", "BARRIER, nbytes - 16);\n        bulk_load"),
        "",
    ),
    Fault(
        "cta_ends_before_its_stores", "ferry",
        Edit("ring.cuh", "{ bulk_wait_group<0>(); }", "{}"),
        "ends before wait_group",
    ),
    Fault(
        "head_of_the_other_side", "ferry",
        Edit("ring.cuh", "(u32)(-to & (width - 1))", "(u32)(to & (width - 1))"),
        "aligned",
    ),
    Fault(
        "tail_as_long_as_head_and_tail", "ferry",
        Edit("ferry.cu", "row.from + end, row.size - end, lane", "row.from + end, row.size - end + head, lane"),
        "global memory out of bounds",
    ),
    Fault(
        "ends_moved_by_each_task", "ferry",
        Edit("ferry.cu", "if (tasks.within() == 0) ferry_ends(", "ferry_ends("),
        "writes a byte twice",
    ),
    Fault(
        "two_warps_with_the_same_tasks", "ferry",
        Edit("ferry.cu", "cta_count() * warps, 0}", "cta_count() * (warps - 1), 0}"),
        "writes a byte twice",
    ),
    Fault(
        "task_of_the_row_before", "ferry",
        Edit("ring.cuh", "if (list.row[look].first <= task)", "if (list.row[look].first < task)"),
        "",
    ),
    Fault(
        "rows_no_more_ahead_than_half_the_tasks", "ferry",
        Edit("ring.cuh", "(ahead < left ? ahead : left)", "(ahead / 2 < left ? ahead / 2 : left)"),
        "",
    ),
    Fault(
        "stages_stored_to_the_task_after", "ferry",
        Edit("ferry.cu", "stores = loads;", "stores{list, cta_number() + 1, cta_count(), 0};"),
        "",
    ),
)  # fmt: skip
