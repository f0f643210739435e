"""torch's ways to copy a list of tensors into one bucket and back. None of them makes a norm: with `norm`, torch's own
follows in a pass of its own. Buckets and views are made once, outside the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..lists import Lists, Making, Way, making


def flatten(lists: Sequence[Lists], *, norm: bool) -> dict[str, Making]:
    """Candidates by peer: torch.cat, _foreach_copy_ and _chunk_cat (as FSDP2 calls it) into a bucket that is there."""

    def cat(one: Lists) -> Callable[[], object]:
        return lambda: torch.cat(one.tensors, out=one.bucket)

    def foreach_copy(one: Lists) -> Callable[[], object]:
        views = one.views(one.bucket)
        return lambda: torch._foreach_copy_(views, one.tensors)

    def chunk_cat(one: Lists) -> Callable[[], object]:
        out = one.bucket.view(1, -1)
        return lambda: torch._chunk_cat(one.tensors, dim=0, num_chunks=1, out=out)

    ways = {"cat": cat, "foreach_copy": foreach_copy, "chunk_cat": chunk_cat}
    return {
        name: making(lists, wiring(name, norm), with_norm(way, norm), Lists.check_bucket, Lists.before_flatten)
        for name, way in ways.items()
    }


def unflatten(lists: Sequence[Lists], *, norm: bool) -> dict[str, Making]:
    """Back into the tensors: _foreach_copy_ from views of the bucket, and one copy_ for each tensor."""

    def foreach_copy(one: Lists) -> Callable[[], object]:
        views = one.views(one.bucket)
        return lambda: torch._foreach_copy_(one.tensors, views)

    def loop(one: Lists) -> Callable[[], object]:
        pairs = list(zip(one.tensors, one.views(one.bucket), strict=True))

        def run() -> None:
            for tensor, view in pairs:
                tensor.copy_(view)

        return run

    ways = {"foreach_copy": foreach_copy, "loop of copy_": loop}
    return {
        name: making(lists, wiring(name, norm), with_norm(way, norm), Lists.check_tensors, Lists.before_unflatten)
        for name, way in ways.items()
    }


def wiring(name: str, norm: bool) -> str:
    return f"{name}{', then vector_norm' if norm else ''}"


def with_norm(way: Way, norm: bool) -> Way:
    """The same copies, followed by torch's norm of the bucket."""

    def both(one: Lists) -> Callable[[], object]:
        copy = way(one)

        def run() -> None:
            copy()
            one.norm = torch.linalg.vector_norm(one.bucket, dtype=torch.float32).item

        return run

    return both if norm else way
