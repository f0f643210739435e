"""Models under DistributedDataParallel: gradients are reduced after they have been accumulated, and leave later."""

from __future__ import annotations

import copy
from typing import Any

import torch
from dtensor_cases import on_ranks
from offload_cases import Late
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import for_each

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels import reference
from zerokern.memory import Copies
from zerokern.optim import hosted

SETTINGS: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.3}
STEPS = 8


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)).to(dtype)


def train(rank: int, net: nn.Module, optimizer: Any, dtype: torch.dtype, device: PlayedDevice | None = None) -> list:
    """What every rank saw of each step, and its parameters at the end."""
    reduced = DistributedDataParallel(net, gradient_as_bucket_view=True)
    losses: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        if device is not None:
            device.synchronize()
        batch = torch.randn(8, 24).to(dtype)
        if step % 3 == 2:  # accumulated by this rank alone, then reduced with the next pass
            with reduced.no_sync():
                (reduced(batch) - batch).square().mean().backward()
        loss = (reduced(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if device is not None:
        device.synchronize()
    return [*losses, *(param.detach().float().tolist() for param in net.parameters())]


def compared(rank: int, schedule: str, dtype: torch.dtype) -> tuple[list, list, int]:
    """What ours shows, what the loop by hand does, and how many bytes of gradients came down to the host."""
    down = []

    class Counted(Copies):
        def to_host(self, src: Any, dst: Any, **how: Any) -> Any:
            down.append(sum(one.nbytes for one in ([src] if isinstance(src, Tensor) else src)))
            return super().to_host(src, dst, **how)

    hosted.Copies = Counted
    device = PlayedDevice(poison=True)
    net, by_hand = model(dtype), model(dtype)
    for param in net.parameters():
        device.own(param)
    delay = zk.Delayed(after=2) if schedule == "delayed" else schedule
    ours = zk.AdamW(net.parameters(), tier="cpu", schedule=delay, **SETTINGS)
    expected: Any = zk.AdamW(by_hand.parameters(), **SETTINGS)
    if schedule == "delayed":
        ahead = copy.deepcopy(list[Tensor](by_hand.parameters()))
        expected = Late(by_hand.parameters(), ahead, zk.AdamW(ahead, **SETTINGS), after=2)
    found = train(rank, net, ours, dtype, device), train(rank, by_hand, expected, dtype)
    device.close()
    return *found, sum(down[1:])  # the twins begin as what the parameters are


ROWS = [
    ("sync", torch.bfloat16),
    ("overlap", torch.float32),
    ("delayed", torch.bfloat16),
]


def all_compared(rank: int) -> list[tuple[list, list, int]]:
    return for_each(rank, lambda rank, row: compared(rank, *row), ROWS)


def test_reduced_gradients_are_what_is_applied() -> None:
    of_ranks = on_ranks(2, all_compared)
    for (_, dtype), first, second in zip(ROWS, *of_ranks, strict=True):
        sizes = [param.numel() for param in model(dtype).parameters()]
        # with it the sums of squares of its chunks, which the device has measured
        nbytes = sum(dtype.itemsize * numel + 8 * -(-numel // reference.SUMSQ_CHUNK) for numel in sizes)
        for found, expected, down in (first, second):
            assert found == expected
            assert down == STEPS * nbytes, "each gradient crosses once, when it is final"
        assert first[0][STEPS:] == second[0][STEPS:], "the ranks have drifted apart"
        assert first[0][:STEPS] != second[0][:STEPS], "both ranks were fed the same"
