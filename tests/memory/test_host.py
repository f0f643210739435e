"""Host memory: what the plan says is what the system counts, to the page; what does not fit is refused before."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from copy_cases import ThreadDriver
from memory_cases import in_child
from tables import each

from zerokern.core.errors import BudgetError
from zerokern.memory import Copies, HostTier, Wanted, layout
from zerokern.memory.arena import HUGE_PAGE
from zerokern.memory.layout import LINE, SKEW, nbytes_of, offsets_of
from zerokern.memory.tier import DevicePool

MIB = 1 << 20

HOST = """
from zerokern.memory import HostTier, Wanted
def host(wanted, owner="AdamW"):
    place = HostTier(owner)
    return place, place.lay_out([Wanted("state", torch.Size(shape), dtype) for shape, dtype in wanted])
"""
COUNTED = """
import random
import re
from zerokern.memory.layout import nbytes_of
def locked():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1]) * 1024
def resident():
    rows, inside = {}, False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0]:
            low, high = (int(word, 16) for word in words[0].split("-"))
        elif words[0] in ("Rss:", "Locked:", "Size:"):
            rows[low, words[0]] = int(words[1]) * 1024
        elif words[0] == "VmFlags:":
            rows[low, "flags"] = set(words[1:])
    return rows
def judge(seed, count):
    draw = random.Random(seed)
    dtypes = torch.float32, torch.bfloat16, torch.int8
    wanted = [((draw.randrange(3000), draw.randrange(1, 2000)), draw.choice(dtypes)) for _ in range(count)]
    before, planned = locked(), nbytes_of(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted)
    place, tensors = host(wanted)
    assert place.arenas[0].locked and place.nbytes == planned
    rows, base = resident(), tensors[0].data_ptr()
    exact = sum(tensor.nbytes for tensor in tensors)
    print(locked() - before - planned, rows[base, "Rss:"] - planned, rows[base, "Locked:"] - planned,
          rows[base, "Size:"] - planned, {"dc", "hg", "lo"} <= rows[base, "flags"],
          planned - exact <= 0.01 * exact + 64 * count + 4096)
    del place, tensors
    gc.collect()
    print("after:", locked() - before)
judge(1, 1)
judge(2, 7)
judge(3, 40)
"""


def host(wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[HostTier, list[torch.Tensor]]:
    place = HostTier("AdamW")
    return place, place.lay_out([Wanted("state", torch.Size(shape), dtype) for shape, dtype in wanted])


def test_the_plan_is_what_the_system_counts() -> None:
    """VmLck of the process, and Rss, Locked and Size of the mapping: the planned bytes and not one page more."""
    assert in_child(HOST + COUNTED).splitlines() == ["0 0 0 0 True True", "after: 0"] * 3


@each("poison", ["0", "1"])
def test_tensors_are_zeroed_disjoint_and_as_wanted(poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_POISON", poison)
    wanted = [((3, 5), torch.float32), ((), torch.int8), ((0, 4), torch.bfloat16), ((70_001,), torch.uint8)]
    _, tensors = host(wanted)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == wanted
    assert all(t.count_nonzero() == 0 for t in tensors)
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(number)
    assert [t.unique().tolist() for t in tensors] == [[1.0], [2], [], [4]]
    assert all(t.data_ptr() % LINE == 0 for t in tensors)
    assert [t.untyped_storage().nbytes() for t in tensors] == [60, 1, 0, 70_001]


def test_saving_a_tensor_saves_only_it() -> None:
    _, (first, _) = host([((1000,), torch.float32), ((500_000,), torch.float32)])
    file = io.BytesIO()
    torch.save(first, file)
    assert file.tell() < 8000 and len(pickle.dumps(first)) < 8000


@each("wanted", [[], [((0,), torch.float32), ((3, 0), torch.int8)]])
def test_nothing_takes_nothing(wanted: list) -> None:
    place, tensors = host(wanted)
    assert place.nbytes == 0 and [tuple(t.shape) for t in tensors] == [shape for shape, _ in wanted]
    assert not place.arenas


@each("seed", range(20))
def test_a_layout_against_a_search(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 63, 64, 65, 4096, 3 * MIB, 4 * MIB, 16 * MIB, 100 * SKEW]) for _ in range(30)]
    offsets, end = offsets_of(sizes)
    spans = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True) if size]
    assert all(offset % LINE == 0 for offset, _ in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert end == max((one for _, one in spans), default=0)
    assert end <= 1.01 * sum(sizes) + LINE * len(sizes)
    assert nbytes_of(sizes) == math.ceil(end / layout.PAGE) * layout.PAGE


def test_equal_streams_lie_apart_in_every_power_of_two() -> None:
    """Five streams of one size, as an exact Adam has them: no two begin at nearly the same place of 64 KiB or more."""
    for size in (4 * MIB, 16 * MIB, 256 * MIB):
        offsets, _ = offsets_of([size] * 5)
        for power in range(16, 28):
            places = sorted(offset % (1 << power) for offset in offsets)
            assert min(b - a for a, b in zip(places, [*places[1:], places[0] + (1 << power)], strict=True)) >= 8 << 10


def test_more_than_there_is_is_refused_before_anything_is_taken() -> None:
    wanted = [((1 << 50,), torch.int8), ((1 << 49,), torch.float32)]
    with pytest.raises(BudgetError) as caught:
        host(wanted)
    text = str(caught.value)
    assert text.startswith("host memory for AdamW of ") and "free memory and swap" in text
    assert f"state{3 << 50:>30,}".replace(" ", "") in text.replace(" ", "")
    said = in_child(f"""{HOST}
def mapped():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmPeak"))
before = mapped()
try:
    host([((1 << 50,), torch.int8)])
except BudgetError as error:
    print(mapped() - before < {4 * MIB})  # as below
resource.setrlimit(resource.RLIMIT_AS, (before + {64 * MIB}, -1))
try:
    host([(({128 * MIB},), torch.int8)])
except BudgetError as error:  # the message itself takes pages now and then
    print(mapped() - before < {4 * MIB}, "RLIMIT_AS" in str(error))
""")
    assert said == "True\nTrue True\n"


def test_a_limit_of_locked_memory_is_named_once_and_the_memory_works() -> None:
    lines = in_child(f"""{HOST}
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # gives up CAP_IPC_LOCK
small, _ = kept = host([((1000,), torch.float32)], "small")
large = [host([((1 << 20,), torch.float32)], "large") for _ in range(2)]
print(small.arenas[0].locked, [place.arenas[0].locked for place, _ in large])
print(large[1][1][0].add_(1).sum().item() == 1 << 20)
""").splitlines()
    assert lines[1:] == ["True [False, False]", "True"]
    assert lines[0].startswith("zerokern.memory: arena memory is not locked (mlock: ENOMEM; see ulimit -l)")


def test_cuda_is_told_of_it_once_and_until_the_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    class Runtime:
        def cudaHostRegister(self, *arguments: int) -> int:
            calls.append(arguments)
            return 0

        def cudaHostUnregister(self, base: int) -> int:
            calls.append((base,))
            return 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    place, (first, second) = host([((5000,), torch.float32), ((3,), torch.int8)])
    base = first.data_ptr()
    assert place.arenas[0].pinned and calls == [(first.data_ptr(), nbytes_of([20000, 3]), 3)]
    del place
    assert len(calls) == 1 and first.fill_(1).sum() == 5000, "a copy may be under way in what somebody still has"
    del first, second
    assert calls[1:] == [(base,)]


@each("lay_out", [lambda some: DevicePool(torch.device("cpu")).lay_out(some, "state"), HostTier("state").lay_out])
def test_a_refusal_without_advice_ends_with_its_table(lay_out: Callable[[list[Wanted]], object]) -> None:
    with pytest.raises(BudgetError, match=r"in all +[\d,]+\Z"):
        lay_out([Wanted("state", torch.Size([1 << 50]), torch.int8)])


def test_with_copies_transfers_run_on_the_streams_of_the_device() -> None:
    """Streams that take their time: what has been asked for is there when its ticket has ended, and not before."""
    driver = ThreadDriver("in", delay=0.05)
    place = HostTier("twins", copies=Copies(driver))
    (kept,) = place.lay_out([Wanted("values", torch.Size([1000]), torch.float32)])
    there, back = torch.arange(1000.0), torch.zeros(1000)
    stored = place.store(kept, there)
    fetched = place.fetch(kept, back, after=stored)
    assert not fetched.done()
    fetched.wait()
    assert torch.equal(back, there) and torch.equal(kept, there)
    driver.end()


# What stays in host memory for many steps comes on huge pages, where the system has any.


def asked_for(address: int) -> bool:
    """Whether the mapping at an address may have huge pages, by what the kernel says of it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("nothing is mapped there")


@each("kind", ["zeros", "empty"])
def test_large_tensors_ask_for_huge_pages(kind: str) -> None:
    pool = DevicePool(torch.device("cpu"))
    made = getattr(pool, kind)(16 * HUGE_PAGE, torch.uint8)
    assert asked_for(made.data_ptr() + made.nbytes // 2)
    assert made.untyped_storage().nbytes() == made.nbytes
    made.untyped_storage().resize_(0)  # it stays torch's own, which zk.shard relies on
