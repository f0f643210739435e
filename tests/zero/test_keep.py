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
from keep_cases import ROWS, WIDTH, batch, layers, played, same, step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zerokern as zk
from zerokern.zero import keeping
from zerokern.zero.keeping import Keeper
from zerokern.zero.recompute import keeping as kept_by

NBYTES = ROWS * WIDTH * 4


def plain(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(layer, *args, use_reentrant=False, **kwargs)


def by(keeper: Keeper) -> Any:
    return lambda layer, *args, **kwargs: kept_by(keeper, 1, layer, args, kwargs, {})


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
    held = keeper.held()
    for rows in (ROWS, ROWS + 40, ROWS, ROWS + 100):
        step(model, by(keeper), batch(rows))
        gc.collect()
    most = 5 * (ROWS + 100) * WIDTH * 4
    assert sum(keeper.held().values()) <= max(most, sum(held.values()))


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

    first = kept_by(keeper, 1, use, (big, big.t(), small, expanded, leaf, batch().to_sparse()), {}, {})
    second = kept_by(keeper, 1, use, (small,), {}, {})
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


def test_double_use_retained_graphs_and_gradients_alone(keeper: Keeper) -> None:
    model, x = layers(3), batch().requires_grad_()

    def loss(run: Any) -> Tensor:
        torch.manual_seed(1)
        hidden = x * 1.0
        for layer in (*model, model[0]):
            hidden = run(layer, hidden)
        return hidden.square().sum()

    def gradients(run: Any) -> list[Tensor]:
        found = []
        value = loss(run)
        params = [x, *model.parameters()]
        for retain in (True, True, False):
            found += torch.autograd.grad(value, params, retain_graph=retain)
        return found

    assert same(gradients(by(keeper)), gradients(plain))


def test_in_any_order_and_in_part(keeper: Keeper) -> None:
    """Graphs that are dropped, or come in another order than they were made in."""
    model, x = layers(3), batch().requires_grad_()

    def gradients(run: Any) -> list[Tensor]:
        torch.manual_seed(1)
        values = [run(layer, x * (1.0 + number)).sum() for number, layer in enumerate((*model, *model))]
        found = []
        for number in (0, 4, 1, 3):
            found += torch.autograd.grad(values[number], [x, *model[number % 3].parameters()])
            values[2] = values[5] = None
        return found

    assert same(gradients(by(keeper)), gradients(plain))


def test_a_write_to_an_input_is_told_as_torch_does(keeper: Keeper) -> None:
    for late in (False, True):
        model, x = layers(2), batch().requires_grad_() * 1.0
        hidden = by(keeper)(model[0], x)
        if late:
            hidden = by(keeper)(model[1], hidden)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()


def test_exceptions_release_everything(keeper: Keeper) -> None:
    class Broken(RuntimeError):
        pass

    model, x = layers(3), batch()

    def run(layer: Any, x: Tensor, fails: str = "") -> Tensor:
        calls = 0

        def once(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if fails == ("forward", "recompute")[calls - 1]:
                raise Broken
            return layer(x)

        return by(keeper)(once, x)

    def fails_at(where: str, number: int) -> None:
        hidden = x.clone().requires_grad_() * 1.0
        for at, layer in enumerate(model):
            hidden = run(layer, hidden, where if at == number else "")
        hidden.sum().backward()

    for where in ("forward", "recompute"):
        for number in range(3):
            with pytest.raises(Broken):
                fails_at(where, number)
    gc.collect()
    assert not keeper.held() or keeper.disk is None
    assert same(step(model, by(keeper), x), step(model, plain, x))
    begun = keeper.begin()
    assert [one for one in (keeper.before(begun),) if one] == []


def test_other_hooks_and_checkpoints_keep_their_own(keeper: Keeper) -> None:
    model, x = layers(2), batch()

    def twice(run: Any) -> Any:
        return lambda layer, x: run(lambda x: run(layer, run(layer, x)), x)

    expected = step(model, twice(plain), x)
    assert same(step(model, twice(by(keeper)), x), expected)
    with torch.autograd.graph.save_on_cpu():
        before = keeper.moved_nbytes
        assert same(step(model, twice(by(keeper)), x), expected)
        assert keeper.moved_nbytes == before
    with torch.no_grad():
        by(keeper)(model[0], x)


def test_accumulation_and_evaluation_between(keeper: Keeper) -> None:
    model = layers(3)

    def train(run: Any) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(2)
        for number in range(3):
            hidden = batch(seed=number).requires_grad_() * 1.0
            for layer in model:
                hidden = run(layer, hidden)
            with torch.no_grad():
                run(model[0], batch())
            hidden.square().mean().backward()
        return [param.grad.clone() for param in model.parameters()]

    assert same(train(by(keeper)), train(plain))


def test_on_a_cpu_nothing_is_moved_to_the_cpu() -> None:
    keeper, model, x = Keeper("cpu"), layers(), batch()
    assert same(step(model, by(keeper), x), step(model, plain, x))
    assert keeper.moved_nbytes == 0 and not keeper.held()


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


def test_several_with_one_path_have_folders_of_their_own(tmp_path: Path) -> None:
    """As ranks of one machine have, and zk.recompute beside zk.shard."""
    keepers, model, x = [Keeper(zk.Nvme(tmp_path, ring_nbytes="1M")) for _ in range(2)], layers(), batch()
    expected = step(model, plain, x)
    for _ in range(2):
        assert all(same(step(model, by(keeper), x), expected) for keeper in keepers)
