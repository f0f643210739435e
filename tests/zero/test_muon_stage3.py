"""zk.Muon at stage 3, where ranks have parts of matrices: the bits of ranks that all have all, and what is sent."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from wire_cases import written
from worlds import (
    World,
    built,
    everywhere,
    full,
    on_ranks,
    ranked,
    refusal,
    says,
    step_and_zero,
)

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.kernels import gram
from zerokern.kernels.orthogonal import workspace_numel
from zerokern.optim.rounds import together
from zerokern.zero.shard import shard_of

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"state_format": "int8"},
    "multiplied in bf16": {"ns_dtype": "bf16"},
    "by the Gram matrix": {"ns_form": "gram"},  # of any size: see the fixture
    "bf16 parameters": {"dtype": torch.bfloat16},
    "bf16 parameters, bf16 average": {"dtype": torch.bfloat16, "state_format": "bf16", "ns_dtype": "bf16"},
}
WIDTH = 32


@pytest.fixture(autouse=True)
def small_matrices_go_by_gram_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_SHORT", "_LEAST_ASPECT", "_LEAST_LONG", "_LEAST_NUMEL"):  # for all ranks, which are threads
        monkeypatch.setattr(gram, name, 1)


class Block(nn.Module):
    """One wide matrix, one fused of three, one stack, one with fewer rows than ranks, and a bias; three and four ranks
    cut the stack and the fused one within the matrices that they consist of."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=dtype)
        self.stack = nn.Parameter(torch.randn(4, WIDTH, 16, dtype=dtype) / 8)
        self.flat = nn.Linear(WIDTH, 2, bias=False, dtype=dtype)
        self.some = nn.Parameter(torch.randn(8, WIDTH, dtype=dtype) / 8)
        self.leaves_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        experts = torch.einsum("bi,eij->bej", x, self.stack).relu().flatten(1)[:, :WIDTH]
        x = x if self.leaves_out else x + torch.nn.functional.linear(x, self.some).sum(-1, keepdim=True)
        return x + q * k.sigmoid() + v + self.up(x)[:, :WIDTH].relu() + experts + self.flat(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


SPLIT = {"*.qkv.weight": 3, "*.stack": 4}


def optimizers(model: nn.Module, **settings: Any) -> tuple[zk.Muon, zk.AdamW]:
    of_muon = {name: settings.pop(name) for name in ("state_format", "ns_dtype", "ns_form") if name in settings}
    matrices, rest = zk.muon_groups(model, split=SPLIT)
    return zk.Muon(matrices, lr=0.02, **of_muon, **settings), zk.AdamW(rest, lr=1e-2, **settings)


def train(world: World, model: nn.Module, opts: Any, steps: range, dtype: torch.dtype = torch.float32) -> None:
    """Steps of two passes each, of which rank 0 leaves one parameter out; the second step is skipped."""
    for block in model.blocks:
        block.leaves_out = world.rank == 0
    for step in steps:
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + world.rank)
            x = torch.randn(4, 8, generator=generator).to(dtype)
            with zk.no_sync(model) if part == 0 else contextlib.nullcontext():  # else stages add up in other orders
                loss = model(x).float().square().mean()
                (loss * (float("inf") if step == 1 else 1.0)).backward()
        zk.clip_grad_norm_(model, 1e9)  # whose last bit depends on where matrices are cut; this clips nothing
        for opt in opts:
            opt.step()
            opt.zero_grad()
    for opt in opts:
        opt.flush()


def trained(
    world: World, stage: int, tier: str, schedule: Any, dtype: torch.dtype = torch.float32, **formats: Any
) -> dict[str, torch.Tensor]:
    model = built(lambda: Model(dtype))
    whole = zk.muon_groups(model, split=SPLIT)[0] if stage in (1, 2) else None
    world.shard(model, stage=stage, whole=whole)
    opts = optimizers(model, tier=tier, schedule=schedule, **formats)
    train(world, model, opts, range(4), dtype)
    return full(model)


@everywhere(2, 3, 4, kept=["fp32", "bf16 parameters, bf16 average", "by the Gram matrix"])
def test_ranks_that_have_parts_of_matrices_have_the_bits_of_ranks_that_have_all(world: World, kept: str) -> None:
    """Tiers and schedules are those of tests/whole; here are stacks, fused matrices and any number of ranks."""
    mine = trained(world, 3, "device", "sync", **FORMATS[kept])
    # stage 0 divides by the number of ranks before it rounds to bf16, the others after
    other = 0 if world.size != 3 or "dtype" not in FORMATS[kept] else 2
    theirs = trained(world, other, "device", "sync", **FORMATS[kept])
    assert all(value.isfinite().all() for value in mine.values())
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@everywhere(2)
def test_a_rank_that_lacks_a_gradient_is_refused_on_all_ranks(world: World) -> None:
    """Of those that zk.shard has reduced one is dropped by hand, on one rank: the others would wait for its part."""
    model = world.shard(built(Model), stage=3)
    opt = optimizers(model)[0]
    model(torch.ones(2, 8)).square().mean().backward()
    before = full(model)
    kept = model.blocks[0].flat.weight.grad
    if world.rank == 1:
        model.blocks[0].flat.weight.grad = None
    says(
        refusal(opt.step, StateError),
        ["without a gradient of param_groups[0] is none", "is blocks.0.flat.weight"],
    )
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())
    model.blocks[0].flat.weight.grad = kept
    opt.step()


@pytest.mark.slow
@everywhere(2, schedule=["sync", "overlap", "delayed"])
def test_two_of_them_over_one_model_take_turns(world: World, schedule: str) -> None:
    when = zk.Delayed(after=1) if schedule == "delayed" else schedule
    results = []
    for stage in (3, 0):
        model = world.shard(built(Model), stage=stage)
        wide = [block.up.weight for block in model.blocks]
        others = [one for block in model.blocks for one in (block.qkv.weight, block.flat.weight)]
        opts: list[Any] = [zk.Muon(some, lr=0.02, schedule=when) for some in (wide, others)]
        known = {id(param) for param in (*wide, *others)}
        opts.append(zk.AdamW([param for param in model.parameters() if id(param) not in known], schedule=when))
        train(world, model, opts, range(1))
        table = opts[0].holdings.binding.compute.table
        if world.rank == 0:  # where the second one would be first
            table.run = partial(late, table.run)
        train(world, model, opts, range(1, 4))
        results.append(full(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def late(run: Any, *arguments: Any) -> None:
    time.sleep(0.2)
    run(*arguments)


def test_all_groups_that_exchange_are_told_of_a_failure() -> None:
    """One that a group itself has told of is not told again."""
    groups = [mock.Mock(), mock.Mock()]
    with pytest.raises(RuntimeError, match="no such matrix"), together(groups):
        raise RuntimeError("no such matrix")
    with pytest.raises(zk.CommError), together(groups):
        raise zk.CommError("a rank is gone")
    for group in groups:
        group.fail.assert_called_once_with("opt.step failed here: no such matrix")


@everywhere(2, schedule=["sync", "overlap"])
def test_a_rank_that_fails_ends_the_step_on_all(world: World, schedule: str) -> None:
    model = world.shard(built(Model), stage=3)
    opt = optimizers(model, schedule=schedule)[0]
    train(world, model, [opt], range(1))
    with contextlib.ExitStack() as stack:
        if world.rank == 1:
            table = opt.holdings.binding.compute.table
            stack.enter_context(mock.patch.object(table, "_orthogonalize", side_effect=RuntimeError("no such matrix")))
        model(torch.ones(2, 8)).square().mean().backward()

        def step() -> None:
            opt.step()
            opt.flush()

        says(refusal(step, (RuntimeError, zk.CommError)), ["no such matrix"])
    says(refusal(opt.step, (StateError, zk.CommError)), ["load a checkpoint"])


OTHERS: dict[str, tuple[Any, list[str]]] = {
    "settings": (
        lambda matrices, rank: zk.Muon(matrices, ns_coefficients=(3.0, -4.0, 1.0 + rank)),
        ["ns_coefficients"],
    ),
    # of equal sizes, which would be mixed
    "matrices": (lambda matrices, rank: zk.Muon([matrices[rank]]), ["param_groups[0] lacks blocks.1.qkv.weight"]),
    # which make rounds of other matrices
    "schedules": (
        lambda matrices, rank: zk.Muon(matrices, schedule="overlap" if rank else "sync"),
        ["schedule is overlap"],
    ),
}


@everywhere(2, other=OTHERS)
def test_ranks_that_ask_for_something_else_are_told_so(world: World, other: str) -> None:
    make, words = OTHERS[other]
    model = world.shard(built(Model), stage=3)
    opt = make([block.qkv.weight for block in model.blocks], world.rank)
    model(torch.ones(2, 8)).square().mean().backward()
    says(refusal(opt.step, StateError), [*words, "not so on others"])


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512 * (1 + number), bias=False) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)[:, :512]
        return x


@ranked
def exchanged(world: World, ns_dtype: str) -> tuple[int, int, int]:
    """Bytes that this rank sends in a step of Muon beyond those of SGD, what its group counts, and all elements."""
    sent = []
    for make in (zk.SGD, partial(zk.Muon, ns_dtype=ns_dtype, ns_steps=1)):
        model = world.shard(built(Wide), stage=3)
        opt = make(model.parameters(), lr=0.01)
        for _ in range(2):
            group = shard_of(model.blocks[0].weight).gradients.group
            before, counted = written(), group.traffic.total("other")
            model(torch.ones(2, 512)).square().mean().backward()
            step_and_zero(opt)
        sent.append((written() - before, group.traffic.total("other") - counted))
    return sent[1][0] - sent[0][0], sent[1][1] - sent[0][1], sum(param.numel() for param in built(Wide).parameters())


def test_two_bytes_per_element_are_sent_each_way() -> None:
    for ns_dtype, each in (("bf16", 2), ("fp32", 4)):
        found = on_ranks(2, exchanged, ns_dtype)
        measured, counted, numel = sum(one[0] for one in found), sum(one[1] for one in found), found[0][2]
        assert counted <= 2 * each * numel / 2, "of each matrix half is on its owner already"
        assert abs(measured / counted - 1) < 0.01
        assert counted > 0.9 * each * numel


@ranked
def resumed(world: World, folder: str, number: int, stage: int) -> dict[str, torch.Tensor]:
    """Trains a step from what was saved before, on the same data on all ranks, and saves again."""
    model = built(Model)
    whole = zk.muon_groups(model, split=SPLIT)[0] if stage in (1, 2) else None
    world.shard(model, stage=stage, whole=whole)
    muon, rest = optimizers(model)
    if number:
        zk.load(f"{folder}/{number - 1}", model, [muon, rest])
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    step_and_zero(muon, rest)
    zk.save(f"{folder}/{number}", model, [muon, rest])
    return full(model)


@pytest.mark.slow
def test_state_goes_from_any_stage_and_number_of_ranks_to_stage_3_and_back(tmp_path: Path) -> None:
    straight, moved = str(tmp_path / "straight"), str(tmp_path / "moved")
    legs = [(1, 0), (2, 3), (4, 3), (2, 1), (4, 3), (1, 3)]
    for number, (size, stage) in enumerate(legs):
        found = on_ranks(size, resumed, moved, number, stage)[0]
    for number in range(len(legs)):
        wanted = resumed(World(0, 1), straight, number, 0)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


class Five(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(383, 250) / 16 for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(
            (torch.nn.functional.linear(x[:, :250], weight)[:, :256] for weight in self.weights), torch.zeros(())
        )


class Many(nn.Module):
    """Two units of five equal matrices each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Five() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def steps_of_many(world: World, schedule: str, ns_dtype: str) -> tuple[zk.Muon, Any]:
    model = world.shard(built(Many), stage=3)
    opt = zk.Muon(model.parameters(), lr=0.01, schedule=schedule, ns_dtype=ns_dtype)

    def step() -> None:
        model(torch.ones(2, 256)).square().mean().backward()
        step_and_zero(opt)
        opt.flush()

    for _ in range(2):
        step()
    return opt, step


@everywhere(2, 3, schedule=["sync", "overlap"])
def test_the_next_round_is_on_its_way_while_one_is_orthogonalized(world: World, schedule: str) -> None:
    """Collectives begin in the order of the rounds, also on ranks that have no matrix of the last one."""
    opt, step = steps_of_many(world, schedule, "fp32")
    said: list[str] = []
    table, group = opt.holdings.binding.compute.table, shard_of(opt.param_groups[0]["params"][0]).gradients.group
    exchange, orthogonalize = group.all_to_all, table._orthogonalize

    def begins(*given: Any) -> Any:
        said.append("begins")
        handle, number = exchange(*given), said.count("begins")
        return mock.Mock(wait=lambda: (handle.wait(), said.append(f"{number} ended")))

    def iterates(*given: Any) -> None:
        said.append("iterates")
        orthogonalize(*given)
        said.append("iterated")

    with mock.patch.object(group, "all_to_all", begins), mock.patch.object(table, "_orthogonalize", iterates):
        step()
    expected: list[str] = []
    begun = 0
    for matrices in (10,) if schedule == "sync" else (5, 5):
        rounds = -(-matrices // world.size)
        there, back = {0: begun + 1}, {}
        expected += ["begins", f"{there[0]} ended"]
        begun += 1
        for number in range(rounds):
            has_one = number * world.size + world.rank < matrices
            expected += ["iterates"] * has_one
            expected += [f"{back[number - 1]} ended"] if number else []
            if number + 1 < rounds:
                there[number + 1] = begun = begun + 1
                expected += ["begins"]
            expected += ["iterated"] * has_one + ["begins"]
            back[number] = begun = begun + 1
            expected += [f"{there.get(number + 1, begun)} ended"]
    assert said == expected


@ranked
def fails_under_way(world: World, schedule: str, when: str) -> None:
    """One rank fails in its second iteration, while the rounds beside that are on their way."""
    opt, step = steps_of_many(world, schedule, "fp32")
    table = opt.holdings.binding.compute.table
    orthogonalize, calls = table._orthogonalize, []

    def fails(row: int, matrix: torch.Tensor, sums: torch.Tensor, halfway: Any) -> None:
        def breaks() -> None:
            if when == "after the next one sets off":
                halfway()
            raise RuntimeError("no such matrix")

        calls.append(row)
        orthogonalize(row, matrix, sums, halfway if len(calls) == 1 else breaks)

    with mock.patch.object(table, "_orthogonalize", fails if world.rank == 1 else orthogonalize):
        says(refusal(step, (RuntimeError, zk.CommError)), ["no such matrix"])
    says(refusal(opt.step, (StateError, zk.CommError)), ["load a checkpoint"])


@everywhere(2, 3, schedule=["sync", "overlap"], when=["before", "after the next one sets off"])
def test_a_rank_that_fails_with_rounds_on_their_way_ends_the_step_on_all(
    world: World, schedule: str, when: str
) -> None:
    fails_under_way(world, schedule, when)


def test_real_ranks_end_it_too() -> None:
    on_ranks(2, fails_under_way, "sync", "after the next one sets off")


@everywhere(2, 3, schedule=["sync", "overlap"], ns_dtype=["fp32", "bf16"])
def test_two_rounds_are_in_memory_as_planned(world: World, schedule: str, ns_dtype: str) -> None:
    opt, step = steps_of_many(world, schedule, ns_dtype)
    table, held = opt.holdings.binding.compute.table, []
    orthogonalize = table._orthogonalize

    def watched(row: int, matrix: torch.Tensor, *others: Any) -> None:
        lent = table.spare._memory.nbytes + table.spare._sums.nbytes
        held.append(lent + workspace_numel(matrix) * matrix.itemsize)
        orthogonalize(row, matrix, *others)

    with mock.patch.object(table, "_orthogonalize", watched):
        step()
    plan = zk.plan(
        built(Many), world=world.size, stage=3, optimizer="muon", schedule=schedule, ns_dtype=ns_dtype, device="cpu"
    )
    assert max(world.exchange(max(held))) == plan.muon.workspace


@everywhere(2, 3, ns_dtype=["fp32", "bf16"])
def test_squares_are_summed_in_chunks_of_the_whole_matrix(world: World, ns_dtype: str) -> None:
    """Of matrices with several chunks of 65,536 elements, and cuts within them."""
    results = []
    for stage in (3, 0):
        model = world.shard(built(Wide), stage=stage)
        opt = zk.Muon(model.parameters(), lr=0.02, ns_dtype=ns_dtype, ns_steps=1)
        cuts = [shard_of(block.weight).piece.numel() % 65536 for block in model.blocks]
        assert stage == 0 or world.size == 2 or any(cuts)
        model(torch.randn(2, 512, generator=torch.Generator().manual_seed(world.rank))).square().mean().backward()
        step_and_zero(opt)
        results.append(full(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@everywhere(2, where=["memory", "prepare"], schedule=["sync", "overlap", "delayed"])
def test_a_rank_that_fails_before_it_has_met_others_ends_the_step_on_all(
    world: World, where: str, schedule: str
) -> None:
    model = world.shard(built(Model), stage=3)
    opt = optimizers(model, schedule=zk.Delayed(after=1) if schedule == "delayed" else schedule)[0]
    train(world, model, [opt], range(1))
    with contextlib.ExitStack() as stack:
        if world.rank == 1:
            binding = opt.holdings.binding
            place = (binding.compute.table.spare, "_grown") if where == "memory" else (binding, "prepare")
            stack.enter_context(mock.patch.object(*place, side_effect=MemoryError("no room")))
        model(torch.ones(2, 8)).square().mean().backward()

        def step() -> None:
            opt.step()
            opt.flush()

        says(refusal(step, (MemoryError, zk.CommError)), ["no room"])  # else others wait until their time is over


@everywhere(3)
def test_ranks_may_list_parameters_in_any_order(world: World) -> None:
    """Each matrix is orthogonalized as its group says, whoever has what of it, and whatever else is in its round."""
    results = []
    for stage, turns in ((3, 0), (3, world.rank), (0, 0)):
        model = world.shard(built(Model), stage=stage)
        matrices, rest = zk.muon_groups(model, split=SPLIT)
        for number, group in enumerate(matrices):
            group["params"] = [*group["params"][turns:], *group["params"][:turns]]
            group["ns_steps"] = 3 + number
        train(world, model, (zk.Muon(matrices, lr=0.02), zk.AdamW(rest, lr=1e-2)), range(3))
        results.append(full(model))
    for name, value in results[0].items():
        assert value.isfinite().all() and all(torch.equal(value, other[name]) for other in results[1:]), name


@everywhere(2, stage=[2, 3])
def test_a_matrix_of_one_rank_may_lack_a_gradient_there_beside_those_that_ranks_share(world: World, stage: int) -> None:
    model = built(lambda: nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)))
    world.shard(model, stage=stage, whole=list(model.parameters()) if stage == 2 else None)
    own = nn.Parameter(torch.ones(8, 8))
    opt = zk.Muon([*model.parameters(), own], lr=0.1)
    for step in range(4):
        model(torch.ones(2, 16)).square().mean().backward()
        own.grad = torch.eye(8) if step % 2 == world.rank else None
        before = own.detach().clone()
        step_and_zero(opt)
        assert torch.equal(before, own.detach()) == (step % 2 != world.rank)
