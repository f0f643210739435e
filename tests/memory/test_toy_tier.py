"""A tier of one file: bytes in a dict, late and in random order. Whatever rests does so by the protocol alone."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from waiting_device import played

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.core.errors import BudgetError, StateError
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory import Arena, Wanted


class Toy:
    """What `tier=` and `keep=` are given."""

    ring_nbytes = 1 << 20

    def __init__(self, seed: int = 0, budget: int | None = None) -> None:
        self.seed, self.budget, self.opened = seed, budget, []

    def open(self, name: str, owner: str) -> ToyTier:
        self.opened.append(ToyTier(f"{owner}: {name}", self.seed + len(self.opened), self.budget))
        return self.opened[-1]


class ToyPart:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.last, self.evicted = wanted, None, False


class ToyTicket:
    def __init__(self, tier: ToyTier, part: ToyPart, act: Callable[[], None], after: Any) -> None:
        self.tier, self.part, self.act, self.before = tier, part, act, [one for one in (part.last, after) if one]
        self.ended = False

    def wait(self) -> None:
        self.tier.run_until(self)

    def done(self) -> bool:
        self.tier.run_one()
        return self.ended


class ToyTier:
    """Nothing moves before somebody waits for something, and then what else may move comes first, by chance."""

    gives_way: Callable[[], str] | None = None

    def __init__(self, name: str, seed: int, budget: int | None) -> None:
        self.name, self.budget = name, budget
        self.bytes: dict[ToyPart, bytes] = {}
        self.moved = Counter[str]()  # bytes by role and direction
        self._parts: set[ToyPart] = set()
        self._waiting: list[ToyTicket] = []
        self._draw, self._lock, self._closed = random.Random(seed), threading.RLock(), ""

    def __repr__(self) -> str:
        return f"the toy {self.name!r}"

    def open(self, arena: Arena | None = None) -> None:
        if self._closed:
            raise StateError(self._closed)

    def close(self, because: str) -> None:
        self._closed = because

    def lay_out(self, wanted: Sequence[Wanted]) -> list[ToyPart]:
        self.open()
        if self.budget is not None and sum(self.held().values()) + sum(one.nbytes for one in wanted) > self.budget:
            raise BudgetError("the toy is full")
        made = [ToyPart(one) for one in wanted]
        self._parts.update(made)
        return made

    def store(self, part: ToyPart, value: Tensor, after: Any = None) -> ToyTicket:
        assert (value.shape, value.dtype) == part.wanted[1:] and value.is_contiguous() and value.device.type == "cpu"

        def act() -> None:
            self.bytes[part] = ctypes.string_at(value.data_ptr(), value.nbytes)
            self.moved[f"{part.wanted.role} stored"] += value.nbytes

        return self._ask(part, act, after)

    def fetch(self, part: ToyPart, out: Tensor, after: Any = None) -> ToyTicket:
        assert (out.shape, out.dtype) == part.wanted[1:] and out.is_contiguous() and out.device.type == "cpu"

        def act() -> None:
            ctypes.memmove(out.data_ptr(), self.bytes[part], out.nbytes)
            self.moved[f"{part.wanted.role} fetched"] += out.nbytes

        return self._ask(part, act, after)

    def evict(self, parts: Iterable[ToyPart]) -> None:
        with self._lock:
            for part in parts:
                while part.last is not None and not part.last.ended:
                    self.run_until(part.last)
                part.evicted = True
                self._parts.remove(part)
                self.bytes.pop(part, None)

    def held(self) -> dict[str, int]:
        held: Counter[str] = Counter()
        for part in self._parts:
            held[part.wanted.role] += part.wanted.nbytes
        return dict(held)

    def _ask(self, part: ToyPart, act: Callable[[], None], after: Any) -> ToyTicket:
        self.open()
        with self._lock:
            assert not part.evicted and part in self._parts, f"{part.wanted} is not here"
            ticket = part.last = ToyTicket(self, part, act, after)
            self._waiting.append(ticket)
            return ticket

    def run_one(self) -> None:
        with self._lock:
            ready = [one for one in self._waiting if all(before.ended for before in one.before)]
            if ready:
                one = self._draw.choice(ready)
                self._waiting.remove(one)
                one.act()
                one.ended = True
                one.act = one.before = None

    def run_until(self, ticket: ToyTicket) -> None:
        with self._lock:
            while not ticket.ended:
                self.run_one()


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


ROWS = 1 << 12  # of 64 fp32: the inputs of a unit have 1 MiB, and are kept elsewhere


def trained(
    shard: dict[str, Any] | None, steps: int = 4, device: PlayedDevice | None = None, **given: Any
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
        for part in torch.randn(2 * ROWS, 64).chunk(2):
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


@each("seed, schedule", itertools.product(range(3), SCHEDULES))
def test_state_rests_on_it(seed: int, schedule: str) -> None:
    expected = trained(None, tier="device", schedule=SCHEDULES[schedule])
    toy = Toy(seed)
    assert same(trained(None, tier=toy, schedule=SCHEDULES[schedule]), expected)
    (state,) = toy.opened
    assert state.moved["state stored"] and state.moved["state fetched"]


@each("seed, schedule", itertools.product(range(2), SCHEDULES))
def test_everything_rests_on_it(seed: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, gradients between backward and step, inputs of units, and state."""
    expected = trained({"stage": 3, "keep": "device"}, schedule=SCHEDULES[schedule])
    monkeypatch.setattr("zerokern.zero.spilling.exceeds_half_of_memory", lambda nbytes: True)
    toy = Toy(seed)
    assert same(trained({"stage": 3, "tier": toy, "keep": toy}, tier=toy, schedule=SCHEDULES[schedule]), expected)
    moved = sum((one.moved for one in toy.opened), Counter())
    roles = ("parameters", "gradients", "kept inputs", "state")
    assert all(moved[f"{role} {way}"] for role in roles for way in ("stored", "fetched")), moved


@each("schedule, place", itertools.product(SCHEDULES, ("state", "parameters", "inputs")))
def test_it_serves_a_device(schedule: str, place: str) -> None:
    """Through pinned memory: a ring of state, a ring of parameters, blocks of inputs."""
    settings = {"stage": 3} if place != "inputs" else {"stage": 3, "keep": "device"}
    expected = trained(settings, schedule=SCHEDULES[schedule])
    toy = Toy(3)
    with played(poison=True) as device, pytest.MonkeyPatch.context() as patch:
        if place == "inputs":  # of which torch knows no device
            patch.setattr("zerokern.activations.keeping.driver_of", lambda tensor: device)
        shard = settings | ({"tier": toy} if place == "parameters" else {"keep": toy} if place == "inputs" else {})
        tier = toy if place == "state" else "cpu"
        assert same(trained(shard, device=device, tier=tier, schedule=SCHEDULES[schedule]), expected)
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
