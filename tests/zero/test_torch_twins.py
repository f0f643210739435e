"""torch's own tests of FSDP2 in company, by idea: which of ours is the twin of each, and the twins that were missing.

In torch's test/distributed/_composable, and here ("below": with tensor parallelism, what was missing):

test_2d_composability
    an MLP of 3, 16 and 17: test_tensor_parallel, with recomputation too and below; a transformer with sequence
    parallelism, whole parameters and gradients: the same; offloading: `other_tiers_and_times`, and below;
    checkpoints between FSDP, TP and 2-D: saving/test_layouts; what cannot be: `what_does_not_know_dtensors`, below
test_pp_composability, test_3d_composability
    test_pipelines (all schedules), test_layouts_of_ranks
test_fully_shard_training
    1-D, HSDP, accumulation: test_losses, test_hybrid, test_layouts_of_ranks, below; shared parameters, nested units,
    several forwards: module_cases, below; hooks after accumulation: test_parameter_hooks, below; two models in one
    loop, a forward that is not the root's: test_modules, conformance/of_evaluation
test_fully_shard_clip_grad_norm_
    test_squares, test_hybrid_failures, test_pipelines; other norms than 2 and inf are refused by name
test_fully_shard_state_dict
    test_state_dict, saving/test_layouts (the helpers of torch.distributed.checkpoint, cpu_offload, loading after)
test_fully_shard_frozen
    module_cases `frozen in part`, conformance/of_optimizers, below
test_fully_shard_mixed_precision
    test_amp, test_losses, below
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_parallel_cases import Layer, Run
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from trained_cases import check, make, whole
from worlds import on_ranks, refusal, says

import zerokern as zk

SIZES = (2, 2)  # dp, tp
STEPS = 2


def trained(opt: Callable = make) -> Callable:
    return lambda params: opt([one for one in params if one.requires_grad])


def follow(name: str, stage: int, change: Callable[[Any], None], each: Callable[[Any, int], None], **more: Any) -> None:
    """The bits of the same by hand. `change`: the model before it is sharded; `each`: before each step."""
    by_hand = Run(name, SIZES, None, change=change, opt=trained())
    ours = Run(name, SIZES, stage, change=change, opt=trained(), **more)
    for step in range(STEPS):
        for run in (by_hand, ours):
            each(run, step)
        assert by_hand.backward(step) == ours.backward(step), (stage, step)
        check(ours.grads(), by_hand.grads(), (stage, step), exactly=True)
        for run in (by_hand, ours):
            run.step()
        check(ours.params(), by_hand.params(), (stage, step), exactly=True)


def nothing(*_: Any) -> None:
    pass


def frozen_in_part(model: Any) -> None:
    """Some parameters of one layer, all of another."""
    model.layers[0].up.weight.requires_grad_(False)
    model.layers[0].down.bias.requires_grad_(False)
    model.layers[1].requires_grad_(False)


def checkpointed(model: Any) -> None:
    """torch's own recomputation, around each layer."""
    for layer in model.layers:
        layer.forward = lambda x, call=layer.forward: checkpoint(call, x, use_reentrant=False)


def repeated(model: Any) -> None:
    """Each layer twice."""
    for layer in model.layers:
        layer.forward = lambda x, call=layer.forward: call(call(x))


def tied(model: Any) -> None:
    """Words and classes are one weight, divided by rows in both places."""
    model.output.weight = model.tokens.weight


def nested(module: nn.Module) -> bool:
    return isinstance(module, (Layer, nn.Linear))


CASES: dict[str, tuple[str, Callable, Callable, dict[str, Any]]] = {
    "frozen in part": ("uneven", frozen_in_part, nothing, {}),
    "recomputed by torch": ("uneven", checkpointed, nothing, {}),
    "each layer twice": ("uneven", repeated, nothing, {}),
    "words and classes tied": ("transformer", tied, nothing, {}),
    "units within units": ("uneven", nothing, nothing, {"units": nested}),
    "small buckets": ("transformer", nothing, nothing, {"bucket_bytes": 500}),
    "parameters on the host": ("uneven", nothing, nothing, {"tier": "cpu"}),
}


def cases(rank: int, names: list[str], stages: list[int]) -> None:
    for name in names:
        model, change, each, more = CASES[name]
        for stage in stages if "tier" not in more else [3]:
            follow(model, stage, change, each, **more)


QUICK = ["frozen in part", "recomputed by torch"]


def test_the_bits_of_the_same_by_hand() -> None:
    on_ranks(4, cases, QUICK, [3])


@pytest.mark.slow
def test_every_case_has_the_bits_of_the_same_by_hand() -> None:
    on_ranks(4, cases, list(CASES), [2])


def unfrozen_later(run: Run, step: int) -> None:
    run.model.layers[0].requires_grad_(step != 1)


def heard(stage: int) -> None:
    """Hooks after accumulation get each parameter with its reduced gradient, once; in one order on all ranks, however
    small buckets are: ranks of tp have more of one parameter than others have."""
    by_hand = Run("uneven", SIZES, None)
    by_hand.backward(0)
    grads = by_hand.grads()
    for nbytes in (32 << 20, *range(200, 2000, 360)):
        run = Run("uneven", SIZES, stage, bucket_bytes=nbytes)
        seen: dict[str, Tensor] = {}
        for name, param in run.model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda param, seen=seen, name=name: seen.update({name: param.grad})
            )
        run.backward(0)
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, list(seen))
        assert all(order == orders[0] for order in orders), f"a collective in a hook would meet another's: {nbytes}"
        assert seen.keys() == grads.keys()
        check({name: whole(seen[name]).detach() for name in grads}, grads, "as hooks see them", exactly=True)


def mixed(stage: int) -> None:
    """Each rank computes in bf16, and what it computed is averaged in fp32: no other rounding."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = Run("uneven", SIZES, stage, mp_policy=policy)

    def narrow(model: Any) -> None:
        model.bfloat16()
        model.forward = lambda x, call=model.forward: call(x.bfloat16())

    by_hand = Run("uneven", SIZES, None, change=narrow)
    by_hand._average = nothing  # type: ignore[method-assign]
    assert run.backward(0) == by_hand.backward(0)
    for param in by_hand.model.parameters():
        grad = param.grad
        if isinstance(param, DTensor) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        param.grad, param.grad_dtype = None, torch.float32
        param.grad = grad.float()
    Run._average(by_hand)
    check(run.grads(), by_hand.grads(), stage, exactly=True)
    for step in range(1, STEPS):
        run.step()
        assert run.model.norm.weight.dtype == torch.bfloat16
        assert run.backward(step) > 0


def tiled(stage: int) -> None:
    """The numbers of the whole where it is whole; at stage 3, where pieces would be no smaller, refused by name."""

    def tile(model: Any) -> None:
        zk.tile(model.layers[1].up, tiles=2)

    if stage == 3:
        says(refusal(lambda: Run("uneven", SIZES, 3, change=tile), zk.ShardError), ["layers.1.up.weight", "DTensor"])
        return
    run, other = Run("uneven", SIZES, stage, change=tile), Run("uneven", SIZES, stage)
    assert run.backward(0) == other.backward(0)
    for name, value in other.grads().items():
        torch.testing.assert_close(run.grads()[name], value, rtol=1e-5, atol=1e-6)


LIVES = (heard, mixed, tiled)


def lives(rank: int, stages: list[int]) -> None:
    for stage in stages:
        for life in LIVES:
            try:
                life(stage)
            except Exception as error:
                raise AssertionError(f"{life.__name__}, stage {stage}") from error
        follow("uneven", stage, nothing, unfrozen_later)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [[1, 3]], ids=str)
def test_the_other_twins(stages: list[int]) -> None:
    on_ranks(4, lives, stages)
