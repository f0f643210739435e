"""Losses: of outputs, of gradients of inputs, of parameters themselves; several forwards for one backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..training import Run, Training
from . import loss, program
from .nets import Net


@loss(Net)
def a_gradient_penalty(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    x.requires_grad_()
    out = training(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.1 * slope.square().mean()


@loss(Net)
def wasserstein_with_a_penalty(run: Run, training: Training, step: int) -> Tensor:
    real, made = run.data(step)[0], run.data(step + 30)[0]
    between = (0.3 * real + 0.7 * made).requires_grad_()
    (slope,) = torch.autograd.grad(training(between).sum(), between, create_graph=True)
    return training(made).mean() - training(real).mean() + (slope.norm(dim=1) - 1).square().mean()


@loss(Net)
def an_adversarial_input(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(training(x), y), x)
    return F.mse_loss(training(x.detach() + 0.1 * slope.sign()), y)


@loss(Net)
def two_forwards_one_backward(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) + run.mse(training, step + 50)


@loss(Net)
def siamese_twins(run: Run, training: Training, step: int) -> Tensor:
    a, b = training(run.data(step)[0]), training(run.data(step + 40)[0])
    return F.cosine_embedding_loss(a, b, torch.tensor([1.0, -1.0, 1.0, -1.0]))


@loss(Net)
def three_forwards_of_a_triplet(run: Run, training: Training, step: int) -> Tensor:
    return F.triplet_margin_loss(*(training(run.data(step + 20 * turn)[0]) for turn in range(3)))


@loss(Net)
def a_forward_without_a_graph_as_target(run: Run, training: Training, step: int) -> Tensor:
    x, _ = run.data(step)
    with torch.no_grad():
        target = training(x + 0.1)
    return F.mse_loss(training(x), target)


@loss(Net)
def a_penalty_of_one_weight_after_the_forward(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) + training.weight(training.module.blocks[1].up.weight).square().mean()


@loss(Net)
def a_penalty_of_one_weight_before_the_forward(run: Run, training: Training, step: int) -> Tensor:
    penalty = training.weight(training.module.blocks[1].up.weight).square().mean()
    return penalty + run.mse(training, step)


@loss(Net)
def a_penalty_of_all_weights(run: Run, training: Training, step: int) -> Tensor:
    squares = sum(training.weight(param).square().sum() for param in training.module.parameters())
    return run.mse(training, step) + 1e-2 * squares


@loss(Net, unused=True)
def a_penalty_alone(run: Run, training: Training, step: int) -> Tensor:
    return sum(training.weight(p).square().sum() for p in training.module.blocks[0].parameters())  # type: ignore[return-value]


@loss(Net)
def a_loss_that_is_zero_now_and_then(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) * (step % 2)


@loss(Net)
def cross_entropy_with_ignored_rows(run: Run, training: Training, step: int) -> Tensor:
    x, _ = run.data(step)
    return F.cross_entropy(training(x), torch.tensor([0, 2, -100, 1]), label_smoothing=0.1)


@loss(Net)
def contrastive_pairs(run: Run, training: Training, step: int) -> Tensor:
    x, _ = run.data(step)
    a, b = (F.normalize(training(one), dim=1) for one in (x, x + 0.1))
    return F.cross_entropy(a @ b.t() / 0.2, torch.arange(len(a)))


@program()
def distillation_from_a_plain_teacher(run: Run) -> None:
    teacher = run.make(lambda: Net().requires_grad_(False))

    def of_teacher(training: Training, step: int) -> Tensor:
        x, _ = run.data(step)
        return F.mse_loss(training(x), teacher(x))

    run.loop(Net, loss=of_teacher)


@program()
def distillation_from_a_wrapped_teacher(run: Run) -> None:
    teacher = run.train(lambda: Net().requires_grad_(False))

    def of_teacher(training: Training, step: int) -> Tensor:
        x, _ = run.data(step)
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(training(x), target)

    run.loop(Net, loss=of_teacher)


@program()
def two_backward_passes_of_one_graph(run: Run) -> None:
    training = run.train(Net)
    for step in range(3):
        training.step(run.mse(training, step), lambda loss: (loss.backward(retain_graph=True), loss.backward()))


class Hooked(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.enter(x))
        x.register_hook(lambda grad: grad * 0.5)
        return self.leave(x)


@loss(Hooked)
def a_hook_on_an_activation(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step)


@program()
def a_hook_on_a_parameter(run: Run) -> None:
    net = run.make(Net)
    net.leave.weight.register_hook(lambda grad: grad * 0.5)
    run.loop(net)


@program()
def a_hook_on_a_parameter_of_a_block(run: Run) -> None:
    net = run.make(Net)
    net.blocks[1].up.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    run.loop(net)


@program()
def hooks_on_forwards_and_backwards(run: Run) -> None:
    net = run.make(Net)
    net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net.blocks[1].register_forward_hook(lambda module, args, out: out + 1)
    net.blocks[2].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
    run.loop(net)


@program()
def activations_caught_by_hooks(run: Run) -> None:
    net, caught = run.make(Net), {}
    for at, block in enumerate(net.blocks):
        block.up.register_forward_hook(lambda module, args, out, at=at: caught.__setitem__(at, out))

    def with_caught(training: Training, step: int) -> Tensor:
        return run.mse(training, step) + 0.1 * sum(one.abs().mean() for one in caught.values())

    run.loop(net, loss=with_caught)


@loss(Net)
def an_inner_gradient_of_an_activation(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    out = training(x)
    (slope,) = torch.autograd.grad(out.square().mean(), out, create_graph=True)
    return F.mse_loss(out - slope, y)


@loss(Net)
def a_jacobian_of_the_input(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    slopes = torch.autograd.functional.jacobian(training, x, create_graph=True)
    return slopes.square().mean() + F.mse_loss(training(x), y)
