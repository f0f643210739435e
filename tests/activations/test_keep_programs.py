"""Random programs under keep= with random tiers and budgets, beside the same with what torch's checkpoint keeps.

Several graphs at a time, in any order, used twice, in part or never; other batches, slices, layers and errors between.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from keep_cases import Broken, by, held_in, layers, played, same
from torch import Tensor, nn

import zerokern as zk
from zerokern.activations import keeping
from zerokern.activations.keeping import UNDER_WAY, Keeper

WIDTH, MOST_ROWS = 16, 48
NBYTES = MOST_ROWS * WIDTH * 4
Event = tuple[Any, ...]


class Graph:
    """What a forward has left, and what it is of."""

    def __init__(self, loss: Tensor, wanted: list[Tensor]) -> None:
        self.loss, self.wanted = loss, wanted


def drawn(draw: random.Random) -> list[Event]:
    """What a program does, event by event."""
    events: list[Event] = []
    for _ in range(draw.randrange(4, 14)):
        kind = draw.choice(("forward",) * 4 + ("backward",) * 4 + ("generate", "drop", "break", "twice", "part"))
        rows = draw.choice((1, MOST_ROWS // 4, MOST_ROWS // 2, MOST_ROWS - 1, MOST_ROWS))
        chosen = [draw.randrange(4) for _ in range(draw.randrange(1, 8))]  # layers, some of them again
        events.append((kind, draw.randrange(99), rows, chosen, draw.choice((1, 1, 2, 3)), draw.randrange(3)))
    return events


def played_out(events: list[Event], model: nn.ModuleList, run: Any, check: Callable[[], None]) -> list[Tensor]:
    """All gradients and results, in their order."""
    graphs: list[Graph] = []
    found: list[Tensor] = []
    shared = {"by": (torch.randn(1, MOST_ROWS, generator=torch.Generator().manual_seed(4)), "text")}
    for kind, seed, rows, chosen, micro, how in events:
        torch.manual_seed(seed)
        if kind in ("forward", "generate", "break"):
            x = torch.randn(rows, WIDTH, requires_grad=True)
            try:
                with torch.no_grad() if kind == "generate" else nullcontext():
                    hidden = x * 1.0
                    if how == 1:  # parts of one memory
                        hidden = torch.cat([hidden, hidden + 1], 1)[:, :WIDTH]
                    for number, one in enumerate(chosen):
                        layer = model[one]
                        if kind == "break" and number == len(chosen) - 1:
                            layer = broken
                        hidden = run(layer, hidden, micro=micro if how != 2 else 1)
                        check()
            except Broken:
                continue
            found.append(hidden.detach())
            if kind == "forward":
                params = [param for one in set(chosen) for param in model[one].parameters()]
                graphs.append(Graph(hidden.square().mean(), [x, *params]))
        elif graphs:
            graph = graphs[seed % len(graphs)]
            if kind in ("twice", "part"):
                wanted = graph.wanted if kind == "twice" else graph.wanted[:1]
                found += torch.autograd.grad(graph.loss, wanted, retain_graph=True)
            else:
                graphs.remove(graph)
                found += torch.autograd.grad(graph.loss, graph.wanted) if kind == "backward" else ()
            del graph
        check()
    del shared
    return found


def broken(x: Tensor) -> Tensor:
    raise Broken


def split(draw: random.Random, device: bool, folder: Path) -> list[Any]:
    tiers = draw.choice((("device", "cpu"), ("device", "disk"), ("cpu", "disk"), ("device", "cpu", "disk")))
    if not device:
        tiers = (*tiers[:-1], "disk")
    budgets = [f"{tier}:{draw.choice((1, NBYTES // 2, NBYTES, 2 * NBYTES + 7, 5 * NBYTES))}B" for tier in tiers[:-1]]
    return [*budgets, zk.Nvme(folder, ring_nbytes="1M") if tiers[-1] == "disk" else tiers[-1]]


def compare(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs one program both ways; returns the bytes that left."""
    draw = random.Random(seed)
    monkeypatch.setattr(keeping, "LEAST", 64)
    device = draw.random() < 0.6
    tiers, events = split(draw, device, folder), drawn(draw)
    model = layers(4)
    for layer in model:
        layer.up, layer.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    expected = played_out(events, model, lambda layer, x, micro: by(None, micro)(layer, x), lambda: None)
    with played(stretch=0.0001, poison=True) if device else nullcontext():
        return kept_in(tiers, events, model, expected)


def kept_in(tiers: list[Any], events: list[Event], model: nn.ModuleList, expected: list[Tensor]) -> int:
    keeper = Keeper(tiers)

    def check() -> None:
        budgets = keeper.order.kinds(apart=keeper._is_apart)
        for number, kind in enumerate(keeper._kinds[:-1]):
            assert keeper.resting.held(number) <= budgets[kind], (kind, keeper.resting.held(number), budgets)
        if "cpu" in budgets and budgets["cpu"] is not None:
            assert keeper.blocks.nbytes <= budgets["cpu"] + (3 * UNDER_WAY + 8) * 2 * NBYTES

    found = played_out(events, model, lambda layer, x, micro: by(keeper, micro)(layer, x), check)
    assert same(found, expected)
    gc.collect()
    assert not held_in(keeper) and not any(map(keeper.resting.held, range(len(keeper._kinds))))
    return keeper.moved_nbytes


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.slow)])
def test_random_programs(seeds: range, tmp_path: Path) -> None:
    moved = 0
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            try:
                moved += compare(seed, tmp_path / f"{seed}", patch)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    assert moved > 20 * NBYTES
