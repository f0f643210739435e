"""What a review of saving and loading found: other optimizers' groups, buffers by rank, memory, the time of a check."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from cases import load, save
from forked import run_forked
from state_cases import put, take
from torch import Tensor, nn
from worlds import on_ranks

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.optim import exchange
from zerokern.optim.exchange import Exchange
from zerokern.saving import filling
from zerokern.saving.optimizers import Steps
from zerokern.saving.source import Foreign
from zerokern.saving.subject import Subject

STATE_MIB = 64


def stepped(model: nn.Module, opt: Any) -> Any:
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 0.1 * (number + 1))
    opt.step()
    return opt


def state_of(opt: Any) -> dict[tuple[int, str], Tensor]:
    entries = opt.state_dict()["state"]
    return {(n, k): getattr(v, "local", v).detach().clone() for n, one in entries.items() for k, v in one.items()}


@pytest.mark.parametrize("one", ["Adam", "AdamW"])
@pytest.mark.parametrize("other", ["Adam", "AdamW"])
def test_groups_are_taken_over_as_torch_does(one: str, other: str, tmp_path: Path) -> None:
    """AdamW stays AdamW, whatever an Adam has saved, and goes on as after torch's own load_state_dict."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    opt = stepped(model, getattr(torch.optim, one)(model.parameters(), lr=0.1, weight_decay=0.5))
    save(tmp_path / "x", model, opt)
    found = []
    for own in (True, False):
        again = nn.Linear(5, 4)
        fresh = getattr(torch.optim, other)(again.parameters(), weight_decay=0.1)
        if own:
            load(tmp_path / "x", again, fresh)
        else:
            again.load_state_dict(model.state_dict())
            fresh.load_state_dict(opt.state_dict())
        assert fresh.param_groups[0]["decoupled_weight_decay"] is (other == "AdamW" or one == "AdamW")
        assert fresh.param_groups[0]["weight_decay"] == 0.5
        found.append([one.detach() for one in stepped(again, fresh).param_groups[0]["params"]])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("maker", [zk.SGD, torch.optim.SGD])
def test_a_learning_rate_of_numpy_is_a_number(maker: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    opt = maker(model.parameters(), lr=0.5)
    opt.param_groups[0]["lr"] = numpy.float32(0.1)
    save(tmp_path / "x", model, opt)
    opt.param_groups[0]["lr"] = 1.0
    load(tmp_path / "x", model, opt)
    lr = opt.param_groups[0]["lr"]
    assert type(lr) is float and lr == float(numpy.float32(0.1)) and not math.isclose(lr, 0.1, rel_tol=1e-12)


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


def test_buffers_that_ranks_count_by_themselves_are_of_one_rank(tmp_path: Path) -> None:
    """And what an optimizer steps is still written by both."""
    for found, sizes in on_ranks(2, buffers_by_rank, tmp_path, timeout=120):
        assert found == {name: [1.0] for name in ("alone", "both", "beside")}
        assert len(sizes) == 2 and min(sizes) > 0.25 * max(sizes)


WITNESS = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch, zerokern as zk
from pages import MIB, large_things_apart, pages, peak, restart_peak
from torch import nn

torch.set_num_threads(1)
large_things_apart()
folder, kind = Path(sys.argv[1]), sys.argv[2]

def begun(width, count, seed):
    torch.manual_seed(seed)
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
    if kind == "sharded":
        zk.shard(model, stage=2)
    opt = (torch.optim.AdamW if kind == "theirs" else zk.AdamW)(model.parameters())
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01 * (seed + 1))
    opt.step()
    opt.zero_grad(set_to_none=True)
    return model, opt

small, used = begun(4, 1, 0)
zk.save(folder / "warm", small, used)
zk.load(folder / "warm", small, used)
model, opt = begun(1024, 8, 0)
zk.save(folder / "kept", model, opt)

def state():
    entries = opt.state_dict()["state"].values()
    return [getattr(one, "local", one).detach() for entry in entries for one in entry.values()]

expected = [one.clone() for one in state()]
for one in state():
    one.fill_(5)
del one
restart_peak()
before = peak()
zk.load(folder / "kept", model, opt)
grown = (peak() - before) // MIB
found = state()
print(grown, len(found) == len(expected) == 24 and all(map(torch.equal, found, expected)))
"""


@pytest.mark.parametrize(
    "kind", ["sharded", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ours", "theirs"))]
)
def test_loading_into_state_takes_no_second_state(kind: str, tmp_path: Path) -> None:
    """64 MiB of state are loaded into 64 MiB of state, as the kernel counts pages."""
    tests = Path(__file__).resolve().parents[1]
    script = WITNESS.format(paths=[str(tests / "zero")])
    child = run_forked(script, tmp_path, kind, timeout=240)
    assert child.returncode == 0, child.stderr[-2000:]
    grown, same = child.stdout.split()[-2:]
    assert same == "True" and int(grown) < STATE_MIB * 0.7, child.stdout


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


@pytest.mark.parametrize("maker", [zk.AdamW, torch.optim.AdamW])
def test_a_check_asks_for_all_parameters_a_few_times(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of them: 10,000 parameters would take 10,000 * 10,000 steps of Python."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(60)])
    opt = stepped(model, maker(model.parameters()))
    put(tmp_path / "x", model, opt)
    asked: list[int] = []

    def counted(kind: Any, name: str) -> None:
        get = getattr(kind, name).fget
        monkeypatch.setattr(kind, name, property(lambda self: asked.append(1) or get(self)))

    counted(Exchange, "params")
    counted(Steps, "params")
    subject = take(tmp_path / "x", model, opt)
    assert isinstance(subject, Subject) and 0 < len(asked) < 30


def test_a_box_of_somebody_else_is_read_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is converted batch by batch; each batch asks for a part of the same box."""
    monkeypatch.setattr(filling, "PIECE", 128)
    monkeypatch.setattr(filling, "MOST", 1)
    model = nn.Linear(50, 40, bias=False)
    torch.save({"model": model.state_dict()}, tmp_path / "kept.pt")
    fetched: list[str] = []
    fetch = Foreign.fetch
    monkeypatch.setattr(Foreign, "fetch", lambda self, key, box: fetched.append(key) or fetch(self, key, box))
    half = nn.Linear(50, 40, bias=False, dtype=torch.bfloat16)
    load(tmp_path / "kept.pt", half, lossy=True, verify="reading")
    assert torch.equal(half.weight, model.weight.bfloat16())
    assert fetched == ["model.weight"]


def saved_by_two(rank: int, folder: Path) -> None:
    checkpoint = {"callbacks": {"early": {"wait": rank}}, "epoch": 1, "loops": {"rows": torch.tensor([rank])}}
    save(folder / "x", nn.Linear(2, 2), extra=checkpoint)


def test_lightning_goes_on_with_the_first_ranks_callbacks(tmp_path: Path) -> None:
    """On fewer ranks than have saved it: Lightning knows no list of each rank's."""
    on_ranks(2, saved_by_two, tmp_path, timeout=120)
    from lightning.pytorch.trainer.states import TrainerFn

    from zerokern.integrations.lightning import ZerokernStrategy

    strategy = ZerokernStrategy(stage=3)
    strategy._module = nn.Linear(2, 2)
    strategy._module.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING))
    found = strategy.load_checkpoint(tmp_path / "x")
    assert found["callbacks"] == {"early": {"wait": 0}} and found["epoch"] == 1
    assert found["loops"]["rows"].tolist() == [0]
