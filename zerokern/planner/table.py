"""Formats a plan as text for a design document, and as numbers for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from zerokern.pages import markdown_table
from zerokern.planner.amounts import count, gigabytes
from zerokern.planner.filling import would_fit
from zerokern.planner.footprint import Footprint
from zerokern.planner.holding import LANES, STATES, WORKING, HeldMemory, Holding, lanes_to, summed
from zerokern.planner.recipe import short
from zerokern.schedule import Delayed
from zerokern.zero.partition import STAGES, shards_parameters, shards_state

__all__ = [
    "NAMES", "TIERS", "as_dict", "compared_page", "held_page", "lacks", "order_said", "page", "settings", "stage_page",
    "title", "worlds_page",
]  # fmt: skip

NAMES = {
    "gathered": "units gathered",
    "buffers": "bucket buffers",
    "scratch": "scratch of collectives",
    "iteration": "matrix in flight",
    "ring": "staging ring",
    "padding": "padding to whole pages",
    "host parameters": "parameters to update",
    "host gradients": "gradients to update with",
    "shadow": "parameters to publish",
    "checkpoints": "activation checkpoints",
    "activations": "activations",
    "logits": "logits and loss",
}
TIERS = {"device": "on the device", "cpu": "in host memory", "nvme": "on NVMe"}
_ROLES = [*STATES, *WORKING]
_STAGE_HEADS = [f"stage {stage}" for stage in STAGES]
_FORMAT_HEADS = ["state_format", "master_format", "state, B/parameter"]
_NOTHING, _UNKNOWN = "-", "?"
_BARE = "unknown for a bare number; give --model"
_LOSSY = " *(lossy)*"
_NOTES_AT_REST = (  # beginnings of the notes that hold there too
    "Not counted", "Activations: ", "Logits", "Assumed", "Muon", "Newton-Schulz", "Ranks have", "Stage",
)  # fmt: skip
_KIND = attrgetter("role", "format", "tier")  # what rows of a table are told apart by
_MOST_FITTING = 4  # placements that are named where the plan's own does not fit


def page(plan: Footprint, *, formats: bool = True) -> str:
    """Returns all stages side by side, or only stage 3 if parameters rest off the device; then other formats."""
    if plan.recipe.rests:
        parts = [stage_page(plan), *(_refusal(plan) if plan.missing else [])]
        heading = "In other formats"
    else:
        said = f"Each rank holds, in GB (10^9 bytes), with {settings(plan)}:"
        parts = [f"### {title(plan)}", said, _stages(plan), _bullets(_notes(plan))]
        heading = f"{'Locked in host memory' if plan.pinned else 'Total on the device'} in other formats"
    others = _other_formats(plan) if formats else ""
    if others:
        parts += [f"{heading}, in GB; lossy ones are never a default:", others]
    return "\n\n".join(parts)


def stage_page(plan: Footprint) -> str:
    """Returns one stage: bytes by role and tier, transfers by role and lane, and notes."""
    parts = [
        f"### {title(plan)}, stage {plan.stage}",
        f"Each rank holds, in GB (10^9 bytes), with {settings(plan)}:",
        _tiers(plan),
    ]
    moved = _lanes(plan)
    if moved:
        parts += ["In a step each rank moves, in GB:", moved]
    return "\n\n".join([*parts, _bullets(_notes_at_rest(plan) if plan.recipe.rests else _notes(plan))])


def worlds_page(plans: Sequence[Footprint]) -> str:
    """Returns model states at each number of ranks, as in the ZeRO paper, and the stages at which everything fits."""
    first = plans[0]
    rows = []
    for plan in plans:
        stages = [plan.at(stage) for stage in plan.stages]
        fits = [_fitting([stage.total for stage in stages], most, plan.stages) for most in first.device_memory.values()]
        rows.append([f"{plan.ranks:,}", *(gigabytes(stage.states) for stage in stages), *fits])
    said = "Model states (parameters, gradients, optimizer state) on each rank, in GB (10^9 bytes), with "
    header = ["ranks", *(f"stage {stage}" for stage in first.stages), *(f"fits {name}" for name in first.device_memory)]
    parts = [f"### {first.subject.title}", f"{said}{settings(first)}:", markdown_table(header, rows, left=0)]
    if first.device_memory:
        parts.append("What fits is counted with what collectives and computing need besides.")
    return "\n\n".join(parts)


def held_page(heading: str, memory: HeldMemory) -> str:
    """Returns a table of what is held."""
    several = len(memory.tiers) > 1
    rows = [
        [NAMES.get(holding.role, holding.role), _format(holding, several), gigabytes(holding.nbytes)]
        for holding in memory.held
    ]
    rows.append(["**model states**", "", gigabytes(memory.states)])
    rows.append(["**total**", "", f"**{gigabytes(sum(holding.nbytes for holding in memory.held))}**"])
    return f"### {heading}\n\n" + markdown_table(["held, GB (10^9 bytes)", "format", "now"], rows, left=2)


def compared_page(plan: Footprint, measured: HeldMemory) -> str:
    """Returns planned and measured side by side, by role."""
    planned, found = plan.roles, measured.roles
    roles = sorted({*planned, *found}, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES))
    pairs = [(NAMES.get(role, role), planned.get(role, 0), found.get(role, 0)) for role in roles]
    pairs.insert(sum(role in STATES for role in roles), ("**model states**", plan.states, measured.states))
    rows = [[name, _gb(expected), _gb(actual), _difference(expected, actual)] for name, expected, actual in pairs]
    in_a_step = {"gathered", "iteration", "checkpoints", "activations", "logits"}
    in_a_step |= {"buffers"} if plan.settings.no_sync else set()  # whole gradients, until the last of them is reduced
    in_a_step &= {*planned} - {*found}
    for row in rows:
        if row[0] in {NAMES[role] for role in in_a_step}:
            row[2:] = ["in a step only", _NOTHING]
    total = plan.total - sum(planned[role] for role in in_a_step)
    name = "**total on the device**" if not in_a_step else "**total on the device, at rest**"
    rows.append([name, _gb(total), _gb(measured.total), _difference(total, measured.total)])
    header = [f"stage {plan.stage}, on each rank", "planned", "measured", "difference"]
    return f"### {title(plan)}\n\nIn GB (10^9 bytes), with {settings(plan)}:\n\n{markdown_table(header, rows)}"


def _difference(expected: int, actual: int) -> str:
    if not expected:
        return _NOTHING if not actual else "not planned"
    return f"{100 * (actual - expected) / expected:+.2f} %"


def title(plan: Footprint) -> str:
    """Returns what is planned, and on how many ranks."""
    several = f" ({plan.settings.mesh})" if plan.ranks != plan.world else ""
    return f"{plan.subject.title}, on {plan.ranks:,} rank{'' if plan.ranks == 1 else 's'}{several}"


def settings(plan: Footprint) -> str:
    """Returns the formats in one phrase."""
    recipe, dtype = plan.recipe, plan.subject.main_dtype
    words = [recipe.rule.called, f"{short(dtype)} parameters"]
    words.append(f"gradients reduced in {short(recipe.wire_dtype(dtype))}")
    if recipe.optimizer != "none":
        words += [f'state_format="{recipe.state_format}"'] if recipe.rule.moments else []
        master = recipe.master_of(dtype)
        words += [] if master == "own" else [f'master_format="{master}"']
        words += [] if recipe.tier == "device" else [f"state {_filled(plan.budgets, recipe.tier)}"]
    words += [f"parameters at rest {_filled(recipe.param_budgets, recipe.param_tier)}"] if recipe.rests else []
    if recipe.optimizer != "none":
        words += [] if recipe.schedule == "sync" else [f"schedule={recipe.schedule!r}"]
    if plan.settings.accumulate > 1:
        how = "all but the last under zk.no_sync" if plan.settings.no_sync else "each reduced"
        how = "each fetching parameters anew" if recipe.rests else how
        how = "reduced once" if plan.settings.pp > 1 else how
        words.append(f"{plan.settings.accumulate} micro-batches in a step, {how}")
    words += [f"each batch in {plan.settings.micro} slices"] if plan.settings.micro > 1 else []
    words += [f"inputs of units kept {_filled(recipe.keep_budgets, recipe.keep)}"] if recipe.keep else []
    return ", ".join(words)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _notes(plan: Footprint) -> list[str]:
    """Returns notes on what the table means, and on what it leaves out."""
    subject, world = plan.subject, plan.world
    said = []
    if world > 1:
        said.append(
            f"Ψ is {subject.numel:,} parameters; a volume of Ψ is a reduce-scatter or all-gather of all of them, and a "
            f"rank sends {world - 1}/{world} of it."
        )
    if world > 1 and subject.members:
        padding = f"{plan.buckets.padding:,} elements of all, {_percent(plan.buckets.padding / subject.numel)}"
        said.append(f"Padding at cuts between ranks: {padding}.")
    if world > 1 and not subject.members and plan.settings.pp == 1:
        said.append(
            "A number alone has no layers: what stage 3 gathers to compute (?) comes on top. Plan a model or the shape "
            "of a transformer to know it."
        )
    if subject.members and plan.buckets.arriving_nbytes:
        arriving = gigabytes(plan.buckets.arriving_nbytes)
        said.append(f"During backward autograd's own gradients of one bucket lie beside these: at most {arriving} GB.")
    if plan.pinned:
        said.append(f"The optimizer locks {plan.pinned:,} bytes of host memory at stage {plan.stage}, in whole pages.")
    if not plan.recipe.rests:
        said += _note_on_disk(plan)
    said += [*_notes_on_muon(plan), *_notes_on_mesh(plan)]
    takers = "what the framework, its allocator and the driver of the device take"
    if plan.settings.has_others:
        takers += ", and on GPUs the buffers of NCCL's two communicators (gathers, reductions)"
    shape = subject.activated
    if shape is None:
        return [*said, f"Not counted: activations, and {takers}."]
    if plan.recipe.keep is None:
        fewer = gigabytes(shape.checkpoints + shape.working_activations)
        instead = f'with keep="device", which computes units again, {fewer} GB on each rank'
    else:
        instead = f"without keep=, all of them, {gigabytes(shape.activations)} GB on each rank"
    scores = "attention's scores are among them" if shape.attention == "eager" else "no scores are stored (SDPA)"
    said.append(f"Activations: {instead}; {scores}.")
    if shape.counts_logits:
        said.append(
            "Logits and loss: as transformers computes them, with a log-softmax and two gradients in fp32, while "
            "backward begins; zk.recompute(head_and_loss, ..., micro=) takes them in slices."
        )
    else:
        takers = f"logits and loss, for a bare shape has no vocabulary; {takers}"
    return [*said, f"Not counted: {takers}."]


def _note_on_disk(plan: Footprint) -> list[str]:
    if not plan.moved("write"):
        return []
    return [f"Each step writes {gigabytes(plan.moved('write'))} GB to the disk, which wears."]


def _notes_on_muon(plan: Footprint) -> Iterator[str]:
    """Yields which parameters are Muon's, what a step multiplies, and what is sent and held for it."""
    muon, world, stage = plan.muon, plan.world, plan.stage
    if muon is None:
        return
    rest = f"{count(muon.rest_numel)} in {muon.rest:,} others"
    yield f"Muon has {count(muon.numel)} parameters in {muon.matrices:,} tensors, and AdamW {rest}; docs/muon.md."
    if plan.subject.transformer is not None:
        yield "Muon's is what has two dimensions in a layer, each as one matrix; of a module whole= says it."
    if plan.budgets:
        yield "Muon and AdamW have budgets of their own: each fills a tier up to what is said."
    flops = f"Newton-Schulz: {_flops(muon.flops)} in a step, in {short(muon.dtype)}"
    flops += ", on the host, where parameters rest" if plan.recipe.iterates_on_host(plan.settings.device) else ""
    if world == 1:
        yield f"{flops}."
    elif not shards_state(stage):
        yield f"{flops}, on each rank; from stage 1 on ranks divide it."
    else:
        more = f"{100 * muon.imbalance:.1f} % more than the average"
        yield f"{flops}; {_flops(muon.rank_flops)} on the rank with most of it, {more}."
    if muon.exchanged:
        yield (
            f"Ranks have parts of matrices at stage 3, and exchange {gigabytes(muon.exchanged)} GB, all of them "
            "together: each direction to the rank that orthogonalizes it, and back, up to two rounds at a time."
        )
    refused = [one for one in plan.stages if not plan.recipe.is_taken(plan.settings.device, one, world)]
    if refused:
        which = " and ".join(map(str, refused))
        yield f"Stage {which} is counted as the others are; zk.Muon refuses it in this tier yet."
    if muon.padding:
        of_all = _percent(muon.padding / muon.numel)
        yield f"Matrices are not cut, for which {muon.padding:,} elements of padding, {of_all}, are sent too."


def _flops(flops: int) -> str:
    """
    >>> _flops(2_345_000_000_000), _flops(120_000_000)
    ('2.35 TFLOP', '0.12 GFLOP')
    """
    power, unit = next(((p, u) for p, u in ((15, "P"), (12, "T")) if flops >= 10**p), (9, "G"))
    return f"{flops / 10**power:.3g} {unit}FLOP"


def _notes_on_mesh(plan: Footprint) -> Iterator[str]:
    """Yields notes on mesh dimensions that `zk.shard` does not shard over: what is assumed, and what is left out."""
    settings, subject = plan.settings, plan.subject
    if not subject.members or subject.transformer is not None:
        if settings.tp * settings.pp > 1:
            yield "Assumed: tp divides every parameter evenly, and each stage of pp has as many layers as another."
    elif settings.pp > 1:
        yield "The module is what one stage of pp has; plan the largest of them."
    if settings.tp > 1 and subject.activated:
        yield (
            "Along tp: two all-reduces of a layer's output in forward, in backward, and where it is computed again, as "
            "Megatron-LM divides it. Activations are counted whole; tp divides some of them."
        )
    if settings.pp > 1 and subject.activated:
        yield "Activations are those of one micro-batch; a schedule of pp holds several of them at a time."
    missing = [name for name in ("tp", "pp") if getattr(settings, name) > 1 and not subject.activated]
    if missing:
        yield (
            f"Not counted: what is sent along {' and '.join(missing)}, activations, by torch's own parallelism; "
            "parameters do not say how large they are."
        )
    if settings.pp > 1 and shards_parameters(plan.stage) and not plan.recipe.rests and settings.world > 1:
        yield "At stage 3 all that a stage of pp has stays gathered for a step, as zk.PipelineStage(whole=True)."


def _notes_at_rest(plan: Footprint) -> list[str]:
    recipe, settings = plan.recipe, plan.settings
    each = " of each micro-batch" if settings.accumulate > 1 else ""
    said = [f"A unit comes for forward and again for backward{each}; the one that is last in forward is still there."]
    if settings.accumulate > 1:
        said.append(
            f"With micro={settings.accumulate} in place of accumulate={settings.accumulate} a step would pass over the "
            "parameters once, and the gradients would leave once."
        )
    root = sum(bucket.numel for bucket in plan.buckets.root)
    if root:
        said.append(f"{root:,} parameters belong to no unit: they come once, and stay until backward is over.")
    if settings.spills:
        said.append(
            "Gradients do not fit in host memory: they wait on the disk, which writes and reads all of them for it. "
            "More host memory, or more ranks, would spare the disk that."
        )
    if "read" in lanes_to(recipe.param_tier, settings.device) and recipe.schedule == "sync":
        said.append('With schedule="overlap" the update reads no parameters of its own: one fetch serves both.')
    said += _note_on_disk(plan)
    if not plan.subject.units:
        said.append(
            "A number alone has no layers: two units that are whole on the device (?) come on top. Plan a model or the "
            "shape of a transformer to know them."
        )
    return said + [note for note in _notes(plan) if note.startswith(_NOTES_AT_REST)]


def _stages(plan: Footprint) -> str:
    stages = [plan.at(stage) for stage in STAGES]
    several = len({tier for stage in stages for tier in stage.tiers}) > 1
    rows = _stage_rows(stages, STATES, several)
    if not several:  # bytes of a device and of a host are no sum that anybody has to fit anywhere
        rows.append(["**model states**", "", *(gigabytes(stage.states) for stage in stages)])
    if not plan.subject.units and plan.world > 1 and plan.settings.pp == 1:
        rows.append([NAMES["gathered"], _BARE, *[_NOTHING] * 3, _UNKNOWN])
    rows += _stage_rows(stages, WORKING, several)
    rows.append(["**total on the device**", "", *(f"**{gigabytes(stage.total)}**" for stage in stages)])
    for tier in ("cpu", "nvme"):
        if any(tier in stage.tiers for stage in stages):
            rows.append([f"**total {TIERS[tier]}**", "", *(_gb(stage.tiers.get(tier, 0)) for stage in stages)])
    for name, most in plan.device_memory.items():
        rows.append([f"fits {name}", "", *(_fit(stage.total, most) for stage in stages)])
    if plan.world > 1:
        traffic = [stage.traffic for stage in stages]
        rows.append(["volume of a step", "", *(f"{amounts.numel / plan.numel:.2f} Ψ" for amounts in traffic)])
        rows.append(["reduced in a step", "", *(_gb(amounts.reduced_nbytes) for amounts in traffic)])
        rows.append(["gathered in a step", "", *(_gb(amounts.gathered_nbytes) for amounts in traffic)])
        rows.append(["sent by a rank in a step", "", *(_gb(amounts.sent_nbytes) for amounts in traffic)])
    for name in [name for name in plan.sent if name != "dp"]:
        sent = [stage.sent[name] for stage in stages]
        rows.append([f"sent along {name}", "", *(_UNKNOWN if nbytes is None else _gb(nbytes) for nbytes in sent)])
    return markdown_table(["on each rank", "format", *_STAGE_HEADS], rows, left=2)


def _stage_rows(stages: Sequence[Footprint], roles: Sequence[str], names_tiers: bool) -> list[list[str]]:
    """Returns a row for each role, format and tier that any stage has."""
    sums = [summed(stage.held, _KIND) for stage in stages]
    keys = {key for found in sums for key in found if key[0] in roles}
    return [
        [NAMES.get(role, role), _format(Holding(role, form, tier, 0), names_tiers)]
        + [_gb(found.get((role, form, tier), 0)) for found in sums]
        for role, form, tier in sorted(keys, key=lambda key: (roles.index(key[0]), key))
    ]


def _format(holding: Holding, names_tier: bool) -> str:
    return ", ".join(
        word for word in (holding.format, TIERS.get(holding.tier, holding.tier) if names_tier else "") if word
    )


def _tiers(plan: Footprint) -> str:
    tiers = [tier for tier in TIERS if tier == "device" or tier in plan.tiers or tier in plan.budget]
    sums = summed(plan.held, _KIND)
    rows = []
    for role, form in sorted({key[:2] for key in sums}, key=lambda key: (_ROLES.index(key[0]), key)):
        rows.append([NAMES.get(role, role), form, *(_gb(sums.get((role, form, tier), 0)) for tier in tiers)])
    blanks = len(tiers) - 1
    if not plan.subject.units and (plan.recipe.rests or (shards_parameters(plan.stage) and plan.world > 1)):
        rows.append([NAMES["gathered"], _BARE, _UNKNOWN, *[_NOTHING] * blanks])
    rows.append(["**total**", "", *(f"**{gigabytes(plan.tiers.get(tier, 0))}**" for tier in tiers)])
    for name, most in plan.device_memory.items():
        rows.append([f"fits {name}", "", _fit(plan.total, most), *[""] * blanks])
    if plan.budget:
        fits = {
            tier: f"{_fit(plan.tiers.get(tier, 0), most)} of {gigabytes(most)}" for tier, most in plan.budget.items()
        }
        rows.append(["fits what a rank has", "", *(fits.get(tier, "") for tier in tiers)])
    return markdown_table(["on each rank", "format", *(TIERS[tier] for tier in tiers)], rows, left=2)


def _lanes(plan: Footprint) -> str:
    """Returns a table of bytes per lane, each for one step; the last row is per parameter of the model."""
    cells = {(move.role, move.lane): move.nbytes for move in plan.moves}
    if plan.settings.has_others:
        traffic, share = plan.traffic, (plan.world - 1) / plan.world
        cells["parameters", "net"] = round(traffic.gathered_nbytes * share)
        cells["gradients", "net"] = round(traffic.reduced_nbytes * share) + (plan.sent.get("replicate") or 0)
    cells = {key: nbytes for key, nbytes in cells.items() if nbytes}
    lanes = [lane for lane in LANES if any(lane == used for _, used in cells)]
    if not lanes:
        return ""
    rows = []
    for role in sorted({role for role, _ in cells}, key=_ROLES.index):
        rows.append([NAMES.get(role, role), *(_gb(cells.get((role, lane), 0)) for lane in lanes)])
    sums = {lane: sum(nbytes for (_, used), nbytes in cells.items() if used == lane) for lane in lanes}
    rows.append(["**total**", *(f"**{gigabytes(nbytes)}**" for nbytes in sums.values())])
    own = plan.numel / plan.world
    if plan.recipe.rests:
        rows.append(["bytes per parameter of its own", *(f"{nbytes / own:.3g}" for nbytes in sums.values())])
    return markdown_table(["moved", *(LANES[lane] for lane in lanes)], rows)


def _placement(plan: Footprint) -> str:
    """Returns the arguments that say what rests where.

    >>> _placement(zk.plan("1B", stage=3, param_tier="cpu", tier="nvme"))
    'param_tier="cpu", tier="nvme"'
    """
    recipe = plan.recipe
    words = [f"param_tier={order_said(recipe.param_budgets, recipe.param_tier)}"]
    words += [f"tier={order_said(plan.budgets, recipe.tier)}"]
    words += [f"keep={order_said(recipe.keep_budgets, recipe.keep)}"] if recipe.keep else []
    words += [f'state_format="{recipe.state_format}"'] if recipe.state_format != "fp32" else []
    words += [f'master_format="{recipe.master_format}"'] if recipe.master_format else []
    return ", ".join(words)


def order_said(budgets: Sequence[tuple[str, int]], last: str, disk: str = '"nvme"') -> str:
    """Returns what `tier=`, `param_tier=` or `keep=` is given.

    >>> order_said([("cpu", 10**9)], "nvme"), order_said([], "nvme", "zk.Nvme(path)")
    ('["cpu:1GB", "nvme"]', 'zk.Nvme(path)')
    """
    words = [
        f'"{tier}:{budget // 10**9}GB"' if not budget % 10**9 else f'"{tier}:{budget}"' for tier, budget in budgets
    ]
    words.append(disk if last == "nvme" else f'"{last}"')
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _filled(budgets: Sequence[tuple[str, int]], last: str) -> str:
    return " ".join([*(f"{TIERS[tier]} up to {gigabytes(budget)} GB, then" for tier, budget in budgets), TIERS[last]])


def lacks(plan: Footprint) -> str:
    """Returns the bytes that are missing, by memory, in one phrase."""
    return " and ".join(f"{gigabytes(nbytes)} GB of {name}" for name, nbytes in plan.missing.items())


def _refusal(plan: Footprint) -> list[str]:
    fitting = [alternative for alternative in would_fit(plan) if alternative.recipe != plan.recipe][:_MOST_FITTING]
    if not fitting:
        return [f"It does not fit: {lacks(plan)} are missing. No placement fits; more ranks each hold less."]
    rows = []
    for alternative in fitting:
        said = _placement(alternative) + (_LOSSY if alternative.recipe.is_lossy() else "")
        rows.append([said, *(gigabytes(alternative.tiers.get(tier, 0)) for tier in TIERS)])
    said = f"It does not fit: {lacks(plan)} are missing. What would fit at stage 3:"
    return [said, markdown_table(["arguments", *TIERS.values()], rows)]


def _other_formats(plan: Footprint) -> str:
    """Returns a table of other formats, by stage, or by tier for resting parameters."""
    others = plan.in_other_formats()
    if len(others) < 2:
        return ""
    rows = [_formats(other) for other in others]
    if plan.recipe.rests:
        tiers = [tier for tier in TIERS if any(tier in other.tiers for other in others)]
        has_limits = bool(plan.device_memory or plan.budget)
        heads = [*(TIERS[tier] for tier in tiers), *["fits"] * has_limits]
        for row, other in zip(rows, others, strict=True):
            row += [gigabytes(other.tiers.get(tier, 0)) for tier in tiers]
            row += ["no" if other.missing else "yes"] * has_limits
    else:
        heads = [*_STAGE_HEADS, *(f"fits {name}" for name in plan.device_memory)]
        for row, other in zip(rows, others, strict=True):
            totals = [other.at(stage).total for stage in STAGES]
            row += map(gigabytes, [other.at(stage).pinned for stage in STAGES] if plan.pinned else totals)
            row += [_fitting(totals, most) for most in plan.device_memory.values()]
    return markdown_table([*_FORMAT_HEADS, *heads], rows, left=2)


def _formats(plan: Footprint) -> list[str]:
    """Returns state and master format, marked if lossy, and the bytes of state per parameter."""
    recipe, dtype, muon = plan.recipe, plan.subject.main_dtype, plan.muon
    master = recipe.master_of(dtype)
    return [
        recipe.state_format + (_LOSSY if recipe.state_format != "fp32" else ""),
        master + (_LOSSY if master in ("split8", "none") else ""),
        f"{recipe.state_nbytes(dtype, 0.0 if muon is None else muon.numel / (muon.numel + muon.rest_numel)):.3g}",
    ]


def _fitting(totals: Sequence[int], most: int, stages: Sequence[int] = STAGES) -> str:
    """Returns the stages whose total fits.

    >>> _fitting([90, 80, 70, 60], 80), _fitting([90] * 4, 80)
    ('stages 1, 2, 3', 'none')
    """
    fit = [str(stage) for stage, nbytes in zip(stages, totals, strict=True) if nbytes <= most]
    return "none" if not fit else f"stage{'s' if len(fit) > 1 else ''} {', '.join(fit)}"


def _fit(nbytes: int, most: int) -> str:
    """
    >>> _fit(60, 80), _fit(81, 80), _fit(80_001, 80_000), _fit(16000, 80)
    ('yes, 75 %', 'no, 101 %', 'no, 101 %', 'no, 200x')
    """
    if nbytes > 10 * most:
        return f"no, {nbytes / most:.0f}x"
    percent = round(100 * nbytes / most)
    return f"yes, {percent} %" if nbytes <= most else f"no, {max(101, percent)} %"


def _gb(nbytes: int) -> str:
    return gigabytes(nbytes) if nbytes else _NOTHING


def _percent(share: float) -> str:
    """
    >>> _percent(0.00042), _percent(0)
    ('0.042 %', '0 %')
    """
    return f"{100 * share:.2g} %"


def as_dict(plan: Footprint) -> dict[str, Any]:
    """Returns the plan as numbers."""
    recipe, settings, dtype = plan.recipe, plan.settings, plan.subject.main_dtype
    return {
        "model": plan.subject.title,
        **_fields(plan, "numel", "world", "ranks"),
        "mesh": settings.mesh,
        "stage": plan.stage,
        **_fields(settings, "device", "bucket_bytes", "accumulate", "no_sync"),
        "optimizer": recipe.optimizer,
        "param_dtype": dtype,
        "reduce_dtype": recipe.wire_dtype(dtype),
        "state_format": recipe.state_format,
        "master_format": None if recipe.optimizer == "none" else recipe.master_of(dtype),
        "tier": recipe.tier,
        "budgets": dict(plan.budgets),
        "update": recipe.update,
        "schedule": f"delayed, {recipe.schedule.after}" if isinstance(recipe.schedule, Delayed) else recipe.schedule,
        "device_memory": dict(plan.device_memory),
        "param_tier": recipe.param_tier,
        "param_budgets": dict(recipe.param_budgets),
        "keep": recipe.keep,
        "keep_budgets": dict(recipe.keep_budgets),
        "micro": settings.micro,
        "gradients_spill": settings.spills,
        "budget": dict(plan.budget),
        "missing": plan.missing,
        "moves": [vars(move) for move in plan.moves],
        "stages": [_stage_dict(plan.at(stage)) for stage in plan.stages],
    }


def _stage_dict(plan: Footprint) -> dict[str, Any]:
    return {
        **_fields(plan, "stage", "roles", "tiers", "states", "total", "pinned"),
        "fits": {name: plan.total <= most for name, most in plan.device_memory.items()},
        "volume_numel": plan.traffic.numel,
        **_fields(plan.traffic, "reduced_nbytes", "gathered_nbytes", "sent_nbytes"),
        "sent": plan.sent,
        "muon": None if plan.muon is None else asdict(plan.muon),
    }


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}
