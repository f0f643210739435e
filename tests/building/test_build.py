"""zk.build: constructed in parts, on meta or by in-place initialisation, and never whole in one rank's memory."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pages import SLACK, large_things_apart, peak, restart_peak
from tables import each
from torch import Tensor, nn
from worlds import World, alone, everywhere, full, on_ranks, on_threads, ranked, refusal, says, step_and_zero
from zero_cases import Net, make_adamw, mse

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.zero import checks


def meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def filled() -> nn.Module:
    """Initialised in all the ways that there are: in place, through views, by values, by hand."""
    net = Net()
    with torch.no_grad():
        net.leave.weight.fill_(0.5)
        net.leave.weight[1].mul_(3.0)
        net.enter.weight.copy_(torch.arange(60.0).view(10, 6) / 60)
        net.blocks[0].up.bias.zero_()
    nn.init.constant_(net.blocks[1].norm.bias, 0.25)
    net.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
    return net


def build(world: World, make: Callable[[], nn.Module], stage: int) -> nn.Module:
    return zk.build(make, mesh=world.mesh, stage=stage)


@everywhere(1, 2, row=[(0, "filled"), (2, "meta"), (3, "filled"), (3, "gpt")])
def test_a_model_built_in_parts(world: World, row: tuple[int, str]) -> None:
    stage, how = row
    model = build(world, {"meta": meta, "plain": Net, "filled": filled, "gpt": gpt}[how], stage)
    values = full(model)
    assert list(values) == [name for name, _ in {"gpt": gpt, "filled": filled}.get(how, Net)().named_parameters()]
    assert all(torch.isfinite(value).all() for value in values.values())
    seen = world.exchange({name: float(value.double().sum()) for name, value in values.items()})
    assert all(one == seen[0] for one in seen), "one model on all ranks"
    if how == "gpt":
        spread = values["blocks.1.qkv.weight"].std()
        assert 0.018 < spread < 0.022, spread
        assert values["blocks.0.mix.weight"].std() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
        assert torch.equal(values["norm.weight"], torch.ones(64))
        return
    bound = 1 / math.sqrt(10)
    assert values["blocks.0.up.weight"].abs().max() <= bound and values["blocks.0.up.weight"].std() > bound / 3
    assert not torch.equal(values["blocks.0.up.weight"][:37], values["blocks.1.up.weight"][:37]), "drawn afresh"
    if how == "filled":
        assert torch.equal(values["leave.weight"], filled().leave.weight)
        assert torch.equal(values["enter.weight"], filled().enter.weight)
        assert torch.equal(values["scale"], torch.tensor([1.0, 2.0]))
        assert (values["blocks.1.norm.bias"] == 0.25).all() and not values["blocks.0.up.bias"].any()
    optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
    losses = []
    for _ in range(4):
        losses.append(mse(model, 0, world))
        losses[-1].backward()
        step_and_zero(optimizer)
    assert world.mean(losses[-1]) < world.mean(losses[0])


def gpt() -> nn.Module:
    return GPT(Shape(2, 64, 16))


def near(center: float, spread: float) -> Callable[[Tensor], bool]:
    return lambda value: bool(((value - center).abs() < spread).all())


def builds_in_turn(world: World, meet: threading.Barrier) -> None:
    def make() -> nn.Module:
        meet.wait(120)  # all are inside
        net = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})
        nn.init.trunc_normal_(net["b"].weight, 5.0, 0.1, 4.0, 6.0)
        return net

    model = build(world, make, 0)
    assert near(5.0, 1.0)(model["b"].weight.detach()) and not near(5.0, 1.0)(model["a"].weight.detach())


def test_constructions_on_several_threads_leave_torch_as_it_was() -> None:
    """Each that put back what it had found would leave another one's function behind, for good."""
    before = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    for _ in range(4):
        on_threads(3, builds_in_turn, threading.Barrier(3))
    assert (nn.Module.register_parameter, nn.init._no_grad_trunc_normal_) == before


def bare() -> nn.Module:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(5, 5, device="meta"))

    return nn.Sequential(Net(), Bare())


def tied() -> nn.Module:
    net = nn.ModuleDict({"words": nn.Embedding(11, 10), "head": nn.Linear(10, 11, bias=False)})
    net["head"].weight = net["words"].weight
    return net


def of_two_minds(world: World) -> None:
    says(refusal(lambda: build(world, bare, 3), zk.ZerokernError), ["1.weight", "reset_parameters"])
    says(refusal(lambda: build(world, lambda: 5, 3), TypeError), ["fn", "int"])
    says(refusal(lambda: zk.build(Net, mesh=world.mesh, stages=3), TypeError), ["stages"])
    says(refusal(lambda: zk.build(Net, mesh=world.mesh, stage=9), ValueError), ["stage=9"])

    def broken() -> nn.Module:
        Net()
        raise RuntimeError("out of ideas")

    says(refusal(lambda: build(world, broken, 3), RuntimeError), ["out of ideas"])
    plain = Net()
    assert not plain.enter.weight.is_meta and torch.isfinite(plain.enter.weight).all(), "nothing is left patched"
    model = build(world, tied, 3)
    assert model["head"].weight is model["words"].weight
    assert len(list(model.parameters())) == 1


def test_what_cannot_be_built() -> None:
    alone(of_two_minds)
    on_threads(2, of_two_minds)


@ranked
def build_large(world: World) -> tuple[int, int]:
    """Peak of memory while 12 units of 4 MiB are built; and what the whole would have been."""
    width, depth = 1024, 12

    def make() -> nn.Module:
        return nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(width, width) for _ in range(depth))})

    zk.build(lambda: nn.ModuleList([nn.Linear(64, 64)]), stage=3)  # what is loaded once
    large_things_apart()
    restart_peak()
    before = peak()
    model = zk.build(make, stage=3)
    grown = peak() - before
    assert model["blocks"][0].weight.local.numel() < width * (width + 2) // world.size
    return grown, 4 * width * (width + 1) * depth


@ranked
def on_real_ranks(world: World) -> tuple[int, int]:
    grown = build_large(world)
    test_a_model_built_in_parts(world, (3, "meta"))
    test_a_model_built_in_parts(world, (2, "filled"))
    of_two_minds(world)
    return grown


def test_a_rank_never_holds_the_whole() -> None:
    for grown, whole in on_ranks(2, on_real_ranks):
        unit = whole // 12  # one as it was made, one in its bucket
        assert grown < whole // 2 + 2 * unit + SLACK, f"{grown >> 20} MiB at the peak, {whole >> 20} are the whole"


def in_layers(*, listed: bool = False) -> nn.Module:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)}) if listed else nn.Sequential(*layers)


@each("tier", ["device", "nvme"])
def test_a_large_model_of_one_unit_is_told_of(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would be in memory whenever it computes, and nobody would know."""
    monkeypatch.setattr(checks, "LARGE", 1)
    settings: dict = {} if tier == "device" else {"tier": zk.Nvme(str(tmp_path / "one"))}
    with pytest.warns(UserWarning, match="the model is one unit.*units=lambda module") as told:
        zk.build(in_layers, stage=3, **settings)
    assert told[0].filename == __file__
    beside = nn.ModuleDict({"body": in_layers(), "heads": nn.ModuleList([nn.Linear(8, 1)])})
    with pytest.warns(UserWarning, match="what is in no ModuleList is one unit, so that all 0 MiB"):
        zk.shard(beside, stage=3)
    with pytest.warns(UserWarning, match=r"'0' is one unit"):
        zk.shard(nn.ModuleList([in_layers(), nn.Linear(8, 1)]), stage=3)


def test_units_a_module_alone_and_small_models_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zk.build(in_layers, stage=3, tier=zk.Nvme(str(tmp_path / "small")))
        monkeypatch.setattr(checks, "LARGE", 1)
        zk.build(lambda: nn.Linear(8, 8), stage=3, tier=zk.Nvme(str(tmp_path / "alone")))
        zk.build(lambda: in_layers(listed=True), stage=3, tier=zk.Nvme(str(tmp_path / "listed")))
        named = {"units": lambda module: isinstance(module, nn.Linear)}
        zk.build(in_layers, stage=3, tier=zk.Nvme(str(tmp_path / "named")), **named)
        for stage in (0, 1, 2):
            zk.shard(in_layers(), stage=stage)
