"""What one configuration saves, another one loads: stages, tiers, schedules, formats, optimizers, numbers of ranks.

Of all ways from one into another those are tried in which any two settings meet. Every kind of optimizer at every
stage and place goes on with the same bits in tests/whole.
"""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import BF16, Case, Run, digest, same
from products import where_they_meet
from tables import each
from worlds import on_ranks

import zerokern as zk

SMALL = {"dtype": BF16, "state_format": "int8", "master_format": "split8"}
PLACES: dict[str, dict[str, Any]] = {
    "device": {}, "host": {"tier": "cpu", "schedule": "overlap"},
    "disk": {"tier": "nvme"}, "delayed": {"tier": "cpu", "schedule": zk.Delayed(after=1)},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "bf16": {"dtype": BF16}, "int8 split8": SMALL,
    "bf16 without master": {"dtype": BF16, "master_format": "none", "settings": {"stochastic_seed": 5}},
    "clipped": {"settings": {"max_grad_norm": 0.1}}, "Lion int8": {"optimizer": "Lion", "state_format": "int8"},
    "SGD": {"optimizer": "SGD", "settings": {"momentum": 0.9}}, "torch AdamW": {"optimizer": "torch.AdamW"},
}  # fmt: skip
SLOW = pytest.mark.slow
ALONE, DIVIDED = (None, 1, 3), (1, 2, 3)


@dataclass(frozen=True)
class Way:
    """From (ranks, stage, place) into others, with one optimizer and its formats."""

    size: int
    stage: Any
    place: str
    into_size: int
    into_stage: Any
    into_place: str
    kind: str

    def possible(self) -> bool:
        late, into_late = (self.place.startswith("delayed"), self.into_place.startswith("delayed"))
        if (late or into_late) and self.place != self.into_place:
            return False  # a pending update stays one
        stages = {self.stage, self.into_stage}
        if "int8" in self.kind and "fsdp2" in stages:
            return False  # whose rows of such a model are no whole blocks
        ours = self.place != "device" or self.into_place != "device" or not stages <= {None, "ddp", "fsdp2"}
        return not (self.kind.startswith("torch") and ours)

    def exact(self) -> bool:
        """Whether training goes on with the same bits: sums of gradients have the same order."""
        if self.size != self.into_size or (self.kind == "clipped" and self.stage != self.into_stage):
            return False
        return self.size == 1 or self.stage == self.into_stage or {self.stage, self.into_stage} <= {*DIVIDED}

    def saves(self) -> Case:
        return Case(stage=self.stage, **PLACES[self.place], **KINDS[self.kind])

    def loads(self) -> Case:
        bucket_bytes = 1024 if self.into_stage in DIVIDED and self.size < 3 else None
        return Case(stage=self.into_stage, bucket_bytes=bucket_bytes, **PLACES[self.into_place], **KINDS[self.kind])


def ways(sizes: tuple[int, ...], stages: tuple[Any, ...], kinds: Any, most: int = 1200) -> list[Way]:
    """Those in which any two settings meet, of so many that are drawn by a fixed rule."""
    all_of_them = [Way(*one) for one in product(sizes, stages, PLACES, sizes, stages, PLACES, kinds)]
    possible = [way for way in all_of_them if way.possible()]
    drawn = random.Random(1).sample(possible, min(most, len(possible)))
    return [way for (way,) in where_they_meet([(way,) for way in drawn], 2)]


Chosen = dict[int, tuple[Any, ...]]  # ways by number; a class of this file has no name that ranks could import


def saved(rank: int, folder: Path, chosen: Chosen) -> None:
    """Two steps, a save, two steps; what there was after each, and the numbers that are drawn next."""
    for number, way in chosen.items():
        here = folder / str(number)
        here.mkdir(exist_ok=True)
        run = Way(*way).saves().begin(here)
        run.train(2).save(here / "kept")
        then, later = run.whole(), run.train(2).whole()
        torch.save((then, later, drawn(run)), here / f"seen{rank}")


def drawn(run: Run) -> tuple[Any, ...]:
    lr = [float(group["lr"]) for group in run.opt.param_groups]
    return torch.rand(2).tolist(), random.random(), run.scaler.get_scale(), lr


def loaded(rank: int, folder: Path, chosen: Chosen) -> None:
    for number, way in chosen.items():
        try:
            arrived(rank, folder / str(number), Way(*way))
        except Exception as error:
            raise AssertionError(f"{way}: {error}") from error


def arrived(rank: int, here: Path, way: Way) -> None:
    run = way.loads().begin(here / "other", seed=rank + 5).train(1)
    random.seed(rank)
    torch.manual_seed(rank)
    run.load(here / "kept")
    seen = here / f"seen{rank}"
    then, later, numbers = torch.load(seen if seen.exists() else here / "seen0", weights_only=False)
    same(run.whole(), then)
    after = run.train(2).whole()
    if way.exact():
        same(after, later)
        assert drawn(run) == numbers
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, digest(after))
        assert found == [found[0]] * len(found), "ranks differ"


FEW = ("AdamW", "int8 split8", "torch AdamW")


@pytest.mark.parametrize("kinds", [FEW, pytest.param(tuple(KINDS), marks=SLOW)], ids=["some", "all"])
def test_one_process_goes_on_bit_for_bit(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Loss scale, learning rate, random numbers, pending updates: whatever a step depends on."""
    chosen = dict(enumerate(map(astuple, ways((1,), ALONE, kinds))))
    saved(0, tmp_path, chosen)
    loaded(0, tmp_path, chosen)


@each("stage, tier", [(None, "cpu"), (3, "nvme")])
def test_a_pending_update_stays_one_where_there_is_no_other_state(stage: Any, tier: str, tmp_path: Path) -> None:
    """Also if it is saved again before the next step."""
    case = Case(stage=stage, tier=tier, schedule=zk.Delayed(after=1), optimizer="SGD")
    run = case.begin(tmp_path / "first").train(2)
    run.save(tmp_path / "kept")
    then, later = run.whole(), run.train(2).whole()
    second, third = case.begin(tmp_path / "second", seed=5).train(1), case.begin(tmp_path / "third", seed=6)
    second.load(tmp_path / "kept")
    second.save(tmp_path / "again")
    same(second.whole(), then)
    same(second.train(2).whole(), later)
    third.load(tmp_path / "again")
    same(third.whole(), then)
    same(third.train(2).whole(), later)


@pytest.mark.parametrize(
    "sizes, stages, kinds",
    [
        ((1, 2), (3, "ddp", "fsdp2"), ("AdamW", "bf16")),
        pytest.param((1, 2, 3), (1, 2, 3, "ddp", "fsdp2"), ("AdamW", "int8 split8", "bf16"), marks=SLOW),
    ],
    ids=["two", "three"],
)
def test_any_ranks_go_on_with_what_others_saved(
    sizes: tuple[int, ...], stages: tuple[Any, ...], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = dict(enumerate(map(astuple, ways(sizes, stages, kinds))))
    for work, side in ((saved, 0), (loaded, 3)):
        for size in sizes:
            mine = {number: way for number, way in chosen.items() if way[side] == size}
            on_ranks(size, work, tmp_path, mine, timeout=500.0)


def mean_of_two(rank: int, folder: Path, name: str | None) -> dict[str, torch.Tensor]:
    """Three steps on two ranks' data, from the start or from what one rank saved."""
    run = Case(stage=2 if name else None, optimizer="SGD", settings={"momentum": 0.9}).begin(folder / "swap")
    run.model.eval()  # no dropout: who draws what depends on the ranks
    if name is None:
        return run.train(3, rows=2).save(folder / "one") or run.train(3, rows=2).whole()
    run.load(folder / name)
    return run.train(3).whole()


def test_more_ranks_reach_the_same_within_rounding(tmp_path: Path) -> None:
    """Continuous in the gradient, so that only the order of sums differs: a few roundings for each of three steps."""
    expected = mean_of_two(0, tmp_path, None)
    for found in on_ranks(2, mean_of_two, tmp_path, "one"):
        for name, value in expected.items():
            if name != "seen":
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)
