"""Each case of module_cases and graph_cases, models that no list of outputs describes, as a program."""

from __future__ import annotations

import re
from collections.abc import Callable

import graph_cases
import module_cases
from small_programs import RANKS_DIFFER, Run, program
from zero_cases import Case

import zerokern as zk


def as_program(case: Case) -> Callable[[Run], None]:
    def follow(run: Run) -> None:
        model = run.shard(case.build)
        optimizer = run.optimizer(model.parameters(), zk.AdamW if case.one_order else zk.SGD)
        for step in range(case.steps):
            run.step(optimizer, case.loss(model, step, run.world), case.backward)
            run.see(case.after(model, step))

    follow.__name__ = re.sub(r"\W", "_", case.name)
    return follow


for case in (*module_cases.CASES, *graph_cases.CASES):
    differs = case.name == "a unit unused on some ranks"
    program(exact=case.one_order, refused=RANKS_DIFFER if differs else None)(as_program(case))
