"""What zk.load_pretrained takes while it loads, as the kernel counts it: never a tensor whole."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
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
def peaks(world: World, folder: Path, width: int, depth: int) -> tuple[int, int]:
    model = zk.build(lambda: Wide(width, depth), stage=3)
    small = zk.build(lambda: Wide(8, 2), stage=3)
    load_pretrained(small, folder / "small")  # what a first call imports
    large_things_apart()
    restart_peak()
    before = peak()
    load_pretrained(model, folder / "large")
    return peak() - before, sum(one.nbytes for one in local(model))


def test_no_rank_has_a_tensor_whole(tmp_path: Path) -> None:
    """As the kernel counts: two ranks load 8 tensors of 9 MiB; each may take the half of one, and what is kept."""
    width, depth = 1536, 8
    for name, some in (("small", Wide(8, 2)), ("large", Wide(width, depth))):
        for dtype in (BF16, torch.float32):
            save_file({n: t.detach().to(dtype) for n, t in some.state_dict().items()}, tmp_path / f"{name}{dtype}")
    whole = width * width * 4
    for dtype, lost in ((BF16, 0), (torch.float32, 2 * width * width * depth // 2)):
        for name in ("small", "large"):
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to(tmp_path / f"{name}{dtype}")
        for grown, own in on_ranks(2, peaks, tmp_path, width, depth):
            assert own == width * width * depth
            # half a tensor as it is read, as fp32, and split; twice what is kept of one while it is kept
            assert grown < lost + (whole // 2) * (3 if lost else 0) + 2 * MIB


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
