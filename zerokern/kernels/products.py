"""Products of a batch of matrices with the bits that each has by itself: at once where that was tried and found."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_product", "multiply"]

_Layout = tuple[torch.Size, tuple[int, ...]]
_SEED = 24


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a @ b, of two matrices or of each pair in two batches.

    On a CPU every product of a batch has the bits of `torch.mm` on its own: whether matrices are multiplied alone or
    with others must not show. A GPU multiplies a batch by `torch.bmm`.

    >>> a, out = torch.ones(2, 3, 4), torch.empty(2, 3, 3)
    >>> multiply(a, a.mT, out); out[1]
    tensor([[4., 4., 4.],
            [4., 4., 4.],
            [4., 4., 4.]])
    """
    if a.dim() == 2:
        torch.mm(a, b, out=out)
    elif a.device.type != "cpu" or _batch_is_exact(a.dtype, None, _layout(a), _layout(b), 0.0, 1.0, _way()):
        torch.bmm(a, b, out=out)
    else:
        for one, other, to in zip(a, b, out, strict=True):
            torch.mm(one, other, out=to)


def add_product(addend: Tensor, a: Tensor, b: Tensor, out: Tensor, *, beta: float, alpha: float = 1.0) -> None:
    """Writes beta * addend + alpha * a @ b, as `multiply` does.

    >>> x, out = torch.eye(2), torch.empty(2, 2)
    >>> add_product(x, x, x, out, beta=0.5); out
    tensor([[1.5000, 0.0000],
            [0.0000, 1.5000]])
    """
    if a.dim() == 2:
        torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    elif a.device.type != "cpu" or _batch_is_exact(
        a.dtype, _layout(addend), _layout(a), _layout(b), beta, alpha, _way()
    ):
        torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    else:
        for added, one, other, to in zip(addend, a, b, out, strict=True):
            torch.addmm(added, one, other, beta=beta, alpha=alpha, out=to)


def _layout(x: Tensor) -> _Layout:
    return x.shape, x.stride()


def _way() -> tuple[object, ...]:
    """What else torch chooses a kernel by: its threads, and settings that a program may change."""
    return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled


@lru_cache(maxsize=4096)
def _batch_is_exact(
    dtype: torch.dtype,
    addend: _Layout | None,
    a: _Layout,
    b: _Layout,
    beta: float,
    alpha: float,
    way: tuple[object, ...],
) -> bool:
    """Multiplies a batch of these layouts at once and one by one; returns whether all bits are the same.

    Libraries choose the order of a sum by layouts, not by values, and values are such here that another order shows
    in every element: large terms cancel, and what is added between two of them loses its last bits.
    """
    generator = torch.Generator().manual_seed(_SEED)
    usual: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    width = a[0][-1]
    order = torch.randperm(width, generator=generator, device="cpu")
    some, opposite = order[: width // 3], order[width // 3 : 2 * (width // 3)]
    left, right = (torch.randn(size, **usual) for size, _ in (a, b))
    left[..., some] *= 2.0 ** torch.randint(0, 12, (len(some),), **usual)
    left[..., opposite] = left[..., some]
    right[..., opposite, :] = -right[..., some, :]
    left, right = _laid_out(left, a, dtype), _laid_out(right, b, dtype)
    added = None
    if addend is not None:
        added = _laid_out(torch.randn(addend[0], **usual), addend, dtype)
    out = torch.empty(a[0][0], a[0][1], b[0][2], dtype=dtype, device="cpu")
    single = torch.empty_like(out[0])
    if added is None:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(added, left, right, beta=beta, alpha=alpha, out=out)
    for number in range(len(out)):
        # as matrices that lie alone: at addresses of their own
        one, other = (_alone(batch, number) for batch in (left, right))
        if added is None:
            torch.mm(one, other, out=single)
        else:
            torch.addmm(_alone(added, number), one, other, beta=beta, alpha=alpha, out=single)
        if not torch.equal(single, out[number]):
            return False
    return True


def _laid_out(values: Tensor, layout: _Layout, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(*layout, dtype=dtype, device="cpu").copy_(values)


def _alone(batch: Tensor, number: int) -> Tensor:
    return torch.empty_strided(batch.shape[1:], batch.stride()[1:], dtype=batch.dtype, device=batch.device).copy_(
        batch[number]
    )
