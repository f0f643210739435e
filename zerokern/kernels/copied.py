"""Lists of tensors copied into a bucket and back by torch's own launches, where nothing but their bytes moves.

`torch._foreach_copy_` passes addresses as arguments of its kernels, and is faster than our kernels, which also cast,
scale and sum. It is private in torch: where it is missing, ours take its place. `torch._chunk_cat` is not used. It pins
memory and asks events, which breaks off a capture of another thread, and it uploads its table by a copy on the current
stream, which queues behind large uploads on the same copy engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zerokern.kernels.checks import BucketSpan

__all__ = ["Copied"]

_MOST_RUNS = 8  # of spans side by side: each is a launch


class Copied:
    """The launches for lists of tensors like these; `run` says whether it has copied them.

    >>> x, bucket = [torch.ones(2, 2), torch.zeros(3)], torch.empty(7)
    >>> members = [BucketSpan((2, 2), (2, 1), x[0].dtype, True, 4, 0), BucketSpan((3,), (1,), x[1].dtype, True, 3, 4)]
    >>> Copied(members, bucket.dtype).run(True, x, bucket), bucket.tolist()
    (True, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    """

    def __init__(self, members: Sequence[BucketSpan], dtype: torch.dtype) -> None:
        self._members = members
        places = [place for place, one in enumerate(members) if one.numel]
        self._runs: list[list[int]] = [[place] for place in places[:1]]
        for before, place in pairwise(places):
            if members[before].offset + members[before].numel == members[place].offset:
                self._runs[-1].append(place)
            else:
                self._runs.append([place])
        self._fits = bool(places) and len(self._runs) <= _MOST_RUNS
        self._fits = self._fits and all(one.is_contiguous and one.dtype == dtype for one in members)

    def run(self, into: bool, tensors: Sequence[Tensor], bucket: Tensor) -> bool:
        """Copies the tensors into the bucket or out of it; returns False, and copies nothing, where torch cannot."""
        private = hasattr(torch, "_foreach_copy_") and hasattr(torch._utils, "_unflatten_dense_tensors")
        if not (self._fits and private) or self._meet(tensors, bucket):
            return False
        flat = bucket.data  # whose version is its own: whoever writes tells autograd, as with our kernels
        with torch.no_grad():
            for run in self._runs:
                some = [tensors[place] for place in run]
                first, last = self._members[run[0]], self._members[run[-1]]
                spans = _views(flat[first.offset : last.offset + last.numel], some)
                if into:
                    torch._foreach_copy_(spans, some)
                else:
                    torch._foreach_copy_([one.data for one in some], spans)
        return True

    def _meet(self, tensors: Sequence[Tensor], bucket: Tensor) -> bool:
        """Whether a tensor lies in the bucket: it may be its own span."""
        begin = bucket.data_ptr()
        end = begin + bucket.nbytes
        return any(begin <= one.data_ptr() < end for one in tensors)


def _views(span: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The memory of a span as tensors of these shapes."""
    views = torch._utils._unflatten_dense_tensors(span, like)
    # Views of a tensor that inference mode made have no version to count, so torch refuses to write them elsewhere.
    return [one.data for one in views] if span.is_inference() else list(views)
