"""What is put is what is got, bit for bit: any size, any dtype, any address, and nothing beside it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from io_cases import BLOCK, PAGE, EngineCase, alignment_of, at_offset, pattern, quick_everywhere, same
from tables import each

from zerokern.memory import Arena

EDGES = sorted(
    {
        size + one
        for size in (0, 512, PAGE, 2 * PAGE, BLOCK - 512, BLOCK, BLOCK + PAGE, 2 * BLOCK, 5 * BLOCK)
        for one in (-1, 0, 1)
        if size + one > 0
    }
    | {3, 511 + PAGE, 3 * BLOCK + 777}
)
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


@quick_everywhere
def test_every_size_around_every_edge(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder) as store:
        tensors = {f"{nbytes}": pattern(nbytes, nbytes) for nbytes in EDGES}
        for key, tensor in tensors.items():
            store.put(key, tensor)
        outs = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        for ticket in [store.get(key, out) for key, out in outs.items()]:
            ticket.wait()
        assert [key for key in tensors if not same(tensors[key], outs[key])] == []
        assert store.keys() == list(tensors)


def test_every_dtype(engine: EngineCase, folder: Path) -> None:
    with engine.open(folder, checksum=True) as store:
        for dtype in (one for one in DTYPES if one not in QUANTIZED):
            bits = pattern(77 * dtype.itemsize, 5)
            tensor = (bits > 127 if dtype is torch.bool else bits.view(dtype)).view(7, 11)
            store.put(str(dtype), tensor)
            out = torch.zeros(77 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(7, 11)
            store.get(str(dtype), out).wait()
            assert same(tensor, out), dtype
        assert len(store.keys()) > 30


@each("offset", [0, 1, 64, 511, 512, 4095])
def test_any_address_and_nothing_beside_it(engine: EngineCase, folder: Path, offset: int) -> None:
    """Foreign memory, as torch's own at 64 modulo 4096: it is bounced where the disk wants it aligned."""
    nbytes = 2 * BLOCK + 333
    with engine.open(folder) as store:
        tensor = at_offset(nbytes, offset)
        tensor.copy_(pattern(nbytes))
        store.put("x", tensor)
        around = at_offset(nbytes + 2 * PAGE, offset)
        around.fill_(0x5C)
        out = around[PAGE : PAGE + nbytes]
        store.get("x", out).wait()
        assert same(out, tensor)
        assert (around[:PAGE] == 0x5C).all() and (around[PAGE + nbytes :] == 0x5C).all()


@quick_everywhere
def test_leases_move_without_a_copy(engine: EngineCase, folder: Path, arena: Arena) -> None:
    """Whole leases of odd lengths too: what lies behind them up to the alignment is their own."""
    sizes = (1, 100, PAGE, 3 * BLOCK, 3 * BLOCK + 777)
    with engine.open(folder, arena=arena) as store:
        for nbytes in sizes:
            lease, back = arena.lease(nbytes, "put"), arena.lease(nbytes, "get")
            lease.tensor().copy_(pattern(nbytes, nbytes))
            store.put(f"{nbytes}", lease.tensor()).wait()
            store.get(f"{nbytes}", back.tensor()).wait()
            assert same(back.tensor(), pattern(nbytes, nbytes))
            store.sync()
        unit, stats = alignment_of(store), store.stats()
        moved = sum(-(-nbytes // unit) * unit for nbytes in sizes)
        assert stats["bounced_nbytes"] == 0 and stats["written_nbytes"] == stats["read_nbytes"] == moved


def test_parts_of_leases_leave_the_rest_alone(engine: EngineCase, folder: Path, arena: Arena) -> None:
    lease = arena.lease(4 * BLOCK, "whole")
    with engine.open(folder, arena=arena) as store:
        for begin, nbytes in ((0, 100), (PAGE, 3 * PAGE - 1), (100, BLOCK), (BLOCK, BLOCK + 13), (4 * BLOCK - 9, 9)):
            whole = lease.tensor()
            whole.copy_(pattern(4 * BLOCK, 3))
            tensor = pattern(nbytes, begin)
            store.put("x", tensor).wait()
            store.get("x", lease.tensor(shape=(nbytes,), offset=begin)).wait()
            assert same(whole[begin : begin + nbytes], tensor)
            expected = pattern(4 * BLOCK, 3)
            expected[begin : begin + nbytes] = tensor
            assert same(whole, expected)


def test_a_get_is_a_change_that_autograd_sees(engine: EngineCase, folder: Path) -> None:
    weight = torch.ones(5, requires_grad=True)
    with engine.open(folder) as store:
        store.put("x", torch.full((5,), 3.0)).wait()
        product = (weight * weight).sum()
        store.get("x", weight).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        assert weight.tolist() == [3.0] * 5
