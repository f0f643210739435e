"""Whole parameters beside their divided gradients, as SAM and natural gradients have them (stages 1 and 2)."""

from __future__ import annotations

import pytest
import torch
from reference_programs import Run, same_as_plain
from zero_cases import mse


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_up_the_gradient_and_back(stage: int, foreach: bool) -> None:
    def climb(run: Run, by: float) -> None:
        params = list(run.model.parameters())
        with torch.no_grad():
            if foreach:
                torch._foreach_add_(params, [param.grad for param in params], alpha=by)
                return
            for param in params:
                param.add_(param.grad, alpha=by)

    def program(run: Run) -> None:
        optimizer = run.optimizer()
        for step in range(2):
            run.backward(mse(run.model, step, run.world))
            climb(run, 0.25)
            run.model.zero_grad()
            run.backward(mse(run.model, step, run.world))
            climb(run, -0.125)
            optimizer.step()
            optimizer.zero_grad()

    same_as_plain(2, program, stage=stage, bucket_bytes=600)
