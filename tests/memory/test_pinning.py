"""The arena and CUDA: registered once, when CUDA is in use and not before; taken back before the memory goes."""

from __future__ import annotations

import gc
import logging
import threading
import time

import pytest
import torch
from tables import each

from zerokern.core.errors import say_once
from zerokern.memory import Arena
from zerokern.memory import arena as arena_module

MIB = 1 << 20


class FakeRuntime:
    """What torch.cuda.cudart() returns, without a GPU."""

    def __init__(self, result: int) -> None:
        self.result, self.calls = result, []

    def cudaHostRegister(self, ptr: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", ptr, nbytes, flags))
        return self.result

    def cudaHostUnregister(self, ptr: int) -> int:
        self.calls.append(("unregister", ptr))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@each("end", ["close", "drop"])
def test_registered_with_the_first_lease_and_unregistered_at_the_end(runtime: FakeRuntime, end: str) -> None:
    runtime.calls.clear()
    arena = Arena(MIB + 5)
    base, nbytes = arena.base, arena.nbytes
    assert runtime.calls == [] and not arena.pinned
    for _ in range(3):
        arena.lease(100, "a").release()
    assert runtime.calls == [("register", base, nbytes, 3)] and arena.pinned
    if end == "close":
        arena.close()
        arena.close()
        assert not arena.pinned
    del arena
    gc.collect(1)
    assert runtime.calls[1:] == [("unregister", base)]


def test_a_refusal_is_logged_once_and_costs_speed_alone(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime keeps the error until it is asked: torch would blame its next launch for it."""
    runtime.result = 801
    forgotten: list[int] = []
    monkeypatch.setattr(arena_module, "clear_cuda_error", lambda: forgotten.append(1))
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="zerokern.memory"):
        arenas = [Arena(MIB), Arena(MIB)]
        for arena in arenas:
            arena.lease(100, "a").release()
            arena.lease(100, "a").release()
            assert not arena.pinned
            arena.close()
    said = [record.message for record in caplog.records]
    assert said == ["arena memory is not registered with CUDA (801): copies to and from GPUs take a detour"]
    assert [call[0] for call in runtime.calls] == ["register", "register"]
    assert forgotten == [1, 1]


@each("contexts, current, used", [((3,), 0, 3), ((2, 3), 3, 3), ((1,), 1, 1), ((), 0, 0)])
def test_no_context_is_made_on_another_gpu(
    runtime: FakeRuntime, contexts: tuple[int, ...], current: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime makes one on the current device, in a new thread the first, where that has none."""
    now, seen = [current], []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, now[0] = now[0], self.index

        def __exit__(self, *error: object) -> None:
            now[0] = self.before

    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", contexts.__contains__, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    for name in ("cudaHostRegister", "cudaHostUnregister"):
        call = getattr(runtime, name)
        monkeypatch.setattr(runtime, name, lambda *given, call=call: (seen.append(now[0]), call(*given))[1])
    arena = Arena(MIB)
    arena.lease(100, "a").release()
    arena.close()
    assert seen == [used] * 2 and now == [current]


def test_threads_that_lease_at_once_register_once_and_have_pinned_memory(runtime: FakeRuntime) -> None:
    """A lease that is handed out before the registration has ended would be copied by way of a detour."""
    register, seen = runtime.cudaHostRegister, []

    def slowly(*args: int) -> int:
        time.sleep(0.05)
        return register(*args)

    runtime.cudaHostRegister = slowly  # type: ignore[method-assign]
    arena = Arena(MIB)

    def lease() -> None:
        with arena.lease(100, "a"):
            seen.append(arena.pinned)

    threads = [threading.Thread(target=lease) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4 and [call[0] for call in runtime.calls] == ["register"]
    arena.close()


def test_an_interrupted_registration_is_tried_again(runtime: FakeRuntime) -> None:
    register, arena = runtime.cudaHostRegister, Arena(MIB)
    runtime.cudaHostRegister = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        arena.lease(100, "a")
    runtime.cudaHostRegister = register  # type: ignore[method-assign]
    arena.lease(100, "a").release()
    assert arena.pinned
    arena.close()


@each("fails", ["current device", "device"])
def test_memory_is_unregistered_where_a_device_has_failed(
    fails: str, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device can be chosen then, and the memory would stay registered though its arena says that it is closed."""

    class Device:
        def __init__(self, index: int) -> None:
            pass

        def __enter__(self) -> None:
            if fails == "device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def __exit__(self, *error: object) -> None:
            pass

    def current() -> int:
        if fails == "current device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 0

    runtime.calls.clear()
    arena = Arena(MIB)
    arena.lease(100, "a").release()
    base = arena.base
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    arena.close()
    assert runtime.calls[1:] == [("unregister", base)] and not arena.pinned


def test_an_interrupted_close_is_tried_again(runtime: FakeRuntime) -> None:
    runtime.calls.clear()
    unregister, arena = runtime.cudaHostUnregister, Arena(MIB)
    arena.lease(100, "a").release()
    runtime.cudaHostUnregister = lambda ptr: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        arena.close()
    assert arena.pinned
    runtime.cudaHostUnregister = unregister  # type: ignore[method-assign]
    arena.close()
    assert runtime.calls[1:] == [("unregister", arena.base)] and not arena.pinned


@pytest.mark.gpu
def test_a_refused_registration_leaves_no_error_behind() -> None:
    torch.cuda.init()
    arena = Arena(MIB)
    with arena.lease(100, "a"):
        assert arena.pinned
        arena._offered_to_cuda = False  # registering it again is refused
        arena.lease(100, "b").release()
        assert torch.ones(3, device="cuda").add(1).tolist() == [2.0] * 3
    arena.close()


def test_without_cuda_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA was touched"))
    arena = Arena(MIB)
    arena.lease(100, "a").release()
    arena.close()
    assert not arena.pinned


@pytest.mark.gpu
def test_a_gpu_sees_pinned_memory() -> None:
    torch.cuda.init()
    arena = Arena(4 * MIB)
    with arena.lease(MIB, "a") as lease:
        tensor = lease.tensor(torch.float32)
        assert arena.pinned and tensor.is_pinned()
        tensor.copy_(torch.arange(float(tensor.numel())))
        there = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(there.cpu(), tensor)
        del tensor
    arena.close()
