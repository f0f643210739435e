"""The cases of graph_cases, models that no list of outputs describes, and experts of some ranks, as programs."""

from __future__ import annotations

import re
from collections.abc import Callable

from graph_cases import CASES
from module_cases import EXPERTS
from small_programs import Run, program
from zero_cases import Case

import zerokern as zk


def as_program(case: Case) -> Callable[[Run], None]:
    def follow(run: Run) -> None:
        model = run.shard(case.build)
        optimizer = run.optimizer(model.parameters(), zk.AdamW if case.one_order else zk.SGD)
        for step in range(case.steps):
            run.step(optimizer, case.loss(model, step, run.world), case.backward)

    follow.__name__ = re.sub(r"\W", "_", case.name)
    return follow


for case in (EXPERTS, *CASES):
    program(exact=case.one_order)(as_program(case))
