"""A tensor cast into another, and sums of tensors: one loop, for a cast is a sum of one source."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from zerokern.kernels import checks, cpu, reference
from zerokern.kernels.dispatch import REFERENCE, TRITON, implementation
from zerokern.kernels.squares import Squares
from zerokern.kernels.versions import say_written

__all__ = ["accumulate", "add_up", "cast"]


def cast(src: Tensor, dst: Tensor, *, scale: float = 1.0, impl: str | None = None) -> None:
    """dst = scale * src, rounded to dst's dtype to nearest even. dst is not read; it may be src itself.

    >>> x, y = torch.tensor([1.0, 2.0]), torch.empty(2, dtype=torch.bfloat16)
    >>> zk.kernels.cast(x, y, scale=0.5); y
    tensor([0.5000, 1.0000], dtype=torch.bfloat16)
    """
    _sum(dst, [("src", src)], False, scale, impl)
    say_written([dst])


def accumulate(
    dst: Tensor, srcs: Tensor | Sequence[Tensor], *, add: bool = True, scale: float = 1.0, impl: str | None = None
) -> None:
    """dst = cast(dst + scale * s0 + scale * s1 ...), in fp32 from left to right.

    ``add=False`` leaves dst out and does not read it.

    >>> total = torch.ones(2)
    >>> zk.kernels.accumulate(total, [torch.ones(2, dtype=torch.bfloat16)] * 2); total
    tensor([3., 3.])
    """
    add_up(dst, srcs, add=add, scale=scale, impl=impl)
    say_written([dst])


def add_up(
    dst: Tensor,
    srcs: Tensor | Sequence[Tensor],
    *,
    add: bool = True,
    scale: float = 1.0,
    impl: str | None = None,
    squares: Squares | None = None,
) -> None:
    """`accumulate`, of which autograd hears nothing: for buckets, whose versions are raised where a step ends.

    `squares`: are measured on the way; on a device they are not (`ChunkSums` does that there).

    >>> total = torch.ones(2)
    >>> add_up(total, torch.ones(2)); total, total._version
    (tensor([2., 2.]), 0)
    """
    each = checks.as_list("srcs", srcs) or []
    named = [("srcs", t) if isinstance(srcs, Tensor) else (f"srcs[{i}]", t) for i, t in enumerate(each)]
    _sum(dst, named, checks.flag("add", add), scale, impl, squares)


def _sum(
    dst: Tensor,
    named: list[tuple[str, Tensor]],
    add: bool,
    scale: float,
    impl: str | None,
    squares: Squares | None = None,
) -> None:
    checks.tensor("dst", dst)
    sources = [checks.tensor(name, t, numel=dst.numel(), why="as dst has") for name, t in named]
    if not sources:
        raise ValueError("srcs is empty; allowed: at least one tensor")
    if len({t.dtype for t in sources}) > 1:
        raise TypeError(
            f"srcs have dtypes {sorted({str(t.dtype) for t in sources})}; allowed: one dtype for all of them"
        )
    factor = checks.number("scale", scale)
    in_place = [t for t in sources if t.data_ptr() == dst.data_ptr() and t.dtype == dst.dtype]
    others = [(name, t) for name, t in named if not any(t is u for u in in_place)]
    checks.no_overlap([("dst", dst)], others)
    with implementation(impl, checks.one_device([("dst", dst), *others])) as family:
        if family == REFERENCE:
            reference.accumulate(dst, sources, add=add, scale=factor)
            if squares is not None:
                squares.sums = array("d", [reference.sumsq([one]) for one in squares.of(dst)])
        elif family == TRITON:
            from zerokern.kernels.triton import accumulate as device_accumulate

            device_accumulate.accumulate(dst, sources, add, factor)
        elif squares is None:
            cpu.accumulate(dst, sources, add, factor)
        else:
            squares.sums = cpu.accumulate_sumsq(dst, sources, add, factor, squares.begins, squares.numels)
