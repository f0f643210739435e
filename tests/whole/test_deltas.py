"""Of whole programs: who follows by deltas has the bits of the model, whatever it is trained by and whoever writes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_cases import same_bits
from programs import (
    SAVED_AFTER,
    STEPS,
    Program,
    Seen,
    Training,
    device_of,
    full_of,
    loop,
    programs,
    resumed,
    scaler_of,
    sharded,
    small_rings,
)
from test_whole import A_LAUNCH, RUNS
from torch import Tensor
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.interop import deltas

QUICK = programs(2)
HERE = [one for one in QUICK if one.where != "ranks"]
ON_RANKS = [one for one in QUICK if one.where == "ranks"]


def whole(training: Training) -> dict[str, Tensor]:
    found = full_of(training.model, training.program.wrap)
    found = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in found.items()}
    return {name: one.detach().clone() for name, one in found.items()}


def packs_all(patch: pytest.MonkeyPatch) -> None:
    """At these rates nearly all changes: bits are taken nevertheless."""
    patch.setattr(deltas, "_MOST", 1e9)


@pytest.fixture(autouse=True)
def packs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        packs_all(patch)
        yield


class Followed:
    """A model and a copy that gets deltas alone."""

    def __init__(self, training: Training) -> None:
        self.training, self.calls, self.dense = training, 0, set[str]()
        self.follower = zk.deltas(training.model, training.optimizer)
        self.copy, self.after = whole(training), ""

    def take(self) -> Any:
        delta = self.follower.take()
        assert self.after in ("", delta.before)
        self.after = delta.after
        delta.apply_(self.copy)
        if self.calls > 2:
            self.dense |= {name for name, one in delta.tensors.items() if isinstance(one.part, Tensor)}
        expected = whole(self.training)
        assert self.copy.keys() == expected.keys()
        for name, value in expected.items():
            assert same_bits([self.copy[name].reshape(-1)], [value.reshape(-1)]), f"{name} differs"
        return delta

    def between(self) -> None:
        """After a step: taken after the second, the fourth and so on, so that updates join."""
        self.calls += 1
        if self.calls % 2 == 0:
            self.take()


@ranked
def follow(world: World, program: Program, folder: Path) -> None:
    with device_of(program) as device:
        ours = Training(world, program, folder / "ours", device)
        wait = (lambda: None) if device is None else device.synchronize
        followed = Followed(ours)

        def between() -> None:
            wait()
            followed.between()

        first = STEPS if program.resume == "no" else SAVED_AFTER
        scaler, seen = scaler_of(program), Seen([], [], 0)
        loop(ours, range(first), seen, scaler, between=between)
        followed.take()
        if program.resume == "saved" and sharded(program.wrap):  # into the same, in place
            zk.save(folder / "kept", ours.model, ours.optimizer)
            zk.load(folder / "kept", ours.model, ours.optimizer)
            wait()
            followed.take()
        elif program.resume != "no":
            ours = resumed(ours, folder, device)
            followed = Followed(ours)
        loop(ours, range(first, STEPS + 1), seen, scaler, between=between)
        ours.optimizer.flush()
        wait()
        followed.take()
        assert not followed.take().names
        told = program.change not in ("frozen", "written") and program.resume != "saved"
        assert not (told and followed.dense), followed.dense
        with torch.no_grad():
            for param in ours.model.blocks[0].parameters() if not program.played else ():
                param.mul_(0.5)
        assert followed.take().names or program.played


@pytest.mark.parametrize("program", HERE, ids=str)
def test_a_follower_has_the_bits(program: Program, tmp_path: Path) -> None:
    RUNS[program.where](follow, program, tmp_path)


@ranked
def follow_all(world: World, launched: Sequence[Program], folder: Path) -> tuple[int, str]:
    """How many programs went well, and what went wrong in the one that did not."""
    with pytest.MonkeyPatch.context() as patch:
        small_rings(patch)
        packs_all(patch)
        for number, program in enumerate(launched):
            try:
                follow(world, program, folder / str(number))
            except Exception:
                return number, f"{program}\n{traceback.format_exc()}"
    return len(launched), ""


@pytest.mark.parametrize("begin", range(0, len(ON_RANKS), A_LAUNCH))
def test_a_follower_on_real_ranks_has_the_bits(begin: int, tmp_path: Path) -> None:
    launched = ON_RANKS[begin : begin + A_LAUNCH]
    said = on_ranks(2, follow_all, launched, tmp_path)
    assert not [one for _, one in said if one], "\n".join(one for _, one in said)
