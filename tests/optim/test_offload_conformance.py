"""What frameworks do to an optimizer, one failure seen elsewhere per test, with the update on the host.

The numbers are those of the conformance list, as in test_conformance.py. Where they are missing here another file has
them: 2, 7, 10 and 18 test_offload_outside.py, 6 test_delayed_resume.py, 9 and 11 test_delayed.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import (
    SCHEDULES,
    ByHand,
    Late,
    Row,
    Small,
    agree,
    copied,
    exact_calls,
    optimizer_of,
    rarely,
    train,
    values,
)
from optim_cases import BF16, FP32, MAKERS, copies, make_params, same_bits, set_grads
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from worlds import World, anywhere

from zerokern.core.env import usable_cpus
from zerokern.core.errors import ZerokernError
from zerokern.examples.played_device import PlayedDevice

WORLD = World(0, 1)


@pytest.fixture(params=["overlap", "delayed", *rarely("sync", "delayed after 2")])
def schedule(request: pytest.FixtureRequest) -> Any:
    return SCHEDULES[request.param]


@pytest.fixture
def device() -> Iterator[PlayedDevice]:
    with_threads = PlayedDevice(poison=True)
    yield with_threads
    with_threads.close()


class Pair:
    """The same parameters trained by ours, on a device that is played, and by the loop by hand."""

    def __init__(self, schedule: Any, device: PlayedDevice, params: list[nn.Parameter], **settings: Any) -> None:
        self.device, self.params, self.twins = device, params, copies(params)
        for param in params:
            device.own(param)
        ahead = copies(params)
        self.ours = MAKERS["adamw"](params, tier="cpu", schedule=schedule, **settings)
        self.late = Late(self.twins, ahead, MAKERS["adamw"](ahead, **settings), exact_calls(schedule))

    def step(self, number: int, idle: tuple[int, ...] = ()) -> None:
        self.device.synchronize()
        set_grads(self.params, self.twins, seed=number)
        for index in idle:
            self.params[index].grad = self.twins[index].grad = None
        for optimizer in (self.ours, self.late):
            optimizer.step()

    def agree(self) -> None:
        self.device.synchronize()
        assert same_bits(self.params, self.twins)
        self.ours.flush()
        self.late.flush()
        self.device.synchronize()
        assert same_bits(self.params, self.twins)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_1_parameters_swapped_after_construction(schedule: Any, dtype: torch.dtype, device: PlayedDevice) -> None:
    pair = Pair(schedule, device, make_params(dtype=dtype), max_grad_norm=1.0)
    kept = pair.ours.param_groups[0]["params"]
    pair.ours.param_groups[0]["params"] = [torch.empty(1) for _ in kept]
    pair.ours.zero_grad()
    pair.ours.param_groups[0]["params"] = kept
    for step in range(5):
        pair.step(step)
    pair.agree()


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_3_initialised_by_a_step_with_zero_gradients_then_loaded(schedule: Any, dtype: str, flatten: bool) -> None:
    """torch.distributed.checkpoint assigns zero gradients, sets lr to 0, steps, and loads into the state that made."""
    options, row = StateDictOptions(flatten_optimizer_state_dict=flatten), Row(dtype=dtype, steps=8)
    hand = ByHand(row, WORLD, exact_calls(schedule))
    model = row.model(WORLD)
    first = optimizer_of(row, model, tier="cpu", schedule=schedule)
    for one, loop in ((model, first), (hand.model, hand)):
        train(WORLD, row, one, loop, range(4))
    saved = copy.deepcopy(get_optimizer_state_dict(model, first, options=options))
    weights = copy.deepcopy(model.state_dict())
    again = row.model(WORLD, seed=3)
    second = optimizer_of(row, again, tier="cpu", schedule=schedule)
    again.load_state_dict(weights)
    set_optimizer_state_dict(again, second, saved, options=options)
    assert same_bits(values(again), list(weights.values()))
    rest = range(4, 8)
    agree(train(WORLD, row, again, second, rest), train(WORLD, row, hand.model, hand, rest), ahead=True)


def test_3_a_checkpoint_asked_of_an_optimizer_that_has_not_stepped(schedule: Any) -> None:
    """DCP makes state by a step with lr 0 and zero gradients: no parameter changes, and none does later."""
    row = Row(dtype="bf16", steps=4)
    model = row.model(WORLD)
    optimizer = optimizer_of(row, model, tier="cpu", schedule=schedule)
    before = values(model)
    get_optimizer_state_dict(model, optimizer)
    assert same_bits(values(model), before)
    optimizer.flush()
    assert same_bits(values(model), before)


def test_4_loaded_state_stays_fp32_and_on_the_host(schedule: Any, device: PlayedDevice) -> None:
    pair = Pair(schedule, device, make_params(dtype=BF16))
    for step in range(3):
        pair.step(step)
    params = copies(pair.params)
    again = MAKERS["adamw"](params, tier="cpu", schedule=schedule)
    again.load_state_dict(pair.ours.state_dict())
    for entry in again.state.values():
        dtypes = {key: value.dtype for key, value in entry.items() if key != "pending"}
        assert dtypes == {"step": FP32, "exp_avg": FP32, "exp_avg_sq": FP32, "remainder": torch.int16}
        assert {value.device.type for value in entry.values()} == {"cpu"}


@pytest.mark.parametrize("master_format", ["split16", *rarely("split8", "fp32")])
def test_5_a_model_loaded_after_the_optimizer_was_made_refreshes_masters(master_format: str, schedule: Any) -> None:
    row = Row(dtype="bf16", steps=6, formats=(("master_format", master_format),))
    other = row.model(WORLD, seed=5).state_dict()
    traces = []
    hand = ByHand(row, WORLD, exact_calls(schedule))
    model = row.model(WORLD)
    ours = optimizer_of(row, model, tier="cpu", schedule=schedule)
    for one, loop, others in ((hand.model, hand, [hand.ahead]), (model, ours, [])):
        for each in (one, *others):
            each.load_state_dict(other)
        train(WORLD, row, one, loop, range(3))
        loop.flush()
        for each in (one, *others):
            each.load_state_dict(other)
        traces.append(train(WORLD, row, one, loop, range(3, 6)))
    agree(traces[1], traces[0], ahead=True)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_8_one_cycle_drives_lr_and_betas(lr: float | Tensor, schedule: Any, device: PlayedDevice) -> None:
    pair = Pair(schedule, device, make_params(), lr=lr)
    pair.late.optimizer.param_groups[0]["lr"] = 0.1
    cycle = torch.optim.lr_scheduler.OneCycleLR(pair.ours, max_lr=0.1, total_steps=10)
    betas = set()
    for step in range(9):
        group = pair.ours.param_groups[0]
        pair.late.optimizer.param_groups[0].update(lr=float(group["lr"]), betas=group["betas"])
        betas.add(group["betas"])
        pair.step(step)
        cycle.step()
    pair.agree()
    assert len(betas) == 9


def test_12_zero_sized_parameters(schedule: Any, device: PlayedDevice) -> None:
    pair = Pair(schedule, device, make_params((0, 5, 0, 1000, 0), BF16), max_grad_norm=1.0)
    for step in range(5):
        pair.step(step)
    pair.agree()


def follow(world: World, row: Row, schedule: Any) -> None:
    hand = ByHand(row, world, exact_calls(schedule))
    expected = train(world, row, hand.model, hand)
    model = row.model(world)
    agree(train(world, row, model, optimizer_of(row, model, tier="cpu", schedule=schedule)), expected, ahead=True)


class Tiny(nn.Module):
    """Ranks that own nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize("wrap", ["stage 2", *rarely("stage 0", "stage 3")])
def test_12_ranks_that_own_nothing(schedule: Any, wrap: str) -> None:
    anywhere(3, follow, Row(wrap, "bf16", steps=5, make=Tiny), schedule)


def test_13_frozen_and_thawed_in_between(schedule: Any, device: PlayedDevice) -> None:
    """A parameter that is frozen while its update is pending gets that update, and no other."""
    pair = Pair(schedule, device, make_params(dtype=BF16), max_grad_norm=1.0)
    for step in range(9):
        frozen = (2, 4) if 3 <= step < 6 else ()
        for params in (pair.params, pair.twins):
            for index, param in enumerate(params):
                param.requires_grad_(index not in frozen)
        pair.step(step, idle=frozen)
    pair.agree()


def test_13_parameters_that_are_never_used(schedule: Any, device: PlayedDevice) -> None:
    pair = Pair(schedule, device, make_params(dtype=BF16), max_grad_norm=1.0)
    for step in range(6):
        pair.step(step, idle=(1, 3) if step < 3 else (1,))
    pair.agree()


class Tied(Small):
    """The same weight at the door and in a block, and a part that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = nn.Parameter(torch.randn(23, 10))
        self.blocks[0].up = nn.Linear(10, 23)
        self.blocks[0].down = nn.Linear(23, 10, bias=False)
        self.blocks[0].up.weight = self.blocks[1].up.weight
        self.unused = nn.Linear(5, 5)


@pytest.mark.parametrize("size, wrap", [(1, "plain"), (2, "stage 3"), *rarely((2, "stage 2"))])
def test_14_tied_parameters(schedule: Any, size: int, wrap: str) -> None:
    anywhere(size, follow, Row(wrap, "bf16", steps=6, make=Tied), schedule)


def test_15_bf16_and_fp32_parameters_in_one_group(schedule: Any, device: PlayedDevice) -> None:
    params = [*make_params(dtype=BF16), *make_params((5, 1000), FP32, seed=2)]
    pair = Pair(schedule, device, params, max_grad_norm=1.0, master_format=None)
    for step in range(6):
        pair.step(step)
    pair.agree()


@pytest.mark.parametrize("state_format", ["fp32", "int8"])
@pytest.mark.parametrize("to_host", [True, False])
def test_16_resumed_on_another_tier(to_host: bool, state_format: str, schedule: Any) -> None:
    row = Row(dtype="bf16", steps=8, formats=(("state_format", state_format),))
    host = {"tier": "cpu", "schedule": schedule}
    hand = ByHand(row, WORLD, 4 + exact_calls(schedule) if to_host else exact_calls(schedule))
    model = row.model(WORLD)
    ours = optimizer_of(row, model, **({} if to_host else host))
    for one, loop in ((hand.model, hand), (model, ours)):
        train(WORLD, row, one, loop, range(4))
        if not to_host:
            loop.flush()
    again = row.model(WORLD, seed=3)
    other = optimizer_of(row, again, **(host if to_host else {}))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copied(ours.state_dict()))
    hand.after = hand.after if to_host else 10**9
    rest = range(4, 8)
    agree(train(WORLD, row, again, other, rest), train(WORLD, row, hand.model, hand, rest), ahead=True)


class Checkpointed(Small):
    """Activation checkpointing of compiled blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


@pytest.mark.parametrize("wrap", ["stage 2", *rarely("plain", "stage 3")])
def test_17_checkpointed_activations_and_compiled_blocks(schedule: Any, wrap: str) -> None:
    torch._dynamo.reset()
    anywhere(1, follow, Row(wrap, "fp32", steps=5, make=Checkpointed), schedule)


class Numbers:
    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = optimizer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if self.optimizer is None:
            return index
        try:
            self.optimizer.step()
        except ZerokernError as error:
            return str(error)
        return "it stepped"


def loaded(numbers: Numbers) -> list[Any]:
    settings = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60, "batch_size": None}
    return list(DataLoader(numbers, **settings))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_19_workers_forked_while_an_update_is_under_way(schedule: Any) -> None:
    """They load data as ever; a step in one of them is refused, since it would be nobody's."""
    row = Row(dtype="bf16", steps=6)
    hand = ByHand(row, WORLD, exact_calls(schedule))
    expected = train(WORLD, row, hand.model, hand)
    model = row.model(WORLD)
    ours = optimizer_of(row, model, tier="cpu", schedule=schedule)
    traces = [train(WORLD, row, model, ours, range(3))]
    assert loaded(Numbers()) == [0, 1, 2, 3]
    assert all("fork" in said for said in loaded(Numbers(ours)))
    traces.append(train(WORLD, row, model, ours, range(3, 6)))
    assert traces[0].losses + traces[1].losses == expected.losses
    assert same_bits(traces[1].values, expected.values)


SCRIPT = """
import hashlib, sys, torch
sys.path.insert(0, {folder!r})
from offload_cases import *
from worlds import World
import zerokern as zk
row, world = Row("stage 3", "bf16", "random", steps=8), World(0, 1)
digest = hashlib.sha256()
for schedule in ("sync", "overlap", zk.Delayed(after=2)):
    model = row.model(world)
    trace = train(world, row, model, optimizer_of(row, model, tier="cpu", schedule=schedule))
    digest.update(repr((trace.losses, trace.norms, trace.values)).encode())
print(digest.hexdigest())
"""


def start_child(cpus: set[int], **environment: str) -> subprocess.Popen[str]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    try:
        return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **environment}, stdout=-1, text=True)
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.slow
def test_20_omp_num_threads_1_fewer_cpus_and_more_ranks_than_cores_change_no_bit() -> None:
    cpus = os.sched_getaffinity(0)
    children = [
        start_child(cpus, OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE=str(4 * usable_cpus())),
        start_child({min(cpus)}),
        start_child(cpus, ZEROKERN_THREADS="3"),
    ]
    digests = {child.communicate(timeout=120)[0] for child in children}
    assert len(digests) == 1 and len(digests.pop()) > 60
