"""Loops: accumulation, games of several models, batches and depths that change, gradients that are edited."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import IN, OUT, Run, Training
from . import loss, program
from .nets import WIDTH, Judge, Net


@program()
def accumulation(run: Run) -> None:
    run.loop(Net, accumulate=3)


@program()
def accumulation_with_clipping(run: Run) -> None:
    run.loop(Net, accumulate=3, clip=0.3)


@program()
def accumulation_of_batches_that_vary(run: Run) -> None:
    def of_rows(training: Training, step: int) -> Tensor:
        x, y = run.data(step, rows=1 + step % 4)
        return F.mse_loss(training(x), y)

    run.loop(Net, loss=of_rows, accumulate=4)


@program()
def accumulation_over_parts_of_the_model(run: Run) -> None:
    from .modules import Ordered

    def of_part(training: Training, step: int) -> Tensor:
        training.module.order = [(0,), (1, 2), (0, 2)][step % 3]
        return run.mse(training, step)

    run.loop(Ordered, loss=of_part, accumulate=3, unused=True)


@loss(Net, steps=4)
def batches_of_changing_size(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step, rows=2 + 3 * (step % 3))
    return F.mse_loss(training(x), y)


@loss(Net, steps=4)
def batches_that_differ_between_ranks(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step, rows=2 + 3 * run.rank)
    return F.mse_loss(training(x), y)


@program()
def two_models_that_compete(run: Run) -> None:
    maker, judge = run.train(Net), run.train(Judge)
    for step in range(3):
        x, y = run.data(step)
        run.follow(judge, F.softplus(judge(maker(x).detach())).mean() + F.softplus(-judge(y)).mean())
        run.follow(maker, F.softplus(-judge(maker(x))).mean())
        judge.zero_grad()


@program()
def a_judge_frozen_while_the_maker_learns(run: Run) -> None:
    maker, judge = run.train(Net), run.train(Judge)
    for step in range(3):
        x, y = run.data(step)
        judge.module.requires_grad_(False)
        run.follow(maker, -judge(maker(x)).mean())
        judge.module.requires_grad_(True)
        run.follow(judge, (judge(maker(x).detach()) - judge(y)).mean())


@program()
def two_models_by_turns(run: Run) -> None:
    one, other = run.train(Net), run.train(lambda: Net(2))
    for step in range(4):
        turn = one if step % 2 else other
        run.follow(turn, run.mse(turn, step))


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
    training, states = run.train(Truncated), [torch.zeros(4, WIDTH)] * 2
    for step in range(3):
        loss = torch.zeros(())
        for turn in range(3):
            x, y = run.data(10 * step + turn)
            out, states = training(x, states)
            loss = loss + F.mse_loss(out, y)
        run.follow(training, loss)
        states = [state.detach() for state in states]


@program()
def frozen_and_thawed_by_turns(run: Run) -> None:
    training = run.train(Net, unused=True)
    for step in range(4):
        training.module.blocks[0].requires_grad_(step % 2 == 0)
        run.follow(training, run.mse(training, step))
    training.module.blocks[0].requires_grad_(True)


@program()
def gradients_scaled_before_the_step(run: Run) -> None:
    training = run.train(Net)
    for step in range(3):
        training.backward(run.mse(training, step) * 1024)
        training.edit_gradients(lambda grad: grad / 1024)
        training.update()


@program()
def gradients_clamped_before_the_step(run: Run) -> None:
    training = run.train(Net)
    for step in range(3):
        training.backward(run.mse(training, step))
        training.edit_gradients(lambda grad: grad.clamp(-0.01, 0.01))
        training.update()


@program()
def a_forward_that_fails_and_goes_on(run: Run) -> None:
    training = run.train(Net)
    for step in range(4):
        if step == 2:
            try:
                training(torch.zeros(4, IN + 1))
            except RuntimeError:
                run.see("failed", 1)
        run.follow(training, run.mse(training, step))


@program()
def a_forward_whose_loss_is_thrown_away(run: Run) -> None:
    training = run.train(Net)
    for step in range(4):
        run.see("thrown away", run.mse(training, step + 70))
        run.follow(training, run.mse(training, step))


@loss(Net)
def many_forwards_of_a_few_rows(run: Run, training: Training, step: int) -> Tensor:
    """REINFORCE: one loss at the end of a game."""
    turns = [training(run.data(10 * step + turn, rows=2)[0]).log_softmax(-1)[:, turn % OUT].sum() for turn in range(4)]
    return -torch.stack(turns).mean()
