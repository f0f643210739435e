"""Products of a batch of matrices with the bits that each has by itself: at once where that was tried and found."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.kernels.triton.backend import capturing

__all__ = ["add_product", "multiply", "way_of"]

_Layout = tuple[torch.Size, tuple[int, ...]]
_SEED = 24
_RESULTS = 1 << 13  # that are compared at least
_MOST_FOUND = 4096
_LARGEST = {torch.float64: 26, torch.float32: 12, torch.bfloat16: 24, torch.float16: 13}  # exponents of what cancels


class _Product(NamedTuple):
    """What a batch of beta * addend + alpha * a @ b is like."""

    dtype: torch.dtype
    addend: _Layout | None
    a: _Layout
    b: _Layout
    beta: float = 0.0
    alpha: float = 1.0


_FOUND: dict[tuple[_Product, tuple[object, ...]], bool] = {}


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a @ b, of two matrices or of each pair in two batches.

    Every product of a batch has the bits of `torch.mm` on its own: whether matrices are multiplied alone or with others
    must not show. In a CUDA graph's capture nothing can be tried; there they are multiplied one by one unless that was
    done before.

    >>> a, out = torch.ones(2, 3, 4), torch.empty(2, 3, 3)
    >>> multiply(a, a.mT, out); out[1]
    tensor([[4., 4., 4.],
            [4., 4., 4.],
            [4., 4., 4.]])
    """
    if a.dim() == 2:
        torch.mm(a, b, out=out)
    elif _goes_at_once(_Product(a.dtype, None, _layout(a), _layout(b)), a.device):
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
    elif _goes_at_once(_Product(a.dtype, _layout(addend), _layout(a), _layout(b), beta, alpha), a.device):
        torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    else:
        for added, one, other, to in zip(addend, a, b, out, strict=True):
            torch.addmm(added, one, other, beta=beta, alpha=alpha, out=to)


def _layout(x: Tensor) -> _Layout:
    return x.shape, x.stride()


def way_of(device: torch.device) -> tuple[object, ...]:
    """Returns what else torch chooses a kernel by: the device, its threads, and settings that a program may change.

    >>> way_of(torch.device("cpu")) == way_of(torch.device("cpu"))
    True
    """
    # of the two ways to set a precision torch refuses to read the older one where a program has used the newer
    if device.type == "cpu":
        mkldnn: Any = torch.backends.mkldnn
        return device, torch.get_num_threads(), mkldnn.matmul.fp32_precision, mkldnn.enabled
    matmul = torch.backends.cuda.matmul
    reduced = "allow_bf16_reduced_precision_reduction"
    ways = [getattr(matmul, name, None) for name in (reduced, f"{reduced}_split_k")]  # older torch has the first alone
    return device, matmul.fp32_precision, torch.backends.cuda.preferred_blas_library(), *ways


def _goes_at_once(product: _Product, device: torch.device) -> bool:
    """Whether such a batch is multiplied at once: it is tried in the first call, and again if too many were since."""
    key = product, way_of(device)
    found = _FOUND.get(key)
    if found is None:
        if capturing(device):
            return False
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        found = _FOUND[key] = _batch_is_exact(product, device)
    return found


def _batch_is_exact(product: _Product, device: torch.device) -> bool:
    """Multiplies batches of these layouts at once and one by one; returns whether all bits are the same.

    Libraries choose the order of a sum by layouts, not by values, and values are such here that another order shows:
    in every second batch large terms cancel, and what is added between two of them loses its last bits; and half of
    the addend nearly cancels what it is added to. Where a batch has few results, several are tried. On a GPU the host
    waits, once for each layout.
    """
    generator = torch.Generator().manual_seed(_SEED)
    tries = max(2, -(-_RESULTS // (product.a[0].numel() // product.a[0][-1] * product.b[0][-1])))
    return all(_is_exact_once(generator, product, device, cancels=number % 2 == 0) for number in range(tries))


def _is_exact_once(generator: torch.Generator, product: _Product, device: torch.device, *, cancels: bool) -> bool:
    """Tries it with one batch. `cancels`: whether terms of its sums do."""
    dtype, addend, a, b, beta, alpha = product
    usual: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    width = a[0][-1]
    order, pairs = torch.randperm(width, generator=generator, device="cpu"), width // 3 if cancels else 0
    some, opposite = order[:pairs], order[pairs : 2 * pairs]
    left, right = (torch.randn(size, **usual) for size, _ in (a, b))
    # as much larger than the rest as fp32, in which terms are added, has digits beyond the result's
    left[..., some] *= 2.0 ** torch.randint(0, _LARGEST[dtype], (len(some),), **usual)
    left[..., opposite] = left[..., some]
    right[..., opposite, :] = -right[..., some, :]
    left, right = _laid_out(left, a, dtype, device), _laid_out(right, b, dtype, device)
    # as matrices that lie alone: at addresses of their own
    pieces = [(_alone(left, number), _alone(right, number)) for number in range(a[0][0])]
    out = torch.empty(a[0][0], a[0][1], b[0][2], dtype=dtype, device=device)
    if addend is None:
        torch.bmm(left, right, out=out)
        return all(torch.equal(torch.mm(*pair), made) for pair, made in zip(pieces, out, strict=True))
    values = torch.randn(addend[0], **usual)
    if beta:
        products = torch.stack([torch.mm(*pair) for pair in pieces]).cpu().float()
        values = torch.where(torch.rand(addend[0], **usual) < 0.5, values, products * (-alpha / beta))
    added = _laid_out(values, addend, dtype, device)
    torch.baddbmm(added, left, right, beta=beta, alpha=alpha, out=out)
    return all(
        torch.equal(torch.addmm(_alone(added, number), *pair, beta=beta, alpha=alpha), out[number])
        for number, pair in enumerate(pieces)
    )


def _laid_out(values: Tensor, layout: _Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(*layout, dtype=dtype, device=device).copy_(values)


def _alone(batch: Tensor, number: int) -> Tensor:
    return torch.empty_strided(batch.shape[1:], batch.stride()[1:], dtype=batch.dtype, device=batch.device).copy_(
        batch[number]
    )
