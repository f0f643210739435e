"""CUDA graphs on the GPU that is not here: what a rank launches in a capture is recorded, and a replay does it again.

What is recorded is what a graph keeps: functions of torch with the memory that they work on, kernels, collectives.
Memory that was there before the capture is known by its address alone, as in a graph: a replay fails where it is gone.
Memory made in the capture is the graph's own. Versions, hooks and all that Python does are no part of a replay.

A capture refuses what CUDA refuses: waiting for the device, asking an event or a collective, copies by the copy engine
that the host waits for, work that was launched outside, a stream or a collective that is not joined when it ends. Other
than on a GPU, what `capture` captures is also done, once: a step that is captured counts as one. What the library
captures itself (`PlayedCUDAGraph`) is done by replays alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from counting_device import DEVICE, DOWNLOAD, LAUNCH, SYNC, UPLOAD, CountingDevice, Event, QuietLibrary, Stream, quiet
from device_double import Double
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_MAKES_NOTHING = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::detach", "aten::alias")
_WAITS = ("aten::nonzero", "aten::masked_select", "aten::unique", "aten::_unique2", "aten::equal")
_HERE = threading.local()  # the graph that this rank is capturing


class CaptureRefused(RuntimeError):
    """What CUDA says of an operation that a capture does not allow."""


def refuse(what: str) -> None:
    if (graph := current()) is not None:
        graph.broken = True
    raise CaptureRefused(f"operation not permitted when stream is capturing: {what}")


def current() -> PlayedGraph | None:
    return getattr(_HERE, "graph", None)


class Memory:
    """A tensor as a graph knows it."""

    def __init__(self, tensor: Tensor, own: dict[int, Any]) -> None:
        storage = tensor.untyped_storage()
        self._weak = storage._weak_ref()
        if storage._cdata in own:
            own[storage._cdata] = storage
        self._spot = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self._dtype = tensor.dtype

    def __call__(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        assert storage is not None, "the graph works on freed memory"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._spot)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


class PlayedGraph(TorchDispatchMode):
    """One rank's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.program: list[Callable[[], Any]] = []
        self.joined = True  # every collective has been waited for
        self.works: set[int] = set()
        self.streams: set[Stream] = set()
        self._own: dict[int, Any] = {}  # storages made in the capture
        self._others: list[Any] = []
        self._before: dict[int, tuple[Any, Any]] | None = None
        self.paused = self.broken = False

    def remember(self, tree: Any) -> Callable[[], Any]:
        """Returns what makes the same arguments again."""
        kept = tree_map(lambda one: Memory(one, self._own) if isinstance(one, Tensor) else one, tree)
        return lambda: tree_map(lambda one: one() if isinstance(one, Memory) else one, kept)

    def record(self, work: Callable[..., Any], *args: Any, **given: Any) -> None:
        found = self.remember((args, given))

        def again() -> None:
            args, given = found()
            work(*args, **given)

        self.program.append(again)

    def keep_memory(self) -> None:
        """From now on what is outside is kept as it is, for `undo`."""
        self._before = {}

    def undo(self) -> None:
        """Puts back what memory outside held before the capture."""
        for storage, before in (self._before or {}).values():
            storage.copy_(before)
        self._before = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with quiet():
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, given: dict[str, Any]) -> Any:
        if any(
            one.__torch_dispatch__ is not Tensor.__torch_dispatch__
            for one in types
            if hasattr(one, "__torch_dispatch__")
        ):
            return NotImplemented
        name = func._schema.name
        if self.paused:
            return func(*args, **given)
        if name in _WAITS:
            refuse(name)
        if name == "aten::lift_fresh":  # what the program has written out is an argument of a launch
            self._own[args[0].untyped_storage()._cdata] = args[0].untyped_storage()
        storages = [one.untyped_storage() for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        before = {one._cdata for one in storages}
        if self._before is not None:
            for one in storages:
                if one._cdata not in self._own and one._cdata not in self._before:
                    self._before[one._cdata] = one, one.clone()
        again = self.remember((args, given)) if func._schema.is_mutable else None
        made = func(*args, **given)
        if again is not None:
            self.program.append(lambda: _call(func, again))
            return made
        new = [
            one for one in tree_leaves(made) if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before
        ]
        for one in new:
            self._own[one.untyped_storage()._cdata] = one.untyped_storage()
        if new and not name.startswith(_MAKES_NOTHING):
            inputs, outputs = self.remember((args, given)), self.remember(tree_leaves(made))
            self.program.append(lambda: _fill(outputs(), tree_leaves(_call(func, inputs))))
        return made

    def replay(self) -> None:
        """All of it, in the order of the launches; no version moves, and autograd sees nothing."""
        assert current() is None
        with quiet(), torch._C._AutoDispatchBelowADInplaceOrView():
            for launch in self.program:
                launch()


def _call(func: Any, arguments: Callable[[], Any]) -> Any:
    try:
        args, given = arguments()
    except AssertionError as error:
        error.add_note(str(func))
        raise
    return func(*args, **given)


def _fill(outputs: list[Any], fresh: list[Any]) -> None:
    for out, one in zip(outputs, fresh, strict=True):
        if isinstance(out, Tensor):
            out.copy_(one)


class GraphDevice(CountingDevice):
    """The device of `counting_device`, which refuses in a capture what CUDA does."""

    def count(self, what: str, which: str, where: str | None = None) -> None:
        graph = current()
        assert graph is not None or not isinstance(self.stream, OwnStream), "cuBLAS's workspace is in memory of all"
        if graph is not None and not graph.paused:
            if what in (SYNC, UPLOAD, DOWNLOAD):
                refuse(f"{what}: {which}")
            if what == LAUNCH:
                assert self.stream in graph.streams, f"{which} is launched on {self.stream.name}, which is not captured"
                self.stream.given += 1
        super().count(what, which, where)

    def captures(self) -> bool:
        return current() is not None


class OwnStream(Stream):
    """A stream that torch does not know. Its first capture makes what cuBLAS works in for it."""

    workspace_in: Any = None  # which pool


class Generator:
    """torch's, before 2.13: a capture that was broken off leaves its state so that it draws no more."""

    def __init__(self, state: list[bool]) -> None:
        self.state = state

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def clone_state(self) -> Generator:
        return Generator([*self.state])

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


class PlayedCUDAGraph:
    """`torch.cuda.CUDAGraph`. Of what is captured nothing is done; a replay is one launch."""

    device: GraphDevice
    broken = ""  # why none begins
    made = replayed = 0
    allocating: list[Any]  # pools of captures that torch's allocator knows of
    ended: weakref.WeakSet[PlayedCUDAGraph]
    generator: Generator

    def __init__(self) -> None:
        type(self).made += 1

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local" and pool is not None
        stream = self.device.stream
        assert isinstance(stream, OwnStream), "torch hands this stream out: others may have launched products there"
        if stream.workspace_in is not None:
            assert any(one.pool is stream.workspace_in for one in self.ended), "cuBLAS works in memory that was freed"
            assert pool is stream.workspace_in, "cuBLAS works in memory of other graphs"
        self.pool = stream.workspace_in = pool
        self.allocating.append(pool)
        self.generator.state[0] = True
        if self.broken:
            refuse(self.broken)
        assert current() is None
        _HERE.graph = self._graph = graph = PlayedGraph()
        graph.streams.add(self.device.stream)
        graph.keep_memory()
        graph.__enter__()

    @staticmethod
    def drop_workspaces() -> None:
        raise AssertionError("what cuBLAS works in is dropped, also what graphs of the program have")

    @classmethod
    def end_allocating(cls, device: int, pool: Any) -> None:
        if pool not in cls.allocating:
            raise RuntimeError("not currently recording to the pool")
        cls.allocating.remove(pool)

    def capture_end(self) -> None:
        self._graph.__exit__(None, None, None)
        _HERE.graph = None
        self._graph.undo()
        if self._graph.broken:
            refuse("the end of a capture that is broken off")
        self.end_allocating(0, self.pool)
        self.generator.state[0] = False
        self.ended.add(self)

    def replay(self) -> None:
        type(self).replayed += 1
        self.device.count(LAUNCH, "replay")
        self._graph.replay()


def play_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> type[PlayedCUDAGraph]:
    """Before `counted_device`: the library can capture; returns the class of its graphs."""
    import counting_device

    class Graph(PlayedCUDAGraph):
        """Of this test."""

        allocating, ended, generator = [], weakref.WeakSet(), Generator([False])

    class Device(GraphDevice):
        def __init__(self) -> None:
            super().__init__()
            Graph.device = self

    monkeypatch.setattr(counting_device, "CountingDevice", Device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "default_generators", (Graph.generator,))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", Graph.drop_workspaces, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", Graph.end_allocating, raising=False)
    monkeypatch.setattr("zerokern.memory.staging.CudaDriver.own_stream", lambda driver: OwnStream(name="own"))
    for name in ("_EXACT", "_MEMORY"):
        monkeypatch.setattr(f"zerokern.kernels.captured.{name}", {})
    return Graph


class GraphEvent(Event):
    graph: PlayedGraph | None = None

    def record(self, stream: Stream | None = None) -> None:
        super().record(stream)
        graph = current()
        self.graph = graph if graph is not None and self.stream in graph.streams else None

    def _ask(self, what: str) -> None:
        if current() is not None or self.graph is not None:
            refuse(f"{what} of an event")

    def query(self) -> bool:
        self._ask("query")
        return super().query()

    def synchronize(self) -> None:
        self._ask("synchronize")
        super().synchronize()


def _wait_event(stream: Stream, event: Any) -> None:
    graph = current()
    if graph is not None:
        if event.graph is graph:
            graph.streams.add(stream)
        elif stream in graph.streams:
            refuse("a wait for work that was launched outside")
    assert graph is event.graph or event.graph is None, "a stream waits for an event in a graph"
    stream.given += 1
    stream._follows.append((stream.given, event))


class GraphWork:
    def __init__(self, library: Any, name: str, tensors: tuple, given: dict[str, Any]) -> None:
        self.graph, self.box, self.device = current(), {}, library.device
        call = getattr(super(GraphLibrary, library), name)

        def launch(*tensors: Tensor, **given: Any) -> None:
            with quiet():
                self.box["work"] = call(*tensors, **given)

        if self.graph is None:
            launch(*tensors, **given)
            return
        self.graph.record(launch, *tensors, **given)
        self.graph.works.add(id(self))
        with self.graph.pause():
            launch(*tensors, **given)

    def is_completed(self) -> bool:
        if current() is not None or self.graph is not None:
            refuse("a question whether a collective is over")
        return self.box["work"].is_completed()

    def wait(self) -> None:
        graph = current()
        if graph is not self.graph:
            refuse("a wait for a collective that was launched elsewhere")
        if graph is None:
            self.box["work"].wait()
            return
        box, stream = self.box, self.device.stream
        graph.works.discard(id(self))
        graph.streams.add(stream)  # it follows the library's own, which followed the one that launched
        stream.given += 1
        graph.program.append(lambda: box["work"].wait())
        with graph.pause():
            box["work"].wait()


class GraphLibrary(QuietLibrary):
    """Collectives that a graph can hold."""

    def gather(self, output: Any, input: Any, **given: Any) -> Any:
        return GraphWork(self, "gather", (output, input), given)

    def scatter(self, output: Any, input: Any, **given: Any) -> Any:
        return GraphWork(self, "scatter", (output, input), given)

    def all_reduce(self, tensor: Any, **given: Any) -> Any:
        return GraphWork(self, "all_reduce", (tensor,), given)

    def broadcast(self, tensor: Any, **given: Any) -> Any:
        return GraphWork(self, "broadcast", (tensor,), given)


class GraphDouble(Double):
    """The optimizer's kernels, as `device_double` has them."""

    def launch(self, work: Callable[..., None], **arguments: Any) -> None:
        graph = current()
        if graph is None:
            with quiet():
                work(**arguments)
            return
        self.graph = []
        super().launch(work, **arguments)
        graph.program += self.graph
        self.graph = None
        with quiet(), graph.pause():
            work(**arguments)


def _add_up(dst: Tensor, srcs: Any, *, add: bool = True, scale: float = 1.0, squares: Any = None) -> None:
    dst = dst.data
    total = dst.float() if add else torch.zeros_like(dst, dtype=torch.float32)
    for one in [srcs] if isinstance(srcs, Tensor) else srcs:
        total = total + one.float() * scale
    dst.copy_(total)


def _flatten(self: Any, places: Any, tensors: Any, buffer: Tensor, layout: Any) -> None:
    for place, grad in zip(places, tensors, strict=True):
        buffer.narrow(0, self._offsets[place], self._numels[place]).copy_(grad.reshape(-1))


def play_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `counted_device`: makes it, and the ranks on it, know graphs."""
    import counting_device

    from zerokern.optim import device
    from zerokern.zero.params import BucketMemory

    monkeypatch.setattr(counting_device, "CountingDevice", GraphDevice)
    monkeypatch.setattr(counting_device, "Event", GraphEvent)
    monkeypatch.setattr(counting_device, "QuietLibrary", GraphLibrary)
    monkeypatch.setattr(Stream, "wait_event", _wait_event)
    monkeypatch.setattr(device, "kernels", GraphDouble()._kernels)
    for module in ("comm.device", "comm.group", "comm.hybrid"):
        monkeypatch.setattr(f"zerokern.{module}.add_up", _add_up)
    monkeypatch.setattr("zerokern.zero.reducing.Flattening._launch", _flatten)
    monkeypatch.setattr("zerokern.kernels.triton.upload._pin", _pin)
    monkeypatch.setattr("zerokern.memory.staging.CudaDriver.stream", _stream)
    for name in ("allocate", "release"):
        monkeypatch.setattr(BucketMemory, name, _resizing(getattr(BucketMemory, name)))


def _stream(driver: Any, name: str) -> Stream:
    """Each rank's own: here all of them are threads of one process."""
    return vars(_HERE).setdefault(name, Stream(name=name))


def _pin(nbytes: int) -> Tensor:
    if current() is not None:
        refuse("memory is pinned")
    return torch.empty(nbytes, dtype=torch.uint8)


def _resizing(act: Callable[..., Any]) -> Callable[..., Any]:
    """What a graph allocates comes and goes at every replay; its contents in between are nobody's."""

    def acted(memory: Any) -> Any:
        before = memory.full.untyped_storage().nbytes()
        result = act(memory)
        graph, after = current(), memory.full.untyped_storage().nbytes()
        if graph is not None and before != after:
            graph.record(lambda full: full.untyped_storage().resize_(after), memory.full.detach()[:0])
        return result

    return acted


@contextmanager
def capture(device: GraphDevice) -> Iterator[PlayedGraph]:
    """`with torch.cuda.graph(...)`, on one rank."""
    graph = PlayedGraph()
    origin = device.stream
    graph.streams.add(origin)
    _HERE.graph = graph
    try:
        with graph:
            yield graph
    finally:
        _HERE.graph = None
    if graph.works:
        raise CaptureRefused(f"{len(graph.works)} collectives were not joined")
    reached: dict[Stream, int] = {origin: origin.given}
    todo = [origin]
    while todo:
        stream = todo.pop()
        for at, event in stream._follows:
            if at <= reached[stream] and event.graph is graph and event.at > reached.get(event.stream, 0):
                reached[event.stream] = event.at
                todo.append(event.stream)
    for stream in graph.streams:
        if stream.given > reached.get(stream, 0):
            raise CaptureRefused(f"the stream {stream.name} was not joined")


def is_capturing() -> bool:
    return current() is not None


__all__ = [
    "DEVICE", "CaptureRefused", "GraphDevice", "PlayedCUDAGraph", "capture", "is_capturing", "play_cuda_graphs",
    "play_graphs",
]  # fmt: skip
