"""What zk.load puts where: tied tensors, buffers of ranks, room on a disk; how often it asks and reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import load, save
from state_cases import Source, put, stepped, take, two
from torch import Tensor, nn
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.checkpoint.filling import Restore
from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.training_state import TrainingState
from zerokern.core.errors import BudgetError, IoError, StateError
from zerokern.optim import exchange


def state_of(opt: Any) -> dict[tuple[int, str], Tensor]:
    entries = opt.state_dict()["state"]
    return {(n, k): getattr(v, "local", v).detach().clone() for n, one in entries.items() for k, v in one.items()}


def test_what_was_tied_goes_into_each_tensor_that_is_not(tmp_path: Path) -> None:
    for kind, dtype in itertools.product((zk.AdamW, torch.optim.AdamW), (torch.float32, torch.float64)):
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
def untied_on_ranks(world: World, folder: Path) -> None:
    model, other = two(True), world.shard(two(False, 1), stage=3)
    put(folder / "tied", model)
    take(folder / "tied", other)
    for layer in other:
        with zk.gathered([layer.weight]):
            assert torch.equal(layer.weight, model[0].weight)


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


def test_tied_and_wrapped_parameters_are_found_under_any_name(tmp_path: Path) -> None:
    def tied(first: str, second: str) -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in (first, second)})
        model[second].weight = model[first].weight
        return model

    model, other = tied("head", "tail"), tied("tail", "head")
    opt, used = (zk.SGD(one.parameters(), momentum=0.9) for one in (model, other))
    model["head"].weight.grad = torch.ones(3, 3)
    opt.step()
    put(tmp_path, torch.compile(model, backend="eager"), opt)
    take(tmp_path, other, used)
    assert torch.equal(other["head"].weight, model["head"].weight)
    assert torch.equal(used.state[other["head"].weight]["momentum_buffer"], torch.ones(3, 3))


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


class Counting(nn.Module):
    """Buffers between parameters, as a batch norm has them: each rank counts its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for number in range(6):
            self.register_buffer(f"seen{number}", torch.zeros(3 + number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def buffers_by_rank(rank: int, folder: Path) -> tuple[dict[str, list[float]], list[int]]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Counting(), broadcast_buffers=False)
    opt = stepped(model, torch.optim.AdamW(model.parameters()))
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    save(folder / "alone", model)
    save(folder / "both", model, opt)
    save(folder / "beside", model, opt, wait=False).wait()
    found = {}
    for name in ("alone", "both", "beside"):
        for buffer in model.buffers():
            buffer.zero_()
        load(folder / name, model, opt if name != "alone" else None)
        found[name] = sorted({float(one) for buffer in model.buffers() for one in buffer})
    sizes = [one.stat().st_size for one in sorted((folder / "both").glob("*.distcp"))]
    return found, sizes


@ranked
def on_two(world: World, folder: Path) -> Any:
    untied_on_ranks(world, folder)
    checkpoint = {
        "callbacks": {"early": {"wait": world.rank}},
        "epoch": 1,
        "loops": {"rows": torch.tensor([world.rank])},
    }
    save(folder / "lightning", nn.Linear(2, 2), extra=checkpoint)
    return buffers_by_rank(world.rank, folder)


def test_buffers_that_ranks_count_by_themselves_are_of_one_rank(tmp_path: Path) -> None:
    """And what an optimizer steps is still written by both. Lightning goes on with the first rank's callbacks."""
    for found, sizes in on_ranks(2, on_two, tmp_path):
        assert found == {name: [1.0] for name in ("alone", "both", "beside")}
        assert len(sizes) == 2 and min(sizes) > 0.25 * max(sizes)
    from lightning.pytorch.trainer.states import TrainerFn

    from zerokern.integrations.lightning import ZerokernStrategy

    strategy = ZerokernStrategy(stage=3)
    strategy._module = nn.Linear(2, 2)
    strategy._module.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING))
    found = strategy.load_checkpoint(tmp_path / "lightning")
    assert found["callbacks"] == {"early": {"wait": 0}} and found["epoch"] == 1
    assert found["loops"]["rows"].tolist() == [0]


@pytest.mark.parametrize("stage", [None, 2])
def test_a_load_without_room_is_made_good_by_the_next(
    stage: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State goes before room for the new is there: a load that fails then leaves none, and nothing steps or saves."""
    model = nn.Linear(6, 5)
    if stage is not None:
        zk.shard(model, stage=stage)
    opt = stepped(model, zk.AdamW(model.parameters()))
    put(tmp_path / "x", model, opt)
    expected = state_of(opt)

    def refused(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "laid_out", refused)
        with pytest.raises(MemoryError):
            take(tmp_path / "x", model, opt)
    assert not opt.state
    with pytest.raises(StateError, match="load"):
        opt.step()
    with pytest.raises(StateError, match="load"):
        put(tmp_path / "y", model, opt)
    take(tmp_path / "x", model, opt)
    found = state_of(opt)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], one) for key, one in expected.items())
    stepped(model, opt)


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
            Restore(TrainingState(other, [large, small]), Source(tmp_path / "kept"))
    assert torch.equal(large.state_dict()["state"][0]["exp_avg"], before)
    large.step()
    again = zk.AdamW(other[1].parameters(), tier=zk.Nvme(tmp_path / "more", budget="8M", ring_nbytes="1M"))
    take(tmp_path / "kept", other, [large, again])
    again.step()


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
    each, error = Ranks.all_gather, BudgetError if failure == "another optimizer" else StateError
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
        monkeypatch.setattr(Ranks, "all_gather", refused_elsewhere)
    with pytest.raises(error):
        zk.load(tmp_path / "kept", other, opts)
    assert [opt.holdings.disk.tier.swap.stats()["taken_nbytes"] for opt in opts] == [0, 0]
    for layer, opt in zip(other, opts[: 1 if failure == "another optimizer" else 2], strict=False):
        stepped(layer, opt)
