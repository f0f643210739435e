"""Mixed precision: what a policy makes of parameters and inputs, loss scaling, and steps that all ranks must skip."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from worlds import World, built, everywhere, full, on_ranks, ranked, step_and_zero
from zero_cases import WIDTH, Case, Net, batch, follow, make_adamw, mse

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def wide_mse(model: nn.Module, step: int, world: World) -> Tensor:
    x, y = batch(step, world.rank)
    return F.mse_loss(model(x).float(), y)


@everywhere(2, stage=[0, 3])
def test_a_policy_is_followed(world: World, stage: int) -> None:
    x, _ = batch(0, world.rank)
    for dtype, reduce, out in ((BF16, FP32, None), (BF16, None, FP32), (FP16, FP32, FP16), (None, None, None)):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, output_dtype=out)
        seen: list[torch.dtype] = []
        model = built(Net)
        model.blocks[1].register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].dtype))
        world.shard(model, stage=stage, mp_policy=policy)
        result = model(x)
        assert result.dtype == (out or dtype or FP32), (dtype, reduce, out)
        assert seen == [dtype or FP32], "the input was cast"
        result.float().square().mean().backward()
        for param in model.parameters():
            assert param.dtype == (dtype or FP32)
            grad = param.grad if stage == 0 else param.grad.local
            assert grad.dtype == (reduce or param.dtype)
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = world.shard(built(Net), stage=stage, mp_policy=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    assert model(x.to(BF16)).dtype == BF16


def nearest(value: Tensor) -> Tensor:
    """To bf16 with ties away from zero."""
    return ((value.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(BF16)


@everywhere(2, stage=[1, 3], master_format=["split16", "fp32"])
def test_the_values_that_a_model_starts_with_are_not_rounded_away(world: World, stage: int, master_format: str) -> None:
    """A step that changes nothing shows what the optimizer takes the parameters to be."""
    start = {name: param.detach().clone() for name, param in built(Net).named_parameters()}
    start["leave.bias"] += torch.tensor([3e-5, 1e-6, -2e-5])
    model = built(Net)
    model.load_state_dict(start)
    world.shard(model, stage=stage, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    optimizer = make_adamw(model.parameters(), lr=0.0, weight_decay=0.0, master_format=master_format)
    for _ in range(2):
        wide_mse(model, 0, world).backward()
        step_and_zero(optimizer)
    for name, value in full(model).items():
        assert torch.equal(value, nearest(start[name])), name
    for name, param in model.named_parameters():
        entry = optimizer.state[param]
        low = entry["master" if master_format == "fp32" else "remainder"]
        local, begin = (low.flatten(), 0) if stage == 0 else (low.local, low.start)
        wanted = start[name].flatten()[begin : begin + local.numel()]
        if master_format == "split16":
            high = nearest(wanted).view(torch.int16).to(torch.int32)
            local = ((high << 16) + local.view(torch.int16).to(torch.int32)).view(FP32)
        assert torch.equal(local, wanted), f"{name}: {(local - wanted).abs().max()} was rounded away"


class Router(Net):
    """A bf16 model with a part in fp32, as mixtures have it."""

    def __init__(self) -> None:
        super().__init__()
        self.to(BF16)
        self.router = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].norm.to(FP32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.to(BF16))
        x = x + self.router(x.float()).softmax(-1).to(BF16)
        x = self.blocks[0](x)
        x = x + self.blocks[1].up(self.blocks[1].norm(x.float()).to(BF16)).mean(-1, keepdim=True)
        return self.leave(self.blocks[2](x)).float()


@everywhere(2, stage=[2, 3])
def test_two_dtypes_in_one_unit(world: World, stage: int) -> None:
    follow(world, Case("two dtypes", Router, wide_mse), stage=stage)


def spoil_one_element(model: nn.Module, world: World, name: str, value: float) -> int:
    """One element of one parameter's gradient, which one rank owns: that nobody else can see it is the point."""
    param = dict(model.named_parameters())[name]
    grad = getattr(param.grad, "local", None)
    if grad is None:
        param.grad.flatten()[:1].fill_(value)
        return 1
    owned = grad.numel() > 0 and param.grad.start == 0
    if owned:
        grad[0] = value
    return int(owned)


def skipping(world: World, stage: int, value: float, max_grad_norm: float | None) -> None:
    model = world.shard(built(Net), stage=stage)
    settings = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    optimizer = make_adamw(model.parameters(), **settings)
    mse(model, 0, world).backward()
    step_and_zero(optimizer)
    before = full(model)
    mse(model, 1, world).backward()
    owners = world.exchange(spoil_one_element(model, world, "leave.bias", value))
    assert sum(owners) == (world.size if stage == 0 else 1), owners
    step_and_zero(optimizer)
    if stage == 0 and max_grad_norm is None:
        return  # nothing is sharded, nothing was asked: as torch's optimizers
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())
    steps = {float(optimizer.state[param]["step"]) for param in model.parameters()}
    assert steps == {1.0}, "state is untouched"
    twin = world.shard(built(Net), stage=stage)
    other = make_adamw(twin.parameters(), **settings)
    for one, opt, numbers in ((model, optimizer, [2]), (twin, other, [0, 2])):
        for number in numbers:
            mse(one, number, world).backward()
            step_and_zero(opt)
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(model).items())


def scaled(world: World, stage: int) -> None:
    """fp16 with a GradScaler: an overflow in one element of one rank's shard halves the scale everywhere."""
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32, output_dtype=FP32)
    model = world.shard(built(Net), stage=stage, mp_policy=policy)
    optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    twin = world.shard(built(Net), stage=stage, mp_policy=policy)
    other = make_adamw(twin.parameters(), max_grad_norm=1.0)
    scales = []
    for step in range(5):
        scaler.scale(mse(model, step, world)).backward()
        if step == 1:
            spoil_one_element(model, world, "enter.bias", math.inf)
        if step != 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if step != 1:
            (256 * mse(twin, step, world)).backward()
            for param in twin.parameters():
                param.grad.mul_(1 / 256)
            step_and_zero(other)
    assert scales == [256.0, 128.0, 128.0, 128.0, 256.0], scales
    for (name, mine), theirs in zip(full(model).items(), full(twin).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@ranked
def on_real_ranks(world: World) -> None:
    test_the_values_that_a_model_starts_with_are_not_rounded_away(world, 2, "split16")
    for stage, value, max_grad_norm in ((0, math.nan, 1.0), (2, math.inf, None), (3, math.nan, 1.0)):
        skipping(world, stage, value, max_grad_norm)
    scaled(world, 3)


def test_mixed_precision_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)
