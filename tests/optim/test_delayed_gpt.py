"""A step's delay costs next to nothing once a model is past its first steps: a GPT, held-out text, sync and Delayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_cases import built, one_thread

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

ROWS, EVALUATED = 8, 16
EXACT = 40  # the paper's own number of steps before its delay begins


def held_out_loss(schedule: Any, shape: Shape, steps: int, lr: float, dtype: torch.dtype) -> float:
    """After training with the usual learning rates: up for a tenth of the steps, then down to nothing."""
    model = built(lambda: GPT(shape).to(dtype))
    optimizer = zk.AdamW(model.parameters(), lr=lr, tier="cpu", schedule=schedule, max_grad_norm=1.0)
    batches = Batches(read_text(), ROWS, shape.context, seed=1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)
        model(*batches.next()).backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = Batches(read_text(held_out=True), 16, shape.context, seed=2)
    with torch.no_grad():
        return sum(model(*held_out.next()).item() for _ in range(EVALUATED)) / EVALUATED


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, steps, lr, dtype",
    [
        pytest.param(Shape(1, 64, 32), 300, 2.5e-4, torch.float32, id="small"),
        pytest.param(Shape(1, 64, 32), 300, 2.5e-4, torch.bfloat16, id="bf16"),
    ],
)
def test_the_final_loss_is_within_one_percent_of_sync(shape: Shape, steps: int, lr: float, dtype: torch.dtype) -> None:
    with one_thread():
        exact = held_out_loss("sync", shape, steps, lr, dtype)
        late = held_out_loss(zk.Delayed(after=EXACT), shape, steps, lr, dtype)
    assert exact < 3.5, "it has learned something; it begins with 5.5"
    assert abs(late / exact - 1) < 0.01, (late, exact)
