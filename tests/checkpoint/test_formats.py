"""From every format, dtype and optimizer into every other: exact wherever possible, refused by name where not."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cases import load, save
from state_cases import put, stepped, take, two
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.kernels import join
from zerokern.optim import convert_state
from zerokern.zero.shard import shard_of
from zerokern.zero.sharded import Sharded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASTERS = {
    "own": (FP32, None, 32), "split16": (BF16, "split16", 32), "split8": (BF16, "split8", 24),
    "bf16 and fp32": (BF16, "fp32", 32), "bf16": (BF16, "none", 16), "fp16 and fp32": (FP16, "fp32", 32),
    "fp16": (FP16, "none", 17),  # values that bf16 has not
}  # fmt: skip
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
    state = "fp32"
    model, opt = begun(source, state, 0)
    put(tmp_path, model, opt)
    begin = [*MASTERS].index(source)
    for number, target in enumerate(MASTERS):  # any two of source, target and moments meet
        into = [*STATES][(begin + number) % len(STATES)]
        other, used = begun(target, into, 1)
        held = MASTERS[source][2]
        same = MASTERS[source][:2] == MASTERS[target][:2]
        keeps = same or MASTERS[target][2] >= (24 if held < 20 else held)
        rounds = not keeps or STATES[into] < STATES[state]
        if rounds:
            before = [param.clone() for param in other]
            with pytest.raises(StateError, match="lossy=True allows it"):
                take(tmp_path, other, used)
            assert all(map(torch.equal, other, before))
        take(tmp_path, other, used, lossy=rounds)
        check(model, opt, other, used, into, None if (source, target) == ("bf16", "fp16") else keeps)


def test_state_on_disk_is_converted_on_its_way(tmp_path: Path) -> None:
    model, opt = begun("own", "fp32", 0)
    put(tmp_path / "kept", model, opt)
    for into in ("bf16", "int8"):
        other, used = begun("split8", into, 1, tier=zk.Nvme(tmp_path / f"tier {into}", ring_nbytes=1 << 20))
        take(tmp_path / "kept", other, used, lossy=True)
        check(model, opt, other, used, into, keeps=False)
        again, back = begun("own", "fp32", 2)
        put(tmp_path / into, other, used)
        take(tmp_path / into, again, back)
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


def test_a_model_alone_takes_the_update_that_waited(tmp_path: Path) -> None:
    model = two(False)
    opt = zk.AdamW(model.parameters(), lr=0.1, tier="cpu", schedule=zk.Delayed(after=0))
    for _ in range(3):
        stepped(model, opt)
    put(tmp_path, model, opt)
    before, other = model[0].weight.detach().clone(), two(False, 1)
    take(tmp_path, other)
    opt.flush()
    assert not torch.equal(before, model[0].weight)
    assert torch.equal(other[0].weight, model[0].weight) and torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(StateError, match=r"cannot change formats; call opt\.flush"):
        take(tmp_path, two(False).to(BF16), lossy=True)


def test_exact_values_that_nobody_takes_are_rounded_only_where_that_is_asked_for(tmp_path: Path) -> None:
    plain = two(False)
    exact = plain[0].weight.detach().clone()
    put(tmp_path, zk.shard(plain, stage=1, mp_policy=MixedPrecisionPolicy(param_dtype=BF16)))
    half, whole = two(False, 1).to(BF16), two(False, 1)
    with pytest.raises(StateError, match=r"0\.weight: it is kept more exactly .* lossy=True allows it"):
        take(tmp_path, half)
    take(tmp_path, half, lossy=True)
    assert torch.equal(half[0].weight, exact.to(BF16))
    take(tmp_path, whole)
    assert torch.equal(whole[0].weight, exact)


def channels_last(dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last).to(dtype)


def test_rounding_makes_no_infinities(tmp_path: Path) -> None:
    model, half = two(False), two(False, 1).half()
    with torch.no_grad():
        model[1].weight[2, :3] = 1e6
        model[1].weight[3, 0] = float("inf")
    put(tmp_path, model)
    with pytest.raises(StateError, match=r"model\.1\.weight: 3 of these values are beyond 65504"):
        take(tmp_path, half, lossy=True)
    take(tmp_path, bf16 := two(False, 1).bfloat16(), lossy=True)
    assert torch.equal(bf16[1].weight, model[1].weight.bfloat16())


def test_groups_are_taken_over_as_torch_does(tmp_path: Path) -> None:
    """AdamW stays AdamW, whatever an Adam has saved, and goes on as after torch's own load_state_dict."""
    for one, other in itertools.product((torch.optim.Adam, torch.optim.AdamW), repeat=2):
        model, found = two(False), []
        opt = stepped(model, one(model.parameters(), lr=0.1, weight_decay=0.5))
        save(tmp_path / "x", model, opt)
        for own in (True, False):
            again = two(False, 1)
            fresh = other(again.parameters(), weight_decay=0.1)
            if own:
                load(tmp_path / "x", again, fresh)
            else:
                again.load_state_dict(model.state_dict())
                fresh.load_state_dict(opt.state_dict())
            assert fresh.param_groups[0]["decoupled_weight_decay"] is (torch.optim.AdamW in (one, other))
            assert fresh.param_groups[0]["weight_decay"] == 0.5
            found.append([one.detach() for one in stepped(again, fresh).param_groups[0]["params"]])
        assert all(map(torch.equal, *found))


def test_a_learning_rate_of_numpy_is_a_number(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for maker in (zk.SGD, torch.optim.SGD):
        opt = maker(model.parameters(), lr=0.5)
        opt.param_groups[0]["lr"] = numpy.float32(0.1)
        save(tmp_path / "x", model, opt)
        opt.param_groups[0]["lr"] = 1.0
        load(tmp_path / "x", model, opt)
        lr = opt.param_groups[0]["lr"]
        assert type(lr) is float and lr == float(numpy.float32(0.1)) and not math.isclose(lr, 0.1, rel_tol=1e-12)


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
            home, entry = shard_of(mine), found[number]
            assert home is not None and isinstance(entry["exp_avg.codes"], Sharded)
            high = home.piece.detach()
            assert torch.equal(join(high, entry["remainder"].local), shard_of(param).piece.detach())
            for key in ("exp_avg.codes", "exp_avg_scale", "exp_avg_sq.codes", "exp_avg_sq_scale"):
                assert torch.equal(entry[key].local, expected[number][key].local), key
        target(torch.ones(2, 100, dtype=BF16)).pow(2).mean().backward()
        used.step()


def coded(path: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 30))
    opt = zk.AdamW(model.parameters(), state_format="int8")
    for param in model.parameters():  # blocks of very different scales
        param.grad = torch.randn_like(param) * torch.logspace(-3, 1, param.numel()).view(param.shape)
    opt.step()
    put(path, model, opt)
    plain = torch.optim.AdamW(model.parameters())
    take(path, model, plain)
    return model, plain


@ranked
def decoded_by_pieces(world: World, path: str) -> None:
    from zerokern.checkpoint import filling

    ways: list[dict[str, Any]] = [{}, {"shard_placement_fn": lambda param: Shard(1) if param.ndim > 1 else Shard(0)}]
    expected = torch.load(f"{path}/expected.pt")
    kept = filling.PIECE
    for way in ways:
        for kind in (torch.optim.AdamW, zk.AdamW) if not way else (torch.optim.AdamW,):
            for filling.PIECE in (256, kept):
                model = fully_shard(nn.Sequential(nn.Linear(50, 30)), **way)
                opt = kind(model.parameters())
                take(Path(path), model, opt)
                for name, param in model.named_parameters():
                    for key, value in expected[name].items():
                        assert torch.equal(opt.state[param][key].full_tensor(), value), (way, kind, name, key)


@ranked
def on_two(world: World, folder: Path) -> None:
    converted_on_ranks(world, str(folder / "converted"))
    decoded_by_pieces(world, str(folder / "coded"))


def test_formats_change_on_ranks_as_they_do_on_one_however_state_is_cut(tmp_path: Path) -> None:
    """int8 state is decoded with its own scales, also in pieces that begin within a block."""
    model, opt = coded(tmp_path / "coded")
    keys = ("exp_avg", "exp_avg_sq")
    named = {name: {key: opt.state[param][key] for key in keys} for name, param in model.named_parameters()}
    torch.save(named, tmp_path / "coded" / "expected.pt")
    on_ranks(2, on_two, tmp_path)
