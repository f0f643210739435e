"""The interface of this layer: a group of ranks, its collectives, and the checks of their arguments."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokern.core.errors import got, whole_number
from zerokern.core.units import scratch_numel
from zerokern.kernels.casts import add_up
from zerokern.kernels.squares import Squares

__all__ = ["Group", "Handle", "Traffic", "own_span"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SUMMABLE = (torch.float64, *FLOATS, torch.uint8, torch.int64)
KINDS = ("reduce", "gather", "other")  # of operations


class Handle:
    """What a collective returns at once. Wait for handles in the order of the calls, which is the same on all ranks.

    >>> said = []
    >>> handle = Handle(lambda: said.append("ended"))
    >>> handle.done(), handle.wait(), handle.wait(), handle.done(), said
    (False, None, None, True, ['ended'])
    """

    __slots__ = ("_again", "_complete", "_ended", "_failure", "_lock", "_poll")

    def __init__(
        self,
        complete: Callable[[], object] | None = None,
        poll: Callable[[], bool] | None = None,
        again: Callable[[], None] | None = None,
    ) -> None:
        self._complete, self._poll = complete, poll
        self._again = again  # called by later waiters, whose streams have not waited yet
        self._ended = complete is None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def poll(self) -> Callable[[], bool]:
        """Asks whether the transport has ended it, whoever waits for it; False where the transport cannot tell."""
        return _cannot_tell if self._poll is None else self._poll

    def wait(self) -> None:
        """Waits until the result is there: on a CPU the caller waits, on a device the current stream.

        May be called again, from any thread and stream; a collective that failed raises each time.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._ended:
                assert self._complete is not None
                try:
                    self._complete()
                except Exception as error:
                    self._failure = error
                # not after Ctrl-C: it is no failure of the collective, and whoever waits again waits for it
                self._ended, self._complete, self._poll = True, None, None
                if self._failure is not None:
                    raise self._failure
                return
        if self._again is not None:
            self._again()

    def advance(self) -> bool:
        """Waits for the first of two rounds and starts the second: returns True. With one round it is the same as
        `wait`."""
        self.wait()
        return False

    def done(self) -> bool:
        """Returns whether wait() has nothing left to do; False if the transport cannot tell (gloo) and nobody has
        waited."""
        poll = self._poll
        return self._ended or (poll is not None and poll())


def _cannot_tell() -> bool:
    return False


class Traffic:
    """Counts the bytes that one rank sends.

    >>> traffic = Traffic()
    >>> traffic.add("reduce", 4096)
    >>> traffic.add("gather", 1024)
    >>> traffic.total(), traffic.total("reduce"), traffic.total("other")
    (5120, 4096, 0)
    """

    def __init__(self) -> None:
        self._nbytes = dict.fromkeys(KINDS, 0)
        self._lock = threading.Lock()

    def add(self, kind: str, nbytes: int) -> None:
        """Counts nbytes more."""
        if kind not in self._nbytes:
            raise ValueError(got("kind", kind, ", ".join(map(repr, KINDS))))
        with self._lock:
            self._nbytes[kind] += nbytes

    def total(self, kind: str | None = None) -> int:
        """Returns the bytes of one kind, or of all kinds."""
        with self._lock:
            return sum(self._nbytes.values()) if kind is None else self._nbytes[kind]

    def clear(self) -> None:
        """Counts from zero again."""
        with self._lock:
            self._nbytes = dict.fromkeys(KINDS, 0)


class Publishing(Protocol):
    """A thread that has called `publish`, or `all_to_all`, and has not ended."""

    def finish(self) -> None:
        """Waits until that has ended on this rank."""


class Group:
    """Ranks that exchange spans of tensors. This class is the group of one rank: everything is local.

    >>> group = Group(0, 1, torch.device("cpu"), "alone")
    >>> group.rank, group.size, group.name
    (0, 1, 'alone')
    >>> out = torch.empty(4)
    >>> group.reduce_scatter(torch.ones(4, dtype=torch.bfloat16), out, scale=0.5).wait(); out
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(self, rank: int, size: int, device: torch.device, name: str) -> None:
        self.rank, self.size, self.device, self.name = rank, size, device, name
        self.alone = size == 1  # nothing has to move
        self.traffic = Traffic()
        self.publishing: weakref.WeakSet[Publishing] = weakref.WeakSet()
        # what may call `all_to_all` on a thread of its own, if anything; see `begin_exchanging`
        self.exchanging: weakref.WeakSet[Publishing] = weakref.WeakSet()

    @property
    def everyone(self) -> Any:
        """Those that have copies of its spans too: itself, where nobody has."""
        return self

    def link_failures(self, other: Group) -> None:
        """Links two groups: if one of them fails, the other fails too, so that no rank waits for ever."""

    def awaiting_update(self) -> AbstractContextManager[None]:
        """Context manager around a wait for another thread of this process that is about to `publish`."""
        return nullcontext()

    def wait_for_publications(self, besides: object = None) -> None:
        """Waits until nothing is being published, before collectives begin whose order relative to it must be known."""
        for publication in list(self.publishing):
            if publication is not besides:
                publication.finish()

    def begin_exchanging(self, exchange: Publishing | None) -> None:
        """Waits for the thread that may still call `all_to_all`; from now on `exchange` may, if it has one."""
        for other in list(self.exchanging):
            other.finish()
        self.exchanging.clear()
        if exchange is not None:
            self.exchanging.add(exchange)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size}, {self.device})"

    def reduce_scatter(
        self,
        bucket: Tensor,
        out: Tensor,
        *,
        scale: float = 1.0,
        add: bool = False,
        scratch: Tensor | None = None,
        squares: Squares | None = None,
    ) -> Handle:
        """Computes out = (out if add) + scale * b_0 + scale * b_1 ..., where b_j is this rank's span of rank j's
        bucket.

        On a CPU the sum runs in fp32 in the order of the ranks and is rounded once, to the dtype of `out`; a device's
        library sums in the bucket's dtype, in an order of its own. `out` may be this rank's own span of `bucket`. Do
        not touch the bucket before wait(); afterwards its content is undefined, except for `out`. `scratch`: at least
        (size - 1) spans in the bucket's dtype, used by one collective at a time. `squares`: of spans of `out`, computed
        by wait() if the sum is made here and not by the transport.
        """
        bucket, out = self._flat("bucket", bucket, FLOATS), self._flat("out", out, FLOATS)
        span = self._span("bucket", bucket)
        if out.numel() != span:
            raise ValueError(
                f"out has {out.numel()} elements; allowed: {span}, one {self.size}th of the bucket's {bucket.numel()}"
            )
        inside = _overlap(bucket, out)
        if inside and not (out.dtype == bucket.dtype and self._is_in_place(out, bucket)):
            raise ValueError(
                "out shares memory with bucket; allowed: memory of its own, or this rank's own span of the bucket"
            )
        if inside and add:
            raise ValueError("add=True with out inside bucket would count the own span twice; pass an out of its own")
        if scratch is not None:
            scratch = self._scratch(scratch, bucket, out, (self.size - 1) * span)
        self.traffic.add("reduce", (self.size - 1) * span * bucket.element_size())
        return self._reduce_scatter(bucket, out, float(scale), add, scratch, squares)

    def all_gather(self, full: Tensor, shard: Tensor | None = None) -> Handle:
        """Fills `full` with the shards of all ranks, in order. This rank's is `shard`, or lies in its place already."""
        return self._gather("gather", full, shard)

    def publish(self, full: Tensor) -> Handle:
        """Gathers spans that are in their places already, from a thread of its own beside other collectives.

        One thread at a time may publish. It is listed in `publishing`, and others call `wait_for_publications` first.
        No reduction begins before these have ended, because on a device they share a communicator.
        """
        full = self._flat("full", full)
        self.traffic.add("gather", (self.size - 1) * self._span("full", full) * full.element_size())
        return self._publish(full)

    def all_to_all(self, receives: Sequence[Tensor], sends: Sequence[Tensor]) -> Handle:
        """Sends the tensor `sends[r]` to each rank r, and fills `receives[r]` with what that one sends here.

        Sizes may differ; what two ranks exchange has the same size on both, and `during(of=...)` names it, the same on
        all ranks. What a rank sends itself is copied. Any thread may call this, one at a time: see
        `begin_exchanging`.

        >>> out = torch.empty(2)
        >>> Group(0, 1, torch.device("cpu"), "alone").all_to_all([out], [torch.ones(2)]).wait(); out
        tensor([1., 1.])
        """
        sends = [self._flat("sends", tensor) for tensor in sends]
        receives = [self._flat("receives", tensor, (sends[0].dtype,)) for tensor in receives]
        for name, tensors in (("sends", sends), ("receives", receives)):
            if len(tensors) != self.size:
                raise ValueError(f"{name} has {len(tensors)} tensors; allowed: {self.size}, one for each rank")
        if sends[self.rank].numel() != receives[self.rank].numel():
            raise ValueError(
                f"receives[{self.rank}] has {receives[self.rank].numel()} elements; allowed: "
                f"{sends[self.rank].numel()}, what this rank sends itself"
            )
        sent = sum(tensor.nbytes for rank, tensor in enumerate(sends) if rank != self.rank)
        self.traffic.add("other", sent)
        if not _same(receives[self.rank], sends[self.rank]):
            receives[self.rank].copy_(sends[self.rank])
        return self._all_to_all(receives, sends)

    def _gather(self, kind: str, full: Tensor, shard: Tensor | None = None) -> Handle:
        full = self._flat("full", full)
        span = self._span("full", full)
        if shard is not None:
            shard = self._flat("shard", shard, (full.dtype,))
            if shard.numel() != span:
                raise ValueError(
                    f"shard has {shard.numel()} elements; allowed: {span}, one {self.size}th of full's {full.numel()}"
                )
            if self._is_in_place(shard, full):
                shard = None
            elif _overlap(full, shard):
                raise ValueError(
                    "shard shares memory with full; allowed: memory of its own, or this rank's own span of full"
                )
        self.traffic.add(kind, (self.size - 1) * span * full.element_size())
        return self._all_gather(full, shard)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, scratch: Tensor | None = None) -> Handle:
        """Reduces over all ranks, in place, to the same bits on each. The maximum of NaN and anything is NaN.

        A mean is the sum of values that each rank has divided before.

        A large tensor on a CPU takes a second round, which begins in wait(). `scratch`: memory of the tensor's dtype,
        of (size - 1) spans or more; allocating it costs more than the sum.
        """
        if op not in ("sum", "mean", "max"):
            raise ValueError(got("op", op, "'sum', 'mean' or 'max'"))
        tensor = self._flat("tensor", tensor, FLOATS if op == "mean" else SUMMABLE)
        if op == "mean" and not self.averages(tensor):
            tensor.mul_(1.0 / self.size)
            op = "sum"
        if scratch is not None:
            numel = (self.size - 1) * -(-tensor.numel() // self.size)
            scratch = self._scratch(scratch, tensor, tensor, numel)
        self.traffic.add("other", self._all_reduce_nbytes(tensor))
        return self._all_reduce(tensor, op, scratch)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Handle:
        """Broadcasts the values of rank `src`, in place."""
        last = self.size - 1
        whole_number("src", src, f"a rank of this group: 0 to {last}", least=0, most=last)
        tensor = self._flat("tensor", tensor)
        if self.rank == src:
            self.traffic.add("other", (self.size - 1) * tensor.numel() * tensor.element_size())
        return self._broadcast(tensor, src)

    def exchange(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank. For small values that JSON can carry, and not for speed.

        >>> Group(0, 1, torch.device("cpu"), "alone").exchange({"stage": 3})
        [{'stage': 3}]
        """
        text = json.dumps(value).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        own_span(lengths, self.rank, self.size).fill_(len(text))
        self._gather("other", lengths).wait()
        counts = lengths.tolist()
        longest = max(counts)
        texts = torch.zeros(self.size * longest, dtype=torch.uint8, device=self.device)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        own_span(texts, self.rank, self.size)[: len(text)].copy_(mine)
        self._gather("other", texts).wait()
        rows = texts.cpu().view(self.size, longest)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, counts, strict=True)]

    def scratch_numel(self, numel: int) -> tuple[int, int]:
        """Returns how much scratch memory a `reduce_scatter` of numel elements takes, in its first and its second
        round."""
        return scratch_numel(numel, self.size)

    def barrier(self) -> None:
        """Waits until all ranks have called this."""
        here = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        self._gather("other", here).wait()
        here.tolist()  # on a device wait() holds only the stream; reading holds the caller

    def join(self) -> list[Group]:
        """Returns the groups that this one consists of: itself. Ranks along several mesh dimensions are one group for
        each."""
        return [self]

    def follow(self, key: str) -> None:
        """Records that this rank takes the step `key`, as recorded before: it is counted, not communicated."""

    def fail(self, reason: str) -> None:
        """Ends the group because this rank cannot continue; the other ranks are told `reason`."""

    def agree(self, key: str) -> None:
        """Returns once all ranks want `key` as their next step; raises CommError on every rank if they do not."""

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        if out.numel() and not (_same(out, bucket) and scale == 1.0):
            return Handle(lambda: add_up(out, [bucket], add=add, scale=scale, squares=squares))
        return Handle()

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        if shard is not None:
            full.copy_(shard)
        return Handle()

    def averages(self, tensor: Tensor) -> bool:
        """Returns whether the transport itself divides before it sums, as exactly as we would."""
        return False

    def _publish(self, full: Tensor) -> Handle:
        return Handle()

    def _all_to_all(self, receives: list[Tensor], sends: list[Tensor]) -> Handle:
        return Handle()

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        return Handle()

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        return Handle()

    def _all_reduce_nbytes(self, tensor: Tensor) -> int:
        """Returns the bytes that this rank sends: those of a reduce-scatter and an all-gather of equal spans."""
        return 2 * (self.size - 1) * -(-tensor.numel() // self.size) * tensor.element_size()

    def _flat(self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensor:
        """Returns the tensor's memory as one dimension, without autograd and version counter."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; allowed: a tensor")
        if dtypes is not None and tensor.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
        device = tensor.device
        if device != self.device and (device.type != self.device.type or device.index not in (None, self.device.index)):
            raise ValueError(f"{name} is on device {device}; this group moves tensors on {self.device}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; allowed: contiguous tensors"
            )
        return tensor.data if tensor.dim() == 1 else tensor.data.view(-1)

    def _is_in_place(self, span: Tensor, full: Tensor) -> bool:
        """Whether a span of the same dtype lies where this rank's span of `full` is."""
        return span.data_ptr() == full.data_ptr() + self.rank * span.numel() * full.element_size()

    def _span(self, name: str, tensor: Tensor) -> int:
        span, rest = divmod(tensor.numel(), self.size)
        if rest:
            raise ValueError(
                f"{name} has {tensor.numel()} elements; allowed: a multiple of the {self.size} ranks, so that each has "
                "an equal span: pad it"
            )
        return span

    def _scratch(self, scratch: Tensor, bucket: Tensor, out: Tensor, numel: int) -> Tensor:
        scratch = self._flat("scratch", scratch, (bucket.dtype,))
        if scratch.numel() < numel:
            raise ValueError(f"scratch has {scratch.numel()} elements; allowed: {numel} or more, a span for each peer")
        if _overlap(scratch, bucket) or _overlap(scratch, out):
            raise ValueError("scratch shares memory with what is reduced; allowed: memory of its own")
        return scratch


def own_span(full: Tensor, rank: int, size: int) -> Tensor:
    """Returns the rank's span of `full`.

    >>> own_span(torch.arange(6), 1, 3)
    tensor([2, 3])
    """
    span = full.numel() // size
    return full[rank * span : (rank + 1) * span]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.numel() == b.numel()


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + b.numel() * b.element_size() and b_start < a_start + a.numel() * a.element_size()
