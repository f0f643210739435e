"""One process that talks to nobody: the compute of a step with its whole optimizer step. All ranks run it at once."""

from __future__ import annotations

from torch import nn

from .trainer import AUTOCAST, CLIPS, MASTERS, Candidate, Seat, Trainer, in_fp32, wirings, with_masters

NAME = "compute only"


def alone(module: nn.Module) -> nn.Module:
    return module


def candidates(seat: Seat) -> list[Candidate]:
    def build(way: str, fold: bool) -> Trainer:
        if way == MASTERS:
            return with_masters(seat.job, alone, fold=fold)
        return in_fp32(seat.job, alone, fold=fold, autocast=way == AUTOCAST)

    ways = (MASTERS, AUTOCAST) if seat.job.is_bf16 else ("fp32",)
    return wirings(NAME, build, way={way: way for way in ways}, fold=CLIPS)


def truth(seat: Seat) -> Trainer:
    """fp32 training whose losses the others must have; it is given the batches of all ranks together."""
    return in_fp32(seat.job, alone, fold=False)
