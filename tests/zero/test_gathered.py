"""zk.gathered: full parameters for a while, in the objects that the user knows; what is computed with them there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from worlds import World, built, everywhere, full, on_ranks, ranked, refusal, says, step_and_zero
from zero_cases import Net, batch, make_adamw, make_sgd, mse, same

import zerokern as zk
from zerokern.zero.sharded import Sharded


class Trouble(Exception):
    pass


def trained(world: World, stage: int) -> tuple[nn.Module, dict]:
    """A sharded model after a step, and what a plain one of the same history holds."""
    ours, plain = world.shard(built(Net), stage=stage), built(Net)
    for model in (ours, plain):
        optimizer = make_adamw(model.parameters())
        mse(model, 0, world).backward()
        if model is plain:
            world.average_gradients(plain.parameters())
        step_and_zero(optimizer)
    return ours, {name: param.detach().clone() for name, param in plain.named_parameters()}


@everywhere(1, 2, stage=[1, 3])
def test_full_parameters_for_a_while(world: World, stage: int) -> None:
    model, wanted = trained(world, stage)
    objects = dict(model.named_parameters())
    with zk.gathered(model):
        for name, param in model.named_parameters():
            assert param is objects[name] and isinstance(param, nn.Parameter) and param.requires_grad
            assert torch.equal(param, wanted[name]) and param.detach().numpy().shape == param.shape
        assert float(model.leave.weight.detach().norm()) == pytest.approx(float(wanted["leave.weight"].norm()))
        twin = copy.deepcopy(model.blocks[1].up.weight)
        kept = model.leave.weight.detach()
        state = model.state_dict()
        with zk.gathered(model.blocks[1]), zk.gathered(model.leave.weight):
            assert torch.equal(model.leave.weight, wanted["leave.weight"])
        assert torch.equal(model.leave.weight, wanted["leave.weight"])
    assert torch.equal(twin, wanted["blocks.1.up.weight"])
    assert torch.equal(kept, wanted["leave.weight"]), "what was taken from it is still there"
    assert all(torch.equal(value, wanted[name]) for name, value in state.items())
    with zk.gathered([model.leave.weight, model.enter.bias]):
        assert torch.equal(model.enter.bias, wanted["enter.bias"])
        assert torch.equal(model.leave.weight, wanted["leave.weight"])
    with zk.gathered(param for param in model.blocks.parameters()):
        assert torch.equal(model.blocks[2].down.weight, wanted["blocks.2.down.weight"])
    with pytest.raises(Trouble), zk.gathered(model):
        raise Trouble
    assert all(dict(model.named_parameters())[name] is param for name, param in objects.items())


@everywhere(1, 2)
def test_writes_that_were_not_announced(world: World) -> None:
    """At stage 3 the whole parameters are copies: what is written without saying so is gone on all ranks alike."""
    model, wanted = trained(world, 3)
    with zk.gathered(model), torch.no_grad():
        model.leave.weight.zero_()
    if world.size > 1:
        assert torch.equal(full(model)["leave.weight"], wanted["leave.weight"])


@ranked
def on_real_ranks(world: World) -> None:
    test_full_parameters_for_a_while(world, 3)


def test_gathered_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)


def penalty(model: nn.Module) -> Tensor:
    return sum((param**2).sum() * (0.1 + i) for i, param in enumerate(model.parameters()))


def gradients(world: World, model: nn.Module, plain: nn.Module, exact: bool = True) -> None:
    """Those of the sharded model are the means of the plain one's."""
    world.average_gradients(plain.parameters())
    with zk.gathered(model):
        pass
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(mine) is Sharded, name
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            same(world.size <= 2 and exact, mine.grad.local, mine.span_of(theirs.grad), name)


def within(model: nn.Module, step: int, world: World) -> None:
    with zk.gathered(model):
        (penalty(model) * (1 + world.rank)).backward()


def of_some(model: nn.Module, step: int, world: World) -> None:
    with zk.gathered([model.enter.weight, model.blocks[1].up.weight]):
        loss = model.enter.weight.norm() * (1 + world.rank) + (model.blocks[1].up.weight ** 3).sum()
    loss.backward()


def beside_a_forward(model: nn.Module, step: int, world: World) -> None:
    loss = mse(model, step, world)
    with zk.gathered(model):
        loss = loss + penalty(model)
    loss.backward()


def before_a_forward(model: nn.Module, step: int, world: World) -> None:
    with zk.gathered(model.blocks):
        loss = penalty(model.blocks)
    (loss + mse(model, step, world)).backward()


def a_forward_that_outlives(model: nn.Module, step: int, world: World) -> None:
    with zk.gathered(model):
        loss = mse(model, step, world)
    (loss + mse(model, step + 7, world)).backward()


def checkpointed_in_parts(model: nn.Module, step: int, world: World) -> None:
    x, y = batch(step, world.rank)
    with zk.gathered([model.enter.weight, *model.blocks[1].parameters(), *model.blocks[2].parameters()]):
        hidden = model.enter(x)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = F.mse_loss(hidden.mean(1, keepdim=True).expand_as(y), y)
    loss.backward()


def accumulated(model: nn.Module, step: int, world: World) -> None:
    mse(model, step, world).backward()
    within(model, step, world)
    mse(model, step + 5, world).backward()


def without_reduction(model: nn.Module, step: int, world: World) -> None:
    if next(model.parameters()).grad is None and hasattr(next(model.parameters()), "_zk_shard"):
        with zk.no_sync(model), zk.gathered(model):
            penalty(model).backward()
    else:
        penalty(model).backward()
    mse(model, step, world).backward()


GRAPHS = [
    within,
    of_some,
    beside_a_forward,
    before_a_forward,
    a_forward_that_outlives,
    checkpointed_in_parts,
    accumulated,
    without_reduction,
]


# gradients of several passes, or some that arrive after the unit's own had been reduced: sums of another order
OTHER_ORDER = [accumulated, before_a_forward, a_forward_that_outlives]


@everywhere(2, work=GRAPHS)
def test_gradients_are_reduced(world: World, work: Callable) -> None:
    model, plain = world.shard(built(Net), stage=3), built(Net)
    pairs = [(model, make_adamw(model.parameters())), (plain, make_adamw(plain.parameters()))]
    for step in range(2):
        for one, _ in pairs:
            work(one, step, world)
        gradients(world, model, plain, exact=work not in OTHER_ORDER)
        for _, optimizer in pairs:
            step_and_zero(optimizer)
    for (name, mine), theirs in zip(full(model).items(), plain.parameters(), strict=True):
        same(world.size <= 2 and work not in OTHER_ORDER, mine, theirs.detach(), name)


@everywhere(2, joined=[False, True])
def test_one_rank_computes_gradients_alone(world: World, joined: bool) -> None:
    """One rank alone has a graph of whole parameters: used in no backward pass, or in that of all."""
    model, plain = world.shard(built(Net), stage=3), built(Net)
    optimizers = [make_sgd(one.parameters()) for one in (model, plain)]
    for step in range(2):
        for one in (model, plain):
            loss = mse(one, step, world)
            with zk.gathered(one if one is model else []):
                if world.rank == 0:
                    extra = penalty(one) + one(batch(9)[0]).square().mean()
                    loss = loss + extra if joined else loss
            loss.backward()
        gradients(world, model, plain)
        step_and_zero(*optimizers)


@everywhere(1, 2)
def test_what_is_done_to_a_whole_parameter_lasts(world: World) -> None:
    model = world.shard(built(Net), stage=3)
    with zk.gathered(model), zk.gathered(model.leave, write=True), torch.no_grad():
        model.leave.bias.fill_(2.0)
        model.enter.bias.fill_(2.0)
        model.enter.weight.requires_grad_(False)
        model.enter.weight.note = "mine"
        model.leave.bias.grad = torch.ones_like(model.leave.bias)
    after = full(model)
    assert torch.equal(after["leave.bias"], torch.full((3,), 2.0)), "the inner one asked for it"
    assert world.size == 1 or not torch.equal(after["enter.bias"], torch.full((10,), 2.0))
    assert not model.enter.weight.requires_grad and model.enter.weight.note == "mine"
    assert torch.equal(model.leave.bias.grad, torch.ones(3))


@everywhere(2)
def test_a_step_and_a_conversion_within_are_refused(world: World) -> None:
    model = world.shard(built(Net), stage=3)
    optimizer = make_adamw(model.parameters())
    before = full(model)
    with zk.gathered(model, write=True):
        mse(model, 0, world).backward()
        says(refusal(optimizer.step), ["within zk.gathered", "after the context has ended"])
    optimizer.zero_grad()

    def convert() -> None:
        with zk.gathered(model, write=True):
            model.half()

    says(refusal(convert), ["became torch.float16", "before it is sharded"])
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())
    mse(model, 0, world).backward()
    optimizer.step()


@everywhere(2)
def test_looking_writes_nothing(world: World) -> None:
    """Looking at whole parameters, or at the optimizer's state while they are whole, is no write to them."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models = [world.shard(built(Net), stage=3, mp_policy=policy) for _ in range(2)]
    optimizers = [make_adamw(model.parameters(), lr=1e-4) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            mse(model, step, world).backward()
            step_and_zero(optimizer)
        with zk.gathered(models[0]):
            optimizers[0].state_dict()
    left, right = map(full, models)
    assert all(torch.equal(left[name], right[name]) for name in left)


@everywhere(2, stage=[0, 2, 3])
def test_what_is_not_written_within_keeps_what_is_exact(world: World, stage: int) -> None:
    """Its remainder, though all parameters were gathered to be written; what is written counts, also by `.data`."""
    models = [world.shard(built(Net).to(torch.bfloat16), stage=stage) for _ in range(2)]
    optimizers = [make_adamw(model.parameters(), lr=1e-4, master_format="split16") for model in models]
    for step in range(4):
        for model, optimizer, whole in zip(models, optimizers, (True, False), strict=True):
            x, y = batch(step, world.rank)
            F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
            step_and_zero(optimizer)
            weight = model.blocks[0].up.weight
            with zk.gathered(model if whole else weight, write=True), torch.no_grad():
                (weight.data if step == 2 else weight).view(-1)[:1].add_(0.5)  # of one rank's part
                wanted = weight.detach().clone()
            assert torch.equal(full(model)["blocks.0.up.weight"], wanted)
    for params in zip(*(model.parameters() for model in models), strict=True):
        kept = [opt.state[one]["remainder"] for opt, one in zip(optimizers, params, strict=True)]
        left, right = (one.local if isinstance(one, Sharded) else one for one in kept)
        assert torch.equal(left, right)
        assert params[0] is models[0].blocks[0].up.weight or left.any() or not left.numel()
    left, right = map(full, models)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_parameters_of_other_kinds_may_be_written_within() -> None:
    """Of which no fingerprint can be taken, or none now: they count as written."""
    lazy = nn.LazyLinear(3).weight
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    double = nn.Parameter(torch.ones(2, dtype=torch.float64))
    plain = nn.Parameter(torch.ones(2))
    with zk.gathered([lazy, sparse, double, plain], write=True), torch.no_grad():
        double.data.fill_(2.0)
    assert double._version > 0 and plain._version == 0
    with FakeTensorMode(), zk.gathered(plain, write=True):
        pass
    assert plain._version > 0
