"""torch's ways to bring a list of tensors into pinned host memory and back: one copy_ for each tensor, as offloading
code does it, and one bucket on the device that crosses in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..lists import Lists, Making, making

LOOP, BUCKET = "loop of copy_", "bucket on the device"


def to_host(lists: Sequence[Lists]) -> dict[str, Making]:
    def loop(one: Lists) -> Callable[[], object]:
        return _one_by_one(one.views(one.bucket), one.tensors)

    def bucket(one: Lists) -> Callable[[], object]:
        between = torch.empty_like(one.bucket, device=one.device)

        def run() -> None:
            torch.cat(one.tensors, out=between)
            one.bucket.copy_(between, non_blocking=True)

        return run

    check, before = Lists.check_bucket, Lists.before_flatten
    return {
        LOOP: making(lists, "copy_(non_blocking=True) of each tensor", loop, check, before),
        BUCKET: making(lists, "torch.cat, one copy_", bucket, check, before),
    }


def to_device(lists: Sequence[Lists]) -> dict[str, Making]:
    def loop(one: Lists) -> Callable[[], object]:
        return _one_by_one(one.tensors, one.views(one.bucket))

    def bucket(one: Lists) -> Callable[[], object]:
        between = torch.empty_like(one.bucket, device=one.device)
        views = one.views(between)

        def run() -> None:
            between.copy_(one.bucket, non_blocking=True)
            torch._foreach_copy_(one.tensors, views)

        return run

    check, before = Lists.check_tensors, Lists.before_unflatten
    return {
        LOOP: making(lists, "copy_(non_blocking=True) of each tensor", loop, check, before),
        BUCKET: making(lists, "one copy_, _foreach_copy_", bucket, check, before),
    }


def _one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], object]:
    pairs = list(zip(targets, sources, strict=True))

    def run() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return run
