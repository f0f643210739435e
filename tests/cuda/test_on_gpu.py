"""The kernels of `cuda/` on a real GPU: the bits of their references, on streams, in graphs, at sizes that matter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import same_bits
from tables import each
from torch import Tensor

from zerokern.kernels import cuda, flat

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def with_cupy() -> None:
    missing = cuda.reason(torch.device("cuda", 0))
    if missing:
        pytest.skip(f"needs CuPy: {missing}")


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel,), 77.0, dtype=dtype).pin_memory()


def uneven(count: int, dtype: torch.dtype, most: int = 400_000) -> list[Tensor]:
    return [torch.randn(n, device="cuda").to(dtype) for n in torch.randint(1, most, (count,)).tolist()]


@each("shift", [0, 1])
@each("ctas", [1, 2, 4, 8])
def test_spans_go_down_and_up(ctas: int, shift: int) -> None:
    sources = uneven(300, torch.bfloat16)
    host = [pinned(t.numel() + 1, t.dtype)[shift : shift + t.numel()] for t in sources]
    back = [torch.zeros(t.numel() + 1, dtype=t.dtype, device="cuda")[: t.numel()] for t in sources]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    cuda.ferry([*zip(host, sources, strict=True)], stream, ctas)
    cuda.ferry([*zip(back, host, strict=True)], stream, ctas)
    stream.synchronize()
    for there, here, again in zip(sources, host, back, strict=True):
        assert torch.equal(there.cpu(), here) and torch.equal(there, again)


def test_one_span_of_a_gigabyte() -> None:
    source = torch.randint(0, 256, ((1 << 30) + 5,), dtype=torch.uint8, device="cuda")
    host, back = pinned(source.numel(), torch.uint8), torch.zeros_like(source)
    cuda.ferry([(host, source)])
    cuda.ferry([(back, host)])
    torch.cuda.synchronize()
    assert torch.equal(back, source)


@each("source", DTYPES)
@each("target", DTYPES)
def test_flatten_has_the_bits_of_triton(source: torch.dtype, target: torch.dtype) -> None:
    tensors = [*uneven(1500, source, 3000), *uneven(5, source), torch.randn(70, 50, device="cuda").to(source).t()]
    results = []
    for impl in ("cuda", "triton"):
        flattener = flat.Flattener(tensors, target, impl=impl)
        bucket, stats = torch.zeros(flattener.numel + 1, dtype=target, device="cuda"), torch.zeros(2).double().cuda()
        for shift in (0, 1):
            flattener.flatten(tensors, bucket[shift:], scale=0.3, stats=stats)
            results.append((impl, shift, bucket.clone(), stats.clone()))
    for (_, _, ours, own), (_, _, theirs, other) in zip(results[:2], results[2:], strict=True):
        assert same_bits(ours.cpu(), theirs.cpu()) and torch.equal(own, other)


def test_it_is_what_a_gpu_takes() -> None:
    flattener = flat.Flattener([torch.ones(5, device="cuda")], torch.float32)
    flattener.flatten([torch.ones(5, device="cuda")], torch.zeros(5, device="cuda"))
    assert isinstance(flattener._table, cuda.BucketLaunches)


def test_a_captured_flatten_follows_the_memory() -> None:
    tensors, bucket = [torch.ones(70_000, device="cuda")], torch.zeros(70_000, device="cuda")
    stats = torch.zeros(2, dtype=torch.float64, device="cuda")
    flattener = flat.Flattener(tensors, torch.float32)
    flattener.flatten(tensors, bucket, stats=stats)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flattener.flatten(tensors, bucket, stats=stats)
    for value in (2.0, 3.0):
        tensors[0].fill_(value)
        graph.replay()
        assert (bucket == value).all() and stats[0].item() == 70_000 * value * value
