"""From every format into every other: exact wherever that is possible, refused by name where it is not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from state_cases import put, take
from torch import Tensor, nn
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.kernels import join
from zerokern.optim import convert_state
from zerokern.zero.homes import home_of
from zerokern.zero.sharded import Sharded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASTERS = {
    "own": (FP32, None, 32),
    "split16": (BF16, "split16", 32),
    "split8": (BF16, "split8", 24),
    "bf16 and fp32": (BF16, "fp32", 32),
    "bf16": (BF16, "none", 16),
    "fp16 and fp32": (FP16, "fp32", 32),
    "fp16": (FP16, "none", 17),  # values that bf16 has not
}
STATES = {"fp32": 3, "bf16": 1, "int8": 0}
SHAPES = ((300,), (5, 130), ())


def exact(param: Tensor, entry: dict[str, Tensor]) -> Tensor:
    """What a parameter is in fp32."""
    if "remainder" in entry:
        return join(param.detach(), entry["remainder"])
    return entry["master"].clone() if "master" in entry else param.detach().float()


def model_of(dtype: torch.dtype, seed: int) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList([torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES])


def begun(master: str, state: str, seed: int, **settings: Any) -> tuple[nn.ParameterList, Any]:
    dtype, kind, _ = MASTERS[master]
    model = model_of(dtype, seed)
    opt = zk.AdamW(model.parameters(), lr=3e-3, state_format=state, master_format=kind, **settings)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for param in model:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        opt.step()
    return model, opt


def check(
    model: nn.ParameterList, opt: Any, other: nn.ParameterList, used: Any, state: str, keeps: bool | None
) -> None:
    """`keeps`: whether every value is as exact as it was; None where that depends on the value."""
    wanted, found = convert_state(opt.state_dict(), state_format=state)["state"], used.state_dict()["state"]
    for number, (param, mine) in enumerate(zip(model, other, strict=True)):
        for key, value in wanted[number].items():
            if key not in ("master", "remainder"):
                assert found[number][key].dtype is value.dtype and torch.equal(found[number][key], value), key
        before, after = exact(param, opt.state_dict()["state"][number]), exact(mine, found[number])
        if keeps:
            assert torch.equal(before, after)
        else:
            assert torch.allclose(before, after, rtol=2**-8 if mine.dtype is BF16 else 2**-10, atol=1e-7)
            assert keeps is None or not torch.equal(before, after)
        if "master" in found[number]:  # ties between two bf16 values are rounded away from zero, or to even
            rounded = found[number]["master"].to(mine.dtype)
            assert torch.equal(mine, rounded) or (mine.float() - after).abs().le((rounded.float() - after).abs()).all()


@pytest.mark.parametrize("source", MASTERS)
def test_masters_and_moments_from_every_format_into_every_other(source: str, tmp_path: Path) -> None:
    states = itertools.cycle(["fp32", "int8", "bf16"])
    state = next(states)
    model, opt = begun(source, state, 0)
    put(tmp_path, model, opt)
    for target, into in itertools.product(MASTERS, STATES):
        other, used = begun(target, into, 1)
        held = MASTERS[source][2]
        same = MASTERS[source][:2] == MASTERS[target][:2]
        keeps = same or MASTERS[target][2] >= (24 if held < 20 else held)
        rounds = not keeps or STATES[into] < STATES[state]
        if rounds:
            before = [param.clone() for param in other]
            with pytest.raises(StateError, match="lossy=True rounds it"):
                take(tmp_path, other, used)
            assert all(map(torch.equal, other, before))
        take(tmp_path, other, used, lossy=rounds)
        check(model, opt, other, used, into, None if (source, target) == ("bf16", "fp16") else keeps)


@pytest.mark.parametrize("into", ["bf16", "int8"])
def test_state_on_disk_is_converted_on_its_way(into: str, tmp_path: Path) -> None:
    model, opt = begun("own", "fp32", 0)
    put(tmp_path / "kept", model, opt)
    other, used = begun("split8", into, 1, tier=zk.Nvme(tmp_path / "tier", ring_nbytes=1 << 20))
    take(tmp_path / "kept", other, used, lossy=True)
    check(model, opt, other, used, into, keeps=False)
    again, back = begun("own", "fp32", 2)
    put(tmp_path / "back", other, used)
    take(tmp_path / "back", again, back)
    check(other, used, again, back, "fp32", keeps=True)


def test_a_model_alone_takes_what_its_optimizer_kept(tmp_path: Path) -> None:
    model, opt = begun("split16", "fp32", 0)
    put(tmp_path, model, opt)
    other = model_of(FP32, 1)
    take(tmp_path, other)
    for number, (param, mine) in enumerate(zip(model, other, strict=True)):
        assert torch.equal(mine, exact(param, opt.state_dict()["state"][number]))
    half = model_of(FP16, 1)
    with pytest.raises(StateError, match=r"torch.bfloat16 to torch.float16 rounds it"):
        take(tmp_path, half)


def test_torchs_adamw_goes_into_ours_and_back(tmp_path: Path) -> None:
    model = model_of(FP32, 0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for param in model:
        param.grad = torch.ones_like(param)
    opt.step()
    put(tmp_path / "torch", model, opt)
    other, used = begun("split16", "fp32", 1)
    take(tmp_path / "torch", other, used)
    for param, mine in zip(model, other, strict=True):
        assert torch.equal(param.detach(), join(mine.detach(), used.state[mine]["remainder"]))
        assert torch.equal(opt.state[param]["exp_avg_sq"], used.state[mine]["exp_avg_sq"])
    put(tmp_path / "ours", other, used)
    again = model_of(FP32, 2)
    third = torch.optim.AdamW(again.parameters())
    take(tmp_path / "ours", again, third)
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(model, again, strict=True))
    assert third.param_groups[0]["lr"] == 3e-3 and "state_format" not in third.param_groups[0]
    assert float(third.state[again[0]]["step"]) == 1.0


def test_a_pending_update_stays_in_its_format(tmp_path: Path) -> None:
    model, opt = begun("split16", "fp32", 0, tier="cpu", schedule=zk.Delayed(after=0))
    put(tmp_path, model, opt)
    other, used = begun("own", "fp32", 1, tier="cpu", schedule=zk.Delayed(after=0))
    with pytest.raises(StateError, match=r"cannot change formats; call opt\.flush"):
        take(tmp_path, other, used)


@ranked
def converted_on_ranks(world: World, path: str) -> None:
    """fp32 of two ranks at stage 2 into int8 and split16 at stage 3, and into a disk."""
    folder = Path(path)
    for stage, settings in ((2, {}), (3, {}), (3, {"tier": "nvme"})):
        if "tier" in settings:
            settings = {"tier": zk.Nvme(folder / f"disk{world.rank}", ring_nbytes=1 << 20)}
        source = world.shard(nn.Sequential(nn.Linear(100, 30)), stage=2)
        opt = zk.AdamW(source.parameters(), lr=3e-3)
        source(torch.ones(2, 100)).pow(2).mean().backward()
        opt.step()
        put(folder / "kept", source, opt)
        target = world.shard(nn.Sequential(nn.Linear(100, 30)).to(BF16), stage=stage)
        used = zk.AdamW(target.parameters(), state_format="int8", **settings)
        take(folder / "kept", target, used, lossy=True)
        expected = convert_state(opt.state_dict(), state_format="int8")["state"]
        found = used.state_dict()["state"]
        for number, (mine, param) in enumerate(zip(target.parameters(), source.parameters(), strict=True)):
            home, entry = home_of(mine), found[number]
            assert home is not None and isinstance(entry["exp_avg.codes"], Sharded)
            high = home.piece.detach()
            assert torch.equal(join(high, entry["remainder"].local), home_of(param).piece.detach())
            for key in ("exp_avg.codes", "exp_avg_scale", "exp_avg_sq.codes", "exp_avg_sq_scale"):
                assert torch.equal(entry[key].local, expected[number][key].local), key
        target(torch.ones(2, 100, dtype=BF16)).pow(2).mean().backward()
        used.step()


def test_formats_change_on_ranks_as_they_do_on_one(tmp_path: Path) -> None:
    on_ranks(2, converted_on_ranks, str(tmp_path))
