"""zk.Muon on the stages of a pipeline, each with its own matrices: one process's numbers, one norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_cases import Alone, batch, parameters, pipeline
from torch import nn
from worlds import World, on_ranks, ranked, step_and_zero

import zerokern as zk

WHOLE = ["blocks.*.up.weight", "blocks.*.down.weight"]


def both(models: list[nn.Module], **settings: Any) -> list[Any]:
    """One Muon and one AdamW for all parts of a model that are here."""
    named = [pair for model in models for pair in model.named_parameters()]
    matrices = [(name, param) for name, param in named if name.endswith(("up.weight", "down.weight"))]
    others = {name for name, _ in matrices}
    rest = [(name, param) for name, param in named if name not in others]
    return [zk.Muon(matrices, lr=0.02, **settings), zk.AdamW(rest, lr=1e-2, **settings)]


@ranked
def trained(world: World, rows: list[tuple[str, int, dict[str, Any]]]) -> None:
    for name, stage, settings in rows:
        pipe = pipeline(name, stage=stage, whole=WHOLE)
        alone, orders = Alone(0), pipe.orders()
        theirs = both([alone.model], max_grad_norm=1e9, schedule=settings.get("schedule", "sync"))
        ours = both(pipe.models, max_grad_norm=1e9, group=pipe.mesh["pp"], **settings)
        for step in range(3):
            losses = pipe.step(*batch(0, step, pipe.dp))
            expected = alone.step(step, orders)
            assert not losses or losses == expected[pipe.dp], (name, stage, step)
            step_and_zero(*ours, *theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        for one in (*ours, *theirs):
            one.flush()
        values = alone.parameters()
        found = parameters(pipe.models)
        assert found and not [one for one in found if not torch.equal(found[one], values[one])], (name, stage)


def test_the_bits_of_one_process() -> None:
    on_ranks(4, trained, [("1F1B", 1, {}), ("ZBVZeroBubble", 2, {"tier": "cpu", "schedule": "overlap"})])


@pytest.mark.slow
def test_the_bits_of_one_process_at_other_stages_and_times() -> None:
    rows = [("InterleavedZeroBubble", 0, {}), ("1F1B", 2, {"schedule": zk.Delayed(after=1)}), ("DualPipeV", 1, {})]
    on_ranks(4, trained, rows)
