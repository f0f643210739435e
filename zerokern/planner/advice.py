"""The cheapest configuration that fits, in a sentence: what to write, or what would fit where nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from zerokern.core.units import RING_NBYTES
from zerokern.planner.amounts import gigabytes
from zerokern.planner.recipe import short
from zerokern.zero.partition import shards_parameters

__all__ = ["advice"]

Plan = Any  # zerokern.planner.planning has it, and stands on this module

_MOST_RANKS = 4096
_PLACES = (
    ("device", "device"),
    ("device", "cpu"),
    ("device", "nvme"),
    ("cpu", "cpu"),
    ("cpu", "nvme"),
    ("nvme", "nvme"),
)


def advice(plan: Plan) -> str:
    """What `Plan.advice` says."""
    if not plan.device_memory:
        return "Say how much memory a device has (device_memory, --device-memory 80GB) to be told what fits."
    if len(plan.device_memory) > 1:
        each = ((name, replace(plan, device_memory={name: most})) for name, most in plan.device_memory.items())
        return "\n".join(f"{name}: {advice(one)}" for name, one in each)
    exact = _first(plan)
    if exact is not None:
        return f"Cheapest exact configuration that fits: {_told(exact, plan)}"
    lines = [f"No exact configuration fits on {_ranks(plan)}."]
    for heading, find in (
        ("Exact, with fewer activations on the device", _less_alive),
        ("Lossy, and fits", partial(_first, lossy=True)),
        ("Exact, with more ranks", _more_ranks),
    ):
        found = find(plan)
        if found is not None:
            lines.append(f"{heading}: {_told(found, plan)}")
    if len(lines) == 1:
        most = max(_MOST_RANKS, plan.world)
        lines.append(f"Nor does a lossy one, on up to {most:,} ranks: {_reason(plan)}")
    frozen = _frozen(plan)
    if frozen is not None:
        lines.append(frozen)
    return "\n".join(lines)


def _reason(plan: Plan) -> str:
    """Why nothing fits: activations of one sequence, where all fits without them."""
    silent = replace(plan, subject=replace(plan.subject, transformer=None))
    if not _counts_activations(plan) or not (_first(silent) or _first(silent, lossy=True) or _more_ranks(silent)):
        return (
            "a unit alone is too large for the device, or the host's memory and disk are too small. zk.tile cuts a "
            "Linear"
        )
    shape = plan.subject.transformer
    nbytes = shape.working_activations / shape.batch
    return (
        f"the activations of a unit and one sequence alone are {gigabytes(nbytes)} GB, "
        "with attention's scores, which flash attention does not hold. keep= moves the inputs of units and no more, "
        "micro= cannot cut one sequence. Context parallelism divides it: docs/composition.md, and plan a rank's part "
        "of seq"
    )


def _first(plan: Plan, *, lossy: bool = False) -> Plan | None:
    """The cheapest that fits."""
    return next((one for one in _candidates(plan, lossy=lossy) if not one.missing), None)


def _candidates(plan: Plan, *, lossy: bool) -> Iterator[Plan]:
    """By what they cost: state and parameters beside the compute first, then in host memory, then on a disk; of each
    without recomputation before with it, and the stage that communicates least, and divides least. The schedule is the
    best of those that publish in their own step: another that was asked for may be none for state on the device."""
    recipe = replace(plan.recipe, state_format="fp32", master_format=None)
    if lossy:
        smaller = [one for one in plan.recipe.alternatives(plan.subject.main_dtype) if one.is_lossy()]
        smaller = [one for one in smaller if one.master_format != "none"]
        if not smaller:
            return
        recipe = min(smaller, key=lambda one: one.state_nbytes(plan.subject.main_dtype))
    keeps = (None, "device") if recipe.keep is None and _counts_activations(plan) else (recipe.keep,)
    for (param_tier, tier), keep in product(_PLACES, keeps):
        if plan.settings.device == "cpu" and "cpu" in (param_tier, tier):
            continue  # the device is the host
        here = replace(
            recipe,
            tier=tier,
            param_tier=param_tier,
            keep=keep,
            ring_nbytes=RING_NBYTES * (tier == "nvme"),
            param_ring_nbytes=RING_NBYTES * (param_tier == "nvme"),
            schedule="sync" if tier == "device" else "overlap",
        )
        for stage in (3,) if param_tier != "device" else (0, 1, 2, 3) if plan.ranks > 1 else (0,):
            settings = replace(plan.settings, spills=False)
            yield replace(plan, recipe=here.on(settings.device, stage), stage=stage, settings=settings).spilling()


def _less_alive(plan: Plan) -> Plan | None:
    """The fewest slices of a batch, by powers of two or one for each sequence, and the nearest place for the inputs of
    units, with which something exact fits."""
    if not _counts_activations(plan):
        return None
    for micro in _slices(plan.settings.micro, plan.subject.transformer.batch or 1):
        for keep in ("device", "nvme") if plan.settings.device == "cpu" else ("device", "cpu", "nvme"):
            recipe = replace(plan.recipe, keep=keep, keep_ring_nbytes=RING_NBYTES * (keep == "nvme"))
            here = replace(plan, recipe=recipe, settings=replace(plan.settings, micro=micro))
            found = _first(here)
            if found is not None:
                return found
    return None


def _slices(least: int, batch: int) -> Iterator[int]:
    """
    >>> list(_slices(1, 7)), list(_slices(1, 8)), list(_slices(3, 2))
    ([1, 2, 4, 7], [1, 2, 4, 8], [])
    """
    micro = least
    while micro < batch:
        yield micro
        micro *= 2
    if least <= batch:
        yield batch


def _frozen(plan: Plan) -> str | None:
    """What LoRA needs first: parameters that are not trained have neither gradients nor state."""
    room = min(plan.device_memory.values())
    if _counts_activations(plan) and plan.recipe.keep is None:
        plan = replace(plan, recipe=replace(plan.recipe, keep="device"))
    for one in (plan.at(stage) for stage in ((0, 3) if plan.ranks > 1 else (0,)) if stage in plan.stages):
        beside = one.total - one.states
        nbytes = one.roles["parameters"] + max(0, beside)
        if not one.recipe.rests and nbytes < room:
            where = f"at stage {one.stage}" if plan.ranks > 1 else "on one rank"
            what = "the frozen parameters" + (" and activations" if _counts_activations(plan) else "")
            taken = f"{gigabytes(nbytes)} of {gigabytes(room)} GB {where}{_uncounted(one)}"
            return f"LoRA instead: {what} take {taken}, its own state is small"
    return None


def _more_ranks(plan: Plan) -> Plan | None:
    """The fewest ranks, by powers of two, with which something exact fits; each has the host memory that it has now."""
    world = plan.world
    while (world := 2 * world) <= _MOST_RANKS:
        wider = replace(plan, settings=replace(plan.settings, world=world))
        found = _first(wider)
        if found is not None:
            return found
    return None


def _counts_activations(plan: Plan) -> bool:
    shape = plan.subject.transformer
    return shape is not None and shape.has_activations


def _uncounted(plan: Plan) -> str:
    """What else a device holds of which the plan knows nothing."""
    found = [] if _counts_activations(plan) else ["activations"]
    found += ["the units that compute"] if shards_parameters(plan.stage) and not plan.subject.members else []
    return f" before {' and '.join(found)}" if found else ""


def _ranks(plan: Plan) -> str:
    return f"{plan.ranks:,} ranks" if plan.ranks > 1 else "one rank"


def _told(plan: Plan, asked: Plan) -> str:
    ((name, most),) = plan.device_memory.items()
    where = [
        f"{gigabytes(plan.total)} of {gigabytes(most)} GB"
        + ("" if name[:1].isdigit() else f" ({name.partition(' ')[0]})")
    ]
    hint = " (no --batch and --seq)" if plan.subject.transformer and not _counts_activations(plan) else ""
    where[0] = f"{short(plan.subject.main_dtype)} parameters, {where[0]}{_uncounted(plan)}{hint}{_roomier(plan, most)}"
    for tier, called, option in (("cpu", "host memory", "--host-memory"), ("nvme", "disk", "--disk")):
        nbytes = plan.tiers.get(tier, 0)
        if nbytes and tier != plan.settings.device:
            assumed = "" if tier in plan.budget else f" (taken to be there: no {option})"
            where.append(f"{gigabytes(nbytes)} GB of {called} for each rank{assumed}")
    stage = f"stage {plan.stage} on " if plan.ranks > 1 or plan.recipe.rests else ""
    options = _options(plan, asked)
    page = f" (its tables: {options})" if options else ""
    return f"{stage}{_ranks(plan)}, {', '.join(where)}{page} -> {_code(plan)}"


def _roomier(plan: Plan, most: int) -> str:
    """What takes less and moves as much, where little is left for activations that nobody has counted."""
    if _counts_activations(plan) or plan.ranks == 1 or plan.stage > 1 or plan.total < 0.75 * most:
        return ""
    stage = plan.stage + 1
    one = replace(plan, recipe=plan.recipe.on(plan.settings.device, stage), stage=stage).spilling()
    return f" (stage {stage} moves as much and takes {gigabytes(one.total)} GB)" if one.total < plan.total else ""


def _options(plan: Plan, asked: Plan) -> str:
    """What prints this one's page in place of the one that was asked for, which shows all stages of its own recipe."""
    one, other, dtype = plan.recipe, asked.recipe, plan.subject.main_dtype
    pairs: list[tuple[str, object, object]] = [
        (name, getattr(one, name), getattr(other, name))
        for name in ("tier", "param_tier", "keep", "schedule", "state_format")
    ]
    if one.optimizer != "none":
        pairs.append(("master_format", one.master_of(dtype), other.master_of(dtype)))
    pairs += [("micro", plan.settings.micro, asked.settings.micro), ("world", plan.world, asked.world)]
    if plan.ranks != plan.world:
        pairs.pop()  # --mesh has them, which says more than this
    changed = [(name, value) for name, value, before in pairs if value != before]
    stage = [("stage", plan.stage)] if changed else []
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in stage + changed)


def _code(plan: Plan) -> str:
    recipe = plan.recipe
    places = {"device": "", "cpu": ', tier="cpu"', "nvme": ", tier=zk.Nvme(path)"}
    keeps = {"device": ', keep="device"', "cpu": ', keep="cpu"', "nvme": ", keep=zk.Nvme(path)"}
    recomputed = keeps.get(recipe.keep or "", "")
    if plan.settings.micro > 1:  # slices alone imply the device
        recomputed = f"{recomputed.replace(keeps['device'], '')}, micro={plan.settings.micro}"
    model = "zk.shard(model" if _can_be_whole(plan) else "model = zk.build(make_model"
    shard = f"{model}, stage={plan.stage}{places[recipe.param_tier]}{recomputed})"
    options = places[recipe.tier] + (f', schedule="{recipe.schedule}"' if recipe.schedule != "sync" else "")
    options += f', state_format="{recipe.state_format}"' if recipe.state_format != "fp32" else ""
    options += f', master_format="{recipe.master_format}"' if recipe.is_lossy() and recipe.master_format else ""
    options += ", momentum=0.9" if recipe.optimizer == "sgd-momentum" else ""
    lines = [f"`{shard}`"] if plan.ranks > 1 or recipe.rests or recomputed else []
    lines += [f"`{recipe.face}(model.parameters(){options})`"] if recipe.optimizer != "none" else []
    return " and ".join(lines) or "`model`, as it is"


def _can_be_whole(plan: Plan) -> bool:
    """Whether the model can be there before it is divided: on the device, or in the memory of the host that is one."""
    buckets = plan.subject.buckets(plan.stage, plan.world, plan.settings.bucket_bytes)
    rooms = [*plan.device_memory.values()]
    rooms += [plan.budget["cpu"]] if plan.settings.device == "cpu" and "cpu" in plan.budget else []
    return sum(kind.numel * kind.itemsize for kind in buckets.kinds) <= min(rooms)
