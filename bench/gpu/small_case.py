"""Each kernel once on little data: uneven sizes, misaligned views, every format. What a sanitizer watches.

Ops that this installation lacks are named, and the others run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import torch

from ..step import Algorithm
from .ours import DeviceStep, Layout
from .problem import DeviceProblem
from .sections.update import groups
from .settings import Settings, uneven

NUMELS = (1, 7, 128, 1000, 4099)


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], object]]]:
    """What moves data first, then every fourth update format: all masters, states and gradients have their turn."""
    device, impl = settings.device, settings.impl
    tensors = [torch.randn(n + 3, device=device)[3:] for n in NUMELS]
    bucket = torch.zeros(sum(NUMELS) + 1, dtype=torch.bfloat16, device=device)[1:]
    stats = torch.zeros(2, dtype=torch.float64, device=device)

    def flattening() -> None:
        from zerokern.kernels.flat import flatten

        transposed = torch.randn(9, 5, device=device).t()[:3]
        flatten([*tensors, transposed], torch.cat([bucket, bucket]), stats=stats, impl=impl)

    def unflattening() -> None:
        from zerokern.kernels.flat import unflatten

        unflatten(bucket, tensors, scale=0.5, stats=stats, impl=impl)

    def others() -> None:
        from zerokern.kernels import ops

        ops.sumsq(tensors, impl=impl)
        ops.cast(tensors[-1], bucket[: NUMELS[-1]], impl=impl)
        ops.accumulate(tensors[-1], [bucket[: NUMELS[-1]], bucket[-NUMELS[-1] :]], impl=impl)
        parts = list(torch.zeros(3 * 4096, device=device).split(4096))
        ops.stream(parts[:1], parts[1:2], parts[2:], impl=impl)

    def changes() -> None:
        from zerokern.kernels.changed import pack_changed
        from zerokern.kernels.triton.changed import group_rows, unpack

        values = [torch.randn(n).bfloat16() for n in NUMELS]
        packs = [(pack_changed(torch.full((-(-len(one) // 8),), 0x51, dtype=torch.uint8), one), one) for one in values]
        packs = [(packed, one.to(device)) for packed, one in packs]
        parts = (torch.cat([getattr(one, name) for one, _ in packs]) for name in ("counts", "places", "values"))
        unpack(group_rows(packs).to(device), *(part.to(device) for part in parts))

    yield "unpack of changes", changes
    yield "flatten", flattening
    yield "unflatten", unflattening
    yield "sumsq, cast, accumulate, stream", others
    every = [(algorithm, layout) for algorithm, group in groups() for layout in group]
    for algorithm, layout in every[:: 13 if settings.rehearse else 4]:
        yield f"{algorithm.name}, {layout.name}", functools.partial(_update, algorithm, layout, device)


def _update(algorithm: Algorithm, layout: Layout, device: torch.device) -> None:
    DeviceStep(DeviceProblem(algorithm, uneven(5, 5000), device), layout).check()


def main() -> int:
    settings = Settings(rehearse="--rehearse" in sys.argv[1:])
    failed = done = 0
    every = list(cases(settings))
    for name, case in every:
        try:
            case()
            if not settings.rehearse:
                torch.cuda.synchronize()
            done += 1
        except Exception as error:
            failed += 1
            print(f"failed: {name}: {type(error).__name__}: {error}", flush=True)
        print(f"small case: {done} of {len(every)} ops ran, {failed} failed; the last was {name}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
