"""Adam and AdamW against torch's, and every optimizer against the op that it stands on."""

from __future__ import annotations

import pytest
import torch
from optim_cases import BF16, FORMATS, FP32, MAKERS, copies, make_params, same_bits, set_grads, train
from tables import each, pairwise

from zerokern.kernels import ops
from zerokern.memory import addresses
from zerokern.optim import Adam, AdamW


def distance(params: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max((p.double() - e).abs().max().item() for p, e in zip(params, exact, strict=True))


@pairwise
@each("decoupled", [True, False])
@each("maximize", [True, False])
@each("weight_decay", [0.0, 0.1])
def test_no_further_from_float64_than_torch_is(decoupled: bool, maximize: bool, weight_decay: float) -> None:
    ours, theirs, exact = make_params(), make_params(), copies(make_params(), torch.float64)
    settings = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay, "maximize": maximize}
    cls, peer = (AdamW, torch.optim.AdamW) if decoupled else (Adam, torch.optim.Adam)
    optimizers = [cls(ours, **settings), peer(theirs, **settings, fused=True), peer(exact, **settings)]
    for step in range(25):
        set_grads(ours, theirs, exact, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    assert distance(ours, exact) <= distance(theirs, exact)


OP_MOMENTS = {"adagrad": {"sum": "state_sum"}, "sgd": {"momentum_buffer": "momentum_buffer"}}
OP_SETTINGS = {
    "adam": {"lr": 1e-2, "weight_decay": 0.1, "decoupled": False},
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "weight_decay": 0.1},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
}


@each("name, state_format, dtype, master_format", FORMATS)
def test_a_step_is_the_op(name: str, state_format: str, dtype: torch.dtype, master_format: str | None) -> None:
    params = make_params((300,), dtype)
    optimizer = MAKERS[name](params, state_format=state_format, master_format=master_format)
    train(optimizer, params, 2)
    twin, entry = params[0].detach().clone(), {k: v.clone() for k, v in optimizer.state[params[0]].items()}
    train(optimizer, params, 1, start=2)
    step = int(entry.pop("step", torch.tensor(2.0))) + 1
    renamed = {OP_MOMENTS.get(name, {}).get(key, key): value for key, value in entry.items()}
    op = getattr(ops, "adam" if name == "adamw" else name)
    op(twin, params[0].grad, **renamed, **OP_SETTINGS[name], step=step)
    after = optimizer.state[params[0]]
    assert same_bits([params[0].data, *(after[key] for key in entry)], [twin, *entry.values()])


@each("native", [True, False])
def test_gradients_may_have_another_dtype_than_their_parameter(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another one than in the step before, also where torch does not offer what addresses are read with."""
    if not native:
        monkeypatch.setattr(addresses, "torch_calls", lambda: None)
    params, twins = make_params(), make_params()
    for param in params:
        param.grad_dtype = None
    ours, reference = AdamW(params), AdamW(twins)
    for step in range(5):
        set_grads(twins, seed=step)
        for param, twin in zip(params, twins, strict=True):
            param.grad = twin.grad.to(FP32 if step == 3 else BF16)
        ours.step()
        reference.step()
    assert same_bits(params, twins)


def test_parameters_without_gradient_are_left_alone_and_do_not_count_steps() -> None:
    params, twins = make_params(), make_params()
    ours, theirs = AdamW(params, lr=1e-2), torch.optim.AdamW(twins, lr=1e-2)
    for step in range(6):
        set_grads(params, twins, seed=step)
        for index in range(len(params)):
            if step % (index + 1):
                params[index].grad = twins[index].grad = None
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(ours.state[param]["step"], theirs.state[twin]["step"])
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)


def test_nan_gradients_without_max_grad_norm_behave_as_torchs() -> None:
    params, twins = make_params(), make_params()
    ours, theirs = AdamW(params), torch.optim.AdamW(twins)
    set_grads(params, twins)
    for param in (*params, *twins):
        param.grad[0] = float("nan")
    ours.step()
    theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param.isnan(), twin.isnan())
    assert ours.skipped_steps == 0


def test_empty_and_zero_dimensional_parameters() -> None:
    params = [
        torch.nn.Parameter(torch.ones(0, 3)),
        torch.nn.Parameter(torch.tensor(1.0)),
        torch.nn.Parameter(torch.ones(0)),
    ]
    optimizer = AdamW(params, lr=0.5, weight_decay=0.0, state_format="int8")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert params[1].item() == pytest.approx(0.5, rel=1e-4)
    assert optimizer.state[params[0]]["step"] == 1
    assert optimizer.state[params[0]]["exp_avg"].shape == (0, 3)


@each("threads", [1, 2])
def test_stochastic_rounding_is_a_function_of_the_seed(threads: int) -> None:
    from zerokern.core import native

    def run(seed: int) -> list[torch.Tensor]:
        params = make_params((70000, 300), BF16)
        optimizer = AdamW(params, lr=1e-4, master_format="none", stochastic_seed=seed)
        train(optimizer, params, 3)
        return [param.detach() for param in params]

    once = run(7)
    before = native.threads()
    native.set_threads(threads)
    try:
        again = run(7)
    finally:
        native.set_threads(before)
    assert same_bits(once, again)
    assert not same_bits(once, run(8))


def test_stochastic_rounding_moves_a_parameter_that_nearest_leaves() -> None:
    nearest, chance = make_params((4096,), BF16), make_params((4096,), BF16)
    exact = copies(nearest, FP32)
    optimizers = [
        AdamW(nearest, lr=1e-5, weight_decay=0.0, master_format="none"),
        AdamW(chance, lr=1e-5, weight_decay=0.0, master_format="none", stochastic_seed=0),
        AdamW(exact, lr=1e-5, weight_decay=0.0),
    ]
    start = exact[0].detach().clone()
    for _ in range(20):
        for optimizer in optimizers:
            (param,) = optimizer.param_groups[0]["params"]
            param.grad = torch.ones_like(param)
            optimizer.step()
    moved = [(param.detach().float() - start).mean().item() for param in (nearest[0], chance[0], exact[0])]
    large = start.abs() > 0.01
    assert torch.equal(nearest[0].detach().float()[large], start[large])
    assert moved[1] == pytest.approx(moved[2], rel=0.2)
