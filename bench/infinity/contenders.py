"""Who takes part: ours wherever parameters rest, what the disk alone needs, the peers, and the bare computation."""

from __future__ import annotations

import functools

from ..offload.contenders import Make
from ..peers import candidates
from ..zero import plain
from ..zero.trainer import Seat
from . import disk, ours

PEERS = {"deepspeed": ("infinity-cpu", "infinity-nvme"), "fsdp2": ("infinity",)}
OFFLOAD = "infinity-"


def groups(seat: Seat) -> dict[str, Make]:
    """What makes the candidates of each; one that cannot be made leaves the others alone."""
    found: dict[str, Make] = {name: functools.partial(ours.candidates, seat, name) for name in ours.names_of(seat)}
    for peer, ops in PEERS.items():
        for op in ops if peer in map(peer_of, seat.job.peers) else ():
            found[group_of(peer, op)] = candidates(peer, op, seat)
    if seat.job.folder:
        found[disk.NAME] = functools.partial(disk.candidates, seat)
    return found | {plain.NAME: functools.partial(plain.candidates, seat)}


def group_of(peer: str, op: str) -> str:
    """
    >>> group_of("deepspeed", "infinity-nvme"), group_of("fsdp2", "infinity")
    ('deepspeed-nvme', 'fsdp2')
    """
    return f"{peer}-{op.removeprefix(OFFLOAD)}" if op.startswith(OFFLOAD) else peer


def peer_of(group: str) -> str:
    """
    >>> peer_of("deepspeed-nvme")
    'deepspeed'
    """
    return group.partition("-")[0]
