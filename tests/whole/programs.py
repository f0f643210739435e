"""Whole programs: a model is wrapped, trained, perhaps saved and loaded elsewhere; and what all of that must give.

A program is a row of one array over everything that training is asked for. What is expected is trained by an optimizer
with its state beside the parameters and nothing under way, over plain modules whose gradients are averaged by hand;
`Delayed` is the paper's loop, written out. Sums of two ranks have one order, so that the same means the same bits.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import (
    LIMITS,
    NARROW,
    Late,
    exact_calls,
    fully_sharded,
    kept_of,
    loss_scale,
    one_thread,
    optimizer_of,
    scaled_step,
    weights_of,
)
from offload_cases import Row as Trained
from optim_cases import same_bits
from products import Array
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from waiting_device import HostComputes
from worlds import World, built, full
from zero_cases import Block

import zerokern as zk
from zerokern.io import Store
from zerokern.io import tier as tiers
from zerokern.optim import transit
from zerokern.zero.sharded import Sharded

WIDTH, STEPS, BROKEN, SAVED_AFTER = 10, 5, 2, 3
# steps before and after what is saved is loaded: some parameters are frozen, one is written, a unit is left out, a
# gradient is edited
CHANGED = {"frozen": (2, 3), "written": (1, 4), "skipped": (0, 2, 3), "edited": (1, 3)}
OURS = ("frozen", "written")  # what torch's wrappers have other rules for
LONG = 7000  # the inner width of a unit whose matrices are in several records
FACTORS: dict[str, tuple[Any, ...]] = {
    "wrap": ("plain", "ddp", "fsdp2", "stage 0", "stage 1", "stage 2", "stage 3"),
    "where": ("alone", "threads", "hybrid", "ranks"),
    "params": ("device", "cpu", "nvme"),
    "tier": ("device", "cpu", "nvme", "split"),
    "update": (None, "device"),
    "schedule": ("sync", "overlap", "delayed", "delayed after 2"),
    "rule": ("adamw", "adam", "lion", "adagrad", "sgd", "muon", "chained"),
    "dtype": ("fp32", "bf16", "fp16", "mixed"),
    "state_format": ("fp32", "bf16", "int8"),
    "master_format": (None, "fp32", "split16", "split8", "none"),
    "clip": ("none", "random", "often"),
    "accumulate": ("once", "each", "no_sync"),
    "keep": (None, "device", "cpu", "nvme"),
    "micro": (1, 2),
    "resume": ("no", "state_dict", "saved", "saved elsewhere"),
    "change": (None, "frozen", "written", "skipped", "edited"),
    "broken": (False, True),
    "scaled": (False, True),
    "played": (False, True),
    "publish": (None, "delta"),
}
WHOLE = ("muon", "chained")  # which update whole matrices; a chain has AdamW for the rest
NARROW_MASTERS = (None, "fp32", "split16", "split8", "none")
MASTERS = {"fp32": (None,), "bf16": NARROW_MASTERS, "mixed": NARROW_MASTERS, "fp16": (None, "fp32", "none")}
PLACES = {"plain": ("alone", "threads"), "ddp": ("ranks",), "fsdp2": ("ranks",)}
SCHEDULES = {"sync": "sync", "overlap": "overlap", "delayed": zk.Delayed(), "delayed after 2": zk.Delayed(after=2)}


def sharded(wrap: str) -> bool:
    return wrap.startswith("stage")


def divided(wrap: str) -> bool:
    return sharded(wrap) or wrap == "fsdp2"


def late(schedule: str) -> bool:
    return schedule.startswith("delayed")


def delays_on_disk(params: str, schedule: str) -> bool:
    """What is refused (`test_what_is_ruled_out_is_refused`)."""
    return params == "nvme" and late(schedule)


# What is no program: torch's wrappers need processes, and zerokern refuses the rest by name.
RULES = [
    (("wrap", "where"), lambda wrap, where: where in PLACES.get(wrap, (where,))),
    (("wrap", "params"), lambda wrap, params: params == "device" or wrap == "stage 3"),
    (("wrap", "publish"), lambda wrap, publish: publish is None or wrap in ("stage 1", "stage 2")),
    (("played", "publish"), lambda played, publish: publish is None or not played),  # which a device's are refused
    (("wrap", "keep"), lambda wrap, keep: keep is None or sharded(wrap)),
    (("wrap", "dtype"), lambda wrap, dtype: dtype != "mixed" or sharded(wrap) or wrap == "fsdp2"),
    # FSDP2's parameters are fp32 and keep no remainder
    (("wrap", "dtype", "master_format"), lambda wrap, dtype, of: (wrap, dtype) != ("fsdp2", "mixed") or of is None),
    (("keep", "micro"), lambda keep, micro: micro == 1 or keep is not None),
    (("rule", "state_format"), lambda rule, state: state != "int8" or rule not in ("adagrad", "sgd")),
    (("wrap", "rule"), lambda wrap, rule: rule not in WHOLE or wrap != "fsdp2"),  # which cuts matrices
    # matrices on a device are multiplied there, when they are needed
    (("rule", "played", "params"), lambda rule, played, params: not (rule in WHOLE and played) or params == "device"),
    (("rule", "played", "schedule"), lambda rule, played, when: not (rule in WHOLE and played) or not late(when)),
    (("params", "schedule"), lambda params, schedule: not delays_on_disk(params, schedule)),
    (("update", "played"), lambda update, played: update is None or played),
    (("update", "tier"), lambda update, tier: update is None or tier in ("cpu", "split")),
    (("update", "schedule"), lambda update, schedule: update is None or not late(schedule)),
    (("wrap", "state_format"), lambda wrap, state: wrap != "fsdp2" or state != "int8"),  # blocks do not fit the shapes
    (("dtype", "master_format"), lambda dtype, master: master in MASTERS[dtype]),
    (("wrap", "broken", "clip"), lambda wrap, broken, clip: not broken or clip != "none" or sharded(wrap)),
    # goes on at stage 3, where norms are computed without a limit too
    (("wrap", "clip", "resume"), lambda *three: three != ("plain", "none", "saved elsewhere")),
    (("wrap", "change"), lambda wrap, change: change not in OURS or wrap not in ("ddp", "fsdp2")),
    # torch 2.13's FSDP2 looks for the gradient of a unit that has not run
    (
        ("wrap", "accumulate", "change"),
        lambda *three: three != ("fsdp2", "no_sync", "skipped"),
    ),
    (("where", "resume"), lambda where, resume: where in ("alone", "ranks") or not resume.startswith("saved")),
    (("where", "played"), lambda where, played: not played or where in ("alone", "threads")),
    # two passes of two slices each: gradients that leave a device are (a + b) + (c + d), others ((a + b) + c) + d
    (
        ("params", "micro", "accumulate", "played"),
        lambda params, *three: params == "device" or three != (2, "each", True),
    ),
    (
        ("tier", "schedule", "played"),
        lambda tier, schedule, played: not played or tier != "device" or schedule == "sync",
    ),
]


@dataclass(frozen=True)
class Program:
    """One row of the array."""

    wrap: str
    where: str
    params: str
    tier: str
    update: str | None
    schedule: str
    rule: str
    dtype: str
    state_format: str
    master_format: str | None
    clip: str
    accumulate: str
    keep: str | None
    micro: int
    resume: str
    change: str | None
    broken: bool
    scaled: bool
    played: bool
    publish: str | None

    def __str__(self) -> str:
        said = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return " ".join(f"{name}={value}".replace(" ", "-") for name, value in said if value not in (None, False))

    @property
    def trained(self) -> Trained:
        """As the loops of tests/optim name it."""
        formats = [("state_format", self.state_format), ("master_format", self.master_format)]
        formats += [("update", self.update)] * (self.update is not None)
        return Trained("plain", self.dtype, self.clip, name=self.rule, formats=tuple(formats), scaled=self.scaled)

    @property
    def expected(self) -> Program:
        """The program with the same numbers in which as little as possible happens.

        Rounding once more or in another order are numbers too: FSDP2's and zk.shard's mixed precision (where the two
        gradients of a tied weight are added in bf16 at stage 3 and in fp32 below), slices of the batch, what
        DDP sums again and zk.shard adds rank by rank to what was reduced before, fp16 that stage 0 divides before it
        is added, four ranks in two dimensions, and the norm of a chain, which is torch's where nothing is divided.
        """
        plain = {"params": "device", "tier": "device", "update": None, "schedule": "sync", "resume": "no"}
        wrap, keep = "plain", None
        if self.dtype == "fp16" or (self.wrap, self.accumulate) == ("ddp", "each"):
            wrap = self.wrap if self.wrap in ("ddp", "fsdp2") else wrap
        elif self.wrap == "fsdp2" and self.dtype == "mixed":
            wrap = "fsdp2"
        added = self.accumulate == "each" and self.where != "alone"
        added |= self.wrap == "stage 0" and self._divided_first
        added |= self.rule == "chained"
        if sharded(self.wrap) and (self.dtype == "mixed" or self.micro > 1 or added or self.where == "hybrid"):
            wrap = self.wrap
            keep = "device" if self.micro > 1 else None
        # where parameters are divided a norm is computed and looked at without a limit too
        clip = "never" if self.clip == "none" and divided(self.wrap) else self.clip
        return replace(self, wrap=wrap, keep=keep, clip=clip, played=False, publish=None, **plain)

    @property
    def _divided_first(self) -> bool:
        return self.dtype == "fp16" and self.where != "alone"

    @property
    def elsewhere(self) -> Program:
        """Where it goes on: on another tier, and at another stage where that has the same numbers."""
        tiers = FACTORS["tier"]
        tier = tiers[(tiers.index(self.tier) + 1) % len(tiers)]
        if self.played or self.rule == "chained" or self.expected.wrap != "plain" or self.wrap in ("ddp", "fsdp2"):
            return replace(self, tier="cpu" if self.tier == "nvme" else "nvme", update=None)
        stage = (int(self.wrap[-1]) + 1) % 4 if sharded(self.wrap) else 3
        stage = 1 if stage == 0 and self._divided_first else stage
        params = "device" if stage < 3 or delays_on_disk("nvme", self.schedule) else "nvme"
        publish = self.publish if stage in (1, 2) else None
        return replace(self, wrap=f"stage {stage}", params=params, tier=tier, publish=publish)


def programs(meet: int) -> list[Program]:
    return [Program(**row) for row in Array(FACTORS, RULES).rows(meet)]


class Net(nn.Module):
    """Three units of several records each, tied weights, a part that nobody uses, and a frozen parameter."""

    def __init__(self, inner: int = 403) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inner, WIDTH) for inner in (107, inner, 61))
        self.unused = nn.Linear(5, 5)
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight
        self.leave.bias.requires_grad_(False)
        self.skips = False  # the unit in the middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks[::2] if self.skips else self.blocks:
            x = block(x)
        return self.leave(x)


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def small_rings(patch: pytest.MonkeyPatch) -> None:
    """More records than slots, and no probe of the disk."""

    def open_store(*arguments: Any, **settings: Any) -> Store:
        return Store(*arguments, depth=8, block=1 << 16, **settings)

    patch.setattr(tiers, "Store", open_store)
    patch.setattr(tiers, "LEAST_RING", 1)
    patch.setattr(transit, "_LEAST", 8192)
    patch.setattr(transit, "_LEAST_OF_MATRICES", 3000)


def tier_of(name: str, folder: Path, ring: str = "32K") -> Any:
    if name != "nvme":
        return name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return zk.Nvme(folder, ring_nbytes=ring)


def in_files(folder: Path) -> int:
    """Bytes of this process's files there. They have no names, so that a crash leaves none."""
    nbytes = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of another thread, closed meanwhile
            if os.readlink(link).startswith(os.path.realpath(folder) + os.sep):
                nbytes += os.stat(link).st_size
    return nbytes


class Training:
    """A program on one rank: its model, the module that is called, its optimizer."""

    def __init__(self, world: World, program: Program, folder: Path, device: Any = None, seed: int = 0) -> None:
        self.world, self.program, self.folder = world, program, folder
        folder.mkdir(parents=True, exist_ok=True)  # the disk's tiers make what lies in it
        self.model = built(partial(Net, LONG) if program.rule in WHOLE else Net, seed).to(
            NARROW.get(program.dtype, torch.float32)
        )
        for param in self.model.parameters() if device is not None else ():
            device.own(param)
        self.called: Any = self._wrapped()
        trained = replace(program.trained, wrap="plain")
        state = folder / f"state-{world.rank}"
        self.optimizer: Any
        where = {"schedule": SCHEDULES[program.schedule]}
        if program.rule in WHOLE:
            limit = LIMITS[program.clip]
            of_muon = {"lr": 1e-2, "ns_dtype": "fp32", **where, **dict(trained.formats)}
            if program.rule == "muon":
                self.optimizer = zk.Muon(self._matrices(), tier=self._tier(state), max_grad_norm=limit, **of_muon)
            else:
                muon = zk.Muon(self._matrices(), tier=self._tier(state / "matrices"), **of_muon)
                rest = [param for param in self.model.parameters() if param.ndim < 2]
                adamw = zk.AdamW(rest, lr=1e-2, tier=self._tier(state / "rest"), **where, **dict(trained.formats))
                self.optimizer = zk.ChainedOptimizer([muon, adamw], max_grad_norm=limit)
        else:
            self.optimizer = optimizer_of(trained, self.model, tier=self._tier(state), **where)

    def _matrices(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if param.ndim >= 2]

    def _tier(self, folder: Path) -> Any:
        """Where state is. Records that Muon's matrices are cut into are as large as those of a disk in earnest."""
        program = self.program
        if program.tier != "split":
            return tier_of(program.tier, folder, "2M" if program.rule in WHOLE else "32K")
        rest = (
            "cpu" if program.update == "device" else tier_of("nvme", folder, "2M" if program.rule in WHOLE else "32K")
        )
        return ["device:1KiB", "cpu:2KiB", rest] if rest != "cpu" else ["device:1KiB", "cpu"]

    def _wrapped(self) -> Any:
        program, policy = self.program, self.program.trained._policy()
        if program.wrap == "fsdp2":
            fully_sharded(self.world, self.model, policy)
        elif program.wrap == "ddp":
            return nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
        elif sharded(program.wrap):
            places = {"tier": tier_of(program.params, self.folder / "params")}
            if program.publish is not None:
                places |= {"publish": program.publish}
            if program.keep is not None:
                places |= {"keep": tier_of(program.keep, self.folder / f"keep-{self.world.rank}")}
            settings = {"mp_policy": policy, "micro": program.micro, "bucket_bytes": 1024, **places}
            if program.rule in WHOLE and program.wrap in ("stage 1", "stage 2"):
                settings["whole"] = self._matrices()
            return self.world.shard(self.model, stage=int(program.wrap[-1]), **settings)
        return self.model

    def changes(self, what: str, step: int) -> bool:
        return self.program.change == what and step in CHANGED[what]

    def change(self, step: int, late: Late | None) -> None:
        """What the user does to the model before a step."""
        some = [self.model.blocks[1].up.weight, *self.model.blocks[2].parameters()]
        if self.program.change == "frozen":
            for param in some:
                param.requires_grad_(not self.changes("frozen", step))
        self.model.skips = self.changes("skipped", step)
        if self.changes("written", step):
            whole = zk.gathered(self.model, write=True) if sharded(self.program.wrap) else contextlib.nullcontext()
            with whole, torch.no_grad():
                some[0].mul_(0.5)
        for seen, ahead in [] if late is None else late.pairs:
            ahead.requires_grad_(seen.requires_grad)
            if seen is some[0] and self.changes("written", step):
                with torch.no_grad():
                    ahead.copy_(seen)  # an update that is pending is lost

    def gradients(self, step: int, scaler: Any) -> list[float]:
        """Of one step, by one backward or by two; the losses."""
        program, world = self.program, self.world
        passes = 1 if program.accumulate == "once" else 2
        factor = math.inf if program.broken and step == BROKEN else loss_scale(step) / passes
        losses, before = [], []
        for number in range(passes):
            apart = program.accumulate == "no_sync" and number == 0
            with self.no_sync(number == passes - 1) if program.accumulate == "no_sync" else contextlib.nullcontext():
                x, y = batch(passes * step + number, world.rank)
                out = self.called(x.to(NARROW.get(program.dtype, torch.float32)))
                loss = nn.functional.mse_loss(out.float(), y)
                weighted = loss * factor
                (weighted if scaler is None else scaler.scale(weighted)).backward()
            losses.append(loss.item())
            if program.wrap == "plain" and not apart:
                world.average_gradients(self.model.parameters())
                if program.accumulate == "each":
                    before.append([param.grad for param in self.model.parameters()])
                    self.model.zero_grad()
        if before:
            for param, *grads in zip(self.model.parameters(), *before, strict=True):
                param.grad = grads[0] if grads[0] is None else grads[0] + grads[1]
        if self.changes("edited", step):
            self.model.blocks[1].up.weight.grad.mul_(0.5)
        return losses

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager:
        if self.program.wrap == "fsdp2":
            self.model.set_requires_gradient_sync(last)
        elif self.program.wrap == "ddp" and not last:
            return self.called.no_sync()
        elif sharded(self.program.wrap) and not last:
            return zk.no_sync(self.model)
        return contextlib.nullcontext()

    def state(self) -> dict[str, dict[str, Any]]:
        """By the names of the parameters."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        numbered = [names[id(param)] for group in self.optimizer.param_groups for param in group["params"]]
        return {numbered[number]: entry for number, entry in self.optimizer.state_dict()["state"].items()}

    def uses_its_tiers(self) -> None:
        """From outside: what lies on disk is in files, in its size; what does not is in none."""
        program = self.program
        found = self.optimizer.statistics()
        nbytes = {key: sum(self.world.exchange(found[f"state_bytes/{key}"])) for key in ("device", "cpu", "disk")}
        some = ("nvme", "split") if program.update is None else ("nvme",)
        assert (nbytes["disk"] > 0) == (program.tier in some), found
        assert program.tier != "split" or nbytes["device"] + nbytes["cpu"] > 0, found
        assert in_files(self.folder / f"state-{self.world.rank}") >= found["state_bytes/disk"]
        if program.tier not in some:
            assert not (self.folder / f"state-{self.world.rank}").exists()
        if program.params == "nvme":
            numel = sum(param.numel() for param in self.model.parameters())
            assert in_files(self.folder / "params") >= numel * 2 // self.world.size


@dataclass
class Seen:
    losses: list[float]
    norms: list[float | None]
    skipped: int


def loop(
    training: Training, steps: range, seen: Seen, scaler: Any, late: Late | None = None, between: Any = None
) -> None:
    """The training loop of all programs; with `late` the one that is written out."""
    trained = replace(training.program.trained, wrap="plain")
    inner = training.optimizer if late is None else late.optimizer
    for step in steps:
        training.change(step, late)
        seen.losses += training.gradients(step, scaler)
        for group in inner.param_groups:
            group["lr"] = 1e-2 * (1 + step % 5) / 5
        work = (lambda one: one.step()) if scaler is None else scaled_step(trained, scaler, step)
        work(inner) if late is None else late.step(work)
        seen.norms.append(inner.grad_norm)
        training.model.zero_grad()
        if between is not None:
            between()
    seen.skipped = inner.skipped_steps


def scaler_of(program: Program) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) if program.scaled else None


def same(mine: Any, whole: Tensor, what: str) -> None:
    """This rank's part of a value, against the whole one that is expected."""
    if isinstance(mine, Sharded):
        mine, whole = mine.local, whole.local if isinstance(whole, Sharded) else mine.span_of(whole)
    elif isinstance(mine, DTensor):
        cut = torch.distributed.tensor.distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)
        mine, whole = mine.to_local(), cut.to_local()
    assert same_bits([mine.detach().reshape(-1)], [whole.detach().reshape(-1)]), f"{what} differs"


def full_of(model: nn.Module, wrap: str) -> dict[str, Tensor]:
    if sharded(wrap):
        return full(model)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@contextlib.contextmanager
def device_of(program: Program) -> Iterator[Any]:
    if not program.played:
        yield None
        return
    device = HostComputes(stretch=0.0003, poison=True)
    try:
        yield device
        device.synchronize()
    finally:
        device.close()


def follow(world: World, program: Program, folder: Path) -> None:
    """Trains the program and what is expected of it; both must have seen and made the same bits."""
    with one_thread(), device_of(program) as device:
        plain = Training(world, program.expected, folder / "expected")
        ahead = Training(world, program.expected, folder / "ahead")
        late = Late(
            plain.model.parameters(),
            ahead.model.parameters(),
            ahead.optimizer,
            exact_calls(SCHEDULES[program.schedule]),
        )
        expected, seen = Seen([], [], 0), Seen([], [], 0)
        loop(plain, range(STEPS), expected, scaler_of(program), late)

        ours = Training(world, program, folder / "ours", device)
        scaler, wait = scaler_of(program), None if device is None else device.synchronize
        first = STEPS if program.resume == "no" else SAVED_AFTER
        loop(ours, range(first), seen, scaler, between=wait)
        ours.uses_its_tiers()
        if program.resume != "no":
            ours, skipped = resumed(ours, folder, device), seen.skipped
            loop(ours, range(first, STEPS), seen, scaler, between=wait)
            ours.uses_its_tiers()
            seen.skipped += skipped if program.resume == "state_dict" else 0  # torch's format has no place for it
        assert seen.losses == expected.losses, f"losses {seen.losses}, expected {expected.losses}"
        # squares are added in float64 by rank and then over ranks: in that order everywhere but in what is not divided
        alike = program.wrap == ours.program.wrap == program.expected.wrap
        order = 0.0 if alike or world.size == 1 else 1e-15
        assert [norm is None for norm in seen.norms] == [norm is None for norm in expected.norms]
        for mine, theirs in zip(seen.norms, expected.norms, strict=True):
            assert mine is theirs or mine == pytest.approx(theirs, rel=order, abs=0.0, nan_ok=True)
        assert seen.skipped == expected.skipped == program.broken, (seen.skipped, expected.skipped)
        compare(ours, plain, ahead)


def compare(ours: Training, plain: Training, ahead: Training) -> None:
    """What is seen, the state, and what `flush()` publishes."""
    if ours.program.schedule == "overlap":
        ours.optimizer.flush()
    news = full_of(ahead.model, ahead.program.wrap)
    for name, value in zip(news, full_of(ours.model, ours.program.wrap).values(), strict=True):
        same(value, full_of(plain.model, plain.program.wrap)[name], f"parameter {name}")
    found, kept = ours.state(), ahead.state()
    assert found.keys() == kept.keys()
    for name, entry in found.items():
        wanted = kept[name]
        assert entry.keys() - {"pending"} == wanted.keys(), (name, entry.keys(), wanted.keys())
        for key, value in {"pending": news[name], **wanted}.items():
            if key in entry:
                same(entry[key], value, f"{key} of {name}")
    ours.optimizer.flush()
    for name, value in full_of(ours.model, ours.program.wrap).items():
        same(value, news[name], f"parameter {name} after flush()")


def resumed(old: Training, folder: Path, device: Any) -> Training:
    """A new training that goes on from what the old one has, of which nothing is left then."""
    how, program, world = old.program.resume, old.program, old.world
    if how == "saved elsewhere":
        program = program.elsewhere
    new = Training(world, program, folder / "again", device, seed=5)
    if how != "state_dict":
        zk.save(folder / "kept", old.model, old.optimizer)
        zk.load(folder / "kept", new.model, new.optimizer)
        return new
    weights = weights_of(old.model) if sharded(program.wrap) else old.model.state_dict()
    new.model.load_state_dict({name: value.detach().clone() for name, value in weights.items()})
    new.optimizer.load_state_dict(kept_of(old.optimizer))
    return new
