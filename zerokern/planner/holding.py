"""What a plan counts: bytes that are held by role and tier, and moved by role and lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["LANES", "STATES", "WORKING", "HeldMemory", "Holding", "Move", "lanes_to", "summed"]

STATES = ("parameters", "gradients", "master", "remainder", "exp_avg", "exp_avg_sq", "sum", "momentum_buffer")
_HOST_COPIES = ("host parameters", "host gradients", "shadow")  # of the parameters that are updated in host memory
WORKING = (
    "gathered", "buffers", "scratch", "iteration", "ring", "padding", *_HOST_COPIES, "checkpoints", "activations",
    "logits",
)  # fmt: skip
LANES = {"up": "to the device", "down": "to the host", "read": "from disk", "write": "to disk", "net": "to other ranks"}
"""in the order of a table"""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Holding:
    """Bytes of one role in one tier, in one format."""

    role: str
    format: str
    tier: str
    nbytes: int


@dataclass(frozen=True)
class Move:
    """Bytes of one role that one lane transfers in a step."""

    role: str
    lane: str
    nbytes: int


class HeldMemory:
    """Sums the bytes that are held."""

    held: Sequence[Holding]

    @property
    def roles(self) -> dict[str, int]:
        """Bytes per rank by role, all tiers together."""
        return summed(self.held, lambda holding: holding.role)

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes per rank by tier, all roles together; "device" is where parameters are computed with."""
        return summed(self.held, lambda holding: holding.tier)

    @property
    def states(self) -> int:
        """Bytes per rank of parameters, gradients and optimizer state: what the ZeRO paper counts."""
        return sum(holding.nbytes for holding in self.held if holding.role in STATES)

    @property
    def total(self) -> int:
        """Bytes per rank on the device; activations are among them only where the shape of a transformer says them."""
        return self.tiers.get("device", 0)


def summed(held: Iterable[Holding], key: Callable[[Holding], _Key]) -> dict[_Key, int]:
    """Returns bytes by what `key` says of each.

    >>> summed([Holding("gradients", "bf16", "device", 6)] * 2, lambda one: one.tier)
    {'device': 12}
    """
    found = Counter[_Key]()
    for holding in held:
        found[key(holding)] += holding.nbytes
    return dict(found)


def lanes_to(tier: str | None, device: str) -> tuple[str, ...]:
    """Returns the lanes that a fetch from a tier to the device takes.

    >>> lanes_to("nvme", "cuda"), lanes_to("cpu", "cuda"), lanes_to("nvme", "cpu"), lanes_to("device", "cuda")
    (('read', 'up'), ('up',), ('read',), ())
    """
    link = () if device == "cpu" else ("up",)
    return {"nvme": ("read", *link), "cpu": link}.get(tier or "", ())
