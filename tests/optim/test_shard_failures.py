"""Ranks whose settings differ are told which, and real ranks hear of a disk that fails; test_outcomes.py has more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from failing_cases import learn
from offload_cases import World, weights_of
from optim_cases import FP32, MAKERS, same_bits
from shard_double import Divided, gradients, on_ranks
from tables import each
from torch import nn
from worlds import STAGES, built, on_threads, ranked, refusal, run_ranks, says

import zerokern as zk
from zerokern.comm import Group
from zerokern.io import Nvme
from zerokern.optim.accord import Accord

Tier = Callable[..., Nvme]
SIZES = (40_000, 300)


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


# two values of each setting
DIFFER: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value"), (0.5, 0.25)),
    **dict.fromkeys(("amsgrad", "foreach", "capturable", "differentiable"), (None, False)),
    **dict.fromkeys(("maximize", "nesterov"), (True, False)),
    "betas": ((0.5, 0.75), (0.5, 0.5)),
    "momentum": (0.5, 0.75),
    "dampening": (0.0, 0.5),
    "fused": (None, True),
    "ns_coefficients": ((3.0, -4.0, 1.0), (3.0, -4.0, 2.0)),
    "ns_steps": (3, 4),
    "ns_dtype": ("bf16", "fp32"),
    "ns_form": ("standard", "gram"),
    "adjust_lr_fn": ("original", "match_rms_adamw"),
    "split": (1, 2),
    "tier": ("cpu", Nvme("unused")),
    "schedule": ("sync", "overlap"),
    "update": ("host", "device"),
    "state_format": ("fp32", "bf16"),
    "master_format": (None, "none"),
    "stochastic_seed": (None, 1),
    "max_grad_norm": (1.0, 0.5),
    "group": (None, Group(0, 1, torch.device("cpu"), "alone")),
}
BESIDE: dict[str, dict[str, Any]] = {  # without which it means nothing
    "stochastic_seed": {"master_format": "none"},
    "nesterov": {"momentum": 0.5},
}


# each with the options that those before it have not
KINDS = [zk.AdamW, zk.Adagrad, zk.SGD, zk.Muon]
OPTIONS = [set(inspect.signature(kind).parameters) for kind in KINDS]
NEW = [sorted(own.difference(*OPTIONS[:place])) for place, own in enumerate(OPTIONS)]


@each("stage", STAGES)
def test_each_setting_that_differs_is_refused_by_name_in_the_first_step(stage: int) -> None:
    """Also one that is new: there is no list of those that are compared."""

    def differs(world: World, model: nn.Module, kind: Any, name: str) -> None:
        params = list(model.parameters())
        if name == "params":
            opt, named = kind(params[: 2 - world.rank]), "param_groups[0] lacks 1.weight"
        else:
            given = {name: DIFFER[name][world.rank], **BESIDE.get(name, {})}
            opt, named = kind(params, **given), f"{'beta2' if name == 'betas' else name} "
        says(refusal(opt.step, zk.StateError), [named, "not so on others", "Nothing was changed"])

    def work(world: World) -> None:
        for kind, names in zip(KINDS, NEW, strict=True):
            model = built(lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
            world.shard(model, stage=stage, **({"whole": ["*.weight"]} if kind is zk.Muon and stage in (1, 2) else {}))
            before = weights_of(model)
            model(torch.ones(2, 4)).square().mean().backward()
            for name in names:
                differs(world, model, kind, name)
            chain = zk.ChainedOptimizer([kind(model.parameters())], max_grad_norm=1.0 + world.rank)
            says(refusal(chain.step, zk.StateError), ["max_grad_norm is 2.0, and not so on others"])
            assert same_bits(weights_of(model).values(), before.values())

    on_threads(2, work)


@ranked
def fail_twice(world: World, stage: int, folder: str) -> list[str]:
    """What each of five steps said on a rank; in the second no disk can be read, in the third that of rank 1 fails."""
    model = built(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
    world.shard(model, stage=stage)
    optimizer = MAKERS["adamw"](model.parameters(), tier=Nvme(f"{folder}/rank{world.rank}", ring_nbytes=1 << 20))
    said = [learn(model, optimizer, 0)]
    store, before = optimizer.holdings.disk.tier.swap, weights_of(model)
    for name, strikes in (("get", True), ("put", world.rank == 1)):
        call = getattr(store, name)
        if strikes:
            setattr(store, name, lambda *_, **__: (_ for _ in ()).throw(zk.IoError("the disk failed")))
        said.append(learn(model, optimizer, 1))
        setattr(store, name, call)
        assert name == "put" or same_bits(weights_of(model).values(), before.values())
    return [*said, learn(model, optimizer, 2), learn(model, optimizer, 3)]


@each("stage", [0, 2])
def test_real_ranks_agree_too(stage: int, tmp_path: Path) -> None:
    for first, second, third, *rest in run_ranks(2, fail_twice, stage, str(tmp_path)):
        assert not first and "the disk failed" in second and "Nothing was changed" in second
        assert "the disk failed" in third and "load a checkpoint" in third
        assert all("broken off" in one for one in rest)
