"""Chooses CPUs and NUMA nodes from what the system says of itself.

An update is limited by memory, so one core less costs it little, while a framework's thread without a free core makes a
device wait. Memory of another NUMA node is slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from errno import errorcode
from pathlib import Path
from typing import Any

import torch

from zerokern.core import env, native
from zerokern.core.errors import say_once

__all__ = [
    "Node", "bind", "cores", "cpus_near", "nodes", "nodes_for", "reserve_device_cores", "reserved_cpus",
    "restrict_to_cpus",
]  # fmt: skip

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Node:
    """A NUMA node: its CPUs (a device's memory has none), whether it has memory, and its distances to other nodes."""

    cpus: frozenset[int]
    memory: bool
    distances: Mapping[int, int]


def nodes(folder: Path = _NODES, status: Path = Path("/proc/self/status")) -> dict[int, Node]:
    """Returns the NUMA nodes of this machine, without memory that the control group keeps from this process.

    >>> all(isinstance(node.cpus, frozenset) for node in nodes().values())
    True
    """
    try:
        numbers = env.cpu_numbers((folder / "online").read_text())
        allowed = next(
            (line.split()[1] for line in status.read_text().splitlines() if line.startswith("Mems_allowed_list:")), None
        )
        with_memory = set(env.cpu_numbers((folder / "has_memory").read_text()))
        if allowed is not None:
            with_memory &= set(env.cpu_numbers(allowed))
        by_number = {}
        for number in numbers:
            own = folder / f"node{number}"
            cpus = frozenset(env.cpu_numbers((own / "cpulist").read_text()))
            distances = map(int, (own / "distance").read_text().split())
            by_number[number] = Node(cpus, number in with_memory, dict(zip(numbers, distances, strict=True)))
    except (OSError, ValueError, IndexError):  # a kernel without NUMA, or a container that hides it
        return {}
    return by_number


def nodes_for(nodes: Mapping[int, Node], cpus: Collection[int]) -> tuple[int, ...]:
    """Returns the nodes whose memory is nearest to these CPUs; none if there is nothing to choose.

    >>> near, far = Node(frozenset({0, 1}), True, {0: 10, 1: 21}), Node(frozenset({2, 3}), True, {0: 21, 1: 10})
    >>> nodes_for({0: near, 1: far}, {2}), nodes_for({0: near, 1: far}, {0, 1, 2}), nodes_for({0: near}, {0})
    ((1,), (0, 1), ())
    """
    stores = [number for number, node in nodes.items() if node.memory]
    if len(stores) < 2:
        return ()
    chosen = set()
    for node in nodes.values():
        if node.cpus.intersection(cpus):
            chosen.add(min(stores, key=lambda store: (node.distances[store], store)))
    return tuple(sorted(chosen))


def bind(base: int, nbytes: int) -> tuple[int, ...]:
    """Asks for pages, before they are touched, near the CPUs of the native thread pool. Returns the nodes, if any.

    A refusal is logged once: the pages then lie at the node of the thread that touches them.
    """
    wanted = nodes_for(nodes(), native.cpus() or env.process_cpus())
    if not wanted:
        return ()
    refused = native.library().zk_memory_bind(base, nbytes, (ctypes.c_int * len(wanted))(*wanted), len(wanted))
    if refused:
        say_once(
            "zerokern.memory",
            f"pages are not bound to NUMA nodes {env.cpu_list(wanted)} (mbind: {errorcode.get(refused, refused)}): "
            "they may lie at another node, which is slower",
        )
        return ()
    return wanted


def cores(folder: Path = _CPUS) -> list[frozenset[int]]:
    """Returns the CPUs of each physical core, ordered by their first ones; nothing if the system does not say.

    >>> all(len(core) >= 1 for core in cores())
    True
    """
    try:
        texts = {path.read_text() for path in folder.glob("cpu[0-9]*/topology/thread_siblings_list")}
        return sorted((frozenset(env.cpu_numbers(text)) for text in texts), key=min)
    except (OSError, ValueError):
        return []


def reserved_cpus(usable: Iterable[int], cores: Iterable[frozenset[int]], ranks: int = 1) -> frozenset[int]:
    """Returns CPUs to reserve for a framework's own threads: one core per rank; none if that is over a quarter of all.

    >>> pairs = [frozenset({core, core + 8}) for core in range(8)]
    >>> sorted(reserved_cpus(range(16), pairs)), sorted(reserved_cpus(range(2), []))
    ([0, 8], [])
    """
    free = sorted(set(usable))
    sharing = {cpu: core for core in cores for cpu in core}
    left: set[int] = set()
    for _ in range(ranks):
        first = next((cpu for cpu in free if cpu not in left), None)
        if first is None:
            break
        left |= sharing.get(first, frozenset({first})).intersection(free)
    return frozenset(left) if 4 * len(left) <= len(free) else frozenset()


def cpus_near(device: torch.device, folder: Path = _PCI) -> frozenset[int]:
    """Returns the CPUs on a GPU's side of the machine; none if the system does not say, or there is only one side.

    >>> cpus_near(torch.device("cpu"))
    frozenset()
    """
    if device.type != "cuda":
        return frozenset()
    try:
        properties: Any = torch.cuda.get_device_properties(device)
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return frozenset(env.cpu_numbers((folder / name / "local_cpulist").read_text()))
    except (AttributeError, OSError, ValueError):  # a torch that does not say, a container that hides it
        return frozenset()


def restrict_to_cpus(cpus: Iterable[int], ranks: int = 1) -> tuple[int, ...] | None:
    """Restricts the native pool's threads to these CPUs, and to its share of threads among so many ranks.

    ``ZEROKERN_CPUS`` and ``native.set_cpus`` take precedence, and a pool is never left without a CPU. Returns the new
    ``native.cpus()``.

    >>> restrict_to_cpus(env.process_cpus()) == native.cpus()
    True
    """
    chosen = sorted(set(env.process_cpus()).intersection(cpus))
    if native.cpus() is None and 0 < len(chosen) < len(env.process_cpus()):
        native.set_cpus(chosen)
        native.set_threads(min(native.threads(), max(1, len(chosen) // ranks)))
    return native.cpus()


def reserve_device_cores(device: torch.device) -> tuple[int, ...] | None:
    """Reserves a core for each rank of this machine for the threads that feed a device (see ``reserved_cpus``).

    Each of several ranks keeps to its GPU's side of the machine, and so do its pages, so copies cross no link between
    sockets. A single rank uses the memory of both sides, which is worth more.

    >>> reserve_device_cores(torch.device("cpu")) == native.cpus()
    True
    >>> native.set_cpus(None)
    """
    ranks, usable = env.local_ranks(), set(env.process_cpus())
    chosen = usable.difference(reserved_cpus(usable, cores(), ranks))
    near = chosen.intersection(cpus_near(device)) if ranks > 1 else set()
    if not near:
        return restrict_to_cpus(chosen, ranks)
    return restrict_to_cpus(near, -(-ranks * len(near) // len(chosen)))  # the others are on the other sides
