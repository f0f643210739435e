"""Launches that are made again and again on the same memory of a GPU, as one: captured into a CUDA graph, and tried.

The iteration of a matrix is some 20 launches of torch. At up to 40 us each the host takes longer for those of a small
matrix than the GPU does for its products; a graph of them is launched at once.

A graph is used after a trial alone: a library may choose another kernel in a capture, where it finds other memory to
work in. A capture of ours is this thread's own: it breaks no other off, nor does another one break it off.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, current_thread, main_thread
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokern.core.errors import say_once
from zerokern.kernels.triton.backend import beside_captures, capturing, launching

__all__ = ["Captured"]

_SEED = 25
_MOST = 64  # graphs of one object: more kinds than a model has shapes
_FAILED = (
    "a CUDA graph of Muon's products for {what} is not used ({cause}): they are launched one by one, with the same "
    "results. A step of small matrices takes longer"
)
_Work = Callable[[], None]
_EXACT: dict[Hashable, bool] = {}  # of this process: whether a graph of work of this kind had its bits
_CAPTURING = Lock()  # graphs of several objects are captured on one stream
# Before, torch's generators knew one capture of all threads: random numbers that the program draws during one of a
# worker's would be refused. After a capture that failed they would be refused for good.
_KNOWS_CAPTURES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_BROKEN: list[Any] = []  # after a failed capture torch's allocator may still ask the graph which memory is its


class _Driver(Protocol):
    """The streams of a GPU (`zerokern.memory.staging.CudaDriver`)."""

    def current(self) -> Hashable: ...
    def own_stream(self) -> Any: ...
    def on(self, stream: Any) -> Any: ...


class _GraphMemory:
    """What graphs work in that replay on one stream, one after the other: their pool, and the stream of their captures.

    cuBLAS keeps a workspace for each stream and thread, which torch gives to it from the memory that is current at the
    first product there. So no product is ever launched on this stream outside of a capture: its workspaces are made in
    captures, in this pool, and a graph of the program has its own in other memory, for other streams. Whoever clears
    the workspaces of all streams, as torch.compile does, returns these to the pool, where no one else gets them.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.pool = stream, torch.cuda.graph_pool_handle()
        # torch frees the memory of a pool when its last graph goes, and refuses to capture into it; but the workspaces
        # are still known, and the next graph would use them. So one graph stays.
        self.graph: Any = None


# for as long as the process: the handle of a stream that is destroyed may be that of the next one, and so its workspace
_MEMORY: dict[tuple[torch.device, Hashable], _GraphMemory] = {}


class Captured:
    """Work of several kinds on memory that stays where it is, of one thread at a time, or ordered in another way.

    What is done once alone is not captured: that takes longer than its launches. A graph replays on the stream that was
    current when it was asked for, and shares its memory with all others that do.
    """

    def __init__(self, device: torch.device, driver: Callable[[], _Driver]) -> None:
        """`driver`: returns that of the device, which is a GPU if this is called."""
        self._device, self._driver = device, driver
        self._replays: dict[Hashable, _Work | None] = {}  # by kind and stream; None: was asked for once
        self._addresses: tuple[int, ...] = ()

    def of(self, kind: Hashable, work: _Work, x: Tensor, sums: Tensor) -> _Work:
        """Returns what does this work on a matrix, or a batch, and the sums of its squares: `work` itself, or a replay.

        `kind`: all that decides about the launches but the two addresses. What is in `x` and `sums` is lost.

        >>> x, sums = torch.ones(2, 2), torch.ones(1, dtype=torch.float64)
        >>> work = lambda: x.zero_()
        >>> Captured(x.device, driver=lambda: None).of("zeros", work, x, sums) is work  # there are no graphs on a CPU
        True
        """
        if x.device.type != "cuda" or capturing(self._device):
            return work
        if not _KNOWS_CAPTURES and current_thread() is not main_thread():
            return work
        addresses = x.data_ptr(), sums.data_ptr()
        if addresses != self._addresses:
            with beside_captures():  # graphs are destroyed
                self._replays.clear()
            self._addresses = addresses
        stream = self._driver().current()
        key = kind, stream
        if key not in self._replays:
            if len(self._replays) < _MOST:
                self._replays[key] = None
            return work
        if self._replays[key] is None and _EXACT.get(kind, True):
            self._replays[key] = self._replay_of(kind, stream, work, x, sums)
        return self._replays[key] or work

    def _replay_of(self, kind: Hashable, stream: Hashable, work: _Work, x: Tensor, sums: Tensor) -> _Work | None:
        """Captures the work, and tries it where no graph of its kind has been tried; None if it is not to be used."""
        what = f"matrices of {tuple(x.shape)} on {self._device}"
        try:
            with launching(self._device), beside_captures():
                expected = None if kind in _EXACT else _tried(work, x, sums)
                replay = self._capture(work, stream)
                if expected is not None:
                    _EXACT[kind] = torch.equal(_tried(replay, x, sums), expected)
        except Exception as error:  # whatever the driver says, or memory that is not left: it goes on as before
            _EXACT[kind] = False
            say_once(__name__, _FAILED.format(what=what, cause=f"{type(error).__name__}: {error}"))
            return None
        if not _EXACT[kind]:
            say_once(__name__, _FAILED.format(what=what, cause="its replay has other bits"))
            return None
        return replay

    def _capture(self, work: _Work, stream: Hashable) -> _Work:
        """Captures the work, to be replayed on this stream, the current one. It is captured on another: the default
        stream cannot be."""
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise RuntimeError(f"torch's allocator is {backend}, which has no memory of a graph's own")
        driver, key = self._driver(), (self._device, stream)
        graph: Any = torch.cuda.CUDAGraph()
        with _CAPTURING:
            if key not in _MEMORY:
                _MEMORY[key] = _GraphMemory(driver.own_stream())
            memory = _MEMORY[key]
            with driver.on(memory.stream), _random_numbers_of_its_own():
                try:
                    graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
                    try:
                        work()
                    except BaseException:
                        with suppress(RuntimeError):  # it says again that the capture is broken off
                            graph.capture_end()
                        raise
                    graph.capture_end()
                except BaseException:
                    # torch's allocator may take the capture for one that goes on: it would defer what it frees, and
                    # ask the graph which memory is its
                    with suppress(RuntimeError):  # not, it says, where the capture has ended
                        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory.pool)
                    _BROKEN.append(graph)
                    del _MEMORY[key]
                    raise
            memory.graph = graph
        replay: _Work = graph.replay
        return replay


@contextmanager
def _random_numbers_of_its_own() -> Iterator[None]:
    """Gives torch's generator another state within the block, where a capture that fails would spoil the program's."""
    if _KNOWS_CAPTURES:
        yield
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


def _tried(work: _Work, x: Tensor, sums: Tensor) -> Tensor:
    """Returns the bits that the work makes of values of which another order of additions makes other ones."""
    generator = torch.Generator().manual_seed(_SEED)
    x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu"))
    sums.fill_(x.numel() / sums.numel())
    work()
    return x.clone().view(torch.uint8)
