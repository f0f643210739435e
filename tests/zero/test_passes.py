"""What a step does at each stage is what its plan says, op by op: noted where it goes out to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from worlds import World, alone, built, full, on_threads, ranked, step_and_zero

import zerokern as zk
from zerokern.comm.group import Group
from zerokern.schedule import StepProgram
from zerokern.schedule.passes import Prefetch, step_of
from zerokern.zero.gradients import GradientBucket
from zerokern.zero.params import BucketMemory
from zerokern.zero.shard import shard_of
from zerokern.zero.sharding import Sharding

Said = tuple[str, str, int]
BUCKET_BYTES = 9000


class Layered(nn.Module):
    """Parameters of the root are used first and last, units differ in size, and one of them is frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32)) for width in (24, 40, 32, 16, 48)
        )
        self.end = nn.Linear(32, 8, bias=False)
        self.blocks[2][0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = x + block(x)
        return self.end(x)


class Noted:
    """What this thread's rank does, by the names that a plan has for it."""

    here = threading.local()

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.names: dict[int, str] = {}  # of what a bucket is called, by its memory
        self.reducing = ""
        Noted.here.now = self

    def watch(self, name: str, module: nn.Module) -> None:
        """A forward when it ends, a backward when it begins: before the model is sharded, to hear of it first."""

        def computed(_: nn.Module, args: Any, result: Tensor) -> Tensor:
            self.said.append(("Forward", name, 0))
            shown = result.view_as(result)
            result.register_hook(lambda grad: self.said.append(("Backward", name, 0)))
            return shown

        module.register_forward_hook(computed)

    def knows(self, sharding: Sharding) -> None:
        units = [unit.name or "root" for unit in sharding.runner.units] if sharding.runner else []
        for number, memory in enumerate(sharding.memories):
            name = units[memory.bucket.unit] if units else f"bucket {number}"
            self.names[id(memory)] = self.names[memory.full.untyped_storage()._cdata] = name

    def of_last_step(self) -> list[Said]:
        """Buckets of a unit that are gathered or released together are one op."""
        ends = [place for place, one in enumerate(self.said) if one[0] == "End"]
        mine = self.said[ends[-2] + 1 : ends[-1]]
        grouped = groupby(mine, key=lambda one: one[:2] if one[0] in ("Gather", "Release") else object())
        found = [list(ops) for _, ops in grouped]
        return [(*ops[0][:2], sum(op[2] for op in ops)) for ops in found]


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathers(gather: Callable, verb: str, self: Group, whole: Tensor, shard: Tensor | None = None) -> Any:
        now = Noted.here.now
        name = now.names.get(whole.untyped_storage()._cdata)
        if name is not None and not self.alone:
            now.said.append(("Gather" if shard is not None else "Publish", name, whole.nbytes))
        return gather(self, whole, shard)

    def reduces(reduce: Callable, self: GradientBucket, buffer: Tensor, scratch: Tensor | None) -> Any:
        now = Noted.here.now
        if not self.group.alone:
            name = now.names[id(self.memory)]
            now.said.append(("Reduce", name, buffer.nbytes))
            if self.replicated:  # an all-reduce is both
                now.said.append(("Gather", f"{name}, gradients", buffer.nbytes))
        return reduce(self, buffer, scratch)

    def releases(release: Callable, self: BucketMemory) -> None:
        if self.sharded and self.gathered:
            Noted.here.now.said.append(("Release", Noted.here.now.names[id(self)], self.nbytes))
        release(self)

    def wrapped(owner: type, name: str, call: Callable, *given: Any) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: call(original, *given, *args, **named))

    wrapped(Group, "all_gather", gathers, "Gather")
    wrapped(GradientBucket, "reduce", reduces)
    wrapped(BucketMemory, "release", releases)


def planned(program: StepProgram) -> list[Said]:
    gathered = {op.what: op.nbytes for op in program.ops if op.verb == "Gather"}
    return [(op.verb, op.what, gathered[op.what] if op.verb == "Release" else op.nbytes) for op in program.ops]


def watched(world: World, noted: Noted, stage: int) -> Layered:
    model = built(Layered)
    if stage == 3:
        names = [("root", model), *((f"blocks.{number}", block) for number, block in enumerate(model.blocks))]
    else:
        names = [("model", model)]
    for name, module in names:
        noted.watch(name, module)
    world.shard(model, stage=stage, bucket_bytes=BUCKET_BYTES)
    noted.knows(sharding_of(model))
    return model


def sharding_of(model: Layered) -> Sharding:
    home = shard_of(model.end.weight)
    assert home is not None
    return home.sharding


def step(world: World, noted: Noted, model: nn.Module, optimizer: Any, number: int, micros: int, whose: str) -> None:
    for micro in range(micros):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * number + 10 * micro + world.rank))
        model(x).square().mean().backward()
    noted.said.append(("Step", whose, 0))
    step_and_zero(optimizer)
    noted.said.append(("End", "", 0))


@ranked
def ran(world: World, stage: int, micros: int) -> tuple[list[Said], list[Said]]:
    noted = Noted()
    model = watched(world, noted, stage)
    optimizer = zk.AdamW(model.parameters(), lr=1e-3)
    for number in range(3):
        step(world, noted, model, optimizer, number, micros, "own shard" if stage else "everything")
    plan = zk.plan(
        built(Layered), stage=stage, world=world.size, accumulate=micros, bucket_bytes=BUCKET_BYTES, device="cpu"
    )
    return noted.of_last_step(), planned(plan.program)


@each("stage, size, micros", [(0, 2, 1), (0, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 2, 2), (3, 1, 2)])
def test_a_step_does_what_its_plan_says(stage: int, size: int, micros: int) -> None:
    for did, says in alone(ran, stage, micros) if size == 1 else on_threads(size, ran, stage, micros):
        assert did == says


AHEAD = [Prefetch(0), Prefetch(1), Prefetch(9), Prefetch(9, nbytes=24_000), Prefetch(2, nbytes=1)]


@ranked
def gathered_ahead(
    world: World, ahead: Prefetch
) -> tuple[list[Said], list[tuple[str, str]], int, int, dict[str, Tensor]]:
    noted = Noted()
    model = watched(world, noted, 3)
    runner = sharding_of(model).runner
    assert runner is not None
    runner.ahead = ahead
    optimizer = zk.AdamW(model.parameters(), lr=1e-3)
    for number in range(3):
        step(world, noted, model, optimizer, number, 1, "own shard")
    names = [unit.name or "root" for unit in runner.units]
    nbytes = [sum(memory.nbytes for memory in unit.memories) for unit in runner.units]
    says = [(verb, names[unit]) for verb, unit in step_of(range(1, len(names)), nbytes, ahead)]
    now = most = 0
    for verb, _, count in (did := noted.of_last_step()):
        now = now + count if verb == "Gather" else now - count if verb == "Release" else now
        most = max(most, now)
    return did, says, most, nbytes[0] + 2 * max(nbytes[1:]), full(model)


def test_however_far_ahead_units_are_gathered_the_bits_are_the_same() -> None:
    found = [on_threads(2, gathered_ahead, ahead)[0] for ahead in AHEAD]
    for did, says, _, _, _ in found:
        moved = [(verb, what) for verb, what, _ in did if verb not in ("Step", "Reduce")]
        assert moved == [one for one in says if one[0] != "Reduce"]
    for *_, params in found:
        assert all(torch.equal(params[name], one) for name, one in found[1][4].items())
    mosts = [most for _, _, most, _, _ in found]
    assert mosts[0] <= mosts[1] <= found[1][3], "by default at most two units besides the root's"
    assert mosts[1] < mosts[2] and mosts[3] <= 24_000 < mosts[2]
    assert found[4][0] == found[0][0], "where there is no room nothing is gathered before its turn"
