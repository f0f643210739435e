"""A rule and a placement of one's own, each in this file alone. A tier of one's own: `tests/memory/toy_tier.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, built, on_threads, refusal, says

import zerokern as zk
from zerokern.kernels import join
from zerokern.kernels.rules import RULES, Rule, hyper_of
from zerokern.memory.order import TierOrder
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm

# A rule: the parameter moves by the sign of an average, as far as the largest average so far says.


def signs(p: Tensor, g: Tensor, average: Tensor, largest: Tensor, *, lr: float, momentum: float, step: int) -> None:
    average.mul_(momentum).add_(g)
    torch.maximum(largest, average.abs(), out=largest)
    p -= lr / step * average.sign() * largest.sqrt()


class Signs(FusedOptimizer):
    _algorithm = Algorithm("signs", counts_steps=True)

    def __init__(
        self, params: Any, lr: float = 0.1, momentum: float = 0.5, *, tier: Any = "device", schedule: Any = "sync",
        update: str = "host", state_format: str = "fp32", master_format: Any = None, max_grad_norm: Any = None,
        group: Any = None, stochastic_seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, locals())


@pytest.fixture(autouse=True)
def rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # An algorithm reads its rule once; one of these tests gives the name another rule.
    monkeypatch.setattr(Signs, "_algorithm", Algorithm("signs", counts_steps=True))
    moments = {"average": "average", "largest": "largest"}
    RULES["signs"] = Rule(0, hyper_of("lr momentum step"), moments, step=signs)
    yield
    del RULES["signs"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def steps(model: nn.Module, opt: Any, some: range, rank: int = 0) -> None:
    for step in some:
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(7 * step + rank))
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def by_hand(count: int) -> list[Tensor]:
    """In plain torch."""
    model = Net()
    state = {param: [torch.zeros_like(param) for _ in range(2)] for param in model.parameters()}
    for step in range(count):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(7 * step))
        model(x).float().square().mean().backward()
        with torch.no_grad():
            for param, (average, largest) in state.items():
                signs(param, param.grad, average, largest, lr=0.1, momentum=0.5, step=step + 1)
                param.grad = None
    return [param.detach() for param in model.parameters()]


@each("shard", [None, 0, 1, 2, 3])
@each("schedule", ["sync", "overlap"])
@each("tier", ["device", "cpu", "disk", "both"])
def test_a_rule_has_its_bits_everywhere(shard: int | None, schedule: str, tier: str, tmp_path: Path) -> None:
    if schedule == "overlap" and shard is None and tier == "device":
        return  # there is nothing to overlap, which a warning says
    disk = zk.Nvme(tmp_path / f"{shard} {schedule} {tier}", ring_nbytes="1MiB")
    where = {"disk": disk, "both": ["cpu:5KB", disk]}.get(tier, tier)
    model = Net()
    if shard is not None:
        zk.shard(model, stage=shard)
    opt = Signs(model.parameters(), tier=where, schedule=schedule)
    steps(model, opt, range(5))
    opt.flush()
    with zk.gathered(model) if shard is not None else torch.no_grad():
        found = [param.detach().clone() for param in model.parameters()]
    opt.close()
    assert all(map(torch.equal, found, by_hand(5)))


@each("formats", [{}, {"state_format": "bf16"}, {"state_format": "int8", "master_format": "split8"},
                  {"master_format": "fp32"}, {"master_format": "none", "stochastic_seed": 3}])  # fmt: skip
def test_formats_are_those_of_all_rules(formats: dict[str, Any], tmp_path: Path) -> None:
    """Ranks, a disk and a checkpoint in between change no bit; an exact remainder has those of fp32."""

    def trained(stage: int | None, saved: bool, world: World | None = None) -> list[Tensor]:
        model = built(Net).bfloat16()
        if world is not None:
            world.shard(model, stage=stage)
        opt = Signs(model.parameters(), **formats)
        steps(model, opt, range(2))
        if saved:
            state = opt.state_dict()
            opt = Signs(model.parameters(), **formats)
            opt.load_state_dict(state)
        steps(model, opt, range(2, 4))
        if world is None:
            return [param.detach() for param in model.parameters()]
        with zk.gathered(model):
            return [param.detach().clone() for param in model.parameters()]

    straight = trained(None, saved=False)
    assert all(map(torch.equal, trained(None, saved=True), straight))
    for found in on_threads(2, lambda world: trained(2, saved=False, world=world)):
        assert all(map(torch.equal, found, straight))


def test_random_rounding_differs_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rule asks for no step."""

    def steps_down(p: Tensor, g: Tensor, *, lr: float) -> None:
        p -= lr * g

    monkeypatch.setitem(RULES, "signs", Rule(0, hyper_of("lr"), {}, step=steps_down))
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    opt = Signs([weight], lr=1e-3, master_format="none", stochastic_seed=3)
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        opt.step()
    moved = weight.detach().float()
    assert (moved < 1).float().mean() > 0.9, "each has a chance of 1 in 4 in each step to move"


def test_an_exact_remainder_keeps_what_the_rule_computes() -> None:
    weight = nn.Parameter(torch.full((130,), 1.0, dtype=torch.bfloat16))
    opt = Signs([weight], lr=1e-3)
    p, average, largest = torch.ones(130), torch.zeros(130), torch.zeros(130)
    for step in range(3):
        weight.grad = torch.linspace(-1, 1, 130).bfloat16()
        signs(p, weight.grad.float(), average, largest, lr=1e-3, momentum=0.5, step=step + 1)
        opt.step()
    assert torch.equal(join(weight.detach(), opt.state[weight]["remainder"]), p)


@each("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_rule_that_fails_tears(error: type[BaseException]) -> None:
    def fails(p: Tensor, *_: Any, **__: Any) -> None:
        if p.numel() == 3:
            raise error

    weights = [nn.Parameter(torch.ones(numel)) for numel in (4, 3)]
    opt = Signs(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    opt.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "signs", replace(RULES["signs"], step=fails))
        with pytest.raises(error):
            opt.step()
    says(refusal(opt.step, zk.StateError), ["load a checkpoint"])


def test_moments_that_a_table_cannot_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state_dict says keys alone: one key is kept in one way, and Adam's in its own whatever else there is."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    adam = zk.AdamW([weight], state_format="int8")
    adam.step()
    expected = zk.convert_state(adam.state_dict(), state_format="fp32")["state"][0]["exp_avg_sq"]
    monkeypatch.setitem(RULES, "signs", Rule(0, hyper_of("lr"), {"exp_avg_sq": "exp_avg_sq"}, step=signs))
    assert torch.equal(zk.convert_state(adam.state_dict(), state_format="fp32")["state"][0]["exp_avg_sq"], expected)
    monkeypatch.setattr(Signs, "_algorithm", Algorithm("signs", counts_steps=False))
    opt = Signs([weight])
    says(refusal(opt.step, ValueError), ["'signs'", "'exp_avg_sq'", "another name"])
    assert torch.equal(weight.grad, torch.ones(4)) and not opt.state
    says(refusal(lambda: Rule(0, {}, dict.fromkeys("abc", ""), step=signs), ValueError), ["moments", "at most 2"])


def test_a_gpu_has_no_kernel_for_it() -> None:
    triton = pytest.importorskip("zerokern.kernels.triton.table")
    if not torch.cuda.is_available():
        table = triton.DeviceTable(torch.device("cpu"), 1, 1)
        hyper = {"algorithm": "signs", "grad_dtype": torch.float32, "param_dtype": torch.float32}
        given = lambda: table.set_group(0, {"lr": 1.0}, **hyper, master_format="fp32", state_format="fp32")  # noqa: E731
        says(refusal(given, ValueError), ["'signs'", "kernels", "tier='cpu'"])


# A placement: the largest state has the first claim on the device.


class LargestFirst(TierOrder):
    def place(self, sizes: Sequence[int], budgets: Mapping[str, int | None], held: Mapping[str, int]) -> list[str]:
        order = sorted(range(len(sizes)), key=lambda part: -sizes[part])
        kinds = super().place([sizes[part] for part in order], budgets, held)
        return [kind for _, kind in sorted(zip(order, kinds, strict=True))]


@each("schedule", ["sync", "overlap"])
def test_a_placement_chooses_and_changes_no_bit(schedule: str) -> None:
    shapes = (50, 200, 50, 300)
    kinds, found = [], []
    for order in (TierOrder, LargestFirst):
        device = HostComputes()
        torch.manual_seed(0)
        weights = [device.own(nn.Parameter(torch.randn(numel))) for numel in shapes]
        plain = TierOrder.of("tier", ["device:4000B", "cpu"])
        opt = zk.AdamW(weights, lr=0.1, tier=order(plain.tiers, plain.budgets), schedule=schedule)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + step)
            opt.step()
        opt.flush()
        device.synchronize()
        kinds.append([opt.holdings.room.keeps(opt.holdings.host.copies[id(weight)].values) for weight in weights])
        found.append([weight.detach().clone() for weight in weights])
        opt.close()
        device.close()
    in_memory = [[False, False, False, True], [True, False, True, False]]
    assert kinds == in_memory and all(map(torch.equal, *found))
