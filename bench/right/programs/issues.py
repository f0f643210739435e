"""Public reports as programs: what was reported, in a few lines, by the number of the report."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..training import IN, OUT, Run, Training
from . import loss, model, program
from .nets import WIDTH, Block, Net, Tied, some_words
from .states import saved


@model(issue="DeepSpeed #8224")
class ASubmoduleUsedTwice(Net):
    """ZeRO-2 dropped the gradients of one of both uses."""

    def __init__(self) -> None:
        super().__init__(2)

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.blocks[1](x)))


@program(issue="DeepSpeed #8224", narrow=True)
def a_submodule_used_twice_in_bf16(run: Run) -> None:
    run.loop(ASubmoduleUsedTwice, narrow=True)


@program(issue="DeepSpeed #7718", narrow=True)
def clipped_in_bf16_with_many_layers(run: Run) -> None:
    """ZeRO-2's norm was a third of what it is, and so was what was clipped by it."""
    run.loop(lambda: Net(6), narrow=True, clip=0.2)


@program(issue="accelerate #3877")
def accumulation_of_eight_batches(run: Run) -> None:
    """ZeRO-2's loss depended on how a batch was divided."""
    run.loop(Net, steps=2, accumulate=8)


@loss(Net, issue="DeepSpeed #988")
def twins_that_are_recomputed(run: Run, training: Training, step: int) -> Tensor:
    """ZeRO-2: "Gradient computed twice for this partition"."""
    a, b = (checkpoint(training, run.data(step + more)[0], use_reentrant=False) for more in (0, 40))
    return (a - b).square().mean()


@program(issue="DeepSpeed #3539")
def one_loss_passed_back_twice(run: Run) -> None:
    """ZeRO-3: a size mismatch in the second pass."""
    training = run.train(Net)
    for step in range(2):
        loss = run.mse(training, step)
        training.step(loss, lambda loss: (loss.backward(retain_graph=True), loss.backward()))


class Often(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.enter(x)
        for _ in range(times):
            x = self.blocks[0](x)
        return self.leave(x)


@loss(Often, issue="DeepSpeed #7998")
def a_block_that_one_rank_runs_thrice(run: Run, training: Training, step: int) -> Tensor:
    """ZeRO-3 waits for ever: rank 1 asks for a weight that rank 0 does not."""
    x, y = run.data(step)
    return F.mse_loss(training(x, 1 + 2 * run.rank), y)


@model(issue="DeepSpeed #8279")
class ATrailingParameterWithoutElements(Net):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


@model(issue="DeepSpeed #966")
class FirstAndLastLayerShareTheirWeight(nn.Module):
    """Stages 0 to 3 trained differently."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(3))
        self.layers[2].weight, self.layers[2].bias = self.layers[0].weight, self.layers[0].bias
        self.leave = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.leave(x)


@program(issue="FlashOptim #3, accelerate #3971")
def saved_and_resumed_anew(run: Run) -> None:
    """The first step after a resume exploded; the step count was missing."""
    first = run.train(Net)
    run.loop(first, steps=3)
    first.save(saved(run))
    again = run.train(Net)
    again.load(saved(run))
    run.loop(again, steps=3)


@program(issue="bitsandbytes #2080, torchao #4912")
def states_that_do_not_depend_on_the_split(run: Run) -> None:
    """One parameter of 6,144 elements, which half of it would have other states than."""
    run.loop(lambda: nn.Sequential(nn.Linear(IN, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, OUT)), steps=4)


class Auxiliary(Net):
    """Keeps what its head makes of the first block, and uses the head again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.enter(x))
        self.early = self.leave(x)
        return self.leave(self.blocks[2](self.blocks[1](x)))


@loss(Auxiliary, issue="pytorch #183702")
def a_head_used_early_and_kept(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) + F.mse_loss(training.module.early, run.data(step)[1])


@program(issue="pytorch #170862")
def clipped_where_ranks_hold_unequal_parts(run: Run) -> None:
    """A norm of local parts alone clips too little."""
    run.loop(lambda: nn.Sequential(nn.Linear(IN, 3), nn.Linear(3, WIDTH), nn.Linear(WIDTH, OUT)), steps=4, clip=0.05)


class Chunked(Tied):
    """The loss takes the head's weight, chunk by chunk, and recomputes each."""

    def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        hidden, total = self.hidden(words[:, :-1]).flatten(0, 1), torch.zeros(())
        for part, wanted in zip(hidden.split(5), words[:, 1:].flatten().split(5), strict=True):
            total = total + checkpoint(self.chunk, part, wanted, use_reentrant=False)
        return total / len(hidden)

    def chunk(self, part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(part @ self.head.weight.t(), wanted, reduction="sum")


@loss(Chunked, issue="TRL #6076")
def a_loss_in_recomputed_chunks(run: Run, training: Training, step: int) -> Tensor:
    return training(some_words(step, run.rank))


@program(issue="pytorch #144657")
def a_save_beside_training(run: Run) -> None:
    """The checkpoint of a model on a CPU held values of later steps."""
    training = run.train(Net)
    run.loop(training, steps=2)
    wait = training.save_beside(saved(run))
    run.loop(training, steps=2)
    wait()
    training.load(saved(run))
    run.see("loaded", *training.full().values())
    run.loop(training, steps=1)


@program(issue="pytorch #188174")
def objects_that_steps_leave_behind(run: Run) -> None:
    """The fused AdamW left one object for each DTensor and step, until the host's memory was full."""
    training, alive = run.train(Net, fused=True), []
    for _ in range(3):
        run.loop(training, steps=4)
        gc.collect()
        alive.append(len(gc.get_objects()))
    left = max(0, alive[2] - alive[1]) // (4 * len(list(training.module.parameters())))
    run.see("left by each parameter and step", left)


class FusedCrossEntropy(torch.autograd.Function):
    """Head and loss in one, as Liger has it: the gradients of both are made in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
        odds = (hidden @ weight.t()).log_softmax(-1)
        slope = (odds.exp() - F.one_hot(wanted, len(weight))) / len(hidden)
        ctx.save_for_backward(slope @ weight, slope.t() @ hidden)
        return F.nll_loss(odds, wanted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        of_hidden, of_weight = ctx.saved_tensors
        return grad * of_hidden, grad * of_weight, None


class FusedWithin(Tied):
    def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.hidden(words[:, :-1]).flatten(0, 1)
        return FusedCrossEntropy.apply(hidden, self.head.weight, words[:, 1:].flatten())


@loss(FusedWithin, issue="TRL #6372")
def a_fused_loss_within_the_forward(run: Run, training: Training, step: int) -> Tensor:
    """What the report was answered with: ZeRO-3 gathers the head's weight within the engine's forward alone."""
    return training(some_words(step, run.rank))


class Hidden(Tied):
    def forward(self, words: Tensor) -> Tensor:
        return self.hidden(words).flatten(0, 1)


@loss(Hidden, issue="TRL #6372")
def a_fused_loss_beside_the_model(run: Run, training: Training, step: int) -> Tensor:
    """ZeRO-3: "size mismatch, got input (s2x2048), vec (0)"."""
    words = some_words(step, run.rank)
    hidden, weight = training(words[:, :-1]), training.weight(training.module.head.weight)
    return FusedCrossEntropy.apply(hidden, weight, words[:, 1:].flatten())
