"""Loops: accumulation, games of two models, checkpointing, autocast, truncated recurrence, changing depth."""

from __future__ import annotations

import module_cases as cases
import torch
import torch.nn.functional as F
from small_programs import Run, loss_program, program
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from zero_cases import IN, OUT, WIDTH, Block, Net, batch

import zerokern as zk


@program()
def accumulation_without_reduction(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        with run.no_sync(model):
            run.backward(run.mse(model, 3 * step) / 3)
            run.backward(run.mse(model, 3 * step + 1) / 3)
        run.step(optimizer, run.mse(model, 3 * step + 2) / 3)


@program(exact=False)
def accumulation_with_a_reduction_of_each(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        for micro in range(3):
            run.backward(run.mse(model, 3 * step + micro) / 3)
        optimizer.step()
        optimizer.zero_grad()


@program(exact=False)
def accumulation_of_sizes_that_vary(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step, sizes in enumerate(((1, 3), (2,), (4, 1, 2))):
        for micro, rows in enumerate(sizes):
            x, y = run.data(10 * step + micro, rows)
            run.backward(F.mse_loss(model(x), y, reduction="sum") / sum(sizes))
        optimizer.step()
        optimizer.zero_grad()


@program(exact=False)
def accumulation_over_parts_of_the_model(run: Run) -> None:
    """The first pass reaches some units only."""
    model = run.shard(cases.Reordered)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        for order in ((0,), (1, 2), (0, 2)):
            model.order = order
            run.backward(run.mse(model, step))
        optimizer.step()
        optimizer.zero_grad()


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(21, OUT) for _ in range(2))
        self.score = nn.Linear(OUT, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.score(x)


@program()
def two_models_that_compete(run: Run) -> None:
    maker, judge = run.shard(Net), run.shard(Judge)
    first, second = run.optimizer(maker.parameters()), run.optimizer(judge.parameters())
    for step in range(3):
        x, y = run.data(step)
        loss = F.softplus(judge(maker(x).detach())).mean() + F.softplus(-judge(y)).mean()
        run.step(second, loss)
        run.step(first, F.softplus(-judge(maker(x))).mean())
        judge.zero_grad()


@program()
def two_models_that_compete_by_one_forward(run: Run) -> None:
    """The judge has stepped before the maker's loss is passed back through what it made before."""
    maker, judge = run.shard(Net), run.shard(Judge)
    first, second = run.optimizer(maker.parameters()), run.optimizer(judge.parameters())
    for step in range(3):
        x, y = run.data(step)
        made = maker(x)
        run.step(second, F.softplus(judge(made.detach())).mean() + F.softplus(-judge(y)).mean())
        run.step(first, F.softplus(-judge(made)).mean())
        judge.zero_grad()


class Both(nn.Module):
    """Actor and critic in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Net(2), Judge()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.actor(x)
        return out, self.critic(out.detach())


@program()
def actor_and_critic_in_one_module(run: Run) -> None:
    """One forward, two losses, two optimizers that step in between."""
    model = run.shard(Both)
    actor, critic = run.optimizer(model.actor.parameters()), run.optimizer(model.critic.parameters())
    for step in range(3):
        x, y = run.data(step)
        policy, value = model(x)
        run.step(critic, F.mse_loss(value, y.mean(1, keepdim=True)))
        run.step(actor, (F.mse_loss(policy, y, reduction="none") * value.detach()).mean())


@program()
def a_model_given_to_another_as_a_part(run: Run) -> None:
    """A sharded body and a sharded head."""
    body, head = run.shard(lambda: Net(2)), run.shard(Judge)
    optimizer = run.optimizer([*body.parameters(), *head.parameters()])
    for step in range(3):
        run.step(optimizer, head(body(run.data(step)[0])).square().mean())


@program()
def a_plain_head_trained_by_hand(run: Run) -> None:
    """A plain frozen module before the sharded one, its output's gradient is asked for."""
    front = run.make(lambda: nn.Linear(IN, IN).requires_grad_(False))
    run.train(run.shard(Net), loss=lambda model, step: F.mse_loss(model(front(run.data(step)[0])), run.data(step)[1]))


@loss_program(Net)
def the_whole_model_checkpointed(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    return F.mse_loss(checkpoint(model, x, use_reentrant=False), y)


@program(refused=((zk.ZerokernError, RuntimeError), ("use_reentrant=False",)))
def checkpointed_reentrantly(run: Run) -> None:
    run.train(run.shard(cases.CheckpointedReentrantly))


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(IN, WIDTH), nn.GRUCell(WIDTH, WIDTH)])
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for cell, state in zip(self.cells, states, strict=True):
            x = cell(x, state)
            kept.append(x)
        return self.leave(x), kept


@program()
def truncated_backpropagation_through_time(run: Run) -> None:
    model = run.shard(Truncated)
    optimizer = run.optimizer(model.parameters())
    states = [torch.zeros(4, WIDTH)] * 2
    for step in range(4):
        loss = torch.zeros(())
        for turn in range(3):
            x, y = run.data(10 * step + turn)
            out, states = model(x, states)
            loss = loss + F.mse_loss(out, y)
        run.step(optimizer, loss)
        states = [state.detach() for state in states]


@program()
def a_game_of_unknown_length(run: Run) -> None:
    """REINFORCE: forwards of a few rows each, one loss at the end."""
    model = run.shard(Net)

    def loss(model: nn.Module, step: int) -> Tensor:
        pairs = batch(step, run.rank, 6 + 2 * step)[0].split(2)  # one row: a sum whose order depends on addresses
        odds = [model(pair).log_softmax(-1)[:, number % OUT].sum() for number, pair in enumerate(pairs)]
        return -torch.stack(odds).sum()

    run.train(model, loss=loss)


@loss_program(cases.Reordered, steps=5)
def depth_that_grows(run: Run, model: nn.Module, step: int) -> Tensor:
    model.order = tuple(range(min(step + 1, 3)))
    return run.mse(model, step)


@loss_program(Net, steps=4)
def batches_of_changing_size(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, run.rank, 2 + 3 * (step % 3))
    return F.mse_loss(model(x), y)


@program()
def narrow_parameters(run: Run) -> None:
    """A model in bfloat16, whose masters are exact."""
    model = run.shard(lambda: Net().bfloat16())

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = run.data(step)
        return F.mse_loss(model(x.bfloat16()).float(), y)

    run.train(model, 4, loss)


@program()
def reduced_as_fp32_by_policy(run: Run) -> None:
    run.train(run.shard(Net, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)))


@program()
def a_retained_graph_over_two_steps(run: Run) -> None:
    """The second pass goes through inputs that the first has left; parameters are not changed in between."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(2):
        loss = run.mse(model, step)
        run.backward(loss, retain_graph=True)
        model.zero_grad()
        run.step(optimizer, loss)


@program()
def two_sharded_models_of_one_optimizer_by_turns(run: Run) -> None:
    models = [run.shard(Net), run.shard(Judge)]
    optimizer = run.optimizer([param for model in models for param in model.parameters()])
    for step in range(4):
        x, y = run.data(step)
        run.step(optimizer, F.mse_loss(models[0](x), y) if step % 2 else models[1](y).square().mean())


@loss_program(Net)
def a_backward_in_a_forward(run: Run, model: nn.Module, step: int) -> Tensor:
    """Test-time training: an inner gradient of an activation, within the loss."""
    x, y = run.data(step)
    hidden = model.enter(x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.blocks[0](hidden).square().mean(), hidden)
    return F.mse_loss(model.leave(model.body(model.enter(x) - slope)), y)
