"""A plan as text to paste into a design document, and as numbers for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerokern.planner.amounts import gigabytes, table_of
from zerokern.planner.dimensions import told, uncounted
from zerokern.planner.planned import PlannedRun
from zerokern.planner.recipe import OPTIMIZERS, short
from zerokern.planner.share import STATES, WORKING, Holding, Share, Sums
from zerokern.schedule import Delayed
from zerokern.zero.partition import STAGES

__all__ = ["NAMES", "TIERS", "as_dict", "fit", "formats_of", "of_held", "of_measured", "of_plan", "of_worlds"]

NAMES = {
    "gathered": "units gathered",
    "buffers": "bucket buffers",
    "scratch": "scratch of collectives",
    "ring": "staging ring",
    "host parameters": "parameters to update",
    "host gradients": "gradients to update with",
    "shadow": "parameters to publish",
    "checkpoints": "activation checkpoints",
    "activations": "activations",
    "logits": "logits and loss",
}
TIERS = {"device": "on the device", "cpu": "in host memory", "nvme": "on NVMe"}
STAGE_HEADS = [f"stage {stage}" for stage in STAGES]
NOTHING, UNKNOWN = "-", "?"
BARE = "unknown for a bare number; give --model"


def of_plan(plan: PlannedRun, *, formats: bool = True) -> str:
    """All stages side by side, then the other formats."""
    parts = [
        f"### {title(plan)}",
        f"Each rank holds, in GB (10^9 bytes), with {settings(plan)}:",
        _stages(plan),
        "\n".join(f"* {note}" for note in notes(plan)),
    ]
    others = _formats(plan) if formats else ""
    if others:
        where = "Locked in host memory" if plan.pinned else "Total on the device"
        parts += [f"{where} in other formats, in GB; lossy ones are never a default:", others]
    return "\n\n".join(parts)


def title(plan: PlannedRun) -> str:
    """What is planned, and on how many ranks."""
    several = f" ({told(plan.settings)})" if plan.ranks != plan.world else ""
    return f"{plan.subject.title}, on {plan.ranks:,} rank{'' if plan.ranks == 1 else 's'}{several}"


def settings(plan: PlannedRun) -> str:
    """The formats in one phrase."""
    recipe, dtype = plan.recipe, plan.subject.main_dtype
    words = [recipe.face, f"{short(dtype)} parameters", f"gradients reduced in {short(recipe.wire_dtype(dtype))}"]
    if recipe.optimizer != "none":
        words += [f'state_format="{recipe.state_format}"'] if OPTIMIZERS[recipe.optimizer] else []
        master = recipe.master_of(dtype)
        words += [] if master == "own" else [f'master_format="{master}"']
        words += [] if recipe.tier == "device" else [f"state {TIERS[recipe.tier]}"]
    words += [f"parameters at rest {TIERS[recipe.param_tier]}"] if recipe.rests else []
    if recipe.optimizer != "none":
        words += [] if recipe.schedule == "sync" else [f"schedule={recipe.schedule!r}"]
    if plan.settings.accumulate > 1:
        how = "all but the last under zk.no_sync" if plan.settings.no_sync else "each reduced"
        how = "each fetching parameters anew" if recipe.rests else how
        how = "reduced once" if plan.settings.pp > 1 else how
        words.append(f"{plan.settings.accumulate} micro-batches in a step, {how}")
    words += [f"each batch in {plan.settings.micro} slices"] if plan.settings.micro > 1 else []
    words += [f"inputs of units kept {TIERS[recipe.keep]}"] if recipe.keep else []
    return ", ".join(words)


def notes(plan: PlannedRun) -> list[str]:
    """What the table means, and what it leaves out."""
    share, subject, world = plan.share, plan.subject, plan.world
    said = []
    if world > 1:
        said.append(
            f"Ψ is {subject.numel:,} parameters; a volume of Ψ is a reduce-scatter or all-gather of all of them, and a "
            f"rank sends {world - 1}/{world} of it."
        )
    if world > 1 and subject.members:
        padding = f"{share.padding:,} elements of all, {_percent(share.padding / subject.numel)}"
        said.append(f"Padding at cuts between ranks: {padding}.")
    if world > 1 and not subject.members and plan.settings.pp == 1:
        said.append(
            "A number alone has no layers: what stage 3 gathers to compute (?) comes on top. Plan a model or the shape "
            "of a transformer to know it."
        )
    if subject.members and share.arriving:
        arriving = gigabytes(share.arriving)
        said.append(f"During backward autograd's own gradients of one bucket lie beside these: at most {arriving} GB.")
    if plan.pinned:
        said.append(f"The optimizer locks {plan.pinned:,} bytes of host memory at stage {plan.stage}, in whole pages.")
    said += uncounted(subject, plan.recipe, plan.stage, plan.settings)
    takers = "what the framework, its allocator and the driver of the device take"
    if plan.settings.has_others:
        takers += ", and on GPUs the buffers of NCCL's two communicators (gathers, reductions)"
    shape = subject.transformer
    if shape is not None and shape.has_activations:
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
        said.append(f"Not counted: {takers}.")
    else:
        said.append(f"Not counted: activations, and {takers}.")
    return said


def _stages(plan: PlannedRun) -> str:
    shares = [plan.at(stage).share for stage in STAGES]
    several = len({one.tier for share in shares for one in share.held}) > 1
    rows = _held(shares, STATES, several)
    if not several:  # bytes of a device and of a host are no sum that anybody has to fit anywhere
        rows.append(["**model states**", "", *(gigabytes(share.states) for share in shares)])
    if not plan.subject.units and plan.world > 1 and plan.settings.pp == 1:
        rows.append([NAMES["gathered"], BARE, *[NOTHING] * 3, UNKNOWN])
    rows += _held(shares, WORKING, several)
    rows.append(["**total on the device**", "", *(f"**{gigabytes(share.total)}**" for share in shares)])
    for tier in ("cpu", "nvme"):
        if any(tier in share.tiers for share in shares):
            rows.append([f"**total {TIERS[tier]}**", "", *(_gb(share.tiers.get(tier, 0)) for share in shares)])
    for name, most in plan.device_memory.items():
        rows.append([f"fits {name}", "", *(fit(share.total, most) for share in shares)])
    if plan.world > 1:
        traffic = [plan.at(stage).traffic for stage in STAGES]
        rows.append(["volume of a step", "", *(f"{one.numel / plan.numel:.2f} Ψ" for one in traffic)])
        rows.append(["reduced in a step", "", *(_gb(one.reduced_nbytes) for one in traffic)])
        rows.append(["gathered in a step", "", *(_gb(one.gathered_nbytes) for one in traffic)])
        rows.append(["sent by a rank in a step", "", *(_gb(one.sent_nbytes) for one in traffic)])
    for name in [name for name in plan.sent if name != "dp"]:
        sent = [plan.at(stage).sent[name] for stage in STAGES]
        rows.append([f"sent along {name}", "", *(UNKNOWN if one is None else _gb(one) for one in sent)])
    return table_of(["on each rank", "format", *STAGE_HEADS], rows, left=2)


def _gb(nbytes: int) -> str:
    return gigabytes(nbytes) if nbytes else NOTHING


def _held(shares: Sequence[Share], roles: Sequence[str], names_tiers: bool) -> list[list[str]]:
    """A row for each role, format and tier that any stage has."""
    found = {(one.role, one.format, one.tier) for share in shares for one in share.held if one.role in roles}
    rows = []
    for key in sorted(found, key=lambda key: (roles.index(key[0]), key)):
        cells = [_gb(_sum(share.held, key)) for share in shares]
        rows.append([NAMES.get(key[0], key[0]), _form(key, names_tiers), *cells])
    return rows


def _form(key: tuple[str, str, str], names_tier: bool) -> str:
    return ", ".join(word for word in (key[1], TIERS.get(key[2], key[2]) if names_tier else "") if word)


def _sum(held: Sequence[Holding], key: tuple[str, str, str]) -> int:
    return sum(one.nbytes for one in held if (one.role, one.format, one.tier) == key)


def fit(nbytes: int, most: int) -> str:
    """
    >>> fit(60, 80), fit(81, 80), fit(80_001, 80_000), fit(16000, 80)
    ('yes, 75 %', 'no, 101 %', 'no, 101 %', 'no, 200x')
    """
    if nbytes > 10 * most:
        return f"no, {nbytes / most:.0f}x"
    percent = round(100 * nbytes / most)
    return f"yes, {percent} %" if nbytes <= most else f"no, {max(101, percent)} %"


def _formats(plan: PlannedRun) -> str:
    rows = []
    for other in plan.in_other_formats():
        totals = [other.at(stage).total for stage in STAGES]
        shown = [other.at(stage).pinned for stage in STAGES] if plan.pinned else totals
        fits = [fitting(totals, most) for most in plan.device_memory.values()]
        rows.append([*formats_of(other), *map(gigabytes, shown), *fits])
    header = ["state_format", "master_format", "state, B/parameter", *STAGE_HEADS]
    return table_of(header + [f"fits {name}" for name in plan.device_memory], rows, left=2) if len(rows) > 1 else ""


def formats_of(plan: PlannedRun) -> tuple[str, str, str]:
    """State and master format, marked where they are lossy, and the bytes of state for a parameter."""
    recipe, dtype = plan.recipe, plan.subject.main_dtype
    master = recipe.master_of(dtype)
    return (
        recipe.state_format + (" *(lossy)*" if recipe.state_format != "fp32" else ""),
        master + (" *(lossy)*" if master in ("split8", "none") else ""),
        f"{recipe.state_nbytes(dtype):.3g}",
    )


def fitting(totals: Sequence[int], most: int, stages: Sequence[int] = STAGES) -> str:
    """The stages whose total fits.

    >>> fitting([90, 80, 70, 60], 80), fitting([90] * 4, 80)
    ('stages 1, 2, 3', 'none')
    """
    fit = [str(stage) for stage, nbytes in zip(stages, totals, strict=True) if nbytes <= most]
    return "none" if not fit else f"stage{'s' if len(fit) > 1 else ''} {', '.join(fit)}"


def of_worlds(plans: Sequence[PlannedRun]) -> str:
    """Model states at each number of ranks, as the ZeRO paper has them, and at which stages everything fits."""
    first = plans[0]
    rows = []
    for plan in plans:
        shares = [plan.at(stage).share for stage in plan.stages]
        fits = [fitting([share.total for share in shares], most, plan.stages) for most in first.device_memory.values()]
        rows.append([f"{plan.ranks:,}", *(gigabytes(share.states) for share in shares), *fits])
    said = "Model states (parameters, gradients, optimizer state) on each rank, in GB (10^9 bytes), with "
    header = ["ranks", *(f"stage {stage}" for stage in first.stages), *(f"fits {name}" for name in first.device_memory)]
    parts = [f"### {first.subject.title}", f"{said}{settings(first)}:", table_of(header, rows, left=0)]
    if first.device_memory:
        parts.append("What fits is counted with what collectives and computing need besides.")
    return "\n\n".join(parts)


def of_held(heading: str, held: Sequence[Holding]) -> str:
    """What is held, in one column."""
    several = len({one.tier for one in held}) > 1
    rows = [
        [NAMES.get(one.role, one.role), _form((one.role, one.format, one.tier), several), gigabytes(one.nbytes)]
        for one in held
    ]
    states = sum(one.nbytes for one in held if one.role in STATES)
    rows.append(["**model states**", "", gigabytes(states)])
    rows.append(["**total**", "", f"**{gigabytes(sum(one.nbytes for one in held))}**"])
    return f"### {heading}\n\n" + table_of(["held, GB (10^9 bytes)", "format", "now"], rows, left=2)


def of_measured(plan: PlannedRun, measured: Sums) -> str:
    """Planned and measured side by side, by role."""
    planned, found = plan.roles, measured.roles
    order = [*STATES, *WORKING]
    roles = sorted({*planned, *found}, key=lambda role: order.index(role) if role in order else len(order))
    pairs = [(NAMES.get(role, role), planned.get(role, 0), found.get(role, 0)) for role in roles]
    pairs.insert(sum(role in STATES for role in roles), ("**model states**", plan.states, measured.states))
    rows = [[name, _gb(expected), _gb(actual), _difference(expected, actual)] for name, expected, actual in pairs]
    resting = {"gathered", "checkpoints", "activations", "logits"}
    resting |= {"buffers"} if plan.settings.no_sync else set()  # whole gradients, until the last of them is reduced
    resting &= {*planned} - {*found}
    for row in rows:
        if row[0] in {NAMES[role] for role in resting}:
            row[2:] = ["in a step only", NOTHING]
    total = plan.total - sum(planned[role] for role in resting)
    name = "**total on the device**" if not resting else "**total on the device, at rest**"
    rows.append([name, _gb(total), _gb(measured.total), _difference(total, measured.total)])
    header = [f"stage {plan.stage}, on each rank", "planned", "measured", "difference"]
    return f"### {title(plan)}\n\nIn GB (10^9 bytes), with {settings(plan)}:\n\n{table_of(header, rows)}"


def _difference(expected: int, actual: int) -> str:
    if not expected:
        return NOTHING if not actual else "not planned"
    return f"{100 * (actual - expected) / expected:+.2f} %"


def as_dict(plan: PlannedRun) -> dict[str, Any]:
    """Numbers alone."""
    recipe, dtype = plan.recipe, plan.subject.main_dtype
    formats = {
        "optimizer": recipe.optimizer,
        "param_dtype": dtype,
        "reduce_dtype": recipe.wire_dtype(dtype),
        "state_format": recipe.state_format,
        "master_format": None if recipe.optimizer == "none" else recipe.master_of(dtype),
        "tier": recipe.tier,
        "schedule": f"delayed, {recipe.schedule.after}" if isinstance(recipe.schedule, Delayed) else recipe.schedule,
    }
    return {
        "model": plan.subject.title,
        "numel": plan.numel,
        "world": plan.world,
        "ranks": plan.ranks,
        "mesh": told(plan.settings),
        "stage": plan.stage,
        "device": plan.settings.device,
        "bucket_bytes": plan.settings.bucket_bytes,
        "accumulate": plan.settings.accumulate,
        "no_sync": plan.settings.no_sync,
        **formats,
        "device_memory": dict(plan.device_memory),
        "param_tier": recipe.param_tier,
        "keep": recipe.keep,
        "micro": plan.settings.micro,
        "gradients_spill": plan.settings.spills,
        "budget": dict(plan.budget),
        "missing": plan.missing,
        "moves": [vars(one) for one in plan.moves],
        "stages": [_stage_dict(plan.at(stage)) for stage in plan.stages],
    }


def _stage_dict(plan: PlannedRun) -> dict[str, Any]:
    share, traffic = plan.share, plan.traffic
    return {
        "stage": share.stage,
        "roles": share.roles,
        "tiers": share.tiers,
        "states": share.states,
        "total": share.total,
        "pinned": plan.pinned,
        "fits": {name: share.total <= most for name, most in plan.device_memory.items()},
        "volume_numel": traffic.numel,
        "reduced_nbytes": traffic.reduced_nbytes,
        "gathered_nbytes": traffic.gathered_nbytes,
        "sent_nbytes": traffic.sent_nbytes,
        "sent": plan.sent,
    }


def _percent(share: float) -> str:
    """
    >>> _percent(0.00042), _percent(0)
    ('0.042 %', '0 %')
    """
    return f"{100 * share:.2g} %"
