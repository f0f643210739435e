"""Second act: one model, trained by each optimizer in turn, step by step, from the same weights on the same batches."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contenders import CONTENDERS, Contender, state_nbytes
from ..model import GPT, Shape
from ..text import Batches, read_text
from ..widen import bf16_is_slow
from .act import Act
from .view import View, megabytes

UNTIMED_STEPS = 3
SMOOTHED_STEPS = 20
HELD_OUT_BATCHES = 8
LANES = ("torch", "exact-fp32", "torch-bf16", "exact", "int8-split16")

FULL = Act(Shape(6, 384, 64), LANES, rows=6, steps=80, lr=5e-4, seconds=60.0)


@dataclass
class Lane:
    """One contender's model, optimizer and measurements."""

    contender: Contender
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    held_out: float = float("nan")

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        start = time.perf_counter()
        loss = self.model(tokens, targets)
        loss.backward()
        optimizer_start = time.perf_counter()
        self.contender.step(self.optimizer)
        end = time.perf_counter()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step_seconds.append(end - start)
        self.optimizer_seconds.append(end - optimizer_start)

    @property
    def name(self) -> str:
        return f"{self.contender.label}, {self.contender.precision}"

    @property
    def smoothed(self) -> int:
        """Steps over which its loss is a mean."""
        return min(SMOOTHED_STEPS, len(self.losses))

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-SMOOTHED_STEPS:])

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def state_nbytes(self) -> int:
        return sum(state_nbytes(self.optimizer).values())


def build(name: str, shape: Shape, lr: float, seed: int, widen: bool = False) -> Lane:
    """A lane whose weights depend on the seed alone; a bf16 model may `widen` its products."""
    contender = CONTENDERS[name]
    torch.manual_seed(seed)
    model = GPT(shape, widen and contender.dtype == torch.bfloat16).to(contender.dtype)
    return Lane(contender, model, contender.optimizer(model.parameters(), lr))


def held_out_loss(model: GPT, batches: Batches, count: int) -> float:
    with torch.no_grad():
        return statistics.fmean(model(*batches.next()).item() for _ in range(count))


def peer(lane: Lane, lanes: list[Lane]) -> Lane:
    """What a lane is compared with: torch on a model of the same precision."""
    same = (one for one in lanes if one.contender.is_torch and one.contender.dtype == lane.contender.dtype)
    return next(same, lanes[0])


def settled(values: list[float]) -> list[float]:
    """Without the first steps, in which memory is new; at least one is left.

    >>> settled([9.0, 9.0, 9.0, 1.0]), settled([9.0, 2.0])
    ([1.0], [2.0])
    """
    return values[min(UNTIMED_STEPS, len(values) - 1) :]


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Median of the paired ratios; above 1 is ahead."""
    return statistics.median(settled([a / b for a, b in zip(theirs, ours, strict=True)]))


def loss_gap(lane: Lane, lanes: list[Lane]) -> float:
    """How far a lane ends above its peer."""
    return lane.loss - peer(lane, lanes).loss


def table_rows(lanes: list[Lane]) -> list[list[str]]:
    def milliseconds(seconds: list[float]) -> str:
        return f"{statistics.median(settled(seconds)) * 1e3:,.1f} ms"

    def row(lane: Lane) -> list[str]:
        reference = peer(lane, lanes)
        return [
            lane.name,
            f"{lane.loss:.4f}",
            f"{lane.held_out:.4f}",
            milliseconds(lane.step_seconds),
            milliseconds(lane.optimizer_seconds),
            megabytes(lane.state_nbytes),
            f"{reference.state_nbytes / lane.state_nbytes:.2f}x",
            lane.contender.lossy or "nothing",
        ]

    return [row(lane) for lane in lanes]


HEADER = ("", "loss", "held out", "whole step", "optimizer", "state", "smaller", "lossy")


def explain(lanes: list[Lane], view: View) -> None:
    for lane in lanes:
        reference = peer(lane, lanes)
        if lane is not reference:
            gaps = [abs(a - b) for a, b in zip(reference.losses, lane.losses, strict=True)]
            view.say(f"Largest difference of one step's loss to torch's: {lane.name} {max(gaps):.1e}")
    view.say(
        f"loss: mean of the last {lanes[0].smoothed} steps; optimizer: global norm, clip and update. State counts "
        "masters, remainders and wide gradients, and is compared with that of torch with a model of the same precision."
    )


def train(act: Act, lanes: list[Lane], batches: Batches, view: View) -> None:
    start = time.perf_counter()
    with view.rounds() as rounds:
        for number in range(act.steps):
            batch = batches.next()
            turn = number % len(lanes)
            for lane in lanes[turn:] + lanes[:turn]:
                lane.step(*batch, act.lr_at(number + 1))
            losses = " / ".join(f"{lane.losses[-1]:.3f}" for lane in lanes)
            rounds.at(f"  in turn, loss {losses}", number + 1, act.steps)
            if number + 1 < act.steps and act.is_over(number + 1, time.perf_counter() - start):
                view.say(f"  stopped at step {number + 1}: {act.seconds:.0f} s are over")
                return


def perform(act: Act, view: View) -> list[Lane]:
    """Runs the act and prints its table."""
    view.title(f"Act 2: a GPT of {act.shape.numel / 1e6:.1f}M parameters, {len(act.contenders)} optimizers in turn")
    widen = bf16_is_slow()
    if widen:
        view.say("  this CPU multiplies bf16 matrices slowly: those products are computed in fp32")
    lanes = [build(name, act.shape, act.lr, seed=0, widen=widen) for name in act.contenders]
    train(act, lanes, Batches(read_text(), act.rows, act.shape.context, seed=0), view)
    unseen = read_text(held_out=True)
    for lane in lanes:
        batches = Batches(unseen, act.rows, act.shape.context, seed=1)
        lane.held_out = held_out_loss(lane.model, batches, HELD_OUT_BATCHES)
    if view.details:
        view.say()
        view.table(HEADER, table_rows(lanes))
        explain(lanes, view)
    return lanes
