"""Who takes part, the losses that each must have, and each peer's best wiring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..contest import Missing
from ..peers import candidates
from ..zero import plain
from ..zero.job import MAX_NORM
from ..zero.trainer import Candidate, Seat, Trainer, fused_adamw, trainer
from ..zero.tuning import _best as best_of
from ..zero.tuning import by_name
from ..zero.turns import Effort, Floor
from . import ours

NONE = "none"
Make = Callable[[], Sequence[Candidate]]


def groups(seat: Seat) -> dict[str, Make]:
    """What makes the candidates of ours, of each peer, and of the bare computation."""
    found: dict[str, Make] = {"zerokern": lambda: ours.candidates(seat)}
    for peer in seat.job.peers:
        found[peer] = (lambda: ours.without_offload(seat)) if peer == NONE else candidates(peer, "offload", seat)
    return found | {plain.NAME: lambda: plain.candidates(seat)}


def tune(floor: Floor, effort: Effort, groups: Callable[[Seat], dict[str, Make]] = groups) -> dict[str, Any]:
    """The best wirings by name, and who is missing and why."""
    chosen: dict[str, str] = {}
    missing: dict[str, str] = {}
    for group, make in groups(floor.seat).items():
        try:
            for name, rivals in by_name(floor.agreed(make)).items():
                chosen[name] = rivals[0].wiring if len(rivals) == 1 else best_of(floor, rivals, effort).wiring
                if len(rivals) > 1:
                    floor.say(f"{name}: competes with {chosen[name]}")
        except Missing as reason:
            missing[group] = str(reason)
            floor.say(f"{group}: missing, {reason}")
    return {"wirings": chosen, "missing": missing}


def truths(seat: Seat) -> dict[str, Callable[[], Trainer]]:
    """fp32 training in one process, by the name of whose losses it tells; "" is everyone else."""
    return {"": lambda: plain.truth(seat), ours.DELAYED: lambda: delayed_truth(seat)}


def delayed_truth(seat: Seat) -> Trainer:
    """Each call publishes the update made of the gradient of the call before, and the first publishes nothing."""
    model = seat.job.build_model()
    shown = list(model.parameters())
    hidden = [nn.Parameter(param.detach().clone()) for param in shown]
    optimizer = fused_adamw(hidden)

    @torch.no_grad()
    def update() -> None:
        torch._foreach_copy_(shown, hidden)
        for own, param in zip(hidden, shown, strict=True):
            own.grad, param.grad = param.grad, None
        nn.utils.clip_grad_norm_(hidden, MAX_NORM)
        optimizer.step()

    return trainer(model, update)
