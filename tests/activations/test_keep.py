"""Kept inputs leave the device, or memory, come back in time, and nothing changes by it; what must not move stays."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from keep_cases import (
    ROWS,
    WIDTH,
    batch,
    break_off,
    by,
    held_in,
    layers,
    plain,
    played,
    same,
    step,
    used_again,
    write_to_an_input,
)
from tables import each
from torch import Tensor

import zerokern as zk
from zerokern.activations import keeping
from zerokern.activations.keeping import Keeper
from zerokern.activations.recompute import recompute_with
from zerokern.memory import HostTier
from zerokern.zero import saved_hooks

NBYTES = ROWS * WIDTH * 4


@pytest.fixture(params=["cpu", "nvme", pytest.param("nvme from a device", marks=pytest.mark.slow)])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    tier = zk.Nvme(tmp_path, ring_nbytes="1M")
    if request.param == "nvme":
        yield Keeper(tier)
        return
    with played(stretch=0.001, poison=True):
        keeper = Keeper("cpu" if request.param == "cpu" else tier)
        yield keeper
        del keeper


def test_the_same_bits_and_all_but_the_last_leave(keeper: Keeper) -> None:
    model, x = layers(), batch()
    expected = step(model, plain, x)
    for number in range(1, 4):
        assert same(step(model, by(keeper), x), expected)
        assert keeper.moved_nbytes == number * 3 * NBYTES


def test_room_is_used_again(keeper: Keeper) -> None:
    model, x = layers(6), batch()
    step(model, by(keeper), x)
    held = room(keeper)
    for rows in (ROWS, ROWS + 40, ROWS, ROWS + 100):
        step(model, by(keeper), batch(rows))
    most = 5 * (ROWS + 100) * WIDTH * 4
    assert room(keeper) <= max(most, held)


def room(keeper: Keeper) -> int:
    """Bytes that it has taken, used or not."""
    return keeper.blocks.nbytes + sum(({} if keeper.opened is None else keeper.opened.held()).values())


@each("device", [True, False])
def test_batches_that_alternate_use_the_same_memory(
    device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory takes a system call for each page: 268 to 954 MiB were pinned anew in 6 such steps."""
    model, pinned = layers(4), []
    lay_out = HostTier.lay_out
    monkeypatch.setattr(HostTier, "lay_out", lambda *given: pinned.append(given[1][0].nbytes) or lay_out(*given))
    gc.disable()
    try:
        with played(stretch=0.001, poison=True):
            keeper = Keeper("cpu" if device else zk.Nvme(tmp_path))
            for rows in (ROWS, ROWS // 2, 3 * ROWS, ROWS + 8):
                step(model, by(keeper), batch(rows))
            taken, pinned[:] = len(pinned), []
            assert taken and keeper.blocks.nbytes <= 3 * 3 * NBYTES  # of four layers' inputs three leave
            for rows in (ROWS // 2, 3 * ROWS, ROWS + 8, 3 * ROWS):
                expected = step(model, plain, batch(rows))
                assert same(step(model, by(keeper), batch(rows)), expected)
            assert not pinned and keeper.blocks.nbytes <= 3 * 3 * NBYTES
            del keeper
    finally:
        gc.enable()


def test_kwargs_containers_and_shared_tensors_move_once(keeper: Keeper) -> None:
    model, x, scale = layers(), batch(), {"by": (batch(seed=9), "text")}
    expected = step(model, plain, x, scale=scale)
    assert same(step(model, by(keeper), x, scale=scale), expected)
    assert keeper.moved_nbytes == 4 * NBYTES  # three inputs, and once what all have


def test_views_of_one_memory_are_stored_once(keeper: Keeper) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q * k).sigmoid() * v

    def three(run: Any) -> Tensor:
        x = batch().requires_grad_()
        whole = torch.cat([x, x + 1, x + 2], 1)
        q, k, v = whole.split(WIDTH, 1)
        y = run(attend, q, k, v)
        y = run(attend, y, y, y)
        y.sum().backward()
        return x.grad

    assert torch.equal(three(by(keeper)), three(plain))
    assert keeper.moved_nbytes == 3 * NBYTES


def test_what_must_not_move_stays(keeper: Keeper) -> None:
    big = torch.nn.Parameter(batch(seed=1))
    small = torch.ones(WIDTH, requires_grad=True) * 2
    expanded = torch.ones(1, WIDTH).expand(ROWS, WIDTH)
    leaf = batch(seed=2).requires_grad_()

    def use(*tensors: Tensor) -> Tensor:
        return sum((tensor.sin().sum() for tensor in tensors), torch.zeros(()))

    first = recompute_with(keeper, 1, use, (big, big.t(), small, expanded, leaf, batch().to_sparse()), {}, {})
    second = recompute_with(keeper, 1, use, (small,), {}, {})
    assert keeper.moved_nbytes == 0
    (first + second).backward()
    assert torch.equal(big.grad, 2 * big.detach().cos())


def test_they_are_gone_from_memory(keeper: Keeper) -> None:
    """What was computed with them is there only while it is needed."""
    alive: list[weakref.ref[Any]] = []
    most = 0

    def run(layer: Any, x: Tensor) -> Tensor:
        nonlocal most
        alive.append(weakref.ref(x.untyped_storage()))
        most = max(most, sum(one() is not None for one in alive))
        return by(keeper)(layer, x)

    x = batch().requires_grad_()
    hidden = x * 1.0
    for layer in layers(8):
        hidden = run(layer, hidden)
    del x
    assert most <= 4, most  # of this call, of the one before, and on their way out


def test_again_in_part_in_any_order_and_nested(keeper: Keeper) -> None:
    model = layers(3)
    assert same(used_again(model, by(keeper)), used_again(model, plain))


def test_a_write_to_an_input_is_told_as_torch_does(keeper: Keeper) -> None:
    write_to_an_input(layers(2), keeper)


def test_exceptions_release_everything(keeper: Keeper) -> None:
    model, x = layers(3), batch()
    for number, where in enumerate(("forward", "recompute", "backward")):
        break_off(model, keeper, where, number)
    gc.collect()
    assert not held_in(keeper)
    assert same(step(model, by(keeper), x), step(model, plain, x))
    assert not keeper.before(keeper.begin())


def test_other_hooks_keep_their_own(keeper: Keeper) -> None:
    model, x = layers(2), batch()
    expected = step(model, plain, x)
    with torch.autograd.graph.save_on_cpu():
        assert same(step(model, by(keeper), x), expected)
    assert keeper.moved_nbytes == 0


@pytest.mark.parametrize("where", ["push_saved_hooks", "remove_saved_hooks"])
def test_calls_after_one_that_was_broken_off_are_kept_as_before(where: str, tmp_path: Path) -> None:
    """Ctrl-C after hooks are in force, and before they are to go: the next call asked them, and kept nothing."""
    keeper, model, x = Keeper(zk.Nvme(tmp_path, ring_nbytes="1M")), layers(), batch()

    def interrupted(*given: Any) -> None:
        if where == "push_saved_hooks":
            push(*given)
        raise KeyboardInterrupt

    push, expected = saved_hooks.push_saved_hooks, step(model, plain, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_hooks, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model, by(keeper), x)
    before = keeper.moved_nbytes
    assert same(step(model, by(keeper), x), expected)
    assert keeper.moved_nbytes - before == 3 * NBYTES


def test_on_a_cpu_nothing_is_moved_to_the_cpu() -> None:
    keeper, model, x = Keeper("cpu"), layers(), batch()
    assert same(step(model, by(keeper), x), step(model, plain, x))
    assert keeper.moved_nbytes == 0 and not held_in(keeper)


def test_a_full_disk_is_told_before_anything_is_lost(tmp_path: Path) -> None:
    keeper, model, x = Keeper(zk.Nvme(tmp_path, ring_nbytes="1M", budget="1536K")), layers(), batch()
    with pytest.raises(zk.ZerokernError, match="kept inputs"):
        step(model, by(keeper), x)
    gc.collect()
    few = layers(2)
    assert same(step(few, by(keeper), x), step(few, plain, x))


def test_its_files_go_with_it(tmp_path: Path) -> None:
    keeper = Keeper(zk.Nvme(tmp_path, ring_nbytes="1M"))
    step(layers(), by(keeper), batch())
    assert sum(len(files) for *_, files in os.walk(tmp_path))
    del keeper
    gc.collect()
    assert not sum(len(files) for *_, files in os.walk(tmp_path))


def test_one_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is computed again, the inputs of the one before it are on their way."""
    said: list[str] = []
    with played():
        keeper = Keeper("cpu")
        fetch = keeping.Kept.fetch
        order: dict[int, int] = {}

        def noted(kept: Any) -> None:
            if kept._here is None and kept._going is not None:
                said.append(f"fetch {order.setdefault(id(kept), len(order))}")
            fetch(kept)

        monkeypatch.setattr(keeping.Kept, "fetch", noted)
        model = layers(4, dropout=0.0)
        names = {id(layer): 3 - number for number, layer in enumerate(model)}
        hidden = batch().requires_grad_() * 1.0
        for layer in model:
            hidden = by(keeper)(lambda x, layer=layer: said.append(f"compute {names[id(layer)]}") or layer(x), hidden)
        del said[:]
        hidden.sum().backward()
        del hidden, keeper
    assert said == ["fetch 0", "compute 0", "fetch 1", "compute 1", "fetch 2", "compute 2", "compute 3"]
