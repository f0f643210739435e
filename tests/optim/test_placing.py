"""State that fills memory up to a budget, then the disk: the bits of state in one tier, the bytes of the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import Tier, row_of, small
from offload_cases import SCHEDULES, Row, agree, on_device, optimizer_of, train
from optim_cases import same_bits
from played_cases import SLOW, Counting, counted, played, the_same
from tables import each
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from worlds import World, alone, anywhere

import zerokern as zk
from zerokern.checkpoint.storage import SavePlanner
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory.here import boxes, write_items


def split(tier: Tier, size: int, budget: str) -> list[Any]:
    return [[budget, where] for where in small(tier, size)]


def has_both_within(optimizer: Any, budget: int) -> None:
    """Some of the state is in memory, never more than was allowed; some is on disk."""
    entries = optimizer.holdings.held.values()
    kept = [value for entry in entries for key, value in entry.items() if key not in ("step", "pending", "on_disk")]
    assert 0 < sum(value.nbytes for value in kept) <= budget
    assert optimizer.statistics()["state_bytes/disk"] > 0


def as_on_the_device(world: World, row: Row, tiers: list[Any], schedule: str, budget: int) -> None:
    model, twin = row.model(world), row.model(world)
    ours = optimizer_of(row, model, tier=tiers[world.rank], schedule=SCHEDULES[schedule])
    expected = train(world, row, twin, optimizer_of(row, twin, schedule=SCHEDULES[schedule]))
    agree(train(world, row, model, ours), expected)
    has_both_within(ours, budget)


INT8 = (("state_format", "int8"), ("master_format", "split8"))


@each("size, schedule, row, budget", [
    (1, "sync", row_of("plain", "bf16", "often", accumulate=2, broken=(2,), steps=5), 24),
    (1, "delayed", row_of("plain", "fp32", scaled=True, steps=5), 24),
    (2, "overlap", row_of("stage 3", "bf16", formats=INT8, steps=5), 4),
    (2, "overlap", row_of("stage 1", "mixed", accumulate=2, steps=5), 24),
])  # fmt: skip
def test_a_split_has_the_bits_of_one_tier(size: int, schedule: str, row: Row, budget: int, tier: Tier) -> None:
    tiers = split(tier, size, f"cpu:{budget}KiB")
    anywhere(size, as_on_the_device, row, tiers, schedule, budget << 10)


@each("schedule, budgets", [
    ("sync", ["cpu:70KiB", "disk"]), ("overlap", ["cpu:70KiB", "disk"]), ("delayed", ["cpu:70KiB", "disk"]),
    ("sync", ["device:70KiB", "cpu"]), ("overlap", ["device:70KiB", "cpu"]), ("overlap", ["device:10MiB", "cpu"]),
    ("overlap", ["device:70KiB", "cpu:50KiB", "disk"]), ("sync", ["device:70KiB", "disk"]),
    ("delayed", ["device:70KiB", "cpu"]), ("delayed after 2", ["device:70KiB", "cpu:50KiB", "disk"]),
    ("delayed", ["device:10MiB", "cpu"]),
])  # fmt: skip
def test_parameters_on_a_device(schedule: str, budgets: list[str], devices: Callable, tier: Tier) -> None:
    """What stays there is updated there; copies of others have state beside them, or state that streams."""
    where = [tier(ring_nbytes="32K") if one == "disk" else one for one in budgets]
    slow = devices(**SLOW["copies down"])
    the_same(*played(slow, SCHEDULES[schedule], tier=where, accumulate=2, dtype=torch.bfloat16, broken=(3,)))


@each("schedule", ["sync", "overlap", "delayed"])
def test_what_stays_crosses_no_link_and_the_host_reads_nothing_of_it(schedule: str, devices: Callable) -> None:
    steps, settings = 4, {"steps": 4, "dtype": torch.bfloat16}
    with counted() as reads:
        device = devices(Counting)
        ours, expected = played(device, SCHEDULES[schedule], tier=["device:10MiB", "cpu"], **settings)
    the_same(ours, expected)
    numel = sum(value.numel() for value in ours[3])
    assert reads.by_device == steps * numel == reads.by_host, "the host reads those of the training without a device"
    assert sum(device.moved.values()) == 0, "but for sums"


def test_what_forwards_need_first_stays_in_memory(tier: Tier) -> None:
    """Whatever the order of the groups; and what does not fit makes room for what does."""

    def placed(world: World) -> None:
        made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 4))
        params = list(zk.shard(made, stage=2, bucket_bytes=17000).parameters())
        opt = zk.AdamW([{"params": params[4:]}, {"params": params[:4]}], tier=["cpu:50KiB", tier()])
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        kept = [isinstance(opt.state[param].get("exp_avg"), torch.Tensor) for param in params]
        assert kept == [True, True, False, True, False, True, True, True]

    alone(placed)


@each("budgets", [["cpu:16KiB"], ["device:16KiB"], ["device:8KiB", "cpu:8KiB"]])
def test_a_parameter_that_is_trained_later_finds_what_is_left(budgets: list[str], tier: Tier) -> None:
    """Also where the device is a CPU, whose budget is one of the host."""
    first, second, third = (nn.Parameter(torch.ones(1000)) for _ in range(3))
    opt = zk.AdamW([first, second, third], tier=[*budgets, tier()])
    for params in ([second], [first, second, third]):
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
    held = {name: "exp_avg" in opt.state[param] for name, param in zip("abc", (first, second, third), strict=True)}
    assert held == {"a": True, "b": True, "c": False}


@each("wrong, says", [
    ([], "It is empty"),
    (["device", "cpu"], "'device' without a budget takes everything"),
    (["cpu:1G", "cpu"], "in the order 'device', 'cpu', a disk, each of them once"),
    (["cpu:1G", "device"], "in the order 'device', 'cpu', a disk, each of them once"),
    (["device:1G", "cpu:1G"], "The last tier takes what is left"),
    ("cpu:1G", "The last tier takes what is left"),
    (["cpu:64", "device"], "the budget in tier='64'.*64 alone are bytes; 64GB may be meant"),
    (["cpu:64.5", "device"], "64.5 alone are bytes"),
    (["cpu:some", "device"], "the budget in tier='some'"),
    (["swap", "cpu"], "tier='swap'"),
    (["disk", "cpu"], "in the order 'device', 'cpu', a disk"),
    (["device:auto"], "The last tier takes what is left"),
    ("device:auto", "The last tier takes what is left"),
    (["cpu:auto", "device"], "the budget in tier='auto'"),
    (["device:free", "cpu"], "the budget in tier='free'"),
])  # fmt: skip
def test_an_order_that_cannot_be_is_refused(wrong: Any, says: str, tier: Tier) -> None:
    if "disk" in wrong:
        wrong = [tier(), *wrong[1:]]
    with pytest.raises(ValueError, match=says):
        zk.AdamW([nn.Parameter(torch.ones(2))], tier=wrong)


def stepped(params: list[nn.Parameter], opt: Any, *gradients: float) -> None:
    """A step with these values as gradients; 0: without a gradient."""
    for param, value in zip(params, gradients, strict=True):
        param.grad = torch.full_like(param, value) if value else None
    opt.step()


def momentum(sizes: tuple[int, ...], tier: Any) -> tuple[list[nn.Parameter], Any]:
    """Dampening shows whether a moment starts from the gradient: that is not dampened."""
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    return params, zk.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, tier=tier)


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, params: list[nn.Parameter], opt: Any) -> None:
    """A step with a disk that fails in this function changes nothing."""
    before = [param.detach().clone() for param in params]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *given: (_ for _ in ()).throw(OSError("the disk failed")))
        with pytest.raises(OSError, match="the disk failed"):
            opt.step()
    assert same_bits(params, before) and not opt.holdings.torn


def test_a_disk_without_room_leaves_no_state_in_memory(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try begins all moments, wherever they lie."""
    found = []
    for where in ("device", ["cpu:5000B", tier()]):
        params, opt = momentum((1000, 1000), where)
        if opt.holdings.disk is not None:
            for param in params:
                param.grad = torch.ones_like(param)
            failing(monkeypatch, type(opt.holdings.disk.tier), "lay_out", params, opt)
            assert not opt.state
        for _ in range(2):
            stepped(params, opt, 1.0, 2.0)
        found.append(params)
    assert same_bits(*found)


def test_moments_in_memory_start_from_a_gradient_after_a_step_that_failed(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another parameter has joined by then."""
    found = []
    for where in ("device", ["cpu:5000B", tier()]):
        params, opt = momentum((1000, 1000, 2000), where)
        stepped(params, opt, 0.0, 0.0, 1.0)
        if opt.holdings.disk is not None:
            params[0].grad = torch.full_like(params[0], 1.0)
            failing(monkeypatch, type(opt.holdings.disk), "fetch", params, opt)
        stepped(params, opt, 1.0, 2.0, 1.0)
        found.append(params)
    assert same_bits(*found)


def begun_anew(opt: Any, params: list[nn.Parameter]) -> None:
    opt.state[params[1]] = opt.state.pop(params[0])


def taken_in_turn(opt: Any, params: list[nn.Parameter]) -> None:
    for number in (1, 2):
        opt.state[params[0]], opt.state[params[number]] = opt.state[params[number]], opt.state[params[0]]


@each("exchange, budget", [(begun_anew, "cpu:5000B"), (taken_in_turn, "cpu:9000B")])
def test_state_moves_between_parameters_in_memory_and_on_disk(exchange: Callable, budget: str, tier: Tier) -> None:
    """In the memory that it is read from; or it waits there, where the step of the other one writes."""
    found = []
    for where in ("device", "cpu", [budget, tier()]):
        params, opt = momentum((1000, 1000, 1000), where)
        stepped(params, opt, 1.0, 2.0, 3.0)
        exchange(opt, params)
        stepped(params, opt, 1.0, *((0.0, 0.0) if exchange is taken_in_turn else (2.0, 3.0)))
        stepped(params, opt, 1.0, 2.0, 3.0)
        found.append(params)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@each("where", ["split", "disk"])
def test_a_state_dict_is_of_one_step(where: str, tier: Tier) -> None:
    """Whatever follows: what was read from the disk does not change any more, and nor does the rest."""
    params, opt = momentum((1000, 1000), ["cpu:5000B", tier()] if where == "split" else tier())
    adam = zk.AdamW(params, lr=0.1, tier=["cpu:9000B", tier()] if where == "split" else tier())
    for one in (opt, adam):
        stepped(params, one, 1.0, 2.0)
        kept = one.state_dict()["state"]
        before = copy.deepcopy(kept)
        stepped(params, one, 3.0, 4.0)
        for number, entry in before.items():
            assert same_bits(list(entry.values()), list(kept[number].values()))


def test_a_moment_that_has_not_started_is_in_no_state_dict(tier: Tier) -> None:
    """Loaded zeros would be a moment that has, and the first gradient dampened."""
    found = []
    for where in (lambda: "device", lambda: ["cpu:5000B", tier()]):
        params = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in range(2)]
        settings = {"lr": 0.1, "dampening": 0.5, "master_format": "fp32"}
        opt = zk.SGD(params, tier=where(), **settings)
        stepped(params, opt, 1.0, 2.0)
        opt.param_groups[0]["momentum"] = 0.9
        for _ in range(2):
            state_dict = opt.state_dict()
            assert [[*entry] for entry in state_dict["state"].values()] == [["master"], ["master"]]
            opt = zk.SGD(params, tier=where(), **settings)
            opt.load_state_dict(state_dict)
        stepped(params, opt, 1.0, 2.0)
        found.append(params)
    assert same_bits(*found)


def test_what_is_loaded_or_saved_before_a_new_parameter_has_stepped(tier: Tier, tmp_path: Path) -> None:
    """Beside copies of parameters: of one that replaced another, and of one that was added."""
    found = []
    for name, where in (("device", "device"), ("split", ["cpu:5000B", tier()])):
        params = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
        opt = zk.SGD(params, lr=0.1, momentum=0.9, tier=where, schedule=zk.Delayed(after=9))
        stepped(params, opt, 1.0, 2.0)
        before, params[1] = params[1], nn.Parameter(torch.ones(1000))
        opt.param_groups[0]["params"] = [*params]
        opt.state[params[1]] = opt.state.pop(before)
        state = opt.state_dict()["state"]
        shown = [state[number]["momentum_buffer"].clone() for number in (0, 1)]
        params.append(nn.Parameter(torch.ones(500)))
        opt.add_param_group({"params": params[2:]})
        model = nn.ParameterList(params)
        zk.save(tmp_path / name, model, opt)
        zk.load(tmp_path / name, model, opt)
        stepped(params, opt, 1.0, 2.0, 3.0)
        found.append([*shown, *params])
    assert same_bits(*found)


@each("where", ["plain", "copies"])
def test_a_parameter_that_replaces_another_has_its_room(where: str, tier: Tier) -> None:
    """With copies of parameters, as without; once closed, an optimizer has no memory."""
    params = [nn.Parameter(torch.ones(1000))]
    opt = zk.AdamW(params, tier=["cpu:9000B", tier()], schedule=zk.Delayed(after=9) if where == "copies" else "sync")
    for _ in range(3):
        stepped(params, opt, 1.0)
        assert opt.statistics()["state_bytes/disk"] == 0
        before, params = params[0], [nn.Parameter(params[0].detach().clone())]
        opt.param_groups[0]["params"] = params
        opt.state[params[0]] = opt.state.pop(before)
    assert opt.holdings.room.nbytes > 0
    opt.close()
    assert opt.holdings.room.nbytes == 0
    two = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
    opt = zk.AdamW(two, tier=["cpu:17KB", tier()])
    for some in (two, two[:1], two):  # what leaves for a while has its own when it is back
        opt.param_groups[0]["params"] = some
        stepped(some, opt, *[1.0] * len(some))
        assert opt.holdings.room.kept_by().total() == 16_000


@each("wrap, budgets", [
    ("plain", ["device:30KB", "cpu:30KB"]), ("stage 2", ["device:30KB", "cpu:30KB"]), ("stage 2", ["cpu:30KB"]),
])  # fmt: skip
def test_a_load_reserves_what_it_will_need(
    wrap: str, budgets: list[str], device: PlayedDevice, tier: Tier, tmp_path: Path
) -> None:
    """On a disk that is too small it fails before any rank changes anything, in the order of forwards too.

    What the device and host memory take is told apart before there are copies."""

    def placed(world: World) -> None:
        def training(where: Any) -> tuple[nn.Module, Any]:
            model = nn.Sequential(*[nn.Linear(size, 64, bias=False) for size in (64, 32, 64, 32, 64)])
            if wrap != "plain":
                zk.shard(model, stage=2, bucket_bytes=17000)
            if len(budgets) > 1:
                on_device(device, Row(wrap), model)
            params = list(model.parameters())
            return model, zk.AdamW([{"params": params[3:]}, {"params": params[:3]}], tier=where)

        model, opt = training("cpu")
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
        zk.save(tmp_path / "saved", model, opt)
        model, opt = training([*budgets, tier()])
        reserved: list[int] = []
        hold, disk = opt.holdings.disk.hold, opt.holdings.disk
        disk.hold = lambda spans: (hold(spans), reserved.extend(one.nbytes for one in disk._reserved))
        zk.load(tmp_path / "saved", model, opt)
        assert sum(reserved) == disk.held()["state"] > 0

    alone(placed)


def test_a_plan_places_the_state_of_what_is_trained() -> None:
    """Frozen parameters have none, at any stage."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    model[0].requires_grad_(False)
    for stage in (0, 2, 3):
        plan = zk.plan(model, stage=stage, mesh={"dp": 2}, tier=["cpu:1MB", "nvme"])
        kept = sum(nbytes for one in plan.placed if one.tier == "cpu" for _, nbytes in one.tensors)
        assert kept == 2 * 8 * 64 * 64 // (2 if stage else 1), stage
        assert plan.tiers["nvme"] == plan.moved("read") == 0, stage


def test_ranks_that_keep_the_same_state_elsewhere_save_it_once() -> None:
    """Whole in memory on one rank, in boxes of records on two others; beside parts that each rank has alone."""
    shape = torch.Size([4, 4])

    def plan(first: int, end: int, step: int) -> list[Any]:
        cuboids = [box for at in range(first, end, step) for box in boxes(shape, at, step)]
        return write_items("optim.state.weight.exp_avg", shape, torch.float32, cuboids)

    for ranks in (
        [(0, 16, 16), (0, 16, 4), (0, 16, 16)],
        [(0, 16, 2), (0, 16, 16)],
        [(0, 8, 2), (8, 16, 4), (0, 8, 8)],
    ):
        given = [SavePlan(plan(first, end, step)) for first, end, step in ranks]
        made, metadata = SavePlanner().create_global_plan(given)
        chunks = metadata.state_dict_metadata["optim.state.weight.exp_avg"].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == 16
        assert sum(item.tensor_data.chunk.sizes.numel() for one in made for item in one.items) == 16
