"""Between the steps: evaluation, whole parameters read and written, training saved and resumed."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F

from ..training import Run
from . import program
from .nets import Net


@program()
def evaluation_between_steps(run: Run) -> None:
    training = run.train(Net)
    for step in range(3):
        run.follow(training, run.mse(training, step))
        with training.evaluating():
            run.see("evaluation", training(run.data(90)[0]))


@program()
def evaluation_between_two_accumulated_batches(run: Run) -> None:
    training = run.train(Net, accumulate=2)
    for step in range(4):
        run.follow(training, run.mse(training, step))
        with training.evaluating():
            run.see("evaluation", training(run.data(90)[0]))


@program()
def evaluation_of_another_amount_on_each_rank(run: Run) -> None:
    """Each rank has samples of its own; ranks that have no more wait at the next step."""
    training = run.train(Net)
    run.loop(training, steps=2)
    with training.evaluating():
        for number in range(1 + 2 * run.rank):
            run.see("evaluation", training(run.data(90 + number)[0]))
    run.loop(training, steps=1)


@program()
def whole_parameters_read_each_step(run: Run) -> None:
    training = run.train(Net)
    for step in range(3):
        run.follow(training, run.mse(training, step))
        run.see("norms", *(value.norm() for value in training.full().values()))


@program()
def an_average_of_weights(run: Run) -> None:
    training = run.train(Net)
    kept = training.full()
    for step in range(4):
        run.follow(training, run.mse(training, step))
        kept = {name: 0.9 * kept[name] + 0.1 * value for name, value in training.full().items()}
    run.see("average", *kept.values())


@program()
def a_layer_begun_anew(run: Run) -> None:
    training = run.train(Net)
    run.loop(training, steps=2)
    training.write({"leave.weight": torch.arange(192.0).view(3, 64) / 2000, "leave.bias": torch.zeros(3)})
    run.loop(training, steps=2)


@program()
def weights_clamped_after_each_step(run: Run) -> None:
    training = run.train(Net)
    for step in range(3):
        run.follow(training, run.mse(training, step))
        training.write({name: value.clamp(-0.1, 0.1) for name, value in training.full().items()})


@program()
def weights_put_back(run: Run) -> None:
    training = run.train(Net)
    run.loop(training, steps=1)
    before = training.full()
    run.loop(training, steps=2)
    training.write(before)
    run.loop(training, steps=1)


@program()
def a_momentum_encoder(run: Run) -> None:
    """A plain target that follows the model."""
    net = run.make(Net)
    target = copy.deepcopy(net).requires_grad_(False)
    training = run.train(net)
    for step in range(4):
        x, _ = run.data(step)
        run.follow(training, 2 - 2 * F.cosine_similarity(training(x), target(x + 0.1)).mean())
        for name, value in training.full().items():
            target.get_parameter(name).mul_(0.9).add_(value, alpha=0.1)


def saved(run: Run) -> Path:
    place = run.folder / "saved"
    place.mkdir(exist_ok=True)
    return place


@program()
def saved_and_loaded_into_the_same_training(run: Run) -> None:
    training = run.train(Net)
    run.loop(training, steps=2)
    training.save(saved(run))
    run.loop(training, steps=2)
    training.load(saved(run))
    run.loop(training, steps=2)


@program()
def saved_with_groups_and_loaded(run: Run) -> None:
    from .optimizers import by_layer

    training = run.train(Net, groups=by_layer)
    run.loop(training, steps=2)
    training.save(saved(run))
    run.loop(training, steps=2)
    training.load(saved(run))
    run.loop(training, steps=2)


@program()
def saved_between_two_rates(run: Run) -> None:
    training = run.train(Net)
    run.loop(training, steps=2)
    training.set_lr(2e-3)
    training.save(saved(run))
    training.set_lr(1e-1)
    run.loop(training, steps=1)
    training.load(saved(run))
    run.loop(training, steps=2)
