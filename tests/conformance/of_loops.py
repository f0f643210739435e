"""Loops: accumulation, games of two models, checkpointing, autocast, truncated recurrence, changing depth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from module_cases import Reordered, nets
from small_programs import Run, loss_program, program
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from zero_cases import Net

import zerokern as zk


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
def accumulation_over_parts_with_a_reduction_of_each(run: Run) -> None:
    """The first pass reaches some units only."""
    model = run.shard(Reordered)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        for order in ((0,), (1, 2), (0, 2)):
            model.order = order
            run.backward(run.mse(model, step))
        optimizer.step()
        optimizer.zero_grad()


@program()
def two_models_that_compete_by_one_forward(run: Run) -> None:
    """The judge has stepped before the maker's loss is passed back through what it made before."""
    maker, judge = run.shard(Net), run.shard(nets.Judge)
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
        self.actor, self.critic = Net(2), nets.Judge()

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
    body, head = run.shard(lambda: Net(2)), run.shard(nets.Judge)
    optimizer = run.optimizer([*body.parameters(), *head.parameters()])
    for step in range(3):
        run.step(optimizer, head(body(run.data(step)[0])).square().mean())


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
    models = [run.shard(Net), run.shard(nets.Judge)]
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
