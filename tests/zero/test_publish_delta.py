"""`publish="delta"`: programs that nobody foresaw have the bits of "all" on all ranks, and ranks send fewer bytes."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
from publish_cases import PROGRAMS, STEPS, Overlap, Program, Slow, WrittenByAll, WrittenUncounted, same_bits
from tables import each
from torch import Tensor
from worlds import World, built, on_hybrid_threads, on_threads, ranked, refusal, says
from zero_cases import Net

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.comm import Handle
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text
from zerokern.zero import changed_spans


@ranked
def same(world: World, kind: type[Program]) -> None:
    expected, found = (kind(world, publish).run() for publish in ("all", "delta"))
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert same_bits([one], [other]), f"parameter {number}"
    there = world.exchange([[float(value) for value in one.view(-1)] for one in found])
    assert all(one == there[0] for one in there)


@each("size", [2, 3])
@each("kind", PROGRAMS)
def test_ranks_have_the_bits_of_all(kind: type[Program], size: int) -> None:
    on_threads(size, same, kind, timeout=60)


class WrittenByOneUncounted(WrittenUncounted):
    alike = False


class WrittenInOverlap(WrittenByOneUncounted):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6, "schedule": "overlap"}


class Replaced(WrittenByOneUncounted):
    """The program holds on to an optimizer that it has replaced."""

    def make(self) -> list[Any]:
        (self.last,) = super().make()
        super().loss(0).backward()
        self.last.step()
        self.model.zero_grad()
        (now,) = super().make()
        now.load_state_dict(self.last.state_dict())
        return [now]


@ranked
def loaded_and_goes_on(world: World) -> list[Tensor]:
    program = WrittenByOneUncounted(world, "delta")
    program.step(0)
    model = {name: value.clone() for name, value in program.model.state_dict().items()}
    state = copy.deepcopy(program.optimizers[0].state_dict())
    refusal(lambda: [program.step(step) for step in range(1, STEPS)], zk.StateError)
    program.model.load_state_dict(model)
    program.optimizers[0].load_state_dict(state)
    for step in range(STEPS, 2 * STEPS):
        program.step(step)
    return [param.detach().clone() for param in program.model.parameters()]


def test_after_a_load_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_spans, "COMPARED_EACH", 2)
    one, other = on_threads(2, loaded_and_goes_on, timeout=60)
    assert same_bits(one, other)


@ranked
def heard(world: World, kind: type[Program]) -> str:
    program = kind(world, "delta")
    message = refusal(program.run, zk.StateError)
    if kind is WrittenByOneUncounted:  # else the ranks have heard of it in other calls
        says(refusal(lambda: program.step(STEPS), zk.StateError), ["load a checkpoint"])
    return message


@each("size", [2, 3])
@each("kind", [WrittenByOneUncounted, WrittenInOverlap, Replaced])
def test_a_write_that_nobody_counts_is_heard_of_on_all_ranks(
    kind: type[Program], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_spans, "COMPARED_EACH", 2)
    for message in on_threads(size, heard, kind, timeout=60):
        says(message, ["parameters from '", "rank", "rank 0", "`.data`", "opt.refresh_masters()", "load the model"])


@each("kind", PROGRAMS)
def test_what_is_the_same_is_refused_by_nobody(kind: type[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_spans, "COMPARED_EACH", 1)
    on_threads(3, same, kind, timeout=60)


@each("kind", [Slow, Overlap, WrittenByAll])
def test_in_two_dimensions(kind: type[Program]) -> None:
    on_hybrid_threads(2, 2, same, kind)


@ranked
def bytes_of_steps(world: World, bucket_bytes: int, rates: list[float], schedule: str) -> list[float]:
    """What a rank sends of updated parameters, as parts of all, in the steps after others at a usual rate."""
    model = built(lambda: GPT(Shape(layers=2, width=64, context=32))).bfloat16()
    world.shard(model, stage=2, publish="delta", bucket_bytes=bucket_bytes)
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=1.0, schedule=schedule)
    batches = Batches(read_text(at_most=1 << 20), rows=2, context=32, seed=world.rank)
    group, found = sharding_of(model).group, []
    dense = sum((world.size - 1) * memory.nbytes // world.size for memory in sharding_of(model).memories)
    for rate in [1e-3] * 20 + rates:
        for one in optimizer.param_groups:
            one["lr"] = rate
        group.traffic.clear()
        model(*batches.next()).backward()
        optimizer.step()
        optimizer.flush()
        optimizer.zero_grad()
        found.append(group.traffic.total("gather") / dense)
    return found


@each("schedule", ["sync", "overlap"])
@each("bucket_bytes", [1 << 16, 8 << 20])
def test_bytes_of_fine_tuning(bucket_bytes: int, schedule: str) -> None:
    """A fifth, also where every other step changes nothing; where nearly all changes no more than all, and a header."""
    slow, turns = 8 + 6, [1e-6, 0.0] * 4
    for found in on_threads(2, bytes_of_steps, bucket_bytes, [1e-6] * slow + turns, schedule):
        assert max(found[:20]) < 1.01
        steady, taking_turns = found[28 : 20 + slow], found[20 + slow :]
        assert max(steady) < 0.2, found
        assert sum(taking_turns) / len(taking_turns) < 0.2, found


def test_what_does_not_fit_is_sent_once() -> None:
    """Whoever waits again, as after a Ctrl-C, waits for what has been sent."""
    calls: list[str] = []

    class Interrupted(Handle):
        def wait(self) -> None:
            calls.append("wait")
            if len(calls) == 4:
                raise KeyboardInterrupt

    @ranked
    def work(world: World) -> None:
        model = built(Net)
        world.shard(model, stage=1, publish="delta")
        memory = sharding_of(model).memories[0]
        if world.rank:
            return

        def send(full: Tensor) -> Handle:
            calls.append("send")
            full.view(2, -1)[1] = full.view(2, -1)[0]  # from the other rank
            return Interrupted()

        handle = next(iter(sharding_of(model).publisher.spans)).gather(send, None)
        memory.full.zero_()
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        handle.wait()

    on_threads(2, work)
    assert calls.count("send") == 2, calls


REFUSED = {
    "a word": ({"publish": "deltas"}, ["publish='deltas'", "'all'", "Did you mean 'delta'"]),
    "stage 0": ({"publish": "delta", "stage": 0}, ["publish='delta'", "'all' at stage 0"]),
    "stage 3": ({"publish": "delta", "stage": 3}, ["publish='delta'", "'all' at stage 3", "gathered"]),
}


@each("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    settings, words = REFUSED[case]
    says(refusal(lambda: zk.shard(built(Net), **settings), ValueError), words)


@ranked
def differently(world: World) -> str:
    publish = "delta" if world.rank else "all"
    return refusal(lambda: world.shard(built(Net), stage=2, publish=publish), zk.ZerokernError)


def test_ranks_that_say_something_else_are_told() -> None:
    for message in on_threads(2, differently):
        says(message, ["publish", "delta", "all"])


def test_alone_nothing_is_sent() -> None:
    expected, found = (Slow(World(0, 1), publish).run() for publish in ("all", "delta"))
    assert same_bits(expected, found)
