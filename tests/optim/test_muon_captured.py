"""The iterations of zk.Muon as CUDA graphs, on a GPU that is played: the bits of single launches, and what is refused.

On a GPU itself: `tests/kernels/test_gpu.py`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))

pytest.importorskip("triton", reason="needs triton")

from counting_device import DEVICE, CountingDevice, counted_device, quiet
from played_graph import capture, current, play_cuda_graphs, play_graphs
from tables import each

from zerokern.core.errors import BackendError, say_once
from zerokern.kernels.captured import Captured
from zerokern.kernels.orthogonal import iterate_
from zerokern.kernels.triton.backend import make_stream
from zerokern.memory.staging import cuda_driver
from zerokern.optim import Muon

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs torch's and Triton's calls to be played")

SHAPES = ((8, 8), (12, 20), (8, 8), (20, 12), (8, 8), (12, 20), (6, 40))
HOW: tuple[Any, ...] = ((3.4445, -4.775, 2.0315), 5, 1e-7)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    play_graphs(monkeypatch)
    say_once.cache_clear()
    return play_cuda_graphs(monkeypatch)


@pytest.fixture
def device(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDevice]:
    with counted_device(monkeypatch) as device:
        yield device


def trained(steps: int, **settings: Any) -> list[Tensor]:
    """Of some steps the second is skipped, and in the fourth a parameter takes no part."""
    draw = torch.Generator().manual_seed(1)
    noise = lambda: [torch.randn(shape, generator=draw) for shape in SHAPES]  # noqa: E731
    params = [nn.Parameter(one.to(DEVICE)) for one in noise()]
    opt = Muon(params, lr=0.05, max_grad_norm=1.0, **settings)
    for step in range(steps):
        for param, grad in zip(params, noise(), strict=True):
            param.grad = grad.to(DEVICE)
        if step == 1:
            params[2].grad[1, 1] = float("inf")
        if step == 3:
            params[0].grad = None
        opt.step()
    assert opt.skipped_steps == (steps > 1)
    averages = [value for entry in opt.state_dict()["state"].values() for value in entry.values()]
    with quiet():
        return [one.detach().clone() for one in (*params, *averages)]


@each("together", [0, 1 << 10])
@each("settings", [
    {"ns_dtype": "fp32"}, {"ns_dtype": "bf16", "state_format": "bf16"},
    {"ns_dtype": "fp32", "ns_steps": 4, "ns_coefficients": ((3.0, -3.0, 1.0),) * 4},
    {"ns_dtype": "fp32", "ns_steps": 0},
])  # fmt: skip
def test_replays_have_the_bits_of_launches(
    settings: dict[str, Any], together: int, graphs: Any, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in batches, when a step is skipped, and after the table is made anew, in other memory."""
    monkeypatch.setattr("zerokern.optim.matrices.BATCH_NUMEL_ON_GPU", together)
    found = trained(6, **settings)
    assert graphs.made and graphs.replayed > 2 * graphs.made
    with monkeypatch.context() as patch:
        patch.setattr("zerokern.optim.matrix_table.CAPTURED_NUMEL", 0)
        made = graphs.made
        expected = trained(6, **settings)
        assert graphs.made == made
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def on_device() -> Captured:
    return Captured(DEVICE, partial(cuda_driver, DEVICE))


class Iterated:
    """A matrix that is orthogonalized, again and again in one memory."""

    def __init__(self, *shape: int) -> None:
        draw = torch.Generator().manual_seed(2)
        self.values = torch.randn(shape, generator=draw).to(DEVICE)
        self.x, self.sums = torch.empty(shape, device=DEVICE), torch.empty(1, dtype=torch.float64, device=DEVICE)
        self.launches = 0

    def iterate(self) -> None:
        self.launches += 1
        iterate_(self.x, self.sums, *HOW)

    def run(self, captured: Captured) -> Tensor:
        """One iteration, through a graph if there is one."""
        work = captured.of(("a kind", self.x.shape), self.iterate, self.x, self.sums)
        self.x.copy_(self.values)
        self.sums.fill_(float(self.values.square().sum()))
        work()
        with quiet():
            return self.x.clone()


def same(results: list[Tensor]) -> bool:
    return all(torch.equal(one, results[0]) for one in results)


def test_the_second_time_is_captured_and_tried(graphs: Any, device: CountingDevice) -> None:
    one, captured = Iterated(8, 12), on_device()
    results = [one.run(captured)]
    assert graphs.made == 0 and one.launches == 1, "a matrix that comes but once is not captured"
    results += [one.run(captured) for _ in range(3)]
    assert (graphs.made, graphs.replayed, one.launches) == (1, 4, 3), (
        "the trial launches, captures and replays once each"
    )
    other = Iterated(8, 12)  # in other memory, of a kind that has been tried
    results += [other.run(captured) for _ in range(3)]
    assert (graphs.made, graphs.replayed, other.launches) == (2, 6, 2)
    assert same(results)


def test_a_graph_of_freed_memory_is_not_replayed(graphs: Any, device: CountingDevice) -> None:
    """The player refuses that."""
    captured = on_device()
    for _ in range(3):
        one = Iterated(8, 12)
        assert same([one.run(captured) for _ in range(3)])
        del one
        gc.collect()


def test_a_graph_with_other_bits_is_not_used(
    graphs: Any, device: CountingDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, replay = Iterated(8, 12), graphs.replay

    def differing(graph: Any) -> None:
        replay(graph)
        with quiet():
            one.x[3, 5] = torch.nextafter(one.x[3, 5], torch.tensor(9.0))

    monkeypatch.setattr(graphs, "replay", differing)
    captured = on_device()
    assert same([one.run(captured) for _ in range(4)])
    assert same([one.run(captured) for captured in [on_device()] for _ in range(3)])
    assert graphs.made == graphs.replayed == 1, "tried once in a process"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "matrices of (8, 12) on cuda:0 is not used (its replay has other bits)" in said[0]


@pytest.mark.parametrize(("where", "knows"), [("the driver", True), ("the work", True), ("the work", False)])
def test_what_cannot_be_captured_is_launched(
    where: str,
    knows: bool,
    graphs: Any,
    device: CountingDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And torch's allocator and generator go on as before the capture; `knows`: torch itself sees to the latter."""
    monkeypatch.setattr("zerokern.kernels.captured._KNOWS_CAPTURES", knows)
    one, captured = Iterated(8, 12), on_device()
    iterate = one.iterate

    def waiting() -> None:
        iterate()
        if current() is not None:
            device.sync("a copy to the host")

    if where == "the driver":
        graphs.broken = "memory is pinned"
    else:
        one.iterate = waiting
    assert same([one.run(captured) for _ in range(3)]) and graphs.replayed == 0
    assert current() is None and not device.captures(), "the capture has ended"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "CaptureRefused: operation not permitted" in said[0] and "one by one" in said[0]
    assert not graphs.allocating and (knows or graphs.generator.state == [False])
    graphs.broken, other = "", Iterated(6, 40)
    assert same([other.run(captured) for _ in range(3)]) and graphs.replayed == 3, "those of another kind are captured"


def test_graphs_share_memory_where_they_replay_on_one_stream(
    graphs: Any, device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, and there alone, one follows the other; and their memory stays when the last one goes, for what cuBLAS
    works in on the stream of their captures is in it."""
    one, beside = Iterated(8, 12), cuda_driver(DEVICE)
    results, pools = [], set()
    for _ in range(2):
        captured = on_device()
        results += [one.run(captured) for _ in range(3)]
        with beside.aside("update"):
            results += [one.run(captured) for _ in range(3)]
        pools |= {id(graph.pool) for graph in graphs.ended}
        del captured
        gc.collect()
    assert same(results) and graphs.made == 4 and len(pools) == 2


def test_a_stream_of_our_own_is_made_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def create(stream: Any, *how: Any) -> int:
        asked.append([one.value for one in how])
        stream._obj.value = 0x77 if len(asked) == 1 else None
        return len(asked) - 1

    monkeypatch.setattr("zerokern.kernels.triton.backend._of_driver", lambda name: create)
    assert make_stream() == 0x77 and asked == [[1, -1]], "it waits for no other stream, nor does one for it"
    with pytest.raises(BackendError, match="has made no stream: 1"):
        make_stream()


def test_nothing_is_captured_within_a_capture(graphs: Any, device: CountingDevice) -> None:
    one, captured = Iterated(8, 12), on_device()
    one.run(captured)
    with capture(device):
        assert captured.of(("a kind", one.x.shape), one.iterate, one.x, one.sums) == one.iterate
    assert graphs.made == 0
