"""keep= with several tiers: the latest inputs lie in the first that has room, budgets hold whatever comes, and
gradients have the bits of keep="device"."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from keep_cases import ROWS, WIDTH, Broken, batch, break_off, by, held_in, layers, plain, played, same, step, used_again
from tables import each
from torch import Tensor

import zerokern as zk
from zerokern.activations import keeping
from zerokern.activations.keeping import UNDER_WAY, Keeper
from zerokern.io.tier import NvmeTier
from zerokern.memory.order import Cascade, place_latest
from zerokern.planner.transformer import Transformer

NBYTES = ROWS * WIDTH * 4
SPLITS = (
    ("device:2MiB", "cpu"), ("device:2MiB", "disk"), ("cpu:2MiB", "disk"), ("device:1MiB", "cpu:2MiB", "disk"),
    ("device:512KiB", "cpu:9MiB", "disk"), ("device:64MiB", "cpu:512KiB", "disk"),
)  # fmt: skip


def order(split: tuple[str, ...], folder: Path) -> list[Any]:
    return [zk.Nvme(folder, ring_nbytes="1M") if tier == "disk" else tier for tier in split]


@contextmanager
def keeping_in(split: tuple[str, ...], folder: Path, *, device: bool) -> Iterator[Keeper]:
    """A keeper of tensors on a played device, or in host memory."""
    with played(stretch=0.001, poison=True) if device else nullcontext():
        keeper = Keeper(order(split, folder))
        yield keeper
        del keeper
        gc.collect()


def forward(model: Any, keeper: Keeper, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    hidden = x.clone().requires_grad_() * 1.0
    for layer in model:
        hidden = by(keeper)(layer, hidden)
    return hidden


def wait_for_all(keeper: Keeper) -> None:
    for kind, under_way in keeper._leaving.items():
        for reference in under_way:
            if (kept := reference()) is not None:
                kept.has_left(kind)


@pytest.mark.slow  # 11 s; the quick lane has random programs
@each("split", SPLITS)
@each("device", [True, False])
def test_the_same_bits(split: tuple[str, ...], device: bool, tmp_path: Path) -> None:
    model, x = layers(6), batch()
    expected, again = step(model, plain, x), used_again(layers(3), plain)
    with keeping_in(split, tmp_path, device=device) as keeper:
        for _ in range(2):
            assert same(step(model, by(keeper), x), expected)
        assert same(step(model, by(keeper, 3), x), step(model, by(None, 3), x))
        assert same(used_again(layers(3), by(keeper)), again)
        gc.collect()
        assert not held_in(keeper)


@pytest.mark.parametrize(
    "split, device, wanted",
    [
        (("device:2MiB", "cpu"), True, ["cpu", "cpu", "cpu", "device", "device"]),
        (("device:1MiB", "cpu:2MiB", "disk"), True, ["disk", "disk", "cpu", "cpu", "device"]),
        (("cpu:3MiB", "disk"), True, ["disk", "disk", "cpu", "cpu", "cpu"]),
        (("device:1MiB", "cpu:2MiB", "disk"), False, ["disk", "disk", "cpu", "cpu", "cpu"]),
        (("device:4MiB", "disk"), False, ["disk", "cpu", "cpu", "cpu", "cpu"]),
    ],
)
def test_the_latest_lie_in_the_fastest_tier_from_the_first_pass_on(
    split: tuple[str, ...], device: bool, wanted: list[str], tmp_path: Path
) -> None:
    """Six inputs, of which the last is at work; nobody has said their sizes before."""
    model = layers(6)
    with keeping_in(split, tmp_path, device=device) as keeper:
        for _ in range(2):
            hidden = forward(model, keeper, batch())
            turns = [turn() for turn in keeper._turns if turn()]
            where = {reference: keeper._kinds[number] for reference, number in keeper.resting.parts()}
            assert [where[turn.kept[0].reference] for turn in turns[:-1]] == wanted
            held = {kind: wanted.count(kind) * NBYTES for kind in wanted}
            wait_for_all(keeper)
            assert held_in(keeper) == held
            hidden.sum().backward()
            del hidden, turns, where
        gc.collect()
        assert not held_in(keeper)


@each("device", [True, False])
def test_budgets_hold_whatever_the_batch(device: bool, tmp_path: Path) -> None:
    """Counted from outside: the memory of inputs that is alive, blocks that were pinned, and bytes in the file."""
    model, most = layers(8), {"device": 2 << 20, "cpu": 3 << 20}
    at_work = 2 + UNDER_WAY  # what computes, what it gives, and what is on its way to each tier
    with keeping_in(("device:2MiB", "cpu:3MiB", "disk"), tmp_path, device=device) as keeper:
        alive: list[tuple[weakref.ref[Any], int]] = []
        gone: list[tuple[weakref.ref[Any], int]] = []  # the largest of each batch before, whose blocks may serve others

        def run(layer: Any, x: Tensor) -> Tensor:
            alive.append((weakref.ref(x.untyped_storage()), x.nbytes))
            found = by(keeper)(layer, x)
            largest = max(nbytes for _, nbytes in [*alive, *gone])
            here = sum(nbytes for storage, nbytes in alive if storage() is not None)
            in_memory = most["device"] + (0 if device else most["cpu"])
            assert here <= in_memory + at_work * largest, (here, in_memory)
            assert keeper.blocks.nbytes <= most["cpu"] + (2 * UNDER_WAY + 1) * largest
            for number, kind in enumerate(keeper._kinds):
                budget = in_memory if not device and kind == "cpu" else most.get(kind)
                assert budget is None or keeper.resting.held(number) <= budget, (kind, keeper.resting.held(number))
            return found

        for rows in (ROWS, ROWS // 2, 3 * ROWS, ROWS // 3, 2 * ROWS, ROWS):
            assert same(step(model, run, batch(rows)), step(model, plain, batch(rows)))
            gone.append(max(alive, key=lambda one: one[1]))
            alive.clear()


def test_what_stays_of_a_larger_memory_is_a_copy(tmp_path: Path) -> None:
    """Slices of a batch share its memory: one that stays would keep the memory of those that have left."""
    with keeping_in(("device:1MiB", "cpu"), tmp_path, device=True) as keeper:
        x = batch(4 * ROWS).requires_grad_() * 1.0
        memory = weakref.ref(x.untyped_storage())
        hidden = by(keeper, 4)(layers(1)[0], x)
        hidden = by(keeper, 4)(layers(1)[0], hidden)
        del x
        assert held_in(keeper) == {"device": NBYTES, "cpu": 3 * NBYTES}
        wait_for_all(keeper)
        assert memory() is None
        hidden.sum().backward()


@each("where", ["forward", "recompute", "backward"])
@each("split", SPLITS[3:5])
def test_exceptions_give_budgets_back(where: str, split: tuple[str, ...], tmp_path: Path) -> None:
    model, x = layers(5), batch()
    with keeping_in(split, tmp_path, device=True) as keeper:
        for number in (1, 4):
            break_off(model, keeper, where, number)
            gc.collect()
            assert not held_in(keeper) and not any(map(keeper.resting.held, range(3)))
        assert same(step(model, by(keeper), x), step(model, plain, x))


def as_far_as_it_goes(model: Any, keeper: Keeper, x: Tensor, most: int, why: str) -> Tensor:
    """What so many layers give, behind which one more is refused."""
    hidden = x.clone().requires_grad_() * 1.0
    for layer in model[:most]:
        hidden = by(keeper)(layer, hidden)
    with pytest.raises(zk.ZerokernError, match=why):
        by(keeper)(model[most], hidden)
    return hidden


@each("device", [True, False])
def test_a_full_disk_loses_nothing(device: bool, tmp_path: Path) -> None:
    """What has no room anywhere is refused when it would move; what was kept before is still there."""
    with played(stretch=0.001, poison=True) if device else nullcontext():
        memory = ["device:1MiB", "cpu:1MiB"] if device else ["cpu:2MiB"]
        keeper = Keeper([*memory, zk.Nvme(tmp_path, ring_nbytes="1M", budget="1536K")])
        model, x = layers(8, dropout=0.0), batch()
        reached = 4  # one at work, one in each tier
        hidden = as_far_as_it_goes(model, keeper, x, reached, "kept inputs")
        mine = torch.autograd.grad(hidden.square().sum(), list(model[:reached].parameters()))
        hidden = x.clone().requires_grad_() * 1.0
        for layer in model[:reached]:
            hidden = layer(hidden)
        assert same(list(mine), list(torch.autograd.grad(hidden.square().sum(), list(model[:reached].parameters()))))
        del hidden
        gc.collect()
        assert not held_in(keeper)
        del keeper


@pytest.mark.parametrize("device", [True, False])
def test_a_write_that_fails_is_told_and_blocks_still_have_what_there_is(
    device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping_in(("cpu:1MiB", "disk"), tmp_path, device=device) as keeper:
        model, store, calls = layers(8, dropout=0.0), NvmeTier.store, iter(range(99))

        class Failing:
            def wait(self) -> None:
                raise zk.ZerokernError("the disk is gone")

            def done(self) -> bool:
                return True

        def fails(*given: Any) -> Any:
            return Failing() if next(calls) == 1 else store(*given)

        monkeypatch.setattr(NvmeTier, "store", fails)
        hidden = as_far_as_it_goes(model, keeper, batch(), 5, "the disk is gone")
        if device:  # the bytes are in their block
            hidden.sum().backward()
        del hidden
        gc.collect()
        assert not held_in(keeper)


def test_inputs_that_all_layers_share_are_the_youngest_of_them(tmp_path: Path) -> None:
    model, scale = layers(6), {"by": (batch(seed=9), "text")}
    expected = step(model, plain, batch(), scale=scale)
    with keeping_in(("device:2MiB", "cpu"), tmp_path, device=True) as keeper:
        assert same(step(model, by(keeper), batch(), scale=scale), expected)
        assert keeper.moved_nbytes == 4 * NBYTES  # of five that left, and what all have, two stay


def test_generation_between_costs_nothing(tmp_path: Path) -> None:
    model, x = layers(5), batch()
    with keeping_in(("device:1MiB", "cpu:1MiB", "disk"), tmp_path, device=True) as keeper:
        hidden = forward(model, keeper, x)
        held = held_in(keeper)
        with torch.no_grad():
            for _ in range(3):
                forward(model, keeper, x)
        assert held_in(keeper) == held
        hidden.sum().backward()


def test_the_first_tensor_on_a_device_divides_the_budgets(tmp_path: Path) -> None:
    """Before, what lies in host memory may fill both; afterwards it has the host's, and the rest moves on."""
    with keeping_in(("device:2MiB", "cpu:1MiB", "disk"), tmp_path, device=True) as keeper:
        on_device = keeping.driver_of
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeping, "driver_of", lambda tensor: None)
            first = forward(layers(4, dropout=0.0), keeper, batch())
            assert held_in(keeper) == {"cpu": 3 * NBYTES}
        patch.setattr(keeping, "driver_of", on_device)
        second = forward(layers(4, dropout=0.0), keeper, batch())
        assert keeper.resting.held(0) <= 2 * NBYTES and keeper.resting.held(1) <= NBYTES
        for hidden in (first, second):
            hidden.sum().backward()


@pytest.mark.parametrize(
    "keep, said",
    [
        ([], "It is empty"),
        (["device:auto", "cpu"], "the budget in keep"),
        (["cpu:1GiB"], "The last tier takes what is left"),
        (["cpu", "device"], "They come in the order"),
        (["device", "cpu"], "without a budget takes everything"),
        ("cpu:1GiB", "The last tier takes what is left"),
        (["device:1GiB", "gpu"], "keep='gpu'"),
    ],
)
def test_what_is_refused(keep: Any, said: str) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    for call in (lambda: zk.shard(model, keep=keep), lambda: zk.recompute(model[0], torch.ones(2, 2), keep=keep)):
        with pytest.raises(ValueError, match="keep") as refused:
            call()
        assert said in str(refused.value), refused.value


def test_a_list_of_one_is_that_one() -> None:
    keeper = Keeper(["cpu"])
    assert keeper.order.tiers == ("cpu",)
    x = batch().requires_grad_()
    zk.recompute(layers(1)[0], x, keep=["device"]).sum().backward()
    zk.recompute(layers(1)[0], x, keep=("device:1MiB", "cpu")).sum().backward()
    assert x.grad is not None


@each("micro", [1, 3])
@each("split, device", [
    (("device:13MiB", "cpu:20MiB", "disk"), True), (("device:13MiB", "cpu"), True), (("device:3MiB", "disk"), True),
    (("cpu:20MiB", "disk"), True), (("device:13MiB", "cpu:9MiB", "disk"), False), (("cpu", ), True),
])  # fmt: skip
def test_a_plan_counts_what_rests(split: tuple[str, ...], device: bool, micro: int, tmp_path: Path) -> None:
    """By tier, of seven layers whose inputs have 6 MiB; beside the memory of inputs that is alive."""
    shape = Transformer(7, WIDTH, heads=1, batch=6, seq=ROWS, itemsize=4)
    asked = ["nvme" if tier == "disk" else tier for tier in split]
    planned = zk.plan(shape, param_dtype="fp32", keep=asked, micro=micro, device="cuda" if device else "cpu")
    alive: list[weakref.ref[Any]] = []
    with keeping_in(split, tmp_path, device=device) as keeper:
        hidden = batch(6 * ROWS).view(6, ROWS, WIDTH).requires_grad_() * 1.0
        for layer in layers(7):
            alive.append(weakref.ref(hidden.untyped_storage()))
            hidden = by(keeper, micro)(layer, hidden)
        wait_for_all(keeper)
        names = {"disk": "nvme", "cpu": "cpu" if device else "device"}
        found = {names.get(kind, kind): nbytes for kind, nbytes in held_in(keeper).items()}
        assert found == {tier: nbytes for tier, nbytes in planned.kept_in.items() if nbytes}
        assert planned.moved("up") == device * (sum(found.values()) - found.get("device", 0))
        assert planned.moved("read") == found.get("nvme", 0)
        here = sum(one() is not None for one in alive)
        if micro == 1:  # else slices that stay are copies
            assert here == 1 + planned.kept_in.get("device", 0) // (6 << 20)
        hidden.sum().backward()


# the bookkeeping alone


class TestCascade:
    @pytest.mark.parametrize("seed", range(20))
    def test_against_what_it_promises(self, seed: int) -> None:
        """Parts of any size come, are used again and go, moves fail: budgets hold, and of parts that could lie in one
        tier none is in a slower one than an older part of its size."""
        draw = random.Random(seed)
        budgets = [draw.randrange(0, 60), draw.randrange(0, 90), None][draw.randrange(2) :]
        where: dict[int, int] = {}
        sizes: dict[int, int] = {}
        fails = False

        def move(part: int, number: int) -> int:
            if fails and draw.random() < 0.3:
                raise Broken
            assert where.get(part, -1) < number, "no part goes back, or moves twice"
            where[part] = number
            return sizes[part] + (draw.randrange(3) if number == 1 and larger else 0)

        cascade, age = Cascade(budgets, move), 0
        uniform, larger = seed % 2, seed % 3 == 0
        for _ in range(300):
            if where and draw.random() < 0.4:
                part = draw.choice(list(where))
                if draw.random() < 0.3:
                    cascade.add(part, sizes[part])
                else:
                    cascade.discard(part)
                    del where[part], sizes[part]
            else:
                age += 1
                fails = not larger and draw.random() < 0.2
                sizes[age] = 10 if uniform else draw.randrange(1, 40)
                try:
                    cascade.add(age, sizes[age])
                except Broken:
                    if age not in where:
                        cascade.discard(age)
                        del sizes[age]
            assert dict(cascade.parts()) == where
            for number, budget in enumerate(budgets):
                held = [sizes[part] for part, at in where.items() if at == number]
                assert cascade.held(number) >= sum(held) and (budget is None or cascade.held(number) <= budget)

    def test_equal_parts_fill_tiers_from_the_last_on(self) -> None:
        for count in range(9):
            places = place_latest([10] * count, [25, 31, None])
            assert places == ([2] * 9 + [1] * 3 + [0] * 2)[14 - count :]
