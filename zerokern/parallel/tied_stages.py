"""Weights of which several stages of a pipeline have a copy: their gradients are added up once in a step.

Each copy is a parameter of its own, divided with its stage. Spans of gradients that are the same on all of them go
straight from rank to rank; where the stages cut a weight differently, its gradient is gathered before. That is so only
where it shares a bucket with others, so it is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerokern.comm import Group, during, user_group
from zerokern.core.errors import StateError, got
from zerokern.zero.kinds import local_of, present
from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.sharded import Sharded
from zerokern.zero.tiers import fetched

__all__ = ["Ties", "check_tied", "check_tied_still_there"]

STEP = "the end of a pipeline's step"
PART_NUMEL = 1 << 22  # that go from rank to rank at once, through memory of that size
SAMPLE = 1 << 12  # elements of a weight that are compared in each step
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def check_tied(tied: Any, module: nn.Module) -> dict[str, nn.Parameter]:
    """Checks `tied=`: parameters of this module by name."""
    if tied is None:
        return {}
    if not isinstance(tied, Mapping):
        do = 'tied={"words.weight": part.head.weight}, by the name in the whole model'
        raise TypeError(got("tied", tied, "parameters by name", do))
    own = {id(param) for param in module.parameters()}
    for name, param in tied.items():
        if not isinstance(name, str) or id(param) not in own:
            raise ValueError(got(f"tied[{name!r}]", type(param).__name__, "a parameter of this stage's module"))
    if len({id(param) for param in tied.values()}) < len(tied):
        raise ValueError(got("tied", list(tied), "one name for each parameter"))
    return dict(tied)


def check_tied_still_there(tied: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Refuses a step whose module no longer has the tied parameters."""
    own = set(map(id, module.parameters())) if tied else ()
    for name, param in tied.items():
        if id(param) not in own:
            raise StateError(
                f"the module of this pipeline stage has another parameter now than tied= has for {name!r}; make the "
                "stage anew with what it has"
            )


@dataclass
class StageCopy:
    """One stage's copy of a tied weight, on this rank."""

    stage: int
    param: nn.Parameter
    shard: Shard

    @property
    def bucket(self) -> Any:
        return self.shard.gradients

    @property
    def group(self) -> Group:
        """The ranks that divide it."""
        return self.shard.sharding.group if self.bucket is None else self.bucket.group

    @property
    def grad(self) -> Any:
        return self.bucket.owner(self.shard.place).grad

    @property
    def span(self) -> Tensor:
        """This rank's span of its gradient."""
        self.bucket.shown.land()
        return self.bucket.shown.span(self.shard.place)

    def described(self, name: str) -> dict[str, Any]:
        placed = self.shard.placed
        return {
            "name": name,
            "stage": self.stage,
            "shape": list(self.shard.shape),
            "dtype": str(self.shard.piece.dtype),
            "gradients": "none, for it is frozen" if self.bucket is None else str(self.bucket.dtype),
            "placements": "none" if placed is None else f"{placed.placements}, {list(placed.sizes)} here",
            "dp": [self.group.rank, self.group.size],
            "cuts": self._cuts(),
            "rests": self.shard.sharding.rests is not None,
        }

    def _cuts(self) -> list[int]:
        """Where the part of each rank begins, in elements."""
        if self.bucket is None or self.bucket.replicated:
            return [0]
        place, each = self.bucket.entries[self.shard.place].place, self.bucket.memory.bucket.shard_numel
        return [min(max(rank * each - place.offset, 0), place.numel) for rank in range(self.group.size)]

    def digest(self, stride: int) -> Tensor:
        """Returns a checksum of every `stride`-th value, the same on all ranks however the weight is cut."""
        piece = self.shard.piece
        self.shard.sharding.publisher.finish()
        with present(piece, written=False):
            flat, first = local_of(piece).detach().reshape(-1), -self.shard.start % stride
            total = torch.zeros(1, dtype=torch.int64, device=flat.device)
            bits = flat[first::stride].view(BITS[flat.element_size()])
            for begin in range(0, len(bits), PART_NUMEL):
                some = bits[begin : begin + PART_NUMEL].to(torch.int64)
                places = torch.arange(begin, begin + len(some), device=some.device)
                total += some.mul_(places.mul_(stride).add_(self.shard.start + first + 1).mul_(ODD)).sum()
        total = total.to(self.group.device)
        if not self.shard.sharding.replicated:
            self.group.everyone.all_reduce(total, "sum").wait()
        return total.bitwise_and_((1 << 62) - 1)


class Tie:
    """One tied weight: its copies on this rank, and the group of ranks with copies."""

    def __init__(
        self, name: str, copies: Sequence[StageCopy], told: Sequence[dict[str, Any]], group: Group | None
    ) -> None:
        self.name, self.copies, self.group = name, list(copies), group
        self.trained = copies[0].bucket is not None
        self.alike = self.trained and all(one["cuts"] == told[0]["cuts"] for one in told)
        self.rests = any(one["rests"] for one in told)

    def compared(self, stride: int) -> Tensor:
        """Two numbers, whose sum is 0 where the values of all copies are the same."""
        each = torch.cat([copy.digest(stride) for copy in self.copies])
        word = torch.stack([each.amax(), -each.amin()])
        if self.group is not None:
            with during(STEP, of=f"whether stages have the same {self.name!r}"):
                self.group.all_reduce(word, "max").wait()
        return word

    @torch.no_grad()
    def add_up(self) -> None:
        """The sum of the gradients of all copies, in each of them; a copy may have none."""
        for copy in self.copies:
            copy.bucket.shown.settle()
            if copy.grad is None:
                copy.bucket.give([copy.shard.place])
                copy.bucket.shown.held.add(copy.shard.place)
                with fetched([copy.grad], written=[copy.grad]):
                    copy.span.zero_()
        grads = [copy.grad for copy in self.copies]
        with fetched(grads, written=grads):
            spans = [copy.span for copy in self.copies]
            if self.alike:
                self._sum(spans)
            else:
                wholes = [_whole(grad) for grad in grads]
                self._sum(wholes)
                for copy, span, whole in zip(self.copies, spans, wholes, strict=True):
                    start = 0 if copy.bucket.replicated else copy.shard.start
                    span.copy_(whole[start : start + span.numel()])
            torch.autograd.graph.increment_version(spans)

    def _sum(self, vectors: Sequence[Tensor]) -> None:
        total = vectors[0]
        for other in vectors[1:]:
            total.add_(other.to(total.device))
        for part in total.split(PART_NUMEL) if self.group is not None else ():
            there = part.to(self.group.device)  # type: ignore[union-attr]
            with during(STEP, of=f"the gradient of {self.name!r}, which stages share"):
                self.group.all_reduce(there, "sum").wait()  # type: ignore[union-attr]
            if there is not part:
                part.copy_(there)
        for other in vectors[1:]:
            other.copy_(total)


class Ties:
    """The tied weights of this rank's stages. All ranks of the pipeline make one, at the end of the first step."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._pg = stages[0].group or dist.group.WORLD
        self._everyone = _joined(self._pg, stages[0].device)
        for param in (param for stage in stages for param in stage.submod.parameters()):
            shard_of(param).set_stage_count(1)  # type: ignore[union-attr]
        here: dict[str, list[StageCopy]] = {}
        for stage in sorted(stages, key=lambda one: one.stage_index):
            for name, param in stage.tied.items():
                shard = shard_of(param)
                assert shard is not None  # the stage has looked
                here.setdefault(name, []).append(StageCopy(stage.stage_index, param, shard))
        each = self._everyone.exchange([copy.described(name) for name, some in here.items() for copy in some])
        told: dict[str, list[dict[str, Any]]] = {}
        for rank, some in enumerate(each):
            for one in some:
                told.setdefault(one["name"], []).append({**one, "rank": rank})
        for name, some in sorted(told.items()):
            _refuse_different(name, some)
        self._groups: dict[tuple[int, ...], Group | None] = {}
        self._ties = [Tie(name, here[name], told[name], self._group_of(told[name])) for name in sorted(here)]
        words = [(tie, tie.compared(1).tolist()) for tie in self._ties]
        mine = [tie.name for tie, word in words if sum(word)]
        differ = [name for some in self._everyone.exchange(mine) for name in some]
        if differ:
            raise StateError(
                f"pipeline stages have different values of {min(differ)!r}, which they share, in their first step; cut "
                "all of them from one model, or load all of them from one, before the optimizer is made"
            )
        self._last: list[tuple[Tie, Tensor]] = []  # how they compared in the last step
        for tie in self._ties:
            for copy in tie.copies:
                copy.shard.set_stage_count(len(told[tie.name]))

    def _group_of(self, told: Sequence[dict[str, Any]]) -> Group | None:
        """The ranks that have copies of a weight; None where all copies are here."""
        ranks = tuple(sorted({one["rank"] for one in told}))
        if ranks not in self._groups:
            found: Group | None = self._everyone if len(ranks) > 1 else None
            if 1 < len(ranks) < self._everyone.size:
                every = dist.get_process_group_ranks(self._pg)
                some = dist.new_group([every[rank] for rank in ranks], use_local_synchronization=True)
                found = _joined(some, self._everyone.device)
            self._groups[ranks] = found
        return self._groups[ranks]

    def add_up(self) -> None:
        """All ranks that have any come here at the end of their step, when what they have to send is on its way."""
        for tie, word in self._last:
            if sum(word.tolist()):
                raise StateError(
                    f"{tie.name!r}, which pipeline stages share, has other values at one of them since the last step; "
                    "every stage's optimizer updates its copy: give all of them the same lr, weight_decay and other "
                    "options for it, and the same group=, so that all of them skip a step or none does"
                )
        trained = [tie for tie in self._ties if tie.trained]
        for group in dict.fromkeys(tie.group for tie in trained):
            some = [tie for tie in trained if tie.group is group]
            there = [any(copy.grad is not None for copy in tie.copies) for tie in some]
            frozen = [any(not copy.param.requires_grad for copy in tie.copies) for tie in some]
            if group is not None:
                marks = torch.tensor([there, frozen], dtype=torch.uint8, device=group.device)
                with during(STEP, of="which gradients that stages share there are"):
                    group.all_reduce(marks, "max").wait()
                if group.device.type == "cpu" or any(frozen) or not all(there):  # a device is waited for only then
                    there, frozen = marks.bool().tolist()
            for tie, one, other in zip(some, there, frozen, strict=True):
                if one and other:
                    raise StateError(
                        f"{tie.name!r}, which pipeline stages share, is trained at one of them and frozen at another; "
                        "call requires_grad_() on all copies alike"
                    )
                if one:
                    tie.add_up()
        compared = [tie for tie in trained if not tie.rests]
        self._last = [(tie, tie.compared(1 + tie.copies[0].shard.shape.numel() // SAMPLE)) for tie in compared]


def _joined(pg: Any, device: torch.device) -> Group:
    group = user_group(pg, device)
    assert group is not None
    return group.join()[0]


def _whole(grad: Tensor) -> Tensor:
    whole = grad.gather_full(grad) if isinstance(grad, Sharded) and grad.gather_full is not None else grad
    return local_of(whole).detach().reshape(-1)


def _refuse_different(name: str, told: Sequence[dict[str, Any]]) -> None:
    """All ranks see the same, and all raise."""
    if len(told) == 1:
        raise StateError(
            f"pipeline stage {told[0]['stage']} names {name!r} in tied=, and no other stage does; allowed: every stage "
            "that has a copy of the weight gives it by one name"
        )
    for key in ("shape", "dtype", "gradients", "placements", "dp"):
        other = next((one for one in told if one[key] != told[0][key]), None)
        if other is not None:
            raise StateError(
                f"{name!r}, which pipeline stages {told[0]['stage']} and {other['stage']} share, has {key} "
                f"{told[0][key]} at the one and {other[key]} at the other; allowed: the same at all of them"
            )
