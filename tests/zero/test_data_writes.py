"""`.data` writes to sharded parameters last where a step would write what the optimizer has: as counted writes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import World, anywhere, built, full, refusal, says
from zero_cases import Net, batch, make_adamw

import zerokern as zk

BF16 = torch.bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "masters": {"master_format": "fp32"},
    "overlap": {"master_format": "fp32", "schedule": "overlap"},
    "delayed": {"schedule": zk.Delayed(after=1)},
}


def data_of(param: Tensor, counts: bool) -> Tensor:
    return param.detach() if counts else param.data


def between_steps(model: nn.Module, counts: bool) -> None:
    for param in model.parameters():
        data_of(param, counts).clamp_(-0.2, 0.2)


def while_gathered(model: nn.Module, counts: bool) -> None:
    with zk.gathered(model, write=True):
        for param in model.parameters():
            data_of(param, counts).view(-1)[:3].fill_(0.25)


def in_the_forward(model: nn.Module, counts: bool) -> None:
    def shrink(block: nn.Module, args: tuple) -> None:
        with torch.no_grad():
            data_of(block.up.weight, counts).mul_(0.9)

    handle = model.blocks[0].register_forward_pre_hook(shrink)
    with torch.no_grad():
        model(batch(9)[0].to(BF16))
    handle.remove()


def trained(world: World, stage: int, settings: str, write: Callable, counts: bool) -> list[Tensor]:
    model = world.shard(built(lambda: Net(1)).to(BF16), stage=stage, bucket_bytes=600)
    optimizer = make_adamw(model.parameters(), **SETTINGS[settings])
    for step in range(4):
        x, y = batch(step, world.rank)
        (model(x.to(BF16)) - y.to(BF16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        write(model, counts)
    optimizer.flush()
    return list(full(model).values())


@pytest.mark.filterwarnings("ignore:.*were written while an update of them was pending")
@pytest.mark.parametrize("write", [between_steps, while_gathered, in_the_forward], ids=lambda one: one.__name__)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_write_counts_as_one_that_torch_counts(stage: int, settings: str, write: Callable) -> None:
    def work(world: World) -> None:
        ours, theirs = (trained(world, stage, settings, write, counts) for counts in (False, True))
        assert all(map(torch.equal, ours, theirs))

    for size in {0: (1,), 3: (1, 2)}.get(stage, (2,)):  # at stage 3 one rank computes with the very memory of the piece
        anywhere(size, work)


@pytest.mark.parametrize("counts", [False, True], ids=["data", "detach"])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_written_by_what_was_kept_while_an_update_is_under_way_is_refused(stage: int, counts: bool) -> None:
    def work(world: World) -> None:
        model = world.shard(built(lambda: Net(3)).to(BF16), stage=stage, bucket_bytes=600)
        optimizer = make_adamw(model.parameters(), **SETTINGS["overlap"])
        held = data_of(model.blocks[-1].down.weight, counts)
        x = batch(0, world.rank)[0].to(BF16)
        model(x).square().mean().backward()
        optimizer.step()
        held.mul_(0.5)  # nobody has waited for its bucket
        says(refusal(lambda: model(x), zk.StateError), ["down.weight' was written while its update was under way"])

    anywhere(2, work)
