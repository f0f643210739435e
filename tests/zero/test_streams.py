"""Streams: few for a whole process, however many models it has; gathers and reductions do not wait for each other."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tables import each
from test_tiers import batches, model_of, values
from torch import Tensor
from worlds import step_and_zero

import zerokern as zk
from zerokern.activations import keeping
from zerokern.comm import Group, Handle
from zerokern.comm.group import own_span
from zerokern.comm.hybrid import HybridGroup
from zerokern.examples.played_device import PlayedDevice, PlayedMark, PlayedStream
from zerokern.memory import Copies, staging
from zerokern.memory.staging import STREAMS, CudaDriver, cuda_driver

Times = dict[str, list[tuple[int, int]]]


class Ahead(PlayedDevice):
    """The host runs ahead of side streams; of the program's, where torch computes at once, it waits for what that
    follows."""

    def follow(self, stream: PlayedStream | None, mark: PlayedMark) -> None:
        super().follow(stream, mark)
        if self._this_or_current(stream) is self.compute:
            mark.wait()


class TwoAlike(Group):
    """Two ranks that have the same batch, of which this is the first: the other's spans are what this one has.

    Collectives run on the current stream of a played device, reductions slowly.
    """

    def __init__(self, device: PlayedDevice, seconds: float) -> None:
        super().__init__(0, 2, torch.device("cpu"), "two alike")
        self._device, self._seconds = device, seconds
        self.times: Times = {"gather": [], "reduce": []}

    def _launch(self, work: Callable[[], object], seconds: float = 0.0, what: str = "") -> Handle:
        note = self.times.get(what)
        ended = None if note is None else lambda begin, end: note.append((begin, end))
        mark = self._device.launch(work, seconds, ended=ended)
        gate = lambda: self._device.follow(None, mark)  # noqa: E731
        return Handle(gate, mark.done, gate)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, scale: float, add: bool, *_: Any) -> Handle:
        def work() -> None:
            total = own_span(bucket, 0, 2) * (2 * scale)
            out.copy_(out + total if add else total)

        return self._launch(work, self._seconds, "reduce")

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        def work() -> None:
            mine = own_span(full, 0, 2)
            if shard is not None:
                mine.copy_(shard)
            # what the other rank's span is nobody knows here; the same function of ours on every run
            own_span(full, 1, 2).copy_(mine)

        return self._launch(work, what="gather")

    def _publish(self, full: Tensor) -> Handle:
        return self._all_gather(full, None)

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        return self._launch(lambda: tensor.mul_(2) if op == "sum" else None)

    def agree(self, key: str) -> None: ...


def trained(seconds: float) -> tuple[Times, dict[str, Tensor]]:
    device = Ahead(poison=True)
    model = model_of()
    for param in model.parameters():
        device.own(param)
    group = TwoAlike(device, seconds)
    zk.shard(model, stage=3, mesh=group, tier="cpu", bucket_bytes=1 << 14)
    opt = zk.SGD(model.parameters(), lr=1e-3)
    for x in batches(2):
        group.times["gather"].clear()
        group.times["reduce"].clear()
        model(x).square().mean().backward()
        step_and_zero(opt)
    device.synchronize()
    times = {what: list(rows) for what, rows in group.times.items()}
    found = values(model)
    del model, opt, group
    gc.collect()
    device.close()
    return times, found


def test_a_gather_begins_while_a_slow_reduction_runs() -> None:
    """They had one stream, so that each gather of backward came behind the reduction that was launched before it."""
    slow, found = trained(0.04)
    _, expected = trained(0.0)
    within = [one for one, _ in slow["gather"] if any(begin < one < end for begin, end in slow["reduce"])]
    assert len(within) >= 3, "of five blocks"
    assert all(torch.equal(found[name], one) for name, one in expected.items()), "the same bits"


@contextlib.contextmanager
def everything_on(device: PlayedDevice) -> Iterator[None]:
    """All tensors lie on the device while this lasts, those that a forward makes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "driver_of", lambda tensor: device)
        yield


def test_all_parts_of_a_process_share_the_streams_of_a_device() -> None:
    """Parameters, state and kept inputs in host memory, two ranks of two replicas, two models: each had its own."""
    device = Ahead()
    with everything_on(device):
        kept: list[Any] = []
        for number in range(2):
            model = model_of(seed=number)
            for param in model.parameters():
                device.own(param)
            mesh = HybridGroup(TwoAlike(device, 0.0), TwoAlike(device, 0.0))
            mesh._driver = device  # as on a GPU
            zk.shard(model, stage=3, mesh=mesh, tier="cpu", keep="cpu")
            opt = zk.AdamW(model.parameters(), lr=1e-3, tier="cpu", schedule="overlap", max_grad_norm=1.0)
            for _ in range(2):
                model(torch.randn(4096, 8)).square().mean().backward()
                step_and_zero(opt)
            opt.flush()
            kept += [model, opt]
        device.synchronize()
        assert len(device.streams) == len(set(device.streams)), device.streams
        assert {*device.streams} <= {"compute", *STREAMS} and {"down", "up", "gather", "reduce"} <= {*device.streams}
        del model, opt, mesh, kept
    gc.collect()
    device.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch.cuda as far as drivers ask for it; the list is of the streams that were drawn from torch's pool."""
    drawn: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            drawn.append(self)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(staging, "runtime_library", lambda: None)
    monkeypatch.setattr(staging, "_CUDA_STREAMS", {})
    return drawn


def test_a_process_draws_as_many_streams_as_one_model(cuda: list[Any]) -> None:
    """torch has 32 and hands them out in turn: what draws anew with each model soon copies on NCCL's own stream."""
    gpu = torch.device("cuda", 0)
    for _ in range(40):
        copies, driver = Copies(cuda_driver(gpu)), CudaDriver(gpu)
        for name in STREAMS:
            driver.stream(name)
        gone = weakref.ref(copies)
        del copies, driver
        assert gone() is None
    assert len(cuda) == len(STREAMS) <= 8


def test_one_driver_for_each_gpu_while_somebody_holds_it(cuda: list[Any]) -> None:
    first, second = (torch.device("cuda", index) for index in (0, 1))
    driver = cuda_driver(first)
    assert cuda_driver(first) is driver and cuda_driver(second) is not driver
    assert driver.stream("up") is not cuda_driver(second).stream("up"), "two devices, two pairs of streams"
    gone = weakref.ref(driver)
    del driver
    assert gone() is None


@each("name", ["", "aside", "compute"])
def test_no_other_streams_are_made(cuda: list[Any], name: str) -> None:
    with pytest.raises(ValueError, match=" | ".join(map(repr, STREAMS)).replace("|", r"\|")):
        CudaDriver(torch.device("cuda", 0)).stream(name)
    device = PlayedDevice()
    with pytest.raises(ValueError, match="must be 'down'"), device.aside(name):
        pass
    device.close()


def test_closing_ones_copies_leaves_the_others_theirs() -> None:
    device = PlayedDevice(down_gb_s=0.001)
    one, other = Copies(device), Copies(device)
    source, target = torch.ones(1 << 12), torch.zeros(1 << 12)
    ticket = one.to_host(source, target)
    with one:
        assert not ticket.done()
    assert ticket.done(), "it waits for what it has in flight"
    other.to_host(source, target).wait()
    Copies(device).to_device(target, source).wait()
    assert device.streams == ["compute", "down", "up"]
    device.close()


def test_what_is_gone_leaves_nothing_on_the_streams_of_others() -> None:
    """Each keeps the tensors of its own copies alone, and lets them go with itself."""
    gc.disable()
    try:
        device = PlayedDevice()
        one, other = Copies(device), Copies(device)
        source, target = torch.ones(1 << 12), torch.zeros(1 << 12)
        other.to_host(torch.ones(4), torch.zeros(4)).gate()
        one.to_host(source, target).gate()
        there = [weakref.ref(one), weakref.ref(source), weakref.ref(target)]
        del one, source, target
        assert [ref() for ref in there] == [None] * 3 and not other._closed
    finally:
        gc.enable()
    device.close()
