"""Models and arguments that cannot be: refused on every rank alike, before anything is changed, saying what and why."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tables import each
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import weight_norm
from worlds import (
    SHARDED,
    STAGES,
    World,
    alone,
    anywhere,
    built,
    everywhere,
    full,
    on_ranks,
    ranked,
    refusal,
    says,
    step_and_zero,
)
from zero_cases import Net, batch, make_adamw, mse

import zerokern as zk
from zerokern.comm import Group

REFUSED = (ValueError, TypeError, zk.ZerokernError)

ARGUMENTS: dict[str, tuple[dict, list[str]]] = {
    "stage 4": ({"stage": 4}, ["stage=4", "0", "3"]),
    "stage True": ({"stage": True}, ["stage=True"]),
    "stage as text": ({"stage": "2"}, ["stage='2'"]),
    "no stage": ({"stage": None}, ["stage=None"]),
    "half a stage": ({"stage": 1.5}, ["stage=1.5"]),
    "no bytes": ({"bucket_bytes": 0}, ["bucket_bytes=0"]),
    "negative bytes": ({"bucket_bytes": -1}, ["bucket_bytes=-1"]),
    "fractional bytes": ({"bucket_bytes": 1e6}, ["bucket_bytes=1000000.0"]),
    "a dtype for a policy": ({"mp_policy": torch.bfloat16}, ["mp_policy", "MixedPrecisionPolicy"]),
    "an integer policy": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.int8)}, ["mp_policy", "int8"]),
    "float64 on the wire": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, ["reduce_dtype"]),
    "a name for a unit": ({"stage": 3, "units": ["blocks.0"]}, ["units", "blocks.0"]),
    "somebody else's unit": ({"stage": 3, "units": [nn.Linear(2, 2)]}, ["units", "Linear"]),
    "a number for a mesh": ({"mesh": 2}, ["mesh"]),
}


@each("case", ARGUMENTS)
def test_an_argument_that_cannot_be(case: str) -> None:
    settings, words = ARGUMENTS[case]
    model = built(Net)
    before = copy.deepcopy(model.state_dict())
    says(refusal(lambda: zk.shard(model, **settings), (ValueError, TypeError)), words)
    untouched(model, before)


def untouched(model: nn.Module, before: dict) -> None:
    """After a refusal the model is what it was, and can be sharded properly."""
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(param) is nn.Parameter for param in model.parameters())
    if isinstance(model, Net):
        zk.shard(model, stage=3)
        mse(model, 0, World(0, 1)).backward()


def sharing() -> nn.Module:
    net = built(Net)
    net.leave.weight.data = net.blocks[0].up.weight.data[:3]
    return net


def with_gradient() -> nn.Module:
    net = built(Net)
    mse(net, 0, World(0, 1)).backward()
    return net


def odd(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = built(Net)
        change(net)
        return net

    return make


def strided(parts: Sequence[Any]) -> nn.Module:
    """Parameters over these parts of one memory."""
    memory = torch.arange(40.0)
    return nn.ParameterList(memory[part] for part in parts)


MODELS: dict[str, tuple[Callable, list[str]]] = {
    "no module": (lambda: [nn.Parameter(torch.ones(3))], ["module", "list"]),
    "no parameters": (nn.ReLU, ["ReLU", "no parameters"]),
    "a lazy layer": (odd(lambda net: setattr(net, "leave", nn.LazyLinear(3))), ["leave.weight", "lazy"]),
    "float64": (odd(lambda net: net.leave.double()), ["leave.weight", "float64"]),
    "complex": (odd(lambda net: setattr(net.leave, "weight", nn.Parameter(torch.ones(3, 10) * 1j))), ["leave.weight"]),
    "on meta": (odd(lambda net: net.leave.to("meta")), ["meta"]),
    "all on meta": (lambda: Net().to("meta"), ["meta", "zk.build"]),
    "memory shared by two": (sharing, ["leave.weight", "blocks.0.up.weight", "share"]),
    "memory shared in part": (lambda: strided([slice(None, None, 4), slice(36, 40)]), ["'0' and '1'", "share"]),
    "memory shared behind another": (
        lambda: strided([slice(None, None, 2), slice(1, None, 4), slice(6, 7)]),
        ["'0' and '2'", "share"],
    ),
    "a gradient": (with_gradient, ["gradient", "zero_grad"]),
    "sparse": (
        odd(lambda net: setattr(net.leave, "weight", nn.Parameter(torch.eye(3).to_sparse(), False))),
        ["leave.weight", "sparse"],
    ),
}


@each("case", MODELS)
@each("stage", [1, 3])
def test_a_model_that_cannot_be(case: str, stage: int) -> None:
    make, words = MODELS[case]
    model = make()
    says(refusal(lambda: zk.shard(model, stage=stage), REFUSED), words)
    if isinstance(model, nn.Module):
        assert all(not hasattr(param, "_zk_shard") for param in model.parameters()), "half sharded"


def test_strides_and_where_memory_lies_refuse_nothing() -> None:
    """Rows that take turns, and a parameter that is expanded right before another one."""
    for make in (
        lambda memory: [memory.view(8, 5)[:, :2], memory.view(8, 5)[:, 2:]],
        lambda memory: [memory[:10].view(10, 1).expand(10, 6), memory[10:]],
    ):
        memory = torch.arange(40.0)
        expected = [part.clone() for part in make(memory)]
        model = zk.shard(nn.ParameterList(make(memory)), stage=2)
        assert all(torch.equal(a, b) for a, b in zip(model, expected, strict=True))


def twice(world: World, first: int, second: int) -> None:
    """Sharded again: as a whole, in part, as part of something larger, or under an optimizer's feet."""
    model = world.shard(built(Net), stage=first)
    larger = nn.ModuleDict({"inner": model, "head": nn.Linear(2, 2)})
    for again in (model, model.blocks[1], larger):
        says(refusal(lambda again=again: world.shard(again, stage=second), REFUSED), ["sharded already"])
    optimizer = make_adamw(model.parameters())
    mse(model, 0, world).backward()
    optimizer.step()
    assert not hasattr(larger["head"].weight, "_zk_shard")


@each("size, first, second", [(1, 1, 1), (2, 2, 3), (1, 3, 2)])
def test_double_sharding(size: int, first: int, second: int) -> None:
    anywhere(size, twice, first, second)


def rename(net: nn.Module) -> None:
    net.exit = net.leave
    del net.leave


DIFFERENCES: dict[str, tuple[Callable[[nn.Module], object], list[str]]] = {
    "another shape": (
        lambda net: setattr(net, "leave", built(lambda: nn.Linear(10, 4))),
        ["leave.weight", "(4, 10)", "(3, 10)"],
    ),
    "another dtype": (lambda net: net.blocks[1].bfloat16(), ["blocks.1", "bfloat16", "float32"]),
    "another name": (rename, ["leave.weight", "exit.weight"]),
    "one more": (lambda net: setattr(net, "more", built(lambda: nn.Linear(2, 2))), ["more.weight"]),
    "one less": (lambda net: setattr(net.blocks[2].up, "bias", None), ["blocks.2.up.bias"]),
    "one is frozen": (lambda net: net.blocks[0].up.weight.requires_grad_(False), ["blocks.0.up.weight", "frozen"]),
    "untied": (lambda net: setattr(net.blocks[0].norm, "weight", net.blocks[0].norm.bias), ["blocks.0.norm"]),
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage": ({"stage": 3}, {"stage": 2}),
    "bucket_bytes": ({"bucket_bytes": 1 << 20}, {"bucket_bytes": 1 << 21}),
    "mp_policy": ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "units": ({"stage": 3}, {"stage": 3, "units": []}),
    "reduce": ({}, {"reduce": "sum"}),
    "tier": ({"stage": 3}, {"stage": 3, "tier": zk.Nvme("unused")}),
    "keep": ({"keep": "device"}, {"keep": "cpu"}),
    "micro": ({"micro": 2}, {"micro": 3}),
    "replicated": ({"keep": "device"}, {"keep": "device", "replicated": Group(0, 1, torch.device("cpu"), "alone")}),
    "whole": ({"stage": 2}, {"stage": 2, "whole": ["blocks.*.up.weight"]}),
    "publish": ({"stage": 2}, {"stage": 2, "publish": "delta"}),
}


def differing(world: World, case: str, stage: int) -> str:
    change, _ = DIFFERENCES[case]
    model = built(Net)
    before = copy.deepcopy(model.state_dict())
    if world.rank == 1:
        change(model)
    message = refusal(lambda: world.shard(model, stage=stage), zk.ZerokernError)
    assert all(type(param) is nn.Parameter and not hasattr(param, "_zk_shard") for param in model.parameters())
    model = world.shard(built(Net), stage=stage)  # the group goes on
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())
    return message


def asked_differently(world: World, case: str) -> None:
    settings = SETTINGS[case][world.rank == 1]
    for stage in [settings["stage"]] if "stage" in settings else STAGES:
        said = refusal(lambda stage=stage: world.shard(built(Net), **{"stage": stage, **settings}), zk.ZerokernError)
        says(said, [f"{case} is", "rank 0", "rank 1"])


def one_refuses(world: World) -> str:
    """A model that one rank cannot even look at: the others must not wait for it."""
    model = nn.ReLU() if world.rank == 1 else built(Net)
    return refusal(lambda: world.shard(model, stage=2), REFUSED)


def values_of_rank_0(world: World) -> None:
    """Different values are no different model: rank 0's count, for buffers too."""
    model = nn.Sequential(built(Net, seed=world.rank), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(world.rank)
    world.shard(model, stage=3)
    reference = dict(built(Net).named_parameters())
    assert all(torch.equal(value, reference[name[2:]]) for name, value in full(model).items() if name[0] == "0")
    assert not model[1].running_mean.any()


@ranked
def on_real_ranks(world: World) -> list[str]:
    for number, (case, (_, words)) in enumerate(DIFFERENCES.items()):
        says(differing(world, case, 2 + number % 2), [*words, "rank 0", "rank 1"])
    for case in SETTINGS:
        asked_differently(world, case)
    values_of_rank_0(world)
    twice(world, 3, 3)
    sizes_that_do_not_fit(world)
    return [one_refuses(world)]


def sizes_that_do_not_fit(world: World) -> None:
    """Meshes: of three dimensions, and one of two of which one is chosen."""
    grid = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("a", "b"))
    cube = init_device_mesh("cpu", (1, 1, world.size), mesh_dim_names=("a", "b", "c"))
    says(refusal(lambda: zk.shard(built(Net), mesh=cube), ValueError), ["mesh", "one dimension", "mesh['b', 'c']"])
    model = zk.shard(built(Net), stage=3, mesh=grid["b"])
    mse(model, 0, world).backward()
    net = built(Net)
    net.leave.weight = nn.Parameter(distribute_tensor(net.leave.weight.detach(), grid["b"]))
    says(refusal(lambda: zk.shard(net), REFUSED), ["DTensors", "rank 1 at", 'mesh["dp"]'])


def test_every_setting_is_among_those_that_ranks_compare() -> None:
    assert set(SETTINGS) == set(inspect.signature(zk.shard).parameters) - {"module", "mesh"}


def test_models_that_differ_on_real_ranks() -> None:
    (first,), (second,) = on_ranks(2, on_real_ranks)
    says(second, ["ReLU", "no parameters"])
    says(first, ["rank 1"])


def changed(world: World, stage: int, change: Callable[[nn.Module], object], word: str) -> None:
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters())
    mse(model, 0, world).backward()
    step_and_zero(optimizer)
    try:
        change(model)
    except TypeError as error:  # at stage 3 what is sharded may say so at once
        says(str(error), ["zk."])
        return
    says(refusal(lambda: mse(model, 1, world), (zk.ZerokernError, AttributeError)), [word])


CHANGES = {
    "another parameter": (lambda net: setattr(net.leave, "weight", nn.Parameter(torch.ones(3, 10))), "leave.weight"),
    "another module": (lambda net: net.blocks.__setitem__(1, copy.deepcopy(built(Net).blocks[1])), "blocks.1"),
    "another size": (lambda net: setattr(net.leave.weight, "data", torch.ones(5, 10)), "leave.weight"),
    "other memory": (lambda net: setattr(net.leave.weight, "data", torch.ones(3, 10)), "leave.weight"),
    "another dtype": (lambda net: net.half(), ""),
    "one less": (lambda net: delattr(net.leave, "weight"), "weight"),
    "one more": (lambda net: setattr(net, "more", built(lambda: nn.Linear(2, 2))), "more.weight"),
    "a longer list": (lambda net: net.blocks.append(copy.deepcopy(built(Net).blocks[0])), "blocks.3"),
}


@each("case", CHANGES)
@each("stage", [2, 3])
def test_a_model_changed_after_sharding(stage: int, case: str) -> None:
    alone(changed, stage, *CHANGES[case])


def test_functions_for_sharded_models_on_plain_ones() -> None:
    plain = Net()
    for work in (lambda: zk.no_sync(plain).__enter__(), lambda: zk.shards(plain)):
        says(refusal(work, zk.StateError), ["not sharded", "zk.shard"])
    refusal(lambda: zk.gathered("model").__enter__(), (TypeError, ValueError))
    with zk.gathered(plain):  # code that serves both
        assert plain.leave.weight.sum().isfinite()


@everywhere(2, stage=[1, 3])
def test_a_step_on_unreduced_gradients(world: World, stage: int) -> None:
    """A step between micro-steps under no_sync would use what other ranks know nothing of."""
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
    before = full(model)
    with zk.no_sync(model):
        mse(model, 0, world).backward()
        says(refusal(optimizer.step, zk.StateError), ["no_sync"])
    says(refusal(optimizer.step, zk.StateError), ["no_sync"])
    says(refusal(lambda: zk.clip_grad_norm_(model, 1.0), zk.StateError), ["no_sync"])
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())
    twin = world.shard(built(Net), stage=stage)
    other = make_adamw(twin.parameters(), max_grad_norm=1.0)
    for one, opt in ((model, optimizer), (twin, other)):
        mse(one, 1, world).backward()
        opt.step()
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(model).items()), "nothing is left over"


@everywhere(2, stage=[0, 3])
def test_little_to_do(world: World, stage: int) -> None:
    """Steps without gradients, empty batches, optimizers over a part."""
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.blocks[1].parameters(), max_grad_norm=1.0)
    before = full(model)
    step_and_zero(optimizer)
    model(batch(0)[0][:0]).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    mse(model, 0, world).backward()
    optimizer.step()
    after = full(model)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith("blocks.1") for name in moved), moved


def test_a_gradient_to_what_a_hook_made_before_sharding() -> None:
    """Old weight_norm leaves a weight with a graph in the module, which is not of the sharded model."""
    model = built(Net)
    weight_norm(model.blocks[0].up)
    zk.shard(model, stage=3)
    weight = model.blocks[0].up.weight
    says(refusal(weight.sum().backward), ["'weight'", "before zk.shard", "forward first"])


@each("stage", SHARDED)
def test_a_parameter_whose_shard_was_taken_from_it(stage: int) -> None:
    """An optimizer that is new to it would update what is not here."""
    net = zk.shard(built(Net), stage=stage)
    name, param = next(iter(net.named_parameters()))
    del param._zk_shard
    optimizer = make_adamw(net.parameters())

    def step() -> None:
        mse(net, 0, World(0, 1)).backward()
        optimizer.step()

    says(refusal(step, REFUSED), [name, "has no shard any more", "_zk_shard was removed"])
