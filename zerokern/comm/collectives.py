"""All calls of torch.distributed that move bytes, and what must be known of its transports."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "abort", "abort_transfers", "all_gather", "all_reduce", "all_to_all", "broadcast", "closed_peers", "post",
    "reduce_scatter", "second_communicator",
]  # fmt: skip

CHUNK_NBYTES = 1 << 20  # gloo moves 64 MiB twice as fast in pieces: sending and receiving overlap
TAGS = 1 << 30  # a program's own messages on the same group have smaller tags
PROBE = TAGS | 7 << 27
OWN_CLOSURE = "Application timeout caused pair closure"


def post(pg: Any, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int) -> list[Any]:
    """Starts point-to-point transfers of flat tensors with ranks of the group, in chunks; returns the works to wait
    for.

    Between two ranks, messages with the same tag arrive in the order in which they were posted. A message larger than
    its receive buffer makes gloo end the process: tags must differ wherever sizes may.
    """
    works = []
    # the first chunks of all peers, then the second ones, and so on
    for sent, received in zip_longest(_chunks(sends), _chunks(receives)):
        if sent is not None:  # first: the other way round, gloo answers more often a tick of the scheduler later
            peer, chunk = sent
            works.append(dist.isend(chunk, group=pg, tag=TAGS | tag, group_dst=peer))
        if received is not None:
            peer, chunk = received
            works.append(dist.irecv(chunk, group=pg, tag=TAGS | tag, group_src=peer))
    return works


def _chunks(transfers: list[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    longest = max((tensor.numel() * tensor.element_size() for _, tensor in transfers), default=0)
    for start in range(0, longest, CHUNK_NBYTES):
        for peer, tensor in transfers:
            each = CHUNK_NBYTES // tensor.element_size()
            first = start // tensor.element_size()
            if first < tensor.numel():
                yield peer, tensor[first : first + each]


def closed_peers(pg: Any, rank: int, size: int) -> list[int]:
    """Returns the ranks that have closed their connection with this one; none if this rank closed its own.

    This leaves a pending receive at every live peer: use it after a failure, or if one is likely.
    """
    closed = []
    for peer in range(size):
        if peer == rank:
            continue
        try:
            dist.irecv(torch.empty(1, dtype=torch.uint8), group=pg, tag=PROBE, group_src=peer)
        except RuntimeError as error:
            if OWN_CLOSURE in str(error):
                return []
            closed.append(peer)
    return closed


def abort_transfers(pg: Any, rank: int, size: int) -> None:
    """Ends every pending transfer of the group with an error, here and at its peers; no transfer is possible
    afterwards.

    It posts a receive that nobody answers: gloo ends all transfers when that times out.
    """
    for peer in range(size):
        if peer == rank:
            continue
        try:
            work: Any = dist.irecv(torch.empty(1, dtype=torch.uint8), group=pg, tag=PROBE, group_src=peer)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower() or OWN_CLOSURE in str(error):
                return


def second_communicator(pg: Any) -> Any:
    """Returns another communicator of the same ranks, on a stream of high priority where the library has one.

    torch takes streams of each priority from a pool of their own: so this one's is not the first communicator's,
    however many streams the program draws. Its kernels get multiprocessors before those of compute.
    """
    ranks = dist.get_process_group_ranks(pg)
    whole = len(ranks) == dist.get_world_size()
    options = _high_priority(pg)
    given = {} if options is None else {"pg_options": options, "timeout": options._timeout}
    return dist.new_group(ranks, use_local_synchronization=not whole, group_desc="zerokern reductions", **given)


def _high_priority(pg: Any) -> Any:
    """Returns the options of a communicator on a stream of high priority; None if it is not NCCL's to make."""
    kind = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)  # only in builds of torch with NCCL
    backend = pg._get_backend(torch.device("cuda"))
    if kind is None or backend.name() != "nccl":
        return None
    options = kind()
    options.is_high_priority_stream = True
    options._timeout = backend.options._timeout  # torch warns of options with another timeout than its argument
    return options


def abort(*pgs: Any) -> None:
    """Aborts the pending work of a device's communicators, if torch can."""
    for pg in pgs:
        if callable(getattr(pg, "abort", None)):
            pg.abort()


def all_gather(pg: Any, full: Tensor, shard: Tensor) -> Any:
    """Starts to gather the shards of all ranks into `full`; `shard` may be this rank's span of `full`."""
    # torch 2.13 has new names, and warns of the old ones
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, shard, group=pg, async_op=True)


def reduce_scatter(pg: Any, out: Tensor, bucket: Tensor, op: str = "sum") -> Any:
    """Starts to sum or average the buckets of all ranks; `out` gets this rank's span and may lie in `bucket`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, bucket, op=_OPS[op], group=pg, async_op=True)


def all_reduce(pg: Any, tensor: Tensor, op: str) -> Any:
    """Starts to sum, average or take the maximum over all ranks, in place."""
    return dist.all_reduce(tensor, op=_OPS[op], group=pg, async_op=True)


def all_to_all(pg: Any, receives: list[Tensor], sends: list[Tensor]) -> Any:
    """Starts to exchange tensors between all ranks, of which one goes from each to each."""
    return dist.all_to_all(receives, sends, group=pg, async_op=True)


_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def broadcast(pg: Any, tensor: Tensor, src: int) -> Any:
    """Starts to broadcast the values of one rank, in place."""
    return dist.broadcast(tensor, group=pg, async_op=True, group_src=src)
