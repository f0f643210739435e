"""The kernels of `cuda/` on a real GPU: the bits of their references, on streams, in graphs, at sizes that matter."""

from __future__ import annotations

import pytest
import torch
from tables import each
from torch import Tensor

from zerokern.kernels import cuda

pytestmark = pytest.mark.gpu


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
