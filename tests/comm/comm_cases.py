"""What a rank does, real or fake: the same bodies run over gloo, in threads, over a stand-in for a device's library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerokern.comm import CommError, Group

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """A rank's numbers: of very different sizes, so that another order of the sum has other bits."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    x = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    return x.to(dtype)


@dataclass(frozen=True)
class Reduction:
    """One reduce_scatter; `place`: where its output lies."""

    span: int
    source: torch.dtype
    target: torch.dtype
    scale: float = 1.0
    add: bool = False
    place: str = "apart"  # or "inside": this rank's own span of the bucket
    scratch: bool = False

    def run(self, group: Group) -> torch.Tensor:
        bucket = values(group.rank, group.size * self.span, self.source)
        if self.place == "inside":
            out = bucket[group.rank * self.span : (group.rank + 1) * self.span]
        else:
            out = values(group.rank, self.span, self.target, salt=1)
        scratch = torch.full((group.size * self.span + 3,), 7.0, dtype=self.source) if self.scratch else None
        group.reduce_scatter(bucket, out, scale=self.scale, add=self.add, scratch=scratch).wait()
        return out.clone()


REDUCTIONS = [
    Reduction(span, source, target, scale, add, scratch=scratch)
    for source in DTYPES
    for target in dict.fromkeys((torch.float32, source))
    for span, scale, add, scratch in ((1, 1.0, False, False), (640, 1 / 3, True, True), (4096 + 128, 0.25, False, True))
]
REDUCTIONS += [Reduction(0, dtype, torch.float32) for dtype in DTYPES]
REDUCTIONS += [Reduction(257, dtype, dtype, 1 / 3, place="inside") for dtype in DTYPES]


def gather(group: Group, span: int, dtype: torch.dtype, place: str) -> torch.Tensor:
    shard = values(group.rank, span, torch.float32).to(dtype)
    full = torch.full((group.size * span,), 3, dtype=dtype)
    if place == "own":
        full[group.rank * span : (group.rank + 1) * span] = shard
        group.all_gather(full).wait()
    elif place == "own, named":
        mine = full[group.rank * span : (group.rank + 1) * span]
        mine.copy_(shard)
        group.all_gather(full, mine).wait()
    else:
        group.all_gather(full, shard).wait()
    return full


def every_operation(group: Group) -> list[torch.Tensor]:
    """All results of one rank, in a fixed order; what two transports must agree on to the bit."""
    results = [case.run(group) for case in REDUCTIONS]
    for dtype in (*DTYPES, torch.float64, torch.int64, torch.uint8):
        for span, place in ((0, "apart"), (5, "own"), (300, "own, named"), (300, "apart")):
            results.append(gather(group, span, dtype, place))
        for numel in (0, 1, 7, 40_001):
            for op in ("sum", "max"):
                x = values(group.rank, numel, torch.float32).to(dtype)
                group.all_reduce(x, op).wait()
                results.append(x)
        x = values(group.rank, 1001, torch.float32).to(dtype)
        group.broadcast(x, src=group.size - 1).wait()
        results.append(x)
    x = values(group.rank, 50_000, torch.float32)
    scratch = torch.empty(group.size * 50_000)
    group.all_reduce(x, scratch=scratch).wait()
    results.append(x)
    return results


def many_at_once(group: Group) -> list[torch.Tensor]:
    """Operations of several kinds and of one kind in flight together, waited for in another order."""
    buckets = [values(group.rank, group.size * 600, torch.float32, salt=i) for i in range(4)]
    outs = [torch.empty(600) for _ in buckets]
    fulls = [torch.empty(group.size * 450_000) for _ in range(3)]
    handles = []
    for i, (bucket, out) in enumerate(zip(buckets, outs, strict=True)):
        handles.append(group.reduce_scatter(bucket, out))
        if i < len(fulls):
            handles.append(group.all_gather(fulls[i], values(group.rank, 450_000, torch.float32, salt=10 + i)))
    for handle in reversed(handles):
        handle.wait()
    return outs + fulls


def refused(group: Group, act) -> tuple[str, tuple[int, ...], str]:
    """The words of the CommError that `act(group)` ends in, who is gone, and the operation."""
    try:
        act(group)
    except CommError as error:
        return str(error), error.gone, error.operation
    return "no error", (), ""
