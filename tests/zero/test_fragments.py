"""MD: what lives long lies apart from what comes and goes, so that steps of odd sizes do not cut memory up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pages import MIB, SLACK, pages
from torch import Tensor, nn
from worlds import World, built, on_ranks, ranked, step_and_zero

import zerokern as zk

WIDTH, LAYERS, STEPS = 160, 5, 6
HUGE_PAGE = 2 * MIB
MOST = 1.3  # reserved over allocated: the paper's runs failed with 30 % of memory free
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Odd(nn.Module):
    """Layers of sizes that no allocator likes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 613 + 37 * number), nn.Linear(613 + 37 * number, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd(number) for number in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)


def in_use() -> int:
    """Bytes that somebody has of the C library."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Counts
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def train(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    for number in range(STEPS):
        rows = 1 + 977 * number % 1500
        x = torch.ones(rows, WIDTH, device=device)
        if number % 5 == 4:
            with torch.no_grad():
                model(x)
        model(x).backward()
        step_and_zero(optimizer)


@ranked
def on_the_host(world: World, stage: int) -> dict[str, list[int]]:
    """After so many steps, and after twice as many: pages that this process has, bytes of its heap in use, and those
    of states, which lie elsewhere. Free pages are given back first: what is left of them is cut up."""
    model = built(Net)
    world.shard(model, stage=stage, keep="device")
    optimizer = zk.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, WIDTH)).backward()  # what comes with a first pass
    optimizer.zero_grad()
    base = pages(), in_use()
    found: dict[str, list[int]] = {"pages": [], "heap": [], "states": []}
    for _ in range(2):
        train(model, optimizer, torch.device("cpu"))
        found["pages"].append(pages() - base[0])
        found["heap"].append(in_use() - base[1])
        states = [local(one) for state in optimizer.state.values() for one in state.values()]
        found["states"].append(sum(one.nbytes for one in states if one.numel() > 1))
    large = [one for one in states if one.numel() > 1]
    reach = max(one.data_ptr() + one.nbytes for one in large) - min(one.data_ptr() for one in large)
    found["apart"] = [int(reach <= found["states"][-1] + 4096 * len(large))]
    return found


def local(value: Tensor) -> Tensor:
    return getattr(value, "local", value)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_steps_of_odd_sizes_do_not_cut_memory_up(stage: int) -> None:
    for found in on_ranks(2, on_the_host, stage):
        print(f"stage {stage}: {found}")
        for had, heap, states in zip(found["pages"], found["heap"], found["states"], strict=True):
            assert had <= MOST * (max(heap, 0) + states) + SLACK + HUGE_PAGE
        assert found["apart"] == [1], "states of all parameters lie side by side, and nothing else between them"
        assert found["pages"][1] <= found["pages"][0] + SLACK


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_of_odd_sizes_do_not_cut_the_device_up(stage: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    model = zk.shard(Net().to(device), stage=stage, keep="device")
    optimizer = zk.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, device)
    reserved, allocated = torch.cuda.max_memory_reserved() - before, torch.cuda.max_memory_allocated()
    print(f"stage {stage}: {reserved / allocated:.3f} reserved over allocated")
    # segments of 2 and 20 MiB, in each of the pools
    assert reserved <= MOST * allocated + (64 << 20)
