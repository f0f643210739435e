"""The arena and CUDA: registered once, when CUDA is in use and not before; taken back before the memory goes."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

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


@pytest.mark.parametrize("end", ["close", "drop"])
def test_registered_with_the_first_lease_and_unregistered_at_the_end(runtime: FakeRuntime, end: str) -> None:
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
    gc.collect()
    assert runtime.calls[1:] == [("unregister", base)]


def test_a_refusal_is_logged_once_and_costs_speed_alone(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.result = 801
    arena_module._say_once.cache_clear()
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
