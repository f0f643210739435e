"""DTensor parameters under zk.shard: tensor parallelism of torch's in one dimension of ranks, ZeRO in the other.

By the idea of torch's test_2d_composability: the same bits as the same by hand, every step; and one process's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_parallel_cases import MODELS, Alone, Run, batches, mesh_of
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from trained_cases import OF_GRADIENTS, OF_PARAMETERS, check, close, make, whole
from worlds import on_ranks, refusal, says

import zerokern as zk

SIZES = (2, 2)  # dp, tp


def trained(rank: int, rows: list[tuple[str, int, int, dict[str, Any]]], steps: int, stages: Sequence[int]) -> None:
    """Losses, norms, and whole parameters and gradients after every step.

    Of several micro-batches the bits are others at stage 0, as under DDP: the sum of those before is reduced once more.
    """
    for name, seed, accumulated, settings in rows:
        plain = Alone(name, seed)
        by_hand = Run(name, SIZES, None, seed)
        ours = [Run(name, SIZES, stage, seed, **settings) for stage in stages]
        for number in range(steps):
            losses = [run.backward(number, accumulated) for run in (by_hand, *ours)]
            exactly = accumulated == 1
            assert losses == losses[:1] * len(losses) if exactly else all(close(loss, losses[0]) for loss in losses)
            assert close(losses[0], plain.backward(number, SIZES[0] * accumulated))
            grads = by_hand.grads()
            check(grads, plain.grads(), (name, number), **OF_GRADIENTS)
            for run in ours:
                check(run.grads(), grads, (name, number, run.stage), exactly=exactly, **OF_GRADIENTS)
            for run in (by_hand, *ours, plain):
                run.step()
            norms = [run.opt.grad_norm for run in (by_hand, *ours)]
            assert all(abs(norm / norms[0] - 1) < (1e-12 if exactly else 1e-6) for norm in norms)
            assert close(norms[0], plain.opt.grad_norm)
            params = by_hand.params()
            for run in ours:
                check(run.params(), params, (name, number, run.stage), exactly=exactly, **OF_PARAMETERS)
        check(params, plain.params(), name, **OF_PARAMETERS)


QUICK: list[tuple[str, int, int, dict[str, Any]]] = [("uneven", 0, 1, {}), ("transformer", 0, 1, {})]


def test_same_bits_as_by_hand_and_the_numbers_of_one_process() -> None:
    on_ranks(4, trained, QUICK, 2, (3,))


def beside_copies(rank: int) -> None:
    """Data parallelism of two dimensions, tensor parallelism in a third: sums have another order."""
    sizes = (2, 2, 2)
    by_hand = Run("uneven", sizes, None)
    ours = [Run("uneven", sizes, stage) for stage in (1, 3)]
    for number in range(2):
        losses = [run.backward(number) for run in (by_hand, *ours)]
        assert all(close(loss, losses[0]) for loss in losses)
        for run in ours:
            check(run.grads(), by_hand.grads(), (number, run.stage), **OF_GRADIENTS)
        for run in (by_hand, *ours):
            run.step()
        norms = [run.opt.grad_norm for run in (by_hand, *ours)]
        assert all(abs(norm / norms[0] - 1) < 1e-6 for norm in norms), norms
        for run in ours:
            check(run.params(), by_hand.params(), (number, run.stage), **OF_PARAMETERS)


@pytest.mark.slow
def test_beside_meshes_of_two_dimensions() -> None:
    on_ranks(8, beside_copies)


def refused(rank: int) -> None:
    def build() -> Any:
        model = MODELS["uneven"]()
        model.divide(mesh_of(*SIZES)["tp"])
        return model

    dp = mesh_of(*SIZES)["dp"]
    says(refusal(lambda: zk.shard(build(), mesh=dp, micro=2)), ["layers.0", "micro"])
    says(refusal(lambda: zk.build(build, mesh=dp, device="cpu")), ["layers.0", "parallelize_module"])
    says(refusal(lambda: zk.shard(build())), ["DTensors", 'mesh["dp"]'])


def test_what_does_not_know_dtensors_is_refused_by_name() -> None:
    on_ranks(4, refused)


@pytest.mark.slow
@pytest.mark.parametrize("row", [("uneven", 1, 4, {"keep": "device"}), ("transformer", 0, 1, {})], ids=str)
def test_more_steps(row: tuple[str, int, int, dict[str, Any]]) -> None:
    on_ranks(4, trained, [row], 4, (0, 1, 2))


def frozen_in_part(model: Any) -> None:
    """Some parameters of one layer, all of another."""
    model.layers[0].up.weight.requires_grad_(False)
    model.layers[0].down.bias.requires_grad_(False)
    model.layers[1].requires_grad_(False)


def checkpointed(model: Any) -> None:
    """torch's own recomputation, around each layer."""
    for layer in model.layers:
        layer.forward = lambda x, call=layer.forward: checkpoint(call, x, use_reentrant=False)


def tied(model: Any) -> None:
    """Words and classes are one weight, divided by rows in both places."""
    model.output.weight = model.tokens.weight


CHANGES = {one.__name__: one for one in (frozen_in_part, checkpointed, tied)}


def of_trained(params: Any) -> torch.optim.Optimizer:
    return make([one for one in params if one.requires_grad])


def follow(rank: int, stage: int, rows: list[tuple[str, str]]) -> None:
    """The bits of the same by hand, of models that are changed before they are sharded."""
    for name, change in rows:
        by_hand, ours = (Run(name, SIZES, one, change=CHANGES[change], opt=of_trained) for one in (None, stage))
        for step in range(2):
            about = (name, change, stage, step)
            assert by_hand.backward(step) == ours.backward(step), about
            check(ours.grads(), by_hand.grads(), about, exactly=True)
            for run in (by_hand, ours):
                run.step()
            check(ours.params(), by_hand.params(), about, exactly=True)


@pytest.mark.slow
def test_changed_models_have_the_bits_of_the_same_by_hand() -> None:
    on_ranks(4, follow, 3, [("uneven", "frozen_in_part"), ("uneven", "checkpointed")])


def heard(stage: int) -> None:
    """Hooks after accumulation get each parameter with its reduced gradient, once; in one order on all ranks, however
    small buckets are: ranks of tp have more of one parameter than others have."""
    by_hand = Run("uneven", SIZES, None)
    by_hand.backward(0)
    grads = by_hand.grads()
    for nbytes in (32 << 20, *range(200, 2000, 360)):
        run = Run("uneven", SIZES, stage, bucket_bytes=nbytes)
        calls: list[tuple[str, Tensor]] = []
        for name, param in run.model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda param, calls=calls, name=name: calls.append((name, param.grad))
            )
        run.backward(0)
        orders: list[Any] = [None] * dist.get_world_size()
        seen = dict(calls)
        dist.all_gather_object(orders, [name for name, _ in calls])
        assert all(order == orders[0] for order in orders), f"a collective in a hook would meet another's: {nbytes}"
        assert seen.keys() == grads.keys() and len(calls) == len(seen)
        check({name: whole(seen[name]).detach() for name in grads}, grads, "as hooks see them", exactly=True)


def mixed(stage: int) -> None:
    """Each rank computes in bf16, and what it computed is averaged in fp32: no other rounding."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = Run("uneven", SIZES, stage, mp_policy=policy)

    def narrow(model: Any) -> None:
        model.bfloat16()
        model.forward = lambda x, call=model.forward: call(x.bfloat16())

    by_hand = Run("uneven", SIZES, None, change=narrow)
    by_hand._average = lambda: None  # type: ignore[method-assign]
    assert run.backward(0) == by_hand.backward(0)
    for param in by_hand.model.parameters():
        grad = param.grad
        if isinstance(param, DTensor) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        param.grad, param.grad_dtype = None, torch.float32
        param.grad = grad.float()
    Run._average(by_hand)
    check(run.grads(), by_hand.grads(), stage, exactly=True)
    for step in range(1, 3):
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


def by_function(params: Any) -> torch.optim.Optimizer:
    return zk.AdamW(params, lr=1e-2)


def clipped(stage: int) -> None:
    """Norms of each kind, of whole gradients: each element once."""
    said = refusal(lambda: zk.clip_grad_norm_(Run("uneven", SIZES, stage).model, 0.1, norm_type=1.0), ValueError)
    says(said, ["norm_type=1.0", "inf"])
    for kind in (2.0, float("inf")):
        run, other = (Run("uneven", SIZES, stage, opt=by_function) for _ in range(2))
        for one in (run, other):
            one.backward(0)
        flat = torch.cat([grad.double().flatten() for grad in run.grads().values()])
        norm = zk.clip_grad_norm_(run.model, 0.1, norm_type=kind)
        assert abs(norm.item() / torch.linalg.vector_norm(flat, kind).item() - 1) < 1e-6, kind
        for param in other.model.parameters():
            param.grad.mul_(0.1 / (norm.item() + 1e-6))
        for one in (run, other):
            one.step()
        for name, value in other.params().items():
            torch.testing.assert_close(run.params()[name], value, rtol=1e-5, atol=1e-6)


def accumulated(stage: int) -> None:
    """Within zk.no_sync nothing is reduced; the sum is, once."""
    run, other = (Run("uneven", SIZES, stage) for _ in range(2))
    every = list(batches("uneven", 0, 0, 4))[run.dp.get_local_rank() :: 2]
    with zk.no_sync(run.model):
        run.model.loss(*every[0]).backward()
    run.model.loss(*every[1]).backward()
    for x, y in every:
        other.model.loss(x, y).backward()
    for name, value in other.grads().items():
        torch.testing.assert_close(run.grads()[name], value, rtol=1e-5, atol=1e-6)


def several(stage: int) -> None:
    """Each parameter has one of two optimizers."""
    run = Run("uneven", SIZES, stage, opt=by_function)
    other = Run("uneven", SIZES, stage, opt=lambda params: by_function(list(params)[:5]))
    rest = by_function(list(other.model.parameters())[5:])
    for step in range(2):
        for one in (run, other):
            one.backward(step)
        for one in (rest, run, other):
            one.step()
        rest.zero_grad()
        check(other.params(), run.params(), step, exactly=True)


def lives(rank: int) -> None:
    for stage in (1, 3):
        for life in (heard, mixed, tiled, clipped, accumulated, several):
            life(stage)
        follow(rank, stage, [("transformer", "tied")])


@pytest.mark.slow
def test_hooks_mixed_precision_tiles_norms_accumulation_and_tied_weights() -> None:
    on_ranks(4, lives)
