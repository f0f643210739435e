"""What goes over the wire, counted by someone else: at torch.distributed's door, and by the kernel's loopback."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from comm_cases import values
from fake_world import FakeWorld
from ranks import run_ranks
from tables import each

from zerokern.comm import Group, collectives, group_on

SPAN = 300_000


class Witness:
    """Counts bytes and memory of all that is handed to torch.distributed to send."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.places: Counter[int] = Counter()
        self._isend = dist.isend

    def __enter__(self) -> Witness:
        def isend(tensor, *args, **kwargs):
            self.nbytes += tensor.numel() * tensor.element_size()
            self.places[tensor.untyped_storage().data_ptr()] += 1
            return self._isend(tensor, *args, **kwargs)

        dist.isend = isend
        return self

    def __exit__(self, *_: object) -> None:
        dist.isend = self._isend


def operations(group: Group, bucket: torch.Tensor, out: torch.Tensor, full: torch.Tensor) -> dict:
    return {
        "reduce": lambda: group.reduce_scatter(bucket, out).wait(),
        "gather": lambda: group.all_gather(full, out).wait(),
        "other": lambda: group.all_reduce(full).wait(),
    }


def counted(rank: int, wasteful: bool) -> dict[str, tuple[int, int, bool]]:
    """By kind: what the group says it sent, what the witness saw, and whether it was sent from where it lay."""
    group = group_on()
    bucket = values(rank, group.size * SPAN, torch.bfloat16)
    out, full = torch.empty(SPAN, dtype=torch.bfloat16), torch.empty_like(bucket)
    if wasteful:
        post = collectives.post
        collectives.post = lambda pg, sends, receives, tag: post(
            pg, [(peer, t.clone()) for peer, t in sends] * 2, receives * 2, tag
        )
    found = {}
    for kind, act in operations(group, bucket, out, full).items():
        group.traffic.clear()
        with Witness() as witness:
            act()
        homes = {bucket.data_ptr(), full.data_ptr()}
        found[kind] = (group.traffic.total(kind), witness.nbytes, set(witness.places) <= homes)
        assert group.traffic.total() == group.traffic.total(kind)
    return found


def expected(size: int) -> dict[str, int]:
    others = (size - 1) * SPAN * 2
    return {"reduce": others, "gather": others, "other": 2 * others}


@each("size", [2, 3])
def test_each_byte_is_sent_once_and_from_where_it_lies(size: int) -> None:
    for found in run_ranks(size, counted, False):
        assert found == {kind: (nbytes, nbytes, True) for kind, nbytes in expected(size).items()}


def test_a_hidden_copy_and_a_second_sending_are_seen() -> None:
    for found in run_ranks(2, counted, True):
        for kind, nbytes in expected(2).items():
            assert found[kind] == (nbytes, 2 * nbytes, False)


@each("size", [1, 2, 4])
def test_fake_ranks_count_alike(size: int) -> None:
    def count(group: Group) -> dict[str, int]:
        bucket = values(group.rank, group.size * SPAN, torch.bfloat16)
        out, full = torch.empty(SPAN, dtype=torch.bfloat16), torch.empty_like(bucket)
        for act in operations(group, bucket, out, full).values():
            act()
        return {kind: group.traffic.total(kind) for kind in ("reduce", "gather", "other")}

    assert FakeWorld(size).run(count) == [expected(size)] * size
