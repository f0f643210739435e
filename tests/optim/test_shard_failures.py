"""A step that fails on one rank has one outcome on all: all is from before, all from after, or all are torn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_cases import learn
from offload_cases import World
from optim_cases import FP32, MAKERS, same_bits, same_state
from shard_double import Divided, gradients, on_ranks, whole_state
from tables import each
from torch import nn
from worlds import built, ranked, run_ranks

import zerokern as zk
from zerokern.io import Nvme
from zerokern.optim.accord import Accord
from zerokern.optim.binding import Binding

Tier = Callable[..., Nvme]
SIZES = (40_000, 300)


class Trouble:
    """What fails, and on which rank; a rank is a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self._here = threading.local()
        self._original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments, **named: self(*arguments, **named))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        left = getattr(self._here, "left", None)
        if left == 0:
            self._here.left = None
            raise zk.IoError("the disk failed", path="swap", errno=5)
        if left is not None:
            self._here.left -= 1
        return self._original(*arguments, **named)

    def comes(self, after: int = 0) -> None:
        """Once, on this rank, after so many calls that go well."""
        self._here.left = after


def begun(group: Any, stage: int, tier: Any, **settings: Any) -> tuple[Divided, Any]:
    model = Divided(group, stage, SIZES, FP32)
    return model, MAKERS["adamw"](model.zero_order, tier=tier, **settings)


def step(model: Divided, optimizer: Any, seed: int) -> str:
    """What it said, if it failed."""
    model.set_grads(gradients(seed, SIZES))
    try:
        optimizer.step()
    except zk.ZerokernError as error:
        return str(error)
    return ""


@each("stage, first", [(0, False), (1, True), (3, False)])
def test_a_disk_that_fails_on_one_rank_in_the_middle_tears_all(
    tier: Tier, stage: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, trouble = [tier(), tier()], Trouble(monkeypatch, Binding, "_store")

    def work(group: Any) -> None:
        model, optimizer = begun(group, stage, tiers[group.rank])
        saved = None
        if not first:
            assert not step(model, optimizer, 0)
            saved = optimizer.state_dict(), model.values()
        if group.rank == 1:
            trouble.comes(1)
        said = step(model, optimizer, 1)
        assert "the disk failed" in said and "load a checkpoint" in said
        assert ("rank 1" in said) == (group.rank == 0)
        for refused in (optimizer.step, optimizer.state_dict):
            with pytest.raises(zk.StateError, match="broken off"):
                refused()
        if saved is not None:
            optimizer.load_state_dict(saved[0])
            assert not step(model, optimizer, 1)

    on_ranks(2, work)


@each("stage", [0, 3])
def test_a_disk_that_fails_on_all_ranks_before_anything_changed_leaves_all_as_it_was(
    tier: Tier, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, trouble = [tier(), tier()], Trouble(monkeypatch, Binding, "_fetch")

    def work(group: Any) -> None:
        model, optimizer = begun(group, stage, tiers[group.rank])
        straight, reference = begun(group, stage, "device")
        assert not step(model, optimizer, 0) and not step(straight, reference, 0)
        trouble.comes()
        assert "Nothing was changed" in step(model, optimizer, 1)
        assert same_bits(model.values(), straight.values())
        assert not step(model, optimizer, 1) and not step(straight, reference, 1)
        assert same_bits(model.values(), straight.values())
        assert same_state(whole_state(group, optimizer.state_dict()), whole_state(group, reference.state_dict()))

    on_ranks(2, work)


@each("stage", [1, 3])
def test_ranks_with_different_settings_are_told_which_before_anything_changed(stage: int) -> None:
    def work(group: Any) -> None:
        model, optimizer = begun(group, stage, "device", weight_decay=0.5)
        assert not step(model, optimizer, 0)
        before = model.values()
        if group.rank == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.25
        said = step(model, optimizer, 1)
        for rank, value in enumerate((0.5, 0.25)):
            assert f"on rank {rank}: weight_decay of param_groups[0] is {value}, and not so on others" in said
        assert "Nothing was changed" in said
        assert same_bits(model.values(), before)
        optimizer.param_groups[0].update(lr=0.125, weight_decay=0.25)
        assert not step(model, optimizer, 1)
        assert not same_bits(model.values(), before)
        last = {**optimizer.param_groups[0], "params": [optimizer.param_groups[0]["params"].pop()], "eps": 0.5}
        optimizer.param_groups.append(last)
        assert not step(model, optimizer, 2)
        last["eps"] = 0.25 + group.rank
        assert "eps of param_groups[1] is 1.25" in step(model, optimizer, 3)
        last["eps"], last["betas"] = 0.5, [0.5, 0.75]
        assert not step(model, optimizer, 4)
        last["betas"][1] = 0.625 + group.rank / 8  # in place
        assert "beta2 of param_groups[1] is 0.625" in step(model, optimizer, 5)

    on_ranks(2, work)


def test_a_setting_on_a_device_is_not_read() -> None:
    class There(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments: Any, **settings: Any) -> Any:
            raise AssertionError("this waits for the device")

    accord = Accord([])
    for rate in (0.5, 0.25):
        accord.begin()
        accord.settings = [{"lr": torch.tensor(rate).as_subclass(There), "eps": 0.5}]
        assert accord.total([4.0], skip=False) == 4.0


@ranked
def fail_once(world: World, stage: int, folder: str) -> list[str]:
    """What each of four steps said on a rank; the disk of rank 1 fails once, in the second."""
    model = built(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
    world.shard(model, stage=stage)
    optimizer = MAKERS["adamw"](model.parameters(), tier=Nvme(f"{folder}/rank{world.rank}", ring_nbytes=1 << 20))
    said = [learn(model, optimizer, 0)]
    store, put = optimizer.holdings.disk.tier.swap, optimizer.holdings.disk.tier.swap.put
    if world.rank == 1:
        store.put = lambda *_: (_ for _ in ()).throw(zk.IoError("the disk failed"))
    said.append(learn(model, optimizer, 1))
    store.put = put
    return [*said, learn(model, optimizer, 2), learn(model, optimizer, 3)]


def test_real_ranks_agree_too(tmp_path: Path) -> None:
    for first, second, *rest in run_ranks(2, fail_once, 2, str(tmp_path)):
        assert not first and "the disk failed" in second and "load a checkpoint" in second
        assert all("broken off" in one for one in rest)
