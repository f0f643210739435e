"""Random programs with zk.Muon: a model, its groups, what users do between steps, and where each part of it runs.

Gradients are small whole numbers over a power of two, whatever the parameters are: all sums of them, and of their
squares, are exact. So any number of ranks, in any order, has to have the very bits of one process.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))

from worlds import World

import zerokern as zk
from zerokern.zero.sharded import Sharded

__all__ = ["Layout", "Program", "Training", "drawn"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Spec:
    """One parameter. `kind`: full, thin (a gradient of rank 1) or none. `absent`: (step, source) that leave it out.

    `frozen`: steps in which it is. `tied`: the parameter of an earlier block in its place. `whole`: it is for Muon.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: bool
    split: int = 1
    kind: str = "full"
    block: int = 0  # -1: the root's own
    tied: str = ""
    absent: frozenset[tuple[int, int]] = frozenset()
    frozen: frozenset[int] = frozenset()
    owner: int = 0  # which Muon, and which of its groups
    group: int = 0


@dataclass(frozen=True)
class Layout:
    """Where a part of a program runs, from a step on. `stage` None: plain parameters, one process."""

    size: int = 1
    stage: int | None = None
    tier: str = "device"
    schedule: Any = "sync"
    replicas: int = 1
    bucket_bytes: int = 1 << 12
    reduce: str = "sum"
    named: str = "groups"  # how whole= is told
    flush: bool = True  # before saving

    @property
    def delay(self) -> Any:
        return zk.Delayed(after=int(self.schedule[-1])) if self.schedule.startswith("delayed") else self.schedule


@dataclass(frozen=True)
class Program:
    seed: int
    params: tuple[Spec, ...]
    steps: int
    micro: int
    groups: tuple[dict[str, Any], ...]  # settings of each group of Muon
    formats: tuple[dict[str, Any], ...]  # of each Muon
    rest_formats: dict[str, Any]
    max_grad_norm: float | None
    clips: float | None  # by zk.clip_grad_norm_
    scaled: bool
    broken: frozenset[int]
    edits: dict[int, tuple[str, ...]]
    added: int | None  # the step from which the last group belongs to its optimizer
    sources: int  # of gradients, which ranks share
    layouts: tuple[tuple[int, Layout], ...] = ()

    def matrices(self, owner: int) -> list[Spec]:
        return [one for one in self.params if one.whole and not one.tied and one.owner == owner]


def drawn(seed: int, *, sizes: Sequence[int] = (1, 2, 3, 4)) -> Program:
    rng = random.Random(seed)
    steps, sources = rng.randint(4, 6), max(4, *sizes, 0)
    low = rng.choice(["fp32", "fp32", "bf16", "bf16", "fp16"])
    owners = rng.choice([1, 1, 1, 2])
    ngroups = rng.choice([1, 2, 3])
    params: list[Spec] = []
    for block in range(rng.randint(1, 4)):
        for number in range(rng.randint(1, 4)):
            params.append(_matrix(rng, f"m{block}_{number}", block, low, (steps, sources), owners, ngroups))
        if rng.random() < 0.6:
            params.append(Spec(f"v{block}", (rng.choice([1, 5, 130]),), rng.choice([low, "fp32"]), False, block=block))
        earlier = [one for one in params if one.block < block and one.whole and not one.tied]
        if earlier and rng.random() < 0.2:
            one = rng.choice(earlier)
            params.append(Spec(f"t{block}", one.shape, one.dtype, True, one.split, block=block, tied=one.name))
    if rng.random() < 0.7:
        params.append(Spec("head", (rng.choice([3, 16]), 12), low, False, block=-1))
    present = sorted({(one.owner, one.group) for one in params if one.whole and not one.tied})
    params = [_renumbered(one, present) for one in params]
    for owner in {one.owner for one in params if one.whole}:
        mine = [number for number, one in enumerate(params) if one.whole and not one.tied and one.owner == owner]
        if all(
            params[number].frozen for number in mine
        ):  # saved then with zk.Delayed, what was written is not followed
            params[mine[0]] = replace(params[mine[0]], frozen=frozenset())
    int8 = rng.random() < 0.25
    formats = []
    for owner in range(1 + max(one.owner for one in params if one.whole)):
        formats.append({
            "state_format": "int8" if int8 and _fits_int8(params, owner) else rng.choice(["fp32", "fp32", "bf16"]),
            **rng.choice([{}, {}, {"master_format": "fp32"}, *_masters(low)]),
        })  # fmt: skip
    clips = rng.choice([None, None, 0.05, 1e6])
    norm = None if clips else rng.choice([None, 0.05, 1e6])
    scaled = rng.random() < 0.2 and (low != "fp16" or clips is None)  # torch unscales no fp16
    measured = clips is None and (norm is not None or scaled)
    broken = {step for step in range(steps) if measured and rng.random() < 0.15}
    edits: dict[int, tuple[str, ...]] = {}
    for step in range(1, steps):
        some = [one for one in ("lr", "setting", "state", "write", "reload", "zero") if rng.random() < 0.12]
        edits[step] = tuple(some)
    added = rng.randint(1, steps - 1) if rng.random() < 0.2 and len(present) > len(formats) else None
    program = Program(
        seed, tuple(params), steps, rng.choice([1, 1, 2]), tuple(_settings(rng) for _ in range(ngroups)),
        tuple(formats), {}, norm, clips, scaled, frozenset(broken), edits, added, sources,
    )  # fmt: skip
    changes = sorted(rng.sample(range(1, steps), rng.choice([0, 1, 1, 2]))) if steps > 2 else []
    layouts = [_layout(rng, sizes) for _ in range(1 + len(changes))]
    if clips is not None:  # a clipped gradient is rounded where all of it is here, and not where ranks have parts of it
        layouts = [replace(one, stage=(one.stage or 1) if layouts[0].stage else 0) for one in layouts]
    return replace(program, layouts=tuple(zip([0, *changes], layouts, strict=True)))


def _matrix(
    rng: random.Random, name: str, block: int, low: str, sizes: tuple[int, int], owners: int, ngroups: int
) -> Spec:
    steps, sources = sizes
    split = 1
    shape: tuple[int, ...] = rng.choice(
        [(8, 8), (16, 16), (16, 16), (12, 20), (20, 12), (1, 7), (7, 1), (1, 1), (0, 5), (5, 0), (33, 9), (40, 24)]
    )
    if rng.random() < 0.25:
        split = rng.choice([2, 3])
        shape = rng.choice([(split * 8, 16), (split * 4, 32), (split, 16, 8), (split, 3, 5), (split, 11)])
    absent = set()
    if rng.random() < 0.2:
        absent = {(step, source) for step in range(steps) for source in range(sources) if rng.random() < 0.5}
    if rng.random() < 0.2:  # nobody's, for some steps
        absent |= {(step, source) for step in range(rng.randint(1, steps)) for source in range(sources)}
    frozen = {step for step in range(steps) if rng.random() < 0.4} if rng.random() < 0.15 else set()
    kind = rng.choice(["full", "full", "full", "thin", "none"])
    dtype = rng.choice([low, low, low, "fp32"])
    owner, group = rng.randrange(owners), rng.randrange(ngroups)
    return Spec(name, shape, dtype, True, split, kind, block, "", frozenset(absent), frozenset(frozen), owner, group)


def _renumbered(one: Spec, present: Sequence[tuple[int, int]]) -> Spec:
    """Owners from 0 on without gaps."""
    owners = sorted({owner for owner, _ in present})
    return one if one.tied or not one.whole else replace(one, owner=owners.index(one.owner))


def _fits_int8(params: Sequence[Spec], owner: int) -> bool:
    mine = [one for one in params if one.whole and one.owner == owner]
    return all(one.split == 1 or torch.Size(one.shape).numel() // one.split % 128 == 0 for one in mine)


def _masters(low: str) -> list[dict[str, Any]]:
    if low == "bf16":
        none = {"master_format": "none", "stochastic_seed": 7}
        return [{"master_format": "split16"}, {"master_format": "split8"}, {"master_format": "none"}, none]
    return [{"master_format": "none"}] if low == "fp16" else []


def _settings(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": rng.choice([0.02, 0.5, 0.0]),
        "weight_decay": rng.choice([0.0, 0.1, 0.5]),
        "momentum": rng.choice([0.95, 0.3, 0.0]),
        "nesterov": rng.random() < 0.6,
        "ns_steps": rng.choice([5, 5, 1, 0, 7]),
        "adjust_lr_fn": rng.choice([None, "original", "match_rms_adamw"]),
        "ns_dtype": rng.choice(["fp32", "fp32", "bf16", None]),
        "eps": rng.choice([1e-7, 0.1]),
    }


def _layout(rng: random.Random, sizes: Sequence[int]) -> Layout:
    size = rng.choice(sizes)
    stage = rng.choice([0, 1, 2, 3, 3]) if size > 1 else rng.choice([None, 0, 1, 2, 3])
    return Layout(
        size,
        stage,
        rng.choice(["device", "cpu"]),
        rng.choice(["sync", "overlap", "overlap", "delayed 0", "delayed 2"]),
        rng.choice([1, 2]) if stage is not None and size % 2 == 0 else 1,
        rng.choice([1, 700, 1 << 12, 1 << 20]),
        "sum" if size == 3 else rng.choice(["sum", "mean"]),
        rng.choice(["groups", "params", "patterns"]),
        rng.random() < 0.7,
    )


class Part(nn.Module):
    """A unit: parameters whose gradients are the targets that it is given."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self, total: Tensor, targets: Sequence[tuple[str, Tensor]]) -> Tensor:
        return total + sum(((getattr(self, name).float() * target).sum() for name, target in targets), torch.zeros(()))


class Model(nn.Module):
    runs_all = False  # units of which this rank has no gradient too: at stage 3 all ranks run the same ones

    def __init__(self, program: Program) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(program.seed)
        made: dict[str, nn.Parameter] = {}
        for one in program.params:
            if one.tied:
                made[one.name] = made[one.tied]
            else:
                value = torch.randn(one.shape, generator=generator)
                made[one.name] = nn.Parameter(value.to(DTYPES[one.dtype]))
        blocks = sorted({one.block for one in program.params} - {-1})
        named = [{one.name: made[one.name] for one in program.params if one.block == block} for block in blocks]
        self.blocks = nn.ModuleList(Part(some) for some in named)
        self.root = Part({one.name: made[one.name] for one in program.params if one.block == -1})
        self.where = {one.name: blocks.index(one.block) for one in program.params if one.block >= 0}

    def forward(self, targets: Sequence[tuple[str, Tensor]]) -> Tensor:
        total = torch.zeros((), requires_grad=self.runs_all)
        for number, block in enumerate(self.blocks):
            mine = [one for one in targets if self.where.get(one[0]) == number]
            total = block(total, mine) if mine or self.runs_all else total
        mine = [one for one in targets if one[0] not in self.where]
        return self.root(total, mine) if mine or self.runs_all else total

    def param(self, name: str) -> nn.Parameter:
        if name not in self.where:
            return self.root.get_parameter(name)
        return self.blocks[self.where[name]].get_parameter(name)


def target(program: Program, number: int, step: int, micro: int, source: int) -> Tensor:
    one = program.params[number]
    generator = torch.Generator().manual_seed(hash((program.seed, number, step, micro, source)) % 2**31)

    def whole_numbers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    if one.kind == "none":
        return torch.zeros(one.shape)
    if one.kind == "thin" and len(one.shape) == 2:
        left, right = (torch.randint(-1, 2, (size,), generator=generator).float() for size in one.shape)
        return left[:, None] * right / program.sources
    return whole_numbers(*one.shape) / program.sources


class Training:
    """A part of a program on one rank, or in one process where `world` is None: model, optimizers, what is done."""

    def __init__(self, program: Program, world: World | None, layout: Layout, begin: int = 0) -> None:
        self.program, self.world, self.layout = program, world, layout
        self.model = Model(program)
        where = {"tier": layout.tier, "schedule": layout.delay, "max_grad_norm": program.max_grad_norm}
        self.rank, self.size = (0, 1) if world is None else (world.rank, world.size)
        if world is not None and layout.stage is not None:
            whole = self._whole() if layout.stage in (1, 2) else None
            self.model.runs_all = layout.stage == 3 and layout.size > 1
            settings = {"bucket_bytes": layout.bucket_bytes, "reduce": layout.reduce}
            world.shard(self.model, stage=layout.stage, whole=whole, **settings)
        self.muons: list[zk.Muon] = []
        self.late: list[tuple[int, dict[str, Any]]] = []
        for owner, formats in enumerate(program.formats):
            groups = self.groups_of(owner)
            if program.added is not None and len(groups) > 1 and begin <= program.added:
                self.late.append((owner, groups.pop()))
            self.muons.append(zk.Muon(groups, **formats, **where))
        rest = [(one.name, self.model.param(one.name)) for one in program.params if not one.whole]
        self.opts: list[Any] = [*self.muons, *([zk.AdamW(rest, lr=1e-2, **where)] if rest else [])]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if program.scaled else None
        self.watch: Callable[[Any], AbstractContextManager[None]] = nullcontext  # around an optimizer's step

    def groups_of(self, owner: int) -> list[dict[str, Any]]:
        groups = []
        mine = self.program.matrices(owner)
        for number, settings in enumerate(self.program.groups):
            for split in sorted({one.split for one in mine}):
                some = [one for one in mine if one.group == number and one.split == split]
                if some:
                    params = [(one.name, self.model.param(one.name)) for one in some]
                    groups.append({"params": params, "split": split, **settings})
        return groups

    def _whole(self) -> Any:
        named = self.layout.named
        groups = [group for owner in range(len(self.program.formats)) for group in self.groups_of(owner)]
        params = [param for group in groups for _, param in group["params"]]
        if named == "groups":
            return groups
        names = {id(param): name for name, param in self.model.named_parameters()}
        return params if named == "params" else [names[id(param)] for param in params]

    def _freeze(self, step: int) -> None:
        for one in self.program.params:
            if not one.tied:
                self.model.param(one.name).requires_grad_(step not in one.frozen)

    def sources(self) -> list[int]:
        return list(range(self.rank, self.program.sources, self.size))

    def targets(self, step: int, micro: int, factor: float) -> list[tuple[str, Tensor]]:
        program, found = self.program, []
        for number, one in enumerate(program.params):
            mine = [source for source in self.sources() if (step, source) not in one.absent]
            if mine:
                total = sum(target(program, number, step, micro, source) for source in mine)
                if step in program.broken and number == step % len(program.params) and micro == 0 and mine[0] == 0:
                    total = total * float("inf")
                found.append((one.name, total * factor))
        return found

    def backward(self, step: int) -> None:
        program = self.program
        factor = self.size if self.layout.reduce == "mean" and self.layout.stage is not None else 1
        for micro in range(program.micro):
            once = step % 2 == 0 or (self.size == 3 and self.layout.stage == 0)  # where a third of a sum is rounded
            holds = self.layout.stage is not None and once and micro < program.micro - 1
            with zk.no_sync(self.model) if holds else nullcontext():
                loss = self.model(self.targets(step, micro, factor))
                loss = loss if self.scaler is None else self.scaler.scale(loss)
                if loss.requires_grad:
                    loss.backward()

    def step(self, step: int) -> None:
        self.written = "write" in self.program.edits.get(step, ())
        self.edit(step)
        self._freeze(step)
        self.backward(step)
        if self.program.clips is not None and self.scaler is not None:
            for opt in self.opts:
                self.scaler.unscale_(opt)
        if self.program.clips is not None:
            zk.clip_grad_norm_(self.model, self.program.clips)
        for opt in self.opts:
            with self.watch(opt):
                opt.step() if self.scaler is None else self.scaler.step(opt)
        if self.scaler is not None:
            self.scaler.update()
        if "zero" in self.program.edits.get(step, ()):
            for opt in self.opts:
                opt.zero_grad()
        self.model.zero_grad()

    def edit(self, step: int) -> None:
        program = self.program
        if program.added == step:
            for owner, group in self.late:
                self.muons[owner].add_param_group(group)
            self.late = []
        for edit in program.edits.get(step, ()):
            getattr(self, f"_edit_{edit}")(step)

    def _edit_zero(self, step: int) -> None:
        """Handled where gradients are dropped."""

    def _edit_lr(self, step: int) -> None:
        for group in (group for opt in self.opts for group in opt.param_groups):
            group["lr"] = group["lr"] * 0.5 + 0.001

    def _edit_setting(self, step: int) -> None:
        for group in (group for opt in self.muons for group in opt.param_groups):
            group.update({"momentum": 0.7, "nesterov": not group["nesterov"], "ns_steps": 3, "weight_decay": 0.2})

    def _edit_state(self, step: int) -> None:
        for opt in self.muons:
            for entry in opt.state.values():
                buffer = entry.get("momentum_buffer")
                if buffer is not None and buffer.dtype is not torch.int8:
                    buffer.mul_(0.5)

    def _edit_write(self, step: int) -> None:
        self.flush()  # else what is pending is dropped, with a warning
        within = zk.gathered(self.model, write=True) if self.layout.stage is not None else nullcontext()
        with within, torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.5)

    def _edit_reload(self, step: int) -> None:
        """A state_dict goes out and in; where nothing is shared between ranks, optimizers are copied with the model."""
        for opt in self.opts:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        if self.layout.stage is None:
            self.flush()
            both = self.model, self.muons, self.opts[len(self.muons) :], self.late
            both = copy.deepcopy(both) if step % 2 else pickle.loads(pickle.dumps(both))
            self.model, self.muons, rest, self.late = both
            self.opts = [*self.muons, *rest]

    def flush(self) -> None:
        for opt in self.opts:
            opt.flush()

    def extra(self) -> dict[str, Any]:
        return {} if self.scaler is None else {"scaler": self.scaler}

    def values(self) -> dict[str, Tensor]:
        """All parameters and state, whole. The caller has flushed."""
        with nullcontext() if self.layout.stage is None else zk.gathered(self.model):
            found = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        for number, opt in enumerate(self.opts):
            names = [name for group in opt.param_groups for name in group["param_names"]]
            for place, entry in opt.state_dict()["state"].items():
                for key, value in entry.items():
                    if key == "pending":  # what the parameter is once it is flushed
                        continue
                    whole = self._gathered(value) if isinstance(value, Sharded) else torch.as_tensor(value)
                    found[f"{number}.{names[place]}.{key}"] = whole.clone()
        return found

    def _gathered(self, value: Sharded) -> Tensor:
        whole = torch.full([value.numel()], 99, dtype=value.dtype)
        for start, mine in self.world.exchange((value.start, value.local.tolist())):
            whole[start : start + len(mine)] = torch.tensor(mine, dtype=value.dtype)
        return whole.view(value.shape)
