"""What zk.load_pretrained takes while it loads, as the kernel counts it: never a tensor whole."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from tries import best
from weight_cases import BF16, MIB, large_things_apart, load_pretrained, peak, restart_peak
from worlds import World, on_ranks, ranked

import zerokern as zk


def local(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "local", p).detach() for p in model.parameters()]


class Wide(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(depth))


@ranked
def peaks(world: World, path: Path, width: int, depth: int) -> tuple[int, int]:
    large_things_apart()
    first, model = (zk.build(lambda: Wide(width, depth), stage=3) for _ in range(2))
    load_pretrained(first, path)  # what a first call imports, and the pages of its code
    del first
    large_things_apart()
    restart_peak()
    before = peak()
    load_pretrained(model, path)
    return peak() - before, sum(one.nbytes for one in local(model))


def test_no_rank_has_a_tensor_whole(tmp_path: Path) -> None:
    """As the kernel counts: two ranks load 8 tensors of 9 MiB; each may take the half of one, and what is kept."""
    width, depth = 1536, 8
    state = Wide(width, depth).state_dict()
    whole = width * width * 4
    for dtype, lost in ((BF16, 0), (torch.float32, 2 * width * width * depth // 2)):
        save_file({name: tensor.to(dtype) for name, tensor in state.items()}, tmp_path / "weights")

        def most_grown() -> float:
            """Pages of code that the system had taken away come back, and count; so the least of several loads."""
            found = on_ranks(2, peaks, tmp_path / "weights", width, depth)
            assert [own for _, own in found] == [width * width * depth] * 2
            return max(grown for grown, _ in found)

        # half a tensor as it is read, and split; what is kept
        allowed = lost + (whole // 2) * (2 if lost else 0) + 2 * MIB
        assert best(most_grown, allowed) < allowed


@ranked
def peak_of_a_tensor(world: World) -> int:
    large_things_apart()
    restart_peak()
    before = peak()
    torch.ones(20 * MIB, dtype=torch.uint8)
    return peak() - before


def test_the_peak_would_show_a_whole_tensor() -> None:
    """In a process of its own: the heap of this one may have had room for it already."""
    assert on_ranks(1, peak_of_a_tensor)[0] > 19 * MIB
