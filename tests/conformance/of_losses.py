"""Losses and penalties: of outputs, of inputs' gradients, of the parameters themselves; several passes; torch.func."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_programs import Run, loss_program, program, trained
from torch import Tensor, nn
from zero_cases import Net

import zerokern as zk


def squares(params: object) -> Tensor:
    return sum(param.square().sum() for param in params)  # type: ignore[attr-defined]


trained(
    "weight_decay_in_the_loss_before_the_forward",
    Net,
    lambda run, model, step: 1e-2 * squares(model.parameters()) + run.mse(model, step),
)


@program(exact=False)
def a_penalty_with_a_pass_of_its_own(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        run.backward(run.mse(model, step))
        run.step(optimizer, 1e-2 * squares(model.parameters()))


@program(exact=False)  # the order of sums of a product with itself depends on addresses
def an_orthogonality_penalty(run: Run) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        weight = model.blocks[0].down.weight
        return run.mse(model, step) + (weight @ weight.t() - torch.eye(len(weight))).square().mean()

    model = run.shard(Net)
    run.train(model, loss=loss, optimizer=run.optimizer(model.parameters(), zk.SGD))


def kept(run: Run, model: nn.Module) -> list[Tensor]:
    with run.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


@program()
def fedprox(run: Run) -> None:
    """The squared distance to where training began."""
    model = run.shard(Net)
    old = kept(run, model)

    def loss(model: nn.Module, step: int) -> Tensor:
        far = sum((p - before).square().sum() for p, before in zip(model.parameters(), old, strict=True))
        return run.mse(model, step) + 0.05 * far

    run.train(model, loss=loss)


@program()
def a_distance_to_the_start_of_one_layer(run: Run) -> None:
    model = run.shard(Net)
    with run.gathered(model):
        old = model.leave.weight.detach().clone()
    run.train(model, loss=lambda model, step: run.mse(model, step) + F.mse_loss(model.leave.weight, old))


@program()
def uncertainty_weights_beside_the_model(run: Run) -> None:
    """Several losses, weighted by parameters of a module of their own."""
    model, weights = run.shard(Net), run.shard(lambda: nn.ParameterList([torch.zeros(()), torch.ones(())]))
    optimizer = run.optimizer([*model.parameters(), *weights.parameters()])

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = run.data(step)
        out = model(x)
        losses = F.mse_loss(out, y), F.l1_loss(out, y)
        return sum(one * (-weight).exp() + weight for one, weight in zip(losses, weights, strict=True))

    run.train(model, loss=loss, optimizer=optimizer)


@loss_program(Net)
def a_loss_of_some_outputs_on_some_ranks(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    out = model(x)
    return F.mse_loss(out[:, :2], y[:, :2]) if (step + run.rank) % 2 else out.square().mean()


@program()
def gradients_of_all_parameters_by_autograd_grad(run: Run) -> None:
    """They are local: what is averaged is what backward leaves."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        params = list(model.parameters())
        grads = torch.autograd.grad(run.mse(model, step), params)
        run.see(*(grad.norm() for grad in grads))
        run.step(optimizer, run.mse(model, step))


@program()
def first_order_meta_learning(run: Run) -> None:
    """An inner step on copies, by functional_call; the outer gradient is that of the copies."""
    model = run.shard(Net)

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = run.data(step)
        fast = {name: param * 0.9 for name, param in model.named_parameters()}
        return F.mse_loss(torch.func.functional_call(model, fast, (x,)), y)

    run.train(model, loss=loss)


@program()
def a_jacobian_by_torch_func(run: Run) -> None:
    model = run.shard(Net)
    run.see(torch.func.jacrev(model)(run.data(5)[0]))
    run.train(model)


@loss_program(Net)
def a_vectorized_forward(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    return F.mse_loss(torch.func.vmap(model)(x), y)


@program(exact=False)
def losses_passed_back_one_by_one(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        x, y = run.data(step)
        out = model(x)
        for number in range(3):
            run.backward(F.mse_loss(out[:, number], y[:, number]), retain_graph=number < 2)
        optimizer.step()
        optimizer.zero_grad()


@program()
def backward_from_a_gradient_of_the_output(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        x, y = run.data(step)
        run.step(optimizer, model(x), gradient=y)
