"""Placement: nodes and cores chosen from described machines; the kernel's own word on where pages and threads are."""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
from collections.abc import Iterator
from errno import EINVAL
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memory_cases import in_child
from tables import each

from zerokern.core import env, native
from zerokern.core.errors import say_once
from zerokern.memory import Arena, HostTier, Wanted, placement
from zerokern.memory.placement import (
    Node,
    cores,
    cpus_near,
    nodes,
    nodes_for,
    reserve_device_cores,
    reserved_cpus,
    restrict_to_cpus,
)

MIB = 1 << 20

TWO_SOCKETS = {0: ("0-7,16-23", "10 21"), 1: ("8-15,24-31", "21 10")}
DEVICE_MEMORY = {0: ("0-71", "10 80"), 1: ("", "80 10")}  # as a GH200 shows it
NO_LOCAL_MEMORY = {0: ("0-3", "10 12 20"), 1: ("4-7", "12 10 20"), 2: ("8-11", "20 20 10")}


def tree(folder: Path, machine: dict[int, tuple[str, str]], memory: str, allowed: str) -> tuple[Path, Path]:
    """A /sys/devices/system/node and a /proc/self/status of such a machine."""
    for number, (cpus, distances) in machine.items():
        node = folder / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(cpus + "\n")
        (node / "distance").write_text(distances + "\n")
    (folder / "online").write_text(env.cpu_list(sorted(machine)) + "\n")
    (folder / "has_memory").write_text(memory + "\n")
    (folder / "status").write_text(f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
    return folder, folder / "status"


@each(
    "machine, memory, allowed, cpus, chosen",
    [
        (TWO_SOCKETS, "0-1", "0-1", range(32), (0, 1)),
        (TWO_SOCKETS, "0-1", "0-1", [3, 20], (0,)),
        (TWO_SOCKETS, "0-1", "0-1", [31], (1,)),
        (TWO_SOCKETS, "0-1", "0-1", [7, 8], (0, 1)),
        (TWO_SOCKETS, "0-1", "0", [31], ()),  # the control group leaves no choice
        (TWO_SOCKETS, "0-1", "0-1", [99], ()),
        (DEVICE_MEMORY, "0-1", "0-1", range(72), (0,)),  # never the device's
        (NO_LOCAL_MEMORY, "0,2", "0-2", [4, 5], (0,)),  # the nearest that has any
        (NO_LOCAL_MEMORY, "0,2", "0-2", [5, 9], (0, 2)),
        ({0: ("0-3", "10")}, "0", "0", [0, 1], ()),
    ],
)
def test_nodes_of_a_described_machine(tmp_path: Path, machine, memory, allowed, cpus, chosen) -> None:
    found = nodes(*tree(tmp_path, machine, memory, allowed))
    assert sorted(found) == sorted(machine)
    assert nodes_for(found, set(cpus)) == chosen


@each("lost", ["online", "has_memory", "node1/cpulist", "node0/distance"])
def test_what_the_system_hides_is_no_choice(tmp_path: Path, lost: str) -> None:
    places = tree(tmp_path, TWO_SOCKETS, "0-1", "0-1")
    (tmp_path / lost).write_text("?\n")
    assert nodes(*places) == {}
    (tmp_path / lost).unlink()
    assert nodes(*places) == {} and nodes_for({}, {0}) == ()


def test_this_machine_is_read() -> None:
    found = nodes()
    assert found and set(env.process_cpus()) <= set().union(*(node.cpus for node in found.values()))
    assert any(node.memory for node in found.values())


def policy_at(address: int) -> tuple[str, dict[str, int]]:
    """The kernel's policy for the mapping at an address, and its pages by node (in units of 4096 bytes)."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        words = line.split()
        if int(words[0], 16) == address:
            width = int(re.search(r"kernelpagesize_kB=(\d+)", line)[1]) // 4  # type: ignore[index]
            pages = {node: int(count) * width for node, count in re.findall(r"\b(N\d+)=(\d+)", line)}
            return words[1], pages
    raise AssertionError(f"no mapping begins at {address:x}")


def own_node() -> int:
    return next(number for number, node in nodes().items() if node.memory)


def described(*numbers: int) -> dict[int, Node]:
    """As many nodes with memory, all CPUs on the first of them."""
    cpus = frozenset(env.process_cpus())
    distances = {other: 10 + abs(other - numbers[0]) for other in numbers}
    return {number: Node(cpus if number == numbers[0] else frozenset(), True, distances) for number in numbers}


def test_an_arena_lies_where_the_pool_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_node()
    monkeypatch.setattr(placement, "nodes", lambda: described(own, own + 1))
    arena = Arena(4 * MIB)
    policy, pages = policy_at(arena.base)
    assert arena.nodes == (own,) and policy == f"prefer:{own}" and pages[f"N{own}"] == 4 * MIB // 4096
    arena.close()


def test_host_memory_is_bound_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int | None] = []
    monkeypatch.setattr(placement, "bind", lambda base, nbytes: touched.append(resident(base, nbytes)) or ())
    HostTier("AdamW").lay_out([Wanted("state", torch.Size([MIB]), torch.float32)])
    assert touched == [0]


def resident(base: int, nbytes: int) -> int:
    """How many of these pages are there. The kernel joins mappings that lie side by side, so smaps cannot tell."""
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(base), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages)


def test_pages_take_turns_over_several_nodes() -> None:
    own = own_node()
    arena = Arena(4 * MIB)
    assert native.library().zk_memory_bind(arena.base, arena.nbytes, (native.c_int * 2)(own, own), 2) == 0
    assert policy_at(arena.base)[0] == f"interleave:{own}"
    arena.close()


def test_one_node_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "nodes", lambda: described(own_node()))
    arena = Arena(4 * MIB)
    assert arena.nodes == () and policy_at(arena.base)[0] == "default"
    arena.close()


def test_a_refusal_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    missing = max(nodes()) + 1
    monkeypatch.setattr(placement, "nodes", lambda: described(missing, missing + 1))
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="zerokern.memory"):
        for _ in range(2):
            arena = Arena(MIB)
            assert arena.nodes == () and arena.lease(10, "a").tensor().fill_(2).sum() == 20
            arena.close(force=True)
    said = [record.message for record in caplog.records]
    assert said == [
        f"pages are not bound to NUMA nodes {missing} (mbind: EINVAL): they may lie at another node, which is slower"
    ]


def test_the_library_refuses_what_is_no_node() -> None:
    lib, arena = native.library(), Arena(MIB)
    numbers = native.c_int * 1
    assert lib.zk_memory_bind(None, MIB, numbers(0), 1) < 0 and lib.zk_memory_bind(arena.base, MIB, None, 1) < 0
    for number, count in ((-1, 1), (1024, 1), (0, 0), (0, -1)):
        assert lib.zk_memory_bind(arena.base, MIB, numbers(number), count) < 0
    assert lib.zk_memory_bind(arena.base, MIB, numbers(1023), 1) == EINVAL  # the kernel's word, where there is no such
    arena.close()


@each(
    "usable, siblings, ranks, left",
    [
        (range(16), 8, 1, {0, 8}),
        (range(16), 0, 1, {0}),
        (range(16), 0, 4, {0, 1, 2, 3}),
        (range(16), 0, 5, set()),  # over a quarter
        (range(16), 8, 2, {0, 1, 8, 9}),
        (range(2), 0, 1, set()),
        (range(4), 2, 1, set()),
        (range(4), 0, 1, {0}),
        ([5, 6, 7, 9], 8, 1, {5}),  # the sibling is not ours
        (range(8, 16), 0, 1, {8}),
        ([], 0, 1, set()),
        ([3], 0, 8, set()),
    ],
)
def test_cpus_that_are_left_to_a_framework(usable, siblings: int, ranks: int, left: set[int]) -> None:
    pairs = [frozenset({core, core + siblings}) for core in range(siblings)]
    assert reserved_cpus(usable, pairs, ranks) == left


def test_cores_of_a_described_machine(tmp_path: Path) -> None:
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    (tmp_path / "cpuidle").mkdir()
    assert cores(tmp_path) == [frozenset({0, 2}), frozenset({1, 3})]
    assert cores(tmp_path / "nothing") == []
    assert set().union(*cores()) >= set(env.process_cpus())


@pytest.fixture
def pool() -> Iterator[None]:
    before = native.threads()
    native.set_cpus(None)
    native.set_threads(len(env.process_cpus()))
    yield
    native.set_cpus(None)
    native.set_threads(before)


@pytest.mark.usefixtures("pool")
def test_a_pool_keeps_off_the_cpus_of_others() -> None:
    cpus = env.process_cpus()
    assert len(cpus) > 1, "nothing is proven with one CPU"
    assert restrict_to_cpus(cpus) is None and restrict_to_cpus([]) is None, "none to leave, or none left"
    assert restrict_to_cpus([*cpus[1:], 5000]) == cpus[1:] == native.cpus()
    assert native.threads() == len(cpus) - 1
    assert restrict_to_cpus(cpus[:-1]) == cpus[1:], "what was given stays"
    native.set_cpus(None)
    restrict_to_cpus(cpus[1:], ranks=4 * len(cpus))
    assert native.threads() == 1


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """torch tells of a GPU, and the system of the CPUs on its side: the file is the caller's to fill."""
    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    beside = tmp_path / "0000:1a:00.0" / "local_cpulist"
    beside.parent.mkdir()
    return beside


def test_cpus_on_a_gpus_side(one_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, folder = torch.device("cuda", 0), one_gpu.parents[1]
    assert cpus_near(gpu, folder) == frozenset()
    one_gpu.write_text("8-15,24-31\n")
    assert cpus_near(gpu, folder) == {*range(8, 16), *range(24, 32)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert cpus_near(gpu, folder) == frozenset(), "a torch that does not say"


@each("ranks, kept, threads", [(1, range(16), 16), (8, range(8, 16), 2), (2, range(8, 16), 8)])
def test_ranks_keep_to_the_side_of_their_gpu(
    monkeypatch: pytest.MonkeyPatch, ranks: int, kept: range, threads: int
) -> None:
    """Alone, a rank has the memory of both sides; of eight ranks four share a side."""
    asked: list[tuple] = []
    monkeypatch.setattr(env, "process_cpus", lambda: tuple(range(16)))
    monkeypatch.setattr(env, "local_ranks", lambda: ranks)
    monkeypatch.setattr(placement, "cores", list)
    monkeypatch.setattr(placement, "reserved_cpus", lambda *_: frozenset())
    monkeypatch.setattr(placement, "cpus_near", lambda device: frozenset(range(8, 16)))
    monkeypatch.setattr(placement, "restrict_to_cpus", lambda cpus, ranks: asked.append((sorted(cpus), ranks)))
    reserve_device_cores(torch.device("cuda", 0))
    ((cpus, shared),) = asked
    assert cpus == list(kept) and len(cpus) // shared == threads


def test_what_the_environment_gave_stays() -> None:
    first = env.process_cpus()[0]
    said = in_child(f"""
os.environ["ZEROKERN_CPUS"] = "{first}"
native.library.cache_clear()
from zerokern.memory.placement import restrict_to_cpus
print(restrict_to_cpus([5000]), native.threads())
""")
    assert said == f"({first},) 1\n"
