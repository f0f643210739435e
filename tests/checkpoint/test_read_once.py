"""What zk.load reads once: state that an optimizer does not have yet is read where it will lie, and checked there."""

from __future__ import annotations

import threading
from errno import EINVAL
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import load, save
from raw_cases import flip
from state_cases import stepped
from torch import Tensor, nn
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.checkpoint import filling
from zerokern.checkpoint.files import BLOCK, Slots
from zerokern.core import native
from zerokern.core.errors import BudgetError, IoError
from zerokern.memory import arena
from zerokern.memory.layout import PAGE

KINDS = ("device", "cpu", "disk", "torch", "int8", "two tiers")
WIDTH = 1000  # 8 MB of state for each layer: several blocks


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).bfloat16()


def optimizer_of(kind: str, model: nn.Module, folder: Path) -> Any:
    if kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    disk = zk.Nvme(folder, ring_nbytes="1M")
    tiers: dict[str, Any] = {"disk": disk, "cpu": "cpu", "two tiers": ["cpu:100KiB", disk]}
    settings = {"state_format": "int8"} if kind == "int8" else {}
    return zk.AdamW(model.parameters(), lr=1e-3, tier=tiers.get(kind, "device"), **settings)


def whole(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    found = dict(model.state_dict())
    for number, entry in opt.state_dict()["state"].items():
        found |= {f"{number}.{key}": one for key, one in entry.items() if isinstance(one, Tensor)}
    return {key: one.detach().clone() for key, one in found.items()}


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where reads of data files begin."""
    begun: list[tuple[str, int]] = []
    start = Slots.start

    def counted(self: Slots, op: int, slot: int, number: int, offset: int, nbytes: int, inside: int = 0) -> Any:
        if op == native.IO_READ:
            begun.append((self.transfers.paths[number], offset // BLOCK))
        return start(self, op, slot, number, offset, nbytes, inside)

    monkeypatch.setattr(Slots, "start", counted)
    return begun


@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_read_once(kind: str, tmp_path: Path, read: list[tuple[str, int]]) -> None:
    model, other = model_of(0), model_of(1)
    opt = stepped(model, optimizer_of(kind, model, tmp_path / "one"))
    save(tmp_path / "x", model, opt)
    new = optimizer_of(kind, other, tmp_path / "other")
    load(tmp_path / "x", other, new)
    blocks = len(set(read))
    records = kind in ("disk", "two tiers")  # they are filled one after another, and begin and end within blocks
    assert blocks >= 5 and len(read) <= (3 * blocks if records else blocks + 3), read
    assert alike(whole(other, new), whole(model, opt))
    assert alike(whole(other, stepped(other, new)), whole(model, stepped(model, opt)))


def test_an_optimizer_that_has_state_is_filled_after_all_was_checked(
    tmp_path: Path, read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    fill = filling.Restore.fill

    def counted(self: filling.Restore, *given: Any) -> None:
        copies.append(len(self._apart))
        fill(self, *given)

    monkeypatch.setattr(filling.Restore, "fill", counted)
    model = model_of(0)
    opt = stepped(model, optimizer_of("cpu", model, tmp_path))
    save(tmp_path / "x", model, opt)
    saved = whole(model, opt)
    stepped(model, opt)
    places = [one.data_ptr() for entry in opt.state.values() for one in entry.values() if one.ndim]
    load(tmp_path / "x", model, opt)
    assert alike(whole(model, opt), saved)
    assert [one.data_ptr() for entry in opt.state.values() for one in entry.values() if one.ndim] == places
    assert 2 * len(set(read)) - 3 <= len(read) <= 2 * len(set(read)) + 3
    assert copies == [0], "of parameters"


def test_what_is_converted_is_converted_before_anything_changes(tmp_path: Path) -> None:
    model, other = model_of(0), model_of(1).float()
    opt = stepped(model, optimizer_of("device", model, tmp_path))
    save(tmp_path / "x", model, opt)
    new = zk.AdamW(other.parameters(), state_format="int8")
    load(tmp_path / "x", other, new, lossy=True)
    (data,) = (tmp_path / "x").glob("*.distcp")
    flip(data, data.stat().st_size - BLOCK // 2)
    broken = model_of(1).float()
    opt, before = (
        zk.AdamW(broken.parameters(), state_format="int8"),
        whole(broken, torch.optim.SGD(broken.parameters())),
    )
    with pytest.raises(IoError):
        load(tmp_path / "x", broken, opt, lossy=True)
    assert not opt.state and alike(dict(broken.state_dict()), before)


def held(opt: Any) -> int:
    """Bytes in host memory and on disk."""
    if isinstance(opt, torch.optim.AdamW):
        return 0
    there = opt.holdings
    disk = there.disk
    return (there.room.nbytes if there.room else 0) + (disk.tier.swap.stats()["taken_nbytes"] if disk else 0)


def refused_and_unchanged(kind: str, model: nn.Module, opt: Any, path: Path) -> None:
    before, groups = {key: one.clone() for key, one in model.state_dict().items()}, repr(opt.param_groups)
    places = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(IoError, match="damaged"):
        load(path, model, opt)
    assert not any(opt.state.values()), "it has state"
    assert alike(dict(model.state_dict()), before) and repr(opt.param_groups) == groups
    assert [param.data_ptr() for param in model.parameters()] == places
    assert held(opt) == 0
    stepped(model, opt)  # it goes on, as if nothing had been loaded


def break_last_byte(path: Path) -> None:
    data = max(path.glob("*.distcp"), key=lambda one: one.stat().st_size)
    blocks = data.stat().st_size // BLOCK
    flip(data, blocks * BLOCK - 5 if data.stat().st_size % BLOCK < 1000 else blocks * BLOCK + 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_byte_in_the_last_piece_changes_nothing(kind: str, tmp_path: Path) -> None:
    model, other, same = model_of(0), model_of(1), model_of(1)
    save(tmp_path / "x", model, stepped(model, optimizer_of(kind, model, tmp_path / "one")))
    break_last_byte(tmp_path / "x")
    opt, expected = (optimizer_of(kind, one, tmp_path / name) for one, name in ((other, "b"), (same, "c")))
    refused_and_unchanged(kind, other, opt, tmp_path / "x")
    assert alike(whole(other, opt), whole(same, stepped(same, expected)))


@ranked
def on_two_ranks(world: World, folder: Path) -> None:
    """One rank's part of the file is broken; the other rank reads what is whole, and drops it too."""
    for stage, kind in ((1, "cpu"), (3, "device"), (3, "disk")):
        path = folder / f"{stage} {kind}"
        model, other, same = (world.shard(model_of(seed), stage=stage) for seed in (0, 1, 1))
        here = folder / f"{path.name} {world.rank}"
        here.mkdir()
        opt = stepped_on_ranks(model, optimizer_of(kind, model, here / "a"))
        save(path, model, opt)
        new, expected = optimizer_of(kind, other, here / "b"), optimizer_of(kind, same, here / "c")
        torch.distributed.barrier()
        if world.rank == 0:
            break_last_byte(path)
        torch.distributed.barrier()
        before = {name: one.detach().clone() for name, one in other.named_parameters()}
        with pytest.raises(IoError, match="damaged"):
            load(path, other, new)
        assert not any(new.state.values()) and held(new) == 0, path.name
        now = dict(other.named_parameters())
        assert all(torch.equal(now[name], one) for name, one in before.items()), path.name
        stepped_on_ranks(other, new)
        stepped_on_ranks(same, expected)
        found = dict(same.named_parameters())
        assert all(torch.equal(one, found[name]) for name, one in other.named_parameters()), path.name


def stepped_on_ranks(model: nn.Module, opt: Any) -> Any:
    model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    opt.zero_grad()
    return opt


def test_no_rank_changes_anything_where_one_finds_damage(tmp_path: Path) -> None:
    on_ranks(2, on_two_ranks, tmp_path)


def test_without_memory_for_a_copy_parameters_are_read_again(
    tmp_path: Path, read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = model_of(0), model_of(1)
    opt = stepped(model, optimizer_of("cpu", model, tmp_path))
    save(tmp_path / "x", model, opt)
    monkeypatch.setattr(filling, "exceeds_half_of_memory", lambda nbytes: True)
    new = optimizer_of("cpu", other, tmp_path)
    load(tmp_path / "x", other, new)
    assert alike(whole(other, new), whole(model, opt))
    again = len(read) - len(set(read))
    parameters = sum(param.nbytes for param in model.parameters())
    assert parameters // BLOCK <= again <= parameters // BLOCK + 5


def test_without_memory_for_the_state_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = model_of(0), model_of(1)
    save(tmp_path / "x", model, stepped(model, optimizer_of("cpu", model, tmp_path)))
    before = {key: one.clone() for key, one in other.state_dict().items()}
    opt = optimizer_of("cpu", other, tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("ZEROKERN_MEMORY", "1M")
        with pytest.raises(BudgetError, match="does not fit"):
            load(tmp_path / "x", other, opt)
    assert not opt.state and held(opt) == 0 and alike(dict(other.state_dict()), before)
    stepped(other, opt)  # it is not torn


def test_memory_that_is_refused_while_it_is_touched_beside_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_populate", lambda address, nbytes: 12)  # ENOMEM
    with pytest.raises(BudgetError, match="while touching it"), arena.resident_later():
        arena.Arena(arena._STEP)


def test_what_is_allocated_last_is_touched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are allocated behind the state, and the disk reads them before it."""
    monkeypatch.setattr(arena, "_STEP", PAGE)
    monkeypatch.setattr(arena.env, "usable_cpus", lambda: 2)
    began, go = threading.Event(), threading.Event()
    touched: list[int] = []

    def populate(address: int, nbytes: int) -> int:
        touched.append(address)
        began.set()
        assert go.wait(30)
        return 0

    monkeypatch.setattr(arena, "_populate", populate)
    with arena.resident_later():
        first = arena.Arena(3 * PAGE)
        assert began.wait(30) and not first.locked
        last = arena.Arena(2 * PAGE)
        go.set()
    after = [last.base, last.base + PAGE, first.base + PAGE, first.base + 2 * PAGE]
    assert touched == [first.base, *after]


def test_an_old_kernel_does_not_overwrite_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_STEP", PAGE)
    written, asked = threading.Event(), threading.Event()

    def populate(address: int, nbytes: int) -> int:
        asked.set()
        assert written.wait(30)
        return EINVAL  # MADV_POPULATE_WRITE is unknown before Linux 5.14

    monkeypatch.setattr(arena, "_populate", populate)
    with arena.resident_later():
        made = arena.Arena(PAGE)
        lease = made.lease(PAGE, "state")
        assert asked.wait(30)
        lease.tensor().fill_(7)
        written.set()
    assert bool((lease.tensor() == 7).all())
