"""Memory that state passes through: an arena, leases of it, the ring that slow tiers are staged in, a ledger of bytes.

>>> from zerokern import memory
>>> ledger = memory.Ledger()
>>> ledger.add("nvme", "exp_avg", "read", 4096)
>>> ledger.total(tier="nvme")
4096
"""

from zerokern.memory.arena import Arena, Lease
from zerokern.memory.ledger import Ledger
from zerokern.memory.spans import FreeSpans
from zerokern.memory.staging import Ring, Slot, flow

__all__ = ["Arena", "FreeSpans", "Lease", "Ledger", "Ring", "Slot", "flow"]
