"""What a plan counts: bytes that are held by role and tier, and moved by role and lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["LANES", "STATES", "WORKING", "HeldMemory", "Holding", "Move", "Share", "lanes_to"]

STATES = ("parameters", "gradients", "master", "remainder", "exp_avg", "exp_avg_sq", "sum", "momentum_buffer")
_HOST_COPIES = ("host parameters", "host gradients", "shadow")  # of the parameters that are updated in host memory
WORKING = (
    "gathered", "buffers", "scratch", "iteration", "ring", "padding", *_HOST_COPIES, "checkpoints", "activations",
    "logits",
)  # fmt: skip
LANES = {"up": "to the device", "down": "to the host", "read": "from disk", "write": "to disk", "net": "to other ranks"}
"""in the order of a table"""


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
        return _summed(self.held, lambda holding: holding.role)

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes per rank by tier, all roles together; "device" is where parameters are computed with."""
        return _summed(self.held, lambda holding: holding.tier)

    @property
    def states(self) -> int:
        """Bytes per rank of parameters, gradients and optimizer state: what the ZeRO paper counts."""
        return sum(holding.nbytes for holding in self.held if holding.role in STATES)

    @property
    def total(self) -> int:
        """Bytes per rank on the device; activations are among them only where the shape of a transformer says them."""
        return self.tiers.get("device", 0)


def _summed(held: Iterable[Holding], key: Callable[[Holding], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for holding in held:
        found[key(holding)] = found.get(key(holding), 0) + holding.nbytes
    return found


@dataclass(frozen=True)
class Share:
    """What one rank holds at one stage.

    `padding`: elements of all buckets that belong to no parameter. `arriving`: bytes of a bucket's gradients as
    autograd allocates them, on top of the rest while backward runs.
    """

    held: tuple[Holding, ...]
    padding: int
    arriving: int


def lanes_to(tier: str | None, device: str) -> tuple[str, ...]:
    """Returns the lanes that a fetch from a tier to the device takes.

    >>> lanes_to("nvme", "cuda"), lanes_to("cpu", "cuda"), lanes_to("nvme", "cpu"), lanes_to("device", "cuda")
    (('read', 'up'), ('up',), ('read',), ())
    """
    link = () if device == "cpu" else ("up",)
    return {"nvme": ("read", *link), "cpu": link}.get(tier or "", ())
