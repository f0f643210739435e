"""Parameters that rest on disk, by where their state is and when they are updated: the bits of parameters in memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import values
from optim_cases import same_bits
from tables import each
from torch import Tensor, nn
from worlds import World, built, on_threads, ranked

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.optim.binding import Binding
from zerokern.optim.compute import RowTable
from zerokern.optim.outside import WatchedState
from zerokern.optim.state import StateTier
from zerokern.optim.survey import Survey
from zerokern.zero.sharded import Sharded
from zerokern.zero.watch import Watch


class Model(nn.Module):
    """Blocks of three parameters: one is frozen, and another one takes no part in some steps."""

    def __init__(self, width: int = 24, count: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))
        self.aside = nn.Linear(width, width)
        self.leave = nn.Linear(width, 4)
        self.leave.bias.requires_grad_(False)

    def forward(self, x: Tensor, aside: bool = False) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(self.aside(x) if aside else x)


def model_of(dtype: str) -> Model:
    return built(Model, 1).to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype])


def batches(steps: int, rank: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3 + rank)
    for _ in range(steps):
        yield torch.randn(16, 8, generator=generator)


def step(model: nn.Module, opts: list[Any], x: Tensor, aside: bool = False) -> float:
    loss = model(x.to(model.enter.weight.dtype), aside).float().square().mean()
    loss.backward()
    for opt in opts:
        opt.step()
        opt.zero_grad()
    return loss.item()


def tier_of(state: str, folder: Path) -> Any:
    folder.parent.mkdir(exist_ok=True)
    return zk.Nvme(folder, ring_nbytes="1M") if state == "nvme" else state


def pair(folder: Path) -> Iterator[tuple[Model, Any]]:
    """A resident model and a resting one, with their optimizers."""
    for place in ("device", "nvme"):
        model = zk.shard(model_of("bf16"), stage=3, tier=tier_of(place, folder / "model"))
        yield model, zk.AdamW(model.parameters(), tier="cpu", lr=1e-3, schedule="overlap")


RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "remainder": (zk.AdamW, {"master_format": "split16", "lr": 1e-3}),
    "master": (zk.AdamW, {"master_format": "fp32", "lr": 1e-3}),
    "decay in the gradient": (zk.SGD, {"momentum": 0.9, "weight_decay": 0.1, "lr": 1e-3}),
}


@each("state", ["cpu", "nvme"])
@each("rule", RULES)
@each("how", ["in place", "gathered", "by a view", "of two optimizers"])
def test_writes_while_an_update_is_under_way_stay(how: str, rule: str, state: str, tmp_path: Path) -> None:
    """They wait for it, and masters begin from what was written."""
    ends = []
    for place in ("device", "nvme"):
        model = zk.shard(model_of("bf16"), stage=3, tier=tier_of(place, tmp_path / "model"))
        kind, settings = RULES[rule]
        where = {"tier": tier_of(state, tmp_path / place), "schedule": "overlap"}
        weight = model.blocks[1][0].weight
        mine = [weight] if how == "of two optimizers" else model.parameters()
        opt = kind(mine, **where, **settings)
        # another one of the same buckets
        rest = [param for param in model.parameters() if param is not weight] if how == "of two optimizers" else []
        opts = [opt, *([zk.SGD(rest, lr=1e-3, schedule="overlap")] if rest else [])]
        for number, x in enumerate(batches(5)):
            step(model, opts, x)
            if number == 2:
                with torch.no_grad(), zk.gathered(weight, write=True) if how == "gathered" else nullcontext():
                    (weight.local if how == "by a view" else weight).mul_(0.5)
        for one in opts:
            one.flush()
        entries = opt.state_dict()["state"].values()
        ends.append(
            values(model)
            + [
                value.local if isinstance(value, Sharded) else value
                for entry in entries
                for value in entry.values()
                if isinstance(value, Tensor)
            ]
        )
    assert same_bits(*ends)


def freeze_at_times(model: Model, opt: Any, number: int, seen: list[Any]) -> None:
    model.blocks[0][0].weight.requires_grad_(number not in (0, 1, 4))


def evaluate(model: Model, opt: Any, number: int, seen: list[Any]) -> None:
    with torch.no_grad():
        seen.append(model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().item())


def clip(model: Model, opt: Any, number: int, seen: list[Any]) -> None:
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    seen.append(float(zk.clip_grad_norm_(model.parameters(), 0.1)))


def load_what_was_just_saved(model: Model, opt: Any, number: int, seen: list[Any]) -> None:
    if number == 4:
        opt.load_state_dict(opt.state_dict())


@each("act", [freeze_at_times, evaluate, clip, load_what_was_just_saved])
def test_what_is_done_while_an_update_is_under_way(act: Callable[..., None], tmp_path: Path) -> None:
    ends = []
    for model, opt in pair(tmp_path):
        seen: list[Any] = []
        for number, x in enumerate(batches(6)):
            act(model, opt, number, seen)
            seen.append(step(model, [opt], x))
        opt.flush()
        ends.append((seen, values(model)))
    assert ends[0][0] == ends[1][0] and same_bits(ends[0][1], ends[1][1])


@each("schedules", [("overlap", "overlap"), ("sync", "overlap")])
def test_two_optimizers_whose_parameters_rest_together(schedules: tuple[Any, Any], tmp_path: Path) -> None:
    """What one writes does not undo what the other has written beside it."""
    ends = []
    for place in ("device", "nvme"):
        model = zk.shard(model_of("bf16"), stage=3, tier=tier_of(place, tmp_path))
        params = list(model.parameters())
        opts = [
            zk.AdamW(params[part::2], lr=1e-3, schedule=schedule, tier="cpu") for part, schedule in enumerate(schedules)
        ]
        losses = [step(model, opts, x) for x in batches(5)]
        for opt in opts:
            opt.flush()
        ends.append((losses, values(model)))
    assert ends[0][0] == ends[1][0] and same_bits(ends[0][1], ends[1][1])


REFUSED = (
    "schedule=Delayed(after=0): must be 'sync' or 'overlap' for parameters that rest on a disk. A delayed update would "
    "keep all of them there twice; 'overlap' hides updates as well, and zk.Delayed takes parameters in host memory "
    "(tier='cpu') with their state on the disk"
)


def at_once(model: nn.Module, folder: Path) -> None:
    zk.AdamW(model.parameters(), tier=zk.Nvme(folder), schedule=zk.Delayed())


def by_name(model: nn.Module, folder: Path) -> None:
    zk.SGD(model.named_parameters(), lr=0.1, schedule=zk.Delayed())


def of_matrices(model: nn.Module, folder: Path) -> None:
    rest = zk.AdamW([param for param in model.parameters() if param.ndim < 2], schedule="overlap")
    matrices = [param for param in model.parameters() if param.ndim == 2]
    zk.ChainedOptimizer([rest, zk.Muon(matrices, tier="cpu", schedule=zk.Delayed())])


def by_a_group_more(model: nn.Module, folder: Path) -> None:
    opt = zk.AdamW([nn.Parameter(torch.ones(2))], schedule=zk.Delayed())
    try:
        opt.add_param_group({"params": model.parameters()})
    finally:
        assert len(opt.param_groups) == 1


@each("act", [at_once, by_name, of_matrices, by_a_group_more])
@each("budgets", [[], ["cpu:4KiB"]])  # the second has room for the first parameters
def test_a_delay_is_refused(act: Callable[..., None], budgets: list[str], tmp_path: Path) -> None:
    """Before anything changes: an optimizer that has begun goes on."""
    model = zk.shard(model_of("bf16"), stage=3, tier=[*budgets, tier_of("nvme", tmp_path / "model")], bucket_bytes=2048)
    assert {memory.rest is None for memory in sharding_of(model).memories} == ({False, True} if budgets else {False})
    plain = zk.shard(model_of("bf16"), stage=3)
    opts = [zk.AdamW(one.parameters(), tier="cpu", schedule="overlap") for one in (plain, model)]
    for number, x in enumerate(batches(3)):
        for one, opt in zip((plain, model), opts, strict=True):
            step(one, [opt], x)
        if number == 1:
            with pytest.raises(ValueError, match=f"^{re.escape(REFUSED)}$"):
                act(model, tmp_path / "state")
            assert not (tmp_path / "state").exists()
    for opt in opts:
        opt.flush()
    assert same_bits(values(plain), values(model))


def test_a_delay_is_refused_by_the_step_of_an_optimizer_that_was_built_first(tmp_path: Path) -> None:
    model = model_of("bf16")
    opt = zk.AdamW(model.parameters(), schedule=zk.Delayed())
    zk.shard(model, stage=3, tier=zk.Nvme(tmp_path))
    before = values(model)
    for x in batches(2):
        with pytest.raises(ValueError, match=f"^{re.escape(REFUSED)}$"):
            step(model, [opt], x)
    assert same_bits(values(model), before) and not opt.state


@ranked
def refuse_alike(world: World, folder: Path, budgets: Sequence[str], refused: bool) -> None:
    tier = [budgets[world.rank], zk.Nvme(folder / "model")]
    model = world.shard(model_of("bf16"), stage=3, tier=tier, bucket_bytes=2048)
    rests = any(memory.rest is not None for memory in sharding_of(model).memories)
    assert rests == (budgets[world.rank] == "cpu:1KiB")
    with pytest.raises(ValueError, match="rest on a disk") if refused else nullcontext():
        opt = zk.AdamW(model.parameters(), tier=zk.Nvme(folder / f"state-{world.rank}"), schedule=zk.Delayed())
    if not refused:
        step(model, [opt], next(batches(1)))
        opt.flush()


@each("budgets, refused", [(("cpu:1GiB", "cpu:1KiB"), True), (("cpu:1GiB", "cpu:2GiB"), False)])
def test_ranks_refuse_alike_whatever_their_budgets(budgets: tuple[str, str], refused: bool, tmp_path: Path) -> None:
    on_threads(2, refuse_alike, tmp_path, budgets, refused)


class Stack(nn.Module):
    """Units of as many parameters each."""

    def __init__(self, width: int = 256, count: int = 40) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@each("schedule, formats, read, written", [
    ("sync", {}, 14, 12),
    ("overlap", {"state_format": "int8", "master_format": "split8"}, 7.0625, 5.0625),
])  # fmt: skip
def test_bytes_of_a_step(schedule: str, formats: dict[str, Any], read: float, written: float, tmp_path: Path) -> None:
    """What the update reads serves the forward too."""
    model = zk.shard(built(Stack, 1).to(torch.bfloat16), stage=3, tier=zk.Nvme(tmp_path / "model"))
    tier = zk.Nvme(tmp_path / "state", ring_nbytes="8M")
    opt = zk.AdamW(model.parameters(), tier=tier, schedule=schedule, **formats)
    places = [sharding_of(model).rests.tier, opt.holdings.disk.tier]
    numel = sum(param.numel() for param in model.parameters())
    x = torch.randn(4, 256, dtype=torch.bfloat16)

    def moved(steps: int) -> Tensor:
        for _ in range(steps):
            model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.flush()
        while not all(one.is_stored for one in sharding_of(model).rests.leaving):
            time.sleep(0.001)
        stats = [place.swap.stats() for place in places]
        return torch.tensor([[one["read_nbytes"], one["written_nbytes"]] for one in stats]).sum(0)

    before = moved(2)
    reads, writes = ((moved(3) - before) / 3 / numel).tolist()
    assert writes == pytest.approx(written, rel=0.01)
    assert reads <= read * 1.01
    # all of it may be on its way still when either pass needs it again: it is that small
    assert reads >= min(read, 14) - 2 * 2


class Noted:
    """What rests, and says what is done to it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda **_: self.said.append(f"{verb} {self.name}")


def test_what_was_fetched_for_a_turn_that_does_not_come_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is made turn by turn, of parameters that rest in a place of their own each."""
    said: list[str] = []
    params = [nn.Parameter(torch.ones(4)) for _ in "abcd"]
    for name, param in zip("abcd", params, strict=True):
        param.grad, param.zk_rest = torch.ones(4), Noted(name, said)
    opt = zk.SGD(params, lr=0.1)
    survey = Survey(opt.param_groups, opt._algorithm.layout)
    tier = StateTier(opt._algorithm, WatchedState(), [0.0])
    binding = Binding(survey, opt.param_groups, tier, RowTable(), previous=None, followed=Watch(()))
    binding.arrange([(place,) for place in range(4)], list("abcd"))
    binding.prepare([opt._algorithm.checked(group) for group in opt.param_groups], survey.gradient_pointers)
    run = binding.compute.table.run
    monkeypatch.setattr(binding.compute.table, "run", lambda *given: (said.append("update a"), run(*given)))
    binding.take_turn(0, 1.0)
    assert said == ["fetch a", "fetch b", "wait a", "change a", "update a", "leave a", "fetch c"], "b is on its way"
    binding.break_off()
    assert binding.torn and not binding.carried_out
    fetched, left = ([one[-1] for one in said if one.startswith(verb)] for verb in ("fetch", "leave"))
    assert fetched == ["a", "b", "c"] and sorted(left) == fetched
