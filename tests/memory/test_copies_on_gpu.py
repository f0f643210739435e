"""Copies on a GPU: ordered by events alone, batched by the driver, through memory of an arena."""

from __future__ import annotations

import gc

import pytest
import torch
from tables import each

from zerokern.memory import Arena, Copies, CudaDriver

pytestmark = pytest.mark.gpu
LATE = 50_000_000  # cycles: tens of milliseconds, so that whoever does not wait is too early


@pytest.fixture
def arena():
    torch.cuda.init()
    arena = Arena(64 << 20, poison=True)
    yield arena
    gc.collect()
    arena.close(force=True)


@pytest.fixture
def copies():
    copies = Copies(CudaDriver("cuda"))
    yield copies
    copies.close()


def pinned(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, pin_memory=True).fill_(-1)


def test_there_and_back(copies: Copies) -> None:
    """Kernel, out, in, kernel, with late kernels: the host waits once, at the end."""
    grad, host = torch.zeros(1 << 20, device="cuda"), pinned(1 << 20)
    param, result = torch.zeros_like(grad), torch.zeros_like(grad)
    for step in range(5):
        torch.cuda._sleep(LATE)
        grad.fill_(step)
        out = copies.to_host(grad, host)
        back = copies.to_device(host, param, after=out)
        back.gate()
        torch.add(param, 1, out=result)
        copies.here().wait()
        assert result.eq(step + 1).all() and out.done() and back.done()


def test_ready_frees_a_copy_of_the_current_stream(copies: Copies) -> None:
    source, host = torch.ones(1000, device="cuda"), pinned(1000)
    early = copies.here()
    torch.cuda._sleep(20 * LATE)
    last = copies.here()
    copies.to_host(source, host, ready=early).wait()
    assert host.eq(1.0).all() and not last.done()
    last.wait()


def test_the_driver_batches(copies: Copies) -> None:
    """CUDA 13 has the call, and so has any driver that runs it."""
    assert copies.driver._spans is not None, "torch's runtime library was not found"
    batches = copies.driver._spans._batches
    if int(torch.version.cuda.split(".")[0]) >= 13:
        assert batches.batched


@each("one_by_one", [False, True])
def test_a_list_of_small_tensors(copies: Copies, one_by_one: bool) -> None:
    if one_by_one:
        copies.driver._spans._batches.batched = False
    sources = [torch.randn(n % 777 + 1, device="cuda") for n in range(2000)]
    bucket = pinned(sum(one.numel() for one in sources))
    hosts = list(bucket.split([one.numel() for one in sources]))
    copies.to_host(sources, hosts).wait()
    assert torch.equal(bucket, torch.cat(sources).cpu())
    back = [torch.zeros_like(one) for one in sources]
    copies.to_device(hosts, back).wait()
    assert torch.equal(torch.cat(back), torch.cat(sources))


def test_many_small_ones_by_each_kernel(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_SMALL_COPIES", "28K")
    kernels = copies.driver._spans.kernels
    sources = [torch.randn(n % 777 + 1, device="cuda") for n in range(2000)] + [torch.randn(1 << 20, device="cuda")]
    sources += [one.view(torch.uint8)[1:-1] for one in sources[:100]]  # of no alignment
    for way in list(kernels.ways):
        kernels.ways = [way]
        hosts = [torch.zeros(one.shape, dtype=one.dtype, pin_memory=True) for one in sources]
        copies.to_host(sources, hosts).wait()
        assert all(torch.equal(host, one.cpu()) for host, one in zip(hosts, sources, strict=True))
        back = [torch.zeros_like(one) for one in sources]
        copies.to_device(hosts, back).wait()
        assert all(map(torch.equal, back, sources))
        assert kernels.ways == [way], "it was not refused"
    assert kernels.ways, "Triton has one"


def test_where_a_kernel_takes_over_is_measured(copies: Copies) -> None:
    for to_host in (False, True):
        limit = copies.driver._spans._measured(to_host)
        assert limit.origin == "measured" and 0 <= limit.nbytes <= 64 << 10


def test_without_a_runtime_library(copies: Copies) -> None:
    copies.driver._spans = None
    source, host = torch.randn(1000, device="cuda"), pinned(1000)
    copies.to_host([source[:10], source[10:]], [host[:10], host[10:]]).wait()
    assert torch.equal(host, source.cpu())


def test_tensors_live_until_their_copy_has_ended(copies: Copies) -> None:
    """The source is dropped while its copy waits; what is allocated meanwhile gets other memory."""
    host = pinned(1 << 20)
    torch.cuda._sleep(LATE)
    copies.to_host(torch.full((1 << 20,), 5.0, device="cuda"), host)
    other = [torch.full((1 << 20,), 9.0, device="cuda") for _ in range(4)]
    copies.close()
    assert host.eq(5.0).all() and len(other) == 4


def test_pageable_memory_is_refused(copies: Copies) -> None:
    with pytest.raises(ValueError, match="the host side of copy 0 is not pinned"):
        copies.to_host(torch.ones(4, device="cuda"), torch.zeros(4))
