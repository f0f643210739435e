"""Mixed precision: what a policy makes of parameters and inputs, loss scaling, and steps that all ranks must skip."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from worlds import World, built, everywhere, full, step_and_zero
from zero_cases import Net, batch, make_adamw

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
