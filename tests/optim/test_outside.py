"""Parameters written, exchanged or dropped from outside at awkward moments."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from tables import each

import zerokern as zk
from zerokern.memory import addresses
from zerokern.optim import base


def stepped(dtype: torch.dtype = torch.float16) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    param = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    opt = zk.AdamW([param], lr=1e-3, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    opt.step()
    return param, opt


def test_a_state_dict_between_an_exchange_and_the_step_does_not_hide_it() -> None:
    param, opt = stepped()
    param.data = torch.full((8,), 7.0, dtype=torch.float16)
    assert opt.state_dict()["state"][0]["master"].eq(7.0).all()
    param.grad = torch.ones_like(param)
    opt.step()
    assert (param - 7.0).abs().max() < 0.1


def test_a_write_after_a_copy_is_followed() -> None:
    for again in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        param, opt = again(stepped())
        with torch.no_grad():
            param.fill_(3.0)
        param.grad = torch.ones_like(param)
        opt.step()
        assert (param - 3.0).abs().max() < 0.1


def test_no_learning_rate_moves_nothing_even_where_the_square_overflows() -> None:
    for formats in ({}, {"state_format": "bf16"}, {"state_format": "int8"}):
        param = torch.nn.Parameter(torch.ones(200))
        opt = zk.AdamW([param], lr=0.0, **formats)
        param.grad = torch.ones(200)
        param.grad[3] = 1e30
        opt.step()
        assert param.eq(1.0).all()


def test_large_finite_gradients_train_as_torchs_do() -> None:
    for magnitude in (2e19, 1e20, 5e20):
        results = []
        for make in (zk.AdamW, torch.optim.AdamW):
            param = torch.nn.Parameter(torch.ones(40))
            opt = make([param], lr=1e-3)
            for value in (magnitude, 1.0, 1.0):
                param.grad = torch.full((40,), value)
                opt.step()
            results.append((param.detach(), opt.state[param]["exp_avg_sq"]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=0)
        assert results[0][1].isfinite().all() and results[0][0].ne(1.0).all()


def test_a_step_reads_the_gradients_that_it_holds_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes a moment later may be freed under the update: nobody holds that."""
    param, held = torch.nn.Parameter(torch.ones(4)), base.held_gradients
    opt = zk.SGD([param], lr=0.25)

    def then_dropped(groups: Any, **how: Any) -> Any:
        found = held(groups, **how)
        param.grad = torch.full((4,), torch.nan)
        return found

    monkeypatch.setattr(base, "held_gradients", then_dropped)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    for steps in (1, 2):  # the first of its kind, and one that is bound
        param.grad = torch.ones(4)
        opt.step()
        assert param.eq(1.0 - 0.25 * steps).all()
    done.set()
    other.join()


@each("native", [True, False])
@each("schedule", ["sync", "overlap", zk.Delayed(after=0)])
def test_a_lazily_negated_gradient_means_what_torch_says_it_does(
    schedule: Any, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(addresses, "torch_calls", lambda: None)
    param, straight = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt, reference = zk.SGD([param], lr=0.5, schedule=schedule), torch.optim.SGD([straight], lr=0.5)
    for step in range(4):
        straight.grad = torch.full((2,), step - 2.0)
        param.grad = torch._neg_view(-straight.grad) if step % 2 else straight.grad.clone()
        opt.step()
        reference.step()
    opt.flush()
    assert torch.equal(param, straight)


def test_a_lazily_negated_parameter_is_refused() -> None:
    param = torch.nn.Parameter(torch._neg_view(torch.ones(2)))
    param.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"lazily negated.*resolve_neg"):
        zk.SGD([param], lr=1.0).step()
    assert param.eq(-1.0).all()
