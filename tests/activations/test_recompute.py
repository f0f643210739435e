"""zk.recompute is a drop-in for torch's checkpoint: the same bits, the same promises, wherever inputs rest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from keep_cases import WIDTH, batch, layers, same, step
from tables import each
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import zerokern as zk


@pytest.fixture(params=["device", "nvme"])
def keep(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return zk.Nvme(tmp_path, ring_nbytes="1M") if request.param == "nvme" else request.param


def both(keep: Any, use: Any) -> None:
    """What `use(run)` returns is the same by zk.recompute, and by torch's checkpoint."""

    def ours(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return zk.recompute(fn, *args, keep=keep, **kwargs)

    def torchs(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)

    assert same(use(ours), use(torchs))


def grads(model: nn.Module, *more: Tensor) -> list[Tensor]:
    found = [param.grad for param in (*model.parameters(), *more) if param.grad is not None]
    model.zero_grad()
    return found


def test_a_step_with_dropout(keep: Any) -> None:
    both(keep, lambda run: step(layers(), run, batch(), scale={"by": (torch.full((WIDTH,), 0.5), "text")}))


def test_under_autocast(keep: Any) -> None:
    def use(run: Any) -> list[Tensor]:
        model, x = layers(2), batch().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = run(model[1], run(model[0], x * 1.0))
        hidden.float().sum().backward()
        return [hidden.detach(), x.grad, *grads(model)]

    both(keep, use)


def test_what_is_no_tensor_goes_in_and_out(keep: Any) -> None:
    """Arguments and results as they are: the same objects in the forward, and lists that the function writes to."""

    def use(run: Any) -> list[Tensor]:
        model, x, seen = layers(1, dropout=0.0), batch().requires_grad_() * 1.0, []

        def fn(x: Tensor, log: list[Any], *, flag: bool, name: None) -> dict[str, Any]:
            log.append(len(log))
            return {"y": model[0](x), "flag": (flag, name), "x": x}

        found = run(fn, x, seen, flag=True, name=None)
        assert found["flag"] == (True, None) and found["x"] is x and seen[0] == 0
        (found["y"] + found["x"]).sum().backward()
        return grads(model)

    both(keep, use)


def test_it_stops_early(keep: Any) -> None:
    for early, expected in ((True, ["a", "b", "a"]), (False, ["a", "b", "a", "b"])):
        ran: list[str] = []

        def fn(x: Tensor, ran: list[str] = ran) -> Tensor:
            ran.append("a")
            y = x.sin()
            ran.append("b")
            return y

        with set_checkpoint_early_stop(early):
            zk.recompute(fn, batch().requires_grad_() * 1.0, keep=keep).sum().backward()
        assert ran == expected


def test_the_generator_goes_on_as_if_nothing_had_been(keep: Any) -> None:
    def use(run: Any) -> list[Tensor]:
        torch.manual_seed(4)
        x = batch().requires_grad_() * 1.0
        y = run(F.dropout, x, 0.3)
        after = torch.rand(3)
        y.sum().backward()
        return [after, torch.rand(3), y.detach()]

    both(keep, use)
    x = batch().requires_grad_() * 1.0
    y = zk.recompute(lambda x: F.dropout(x, 0.3).exp(), x, keep=keep, preserve_rng_state=False)
    assert not torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())  # asked for: drawn anew


def test_keywords_of_torchs(keep: Any) -> None:
    saved: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        if op is torch.ops.aten.addmm.default and not ctx.is_recompute:
            saved.append(op)
        return op is torch.ops.aten.addmm.default

    def use(run: Any) -> list[Tensor]:
        model = layers(2)
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return step(model, run, batch(), context_fn=contexts, determinism_check="default", debug=False)

    both(keep, use)
    assert len(saved) == 8
    with pytest.raises(ValueError, match="use_reentrant"):
        zk.recompute(torch.sin, batch(), keep=keep, use_reentrant=True)
    zk.recompute(torch.sin, batch(), keep=keep, use_reentrant=False)


def test_what_differs_the_second_time_is_found(keep: Any) -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return (x[: len(x) // len(calls)] * 2).sin()

    y = zk.recompute(fn, batch().requires_grad_() * 1.0, keep=keep)
    with pytest.raises(RuntimeError, match="different metadata"):
        y.sum().backward()


def test_a_compiled_function(keep: Any) -> None:
    """Within the recomputation, and around it."""
    model, x = layers(1, dropout=0.0), batch().requires_grad_()

    def again(x: Tensor) -> Tensor:
        return zk.recompute(model[0], x, keep=keep)

    compiled = torch.compile(model[0].forward, backend="aot_eager")
    results = []
    for fn in (partial(zk.recompute, compiled, keep=keep), torch.compile(again, backend="aot_eager"), again):
        fn(x * 1.0).square().sum().backward()
        results.append([x.grad, *grads(model)])
        x.grad = None
    for one, other, third in zip(*results, strict=True):
        torch.testing.assert_close(one, third)
        torch.testing.assert_close(other, third)


def test_without_gradients(keep: Any) -> None:
    model, x = layers(1), batch()
    with torch.no_grad():
        assert not zk.recompute(model[0], x, keep=keep).requires_grad
    with torch.inference_mode():
        zk.recompute(model[0], x, keep=keep)
    frozen = model.requires_grad_(False)
    assert not zk.recompute(frozen[0], x, keep=keep).requires_grad
    assert zk.recompute(lambda: 3, keep=keep) == 3


def test_second_derivatives(keep: Any) -> None:
    def use(run: Any) -> list[Tensor]:
        x = batch().requires_grad_()
        (first,) = torch.autograd.grad(run(lambda x: x.sin() * x, x * 1.0).sum(), x, create_graph=True)
        first.square().sum().backward()
        return [x.grad]

    both(keep, use)


def test_a_backward_for_some_inputs_only(keep: Any) -> None:
    def use(run: Any) -> list[Tensor]:
        model, x = layers(2), batch().requires_grad_()
        torch.manual_seed(1)
        y = run(model[1], run(model[0], x * 1.0)).sum()
        y.backward(inputs=[model[0].up.weight])
        assert x.grad is None and model[1].up.weight.grad is None
        return grads(model)

    both(keep, use)


@each("wrong", ["gpu", None, "", "nvme"])
def test_an_unknown_place(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be 'device', 'cpu' or"):
        zk.recompute(torch.sin, torch.ones(2), keep=wrong)


@pytest.mark.parametrize(("keep", "micro"), [("device", 2), ("cpu", 1)])
def test_an_error_that_is_held_leaves_no_hooks_in_force(keep: str, micro: int) -> None:
    """Tensors saved after it are not those of the function that has raised, as with torch's checkpoint before 2.13."""
    weight = torch.randn(4, 4, requires_grad=True)

    def fails(x: torch.Tensor) -> torch.Tensor:
        (x @ weight).relu()
        raise OSError("in forward")

    with pytest.raises(OSError, match="in forward") as held:
        zk.recompute(fails, torch.randn(2, 4), keep=keep, micro=micro)
    (torch.randn(2, 4) @ weight).relu().sum().backward()
    assert weight.grad is not None and held.value.__traceback__ is not None


@pytest.mark.parametrize(("keep", "micro"), [("device", 2), ("cpu", 1)])
def test_an_error_keeps_the_one_that_it_came_of(keep: str, micro: int) -> None:
    """Also where the call is within a handler, whose error Python puts in its place when one is raised again."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    try:
        raise OSError("handled around it")
    except OSError as around:
        with pytest.raises(ValueError, match="second") as raised:
            zk.recompute(fails, torch.randn(2, 4, requires_grad=True), keep=keep, micro=micro)
        outer = around
    first = raised.value.__context__
    assert isinstance(first, KeyError) and first.__context__ is outer
