"""A GPU that is not here: CPU tensors that say they lie on `cuda:0`, and a count of what a GPU would be asked for.

torch computes as always, on the CPU; of kernels only those that write words are run, for others read these;
sums of squares are 0. What the
host makes is the host's (factories, and what comes of its tensors alone), all else the device's. Counted are launches,
copies by the copy engine with the stream that they are on, and waits of the host, each with the function of zerokern
that asked for it. What the program itself asks for, the model's forward and backward, is not.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_double import LibraryDouble
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import zerokern
from zerokern.comm import collectives, common, joining
from zerokern.comm.device import DeviceGroup
from zerokern.kernels.triton import backend

HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
LAUNCH, UPLOAD, DOWNLOAD, SYNC, COLLECTIVE = "launches", "uploads", "downloads", "host syncs", "collectives"
_HERE = str(Path(zerokern.__file__).parent)
_PLAYS = "counting_device.py", "played_graph.py", "library_double.py"
_BELOW = tuple(f"{_HERE}/{name}/" for name in ("kernels", "memory", "comm", "core", "schedule"))
_MAKE = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "empty_strided", "frombuffer", "from_numpy"}
_READ = {"tolist", "item", "__float__", "__int__", "__bool__", "__index__", "numpy", "equal", "allclose"}
_NO_WORK = {"requires_grad_", "detach_", "set_", "as_strided_", "resize_", "retain_grad", "empty_like", "new_empty"}
quiet = torch._C.DisableTorchFunction


class Stream:
    """A stream of the device: for all that the host knows it has done nothing that the host has not waited for."""

    def __init__(self, device: Any = None, name: str = "beside", priority: int = 0) -> None:
        self.name, self.cuda_stream = name, id(self)
        self.given = self.passed = 0
        self._follows: list[tuple[int, Any]] = []

    def wait_event(self, event: Event) -> None:
        self.given += 1
        self._follows.append((self.given, event))

    def reach(self, at: int) -> None:
        """The host has waited until here, and so for what this stream had waited for."""
        self.passed = max(self.passed, at)
        behind = [event for given, event in self._follows if given <= at]
        self._follows = [(given, event) for given, event in self._follows if given > at]
        for event in behind:
            event.stream.reach(event.at)


class Event:
    """A point of a stream. `device` is set where it is used."""

    device: CountingDevice

    def __init__(self, **settings: Any) -> None:
        self.stream, self.at = Stream(), 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = self.device.stream if stream is None else stream
        self.stream.given += 1
        self.at = self.stream.given

    def query(self) -> bool:
        return self.stream.passed >= self.at

    def synchronize(self) -> None:
        if not self.query():
            self.device.count_sync("event")
            self.stream.reach(self.at)


class Batches:
    """`zerokern.memory.staging.Batches`: one call for copies of one direction."""

    def __init__(self, device: CountingDevice) -> None:
        self.device = device

    def attribute(self, *which: Any) -> int:
        """No kernel copies spans: each call is one of the copy engine."""
        return 0

    def copy(self, stream: int, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int]) -> None:
        for dst, src, nbytes in zip(dsts, srcs, sizes, strict=True):
            ctypes.memmove(dst, src, nbytes)
        if sizes:
            self.device.count(DOWNLOAD if self.device.is_host_memory(dsts[0]) else UPLOAD, "batch", "beside")


class CountingDevice(TorchFunctionMode):
    """Counts while it is `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[tuple[str, str, str, str]] = Counter()  # what, on which stream or thread, who, which
        self.counting = False
        self._hosts: dict[int, Any] = {}  # storages of the host; held, so that no other has one's address
        self._lock, self._local = threading.Lock(), threading.local()
        self.compute = Stream(name="compute")

    # Counting.

    def count(self, what: str, which: str, where: str | None = None) -> None:
        if not self.counting:
            return
        who = _caller()
        if who:
            with self._lock:
                self.rows[what, self.stream.name if where is None else where, who, which] += 1

    def total(self, what: str, where: str | None = None) -> int:
        return sum(n for (kind, place, *_), n in self.rows.items() if kind == what and where in (None, place))

    def table(self) -> str:
        rows = sorted(self.rows.items(), key=lambda row: (row[0][0], -row[1], row[0]))
        return "\n".join(f"{n:6} {what:11} {where:8} {who:58} {which}" for (what, where, who, which), n in rows)

    def count_sync(self, which: str) -> None:
        self.count(SYNC, which, "main" if threading.current_thread().name.startswith("double") else "worker")

    def sync(self, which: str) -> None:
        """The host waits for all that the current stream has."""
        self.count_sync(which)
        self.stream.reach(self.stream.given)

    def captures(self) -> bool:
        """Whether this thread captures a graph: here there are none."""
        return False

    @property
    def stream(self) -> Stream:
        return getattr(self._local, "stream", self.compute)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    # Where tensors are.

    def is_host_memory(self, address: int) -> bool:
        with self._lock:
            return any(base <= address < base + storage.nbytes() for base, storage in self._hosts.items())

    def is_host(self, tensor: Tensor) -> bool:
        memory = getattr(tensor, "span", tensor)
        return _address(memory) in self._hosts

    def host(self, made: Any) -> Any:
        """Notes that what was made is the host's."""
        for one in _tensors(made):
            with self._lock:
                self._hosts[_address(one)] = one.untyped_storage()
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        for one in _tensors((args, given)) if torch._C._is_torch_function_enabled() else ():
            if type(one).__torch_function__ not in _PLAIN:
                with self:  # what it does inside is seen too
                    return type(one).__torch_function__(func, types, args, given)
        if name in _MAKE:
            return self._make(func, name, args, given)
        if name in ("to", "cuda", "cpu"):
            return self._to(func, name, args, given)
        if name == "is_pinned":
            return self.is_host(args[0])
        return self._call(func, name, args, given)

    def _attribute(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        if name in ("device", "is_cpu", "is_cuda"):
            here = self.is_host(args[0])
            return {"device": HOST if here else DEVICE, "is_cpu": here, "is_cuda": not here}[name]
        return func(*args)

    def _make(self, func: Any, name: str, args: Any, given: dict[str, Any]) -> Any:
        there = _is_there(given.pop("device", None))
        given.pop("pin_memory", None)
        made = func(*args, **given)
        if not there:
            return self.host(made)
        if not name.startswith("empty") and made.numel():
            self.count(UPLOAD if "tensor" in name else LAUNCH, name)
        return made

    def _to(self, func: Any, name: str, args: Any, given: dict[str, Any]) -> Any:
        source, *rest = args
        targets = [one for one in (*rest, given.pop("device", None)) if isinstance(one, (torch.device, str))]
        there = name == "cuda" or any(map(_is_there, targets))
        blocks = not (given.pop("non_blocking", False) or True in [one for one in rest if isinstance(one, bool)])
        others = [one for one in rest if isinstance(one, torch.dtype)]
        was_there = not self.is_host(source)
        made = source.to(*others, **given) if others or given else source
        if name == "to" and not targets:
            there = was_there
        if there == was_there:
            if made is not source:
                self.count(LAUNCH, name) if there else self.host(made)
            return made
        made = made.detach().clone()
        self.count(UPLOAD if there else DOWNLOAD, name)
        if not there:
            self.host(made)
            if blocks:
                self.sync(name)
        return made

    def _call(self, func: Any, name: str, args: Any, given: dict[str, Any]) -> Any:
        place = given.pop("device", None)
        before = _tensors((args, given))
        hosts = [self.is_host(one) for one in before]
        addresses = set(map(_address, before))
        blocks = not given.pop("non_blocking", False) if name == "copy_" else True
        made = func(*args, **given)
        if before and all(hosts) and not (place is not None and _is_there(place)):
            return self.host(made)
        if name in _READ:
            self.sync(name)
        elif name in ("copy_", "__setitem__") and True in hosts:
            self.count(UPLOAD if hosts[-1] else DOWNLOAD, name)
            if hosts[0] and blocks:
                self.sync(name)
        elif name not in _NO_WORK and not name.startswith("empty"):
            new = [one for one in _tensors(made) if _address(one) not in addresses]
            writes = "out" in given or (name.endswith("_") and not name.startswith("__")) or name == "__setitem__"
            if new or writes:
                self.count(LAUNCH, name)
        return made


_PLAIN = {Tensor.__torch_function__, torch.nn.Parameter.__torch_function__}


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _address(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a wrapper, without memory
        return 0


def _is_there(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _caller() -> str:
    """The nearest function of zerokern that is above what serves all; none if a test or a model is nearer."""
    frame, nearest = sys._getframe(2), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_HERE):
            found = f"{path[len(_HERE) + 1 :]} {frame.f_code.co_qualname.removesuffix('.<locals>.<lambda>')}"
            if not path.startswith(_BELOW):
                return found
            nearest = nearest or found
        elif "/tests/" in path and not path.endswith(_PLAYS):
            return nearest
        frame = frame.f_back
    return nearest


class QuietWork:
    def __init__(self, work: Any) -> None:
        self._work, self.is_completed = work, work.is_completed

    def wait(self) -> None:
        with quiet():
            self._work.wait()


class QuietLibrary(LibraryDouble):
    """The library's own work is one collective each."""

    device: CountingDevice

    def _launch(self, pg: Any, name: str, given: Tensor, out: Tensor, finish: Any) -> Any:
        self.device.count(COLLECTIVE, name)
        with quiet():
            return QuietWork(super()._launch(pg, name, given, out, finish))


def backward(loss: Tensor) -> None:
    """`loss.backward()`, within which the mode is on: torch's own call of a function has it off."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def counted_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDevice]:
    """Makes torch, Triton and threads see the device."""
    from triton.runtime.interpreter import InterpretedFunction

    device = CountingDevice()

    monkeypatch.setattr(Event, "device", device, raising=False)
    monkeypatch.setattr("zerokern.memory.staging.runtime_library", lambda: Batches(device))
    stand_ins = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device": lambda place: nullcontext(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: device.captures(),
        "current_stream": lambda place=None: device.stream,
        "Stream": Stream,
        "stream": device.on_stream,
        "Event": Event,
        "synchronize": lambda place=None: device.sync("synchronize"),
        "mem_get_info": lambda place=None: (80 << 30, 80 << 30),
        "MemPool": object,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "use_mem_pool": lambda pool, place=None: nullcontext(),
        "get_device_properties": lambda place: SimpleNamespace(multi_processor_count=132, major=9, minor=0),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(backend, "_check_gpu", lambda index: None)
    monkeypatch.setattr(backend, "check_device", lambda place: None)
    for module in ("bucket", "sumsq", "table"):
        monkeypatch.setattr(f"zerokern.kernels.triton.{module}.check_device", lambda place: None)
    begin, buffered = threading.Thread.run, torch.frombuffer
    wrapped = Tensor._make_wrapper_subclass

    def on_host(cls: type, *arguments: Any, **settings: Any) -> Any:
        return wrapped(cls, *arguments, **{**settings, "device": HOST})

    monkeypatch.setattr(Tensor, "_make_wrapper_subclass", on_host)
    monkeypatch.setattr(torch, "frombuffer", lambda *given, **settings: device.host(buffered(*given, **settings)))

    def launched(self: Any, *arguments: Any, **settings: Any) -> None:
        device.count(LAUNCH, name := self.fn.__name__)
        with quiet():
            if name == "write_words":
                out, count, *words = arguments
                out[:count] = torch.tensor(words[:count])
            elif name == "copy_words":
                out, words, count = arguments
                out[:count] = words[:count]
            elif name == "sumsq_chunks":  # the host reads what it leaves
                arguments[2].zero_()

    def beside(self: threading.Thread) -> None:
        with device:
            begin(self)

    monkeypatch.setattr(InterpretedFunction, "run", launched)
    monkeypatch.setattr(threading.Thread, "run", beside)
    with device:
        yield device
        device._hosts.clear()
        gc.collect()  # what is unregistered is while there is something that does it


def on_devices(
    device: CountingDevice, monkeypatch: pytest.MonkeyPatch, size: int, work: Callable[[Any], Any]
) -> Sequence[Any]:
    """Runs `work(group)` on ranks that are threads, each on a device of which `device` counts what all are asked."""
    library = QuietLibrary(size, "new")
    library.device = device
    module = library.module()
    monkeypatch.setattr(collectives, "dist", module)
    for one in (joining, common):
        monkeypatch.setattr(one, "dist", module)
    results: list[Any] = [None] * size

    def live(rank: int) -> None:
        try:
            pg = library.groups[rank]
            group = DeviceGroup(pg, joining._common(pg, DEVICE), DEVICE, "double")
            results[rank] = work(group)
        except BaseException as error:
            results[rank] = error
            library.fails, library.gone = "all_reduce", True
            raise

    threads = [threading.Thread(target=live, args=(rank,), name=f"double {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
