"""What reviews have found: checkpoints that fit only at first sight, and what is refused before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state_cases import Source, put, take
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.core.errors import BudgetError, IoError, StateError
from zerokern.io import Store
from zerokern.saving.loader import Intake
from zerokern.saving.ranks import Ranks
from zerokern.saving.subject import Subject

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def two(tied: bool, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


def stepped(model: nn.Module, opt: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype).contiguous()
    opt.step()
    return opt


# tied tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [zk.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_what_was_tied_goes_into_each_tensor_that_is_not(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model, other = two(True), two(False, 1).to(dtype)
    opt, used = stepped(model, kind(model.parameters())), torch.optim.AdamW(other.parameters())
    put(tmp_path, model, opt)
    take(tmp_path, other, used)
    expected = opt.state[model[0].weight]
    for layer in other:
        assert torch.equal(layer.weight, model[0].weight.to(dtype))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(used.state[layer.weight][key], expected[key].to(dtype)), key
        assert float(used.state[layer.weight]["step"]) == 1.0


@ranked
def untied_on_ranks(world: World, path: str) -> None:
    model, other = two(True), world.shard(two(False, 1), stage=3)
    put(Path(path), model)
    take(Path(path), other)
    for layer in other:
        with zk.gathered([layer.weight]):
            assert torch.equal(layer.weight, model[0].weight)


def test_what_was_tied_goes_into_each_divided_tensor(tmp_path: Path) -> None:
    on_ranks(2, untied_on_ranks, str(tmp_path))


def test_two_different_values_do_not_become_one(tmp_path: Path) -> None:
    put(tmp_path, two(False))
    other = two(True, 1)
    before = other[0].weight.clone()
    with pytest.raises(StateError, match=r"1\.weight: it is tied to 0\.weight here, and the checkpoint has its own"):
        take(tmp_path, other)
    assert torch.equal(other[0].weight, before)


def test_a_state_dict_has_tied_tensors_under_both_names(tmp_path: Path) -> None:
    model = two(True)
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    torch.save({name: one.clone() for name, one in model.state_dict().items()}, tmp_path / "copies.pt")
    torch.save(two(False).state_dict(), tmp_path / "apart.pt")
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("tied.pt", "copies.pt", "dcp"):
        other = two(True, 1)
        zk.load(tmp_path / name, other)
        assert torch.equal(other[1].weight, model[0].weight), name
    with pytest.raises(StateError, match="it is tied to"):
        zk.load(tmp_path / "apart.pt", two(True, 1))


# int8 state in pieces that begin within a block ----------------------------------------------------------------------


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
    from zerokern.saving import filling

    ways: list[dict[str, Any]] = [{}, {"shard_placement_fn": lambda param: Shard(1) if param.ndim > 1 else Shard(0)}]
    expected = torch.load(f"{path}/expected.pt")
    for way in ways:
        for kind in (torch.optim.AdamW, zk.AdamW) if not way else (torch.optim.AdamW,):
            for filling.PIECE in (1 << 20, 256):
                model = fully_shard(nn.Sequential(nn.Linear(50, 30)), **way)
                opt = kind(model.parameters())
                take(Path(path), model, opt)
                for name, param in model.named_parameters():
                    for key, value in expected[name].items():
                        assert torch.equal(opt.state[param][key].full_tensor(), value), (way, kind, name, key)


def test_int8_state_is_decoded_with_its_own_scales_however_it_is_cut(tmp_path: Path) -> None:
    model, opt = coded(tmp_path)
    keys = ("exp_avg", "exp_avg_sq")
    named = {name: {key: opt.state[param][key] for key in keys} for name, param in model.named_parameters()}
    torch.save(named, tmp_path / "expected.pt")
    on_ranks(2, decoded_by_pieces, str(tmp_path))


# a model without its optimizer ---------------------------------------------------------------------------------------


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
    with pytest.raises(StateError, match=r"0\.weight: it is kept more exactly .* lossy=True rounds it"):
        take(tmp_path, half)
    take(tmp_path, half, lossy=True)
    assert torch.equal(half[0].weight, exact.to(BF16))
    take(tmp_path, whole)
    assert torch.equal(whole[0].weight, exact)


# strides and devices -------------------------------------------------------------------------------------------------


def channels_last(dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last).to(dtype)


def test_tensors_of_other_strides_are_converted(tmp_path: Path) -> None:
    model, other = channels_last(FP32, 0), channels_last(BF16, 1)
    opt, used = stepped(model, torch.optim.AdamW(model.parameters())), torch.optim.AdamW(other.parameters())
    put(tmp_path, model, opt)
    take(tmp_path, other, used, lossy=True)
    assert not other.weight.is_contiguous()
    assert torch.equal(other.weight, model.weight.to(BF16)) and torch.equal(other.bias, model.bias.to(BF16))
    for param, mine in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(used.state[mine][key], opt.state[param][key].to(BF16)), key


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("many", torch.ones(1).expand(4))


def test_what_cannot_be_written_or_read_is_named_first(tmp_path: Path) -> None:
    put(tmp_path, Expanded())
    other = Expanded()
    before = other.weight.clone()
    with pytest.raises(StateError, match="many: elements share memory"):
        take(tmp_path, other)
    assert torch.equal(other.weight, before)
    nowhere = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"the device of weight=device\(type='meta'\)"):
        zk.save(tmp_path / "nowhere", nowhere)
    assert not (tmp_path / "nowhere").exists() or not list((tmp_path / "nowhere").iterdir())
    put(tmp_path / "kept", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the device of weight"):
        take(tmp_path / "kept", nowhere)


# formats -------------------------------------------------------------------------------------------------------------


def test_float64_holds_everything(tmp_path: Path) -> None:
    for dtype, settings in ((FP32, {}), (BF16, {"master_format": "split16"})):
        model, other = two(False).to(dtype), two(False, 1).double()
        opt = stepped(model, zk.AdamW(model.parameters(), **settings))
        put(tmp_path, model, opt)
        take(tmp_path, other)
        exact: Tensor = model[0].weight
        if settings:
            exact = zk.kernels.join(exact.detach(), opt.state[exact]["remainder"])
        assert torch.equal(other[0].weight, exact.double())


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


# several optimizers --------------------------------------------------------------------------------------------------


def test_an_optimizer_without_room_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(50, 50), nn.Linear(500, 500))

    model, other = build(), build()
    both = [stepped(layer, zk.AdamW(layer.parameters())) for layer in model]
    put(tmp_path / "kept", model, both)
    first = stepped(other[0], zk.AdamW(other[0].parameters()))
    tier = zk.Nvme(tmp_path / "tier", budget="1M", ring_nbytes="1M")
    before = first.state[other[0].weight]["exp_avg"].clone()
    with pytest.raises(BudgetError):
        take(tmp_path / "kept", other, [first, zk.AdamW(other[1].parameters(), tier=tier)])
    assert torch.equal(first.state[other[0].weight]["exp_avg"], before)
    first.step()


def test_room_on_disk_is_tried_before_anything_is_laid_out(tmp_path: Path) -> None:
    model, other = (nn.Sequential(nn.Linear(50, 50), nn.Linear(500, 500)) for _ in range(2))
    put(tmp_path / "kept", model, [stepped(layer, zk.AdamW(layer.parameters())) for layer in model])
    large, small = (
        zk.AdamW(layer.parameters(), tier=zk.Nvme(tmp_path / budget, budget=budget, ring_nbytes="1M"))
        for layer, budget in zip(other, ("8M", "1M"), strict=True)
    )
    stepped(other[0], large)
    before = large.state_dict()["state"][0]["exp_avg"].clone()
    for _ in range(2):
        with pytest.raises(BudgetError):
            Intake(Subject(other, [large, small]), Source(tmp_path / "kept"))
    assert torch.equal(large.state_dict()["state"][0]["exp_avg"], before)
    large.step()
    again = zk.AdamW(other[1].parameters(), tier=zk.Nvme(tmp_path / "more", budget="8M", ring_nbytes="1M"))
    take(tmp_path / "kept", other, [large, again])
    again.step()


@pytest.mark.parametrize("formats", [{}, {"state_format": "int8"}])
def test_room_on_disk_is_taken_once(formats: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried before anything is changed is what is laid out then."""
    model, other = (nn.Sequential(nn.Linear(50, 50), nn.Linear(500, 500)).bfloat16() for _ in range(2))
    put(tmp_path / "kept", model, stepped(model, zk.AdamW(model.parameters(), **formats)))
    opt = zk.AdamW(other.parameters(), tier=zk.Nvme(tmp_path / "tier", budget="8M", ring_nbytes="1M"), **formats)
    taken, reserve = [], Store.reserve
    monkeypatch.setattr(Store, "reserve", lambda self, key, *rest: taken.append(key) or reserve(self, key, *rest))
    take(tmp_path / "kept", other, opt)
    assert taken == list(opt.holdings.disk.records) and len(taken) > 2
    stepped(other, opt)
    assert taken == list(opt.holdings.disk.records)


@pytest.mark.parametrize("failure", ["damage", "another optimizer", "another rank"])
def test_room_on_disk_is_given_back_where_a_load_is_refused(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = (nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500)) for _ in range(2))
    zk.save(tmp_path / "kept", model, [stepped(layer, zk.AdamW(layer.parameters())) for layer in model])
    budgets = ("8M", "1M" if failure == "another optimizer" else "9M")
    opts = [
        zk.AdamW(layer.parameters(), tier=zk.Nvme(tmp_path / budget, budget=budget, ring_nbytes="1M"))
        for layer, budget in zip(other, budgets, strict=True)
    ]
    each, error = Ranks.each, BudgetError if failure == "another optimizer" else StateError
    if failure == "damage":
        error = IoError
        with next((tmp_path / "kept").glob("*.distcp")).open("r+b") as file:
            file.seek(1000)
            file.write(bytes(64))

    def refused_elsewhere(self: Ranks, what: str, work: Any) -> list[Any]:
        found = each(self, what, work)
        if what == "check":
            raise StateError("rank 1 refuses")
        return found

    if failure == "another rank":
        monkeypatch.setattr(Ranks, "each", refused_elsewhere)
    with pytest.raises(error):
        zk.load(tmp_path / "kept", other, opts)
    assert [opt.holdings.disk.swap.stats()["taken_nbytes"] for opt in opts] == [0, 0]
    for layer, opt in zip(other, opts[: 1 if failure == "another optimizer" else 2], strict=False):
        stepped(layer, opt)
