"""Fills tiers in order, by the rule of `tier=` with budgets: what a plan advises, and what would fit instead of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from zerokern.core.units import FILLED
from zerokern.planner.footprint import Footprint, free_for_state, host_nbytes, with_recipe
from zerokern.planner.layouts import place_state
from zerokern.planner.recipe import Recipe

__all__ = ["filling", "has_room", "in_memory_first", "less_reserve", "would_fit"]

_GB = 10**9
_PLACES = (("device", "cpu"), ("cpu", "cpu"), ("device", "nvme"), ("cpu", "nvme"), ("nvme", "nvme"))
_F = TypeVar("_F", bound=Footprint)


def filling(run: _F) -> _F:
    """Returns the same run with as much state as there is room for, in whole GB, on the device, then in host memory,
    before what its tier is: as `["device:28GB", "cpu:40GB", zk.Nvme(path)]` has it.

    >>> filling(zk.plan("8B", tier="nvme", device_memory="80GB", host_memory="64GB")).budgets
    (('device', 28000000000), ('cpu', 43000000000))
    """
    recipe = run.recipe
    budgets: list[tuple[str, int]] = []
    if recipe.tier == "device" or recipe.optimizer == "none" or recipe.is_on_both_sides(run.settings.device):
        return run

    def room(tier: str, nbytes: int) -> None:
        if (whole := _of_each(_filled(run, budgets), nbytes) // _GB * _GB) > 0:
            budgets.append((tier, whole))

    if run.settings.device != "cpu" and not recipe.rests and not recipe.delays:
        room("device", free_for_state(run))
    if recipe.tier == "nvme" and "cpu" in run.budget:
        room("cpu", run.budget["cpu"] - host_nbytes(_filled(run, budgets)))  # copies of what stays are none
    return _filled(run, budgets)


def _filled(run: _F, budgets: Sequence[tuple[str, int]]) -> _F:
    return replace(run, recipe=replace(run.recipe, budgets=tuple(budgets)))


def less_reserve(run: _F) -> _F:
    """Returns the same run on hosts with the memory that advice fills: a tenth is left to everything else.

    >>> less_reserve(zk.plan("8B", tier="cpu", host_memory="100GB")).budget
    {'cpu': 90000000000}
    """
    shares = {"cpu": FILLED}
    return replace(run, budget={tier: int(shares.get(tier, 1.0) * most) for tier, most in run.budget.items()})


def has_room(run: Footprint) -> bool:
    """Returns whether nothing is missing, and as much of each device is left as advice leaves there."""
    return not run.missing and all(run.total <= FILLED * most for most in run.device_memory.values())


def _of_each(run: Footprint, nbytes: int) -> int:
    """Returns the budget with which optimizers together have room for so many bytes of the state that is in the last
    tier: Muon and AdamW each fill one.

    >>> run = zk.plan("gpt2", optimizer="muon", tier="nvme", device="cpu")  # 510 and 395 MB
    >>> [_of_each(run, nbytes * 10**6) for nbytes in (100, 1000)]
    [50000000, 604948480]
    """
    if not run.recipe.is_muon:
        return nbytes
    pieces = run.buckets.pieces(needed_first=True)
    sizes = [0, 0]
    for one in run.placed or place_state(run.recipe, pieces, ()):
        sizes[one.part.matrix is None] += one.nbytes * (one.tier == run.recipe.tier)
    return max(nbytes // 2, nbytes - min(sizes))


def would_fit(run: _F) -> list[_F]:
    """Returns what `Plan.would_fit` does.

    >>> [(one.recipe.tier, one.recipe.is_lossy()) for one in would_fit(zk.plan("20B", device_memory="v100"))]
    [('cpu', False), ('cpu', True)]
    """
    asked, run = run, less_reserve(run)
    exact, dtype = run.recipe, run.subject.main_dtype
    lossy = [
        recipe for recipe in (exact if exact.is_lossy() else None, exact.smallest_lossy(dtype)) if recipe is not None
    ]
    if exact.is_lossy():
        exact = replace(exact, state_format="fp32", master_format=None)
    recipes = [exact, *sorted(lossy, key=lambda recipe: recipe.state_nbytes(dtype))[:1]]
    keeps = dict.fromkeys((run.recipe.keep, *(("cpu", "nvme") if run.recipe.keep else ())))
    found: list[_F] = []
    fitting = set[tuple[Recipe, str | None, str, str]]()
    for recipe, keep, (param_tier, tier) in product(recipes, keeps, _PLACES):
        memory = {(param_tier, "cpu")} if tier == "nvme" else set()  # where there is no need of the disk
        memory |= {("cpu", tier)} if param_tier == "nvme" else set()
        there = recipe.placed(tier, param_tier, keep)
        if not there.is_taken(run.settings.device, 3, run.world) or (there.delays_at_rest and param_tier == "nvme"):
            continue
        if any((recipe, keep, *places) in fitting for places in memory):
            fitting.add((recipe, keep, param_tier, tier))
            continue
        candidate = with_recipe(run, there.on(run.settings.device, 3), 3)
        if not has_room(candidate):
            continue
        fitting.add((recipe, keep, param_tier, tier))
        candidate = replace(in_memory_first(candidate), budget=asked.budget)
        if all(candidate.recipe != other.recipe for other in found):
            found.append(candidate)
    return found


def in_memory_first(run: _F) -> _F:
    """Returns the same run with as much in host memory, in whole GB, as there is room for, of what rests on disk:
    parameters, which a step reads more often, before state."""
    memory = run.budget.get("cpu", 0)
    room = memory - host_nbytes(run) if run.recipe.param_tier == "nvme" else 0
    while (whole := room // _GB * _GB) > 0:
        recipe = replace(run.recipe, param_budgets=(("cpu", whole),)).on(run.settings.device, run.stage)
        found = with_recipe(run, recipe, run.stage)
        if not found.missing:
            run = found
            break
        room = whole - max(_GB, found.missing.get("host memory", whole))  # beside parameters lies what comes of them
    found = filling(run)
    return run if found.missing else found
