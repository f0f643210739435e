"""Converts a plan's buckets to spans, which the simulator computes, fetches, updates and stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerokern.planner.footprint import Footprint, lanes_to
from zerokern.planner.model import BucketSize
from zerokern.planner.recipe import itemsize
from zerokern.schedule import Span
from zerokern.schedule.passes import ROOT
from zerokern.zero.partition import shards_parameters, shards_state

__all__ = ["SPANS", "StepShape"]

SPANS = 32  # more of them change a step by less than one of them takes


@dataclass(frozen=True)
class Part:
    """Elements that are fetched, updated and stored together, `own_numel` of them by this rank. `encloses`: they belong
    to no unit, and are needed by all."""

    numel: int
    own_numel: int
    dtype: str
    trainable: bool
    rests: bool = False
    encloses: bool = False


class StepShape:
    """A plan's buckets as at most about `count` spans, for steps of any number of tokens."""

    def __init__(self, plan: Footprint, count: int) -> None:
        self.plan = plan
        self.accumulate = plan.settings.accumulate
        rests = plan.recipe.rests
        self.flops = 6 if plan.recipe.keep is None else 8
        self.passes = self.accumulate if rests else 1
        count = max(4, count // self.passes)
        self.has_transfers = rests or plan.recipe.tier == "nvme"
        self.parts = list(_merged(list(_parts(plan)), max(1, -(-plan.numel // count))))
        self.stays = list(self._stays(plan.buckets.last_unit_nbytes if rests else 0))[::-1]
        self.kept = plan.kept // self.passes

    def _stays(self, last: int) -> Iterator[int]:
        """Yields, for each part from the last on, the bytes that stay from forward to backward: those of the last unit
        and of the root."""
        for part in reversed(self.parts):
            nbytes = part.own_numel * itemsize(part.dtype)
            yield nbytes if part.encloses else min(last, nbytes)
            last -= min(last, nbytes)

    def spans(self, tokens: int) -> list[Span]:
        """Returns the spans. Gradients leave in the last micro-batch, whose backward begins with the compute of earlier
        ones."""
        last = tokens / self.accumulate
        spans = [self._span(number, part, last) for number, part in enumerate(self.parts)]
        if self.plan.recipe.rests:
            return spans
        before = sum(span.forward_flops + span.backward_flops for span in spans) * (self.accumulate - 1)
        return [*spans[:-1], replace(spans[-1], backward_flops=spans[-1].backward_flops + before)]

    def at_once(self, spans: Sequence[Span]) -> list[Span]:
        """Returns the same spans with all passes merged, as a step without offload has them."""
        times = self.passes
        return [
            replace(span, forward_flops=times * span.forward_flops, backward_flops=times * span.backward_flops)
            for span in spans
        ]

    def _span(self, number: int, part: Part, tokens: float) -> Span:
        recipe, settings, stage = self.plan.recipe, self.plan.settings, self.plan.stage
        compute = 2.0 * part.numel * tokens
        again = compute if self.flops > 6 else 0.0
        at_rest = self._at_rest(number, part)
        if not part.trainable:
            return Span(f"{number}", 0, forward_flops=compute, backward_flops=compute + again, **at_rest)
        wire = itemsize(recipe.wire_dtype(part.dtype))
        sent = (settings.world - 1) / settings.world
        crosses = not (recipe.rests and settings.device == "cpu")
        reductions = 1 if settings.no_sync else settings.accumulate
        reduced = part.numel * wire * sent * reductions * (1 if shards_state(stage) else 2)
        left = part.numel / settings.world if shards_state(stage) else part.numel
        reduced += 2 * left * wire * (settings.replicate - 1) / settings.replicate * reductions
        gathers = (2 if shards_parameters(stage) else 1) if shards_state(stage) else 0
        return Span.of(
            f"{number}",
            part.own_numel,
            grad_nbytes=part.own_numel * wire,
            param_nbytes=part.own_numel * itemsize(part.dtype),
            state_nbytes=part.own_numel * recipe.state_nbytes(part.dtype),
            own_master=recipe.master_of(part.dtype) != "fp32",
            forward_flops=compute,
            fetched=crosses,
            stored=crosses and not part.rests,
            backward_flops=2 * compute + again,
            reduce_nbytes=round(reduced),
            gather_nbytes=round(part.numel * itemsize(part.dtype) * sent * gathers),
            gathered_again=shards_parameters(stage),
            unit=ROOT if part.encloses else None,
            **at_rest,
        )

    def _at_rest(self, number: int, part: Part) -> dict[str, Any]:
        """Returns the bytes of a part that rest off the device, and the lanes that they are fetched through."""
        recipe, settings = self.plan.recipe, self.plan.settings
        found: dict[str, Any] = {}
        if part.trainable and recipe.tier == "nvme":
            found["record_nbytes"] = round(part.own_numel * recipe.state_nbytes(part.dtype))
        if part.rests:
            found["fetch_nbytes"] = part.own_numel * itemsize(part.dtype)
            found["fetch_lanes"] = lanes_to(recipe.param_tier, settings.device)
            found["stays_nbytes"] = self.stays[number]
        if part.trainable and settings.spills:
            found["spill_nbytes"] = part.own_numel * itemsize(recipe.wire_dtype(part.dtype))
        if self.kept and recipe.rests:
            found["keep_nbytes"] = self.kept // max(1, len(self.parts) - 1)
            found["keep_lanes"] = lanes_to(recipe.keep, settings.device)
        return found


def _parts(plan: Footprint) -> Iterator[Part]:
    for load in plan.buckets.sizes:
        rests = plan.recipe.rests
        for part in _pieces(load, shards_state(plan.stage)):
            yield replace(part, rests=rests, encloses=plan.buckets.in_units and load.unit == ROOT)


def _pieces(load: BucketSize, is_sharded: bool) -> Iterator[Part]:
    """Splits buckets into at most `SPANS` parts."""
    count = min(SPANS, max(load.count, 1))
    for number in range(count):
        numel, own = (total * (number + 1) // count - total * number // count for total in (load.numel, load.own_numel))
        yield Part(numel, own if is_sharded else numel, load.dtype, load.trainable)


def _merged(parts: Sequence[Part], least: int) -> Iterator[Part]:
    """Merges neighbours of one kind until they have at least this many elements."""
    held: Part | None = None
    for part in parts:
        kind = part.dtype, part.trainable, part.encloses
        if held is not None and (held.dtype, held.trainable, held.encloses) == kind and held.numel < least:
            held = replace(held, numel=held.numel + part.numel, own_numel=held.own_numel + part.own_numel)
            continue
        if held is not None:
            yield held
        held = part
    if held is not None:
        yield held
