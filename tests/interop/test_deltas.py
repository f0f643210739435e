"""zk.deltas: what users write, odd parameters, optimizers that come and go, files. Whole programs: tests/whole."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tables import each
from torch import Tensor, nn
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.core.errors import IoError, StateError
from zerokern.interop.delta import Difference
from zerokern.kernels.changed import Packed
from zerokern.optim.changed import Changes

ROOT = Path(__file__).resolve().parents[2]


class Net(nn.Module):
    """Tied weights, a frozen one, a buffer, an empty one, a 0-dim one, and one that no optimizer has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Linear(40, 40, dtype=dtype)
        self.two = nn.Linear(40, 40, dtype=dtype)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(0.01, dtype=dtype))  # of which a step is more than a rounding
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.odd = nn.Parameter(torch.randn(7, 3, dtype=dtype))
        self.own = nn.Parameter(torch.randn(130, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(9, dtype=dtype), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) * self.scale + self.odd.sum() + self.own.sum()


class Case:
    """A model in training, and a copy that gets deltas alone."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, lr: float = 1e-3, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model, self.dtype = Net(dtype), dtype
        self.mirror = copy.deepcopy(self.model)
        trained = [one for name, one in self.model.named_parameters() if name != "own" and one.requires_grad]
        self.opt: Any = zk.AdamW(trained, lr=lr, **settings)
        self.follower = zk.deltas(self.model, self.opt)

    def step(self, opt: Any = None) -> None:
        self.model(torch.randn(2, 40, dtype=self.dtype)).float().pow(2).sum().backward()
        (opt or self.opt).step()
        self.model.zero_grad()

    def take(self) -> zk.Delta:
        delta = self.follower.take()
        delta.apply_(self.mirror)
        for name, value in self.mirror.state_dict().items():
            assert torch.equal(value, self.model.state_dict()[name]), name
        return delta

    def dense(self) -> set[str]:
        return {name for name, one in self.take().tensors.items() if isinstance(one.part, Tensor)}


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_steps_join(case: Case) -> None:
    case.step()
    case.step()
    assert {"one.weight", "scale", "odd"} <= set(case.take().names) <= set(case.model.state_dict())
    assert not case.take().names
    case.step()
    case.take()


def test_torchs_default_device_is_not_that_of_a_delta(tmp_path: Path) -> None:
    case = Case(lr=1e-5)
    for _ in range(2):
        case.step()
        with torch.device("meta"):
            delta = case.follower.take()
            delta.save(tmp_path / "0.safetensors")
            delta = zk.Delta.load(tmp_path / "0.safetensors")
        delta.apply_(case.mirror)
    assert isinstance(delta.tensors["one.weight"].part, Packed)
    assert torch.equal(case.model.one.weight, case.mirror.one.weight)


@pytest.mark.gpu
@each("tier, update", [("device", "host"), ("cpu", "host"), ("cpu", "device"), ("disk", "host")])
def test_a_model_on_a_gpu(tier: str, update: str, tmp_path: Path) -> None:
    """Bits are where the update ran, which may be the host, and values where the parameters are."""
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 1)).bfloat16().cuda()
    mirror = copy.deepcopy(model)
    where: Any = zk.Nvme(tmp_path) if tier == "disk" else tier
    opt = zk.AdamW(model.parameters(), lr=1e-4, tier=where, update=update)
    follower = zk.deltas(model, opt)
    for _ in range(3):
        model(torch.randn(2, 40, device="cuda").bfloat16()).float().pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
        delta = follower.take()
        delta.apply_(mirror)
        assert any(isinstance(one.part, Packed) for one in delta.tensors.values())
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), mirror.parameters(), strict=True))
    opt.close()


def test_at_low_rates_little_changes() -> None:
    case = Case(lr=1e-5)
    case.step()
    case.take()
    case.step()
    delta = case.take()
    weight = delta.tensors["one.weight"]
    assert isinstance(weight.part, Packed) and weight.nbytes < 0.25 * 1600 * 2, weight.nbytes
    assert delta.dense_nbytes == sum(one.nbytes for one in dict(case.model.named_parameters()).values()) + 16


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("one.weight", lambda p: p.mul_(2)),
        ("one.weight", lambda p: p.copy_(torch.ones_like(p))),
        ("frozen", lambda p: p.add_(1)),
        ("frozen", lambda p: p.data.add_(1)),  # which no version counts
        ("own", lambda p: p.zero_()),
        ("seen", lambda p: p.add_(1)),
        ("scale", lambda p: setattr(p, "data", torch.zeros_like(p.data))),
    ],
)
def test_what_a_user_writes_is_dense(name: str, write: Any) -> None:
    case = Case()
    case.step()
    case.take()
    with torch.no_grad():
        write(case.model.state_dict(keep_vars=True)[name])
    assert case.dense() == {name}
    case.step()
    with torch.no_grad():
        write(case.model.state_dict(keep_vars=True)[name])
    case.step()  # which would account for its own writes
    assert name in case.dense()


def test_what_no_version_counts_is_refused_by_name_where_an_update_hides_it() -> None:
    case = Case(lr=1e-5)
    case.step()
    case.take()
    before = copy.deepcopy(case.mirror.state_dict())
    case.step()
    case.model.one.weight.data.mul_(2)
    case.step()
    with pytest.raises(StateError, match=r"'one.weight' would not be what it is .*`\.data`"):
        case.follower.take().apply_(case.mirror)
    assert all(torch.equal(one, before[name]) for name, one in case.mirror.state_dict().items())


def test_out_of_turn_or_twice_is_refused() -> None:
    case = Case()
    case.step()
    first = case.follower.take()
    case.step()
    second = case.follower.take()
    assert first.after == second.before
    before = copy.deepcopy(case.mirror.state_dict())
    with pytest.raises(StateError, match="is not as it was before this delta"):
        second.apply_(case.mirror)
    assert all(torch.equal(one, before[name]) for name, one in case.mirror.state_dict().items())
    first.apply_(case.mirror)
    with pytest.raises(StateError, match="is not as it was"):
        first.apply_(case.mirror)
    second.apply_(case.mirror)
    with pytest.raises(StateError, match="lacks"):
        first.apply_(nn.Linear(2, 2))
    with pytest.raises(StateError, match="another model"):
        first.apply_(case.model.float())


def test_a_state_dict_with_tied_names_gets_each() -> None:
    case = Case()
    there = {name: one.clone() for name, one in case.model.state_dict().items()}  # not tied any more
    case.step()
    case.follower.take().apply_(there)
    assert all(torch.equal(one, there[name]) for name, one in case.model.state_dict().items())


def test_one_memory_for_two_tensors_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].load_state_dict(model[0].state_dict())
    one = model[0].weight.detach().clone()
    follower = zk.deltas(model, None)
    with torch.no_grad():
        model[1].weight.add_(1)
    before, delta = one.clone(), follower.take()
    with pytest.raises(StateError, match=r"'1\.weight' and '0\.weight' are one memory"):
        delta.apply_({"0.weight": one, "1.weight": one})
    assert torch.equal(one, before)


def test_rows_that_begin_within_a_byte() -> None:
    """Matrices of nine elements, one after the other in a parameter."""
    torch.manual_seed(3)
    model = nn.Linear(3, 15, bias=False, dtype=torch.bfloat16)
    mirror, opt = copy.deepcopy(model), zk.Muon(model.parameters(), lr=1e-3, split=5)
    follower = zk.deltas(model, opt)
    for _ in range(3):
        model.weight.grad = torch.randn_like(model.weight)
        opt.step()
    delta = follower.take()
    assert isinstance(delta.tensors["weight"].part, Packed)
    delta.apply_(mirror)
    assert torch.equal(mirror.weight, model.weight)


def test_after_a_take_that_failed_the_next_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(lr=1e-5)
    case.step()
    case.take()
    case.step()
    with monkeypatch.context() as patch:
        patch.setattr(Difference, "__init__", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            case.follower.take()
    case.step()  # whose bits are not all
    assert case.take().names


@ranked
def apply_to_ranks_that_differ(world: World, stage: int) -> list[str]:
    case = Case()
    there = world.shard(copy.deepcopy(case.mirror), stage=stage)
    before = {name: one.clone() for name, one in case.mirror.state_dict().items()}
    case.step()
    delta, said = case.follower.take(), []
    if world.rank == 1:
        there.seen.add_(1)
    for one in (delta, zk.Delta(delta.tensors | {"more": delta.tensors["seen"]}) if world.rank else delta):
        with pytest.raises(StateError) as error:
            one.apply_(there)
        said.append(str(error.value))
        with zk.gathered(there):
            assert all(torch.equal(one, before[name]) for name, one in there.named_parameters())
    there.seen.zero_()
    delta.apply_(there)
    with zk.gathered(there):
        assert all(torch.equal(one, there.state_dict()[name]) for name, one in case.model.state_dict().items())
    return said


@ranked
def apply_others_on_each_rank(world: World, folder: Path) -> None:
    torch.manual_seed(3)
    there = world.shard(Net(torch.bfloat16), stage=3)
    with pytest.raises(StateError, match=f"rank {1 - world.rank} has another delta than this one"):
        zk.Delta.load(folder / str(world.rank)).apply_(there)


def test_ranks_that_have_different_deltas_refuse_them(tmp_path: Path) -> None:
    for rank in range(2):
        case = Case()
        for _ in range(1 + rank):
            case.step()
        case.follower.take().save(tmp_path / str(rank))
    on_ranks(2, apply_others_on_each_rank, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_refuse_what_one_does(stage: int) -> None:
    first, second = on_ranks(2, apply_to_ranks_that_differ, stage)
    assert first[0].startswith("rank 1 cannot apply the delta, so no rank does: 'seen' is not")
    assert second[0].startswith("'seen' is not as it was") and "lacks ['more']" in first[1] and "lacks" in second[1]


@pytest.mark.parametrize("tier", ["device", "cpu"])
@pytest.mark.parametrize("schedule", ["sync", "overlap", zk.Delayed(after=0), zk.Delayed(after=2)], ids=str)
def test_two_followers_and_each_has_its_own_time(tier: str, schedule: Any) -> None:
    case = Case(tier=tier, schedule=schedule, lr=1e-5)
    case.step()
    other, mirror = zk.deltas(case.model, case.opt), copy.deepcopy(case.model)
    for number in range(5):
        case.step()
        if number % 2:
            case.take()
    other.take().apply_(mirror)
    assert torch.equal(mirror.one.weight, case.model.one.weight)
    case.opt.flush()
    assert "one.weight" not in case.dense()
    other.take().apply_(mirror)
    assert torch.equal(mirror.one.weight, case.model.one.weight)


def test_a_follower_that_is_gone_leaves_nothing() -> None:
    case = Case()
    case.step()
    assert case.opt.statistics()["change_bytes"] >= case.model.one.weight.numel() // 8 > 0
    del case.follower
    gc.collect()
    case.step()
    assert "change_bytes" not in case.opt.statistics()


def test_groups_and_freezing() -> None:
    case = Case()
    case.step()
    case.opt.add_param_group({"params": [case.model.own]})
    case.step()
    case.take()
    case.model.odd.requires_grad_(False)
    case.step()
    case.take()
    case.model.odd.requires_grad_(True)
    case.step()
    assert "own" in case.take().names


def test_optimizers_that_come_and_go() -> None:
    case = Case()
    case.step()
    case.take()
    state = case.opt.state_dict()
    case.opt.load_state_dict(state)
    case.step()
    case.take()
    fork = copy.deepcopy(case.opt)
    assert not fork.holdings.changes.wanted
    case.step()
    case.opt.__setstate__(case.opt.__getstate__())
    case.step()
    case.take()
    case.step()
    case.opt.close()
    assert "one.weight" in case.dense()
    new = zk.AdamW(case.opt.param_groups[0]["params"], lr=1e-3)
    case.step(new)
    assert "one.weight" in case.dense()  # nobody tells what it changes


@pytest.mark.parametrize("asks", [0, 2])
@pytest.mark.parametrize("tier", ["device", "cpu", "disk"])
@pytest.mark.parametrize("schedule", ["sync", zk.Delayed(after=0), zk.Delayed(after=2)], ids=str)
def test_masters_that_were_loaded_without_their_parameters(tier: str, schedule: Any, asks: int, tmp_path: Path) -> None:
    where: Any = zk.Nvme(tmp_path) if tier == "disk" else tier
    case = Case(master_format="fp32", tier=where, schedule=schedule)
    for _ in range(4):
        case.step()
    case.opt.flush()
    case.take()
    state = copy.deepcopy(case.opt.state_dict())
    for one in state["state"].values():
        one["master"].add_(1.0)
    case.opt.load_state_dict(state)
    for _ in range(asks):  # between the load and the update that shows those masters
        case.take()
    for _ in range(4):
        case.step()
        case.take()
    case.opt.flush()
    case.take()
    for _ in range(2):
        case.step()
    case.take()
    assert not case.take().names


@pytest.mark.parametrize("asks", [0, 2])
def test_masters_that_are_loaded_before_the_first_update(asks: int) -> None:
    """No bits are there yet, which the load could count as changed."""
    last, case = Case(master_format="fp32"), Case(master_format="fp32", lr=1e-6)
    last.step()
    state = last.opt.state_dict()
    for one in state["state"].values():
        one["master"].add_(1.0)
    case.opt.load_state_dict(state)
    for _ in range(asks):
        case.take()
    case.step()
    assert "one.weight" in case.take().names


def test_what_is_frozen_after_a_load_is_told_once() -> None:
    """No update shows what its master is, and nothing of it changes."""
    case = Case(lr=1e-3, master_format="fp32")
    case.step()
    case.take()
    case.opt.load_state_dict(copy.deepcopy(case.opt.state_dict()))
    case.model.odd.requires_grad_(False)
    for _ in range(3):
        case.step()
        delta = case.take()
    assert "odd" not in delta.names and "one.weight" in delta.names


@each("after", [False, True])
def test_masters_that_are_written_before_the_first_update_that_is_followed(after: bool) -> None:
    case = Case(lr=1e-4, master_format="fp32")
    del case.follower
    case.step()
    case.mirror = copy.deepcopy(case.model)
    if after:
        case.follower = zk.deltas(case.model, case.opt)
    with torch.no_grad():
        case.opt.state[case.model.one.weight]["master"].mul_(1.5)
    if not after:
        case.follower = zk.deltas(case.model, case.opt)
    case.step()
    case.take()


def test_a_second_follower_gets_nothing_from_before() -> None:
    case = Case()
    case.step()
    other = zk.deltas(case.model, case.opt)
    assert not other.take().names
    assert case.take().names
    del case.follower, other
    gc.collect()
    case.follower = zk.deltas(case.model, case.opt)
    assert not case.take().names


def test_bits_of_rows_that_grow_are_kept() -> None:
    changes, tensor = Changes(), torch.zeros(64)
    changes.rows([(tensor, 4, 8, False, None)])[0].fill_(1)
    assert changes.rows([(tensor, 4, 20, False, None)])[0].tolist() == [1, 0, 0]


def test_several_optimizers_of_one_model() -> None:
    case = Case()
    more = zk.SGD([case.model.own], lr=0.1)
    case.follower, case.mirror = zk.deltas(case.model, [case.opt, more]), copy.deepcopy(case.model)
    case.model(torch.randn(2, 40, dtype=case.dtype)).float().sum().backward()
    case.opt.step()
    more.step()
    assert {"own", "one.weight"} <= set(case.take().names)


def test_others_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="optimizers of zerokern"):
        zk.deltas(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        zk.deltas(model.state_dict(), None)  # type: ignore[arg-type]
    case = Case()
    case.model.float()
    with pytest.raises(StateError, match="was exchanged, moved or divided"):
        case.follower.take()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_applied_to_a_sharded_module(stage: int) -> None:
    case = Case()
    there = zk.shard(copy.deepcopy(case.mirror), stage=stage)
    case.step()
    case.follower.take().apply_(there)
    with zk.gathered(there):
        assert all(torch.equal(one, there.state_dict()[name]) for name, one in case.model.state_dict().items())


def test_a_file_keeps_all(tmp_path: Path) -> None:
    case = Case()
    for number in range(3):
        case.step()
        if number == 1:
            with torch.no_grad():
                case.model.seen.add_(1)
        delta = case.follower.take()
        delta.save(path := tmp_path / f"{number}.safetensors")
        again = zk.Delta.load(path)
        assert (again.before, again.after, again.names) == (delta.before, delta.after, delta.names)
        again.apply_(case.mirror)
        assert all(torch.equal(one, case.model.state_dict()[n]) for n, one in case.mirror.state_dict().items())
    path.write_bytes(path.read_bytes().replace(b"zerokern delta 1", b"zerokern delta 9"))
    with pytest.raises(IoError, match="delta 9"):
        zk.Delta.load(path)


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("value", [-1, 1.5, float("inf"), 1 << 64, "7", None, True, [-3]], ids=str)
def test_numbers_of_a_file_that_are_none_are_refused(tmp_path: Path, value: Any, place: int) -> None:
    case = Case()
    case.step()
    case.follower.take().save(path := tmp_path / "delta.safetensors")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    described = json.loads(content[8 : 8 + length])
    listed = json.loads(described["__metadata__"]["tensors"])
    row = listed["one.weight"]
    row[max(place, 1)] = value if place else [value, 40]
    described["__metadata__"]["tensors"] = json.dumps(listed)
    text = json.dumps(described).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(IoError, match="is no delta that"):
        zk.Delta.load(path)


@pytest.mark.parametrize("part", ["counts", "places", "values"])
@pytest.mark.parametrize("how", ["short", "other dtype"])
def test_parts_that_do_not_belong_together_are_refused_by_name(part: str, how: str) -> None:
    case = Case(lr=1e-5)
    case.step()
    delta = case.follower.take()
    one = delta.tensors["one.weight"]
    assert isinstance(one.part, Packed)
    wrong = getattr(one.part, part)
    wrong = wrong[:-1] if how == "short" else wrong.to(torch.float64)
    one.part = dataclasses.replace(one.part, **{part: wrong})
    before = copy.deepcopy(case.mirror.state_dict())
    with pytest.raises(StateError, match=r"'one\.weight' cannot be read"):
        delta.apply_(case.mirror)
    assert all(torch.equal(one, before[name]) for name, one in case.mirror.state_dict().items())


def test_the_reader_in_numpy_does_the_same(tmp_path: Path) -> None:
    place = ROOT / "examples" / "read_delta.py"
    spec = importlib.util.spec_from_file_location("read_delta", place)
    assert spec and spec.loader
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    text = place.read_text()
    assert "torch" not in text and "import zerokern" not in text and len(text.splitlines()) <= 40
    case = Case(lr=1e-5)
    kinds = {2: (torch.int16, np.uint16), 8: (torch.int64, np.uint64)}
    words = {}
    for name, one in case.follower._tensors.items():
        signed, unsigned = kinds[one.itemsize]
        words[name] = one.detach().reshape(-1).view(signed).numpy().copy().view(unsigned)
    for _ in range(4):
        case.step()
        with torch.no_grad():
            case.model.seen.add_(1)
        case.follower.take().save(path := tmp_path / "delta.safetensors")
        reader.read(str(path), words)
    for name, one in case.follower._tensors.items():
        assert np.array_equal(
            one.detach().reshape(-1).view(kinds[one.itemsize][0]).numpy(), words[name].view(f"i{one.itemsize}")
        )
