"""A chain of optimizers is one object: the bits of its optimizers side by side, one norm, one decision."""

from __future__ import annotations

import copy
import io
import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import nn

import zerokern as zk

WIDTH, STEPS = 16, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def made(net: nn.Module, **settings: Any) -> list[Any]:
    matrices, rest = zk.muon_groups(net)
    return [zk.Muon(matrices, lr=0.05, **settings), zk.AdamW(rest, lr=0.03, **settings)]


def losses(net: nn.Module, first: int = 0, last: int = STEPS) -> Any:
    for step in range(first, last):
        rng = torch.Generator().manual_seed(step)
        yield step, net(torch.randn(8, 4, generator=rng)).square().sum()


def params_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def same(one: nn.Module, other: nn.Module) -> None:
    theirs = params_of(other)
    assert [name for name, value in params_of(one).items() if not torch.equal(value, theirs[name])] == []


def chained(net: nn.Module, max_grad_norm: float | None = 0.5, **settings: Any) -> Any:
    opt = zk.ChainedOptimizer(made(net, **settings), max_grad_norm=max_grad_norm)
    return opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))


def trained(net: nn.Module, opt: Any, scheduler: Any, first: int = 0, last: int = STEPS) -> list[float | None]:
    norms = []
    for _, loss in losses(net, first, last):
        loss.backward()
        opt.step()
        norms.append(opt.grad_norm)
        scheduler.step()
        opt.zero_grad()
    opt.flush()
    return norms


SETTINGS: dict[str, dict[str, Any]] = {
    "device": {}, "int8": {"state_format": "int8"}, "overlap": {"tier": "cpu", "schedule": "overlap"},
    "delayed": {"tier": "cpu", "schedule": zk.Delayed(after=2)},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_of_the_same_loop_with_two_optimizers(name: str) -> None:
    net, other = Net(), Net()
    norms = trained(net, *chained(net, **SETTINGS[name]))
    opts = made(other, **SETTINGS[name])
    schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)) for opt in opts]
    params = [param for opt in opts for group in opt.param_groups for param in group["params"]]
    expected = []
    for _, loss in losses(other):
        loss.backward()
        expected.append(zk.clip_grad_norm_(params, 0.5).item())
        for one in (*opts, *schedulers):
            one.step()
        for opt in opts:
            opt.zero_grad()
    for opt in opts:
        opt.flush()
    same(net, other)
    assert norms == expected and min(expected) > 0.5


@pytest.mark.parametrize("stage", [None, 0, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_of_all_or_of_none(name: str, stage: Any) -> None:
    """The gradients of the matrices alone are finite; without max_grad_norm only zk.shard looks at them."""
    net = Net()
    if stage is not None:
        zk.shard(net, stage=stage, whole=zk.muon_groups(net)[0])
    opt, scheduler = chained(net, 1.0, **SETTINGS[name])
    trained(net, opt, scheduler, 0, 3)
    before = params_of(net)
    for _, loss in losses(net, 3, 4):
        (loss + net.enter.bias.sum() * math.inf).backward()
    assert all(block.weight.grad is not None for block in net.blocks)
    opt.step()
    opt.zero_grad()
    opt.flush()
    after = params_of(net)
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []
    assert opt.skipped_steps == 1 and [one.skipped_steps for one in opt.chained_optimizers] == [1, 1]
    trained(net, opt, scheduler, 4)
    assert all(value.isfinite().all() for value in params_of(net).values())
    assert not torch.equal(params_of(net)["blocks.0.weight"], before["blocks.0.weight"])


@pytest.mark.parametrize("way", ["state_dict", "torch.save", "zk.save", "a list", "copy"])
@pytest.mark.parametrize("name", SETTINGS)
def test_resumed_as_if_never_stopped(tmp_path: Path, name: str, way: str) -> None:
    net, other = Net(), Net()
    opt, scheduler = chained(net, **SETTINGS[name])
    trained(net, opt, scheduler, 0, 3)
    again, rates = chained(other, **SETTINGS[name])
    if way == "copy":
        other, again = copy.deepcopy((net, opt))
        rates = torch.optim.lr_scheduler.LambdaLR(again, lambda step: 1 / (1 + step), last_epoch=2)
    elif way in ("zk.save", "a list"):
        given = list(opt.chained_optimizers) if way == "a list" else opt
        zk.save(tmp_path / "step", net, given, {"rates": scheduler})
        zk.load(tmp_path / "step", other, again, extra={"rates": rates})
    else:
        saved = {"net": net.state_dict(), "opt": opt.state_dict(), "rates": scheduler.state_dict()}
        if way == "torch.save":
            torch.save(saved, file := io.BytesIO())
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        other.load_state_dict(saved["net"])
        again.load_state_dict(saved["opt"])
        rates.load_state_dict(saved["rates"])
    trained(net, opt, scheduler, 3)
    trained(other, again, rates, 3)
    same(net, other)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", ["device", "overlap"])
def test_gradscaler(name: str, unscaled: bool) -> None:
    """With powers of two as scales, the bits of a run without one; a step that overflows is none of both."""
    net, other = Net(), Net()
    (opt, rates), (plain, others) = chained(net, **SETTINGS[name]), chained(other, **SETTINGS[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-100, growth_interval=1000)
    for step, loss in losses(net, 0, STEPS):
        scaler.scale(loss * (2.0**20 if step == 0 else 1.0)).backward()
        if unscaled:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step:
            rates.step()
    assert opt.skipped_steps == 1 and scaler.get_scale() == 2.0**20
    trained(other, plain, others, 1)
    for name, value in params_of(net).items():
        torch.testing.assert_close(value, params_of(other)[name], rtol=1e-5, atol=1e-6)


def test_what_torchs_scheduler_and_distributed_checkpoints_see() -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    net, other = Net(), Net()
    opt, scheduler = chained(net)
    trained(net, opt, scheduler, 0, 3)
    assert [group["lr"] for one in opt.chained_optimizers for group in one.param_groups] == [0.05 / 4, 0.03 / 4]
    assert len(opt.state) == 6 and set(map(id, opt.state)) == set(map(id, net.parameters()))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(net, opt, options=flat)
    assert saved["param_groups.blocks.0.weight.momentum"] == 0.95 and "state.enter.weight.exp_avg_sq" in saved
    again, rates = chained(other)
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, again, saved, options=flat)
    rates.load_state_dict(scheduler.state_dict())
    for one in (trained(net, opt, scheduler, 3), trained(other, again, rates, 3)):
        assert len(one) == 3
    same(net, other)


def test_numbers_for_loggers_and_bytes() -> None:
    net = Net()
    opt, scheduler = chained(net, None)
    trained(net, opt, scheduler, 0, 2)
    assert opt.grad_norm is None and opt.statistics()["steps"] == 2
    opt.max_grad_norm = math.inf
    trained(net, opt, scheduler, 2, 3)
    found = opt.statistics()
    assert found["grad_norm"] == opt.grad_norm and found["steps"] == 3 and found["skipped_steps"] == 0
    parts = [one.statistics()["state_bytes/cpu"] for one in opt.chained_optimizers]
    assert found["state_bytes/cpu"] == sum(parts)
    roles, *each = (zk.measure(net, one).roles for one in (opt, *opt.chained_optimizers))
    assert len(roles) == 4 and all(roles[name] == one[name] for one in each for name in one)
    assert repr(opt).count("Muon (") == repr(opt).count("AdamW (") == 1
    with opt:
        pass
    with pytest.raises(zk.StateError, match="closed"):
        opt.step()


def broken(*_: Any, **__: Any) -> None:
    raise zk.StateError("broken")


@each("broken_ones", [(0,), (1,), (0, 1)])
@each("raised", [(None, None, None), (KeyError, KeyError("another"), None)])
def test_each_of_them_is_closed_whatever_another_one_raises(broken_ones: tuple[int, ...], raised: tuple) -> None:
    for how in ("close", "with"):
        opt, _ = chained(Net(), None)
        for number in broken_ones:
            one = opt.chained_optimizers[number]
            one.runner.flush = one.runner.close = broken
        with pytest.raises(zk.StateError, match="broken"):
            opt.close() if how == "close" else opt.__exit__(*raised)
        for number, one in enumerate(opt.chained_optimizers):
            assert number in broken_ones or one.holdings.closed


def test_masters_of_both_are_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = Net().bfloat16()
    opt = zk.ChainedOptimizer(made(net))
    net(torch.ones(2, 4).bfloat16()).float().sum().backward()
    opt.step()
    zk.export(tmp_path, net, opt=opt, dtype=torch.float32)
    found = load_file(next(tmp_path.glob("*.safetensors")))
    for name in ("blocks.0.weight", "enter.weight"):
        assert found[name].bfloat16().equal(net.get_parameter(name)) and not found[name].equal(
            net.get_parameter(name).float()
        )


def test_refusals() -> None:
    net = Net()
    muon, adamw = made(net)
    opt = zk.ChainedOptimizer([muon, adamw])
    alone = zk.AdamW(net.parameters())
    for work, kind, words in [
        (lambda: zk.ChainedOptimizer([]), ValueError, "one optimizer or more"),
        (lambda: zk.ChainedOptimizer([muon, torch.optim.SGD(net.parameters())]), TypeError, "SGD.*of zerokern"),
        (lambda: zk.ChainedOptimizer([muon, alone]), ValueError, "different parameters"),
        (lambda: zk.ChainedOptimizer([zk.SGD([nn.Parameter(torch.ones(1))], max_grad_norm=1.0)]), ValueError, "chain"),
        (lambda: zk.ChainedOptimizer([muon, adamw], max_grad_norm=0.0), ValueError, "max_grad_norm"),
        (lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), ValueError, "chained_optimizers"),
        (lambda: setattr(opt, "param_groups", [{}]), AttributeError, "chained_optimizers"),
        (lambda: opt.load_state_dict(alone.state_dict()), ValueError, "1 param_groups, the chain has 2"),
        (lambda: opt.param_groups.append({}), TypeError, "change them there"),
        (lambda: opt.param_groups.extend([{}]), TypeError, "change them there"),
        (lambda: operator.iadd(opt.param_groups, [{}]), TypeError, "change them there"),
        (lambda: opt.param_groups.pop(), TypeError, "change them there"),
        (lambda: operator.setitem(opt.param_groups, 0, {}), TypeError, "change them there"),
        (lambda: operator.delitem(opt.param_groups, 0), TypeError, "change them there"),
    ]:
        with pytest.raises(kind, match=words):
            work()
    apart = copy.deepcopy(opt.param_groups)
    apart.append({})  # nobody's
    assert type(apart) is list and len(opt.param_groups) == 2
    adamw.add_param_group({"params": [("new", nn.Parameter(torch.ones(1)))]})
    assert len(opt.param_groups) == 3
