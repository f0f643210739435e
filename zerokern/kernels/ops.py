"""Public ops: check everything, pick an implementation, launch once. In place unless said otherwise.

Every op takes one tensor or a list of tensors and makes one native call for all of them; tensors on a CUDA device take
one launch, on the current stream, and nothing waits for it. ``impl`` forces an implementation (``"reference"``,
``"cpu.scalar"``, ``"cpu.avx2"``, ``"cpu.avx512"``, ``"cpu.avx512vbmi"``, ``"cpu.avx512vnni"``, ``"triton"``); None
takes the best for where the tensors are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels import checks, cpu, reference, reference_device
from zerokern.kernels.casts import accumulate, cast
from zerokern.kernels.codecs import decode_int8, encode_int8, join, split
from zerokern.kernels.dispatch import REFERENCE, TRITON, implementation
from zerokern.kernels.triton import backend
from zerokern.kernels.update import Tensors, update

__all__ = [
    "accumulate",
    "adagrad",
    "adam",
    "cast",
    "decode_int8",
    "encode_int8",
    "join",
    "lion",
    "muon",
    "sgd",
    "split",
    "stream",
    "sumsq",
]


def adam(
    param: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    step: int,
    maximize: bool = False,
    remainder: Tensors | None = None,
    master: Tensors | None = None,
    out: Tensors | None = None,
    exp_avg_scale: Tensors | None = None,
    exp_avg_sq_scale: Tensors | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int | Sequence[int] = 0,
    first: int | Sequence[int] = 0,
    impl: str | None = None,
) -> None:
    """Performs one Adam (``decoupled=False``) or AdamW step.

    The formats follow from the tensors: a bf16 ``param`` with an int16 or int8 ``remainder`` is a split master, with an
    fp32 ``master`` it only receives the rounded value; int8 states come with scales, one per started block of 128.

    >>> p, g, m, v = torch.ones(4), torch.ones(4), torch.zeros(4), torch.zeros(4)
    >>> zk.kernels.adam(p, g, m, v, lr=0.1, step=1)
    >>> p
    tensor([0.9000, 0.9000, 0.9000, 0.9000])
    """
    update("adam", locals())


def lion(
    param: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    step: int = 1,
    maximize: bool = False,
    remainder: Tensors | None = None,
    master: Tensors | None = None,
    out: Tensors | None = None,
    exp_avg_scale: Tensors | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int | Sequence[int] = 0,
    first: int | Sequence[int] = 0,
    impl: str | None = None,
) -> None:
    """Performs one Lion step.

    >>> p, g, m = torch.ones(2), torch.tensor([3.0, -2.0]), torch.zeros(2)
    >>> zk.kernels.lion(p, g, m, lr=0.25)
    >>> p
    tensor([0.7500, 1.2500])
    """
    update("lion", locals())


def adagrad(
    param: Tensors,
    grad: Tensors,
    state_sum: Tensors,
    *,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    step: int,
    maximize: bool = False,
    remainder: Tensors | None = None,
    master: Tensors | None = None,
    out: Tensors | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int | Sequence[int] = 0,
    first: int | Sequence[int] = 0,
    impl: str | None = None,
) -> None:
    """Performs one Adagrad step.

    >>> p, g, s = torch.ones(2), torch.full((2,), 2.0), torch.zeros(2)
    >>> zk.kernels.adagrad(p, g, s, lr=0.5, step=1)
    >>> p
    tensor([0.5000, 0.5000])
    """
    update("adagrad", locals())


def sgd(
    param: Tensors,
    grad: Tensors,
    momentum_buffer: Tensors | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    step: int = 1,
    maximize: bool = False,
    remainder: Tensors | None = None,
    master: Tensors | None = None,
    out: Tensors | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int | Sequence[int] = 0,
    first: int | Sequence[int] = 0,
    impl: str | None = None,
) -> None:
    """Performs one SGD step; ``first_step`` starts the momentum buffer as the gradient.

    >>> p, g = torch.ones(2), torch.ones(2)
    >>> zk.kernels.sgd(p, g, lr=0.5)
    >>> p
    tensor([0.5000, 0.5000])
    """
    update("sgd", locals())


def muon(
    grad: Tensors,
    exp_avg: Tensors,
    out: Tensors,
    sums: Tensors,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    maximize: bool = False,
    exp_avg_scale: Tensors | None = None,
    scale: float = 1.0,
    impl: str | None = None,
) -> None:
    """Performs the element-wise half of one Muon step: moves the average, and writes the matrix to orthogonalize.

    No parameter is read or written: `orthogonal.iterate_` takes ``out`` (fp32 or bf16) and ``sums``, and its
    result is applied as `orthogonal.apply_settings` says. ``sums`` gets the sum of squares of each started chunk of
    65536 elements of ``out`` as it was rounded, in float64, with the bits of `sumsq`.

    >>> g, m, out = torch.tensor([4.0, -8.0]), torch.zeros(2), torch.empty(2)
    >>> sums = torch.empty(1, dtype=torch.float64)
    >>> zk.kernels.muon(g, m, out, sums, momentum=0.75)
    >>> m, out, sums
    (tensor([ 1., -2.]), tensor([ 1.7500, -3.5000]), tensor([15.3125], dtype=torch.float64))
    """
    update("muon", locals())


def sumsq(tensors: Tensors, *, impl: str | None = None) -> float:
    """Returns the sum of squares of all elements in float64, in a fixed order; non-finite if any element is.

    >>> zk.kernels.sumsq(torch.tensor([3.0, 4.0]))
    25.0
    """
    sources, device = _sources(tensors)
    with implementation(impl, device) as family:
        if family == REFERENCE:
            return reference.sumsq(sources)
        if family == TRITON:
            return float(_sumsq_on_device(sources, device))
        sums: dict[int, float] = {}
        for dtype in {t.dtype for t in sources}:
            chosen = [i for i, t in enumerate(sources) if t.dtype == dtype]
            pointers = array("Q", [sources[i].data_ptr() for i in chosen])
            numels = array("q", [sources[i].numel() for i in chosen])
            sums.update(zip(chosen, cpu.sumsq_pointers(pointers, numels, dtype), strict=True))
        total = 0.0
        for i in range(len(sources)):  # in order, one by one: from Python 3.12 on sum() compensates
            total += sums[i]
        return total


def sumsq_there(tensors: Tensors) -> Tensor:
    """`sumsq` of tensors on a GPU as a 0-dim float64 tensor there; nothing waits for it."""
    sources, device = _sources(tensors)
    with implementation(TRITON, device):
        return _sumsq_on_device(sources, device)


def fingerprints(tensors: Tensors, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """For each tensor a number that tells whether its bits have changed where nobody counts that: int64, where they
    are; nothing waits for it. Those of one device are comparable, and no others.

    >>> one = torch.ones(3)
    >>> before = fingerprints([one]); one.data.mul_(0.5); bool(fingerprints([one]) == before)
    tensor([0.5000, 0.5000, 0.5000])
    False
    """
    sources, device = _sources(tensors)
    out = torch.empty(len(sources), dtype=torch.int64, device=device) if out is None else out
    if impl is None and not backend.runs_on(device):
        impl = REFERENCE
    with implementation(impl, device) as family:
        if family == TRITON:
            from zerokern.kernels.triton import fingerprint as device_fingerprint

            device_fingerprint.fingerprints(sources, out)
        else:
            each = reference_device.fingerprint if family == REFERENCE else cpu.fingerprint
            for place, one in enumerate(sources):
                out[place] = each(one)
    return out


def _sources(tensors: Tensors) -> tuple[list[Tensor], torch.device]:
    sources = [checks.tensor(f"tensors[{i}]", t) for i, t in enumerate(checks.as_list("tensors", tensors) or [])]
    return sources, checks.one_device([(f"tensors[{i}]", t) for i, t in enumerate(sources)])


def _sumsq_on_device(sources: list[Tensor], device: torch.device) -> Tensor:
    from zerokern.kernels.triton import sumsq as device_sumsq

    out = torch.zeros(1, dtype=torch.float64, device=device)
    device_sumsq.sumsq(sources, out)
    return out.view(())


def stream(
    reads: Sequence[Tensor] = (),
    updates: Sequence[Tensor] = (),
    writes: Sequence[Tensor] = (),
    *,
    impl: str | None = None,
) -> None:
    """Reads, updates and writes equally large tensors and computes next to nothing: its time is the roof.

    What is updated or written holds nothing of use afterwards.

    >>> zk.kernels.stream(reads=[torch.zeros(1024)], updates=[torch.zeros(1024)])
    """
    every = [*reads, *updates, *writes]
    named = [(f"stream {i}", t) for i, t in enumerate(every)]
    for name, t in named:
        checks.tensor(
            name,
            t,
            (
                torch.float32,
                torch.bfloat16,
                torch.float16,
                torch.uint8,
                torch.int8,
                torch.int16,
                torch.int32,
                torch.int64,
            ),
        )
    sizes = {t.numel() * t.element_size() for t in every}
    if len(sizes) != 1 or min(sizes) % 64:
        raise ValueError(f"streams have {sorted(sizes)} bytes; allowed: one size, a multiple of 64, for all of them")
    if max(len(reads), len(updates), len(writes)) > 8:
        raise ValueError(
            f"{len(reads)} reads, {len(updates)} updates, {len(writes)} writes; allowed: at most 8 of a kind"
        )
    for i, t in enumerate(writes):
        if t.data_ptr() % 64:
            raise ValueError(f"writes[{i}] lies at {t.data_ptr() % 64} modulo 64; allowed: 64-byte aligned memory")
    checks.no_overlap(named[len(reads) :], named[: len(reads)])
    if impl == "reference":
        raise ValueError(got("impl", impl, "native implementations: the roof has no arithmetic to refer to"))
    nbytes = sizes.pop()
    with implementation(impl, checks.one_device(named)) as family:
        if nbytes and family == TRITON:
            from zerokern.kernels.triton import stream as device_stream

            device_stream.stream(reads, updates, writes)
        elif nbytes:
            cpu.stream(reads, updates, writes, nbytes)
