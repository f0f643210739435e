"""What a step asks of a device, at 224 buckets: launches, copies on the compute stream, waits of the host.

Counted from one step's forward to the next one's, once all is made; a failing test prints who asks for what.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))

pytest.importorskip("triton", reason="needs triton")

from counting_device import (
    COLLECTIVE,
    DEVICE,
    DOWNLOAD,
    LAUNCH,
    SYNC,
    UPLOAD,
    CountingDevice,
    backward,
    counted_device,
    on_devices,
)
from played_graph import play_cuda_graphs

import zerokern as zk

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs torch's and Triton's calls to be played; on a GPU nsys counts"
)

RANKS = 2
BUCKETS = [32, pytest.param(224, marks=pytest.mark.slow)]  # as of a model of 8B
CONSTANT = 20  # launches of a step that are about no bucket
OVERLAP = {"tier": "cpu", "schedule": "overlap"}


class Many(nn.Module):
    """One parameter for each bucket."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((256,), 1.0 + i / 100)) for i in range(buckets))

    def forward(self) -> Tensor:
        return torch.stack([part.square().sum() for part in self.parts]).sum()


def train(
    device: CountingDevice, group: Any, meeting: threading.Barrier | None, buckets: int = 32, **settings: Any
) -> None:
    """Two steps, of which the second is counted."""
    model = Many(buckets).to(DEVICE)
    if group is not None:
        zk.shard(model, mesh=group, stage=2, bucket_bytes=1024)
    opt = zk.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, **settings)
    for step in range(2):
        for counts in (False, step == 1):
            if meeting is not None:
                meeting.wait(60)
            device.counting = counts
        backward(model())
        opt.step()
        opt.zero_grad()
    device.counting = False
    opt.close()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    return play_cuda_graphs(monkeypatch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDevice]:
    with counted_device(monkeypatch) as device:
        yield device


@contextlib.contextmanager
def shown(device: CountingDevice) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(device.table())
        raise


@pytest.mark.parametrize("buckets", BUCKETS)
def test_stage_2_on_the_device(buckets: int, device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each bucket: its gradients are flattened, and their addresses sent if they have moved. Nobody waits."""
    meeting = threading.Barrier(RANKS)
    on_devices(device, monkeypatch, RANKS, lambda group: train(device, group, meeting, buckets))
    with shown(device):
        assert device.total(UPLOAD) == device.total(DOWNLOAD) == 0
        assert device.total(SYNC) == 0
        assert buckets <= device.total(LAUNCH) / RANKS <= 2 * buckets + CONSTANT
        assert device.total(COLLECTIVE) / RANKS == 2 * buckets + 2


@pytest.mark.parametrize("buckets", BUCKETS)
def test_stage_2_with_state_in_host_memory_and_overlap(
    buckets: int, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies have streams of their own, and are waited for on the worker, but for the norm that decides the step."""
    meeting = threading.Barrier(RANKS)
    on_devices(device, monkeypatch, RANKS, lambda group: train(device, group, meeting, buckets, **OVERLAP))
    with shown(device):
        assert device.total(UPLOAD, "compute") == device.total(DOWNLOAD, "compute") == 0
        assert device.total(UPLOAD, "beside") / RANKS == device.total(DOWNLOAD, "beside") / RANKS == buckets
        assert device.total(SYNC, "main") / RANKS <= 4  # gradients that have come, and what ranks said
        assert device.total(SYNC, "worker") / RANKS <= 2 * buckets  # a copy up, and a gather
        assert device.total(LAUNCH) / RANKS <= 2 * buckets + CONSTANT, "flattened, and its squares summed"


@pytest.mark.parametrize("settings, launches", [({}, 5), (OVERLAP, 2)], ids=["on the device", "overlap"])
def test_plain_parameters(device: CountingDevice, settings: dict[str, Any], launches: int) -> None:
    """A fused step of gradients that have moved, and of a rate that changes, sends nothing either."""
    thread = threading.Thread(target=train, args=(device, None, None), kwargs=settings, name="double 0")
    thread.start()
    thread.join()
    with shown(device):
        assert device.total(UPLOAD, "compute") == device.total(DOWNLOAD, "compute") == 0
        assert device.total(LAUNCH) <= launches
        assert device.total(SYNC) <= (2 if settings else 0)


MATRICES = 6
OF_A_MATRIX = 4  # 26 of a matrix that is not captured, and 28 of one with more rows than columns
OF_A_STEP = 6  # two tables are sent and prepared, the steps counted, and it is asked whether this one is skipped


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_matrices_one_by_one(
    shape: tuple[int, int], graphs: Any, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each: its average, its sums of squares, its iteration, and what applies that."""
    monkeypatch.setattr("zerokern.optim.matrices.BATCH_NUMEL_ON_GPU", 0)

    params = [nn.Parameter(torch.ones(shape, device=DEVICE)) for _ in range(MATRICES)]
    opt = zk.Muon(params, lr=1e-2)
    for step in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        opt.param_groups[0]["lr"] /= 2
        device.counting = step == 2
        opt.step()
        device.counting = False
    opt.close()
    with shown(device):
        assert device.total(UPLOAD) == device.total(DOWNLOAD) == device.total(SYNC) == 0
        assert 0 < device.total(LAUNCH) <= OF_A_MATRIX * MATRICES + OF_A_STEP


class Units(nn.Module):
    """Of one of them a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.units[2].weight.requires_grad_(False)

    def forward(self) -> Tensor:
        x = torch.ones(4, 16, device=DEVICE)
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


@pytest.mark.parametrize("stage, tier", [(0, "device"), (1, "device"), (3, "device"), (3, "cpu")])
def test_passes_that_accumulate(stage: int, tier: Any, device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any stage, and with parameters that rest in host memory, micro-batches send nothing and wait for nothing."""
    meeting = threading.Barrier(RANKS)

    def work(group: Any) -> None:
        model = zk.shard(Units().to(DEVICE), mesh=group, stage=stage, tier=tier)
        opt = zk.AdamW(model.parameters(), max_grad_norm=1.0)
        for step in range(3):
            for counts in (False, step == 2):
                meeting.wait(60)
                device.counting = counts
            for _ in range(3):
                backward(model())
            meeting.wait(60)
            device.counting = False
            meeting.wait(60)
            opt.step()
            opt.zero_grad()
        opt.close()

    on_devices(device, monkeypatch, RANKS, work)
    with shown(device):
        assert device.total(UPLOAD, "compute") == device.total(DOWNLOAD, "compute") == 0
        assert device.total(SYNC) <= (4 * RANKS if tier == "cpu" else 0)  # a unit's parameters, once they were updated


ASKS = """
def ask(there):
    x = torch.tensor([1.0, 2.0], device=there)       # an upload
    x.copy_(torch.ones(2), non_blocking=True)        # another
    y = x.add(1.0).mul_(2.0)                         # two launches
    torch.add(x, y, out=y)                           # one
    x.copy_(y), y[:1].view(1), torch.empty(3, device=there)  # one
    found = y.cpu(), y.tolist()                      # a download, and two syncs
    torch.ones(2).add(1.0).tolist()                  # of the host's own
    event = torch.cuda.Event()
    event.record()
    event.synchronize(), event.synchronize()         # one
    return x, found
"""


def test_what_should_be_counted_is(device: CountingDevice) -> None:
    """Or the tests above would prove nothing."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ASKS, str(Path(zk.__file__).parent / "zero" / "asks.py"), "exec"), names)
    device.counting = True
    x, (copied, values) = names["ask"](DEVICE)
    device.counting = False
    assert (x.device, copied.device, values, x.is_cuda) == (DEVICE, torch.device("cpu"), [5.0, 5.0], True)
    found = [device.total(what) for what in (UPLOAD, LAUNCH, DOWNLOAD, SYNC)]
    assert found == [2, 4, 1, 3], device.table()
