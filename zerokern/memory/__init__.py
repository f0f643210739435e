"""Memory that state passes through: an arena, leases of it, the ring that slow tiers are staged in, copies to and from
a GPU, a ledger of bytes.

>>> from zerokern import memory
>>> ledger = memory.Ledger()
>>> ledger.add("nvme", "exp_avg", "read", 4096)
>>> ledger.total(tier="nvme")
4096
"""

from zerokern.memory.arena import Arena, Lease
from zerokern.memory.copies import Copies, exchange
from zerokern.memory.host import HostMemory
from zerokern.memory.ledger import Ledger
from zerokern.memory.spans import FreeSpans
from zerokern.memory.staging import CudaDriver, Ring, Slot, flow

__all__ = [
    "Arena",
    "Copies",
    "CudaDriver",
    "FreeSpans",
    "HostMemory",
    "Lease",
    "Ledger",
    "Ring",
    "Slot",
    "exchange",
    "flow",
]
