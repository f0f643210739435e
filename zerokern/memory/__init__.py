"""Memory that state passes through: arenas and leases, the ring buffer for slow tiers, copies to and from a GPU.

>>> from zerokern import memory
>>> with memory.Arena(1 << 20).lease(100, "example") as lease:
...     lease.nbytes
100
"""

from zerokern.memory.arena import Arena, Lease
from zerokern.memory.copies import Copies
from zerokern.memory.layout import FreeSpans
from zerokern.memory.rest import Rest, Rests
from zerokern.memory.ring import Ring, Slot, flowing
from zerokern.memory.staging import CudaDriver
from zerokern.memory.tier import DevicePool, HostTier, Tier, TierConfig, Wanted

__all__ = [
    "Arena", "Copies", "CudaDriver", "DevicePool", "FreeSpans", "HostTier", "Lease", "Rest", "Rests",
    "Ring", "Slot", "Tier", "TierConfig", "Wanted", "flowing",
]  # fmt: skip
