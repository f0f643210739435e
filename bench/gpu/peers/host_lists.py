"""torch's ways to bring a list of tensors into pinned host memory and back, with cast and norm: one copy_ for each
tensor, as offloading code does it, and one bucket on the device that crosses in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..lists import Lists, Making, making

LOOP, BUCKET = "loop of copy_", "bucket on the device"


def gather(lists: Sequence[Lists]) -> dict[str, Making]:
    def loop(one: Lists) -> Callable[[], object]:
        pairs = list(zip(one.views(one.bucket), one.tensors, strict=True))

        def run() -> None:
            for host, tensor in pairs:
                host.copy_(tensor, non_blocking=True)
            one.norm = global_norm(one.tensors).item

        return run

    def bucket(one: Lists) -> Callable[[], object]:
        between = torch.empty_like(one.bucket, device=one.device)

        def run() -> None:
            torch.cat(one.tensors, out=between)
            one.bucket.copy_(between, non_blocking=True)
            one.norm = torch.linalg.vector_norm(between, dtype=torch.float32).item

        return run

    check, before = Lists.check_bucket, Lists.before_flatten
    return {
        LOOP: making(lists, "copy_(non_blocking=True) of each tensor, _foreach_norm", loop, check, before),
        BUCKET: making(lists, "torch.cat, one copy_, vector_norm", bucket, check, before),
    }


def scatter(lists: Sequence[Lists]) -> dict[str, Making]:
    def loop(one: Lists) -> Callable[[], object]:
        pairs = list(zip(one.tensors, one.views(one.bucket), strict=True))

        def run() -> None:
            for tensor, host in pairs:
                tensor.copy_(host, non_blocking=True)
            one.norm = global_norm(one.tensors).item

        return run

    def bucket(one: Lists) -> Callable[[], object]:
        between = torch.empty_like(one.bucket, device=one.device)
        views = one.views(between)

        def run() -> None:
            between.copy_(one.bucket, non_blocking=True)
            torch._foreach_copy_(one.tensors, views)
            one.norm = torch.linalg.vector_norm(between, dtype=torch.float32).item

        return run

    check, before = Lists.check_tensors, Lists.before_unflatten
    return {
        LOOP: making(lists, "copy_(non_blocking=True) of each tensor, _foreach_norm", loop, check, before),
        BUCKET: making(lists, "one copy_, _foreach_copy_, vector_norm", bucket, check, before),
    }


def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)).float())
