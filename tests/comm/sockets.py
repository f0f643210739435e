"""Bytes that this process has sent to each of its peers, as the kernel counts them: by TCP connection, of whatever
process group. Two ranks that differ in one coordinate of a mesh have one dimension to talk along."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

NOT_SENT, SENT, SENT_AGAIN = 144, 200, 208  # where the kernel's struct tcp_info has bytes that wait, went, went again

Address = tuple[str, int]
Sent = dict[tuple[Address, Address], int]


def connections() -> Iterator[tuple[Address, Address, int]]:
    """Of each TCP connection here: this end, the other one, and the bytes that went from here to there."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
        except OSError:
            continue  # closed meanwhile
        with socket.socket(fileno=os.dup(int(number))) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            try:
                here, there = one.getsockname()[:2], one.getpeername()[:2]
            except OSError:
                continue  # it listens
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            went, again = struct.unpack_from("QQ", info, SENT)
            yield here, there, went - again + struct.unpack_from("I", info, NOT_SENT)[0]


def sent() -> Sent:
    """Bytes by connection since it was made: of this process alone, which sends nothing for it."""
    return {(here, there): nbytes for here, there, nbytes in connections()}


def by_dimension(mesh: DeviceMesh, before: Sent, after: Sent) -> dict[str, int]:
    """What went to ranks that differ in one coordinate alone, by its name; to all others: by ''. Every rank calls it.

    The store's connections end at no rank, and are not counted.
    """
    ends: list[list[tuple[Address, Address]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ends, list(after))
    owners = {pair: rank for rank, its in enumerate(ends) for pair in its}  # one port may serve two connections
    names = mesh.mesh_dim_names or ()
    mine = mesh.get_coordinate()
    assert mine is not None
    found = dict.fromkeys((*names, ""), 0)
    for pair, nbytes in after.items():
        other = owners.get(pair[::-1])
        if other is not None:
            theirs: Sequence[int] = (mesh.mesh == other).nonzero()[0].tolist()
            differ = [name for name, a, b in zip(names, mine, theirs, strict=True) if a != b]
            found[differ[0] if len(differ) == 1 else ""] += nbytes - before.get(pair, 0)
    return found
