"""Bad input gets an error that says what was asked, found and allowed, before a byte is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import Nursery
from io_cases import BLOCK, BY_NAME, PAGE, files_of, pattern
from tables import each

import zerokern as zk
from zerokern import BackendError, BudgetError, IoError
from zerokern.core.units import parse_nbytes
from zerokern.io import Engine, Nvme, Store

# Refusals are made before an engine has a say: one engine, which every machine has, shows them.
THREADS = BY_NAME["buffered"]


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with THREADS.open(folder) as store:
        store.put("x", torch.ones(4, 3))
        store.sync()
        written = store.stats()["written_nbytes"]
        yield store
        assert store.stats()["written_nbytes"] == written and store.keys() == ["x"]


def test_keys_that_are_not_there_and_that_are_no_strings(store: Store) -> None:
    for what in (lambda: store.get("y", torch.empty(4, 3)), lambda: store.delete("y")):
        with pytest.raises(KeyError, match=r"'y' was asked for.*none of the 1 keys.*keys\(\)"):
            what()
    assert "y" not in store and "x" in store and 7 not in store
    for key in (7, None, b"x", ("x",)):
        with pytest.raises(TypeError, match=r"key=.*must be a string"):
            store.put(key, torch.ones(3))


def test_a_shape_or_dtype_that_was_not_stored(store: Store) -> None:
    outs = [torch.empty(4, 3, dtype=torch.float64), torch.empty(4, 3, dtype=torch.int32), torch.empty(48).byte()]
    for out, error in [(torch.empty(3, 4), ValueError), (torch.empty(12), ValueError), *((o, TypeError) for o in outs)]:
        with pytest.raises(error, match=r"'x': must be \(torch.float32, \(4, 3\)\), as it was put"):
            store.get("x", out)


BAD = {
    "strided": (lambda: torch.ones(8, 6)[::2, ::2], ValueError, "not contiguous.*contiguous()"),
    "transposed": (lambda: torch.ones(4, 3).t(), ValueError, "not contiguous"),
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), ValueError, "not contiguous"),
    "meta": (lambda: torch.ones(4, 3, device="meta"), ValueError, "host memory"),
    "sparse": (lambda: torch.eye(3).to_sparse(), ValueError, "to_dense"),
    "conj": (lambda: torch.ones(3, dtype=torch.complex64).conj(), ValueError, "resolve_conj"),
    "neg": (lambda: torch.ones(1, dtype=torch.complex64).conj().imag, ValueError, "resolve_neg"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), ValueError, "int_repr"),
    "list": (lambda: [1.0, 2.0], TypeError, "a torch.Tensor"),
    "none": (lambda: None, TypeError, "a torch.Tensor"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@each("name", BAD)
def test_memory_that_is_not_the_value(store: Store, name: str) -> None:
    make, error, says = BAD[name]
    with pytest.raises(error, match=f"tensor.*{says}"):
        store.put("y", make())
    with pytest.raises(error, match=f"out.*{says}"):
        store.get("x", make())


def test_subclasses_with_and_without_memory(folder: Path, store: Store) -> None:
    class Named(torch.Tensor):
        pass

    with pytest.raises((TypeError, ValueError)):
        store.put("y", torch.Tensor._make_wrapper_subclass(Named, (3,)))
    with THREADS.open(folder.with_name("another")) as other:
        other.put("x", torch.ones(3).as_subclass(Named))
        out = torch.nn.Buffer(torch.zeros(3))
        other.get("x", out).wait()
        assert out.tolist() == [1.0] * 3


def test_a_ticket_of_another_store(store: Store, tmp_path: Path) -> None:
    with THREADS.open(tmp_path / "other") as other:
        ticket = other.put("x", torch.ones(3))
        with pytest.raises(ValueError, match="another store"):
            store.put("y", torch.ones(3), after=ticket)
        with pytest.raises(TypeError, match="after="):
            store.get("x", torch.ones(4, 3), after="soon")


def test_reserved_room_is_not_data(folder: Path) -> None:
    with THREADS.open(folder, budget=8 * PAGE) as store:
        store.reserve("x", torch.float32, (1024, 2))
        assert "x" not in store and store.keys() == [] and store.nbytes == 8192
        with pytest.raises(KeyError, match="reserved and never put"):
            store.get("x", torch.empty(1024, 2))
        with pytest.raises(ValueError, match="not there yet"):
            store.reserve("x", torch.float32, (2,))
        with pytest.raises(ValueError, match="from 0 on"):
            store.reserve("y", torch.float32, (2, -1))
        with pytest.raises(BudgetError):
            store.reserve("y", torch.uint8, (7 * PAGE,))
        store.put("x", torch.ones(1024, 2)).wait()
        assert store.keys() == ["x"] and store.stats()["taken_nbytes"] == 8192


def test_a_closed_store(folder: Path) -> None:
    store = THREADS.open(folder)
    ticket = store.put("x", torch.ones(3))
    store.close()
    ticket.wait()
    for use in (
        lambda: store.put("x", torch.ones(3)),
        lambda: store.get("x", torch.ones(3)),
        lambda: store.delete("x"),
        lambda: store.reserve("y", torch.float32, (3,)),
        store.sync,
        store.stats,
    ):
        with pytest.raises(IoError, match="is closed") as caught:
            use()
        assert caught.value.errno == errno.EBADF and caught.value.path == str(folder)
    store.close()
    assert repr(store) == f"Store({str(folder)!r}, closed)"


def test_a_budget_beyond_the_free_space(folder: Path) -> None:
    folder.mkdir()
    free = os.statvfs(folder)
    asked = free.f_bavail * free.f_frsize + (1 << 30)
    with pytest.raises(BudgetError, match=r"(?s)budget=.*does not fit.*free.*Ask for at most"):
        THREADS.open(folder, budget=asked)
    assert files_of(folder) == []


def test_a_budget_that_is_used_up(folder: Path) -> None:
    with THREADS.open(folder, budget=10 * PAGE) as store:
        store.put("first", pattern(6 * PAGE))
        store.put("second", pattern(2 * PAGE - 5))
        with pytest.raises(BudgetError, match=r"(?s)in one piece 8,192 B.*first +24,576 B\n +second +8,187 B.*Delete"):
            store.put("third", pattern(2 * PAGE + 1))
        assert store.keys() == ["first", "second"]
        store.put("third", pattern(2 * PAGE)).wait()
        store.delete("first")
        store.put("fourth", pattern(6 * PAGE)).wait()


NO_ENGINE = ({"engine": "libaio"}, {"depth": 0}, {"depth": 1 << 20}, {"depth": True})
NO_BUDGET = ("8 apples", "-1", 0, -5, "", "0G", "8i", "1e9", "nan", "1,5G")
REFUSED = [({**bad, **more}, "must be") for bad in NO_ENGINE for more in ({}, {"block": BLOCK})]
REFUSED += [({"depth": 4, "block": block}, r"block=.*multiple of 4096") for block in (0, 4095, 6000, 2 << 30, 4096.0)]
REFUSED += [({"budget": budget}, r"budget=.*'8G' or '512MiB'") for budget in NO_BUDGET]


@each("settings, says", REFUSED)
def test_settings_that_cannot_be(folder: Path, settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Store(folder, **settings)
    assert not folder.exists()


@each("budget", [1.5, True, [1]])
def test_budgets_of_another_type(budget: object) -> None:
    with pytest.raises(TypeError, match="budget="):
        parse_nbytes("budget", budget)


def test_budgets_in_words() -> None:
    assert [parse_nbytes("b", text) for text in ("1k", "1.5 MiB", "2GB", "2GiB", "1T", "77", "5b")] == [
        1024, 3 << 19, 2 * 10**9, 2 << 30, 1 << 40, 77, 5,
    ]  # fmt: skip


def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    """As a read-only file system, for root too."""
    (tmp_path / "file").write_text("mine")
    for place in ("/proc", "/sys/kernel"):
        with pytest.raises(IoError, match=f" in {place} is not possible.*another folder") as caught:
            THREADS.open(place)
        assert caught.value.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(IoError, match="is not possible") as caught:
            THREADS.open(folder)
        assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_this_user_may_not_write(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.start(
        """
os.makedirs(folder, 0o755)
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
else:
    os.chmod(folder, 0o555)
try:
    case.open(folder)
except IoError as error:
    print(error.errno == errno.EACCES, error)
""",
        "threads",
        tmp_path / "theirs",
    )
    assert child.output().startswith("True A store in")


def test_engine_settings_reach_the_native_engine() -> None:
    with Engine("threads", depth=3, block=PAGE) as one:
        assert (one.kind, one.depth, one.block) == ("threads", 3, PAGE)
        with pytest.raises(BackendError, match="not taken by the disk engine"):
            one.file(-1, 1, 1)
    one.close()
    with pytest.raises(BackendError, match="closed"):
        one.stats()


@each("settings", [{"budget": "x"}, {"ring_nbytes": 1000}, {"engine": "spdk"}, {"ring_nbytes": 0}])
def test_a_tier_that_cannot_be(settings: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Nvme("swap", **settings)


def test_a_tier_says_what_it_is(tmp_path: Path) -> None:
    tier = zk.Nvme(tmp_path, budget="1G", ring_nbytes="8M")
    assert tier == zk.Nvme(str(tmp_path), budget=1 << 30, ring_nbytes=8 << 20) and hash(tier)
    assert (tier.path, tier.engine, tier.checksum) == (str(tmp_path), "auto", False)
    with pytest.raises(AttributeError):
        tier.path = "elsewhere"
