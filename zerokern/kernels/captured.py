"""Launches that are made again and again on the same memory of a GPU, as one: captured into a CUDA graph, and tried.

The iteration of a matrix is some 20 launches of torch. At up to 40 us each the host takes longer for those of a small
matrix than the GPU does for its products; a graph of them is launched at once.

A graph is used after a trial alone: a library may choose another kernel in a capture, where it finds other memory to
work in. A capture of ours is this thread's own: it breaks no other off, nor does another one break it off.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from threading import Lock, current_thread, main_thread
from typing import Any

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
_CAPTURING = Lock()  # all captures of this process are made on one stream
# Before, torch's generators knew one capture of all threads: random numbers that the program draws during one of a
# worker's would be refused.
_KNOWS_CAPTURES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_BROKEN: list[Any] = []  # after a failed capture torch's allocator may still ask the graph which memory is its


class Captured:
    """Work of several kinds on memory that stays where it is, of one thread at a time, or ordered in another way.

    What is done once alone is not captured: that takes longer than its launches. Memory that the work makes is kept
    for all graphs together; they run one after the other.
    """

    def __init__(self, device: torch.device, aside: Callable[[], AbstractContextManager[None]]) -> None:
        """`aside`: makes a stream current that nothing else is launched on."""
        self._device, self._aside = device, aside
        self._replays: dict[Hashable, _Work | None] = {}  # None: was asked for once
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None

    def of(self, kind: Hashable, work: _Work, x: Tensor, sums: Tensor) -> _Work:
        """Returns what does this work on a matrix, or a batch, and the sums of its squares: `work` itself, or a replay.

        `kind`: all that decides about the launches but the two addresses. What is in `x` and `sums` is lost.

        >>> from contextlib import nullcontext
        >>> x, sums = torch.ones(2, 2), torch.ones(1, dtype=torch.float64)
        >>> work = lambda: x.zero_()
        >>> Captured(x.device, nullcontext).of("zeros", work, x, sums) is work  # there are no graphs on a CPU
        True
        """
        if x.device.type != "cuda" or capturing(self._device):
            return work
        if not _KNOWS_CAPTURES and current_thread() is not main_thread():
            return work
        addresses = x.data_ptr(), sums.data_ptr()
        if addresses != self._addresses:
            self._replays.clear()
            self._addresses, self._pool = addresses, None  # torch refuses a pool that no graph has any more
        if kind not in self._replays:
            if len(self._replays) < _MOST:
                self._replays[kind] = None
            return work
        if self._replays[kind] is None and _EXACT.get(kind, True):
            self._replays[kind] = self._replay_of(kind, work, x, sums)
        return self._replays[kind] or work

    def _replay_of(self, kind: Hashable, work: _Work, x: Tensor, sums: Tensor) -> _Work | None:
        """Captures the work, and tries it where no graph of its kind has been tried; None if it is not to be used."""
        what = f"matrices of {tuple(x.shape)} on {self._device}"
        try:
            with launching(self._device), beside_captures():
                expected = None if kind in _EXACT else _tried(work, x, sums)
                replay = self._capture(work)
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

    def _capture(self, work: _Work) -> _Work:
        """Captures the work on a stream beside the current one: the default stream cannot be captured.

        cuBLAS keeps memory for each stream, which torch gives to it. So that what the graph writes there is nobody
        else's, it is dropped before and after, as torch.compile's graphs do. Within, it is made anew, in memory of the
        graph. torch drops that of all streams: a graph of the program has its own only if it was captured on a stream
        without earlier products.
        """
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise RuntimeError(f"torch's allocator is {backend}, which has no memory of a graph's own")
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph: Any = torch.cuda.CUDAGraph()
        drop_workspaces: _Work = torch._C._cuda_clearCublasWorkspaces
        with _CAPTURING, self._aside():
            drop_workspaces()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):  # it says again that the capture is broken off
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                _BROKEN.append(graph)
                raise
            finally:
                drop_workspaces()
        replay: _Work = graph.replay
        return replay


def _tried(work: _Work, x: Tensor, sums: Tensor) -> Tensor:
    """Returns the bits that the work makes of values of which another order of additions makes other ones."""
    generator = torch.Generator().manual_seed(_SEED)
    x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu"))
    sums.fill_(x.numel() / sums.numel())
    work()
    return x.clone().view(torch.uint8)
