"""Sums of squares that are measured where tensors lie or are written, and added up in the one order of `sumsq`.

That order is `reference.sumsq`'s: chunks of 65536 elements, whose sums are added tensor by tensor. A device measures
chunks, of which eight bytes each go to the host; whoever has their sums adds them, so a tensor has one sum whoever
measured it.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels import cpu, reference
from zerokern.kernels.dispatch import REFERENCE, TRITON, implementation
from zerokern.kernels.triton.upload import host_words, table_for

__all__ = ["ChunkSums", "Squares", "one_by_one"]

MANY = 64  # chunks, for which Python would take longer than a call of torch


class Squares:
    """The sums of squares of spans of what somebody is about to write, asked for beforehand: nothing is read twice.

    `sums`: in the order of the spans and with the bits of `sumsq`; None as long as nobody has measured them. `later`:
    where a device has measured them, a function that waits for that and returns them; else None.

    >>> from zerokern.kernels.casts import add_up
    >>> wanted, total = Squares([(0, 2), (2, 1)]), torch.zeros(3)
    >>> add_up(total, torch.tensor([3.0, 4.0, 5.0]), squares=wanted); wanted.sums
    array('d', [25.0, 25.0])
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        """`spans`: where each begins, and its elements; they come in order and do not overlap."""
        self.begins, self.numels = array("q"), array("q")
        for begin, numel in spans:
            self.begins.append(begin)
            self.numels.append(numel)
        self.forget()

    def forget(self) -> None:
        """Drops what was measured: it is to be measured anew.

        >>> squares = Squares([(0, 2)]); squares.forget(); squares.sums is squares.later is None
        True
        """
        self.sums: array[float] | None = None
        self.later: Callable[[], array[float]] | None = None

    def of(self, written: Tensor) -> list[Tensor]:
        """Returns the spans of what was written.

        >>> Squares([(0, 2), (3, 1)]).of(torch.arange(4))
        [tensor([0, 1]), tensor([3])]
        """
        return [written[begin : begin + numel] for begin, numel in zip(self.begins, self.numels, strict=True)]


def one_by_one(sums: Callable[[], Sequence[float]], count: int) -> list[Callable[[], float]]:
    """Returns a function for each of `count` sums, of which `sums` returns all.

    >>> [one() for one in one_by_one(lambda: [1.0, 2.0], 2)]
    [1.0, 2.0]
    """
    return [functools.partial(_one_of, sums, at) for at in range(count)]


def _one_of(sums: Callable[[], Sequence[float]], at: int) -> float:
    return sums()[at]


class ChunkSums:
    """Sums of squares of the chunks of a list of tensors, measured where these lie, again and again.

    `numels`, `dtypes`: of the tensors, the same in every call, and together the `key`. `count`: how many chunks there
    are.

    >>> sums = ChunkSums([3, 70000], [torch.float32, torch.bfloat16])
    >>> chunks = torch.empty(sums.count, dtype=torch.float64)
    >>> sums.measure([torch.ones(3), torch.ones(70000, dtype=torch.bfloat16)], chunks)
    >>> chunks, sums.added(chunks)
    (tensor([3.0000e+00, 6.5536e+04, 4.4640e+03], dtype=torch.float64), array('d', [3.0, 70000.0]))
    """

    def __init__(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], impl: str | None = None) -> None:
        self._chunks = [-(-numel // reference.SUMSQ_CHUNK) for numel in numels]
        self._numels, self._impl, self.key = list(numels), impl, (tuple(numels), tuple(dtypes))
        self.count = sum(self._chunks)
        self._here: Tensor | None = None
        # tensors of one dtype that follow each other are measured together, so that chunks are in the order of tensors
        begins = [at for at in range(len(numels)) if at == 0 or dtypes[at] != dtypes[at - 1]]
        self._runs = [slice(*ends) for ends in zip(begins, [*begins[1:], len(numels)], strict=True)]
        self._tables: dict[int, Any] = {}

    def measure(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Writes the chunks' sums to `out`, float64 where the tensors are, in the order of tensors. Nothing waits.

        >>> out = torch.zeros(1, dtype=torch.float64)
        >>> ChunkSums([2], [torch.float32]).measure([torch.full((2,), 3.0)], out); out
        tensor([18.], dtype=torch.float64)
        """
        first = 0
        with implementation(self._impl, out.device) as family:
            for number, run in enumerate(self._runs):
                some, count = tensors[run], sum(self._chunks[run])
                mine, first = out[first : first + count], first + count
                if not count:
                    continue
                if family == TRITON:
                    make = functools.partial(_open_table, out.device, self._numels[run], some[0].dtype)
                    table = table_for(self._tables, number, out.device, make)
                    table.measure([one.data_ptr() for one in some], mine)
                elif family == REFERENCE:
                    chunks = [chunk for one in some for chunk in one.reshape(-1).split(reference.SUMSQ_CHUNK)]
                    sums = [reference.sumsq([one]) for one in chunks if one.numel()]
                    mine.copy_(torch.tensor(sums, dtype=torch.float64))
                else:
                    pointers, numels = array("Q", [one.data_ptr() for one in some]), array("q", self._numels[run])
                    cpu.sumsq_chunks(pointers, numels, some[0].dtype, mine)

    def launch(self, driver: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Launches the measurement on the current stream. `driver`: of the device; None for host memory.

        Returns host memory, and the chunks' sums on the device, which the caller copies there. Nobody launches again
        before the last sums have been read, or are of no interest any more.

        >>> ChunkSums([2, 1], [torch.float32] * 2).launch(None, [torch.ones(2), torch.ones(1)])[1]
        tensor([2., 1.], dtype=torch.float64)
        """
        # new memory each time: the copy of the last sums may still read theirs
        there = torch.empty(self.count, dtype=torch.float64, device=tensors[0].device)
        if self._here is None:  # of torch's allocator: an arena has whole pages, and a bucket has a few of these words
            self._here = host_words(there)
        launch = getattr(driver, "launch", None)  # a played device has streams of its own
        if launch is None:
            self.measure(tensors, there)
        else:
            launch(functools.partial(self.measure, list(tensors), there))
        return self._here, there

    def later(self, wait: Callable[[], None]) -> Callable[[], array[float]]:
        """Returns a function that calls `wait`, for the copy of what was launched last, and returns the sum of each
        tensor. Any thread may call it.

        >>> sums = ChunkSums([2], [torch.float32])
        >>> here, there = sums.launch(None, [torch.ones(2)])
        >>> _ = here.copy_(there); sums.later(lambda: None)()
        array('d', [2.0])
        """
        here = self._here
        assert here is not None

        @functools.cache
        def sums() -> array[float]:
            wait()
            return self.added(here)

        return sums

    def added(self, chunks: Tensor) -> array[float]:
        """Returns the sum of each tensor, from its chunks' sums in host memory: the bits of `sumsq`.

        >>> ChunkSums([3, 0], [torch.float32] * 2).added(torch.tensor([5.0], dtype=torch.float64))
        array('d', [5.0, 0.0])
        """
        found = array("d")
        for some in chunks.split(self._chunks):
            if len(some) > MANY:  # torch's running sum is of one element after the other
                found.append(some.cumsum(0)[-1].item())
            else:  # Python's sum() compensates from 3.12 on
                found.append(functools.reduce(operator.add, some.tolist(), 0.0))
        return found


def _open_table(device: torch.device, numels: Sequence[int], dtype: torch.dtype) -> Any:
    from zerokern.kernels.triton.sumsq import SumsqTable

    return SumsqTable(device, numels, dtype)
