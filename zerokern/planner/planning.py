"""`zk.plan`: bytes and traffic of a training run before anything is allocated, and the cheapest run that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from zerokern.core.errors import BudgetError, got, whole_number
from zerokern.core.units import AUTO, BUCKET_BYTES, FILLED, RING_NBYTES
from zerokern.pages import html_page
from zerokern.planner import table
from zerokern.planner.amounts import Memory, gigabytes, in_seconds, parse_device_memory, parse_memory
from zerokern.planner.filling import filling, has_room, in_memory_first, less_reserve, would_fit
from zerokern.planner.footprint import Footprint, share_filled, with_recipe
from zerokern.planner.forecast import USUAL, Forecast, forecast, step_seconds
from zerokern.planner.model import keeps_whole, model_spec
from zerokern.planner.recipe import Arrangement, Recipe, mesh_sizes, short
from zerokern.planner.transformer import named
from zerokern.schedule import Delayed, Machine, machine_of, refuse_at_rest
from zerokern.zero.partition import check_stage, shards_parameters

__all__ = ["Plan", "as_asked", "plan"]

_RANKS_PER_HOST = 8  # of a usual node, unless it is said
_MOST_RANKS = 4096
_CHEAPEST, _FASTEST = "Cheapest exact configuration that fits", "Fastest exact configuration that fits"
_IN_SLICES = ", which zk.recompute(head_and_loss, ..., micro=) computes in slices (docs/offload.md)"
_AS_FAST = 1.01  # of the fastest: of configurations that differ by less the simplest is named
_PADDING = 0.01  # of what a stage sends, as far as stages that send as much differ
_NEAR = 0.75  # of a device: above it a stage that takes less and sends as much is named instead
_Seconds = Callable[["Plan"], float] | None
"""What a step is predicted to take; None: nobody said where it runs."""
_PLACES = (  # tiers of parameters and of state, the cheapest first
    ("device", "device"),
    ("device", "cpu"),
    ("device", "nvme"),
    ("cpu", "cpu"),
    ("cpu", "nvme"),
    ("nvme", "nvme"),
)


@dataclass(frozen=True)
class Plan(Footprint):
    """Bytes per rank by role and tier, and what moves in a step, at one stage; `at(stage)` is the same run at another.

    Its text is a table for a design document.

    >>> import zerokern as zk
    >>> plan = zk.plan("7.5B", stage=2, world=64, master_format="fp32")
    >>> round(plan.states / 1e9, 1), round(plan.at(3).states / 1e9, 2), plan.fits("40GB")
    (16.6, 1.88, True)
    >>> plan.roles["gradients"] // 10**6, round(plan.traffic.numel / plan.numel, 3)
    (234, 2.0)
    """

    def require(self) -> None:
        """Raises `BudgetError` where `device_memory`, `host_memory` or `disk` is too small, with what would fit.

        >>> zk.plan("70B", stage=3, param_tier="cpu", tier="cpu", host_memory="128GiB").require()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        zerokern.core.errors.BudgetError: 70B parameters, on 1 rank do not fit: 843 GB of host memory are missing
        ...
        """
        if self.missing:
            raise BudgetError(f"{table.title(self)} do not fit: {table.lacks(self)} are missing\n\n{self}")

    def advice(self, machine: str | os.PathLike[str] | Machine | None = None, tokens: int | None = None) -> str:
        """Says the cheapest exact configuration that fits into `device_memory`, over all stages and tiers: the answer,
        its code and its assumptions, on three lines.

        A tenth of the device, and of `host_memory`, is left. State fills what is free of the device, then host memory,
        then the disk. With a `machine`, as
        `predict` takes it, the configuration is the one whose step is predicted to be the shortest, of `tokens` on each
        rank (default: those of the model's batch and seq, else 4,096). Where nothing fits: what would, with fewer
        activations, in lossy formats, or on more ranks.

        >>> print(zk.plan("8B", world=8, device_memory="80GB").advice())  # doctest: +ELLIPSIS
        Cheapest exact configuration that fits: stage 1 on 8 ranks, 42.0 of 80.0 GB before activations
        Code: zk.shard(model, stage=1); opt = zk.AdamW(model.parameters())
        Assumed: bf16 parameters; activations come on top; 10% of the device is left to the driver, NCCL and ...
        """
        if not self.device_memory:
            return "Say how much memory a device has (device_memory, --device-memory 80GB) to be told what fits."
        seconds, said = self._seconds(machine, tokens)
        found = {name: _advice(single, seconds, said) for name, single in _on_each_device(self)}
        return "\n".join(f"{name}: {said}" if len(found) > 1 else said for name, said in found.items())

    def advised(self, machine: str | os.PathLike[str] | Machine | None = None, tokens: int | None = None) -> list[Plan]:
        """Returns the plan that `advice` names first, for each device in `device_memory`; none where nothing would fit.

        >>> [(one.stage, one.fits("80GB")) for one in zk.plan("8B", world=8, device_memory="80GB").advised()]
        [(1, True)]
        """
        seconds, _ = self._seconds(machine, tokens)
        return [found[0][1] for _, single in _on_each_device(self) if (found := _advised(single, seconds))]

    def _seconds(self, machine: str | os.PathLike[str] | Machine | None, tokens: int | None) -> tuple[_Seconds, str]:
        """Returns what predicts the step of a plan on a machine, and how that is told."""
        if machine is None:
            if tokens is not None:
                raise ValueError(got("tokens", tokens, "None without a machine, on which they are computed"))
            return None, ""
        self._refuse_untimed()
        there, shape = machine_of(machine), self.subject.activated
        number = tokens or (shape.tokens * self.settings.accumulate if shape else USUAL[0])

        def seconds(plan: Plan) -> float:
            return step_seconds(plan, there, number, plain=not _is_sharded(plan))

        return seconds, f"{number:,} tokens on {there.name}"

    def _refuse_untimed(self) -> None:
        if self.settings.tp * self.settings.pp > 1:
            do = "A step of one part alone: zk.plan(part, world=...)"
            raise ValueError(got("mesh", self.settings.mesh, "dp and replicate: others wait for each other", do))

    def would_fit(self) -> list[Plan]:
        """Returns the same run with what is needed least off the device, as far as it fits: exact formats, then lossy.

        What rests on disk fills host memory first, by the rule of `tier=` with budgets: parameters, then state.

        >>> found = zk.plan("20B", device_memory="v100", host_memory="128GiB", disk="1TB").would_fit()
        >>> [(one.recipe.param_tier, one.budgets, one.recipe.tier, one.recipe.is_lossy()) for one in found][:2]
        [('cpu', (('cpu', 43000000000),), 'nvme', False), ('cpu', (('cpu', 43000000000),), 'nvme', True)]
        """
        return would_fit(self)

    def page(self, *, formats: bool = True) -> str:
        """Returns the plan as text, as `str` has it; or without what it would take in other formats.

        >>> "state_format  " in zk.plan("1B").page(), "state_format  " in zk.plan("1B").page(formats=False)
        (True, False)
        """
        return table.page(self, formats=formats)

    def predict(self, machine: str | os.PathLike[str] | Machine, tokens: Sequence[int] | None = None) -> Forecast:
        """Predicts a step on a described machine: without offload, and with the update on the host at each schedule.

        machine: a name (`zerokern.schedule.shipped()`), a JSON file, or a `zerokern.schedule.Machine`.
        tokens: of one rank in one optimizer step.

        >>> found = zk.plan("1B", state_format="int8", master_format="split8").predict("h200-pcie", tokens=[16_384])
        >>> [f"{row.schedule} {row.of_resident:.0%}" for row in found.rows]
        ['no offload 100%', 'sync 51%', 'overlap, plain 56%', 'overlap 80%', 'delayed 101%']
        """
        self._refuse_untimed()
        return forecast(self, machine_of(machine), USUAL if tokens is None else tokens)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, for programs: bytes by role and tier at each stage, and the traffic.

        >>> zk.plan("1B").to_dict()["stages"][0]["roles"]["exp_avg"]
        4000000000
        """
        return table.as_dict(self)

    def __str__(self) -> str:
        return self.page()

    def _repr_html_(self) -> str:
        return html_page(str(self))


def plan(
    model: Any,
    *,
    stage: int = 2,
    world: int = 1,
    mesh: Any = None,
    optimizer: str | None = "adamw",
    ns_dtype: str | None = None,
    ns_steps: int = 5,
    ns_form: str = "standard",
    ns_coefficients: Any = None,
    mp_policy: Any = None,
    param_dtype: Any = None,
    reduce_dtype: Any = None,
    state_format: str = "fp32",
    master_format: str | None = None,
    tier: Any = "device",
    update: str | None = None,
    param_tier: Any = "device",
    keep: Any = None,
    micro: int = 1,
    schedule: str | Delayed = "sync",
    units: Any = None,
    whole: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    accumulate: int = 1,
    no_sync: bool = False,
    device: str | None = None,
    device_memory: Memory = None,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
    ranks_per_host: int | None = None,
) -> Plan:
    """Computes what each rank of a training run holds and sends, at every stage, before anything of it is allocated.

    Args:
        model: a module, which may be on the meta device; a number of parameters (`7_500_000_000`, `"7.5B"`), whose
            units and tensors are not known; a published model by name (`"llama-3-8b"`); or a
            `zerokern.planner.Transformer`, such as `preset("llama-3-8b", batch=1, seq=4096)` of that module, which has
            activations too; attention scores are among them with attention="eager" only.
        stage: the stage whose step and notes are shown; the table has all stages.
        world: the number of ranks.
        mesh: instead of `world`, a DeviceMesh, or sizes by name for ranks that do not exist yet: `{"pp": 2,
            "replicate": 2, "dp": 8, "cp": 2, "tp": 4}`. A module is one stage of pp, divided along tp already
            (`parallelize_module`). A number or a shape is the whole model, and a rank's part of tp x pp is planned.
            `Plan.sent` is what goes along each dimension. With pp, `accumulate` micro-batches are reduced once.
        optimizer: "adamw", "adam", "lion", "adagrad", "sgd", "sgd-momentum"; None plans none. "muon": zk.Muon for
            matrices and zk.AdamW for the rest, both in these formats and tiers. The matrices of a module are those in
            `whole=`, else those of `zk.muon_groups`; of a named model or a shape, all that have two dimensions in its
            layers. `Plan.muon` has the operations and temporary memory; a bare number is refused.
        ns_dtype, ns_steps, ns_form, ns_coefficients: as in `zk.Muon`. The Gram form's memory and operations are counted
            for each matrix that is multiplied by it.
        mp_policy: as in `zk.shard`.
        param_dtype, reduce_dtype: instead of `mp_policy`, also as text. A bare number means bf16 parameters by default.
        state_format, master_format: as in `zk.AdamW`.
        tier: where optimizer state rests, as in `zk.AdamW`; "nvme" stands for `zk.Nvme(path)`. With "muon" each of the
            two optimizers has these tiers, with its own budgets.
        update: where the update of state in tier="cpu" runs, "host" or "device", as in `zk.AdamW`. Default: "host",
            and "device" with "muon", whose iteration runs where parameters are.
        param_tier: where parameters rest at stage 3: `zk.shard(tier=)`. `tier`, `param_tier`: also lists with budgets.
        keep, micro: as in `zk.shard`, budgets too; without them all activations are kept. Each of `accumulate`
            micro-batches fetches again what rests in a tier.
        schedule: when the optimizer updates, as in `zk.AdamW`.
        units, whole, bucket_bytes: as in `zk.shard`; `whole` of a module.
        accumulate: the number of micro-batches in a step, each of them reduced.
        no_sync: whether all micro-batches but the last run under `zk.no_sync`.
        device: "cuda" or "cpu", since their collectives need different memory; default: the model's, else "cuda".
        device_memory: the memory to compare with: "80GB", "h100,32GiB", or a dict of names to bytes.
        host_memory, disk: what one host has. Gradients of parameters at rest wait on the disk if they do not fit in
            host memory. `Plan.require()` raises if something does not fit.
        ranks_per_host: how many ranks share a host; default: all ranks, at most 8.

    >>> import zerokern as zk
    >>> print(zk.plan(torch.nn.Linear(1024, 1024), stage=1, world=4))  # doctest: +ELLIPSIS
    ### Linear, 1M parameters in 2 tensors, on 4 ranks
    ...
    """
    check_stage(stage)
    recipe = Recipe.of(
        optimizer=optimizer,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        mp_policy=mp_policy,
        state_format=state_format,
        master_format=master_format,
        tier=tier,
        update=update,
        schedule=schedule,
        param_tier=param_tier,
        keep="device" if keep is None and micro != 1 else keep,
        ns_dtype=ns_dtype,
        ns_steps=ns_steps,
        ns_form=ns_form,
        ns_coefficients=ns_coefficients,
    )
    memory = parse_device_memory(device_memory)
    settings = Arrangement(world, device or "cuda", bucket_bytes, accumulate, no_sync, micro)
    if mesh is not None:
        if world != 1:
            raise ValueError(got("world", world, "no world beside mesh, which says how many ranks there are"))
        sizes: dict[str, Any] = mesh_sizes(mesh)
        settings = replace(settings, **sizes)
    subject = model_spec(named(model), recipe, units, settings.tp, settings.pp, whole)
    settings = replace(settings, tp=subject.tp, device=device or subject.device)
    if settings.pp > 1 and accumulate > 1:
        settings = replace(settings, no_sync=True)  # as zk.PipelineStage has it
    if any(budget == AUTO for _, budget in recipe.budgets) and not memory and settings.device != "cpu":
        do = "It fills what a plan leaves of the device"
        raise ValueError(got("device_memory", device_memory, "the device's memory for tier='device:auto'", do))
    if recipe.is_muon and any(budget == AUTO for _, budget in recipe.budgets) and settings.device != "cpu":
        do = "zk.Muon and zk.AdamW would each take what is free"
        raise ValueError(got("tier", "device:auto", "bytes ('device:8GiB') with optimizer='muon'", do))
    recipe = recipe.on(settings.device, stage)
    recipe.check(settings.device, stage, settings.world)
    if recipe.rests and settings.no_sync:
        allowed = "False for parameters at rest, whose gradients would gather on the device"
        raise ValueError(got("no_sync", no_sync, allowed, "micro=M has one pass over the parameters for all slices"))
    made = Plan(subject, recipe, settings, stage, memory, _budget(host_memory, disk, settings.ranks, ranks_per_host))
    for dtype in sorted({member.dtype for member in subject.members if member.trainable} or {subject.dtype}):
        recipe.state_of(dtype)  # refuses here what cannot be
    if recipe.delays_at_rest and "nvme" in dict(made.lying):
        refuse_at_rest(recipe.schedule)
    return made.spilling()


def _budget(
    host_memory: int | str | None, disk: int | str | None, world: int, ranks_per_host: int | None
) -> dict[str, int]:
    """Returns one rank's share of a host's memory and disk."""
    ranks = min(world, _RANKS_PER_HOST) if ranks_per_host is None else ranks_per_host
    whole_number("ranks_per_host", ranks, f"a whole number of ranks, from 1 to world={world}", most=world)
    asked = {"cpu": ("host_memory", host_memory), "nvme": ("disk", disk)}
    return {tier: parse_memory(name, memory) // ranks for tier, (name, memory) in asked.items() if memory is not None}


def _advice(plan: Plan, seconds: _Seconds, said: str) -> str:
    """Returns the answer for the one device that a plan has."""
    found = _advised(plan, seconds)
    fits = bool(found) and found[0][0] in (_CHEAPEST, _FASTEST)
    lines = [] if fits else [f"No exact configuration fits on {_ranks_of(plan)}."]
    for heading, answer in found:
        takes = "" if seconds is None else f", {in_seconds(seconds(answer))} for a step of {said}"
        lines += [f"{heading}: {_summary(answer, plan)}{takes}", f"Code: {_code(answer)}"]
    if not found:
        most = max(_MOST_RANKS, plan.world)
        lines.append(f"Nor does a lossy one, on up to {most:,} ranks: {_why_nothing_fits(plan)}")
    frozen = None if fits else _lora(plan)
    if frozen is not None:
        lines.append(frozen)
    return "\n".join([*lines, f"Assumed: {_assumed(found[0][1] if found else plan)}"])


def as_asked(plan: Plan) -> str:
    """Returns what a plan takes of each device, what it lacks, and its code, as `advice` says it of what it names.

    >>> print(as_asked(plan("8B", tier="cpu", device_memory="24GB")))
    As asked: one rank, 32.0 of 24.0 GB before activations, 112 GB of host memory for each rank; it does not fit
    Code: opt = zk.AdamW(model.parameters(), tier="cpu")
    """
    lines = []
    for name, single in _on_each_device(plan):
        heading = "As asked" if len(plan.device_memory) == 1 else f"{name}: As asked"
        lacks = "" if has_room(single) else f"; it fits with less than {1 - FILLED:.0%} left"
        lacks = "; it does not fit" if single.missing else lacks
        lines.append(f"{heading}: {_summary(single, single)}{lacks}")
    return "\n".join([*lines, f"Code: {_code(plan)}"])


def _on_each_device(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields the plan for each device alone, by name."""
    for name, most in plan.device_memory.items():
        yield name, replace(plan, device_memory={name: most})


def _advised(plan: Plan, seconds: _Seconds) -> list[tuple[str, Plan]]:
    """Returns the cheapest exact plan for the plan's one device, or else what would fit."""
    exact = _cheapest(plan, seconds)
    if exact is not None:
        return [(_CHEAPEST if seconds is None else _FASTEST, exact)]
    others = (
        ("Exact, with fewer activations on the device", _fewer_activations),
        ("Lossy, and fits", partial(_cheapest, lossy=True)),
        ("Exact, with more ranks", _more_ranks),
    )
    return [(heading, answer) for heading, find in others if (answer := find(plan, seconds)) is not None]


def _why_nothing_fits(plan: Plan) -> str:
    """Says why nothing fits; names the activations of one sequence if everything fits without them."""
    shape, bare = plan.subject.activated, replace(plan, subject=replace(plan.subject, transformer=None))
    if shape is None or not (_cheapest(bare) or _cheapest(bare, lossy=True) or _more_ranks(bare)):
        return (
            "a unit alone is too large for the device, or the host's memory and disk are too small. zk.tile cuts a "
            "Linear"
        )
    shape = replace(shape, batch=1)
    activations, logits = shape.peak(1)
    scores = ", with attention's scores, which attention='sdpa' does not store" if shape.attention == "eager" else ""
    do = "Context parallelism divides it: docs/composition.md, and plan a rank's part of seq"
    if logits > activations:
        do += f". {gigabytes(logits)} GB of it are logits and loss{_IN_SLICES}"
    return (
        f"a unit, the logits and the loss of one sequence alone are {gigabytes(activations + logits)} GB{scores}. "
        f"keep= moves the inputs of units and no more, micro= cannot cut one sequence. {do}"
    )


def _cheapest(plan: Plan, seconds: _Seconds = None, *, lossy: bool = False) -> Plan | None:
    """Returns the cheapest plan that fits: the fastest, where a step can be predicted."""
    candidates = _candidates(less_reserve(plan), lossy=lossy)
    fitting = (replace(candidate, budget=plan.budget) for candidate in candidates if has_room(candidate))
    if seconds is None:
        return next(fitting, None)
    timed = [(seconds(candidate), candidate) for candidate in fitting]
    soonest = min((taken for taken, _ in timed), default=0.0)
    return next((candidate for taken, candidate in timed if taken <= soonest * _AS_FAST), None)


def _candidates(plan: Plan, *, lossy: bool) -> Iterator[Plan]:
    """Yields plans by what they cost: state and parameters on the device first, then in host memory, then on a disk;
    of each without recomputation before with it, and the stage that communicates least, and divides least. Of stage 1
    on ranks divide what each updates in host memory. State fills each tier before the next, and parameters fill host
    memory before a disk; on the device are all of them or none, since the step would be longer with a part of them.

    The schedule is the best of those that publish in their own step, since the one asked for may not be allowed for
    state on the device.
    """
    exact = replace(plan.recipe, state_format="fp32", master_format=None)
    recipe = plan.recipe.smallest_lossy(plan.subject.main_dtype) if lossy else exact
    if recipe is None:
        return
    keeps = (None, "device") if recipe.keep is None and plan.subject.activated else (recipe.keep,)
    for (param_tier, tier), keep in product(_PLACES, keeps):
        if plan.settings.device == "cpu" and "cpu" in (param_tier, tier):
            continue  # the device is the host
        schedule = "sync" if tier == "device" else "overlap"
        here = replace(recipe.placed(tier, param_tier, keep), schedule=schedule)
        stages: tuple[int, ...] = (0, 1, 2, 3) if plan.ranks > 1 else (0,)
        if param_tier != "device":
            stages = (3,)
        elif tier != "device" and plan.world > 1:
            stages = (1, 2, 3)
        taken = [stage for stage in stages if here.is_taken(plan.settings.device, stage, plan.world)]
        runs = [with_recipe(plan, here.on(plan.settings.device, stage), stage) for stage in taken]
        yield from map(in_memory_first if param_tier == "nvme" else filling, _roomy_first(runs))


def _roomy_first(runs: Sequence[Plan]) -> Iterator[Plan]:
    """Yields runs stage by stage; of those that send as much, the ones that nearly fill the device last."""
    alike: list[list[Plan]] = []
    for run in runs:
        sent = run.traffic.sent_nbytes
        if not alike or abs(sent - alike[-1][0].traffic.sent_nbytes) > _PADDING * sent:
            alike.append([])
        alike[-1].append(run)
    for some in alike:
        yield from sorted(some, key=lambda run: max(0, run.total - _NEAR * min(run.device_memory.values(), default=0)))


def _fewer_activations(plan: Plan, seconds: _Seconds = None) -> Plan | None:
    """Returns the first exact plan that fits with the batch in slices: by powers of two, or one for each sequence.

    Units in slices, which fetch parameters once, come before fewer sequences in a backward pass and more of these in a
    step; of each the nearest tier for the inputs of units first.
    """
    shape = plan.subject.activated
    if shape is None:
        return None
    batch = shape.batch or 1
    keeps = ("device", "nvme") if plan.settings.device == "cpu" else ("device", "cpu", "nvme")
    for slices in _slices(plan.settings.micro, batch):
        in_slices = replace(plan, settings=replace(plan.settings, micro=slices))
        for here in (in_slices, _with_micro_batches(plan, batch, slices)) if slices > 1 else (plan,):
            for keep in keeps:
                recipe = replace(here.recipe, keep=keep, keep_ring_nbytes=RING_NBYTES, keep_budgets=())
                found = _cheapest(replace(here, recipe=recipe), seconds)
                if found is not None:
                    return found
    return None


def _with_micro_batches(plan: Plan, batch: int, passes: int) -> Plan:
    """Returns a plan with the same batch in this many backward passes before each step."""
    batch, now = -(-batch // passes), plan.settings
    settings = replace(now, accumulate=now.accumulate * passes, micro=min(now.micro, batch))
    return replace(plan, subject=plan.subject.in_batches_of(batch), settings=settings)


def _slices(least: int, batch: int) -> Iterator[int]:
    """Yields numbers of slices, doubling from `least` up to `batch`.

    >>> list(_slices(1, 7)), list(_slices(1, 8)), list(_slices(3, 2))
    ([1, 2, 4, 7], [1, 2, 4, 8], [])
    """
    micro = least
    while micro < batch:
        yield micro
        micro *= 2
    if least <= batch:
        yield batch


def _lora(plan: Plan) -> str | None:
    """Says what LoRA needs, if it fits: frozen parameters have neither gradients nor state."""
    room, activated = min(plan.device_memory.values()), plan.subject.activated
    if activated and plan.recipe.keep is None:
        plan = replace(plan, recipe=replace(plan.recipe, keep="device"))
    for other in (plan.at(stage) for stage in ((0, 3) if plan.ranks > 1 else (0,)) if stage in plan.stages):
        nbytes = other.roles["parameters"] + max(0, other.total - other.states)
        if not other.recipe.rests and nbytes <= FILLED * room:
            where = f"at stage {other.stage}" if plan.ranks > 1 else "on one rank"
            what = "the frozen parameters" + (" and activations" if activated else "")
            taken = f"{gigabytes(nbytes)} of {gigabytes(room)} GB {where}{_uncounted(other)}"
            return f"LoRA instead: {what} take {taken}, its own state is small"
    return None


def _more_ranks(plan: Plan, seconds: _Seconds = None) -> Plan | None:
    """Returns the exact plan that fits on the fewest ranks, doubling them; each rank keeps its share of host memory."""
    world = plan.world
    while (world := 2 * world) <= _MOST_RANKS:
        wider = replace(plan, settings=replace(plan.settings, world=world))
        found = _cheapest(wider, seconds)
        if found is not None:
            return found
    return None


def _uncounted(plan: Plan) -> str:
    """Says what else the device holds that the plan does not count."""
    found = [] if plan.subject.activated else ["activations"]
    found += ["the units that compute"] if shards_parameters(plan.stage) and not plan.subject.members else []
    return f" before {' and '.join(found)}" if found else ""


def _ranks_of(plan: Plan) -> str:
    return f"{plan.ranks:,} ranks" if plan.ranks > 1 else "one rank"


def _summary(plan: Plan, asked: Plan) -> str:
    ((name, most),) = plan.device_memory.items()
    device = "" if name[:1].isdigit() else f" ({name.partition(' ')[0]})"
    stage = f"stage {plan.stage} on " if plan.ranks > 1 or plan.recipe.rests else ""
    said = f"{stage}{_ranks_of(plan)}, {gigabytes(plan.total)} of {gigabytes(most)} GB{device}{_uncounted(plan)}"
    for tier, called in (("cpu", "host memory"), ("nvme", "disk")):
        nbytes = plan.tiers.get(tier, 0)
        if nbytes and tier != plan.settings.device:
            said += f", {gigabytes(nbytes)} GB of {called} for each rank"
    shape = plan.subject.activated
    if shape and plan.settings.accumulate != asked.settings.accumulate:
        said += f", batch {shape.batch:,} and {plan.settings.accumulate:,} backward passes in a step"
    return said


def _assumed(plan: Plan) -> str:
    """Lists the assumptions of the answer."""
    shape, dtype = plan.subject.activated, short(plan.subject.main_dtype)
    said = [f"{dtype} parameters and activations" if shape else f"{dtype} parameters"]
    if shape:
        scores = "which stores no scores" if shape.attention == "sdpa" else "which stores all scores"
        said.append(f"batch {shape.batch:,} x {shape.seq:,} on a rank, attention={shape.attention!r}, {scores}")
        loss = "logits and loss are not counted (a bare shape has no vocabulary)"
        if shape.counts_logits:
            nbytes = plan.roles["logits"]
            loss = f"{gigabytes(nbytes)} GB of logits and loss, as in transformers"
            loss += _IN_SLICES if 3 * nbytes > plan.total else ""
        said.append(loss)
    else:
        said.append("activations come on top" + (" (no --batch and --seq)" if plan.subject.transformer else ""))
    if any(tier == "device" for tier, _ in plan.budgets):
        share = f"state fills the device up to {share_filled(plan):.0%} of it"
        said.append(share if shape else f"{share}, which leaves the rest to activations")
    for tier, called, option in (("cpu", "host memory", "--host-memory"), ("nvme", "the disk", "--disk")):
        if plan.tiers.get(tier, 0) and tier != plan.settings.device and tier not in plan.budget:
            said.append(f"{called} is large enough (no {option})")
    kept = f"{1 - FILLED:.0%} of the device is left to the driver, NCCL and fragments of the allocator"
    kept += f", and {1 - FILLED:.0%} of host memory to other programs" if "cpu" in plan.budget else ""
    return "; ".join([*said, kept])


def _is_sharded(plan: Plan) -> bool:
    """Returns whether the plan's code has zk.shard."""
    return plan.ranks > 1 or plan.recipe.rests or plan.recipe.keep is not None or plan.settings.micro > 1


def _code(plan: Plan) -> str:
    recipe = plan.recipe
    said = partial(table.order_said, disk="zk.Nvme(path)")
    rests = f", tier={said(recipe.param_budgets, recipe.param_tier)}" if recipe.rests else ""
    recomputed = f", keep={said(recipe.keep_budgets, recipe.keep)}" if recipe.keep else ""
    if plan.settings.micro > 1:  # slices alone imply the device
        recomputed = f"{'' if recipe.keep == 'device' else recomputed}, micro={plan.settings.micro}"
    # whether the whole model fits before it is sharded: on the device, or in host memory if that is the device
    rooms = [*plan.device_memory.values()]
    rooms += [plan.budget["cpu"]] if plan.settings.device == "cpu" and "cpu" in plan.budget else []
    fits = sum(kind.numel * kind.itemsize for kind in plan.buckets.kinds) <= min(rooms)
    model = "zk.shard(model" if fits else "model = zk.build(make_model"
    shard = f"{model}, stage={plan.stage}{rests}{recomputed})"
    tier = f", tier={said(plan.budgets, recipe.tier)}" if recipe.tier != "device" else ""
    options = ', update="device"' if recipe.streams(plan.settings.device) else ""
    schedule = f"zk.{recipe.schedule!r}" if recipe.delays else f'"{recipe.schedule}"'
    options += f", schedule={schedule}" if recipe.schedule != "sync" else ""
    options += f', state_format="{recipe.state_format}"' if recipe.state_format != "fp32" else ""
    options += f', master_format="{recipe.master_format}"' if recipe.master_format else ""
    options += ", momentum=0.9" if recipe.optimizer == "sgd-momentum" else ""
    lines = [shard] if _is_sharded(plan) else []
    if recipe.is_muon:
        if keeps_whole(plan.stage) and lines:
            lines = [f"{shard.removesuffix(')')}, whole=matrices)"]
        folders = (tier.replace("(path)", f'(path + "/{name}")') for name in ("muon", "adamw"))  # they share none
        names = "zk.Muon(matrices", "zk.AdamW(rest"
        classes = [f"{name}{folder}{options})" for name, folder in zip(names, folders, strict=True)]
        lines = ["matrices, rest = zk.muon_groups(model)", *lines, f"opts = {', '.join(classes)}"]
        return "; ".join(lines)
    if recipe.optimizer != "none":
        lines.append(f"opt = {recipe.rule.called}(model.parameters(){tier}{options})")
    return "; ".join(lines) or "none, the model is trained as it is"
