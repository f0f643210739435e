"""zk.save and zk.load on one rank: every tier, schedule, stage and format goes out and in, and training goes on."""

from __future__ import annotations

import enum
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BF16, Case, Small, digest, load, same, save
from torch import nn
from torch.distributed import checkpoint as dcp

import zerokern as zk
from zerokern.core.errors import IoError, StateError

SGD = {"momentum": 0.9}
CASES = {
    "plain": Case(),
    "int8": Case(state_format="int8"),
    "bf16 state": Case(state_format="bf16"),
    "bf16 split16": Case(dtype=BF16),
    "bf16 split8 int8": Case(dtype=BF16, state_format="int8", master_format="split8"),
    "bf16 fp32 master": Case(dtype=BF16, master_format="fp32"),
    "bf16 without master": Case(dtype=BF16, master_format="none", settings={"stochastic_seed": 5}),
    "amsgrad-free Adam": Case(optimizer="Adam"),
    "Lion": Case(optimizer="Lion", state_format="int8"),
    "Adagrad": Case(optimizer="Adagrad"),
    "SGD": Case(optimizer="SGD", settings=SGD),
    "SGD without momentum": Case(optimizer="SGD"),
    "clipped": Case(settings={"max_grad_norm": 0.1}),
    "host": Case(tier="cpu", dtype=BF16),
    "host overlapped": Case(tier="cpu", schedule="overlap", state_format="int8", dtype=BF16),
    "delayed": Case(tier="cpu", schedule=zk.Delayed(after=1)),
    "delayed from the start": Case(tier="cpu", schedule=zk.Delayed(after=0), dtype=BF16),
    "delayed, not yet": Case(tier="cpu", schedule=zk.Delayed(after=9)),
    "disk": Case(tier="nvme"),
    "disk int8 split8": Case(tier="nvme", dtype=BF16, state_format="int8", master_format="split8"),
    "stage 0": Case(stage=0),
    "stage 1": Case(stage=1, dtype=BF16),
    "stage 2": Case(stage=2, state_format="int8"),
    "stage 3": Case(stage=3),
    "stage 3 bf16 int8": Case(stage=3, dtype=BF16, state_format="int8", master_format="split8"),
    "stage 3 on disk": Case(stage=3, tier="nvme", dtype=BF16),
    "stage 3 delayed": Case(stage=3, tier="cpu", schedule=zk.Delayed(after=1)),
    "stage 2 overlapped": Case(stage=2, tier="cpu", schedule="overlap"),
    "torch AdamW": Case(optimizer="torch.AdamW"),
    "torch SGD": Case(optimizer="torch.SGD", settings=SGD),
}
COMMON = ("plain", "delayed", "disk int8 split8", "stage 3")
QUICK = (*COMMON, "bf16 split16", "bf16 fp32 master", "host overlapped", "stage 1", "stage 3 bf16 int8", "torch AdamW")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", EVERY)
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Loss scale, learning rate, random numbers, pending updates: whatever a step depends on."""
    case = CASES[name]
    first = case.begin(tmp_path / "first").train(3)
    saved = first.whole()
    first.save(tmp_path / "step3")
    expected = first.train(3)
    draws = torch.rand(2), random.random()
    second = case.begin(tmp_path / "second", seed=1).train(1)
    second.load(tmp_path / "step3")
    same(second.whole(), saved)
    second.train(3)
    same(second.whole(), expected.whole())
    assert torch.equal(torch.rand(2), draws[0]) and random.random() == draws[1]
    assert second.scaler.get_scale() == expected.scaler.get_scale()
    assert second.opt.param_groups[0]["lr"] == expected.opt.param_groups[0]["lr"]


@pytest.mark.parametrize("name", COMMON)
def test_saving_changes_nothing(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = case.begin(tmp_path / "a").train(5).whole()
    run = case.begin(tmp_path / "b")
    for _ in range(5):
        run.train(1).save(tmp_path / "last")
    same(run.whole(), expected)


def test_before_the_first_step(tmp_path: Path) -> None:
    case = Case(stage=2, dtype=BF16)
    first = case.begin(tmp_path)
    first.save(tmp_path / "new")
    expected = first.train(2).whole()
    second = case.begin(tmp_path, seed=3)
    second.load(tmp_path / "new")
    same(second.train(2).whole(), expected)


def test_the_model_alone(tmp_path: Path) -> None:
    first = Case(dtype=BF16).begin(tmp_path).train(2)
    save(tmp_path / "model", first.model)
    other = Small().to(BF16)
    assert load(tmp_path / "model", other) == {}
    for mine, theirs in zip(other.state_dict().values(), first.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_model_of_a_checkpoint_with_an_optimizer(tmp_path: Path) -> None:
    first = Case(stage=3).begin(tmp_path).train(2)
    first.save(tmp_path / "both")
    other = Small()
    load(tmp_path / "both", other)
    whole = first.whole()
    same({name: param.detach() for name, param in other.named_parameters()}, {n: whole[n] for n in names_of(other)})


def test_two_optimizers(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        opts = [zk.AdamW(model[0].parameters()), zk.SGD(model[1].parameters(), lr=0.1, momentum=0.9)]
        for number in range(2):
            model(torch.full((2, 3), 1.0 + number)).sum().backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        return model, opts

    model, opts = made(0)
    save(tmp_path / "two", model, opts)
    other, theirs = made(1)
    load(tmp_path / "two", other, theirs)
    for one, two in zip(opts, theirs, strict=True):
        for mine, their in zip(one.state_dict()["state"].values(), two.state_dict()["state"].values(), strict=True):
            assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(their[k])) for k in mine)


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "step": 7,
        "loss": 0.1 + 0.2,
        "best": -math.inf,
        "names": ["a", ("b", None, True)],
        "by number": {1: "one", (2, 3): b"\0\xff"},
        "tensor": torch.arange(6, dtype=torch.int16).view(2, 3),
        "half": torch.randn(3).to(BF16),
        "dtype": BF16,
    }
    save(tmp_path / "x", nn.Linear(1, 1), extra=extra)
    found = load(tmp_path / "x", nn.Linear(1, 1))
    assert list(found) == list(extra)
    for name, value in extra.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype
        else:
            assert found[name] == value and type(found[name]) is type(value)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": [0, {"b": Colour.RED}]}, ("extra['a'][1]['b']", "Colour")),
        ({"a": object()}, ("extra['a']", "object")),
        ({1: 2}, ("keys are strings", "1")),
        ([1], ("extra=[1]", "a dict")),
    ],
)
def test_extra_that_cannot_be_kept_is_named(extra: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(TypeError) as refused:
        save(tmp_path / "x", nn.Linear(1, 1), extra=extra)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert not (tmp_path / "x").exists()


def test_extra_that_is_missing_is_named(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x")
    before = run.train(1).whole()
    with pytest.raises(StateError, match="no extra 'sampler'; it has") as refused:
        run.load(tmp_path / "x", extra={"sampler": run.lr})
    assert "'scaler'" in str(refused.value)
    with pytest.raises(TypeError, match=r"extra\['step'\]"):
        run.load(tmp_path / "x", extra={"step": 3})
    same(run.whole(), before)


def test_random_numbers_go_on_unless_asked_not_to(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    random.seed(1)
    torch.manual_seed(1)
    save(tmp_path / "x", model)
    expected = torch.rand(2), random.random()
    load(tmp_path / "x", model, rng=False)
    assert not torch.equal(torch.rand(2), expected[0])
    load(tmp_path / "x", model)
    assert torch.equal(torch.rand(2), expected[0]) and random.random() == expected[1]
    save(tmp_path / "y", model, rng=False)
    load(tmp_path / "y", model)
    assert not torch.equal(torch.rand(2), expected[0])


def test_a_folder_holds_the_newest_alone(tmp_path: Path) -> None:
    run = Case().begin(tmp_path)
    sizes = []
    for _ in range(3):
        run.train(1).save(tmp_path / "last")
        sizes.append(sorted(path.stat().st_size for path in (tmp_path / "last").iterdir()))
    assert len(sizes[1]) == len(sizes[2]) == 3, list((tmp_path / "last").iterdir())
    assert run.load(tmp_path / "last")["step"] == 3


def test_torch_reads_what_is_saved(tmp_path: Path) -> None:
    run = Case(stage=3, dtype=BF16).begin(tmp_path).train(2)
    run.save(tmp_path / "x")
    names = names_of(run.model)
    items = {f"model.{name}": torch.zeros_like(param) for name, param in Small().to(BF16).named_parameters()}
    dcp.load(items, checkpoint_id=tmp_path / "x")
    same({name: items[f"model.{name}"] for name in names}, {name: run.whole()[name] for name in names})


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def damage(folder: Path, where: float = 0.5) -> Path:
    (data,) = folder.glob("*.distcp")
    at = int(data.stat().st_size * where)
    with data.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))
    return data


@pytest.mark.parametrize("name", ["plain", "stage 3", "disk"])
def test_damage_is_found_before_anything_is_changed(name: str, tmp_path: Path) -> None:
    run = CASES[name].begin(tmp_path / "swap").train(2)
    run.save(tmp_path / "x")
    data = damage(tmp_path / "x")
    before = run.train(1).whole()
    with pytest.raises(IoError, match=data.name) as refused:
        run.load(tmp_path / "x")
    assert refused.value.key or any(word in str(refused.value) for word in ("model.", "optim.")), str(refused.value)
    same(run.whole(), before)
    run.train(1)


def test_damage_that_is_found_while_reading_leaves_an_optimizer_that_refuses(tmp_path: Path) -> None:
    """Of several blocks: what is read first, beside the state, is sound."""
    model = nn.Linear(600, 600)
    opt = zk.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 600)).sum().backward()
        opt.step()

    step()
    for name in ("x", "whole"):
        save(tmp_path / name, model, opt)
    saved = digest(model.state_dict())
    damage(tmp_path / "x")
    with pytest.raises(IoError, match=r"distcp.*optim\.state\.weight"):
        load(tmp_path / "x", model, opt, verify="reading")
    with pytest.raises(StateError, match="broken off"):
        step()
    with pytest.raises(StateError, match="broken off"):
        save(tmp_path / "again", model, opt)
    assert not (tmp_path / "again").exists()
    load(tmp_path / "whole", model, opt, verify="reading")
    assert digest(model.state_dict()) == saved
    step()


def test_an_edited_index_and_a_truncated_file_are_named(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(2)
    run.save(tmp_path / "x")
    before = run.whole()
    index = tmp_path / "x" / "zerokern.json"
    text = index.read_text()
    index.write_text(text.replace('"world":1', '"world":2'))
    with pytest.raises(IoError, match=r"zerokern\.json"):
        run.load(tmp_path / "x")
    index.write_text(text)
    (data,) = (tmp_path / "x").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(IoError, match="truncated"):
        run.load(tmp_path / "x")
    same(run.whole(), before)


def test_another_model_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(2)
    run.save(tmp_path / "x")
    model = Small()
    model.leave = nn.Linear(10, 7)
    model.more = nn.Linear(2, 2)
    del model.enter
    opt = zk.AdamW(model.parameters())
    before = digest(model.state_dict())
    with pytest.raises(StateError) as refused:
        load(tmp_path / "x", model, opt)
    text = str(refused.value)
    assert all(word in text for word in ("enter.weight", "more.weight", "leave.weight", "(7, 10)", "(3, 10)")), text
    assert digest(model.state_dict()) == before
    assert not opt.state


def test_rounding_must_be_asked_for(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(2)
    run.save(tmp_path / "x")
    narrow = Case(state_format="int8").begin(tmp_path, seed=2)
    before = digest(narrow.whole())
    with pytest.raises(StateError, match="lossy=True"):
        narrow.load(tmp_path / "x")
    assert digest(narrow.whole()) == before
    narrow.load(tmp_path / "x", lossy=True)
    state = narrow.whole()
    assert state["enter.weight.exp_avg.codes"].dtype == torch.int8
    for name, _ in narrow.model.named_parameters():
        assert torch.equal(state[name], run.whole()[name])
    narrow.train(2)


def test_what_no_optimizer_can_continue_is_not_saved(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    run.opt.holdings.torn = True
    with pytest.raises(StateError, match="broken off"):
        run.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_no_room_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x")
    before = sorted(path.name for path in (tmp_path / "x").iterdir())

    def full(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[3] = found[4] = 1  # blocks that are free
        return os.statvfs_result(found)

    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises((zk.BudgetError, IoError), match=r"fit|free|space"):
        run.save(tmp_path / "x")
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before
    assert run.load(tmp_path / "x")["step"] == 1


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    seen: list[tuple[int, int]] = []
    save(tmp_path / "x", model, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] >= 512 * 512 * 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"wait": 1}, TypeError),
        ({"staging_budget": 10}, ValueError),
        ({"staging_budget": "1G", "wait": False}, TypeError),
        ({"group": object()}, ValueError),
        ({"progress": "yes"}, TypeError),
    ],
)
def test_arguments_are_checked(settings: dict[str, Any], kind: type, tmp_path: Path) -> None:
    (name,) = set(settings) - {"wait"} or {"wait"}
    with pytest.raises(kind, match=name):
        save(tmp_path / "x", nn.Linear(1, 1), **settings)
    assert not (tmp_path / "x").exists()


def test_load_says_how_it_is_called(tmp_path: Path) -> None:
    save(tmp_path / "x", nn.Linear(1, 1))
    with pytest.raises(ValueError, match="verify='never'"):
        load(tmp_path / "x", nn.Linear(1, 1), verify="never")
    with pytest.raises(TypeError, match="lossy"):
        load(tmp_path / "x", nn.Linear(1, 1), lossy="yes")
    with pytest.raises(IoError, match="does not exist"):
        load(tmp_path / "y", nn.Linear(1, 1))


def test_the_index_is_plain_text(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x")
    head, body = (tmp_path / "x" / "zerokern.json").read_text().split("\n", 1)
    assert json.loads(head)["zerokern"] == 1
    assert set(json.loads(body)["values"]["extra"]) == {"step", "lr", "scaler"}
