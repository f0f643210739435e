"""Everything that rests in a tier does so by the protocol alone: training on the toy tier has the bits of training
without it. What the protocol promises on each tier: `test_tier.py`."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from toy_tier import Toy
from waiting_device import played

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.core.errors import BudgetError, StateError
from zerokern.examples.played_device import PlayedDevice


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


FEW, MANY = 8, 1 << 12  # rows of 64 fp32: with many the inputs of a unit have 1 MiB, and are kept elsewhere


def trained(
    shard: dict[str, Any] | None, rows: int = FEW, steps: int = 4, device: PlayedDevice | None = None, **given: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    for param in model.parameters() if device is not None else ():
        device.own(param)
    if shard is not None:
        zk.shard(model, **shard)
    opt = zk.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, **given)
    for number in range(steps):
        torch.manual_seed(number)
        for part in torch.randn(2 * rows, 64).chunk(2):
            if device is not None:  # torch computes at once where a device would come behind what it was given
                device.synchronize()
            model(part).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    if device is not None:
        device.synchronize()
    state = opt.state_dict()["state"]
    with zk.gathered(model) if shard is not None else nullcontext():
        found = [param.detach().clone() for param in model.parameters()]
    return [*found, *(state[number]["exp_avg"].clone() for number in sorted(state))]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        torch.equal(getattr(one, "span", one).reshape(-1), getattr(other, "span", other).reshape(-1))
        for one, other in pairs
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of the same order have the same bits only with the same threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SCHEDULES = {"sync": "sync", "overlap": "overlap", "delayed": zk.Delayed(after=1)}


@functools.cache
def expected(stage: int | None, schedule: str, rows: int = FEW) -> list[Tensor]:
    """Everything stays where it computes."""
    kept = {"keep": "device"} if rows == MANY else {}
    return trained(None if stage is None else {"stage": stage, **kept}, rows, schedule=SCHEDULES[schedule])


@each("seed, schedule", itertools.product(range(3), SCHEDULES))
def test_state_rests_on_it(seed: int, schedule: str) -> None:
    toy = Toy(seed)
    assert same(trained(None, tier=toy, schedule=SCHEDULES[schedule]), expected(None, schedule))
    (state,) = toy.opened
    assert state.moved["state stored"] and state.moved["state fetched"]


@each("seed, schedule", enumerate(("sync", "overlap")))
def test_everything_rests_on_it(seed: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, gradients between backward and step, inputs of units, and state."""
    wanted = expected(3, schedule, MANY)
    monkeypatch.setattr("zerokern.zero.spilling.exceeds_half_of_memory", lambda nbytes: True)
    toy = Toy(seed)
    shard = {"stage": 3, "tier": toy, "keep": toy}
    assert same(trained(shard, MANY, tier=toy, schedule=SCHEDULES[schedule]), wanted)
    moved = sum((one.moved for one in toy.opened), Counter())
    roles = ("parameters", "gradients", "kept inputs", "state")
    assert all(moved[f"{role} {way}"] for role in roles for way in ("stored", "fetched")), moved


@each("schedule, place", [
    *itertools.product(SCHEDULES, ("state", "inputs")), ("sync", "parameters"), ("overlap", "parameters"),
])  # fmt: skip
def test_it_serves_a_device(schedule: str, place: str) -> None:
    """Through pinned memory: a ring of state, a ring of parameters, blocks of inputs."""
    rows = MANY if place == "inputs" else FEW
    toy, wanted = Toy(3), expected(3, schedule, rows)
    with played(poison=True) as device, pytest.MonkeyPatch.context() as patch:
        if place == "inputs":  # of which torch knows no device
            patch.setattr("zerokern.activations.keeping.driver_of", lambda tensor: device)
        shard = {"stage": 3, **{"parameters": {"tier": toy}, "inputs": {"keep": toy}, "state": {}}[place]}
        tier = toy if place == "state" else "cpu"
        assert same(trained(shard, rows, device=device, tier=tier, schedule=SCHEDULES[schedule]), wanted)
    assert toy.opened and all(one.moved for one in toy.opened)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    def made(toy: Toy) -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = zk.shard(Net(), stage=3, tier=toy)
        return model, zk.AdamW(model.parameters(), lr=1e-2, tier=toy, state_format="int8")

    def step(model: nn.Module, opt: Any) -> None:
        model(torch.ones(8, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()

    model, opt = made(Toy(1))
    for _ in range(2):
        step(model, opt)
    zk.save(tmp_path / "saved", model, opt)
    twin, other = made(Toy(2))
    zk.load(tmp_path / "saved", twin, other)
    for one in ((model, opt), (twin, other)):
        step(*one)
    with zk.gathered(model), zk.gathered(twin):
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_what_does_not_fit_changes_nothing() -> None:
    with pytest.raises(BudgetError, match="the toy is full"):
        zk.shard(Net(), stage=3, tier=Toy(budget=1 << 12))
    net = Net()
    opt = zk.AdamW(net.parameters(), tier=Toy(budget=1 << 12))
    net(torch.ones(2, 64)).sum().backward()
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(BudgetError, match="the toy is full"):
        opt.step()
    assert all(map(torch.equal, before, net.parameters())) and not any(opt.state.values())


def test_a_closed_one_says_so() -> None:
    net, toy = Net(), Toy()
    opt = zk.AdamW(net.parameters(), tier=toy)
    net(torch.ones(2, 64)).sum().backward()
    opt.step()
    opt.close()
    assert toy.opened[0]._closed
    with pytest.raises(StateError, match="close"):
        opt.step()


@each("given", ["nvme", 5, None, Path("swap"), "swap"])
def test_what_is_no_tier_is_refused(given: object) -> None:
    for make in (
        lambda: zk.AdamW(Net().parameters(), tier=given),
        lambda: zk.shard(Net(), stage=3, tier=given),
        lambda: zk.recompute(nn.Linear(2, 2), torch.ones(2, 2), keep=given),
    ):
        with pytest.raises(ValueError, match=r"must be 'device', 'cpu' or zk.Nvme\(path\)"):
            make()


def test_ranks_have_room_of_their_own() -> None:
    toy = Toy()
    model = zk.shard(Net(), stage=3, tier=toy)
    assert [one.name for one in toy.opened] == ["parameters: parameters-0"]
    assert sharding_of(model).rests.tier is toy.opened[0]
