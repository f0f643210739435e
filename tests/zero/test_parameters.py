"""What a parameter is under zk.shard: between steps it looks as it did; where it cannot act so, it says what to do."""

from __future__ import annotations

from functools import partial

import torch
from module_cases import EndsInNone, GivesNone
from tables import each
from torch import nn
from worlds import STAGES, World, built, everywhere, full, on_ranks, ranked, step_and_zero
from zero_cases import Net, Run, batch, make_adamw, mse, same_as_plain

import zerokern as zk


def looks(model: nn.Module) -> list[tuple]:
    return [
        (
            name,
            id(p),
            tuple(p.shape),
            p.ndim,
            p.numel(),
            p.dtype,
            p.device,
            p.requires_grad,
            p.is_leaf,
            len(p),
            p.size(0),
        )
        for name, p in model.named_parameters()
    ]


@everywhere(2, stage=[0, 1, 3])
def test_identity_shape_dtype_and_name_stay(world: World, stage: int) -> None:
    model = built(Net)
    model.blocks[1].requires_grad_(False)
    for number, param in enumerate(model.parameters()):
        param.mark = number  # PEFT and others hang things on parameters
    before, tree = looks(model), [name for name, _ in model.named_modules()]
    kept = list(model.parameters())
    world.shard(model, stage=stage)

    def check(when: str) -> None:
        assert looks(model) == before, when
        assert [name for name, _ in model.named_modules()] == tree, when
        assert list(model.state_dict()) == [name for name, *_ in before], when
        assert [param.mark for param in model.parameters()] == list(range(len(kept))), when
        assert all(type(param) is nn.Parameter or isinstance(param, nn.Parameter) for param in kept), when
        assert all(a is b for a, b in zip(model.parameters(), kept, strict=True)), when
        assert type(model) is Net and type(model.blocks[0]).__name__ == "Block", when

    check("at rest")
    optimizer = make_adamw(model.parameters())
    for step in range(2):
        loss = mse(model, step, world)
        loss.backward()
        check("after backward")
        optimizer.step()
        check("after the step")
        optimizer.zero_grad(set_to_none=step == 0)
        check("after zero_grad")
    with torch.no_grad():
        model(batch(3)[0])
    check("after evaluation")
    with zk.gathered(model):
        check("gathered")
    check("after that")


@everywhere(1, 2, stage=STAGES)
def test_a_gradient_that_is_none_is_not_what_the_buffer_held(world: World, stage: int) -> None:
    """A backward function gives None, and autograd calls hooks all the same; without a forward, too, and for the first
    gradient of a pass, where `.grad` shows one that was kept."""
    model, plain = world.shard(built(EndsInNone), stage=stage), built(EndsInNone)
    for step, gives in enumerate(("xw", "w", "x")):
        for one in (model, plain):
            one.zero_grad()
            one.gives = gives
            mse(one, step, world).backward()
        world.average_gradients(plain.parameters())
        for _ in range(2):
            for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (param.grad is None) is (reference.grad is None), name
                if param.grad is not None:
                    pair = (param.grad, reference.grad)
                    mine, right = pair if stage == 0 else (param.grad.local, param.grad.span_of(reference.grad))
                    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-7)
            for one in (model, plain):
                weight = one.blocks[1].up.weight
                GivesNone.apply(torch.ones(1, weight.shape[1]), weight, "").sum().backward()


@ranked
def on_real_ranks(world: World) -> None:
    test_identity_shape_dtype_and_name_stay(world, 3)


def test_parameters_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)


@everywhere(2)
def test_parameters_of_any_strides(world: World) -> None:
    """Transposed and channels-last parameters keep their values."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(6, 10).t())
            self.conv = nn.Conv2d(4, 5, 3, padding=1).to(memory_format=torch.channels_last)
            self.expanded = nn.Parameter(torch.randn(10, 1).expand(10, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, self.turned + self.expanded)
            return y + self.conv(x[:, None, None, :].expand(-1, 4, 2, -1)).mean((1, 2, 3))[:, None]

    for stage in (2, 3):
        ours, plain = world.shard(built(Strided), stage=stage), built(Strided)
        with torch.no_grad():
            for param in plain.parameters():
                param.data = param.data.clone(memory_format=torch.contiguous_format)
        for model in (ours, plain):
            optimizer = make_adamw(model.parameters())
            for step in range(2):
                model(batch(step, world.rank)[0]).square().mean().backward()
                if model is plain:
                    world.average_gradients(plain.parameters())
                step_and_zero(optimizer)
        for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


@each("schedule, keeps", [("sync", True), ("overlap", False)])
def test_gradients_that_are_given_other_memory_count_and_the_next_ones_too(schedule: str, keeps: bool) -> None:
    """Stage 0 alone shows plain gradients; others refuse `.data =`."""

    def program(run: Run) -> None:
        optimizer = run.optimizer(make=partial(zk.SGD, lr=0.05, momentum=0.9), schedule=schedule)
        for step in range(3):
            for part in range(2):
                loss = mse(run.model, 2 * step + part, run.world)
                if run.is_plain:
                    kept = [param.grad for param in run.model.parameters()]
                    run.model.zero_grad()
                    run.backward(loss)
                    for param, before in zip(run.model.parameters(), kept, strict=True):
                        param.grad = param.grad if before is None else before + param.grad
                else:
                    loss.backward()
                for param in run.model.parameters():
                    param.grad.data = param.grad.data * 0.5
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps)

    # two passes: sums of another order than plain ones, so not the bits
    same_as_plain(3, program, build=lambda: Net(1), stage=0, bucket_bytes=600)
