"""One stage of a plan as text, which is all there is where parameters rest off the device: what lies in which tier, and
what moves between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerokern.planner import table
from zerokern.planner.amounts import gigabytes, table_of
from zerokern.planner.planned import PlannedRun
from zerokern.planner.rest import LANES, lanes_to
from zerokern.planner.share import STATES, WORKING
from zerokern.zero.partition import shards_parameters

__all__ = ["of_resting", "of_stage", "placement"]

_TIERS = ("device", "cpu", "nvme")
_ORDER = [*STATES, *WORKING]
_NOTES = ("Not counted", "Activations: ", "Logits", "Assumed")  # of those of other plans
_AT_MOST = 4  # placements that are named where this one does not fit


def of_stage(plan: PlannedRun) -> str:
    """One stage: tiers by role, lanes by role, and what they mean."""
    parts = [
        f"### {table.title(plan)}, stage {plan.stage}",
        f"Each rank holds, in GB (10^9 bytes), with {table.settings(plan)}:",
        _held(plan),
    ]
    moved = _moved(plan)
    if moved:
        parts += ["In a step each rank moves, in GB:", moved]
    notes = _notes(plan) if plan.recipe.rests else table.notes(plan)
    return "\n\n".join([*parts, "\n".join(f"* {note}" for note in notes)])


def of_resting(plan: PlannedRun, *, formats: bool = True) -> str:
    """The one stage that there is, and other formats or what would fit."""
    parts = [of_stage(plan)]
    if plan.missing:
        parts += _refusal(plan)
    others = _formats(plan) if formats else ""
    if others:
        parts += ["In other formats, in GB; lossy ones are never a default:", others]
    return "\n\n".join(parts)


def _held(plan: PlannedRun) -> str:
    here = [tier for tier in _TIERS if tier == "device" or tier in plan.tiers or tier in plan.budget]
    keys = sorted({(one.role, one.format) for one in plan.share.held}, key=lambda key: (_ORDER.index(key[0]), key))
    rows = []
    for role, form in keys:
        held = {one.tier: one.nbytes for one in plan.share.held if (one.role, one.format) == (role, form)}
        rows.append([table.NAMES.get(role, role), form, *(_gb(held.get(tier, 0)) for tier in here)])
    if not plan.subject.units and (plan.recipe.rests or (shards_parameters(plan.stage) and plan.world > 1)):
        rows.append([table.NAMES["gathered"], table.BARE, table.UNKNOWN, *[table.NOTHING] * (len(here) - 1)])
    rows.append(["**total**", "", *(f"**{gigabytes(plan.tiers.get(tier, 0))}**" for tier in here)])
    for name, most in plan.device_memory.items():
        rows.append([f"fits {name}", "", table.fit(plan.total, most), *[""] * (len(here) - 1)])
    if plan.budget:
        told = [_fits(plan, tier) for tier in here]
        rows.append(["fits what a rank has", "", *told])
    return table_of(["on each rank", "format", *(table.TIERS[tier] for tier in here)], rows, left=2)


def _fits(plan: PlannedRun, tier: str) -> str:
    most = plan.budget.get(tier)
    return "" if most is None else f"{table.fit(plan.tiers.get(tier, 0), most)} of {gigabytes(most)}"


def _moved(plan: PlannedRun) -> str:
    """Each cell once for a step; the last row for each parameter of the model."""
    cells = {(one.role, one.lane): one.nbytes for one in plan.moves}
    if plan.settings.has_others:
        traffic, share = plan.traffic, (plan.world - 1) / plan.world
        cells["parameters", "net"] = round(traffic.gathered_nbytes * share)
        cells["gradients", "net"] = round(traffic.reduced_nbytes * share) + (plan.sent.get("replicate") or 0)
    cells = {key: nbytes for key, nbytes in cells.items() if nbytes}
    lanes = [lane for lane in LANES if any(lane == one for _, one in cells)]
    if not lanes:
        return ""
    rows = []
    for role in sorted({role for role, _ in cells}, key=_ORDER.index):
        rows.append([table.NAMES.get(role, role), *(_gb(cells.get((role, lane), 0)) for lane in lanes)])
    sums = {lane: sum(nbytes for (_, one), nbytes in cells.items() if one == lane) for lane in lanes}
    rows.append(["**total**", *(f"**{gigabytes(nbytes)}**" for nbytes in sums.values())])
    own = plan.numel / plan.world
    if plan.recipe.rests:
        rows.append(["bytes per parameter of its own", *(f"{nbytes / own:.3g}" for nbytes in sums.values())])
    return table_of(["moved", *(LANES[lane] for lane in lanes)], rows)


def _notes(plan: PlannedRun) -> Iterator[str]:
    recipe, settings = plan.recipe, plan.settings
    each = " of each micro-batch" if settings.accumulate > 1 else ""
    yield f"A unit comes for forward and again for backward{each}; the one that is last in forward is still there."
    if settings.accumulate > 1:
        yield (
            f"With micro={settings.accumulate} in place of accumulate={settings.accumulate} a step would pass over the "
            "parameters once, and the gradients would leave once."
        )
    root = sum(load.numel for load in plan.subject.buckets(plan.stage, plan.world, settings.bucket_bytes).root.loads)
    if root:
        yield f"{root:,} parameters belong to no unit: they come once, and stay until backward is over."
    if settings.spills:
        yield (
            "Gradients do not fit in host memory: they wait on the disk, which writes and reads all of them for it. "
            "More host memory, or more ranks, would spare the disk that."
        )
    if "read" in lanes_to(recipe.param_tier, settings.device) and recipe.schedule == "sync":
        yield 'With schedule="overlap" or zk.Delayed the update reads no parameters of its own: one fetch serves both.'
    if plan.moved("write"):
        yield f"Each step writes {gigabytes(plan.moved('write'))} GB to the disk, which wears."
    if not plan.subject.units:
        yield (
            "A number alone has no layers: two units that are whole on the device (?) come on top. Plan a model or the "
            "shape of a transformer to know them."
        )
    yield from [note for note in table.notes(plan) if note.startswith(_NOTES)]


def placement(plan: PlannedRun) -> str:
    """The arguments that say what rests where.

    >>> from zerokern.planner import plan
    >>> placement(plan("1B", stage=3, param_tier="cpu", tier="nvme"))
    'param_tier="cpu", tier="nvme"'
    """
    recipe = plan.recipe
    words = [f'param_tier="{recipe.param_tier}"', f'tier="{recipe.tier}"']
    words += [f'keep="{recipe.keep}"'] if recipe.keep else []
    words += [f'state_format="{recipe.state_format}"'] if recipe.state_format != "fp32" else []
    words += [f'master_format="{recipe.master_format}"'] if recipe.master_format else []
    return ", ".join(words)


def _refusal(plan: PlannedRun) -> list[str]:
    lacks = " and ".join(f"{gigabytes(nbytes)} GB of {name}" for name, nbytes in plan.missing.items())
    fitting = [one for one in plan.would_fit() if one.recipe != plan.recipe][:_AT_MOST]
    if not fitting:
        return [f"It does not fit: {lacks} are missing. No placement fits; more ranks each hold less."]
    lines = [f"It does not fit: {lacks} are missing. What would fit at stage 3:"]
    rows = []
    for one in fitting:
        said = placement(one) + (" *(lossy)*" if one.recipe.is_lossy() else "")
        rows.append([said, *(gigabytes(one.tiers.get(tier, 0)) for tier in _TIERS)])
    return [*lines, table_of(["arguments", *(table.TIERS[tier] for tier in _TIERS)], rows)]


def _formats(plan: PlannedRun) -> str:
    others: Sequence[PlannedRun] = plan.in_other_formats()
    here = [tier for tier in _TIERS if any(tier in other.tiers for other in others)]
    rows = []
    for other in others:
        state, master, width = table.formats_of(other)
        cells = [gigabytes(other.tiers.get(tier, 0)) for tier in here]
        if plan.device_memory or plan.budget:
            cells.append("no" if other.missing else "yes")
        rows.append([state, master, width, *cells])
    fits = ["fits"] if plan.device_memory or plan.budget else []
    header = ["state_format", "master_format", "state, B/parameter", *(table.TIERS[tier] for tier in here), *fits]
    return table_of(header, rows, left=2) if len(rows) > 1 else ""


def _gb(nbytes: int) -> str:
    return gigabytes(nbytes) if nbytes else table.NOTHING
