"""torch's optimizers on sharded models: on zk.shards they train as on plain ones, elsewhere they are refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn
from worlds import World, built, everywhere, full, on_ranks, ranked, refusal, says, step_and_zero
from zero_cases import Net, batch, make_adamw, mse

import zerokern as zk

OPTIMIZERS: dict[str, Callable] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


@everywhere(2, row=[(0, "AdamW"), (1, "SGD"), (2, "AdamW fused"), (3, "RMSprop")])
def test_a_torch_optimizer_on_shards(world: World, row: tuple[int, str]) -> None:
    stage, name = row
    ours, plain = world.shard(built(Net), stage=stage), built(Net)
    shards = zk.shards(ours)
    assert all(type(piece) is nn.Parameter and piece.ndim == 1 and piece.is_leaf for piece in shards)
    assert [piece.zk_name for piece in shards] == [key for key, _ in ours.named_parameters()]
    owned = int(world.total(torch.tensor([sum(piece.numel() for piece in shards)])))
    assert owned == sum(p.numel() for p in plain.parameters()) * (world.size if stage == 0 else 1)
    optimizers = [OPTIMIZERS[name](shards), OPTIMIZERS[name](plain.parameters())]
    for step in range(4):
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            loss = mse(model, step, world)
            loss.backward()
            if model is plain:
                world.average_gradients(plain.parameters())
            else:
                assert all((piece.grad is not None) or piece.numel() == 0 for piece in shards)
                assert all(piece.grad is None or piece.grad.shape == piece.shape for piece in shards)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    for (key, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@everywhere(2, stage=[0, 1, 3])
def test_gradients_that_somebody_keeps_are_not_written_over(world: World, stage: int) -> None:
    model = world.shard(built(Net), stage=stage)
    shards = zk.shards(model)
    seen, copies, memories = [], [], []
    for step in (0, 1, 1, 1):
        mse(model, step, world).backward()
        grads = [piece.grad for piece in shards if piece.grad is not None]
        memories.append([grad.data_ptr() for grad in grads])
        if step == 0:
            seen, copies = grads, [grad.clone() for grad in grads]
        del grads
        for piece in shards:
            piece.grad = None
    assert all(map(torch.equal, seen, copies)), "gradients that are kept stay as they are"
    assert memories[0] != memories[1] == memories[2] == memories[3], "where nobody keeps any, the next take their place"


@everywhere(2, stage=[3])
def test_an_optimizer_that_mixes_elements_is_refused(world: World, stage: int) -> None:
    model = world.shard(built(Net), stage=stage)
    before = full(model)
    mse(model, 0, world).backward()
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        optimizer = make(zk.shards(model))
        says(
            refusal(lambda one=optimizer: one.step(lambda: torch.ones(())), zk.ZerokernError), ["zk.shards", "stage 0"]
        )
    assert all(torch.equal(value, before[name]) for name, value in full(model).items()), "nothing was touched"


@everywhere(2, stage=[0, 3])
def test_writes_to_the_model_last_where_shards_are_stepped(world: World, stage: int) -> None:
    """Whoever steps the pieces has masters of them; a write to the model's parameter is one to those too."""
    model = world.shard(built(Net).bfloat16(), stage=stage)
    optimizer = zk.AdamW(zk.shards(model), lr=1e-3, master_format="fp32")
    for step in range(3):
        model(batch(step, world.rank)[0].bfloat16()).float().square().mean().backward()
        step_and_zero(optimizer)
        with torch.no_grad(), zk.gathered(model, write=True):
            for param in model.parameters():
                param.fill_(5.0)
    model(batch(3, world.rank)[0].bfloat16()).float().square().mean().backward()
    optimizer.step()
    for name, value in full(model).items():
        torch.testing.assert_close(value, torch.full_like(value, 5.0), rtol=0, atol=2**-5, msg=name)  # one ulp


@everywhere(2, stage=[1, 3])
def test_torchs_clipping_of_shards_is_refused(world: World, stage: int) -> None:
    model, plain = world.shard(built(Net), stage=stage), built(Net)
    shards = zk.shards(model)
    optimizers = [torch.optim.SGD(shards, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)]
    for one in (model, plain):
        mse(one, 0, world).backward()
    world.average_gradients(plain.parameters())
    for foreach in (None, True, False):
        clip = lambda foreach=foreach: nn.utils.clip_grad_norm_(shards, 0.1, foreach=foreach)  # noqa: E731
        says(refusal(clip, TypeError), ["zk.clip_grad_norm_", "all ranks", "'"])
    says(refusal(lambda: next(p.grad for p in shards if p.grad is not None).norm(), TypeError), ["detach"])
    for grad in (p.grad for p in shards if p.grad is not None):
        assert all(type(one) is torch.Tensor for one in (grad.detach(), grad + 0, copy.deepcopy(grad), copy.copy(grad)))
    largest = torch.stack([p.grad.abs().max() for p in plain.parameters() if p.grad is not None]).max()
    for parameters in (model, shards):  # far above the norm, so that nothing is clipped
        found = zk.clip_grad_norm_(parameters, 1e6, norm_type=math.inf)
        torch.testing.assert_close(found, largest, rtol=1e-5, atol=0)
    norms = [zk.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)]
    torch.testing.assert_close(norms[0].float(), norms[1], rtol=1e-5, atol=0)
    for optimizer in optimizers:
        optimizer.step()
    for (key, mine), theirs in zip(full(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=key)


@everywhere(2, row=[(3, "AdamW"), (2, "AdamW fused")])
def test_torchs_scaler_on_shards(world: World, row: tuple[int, str]) -> None:
    """Rank 1 alone meets an infinity in the second step: no rank steps, and all go on with the same scale."""
    stage, name = row
    model, plain = world.shard(built(Net), stage=stage), built(Net)
    pairs = [(model, zk.shards(model)), (plain, list(plain.parameters()))]
    optimizers = [OPTIMIZERS[name](params) for _, params in pairs]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100) for _ in pairs]
    for step in range(4):
        for (one, params), optimizer, scaler in zip(pairs, optimizers, scalers, strict=True):
            scaler.scale(mse(one, step, world)).backward()
            if one is plain:
                world.average_gradients(plain.parameters())
            spoiled = next((p.grad for p in params if p.grad is not None and p.grad.numel()), None)
            if step == 1 and spoiled is not None and (one is plain or world.rank == 1):
                spoiled.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    for (key, mine), theirs in zip(full(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5, msg=key)


class Mine(torch.optim.Optimizer):
    """A user's own: it knows nothing of shards."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.1)


@everywhere(2, stage=[2, 3])
def test_a_torch_optimizer_on_sharded_parameters_is_refused(world: World, stage: int) -> None:
    model = world.shard(built(Net), stage=stage)
    before = full(model)
    for make in (*OPTIMIZERS.values(), Mine):
        optimizer = make(model.parameters())
        mse(model, 0, world).backward()
        says(refusal(optimizer.step, (TypeError, zk.ZerokernError)), ["zk.shards", "zk.AdamW"])
        model.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in full(model).items()), "nothing was touched"
    optimizer = make_adamw(model.parameters())
    mse(model, 0, world).backward()
    optimizer.step()
    plain = built(Net)
    other = Mine(plain.parameters())
    mse(plain, 0, world).backward()
    other.step()  # plain parameters are none of our business


@ranked
def on_real_ranks(world: World) -> None:
    test_a_torch_optimizer_on_shards(world, (3, "AdamW"))
    test_a_torch_optimizer_on_sharded_parameters_is_refused(world, 3)


def test_shards_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)


@everywhere(1, stage=[0, 1, 2, 3])
def test_a_replaced_gradient_is_added_to(world: World, stage: int) -> None:
    model = world.shard(nn.Linear(3, 1, bias=False), stage=stage)
    (piece,) = zk.shards(model)
    x = torch.ones(1, 3)
    model(x).sum().backward()
    piece.grad = piece.grad * 10
    model(x).sum().backward()
    assert piece.grad.tolist() == [11.0] * 3


@everywhere(2, stage=[1, 2], left_out=["pieces without elements", "all but two"])
def test_what_is_written_into_pieces_is_published_by_an_optimizer_over_others(
    world: World, stage: int, left_out: str
) -> None:
    """Each rank leaves out of its optimizer what has no elements here, or writes pieces by hand."""
    model = world.shard(built(Net), stage=stage, bucket_bytes=256)
    pieces = zk.shards(model)
    some = pieces[:2] if left_out == "all but two" else [piece for piece in pieces if piece.numel()]
    opt = zk.SGD(some, lr=0.1)
    for step in range(2):
        mse(model, step, world).backward()
        with torch.no_grad():
            for piece in pieces:
                piece.mul_(0.5)
                piece.sub_(1.0)
        opt.step()
        for piece in pieces:
            piece.grad = None
    for name, param in model.named_parameters():
        same = world.total(param.detach().clone())
        assert torch.equal(same, param.detach() * world.size), name
