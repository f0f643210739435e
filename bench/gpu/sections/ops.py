"""The ops beside the update: sum of squares, cast and accumulate, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ...contest import Provider, WrongResult
from ..clock import Run
from ..report import Desk
from ..roof import roofs
from ..settings import Settings, uneven
from ..turns import COPY, Contest

F32, BF16 = torch.float32, torch.bfloat16
OURS = "zk"
NORM_RTOL = 1e-3  # torch sums in fp32
Maker = Callable[[], Sequence[Provider]]


def run(desk: Desk) -> None:
    settings, numel = desk.settings, desk.settings.sizes.flat
    sizes = settings.sizes
    shape = uneven(sizes.uneven_tensors, max(sizes.uneven_numel, sizes.flat // 4))
    contests = [
        _sumsq(settings, [numel], BF16),
        _sumsq(settings, [numel], F32),
        _sumsq(settings, list(shape.numels), BF16),
        _fingerprints(settings, list(shape.numels), BF16),
        _cast(settings, numel, F32, BF16),
        _cast(settings, numel, BF16, F32),
        _accumulate(settings, numel),
    ]
    for i, make in enumerate(contests):
        desk.contest(make(), len(contests) - i)


def _provider(wiring: str, run: Run, check: Callable[[], None], nbytes: float) -> Provider:
    return Provider(OURS if wiring == OURS else wiring, run, check, nbytes, lambda count: None, COPY, wiring=wiring)


def _noise(numel: int, dtype: torch.dtype, settings: Settings) -> torch.Tensor:
    return torch.randn(numel, device=settings.device).to(dtype)


def _sumsq(settings: Settings, numels: Sequence[int], dtype: torch.dtype) -> Callable[[], Contest]:
    total = sum(numels)
    nbytes = total * dtype.itemsize

    def make() -> Contest:
        tensors = [_noise(numel, dtype, settings) for numel in numels]
        truth = math.fsum(tensor.double().square().sum().item() for tensor in tensors)

        def compared(who: str, squares: float, rtol: float) -> None:
            if not math.isclose(squares, truth, rel_tol=rtol):
                raise WrongResult(f"{who}: sum of squares {squares:.9g}, the float64 truth is {truth:.9g}")

        def ours() -> Sequence[Provider]:
            from zerokern.kernels.triton.sumsq import SumsqTable

            table = SumsqTable(settings.device, list(numels), dtype)
            pointers = torch.tensor([tensor.data_ptr() for tensor in tensors], device=settings.device)
            out = torch.full((1,), math.nan, dtype=torch.float64, device=settings.device)

            def sum_squares() -> None:
                table.run(pointers, out, 0)

            def check() -> None:
                sum_squares()
                first = out.item()
                compared(OURS, first, 1e-9)
                sum_squares()
                if out.item() != first:
                    raise WrongResult(f"{OURS}: a second run gives {out.item():.17g}, the first gave {first:.17g}")

            return [_provider(OURS, sum_squares, check, nbytes)]

        def theirs() -> Sequence[Provider]:
            def norm() -> torch.Tensor:
                if len(tensors) == 1:
                    return torch.linalg.vector_norm(tensors[0], dtype=F32)
                return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, dtype=F32)))

            def check() -> None:
                compared("torch", norm().item() ** 2, NORM_RTOL)

            return [_provider("vector_norm" if len(tensors) == 1 else "_foreach_norm", norm, check, nbytes)]

        title = f"sum of squares, {len(numels):,} tensors, {total:,} elements of {dtype}"
        patterns = [(1, 0, 0)]
        return Contest(title, total, {OURS: ours}, {"torch": theirs}, lambda: roofs(settings, nbytes, patterns))

    return make


def _fingerprints(settings: Settings, numels: Sequence[int], dtype: torch.dtype) -> Callable[[], Contest]:
    """Of gradients that left before `step()`; a sum of each is the least that torch could do."""
    total = sum(numels)
    nbytes = total * dtype.itemsize

    def make() -> Contest:
        tensors = [_noise(numel, dtype, settings) for numel in numels]
        out = torch.empty(len(tensors), dtype=torch.int64, device=settings.device)

        def ours() -> Sequence[Provider]:
            from zerokern.kernels import ops, reference_device

            def check() -> None:
                ops.fingerprints(tensors, out, impl=settings.impl)
                for number, tensor in zip(out.tolist(), tensors, strict=True):
                    if number != int(reference_device.fingerprint(tensor)) and out.is_cuda:
                        raise WrongResult(f"{OURS}: a fingerprint is {number}, not its reference's")

            return [_provider(OURS, lambda: ops.fingerprints(tensors, out, impl=settings.impl), check, nbytes)]

        def theirs() -> Sequence[Provider]:
            words = [tensor.view(torch.int16) for tensor in tensors]
            return [_provider("sum", lambda: [one.sum() for one in words], lambda: None, nbytes)]

        title = f"fingerprints, {len(numels):,} tensors, {total:,} elements of {dtype}"
        return Contest(title, total, {OURS: ours}, {"torch": theirs}, lambda: roofs(settings, nbytes, [(1, 0, 0)]))

    return make


def _cast(settings: Settings, numel: int, source: torch.dtype, target: torch.dtype) -> Callable[[], Contest]:
    nbytes = numel * (source.itemsize + target.itemsize)

    def make() -> Contest:
        src, dst = _noise(numel, source, settings), torch.empty(numel, dtype=target, device=settings.device)
        want = src.to(target)

        def contestant(wiring: str, run: Run) -> Provider:
            return _provider(wiring, run, lambda: _same(wiring, run, dst, want), nbytes)

        def ours() -> Sequence[Provider]:
            from zerokern.kernels import ops

            return [contestant(OURS, lambda: ops.cast(src, dst, impl=settings.impl))]

        peers: dict[str, Maker] = {"torch": lambda: [contestant("copy_", lambda: dst.copy_(src))]}
        title = f"cast, {numel:,} elements, {source} -> {target}"
        return Contest(title, numel, {OURS: ours}, peers, lambda: roofs(settings, nbytes))

    return make


def _accumulate(settings: Settings, numel: int) -> Callable[[], Contest]:
    nbytes = numel * (2 * F32.itemsize + BF16.itemsize)

    def make() -> Contest:
        start, src = _noise(numel, F32, settings), _noise(numel, BF16, settings)
        total, want = torch.empty_like(start), start + src.float()

        def contestant(wiring: str, run: Run) -> Provider:
            def check() -> None:
                total.copy_(start)
                _same(wiring, run, total, want, poison=False)

            return _provider(wiring, run, check, nbytes)

        def ours() -> Sequence[Provider]:
            from zerokern.kernels import ops

            return [contestant(OURS, lambda: ops.accumulate(total, [src], impl=settings.impl))]

        peers: dict[str, Maker] = {"torch": lambda: [contestant("add_", lambda: total.add_(src))]}
        title = f"accumulate, {numel:,} elements, {F32} += {BF16}"
        return Contest(title, numel, {OURS: ours}, peers, lambda: roofs(settings, nbytes, [(1, 1, 0)]))

    return make


def _same(who: str, run: Run, got: torch.Tensor, want: torch.Tensor, *, poison: bool = True) -> None:
    """Equal bit by bit after a run, every element written."""
    if poison:
        got.fill_(math.nan)
    run()
    if not torch.equal(got, want):
        at = int((got != want).nonzero()[0])
        raise WrongResult(f"{who}: element {at} is {got[at].item():.9g}, it should be {want[at].item():.9g}")
