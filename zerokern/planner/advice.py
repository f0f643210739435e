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

__all__ = ["advice", "advised", "each_memory"]

Plan = Any  # zerokern.planner.planning has it, and stands on this module

_MOST_RANKS = 4096
_CHEAPEST = "Cheapest exact configuration that fits"
_IN_SLICES = ", which zk.recompute(head_and_loss, ..., micro=) computes in slices (docs/offload.md)"
_ROOMY = 0.75  # of a device, where activations come on top
_NARROW = 0.9  # of a device: beyond it fragments and buffers of libraries may not fit
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
        return "\n".join(f"{name}: {advice(one)}" for name, one in each_memory(plan))
    found = advised(plan)
    lines = []
    if not found or found[0][0] != _CHEAPEST:
        lines.append(f"No exact configuration fits on {_ranks(plan)}.")
    for heading, one in found:
        lines += [f"{heading}: {_told(one, plan)}", f"Code: {_code(one)}"]
    if not found:
        most = max(_MOST_RANKS, plan.world)
        lines.append(f"Nor does a lossy one, on up to {most:,} ranks: {_reason(plan)}")
    frozen = None if found and found[0][0] == _CHEAPEST else _frozen(plan)
    if frozen is not None:
        lines.append(frozen)
    return "\n".join([*lines, f"Assumed: {_assumed(found[0][1] if found else plan)}"])


def each_memory(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same for one device after the other."""
    for name, most in plan.device_memory.items():
        yield name, replace(plan, device_memory={name: most})


def advised(plan: Plan) -> list[tuple[str, Plan]]:
    """What to do on the one device that a plan has: the cheapest exact configuration, or what would fit instead."""
    exact = _first(plan)
    if exact is not None:
        return [(_CHEAPEST, exact)]
    others = (
        ("Exact, with fewer activations on the device", _less_alive),
        ("Lossy, and fits", partial(_first, lossy=True)),
        ("Exact, with more ranks", _more_ranks),
    )
    return [(heading, one) for heading, find in others if (one := find(plan)) is not None]


def _reason(plan: Plan) -> str:
    """Why nothing fits: activations of one sequence, where all fits without them."""
    silent = replace(plan, subject=replace(plan.subject, transformer=None))
    if not _counts_activations(plan) or not (_first(silent) or _first(silent, lossy=True) or _more_ranks(silent)):
        return (
            "a unit alone is too large for the device, or the host's memory and disk are too small. zk.tile cuts a "
            "Linear"
        )
    shape = replace(plan.subject.transformer, batch=1)
    activations, logits = shape.peak(1)
    scores = ", with attention's scores, which attention='sdpa' does not store" if shape.attention == "eager" else ""
    do = "Context parallelism divides it: docs/composition.md, and plan a rank's part of seq"
    if logits > activations:
        do += f". {gigabytes(logits)} GB of it are logits and loss{_IN_SLICES}"
    return (
        f"a unit, the logits and the loss of one sequence alone are {gigabytes(activations + logits)} GB{scores}. "
        f"keep= moves the inputs of units and no more, micro= cannot cut one sequence. {do}"
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
    units, with which something exact fits: units in slices, which fetch parameters once, or else fewer sequences in a
    backward pass and more of these in a step."""
    if not _counts_activations(plan):
        return None
    batch, device = plan.subject.transformer.batch or 1, plan.settings.device
    keeps = ("device", "nvme") if device == "cpu" else ("device", "cpu", "nvme")
    for slices in _slices(plan.settings.micro, batch):
        in_slices = replace(plan, settings=replace(plan.settings, micro=slices))
        for here in (in_slices, _accumulated(plan, slices)) if slices > 1 else (plan,):
            for keep in keeps:
                recipe = replace(here.recipe, keep=keep, keep_ring_nbytes=RING_NBYTES * (keep == "nvme"))
                found = _first(replace(here, recipe=recipe))
                if found is not None:
                    return found
    return None


def _accumulated(plan: Plan, parts: int) -> Plan:
    """The same batch in so many backward passes before each step."""
    batch = -(-plan.subject.transformer.batch // parts)
    settings = replace(
        plan.settings, accumulate=plan.settings.accumulate * parts, micro=min(plan.settings.micro, batch)
    )
    return replace(plan, subject=plan.subject.in_batches_of(batch), settings=settings)


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
    device = "" if name[:1].isdigit() else f" ({name.partition(' ')[0]})"
    stage = f"stage {plan.stage} on " if plan.ranks > 1 or plan.recipe.rests else ""
    said = f"{stage}{_ranks(plan)}, {gigabytes(plan.total)} of {gigabytes(most)} GB{device}{_uncounted(plan)}"
    said += _roomier(plan, most)
    for tier, called in (("cpu", "host memory"), ("nvme", "disk")):
        nbytes = plan.tiers.get(tier, 0)
        if nbytes and tier != plan.settings.device:
            said += f", {gigabytes(nbytes)} GB of {called} for each rank"
    if plan.settings.accumulate != asked.settings.accumulate:
        said += f", batch {plan.subject.transformer.batch:,} and {plan.settings.accumulate:,} backward passes in a step"
    return said


def _assumed(plan: Plan) -> str:
    """What the answer stands on."""
    shape, dtype = plan.subject.transformer, short(plan.subject.main_dtype)
    said = [f"{dtype} parameters and activations" if _counts_activations(plan) else f"{dtype} parameters"]
    if _counts_activations(plan):
        scores = "which stores no scores" if shape.attention == "sdpa" else "which stores all scores"
        said.append(f"batch {shape.batch:,} x {shape.seq:,} on a rank, attention={shape.attention!r}, {scores}")
        loss = "logits and loss are not counted (a bare shape has no vocabulary)"
        if shape.counts_logits:
            nbytes = plan.roles["logits"]
            loss = f"{gigabytes(nbytes)} GB of logits and loss, as in transformers"
            loss += _IN_SLICES if 3 * nbytes > plan.total else ""
        said.append(loss)
    else:
        said.append("activations come on top" + (" (no --batch and --seq)" if shape else ""))
    for tier, called, option in (("cpu", "host memory", "--host-memory"), ("nvme", "the disk", "--disk")):
        if plan.tiers.get(tier, 0) and tier != plan.settings.device and tier not in plan.budget:
            said.append(f"{called} is large enough (no {option})")
    return "; ".join([*said, "nothing for the driver, NCCL and fragments of the allocator"])


def _roomier(plan: Plan, most: int) -> str:
    """What takes less and moves as much, where little is left for what nobody has counted."""
    narrow = _NARROW if _counts_activations(plan) else _ROOMY
    if plan.ranks == 1 or plan.stage > 1 or plan.total < narrow * most:
        return ""
    stage = plan.stage + 1
    one = replace(plan, recipe=plan.recipe.on(plan.settings.device, stage), stage=stage).spilling()
    return f" (stage {stage} moves as much and takes {gigabytes(one.total)} GB)" if one.total < plan.total else ""


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
    lines = [shard] if plan.ranks > 1 or recipe.rests or recomputed else []
    lines += [f"opt = {recipe.face}(model.parameters(){options})"] if recipe.optimizer != "none" else []
    return "; ".join(lines) or "none, the model is trained as it is"


def _can_be_whole(plan: Plan) -> bool:
    """Whether the model can be there before it is divided: on the device, or in the memory of the host that is one."""
    buckets = plan.subject.buckets(plan.stage, plan.world, plan.settings.bucket_bytes)
    rooms = [*plan.device_memory.values()]
    rooms += [plan.budget["cpu"]] if plan.settings.device == "cpu" and "cpu" in plan.budget else []
    return sum(kind.numel * kind.itemsize for kind in buckets.kinds) <= min(rooms)
