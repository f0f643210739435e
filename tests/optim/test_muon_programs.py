"""zk.Muon on any ranks: the bits of one process, of matrices of every shape of which not all ranks have gradients.

Gradients are small whole numbers, whatever the parameters are: all sums of them are exact, in any order.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from offload_cases import SCHEDULES
from optim_cases import BF16, FP32, same_bits
from tables import each
from torch import Tensor, nn
from worlds import World, full, on_hybrid_threads, on_threads

import zerokern as zk
from zerokern.zero.sharded import Sharded

SHAPES = [
    ((16, 16), 1), ((12, 20), 1), ((1, 7), 1), ((24, 16), 3), ((0, 5), 1), ((40, 24), 1), ((7, 1), 1), ((2, 16, 8), 2),
    ((1, 1), 1), ((5, 0), 1), ((33, 9), 1), ((3, 11), 3), ((16, 16), 1), ((20, 12), 1), ((3, 3, 5), 3),
]  # fmt: skip
STEPS, SOURCES, LATE = 6, 4, 2  # LATE: the step from which the last group takes part
GROUPS: list[dict[str, Any]] = [
    {"lr": 0.02}, {"lr": 0.5, "momentum": 0.0, "nesterov": False, "ns_steps": 0, "weight_decay": 0.5},
    {"lr": 0.1, "ns_steps": 7, "adjust_lr_fn": "match_rms_adamw", "eps": 0.1},
]  # fmt: skip


class Part(nn.Module):
    """A unit: parameters whose gradients are the targets that it is given."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self, total: Tensor, targets: dict[str, Tensor]) -> Tensor:
        mine = [(param.float() * targets[name]).sum() for name, param in self.named_parameters() if name in targets]
        return total + sum(mine, torch.zeros(()))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, runs_all: bool) -> None:
        super().__init__()
        rng, self.runs_all = torch.Generator().manual_seed(0), runs_all  # at stage 3 all ranks run the same units
        made = {f"m{n}": torch.randn(shape, generator=rng).to(dtype) for n, (shape, _) in enumerate(SHAPES)}
        made["v"] = torch.randn(130, generator=rng)
        params = {name: nn.Parameter(value) for name, value in made.items()}
        self.parts = nn.ModuleList(Part(dict(list(params.items())[first : first + 4])) for first in range(0, 16, 4))

    def forward(self, targets: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), requires_grad=self.runs_all)
        for part in self.parts:
            total = part(total, targets) if self.runs_all or targets.keys() & dict(part.named_parameters()) else total
        return total


def target(number: int, step: int, source: int) -> Tensor | None:
    """Some are of rank 1, some nothing; some sources have none now and then, and some parameters none at first."""
    if (number % 3 == 1 and (number + step + source) % 2) or (number % 5 == 2 and step < number % 4):
        return None
    rng, shape = torch.Generator().manual_seed(1000 * number + 10 * step + source), [*SHAPES, ((130,), 1)][number][0]
    if number % 7 == 5:
        left, right = (torch.randint(-1, 2, (size,), generator=rng).float() for size in shape)
        return left[:, None] * right
    return torch.randint(-3, 4, shape, generator=rng).float() * (number % 7 != 6)


class Training:
    def __init__(self, world: World, stage: int | None, dtype: torch.dtype, formats: list[dict], **where: Any) -> None:
        self.world, self.model = world, Model(dtype, stage == 3 and world.size > 1)
        self.names = {name.rpartition(".")[2]: param for name, param in self.model.named_parameters()}
        groups: list[list[dict[str, Any]]] = [[], []]
        for owner, own in enumerate(groups):
            for number in range(owner, len(SHAPES), 2):
                param = {"params": [(f"m{number}", self.names[f"m{number}"])], "split": SHAPES[number][1]}
                own.append({**param, **GROUPS[number % 3]})
        if stage is not None:
            whole = [group for own in groups for group in own] if stage in (1, 2) else None
            world.shard(self.model, stage=stage, whole=whole, bucket_bytes=700, reduce="sum")
        self.late = groups[1].pop()
        self.opts: list[Any] = [zk.Muon(own, **how, **where) for own, how in zip(groups, formats, strict=True)]
        self.opts.append(zk.AdamW([("v", self.names["v"])], **where))

    def edit(self, step: int) -> None:
        """What users do between steps."""
        if step == LATE:
            self.opts[1].add_param_group(self.late)
        for opt in self.opts:
            if step in (2, 4):
                opt.flush()
            if step == 2:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            for group in opt.param_groups:
                group["lr"] = group["lr"] * 0.5 + 0.001
                if step == 3 and "nesterov" in group:
                    group.update({"momentum": 0.7, "nesterov": not group["nesterov"], "ns_steps": 3})
            for entry in opt.state.values() if step == 5 else ():
                if "momentum_buffer" in entry and entry["momentum_buffer"].dtype is not torch.int8:
                    entry["momentum_buffer"].mul_(0.5)
        if step == 4:
            with zk.gathered(self.model, write=True), torch.no_grad():
                for param in self.model.parameters():
                    param.mul_(0.5)

    def step(self, step: int) -> None:
        self.edit(step)
        targets: dict[str, Tensor] = {}
        for number, (name, param) in enumerate(self.names.items()):
            param.requires_grad_(number % 4 != 3 or step % 2 == 0 or name == "v")
            found = [target(number, step, source) for source in range(self.world.rank, SOURCES, self.world.size)]
            mine = [one for one in found if one is not None]
            targets |= {name: sum(mine, torch.zeros(()))} if mine else {}
        loss = self.model(targets)
        if loss.requires_grad:
            loss.backward()
        for opt in self.opts:
            opt.step()
        self.model.zero_grad()

    def train(self) -> Training:
        for step in range(STEPS):
            self.step(step)
        for opt in self.opts:
            opt.flush()
        return self


def follow(world: World, stage: int, theirs: Training, *how: Any, **where: Any) -> None:
    mine = Training(world, stage, *how, **where).train()
    expected = full(theirs.model)
    assert [name for name, value in full(mine.model).items() if not torch.equal(value, expected[name])] == []
    for opt, other in zip(mine.opts, theirs.opts, strict=True):
        states, others = opt.state_dict()["state"], other.state_dict()["state"]
        for number, entry in states.items():
            for key, value in entry.items():
                if key == "pending":  # what the parameter is, once it is flushed
                    continue
                whole = others[number][key]
                if isinstance(value, Sharded):
                    value, whole = value.local, value.span_of(whole)
                assert same_bits([value.reshape(-1)], [whole.reshape(-1)]), (number, key)


@each("size, replicas, stage, tier, schedule, dtype, formats", [
    (1, 1, 3, "cpu", "overlap", BF16, [{}, {"state_format": "bf16"}]),
    (2, 1, 0, "cpu", "delayed after 2", FP32, [{}, {"state_format": "bf16"}]),
    (3, 1, 1, "device", "overlap", BF16, [{"master_format": "fp32"}, {"master_format": "split8"}]),
    (4, 1, 2, "cpu", "overlap", BF16, [{"master_format": "none"}, {"state_format": "bf16"}]),
    (3, 1, 3, "device", "delayed", BF16, [{"ns_dtype": "fp32"}, {"master_format": "none", "stochastic_seed": 7}]),
    (4, 2, 3, "cpu", "overlap", FP32, [{"ns_dtype": "bf16"}, {"state_format": "bf16"}]),
    (4, 2, 1, "device", "sync", BF16, [{}, {"ns_dtype": "bf16"}]),
])  # fmt: skip
def test_any_ranks_have_the_bits_of_one_process(
    size: int, replicas: int, stage: int, tier: str, schedule: str, dtype: torch.dtype, formats: list[dict]
) -> None:
    theirs = Training(World(0, 1), 0, dtype, formats).train()
    where = {"tier": tier, "schedule": SCHEDULES[schedule]}

    def work(world: World) -> None:
        follow(world, stage, theirs, dtype, formats, **where)

    if replicas > 1:
        on_hybrid_threads(replicas, size // replicas, work, timeout=30)
    else:
        on_threads(size, work, timeout=30)
