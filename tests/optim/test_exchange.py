"""State on disk, saved and loaded through the ring: in order and out of it, with little memory, never of two steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from optim_cases import MAKERS, same_bits
from torch import Tensor, nn

from zerokern.checkpoint.optimizers import OurOptimizer
from zerokern.checkpoint.storage import Column
from zerokern.core.errors import IoError, StateError
from zerokern.io import Faults, Nvme
from zerokern.optim import SGD
from zerokern.optim.formats import as_kept

SHAPES = ((40_000,), (300, 100), (5,), (7, 11, 13), (90_000,))


def begun(tier: Any, name: str = "adamw", steps: int = 2, **settings: Any) -> tuple[list[nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    opt = MAKERS[name](params, tier=tier, **settings)
    for _ in range(steps):
        go_on(params, opt, generator)
    return params, opt


def go_on(params: list[nn.Parameter], opt: Any, generator: torch.Generator) -> None:
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()
    opt.step()


def read(column: Column, place: Any) -> Tensor:
    return column.read(place).clone()


def expected(opt: Any, number: int, key: str, column: Column) -> list[Tensor]:
    whole = as_kept(opt.state_dict()["state"][number])[key].reshape(-1)
    per = 128 if key.endswith("_scale") else 1
    return [whole[p.start // per : -(-(p.start + p.numel) // per)] for p in column.places]


@pytest.mark.parametrize("order", ["in order", "backwards", "column by column"])
@pytest.mark.parametrize("state_format", ["fp32", "int8"])
def test_columns_are_what_a_state_dict_shows(order: str, state_format: str, tier: Callable[..., Nvme]) -> None:
    _, opt = begun(tier(), state_format=state_format)
    exchange = OurOptimizer(opt)
    exchange.settle()
    columns = {
        (number, key): value
        for number, entry in enumerate(exchange.entries())
        for key, value in entry.items()
        if isinstance(value, Column)
    }
    parts = [(column.order(place), name, place) for name, column in columns.items() for place in column.places]
    if order != "column by column":
        parts.sort(key=lambda part: part[0], reverse=order == "backwards")
    assert len({part[0] for part in parts}) == len(parts) and len(parts) > 20
    found: dict[Any, dict[int, Tensor]] = {}
    for _, name, place in parts:
        found.setdefault(name, {})[place.start] = read(columns[name], place)
    for (number, key), column in columns.items():
        mine = [found[number, key][place.start] for place in column.places]
        assert same_bits(mine, expected(opt, number, key, column))


def test_in_their_order_each_record_is_read_once(tier: Callable[..., Nvme], monkeypatch: pytest.MonkeyPatch) -> None:
    _, opt = begun(tier())
    columns = [c for e in OurOptimizer(opt).entries() for c in e.values() if isinstance(c, Column)]
    reads: list[str] = []
    store = opt.holdings.disk.tier.swap
    get = store.get
    monkeypatch.setattr(store, "get", lambda key, *rest, **more: reads.append(key) or get(key, *rest, **more))
    parts = sorted(((c.order(p), c, p) for c in columns for p in c.places), key=lambda part: part[0])
    for _, column, place in parts:
        column.read(place)
    assert len(reads) == len(set(reads)) == len(opt.holdings.disk.records) > 8
    reads.clear()
    last = [part for part in parts if part[0][0] >= 5]
    last[0][1].reader.expect([part[2].record for part in last])
    for _, column, place in last:
        column.read(place)
    assert len(reads) == len({part[2].record.part.key for part in last})


def test_a_step_between_is_refused_and_reads_nothing_wrong(tier: Callable[..., Nvme]) -> None:
    params, opt = begun(tier())
    plain, other = begun("device")
    column = next(c for e in OurOptimizer(opt).entries() for c in e.values() if isinstance(c, Column))
    column.read(column.places[0])
    generator, same = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    go_on(params, opt, generator)  # the ring is the step's, whatever was read ahead
    go_on(plain, other, same)
    assert same_bits(params, plain)
    with pytest.raises(StateError, match="has stepped, or was loaded, since"):
        column.read(column.places[0])


def test_a_moment_that_nothing_has_started_is_not_saved(tier: Callable[..., Nvme]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = SGD([weight], momentum=0.9, tier=tier())
    weight.grad = torch.ones_like(weight)
    opt.step()
    (entry,) = OurOptimizer(opt).entries()
    assert entry.keys() == {"momentum_buffer", "remainder"}
    opt.state[weight]["on_disk"].first = frozenset({"momentum_buffer"})
    (entry,) = OurOptimizer(opt).entries()
    assert entry.keys() == {"remainder"}


def test_room_for_a_load_is_neither_moved_nor_written() -> None:
    """What will be read goes into the memory that the state has; nothing passes over it before."""
    params, opt = begun("cpu", steps=1)
    before = opt.state_dict()
    entries = [{key: (value.dtype, value.shape) for key, value in entry.items()} for entry in before["state"].values()]
    kept = [
        [(opt.state[param][key].data_ptr(), opt.state[param][key].clone()) for key in entries[0]] for param in params
    ]
    OurOptimizer(opt).lay_out(before["param_groups"], entries)
    for param, values in zip(params, kept, strict=True):
        for key, (address, value) in zip(entries[0], values, strict=True):
            if value.ndim:  # counters are made anew
                assert opt.state[param][key].data_ptr() == address and torch.equal(opt.state[param][key], value)


def test_what_cannot_be_read_says_so(tier: Callable[..., Nvme]) -> None:
    _, opt = begun(tier(faults=Faults(fail_op=1, fail_end=1 << 40)), steps=1)
    column = next(c for e in OurOptimizer(opt).entries() for c in e.values() if isinstance(c, Column))
    with pytest.raises(IoError, match="state/"):
        column.read(column.places[0])


WITNESS = """
import sys, tempfile, torch
from pathlib import Path
sys.path[:0] = {paths!r}
import zerokern as zk
from pages import MIB, large_things_apart, peak, restart_peak
from state_cases import Source, put, take
from torch import nn

torch.set_num_threads(1)
large_things_apart()
folder = Path(sys.argv[1])
RING = 4 * MIB

def begun(name, seed):
    torch.manual_seed(seed)
    model = nn.ParameterList([torch.randn(1 << 20).bfloat16() for _ in range(5)])
    opt = zk.AdamW(model.parameters(), tier=zk.Nvme(folder / name, ring_nbytes=RING))
    for param in model:
        param.grad = torch.full_like(param, 0.01)
    opt.step()
    opt.zero_grad()
    return model, opt

small = nn.ParameterList([torch.ones(3)])
put(folder / "warm", small, used := zk.AdamW(small.parameters()))
take(folder / "warm", small, used)
model, opt = begun("a", 0)
other, used = begun("b", 1)
import gc
gc.collect()
found = []
for work in (lambda: put(folder / "kept", model, opt), lambda: take(folder / "kept", other, used)):
    restart_peak()
    before = peak()
    work()
    found.append((peak() - before) // MIB)
same = all(torch.equal(a, b) for a, b in zip(model, other))
one, two = opt.state_dict()["state"], used.state_dict()["state"]
same &= all(torch.equal(one[i][k], two[i][k]) for i in one for k in one[i])
print(*found, same)
"""


def test_saving_and_loading_take_the_ring_and_not_the_state(tmp_path: Path) -> None:
    """50 MiB of state through a ring of 4 MiB, as the kernel counts pages; parameters are there all along."""
    tests = Path(__file__).resolve().parents[1]
    paths = [str(tests / name) for name in ("zero", "checkpoint", "optim")]
    script = WITNESS.format(paths=paths)
    child = run_forked(script, tmp_path, timeout=240)
    assert child.returncode == 0, child.stderr[-2000:]
    saving, loading, same = child.stdout.split()[-3:]
    assert same == "True" and int(saving) < 24 and int(loading) < 24, child.stdout
