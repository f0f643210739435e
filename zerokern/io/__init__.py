"""Tensors on a disk at the disk's own speed: O_DIRECT and io_uring, every request accounted for.

>>> import tempfile, torch, zerokern as zk
>>> with tempfile.TemporaryDirectory() as folder, zk.io.Store(folder, budget="1M", depth=8, block=1 << 20) as store:
...     ticket = store.put("weight", torch.ones(3))
...     ticket.wait()
"""

from zerokern.io.engine import Engine, Faults, why_no_uring
from zerokern.io.probing import Probe, probe, probes
from zerokern.io.store import Store
from zerokern.io.ticket import Ticket
from zerokern.io.tier import Nvme

__all__ = ["Engine", "Faults", "Nvme", "Probe", "Store", "Ticket", "probe", "probes", "why_no_uring"]
