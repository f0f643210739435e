"""Whole training steps in CUDA graphs under zk.shard: replays have the bits of eager steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

for _folder in ("comm", "optim"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / _folder))

pytest.importorskip("triton", reason="needs triton")

from counting_device import DEVICE, CountingDevice, backward, counted_device, on_devices, quiet
from played_graph import CaptureRefused, capture, is_capturing, play_graphs

import zerokern as zk

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs torch's and Triton's calls to be played")


BUILDING = threading.Lock()


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDevice]:
    play_graphs(monkeypatch)
    with counted_device(monkeypatch) as device:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
        yield device


class Training:
    """One rank's model, optimizer and static input."""

    def __init__(self, group: Any, stage: int, micro: int = 1, **given: Any) -> None:
        with BUILDING:  # values are drawn from the process's generator
            torch.manual_seed(0)
            model = Net().to(DEVICE)
        self.rank, self.micro = group.rank, micro
        self.model = zk.shard(model, mesh=group, stage=stage, bucket_bytes=1100)
        self.opt = zk.AdamW(self.model.parameters(), lr=1e-2, capturable=True, **given)
        self.x = torch.zeros(micro, 4, 16, device=DEVICE)

    def set_input(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=True)
        for part in range(self.micro):
            backward(self.model(self.x[part]))
        self.opt.step()

    def values(self) -> list[Tensor]:
        with zk.gathered(self.model):
            found = [param.detach().clone() for param in self.model.parameters()]
        state = [value for entry in self.opt.state.values() for value in entry.values()]
        with quiet():
            return [*found, *(getattr(one, "local", one).detach().clone() for one in state)]


def trained(device: Any, group: Any, steps: int, capture_at: int | None, **given: Any) -> list[Tensor]:
    run = Training(group, **given)
    graph = None
    for step in range(steps):
        run.set_input(step)
        if graph is not None:
            graph.replay()
        elif step == capture_at:
            with capture(device) as graph:
                run.step()
        else:
            run.step()
    return run.values()


@pytest.mark.parametrize("given", [{}, {"max_grad_norm": 0.1}, {"micro": 2}])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replays_have_the_bits_of_eager_steps(
    stage: int, given: dict[str, Any], device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lambda at: on_devices(device, monkeypatch, 2, lambda group: trained(device, group, 6, at, stage=stage, **given))
    eager, replayed = run(None), run(2)
    with quiet():
        for mine, expected in zip(replayed, eager, strict=True):
            assert all(map(torch.equal, mine, expected)), (mine[0], expected[0])
