"""What torch's machinery does around a step: groups, schedulers, closures, hooks, compile."""

from __future__ import annotations

import pytest
import torch
from optim_cases import BF16, contents, copies, make_params, same_bits, set_grads, train
from tables import each

from zerokern.optim import SGD, AdamW


def test_groups_have_their_own_hyperparameters_and_formats(native_calls: list[int]) -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(
        [
            {"params": params[:2], "lr": 0.0},
            {"params": params[2:4], "state_format": "int8", "master_format": "split8"},
            {"params": params[4:], "state_format": "bf16", "master_format": "fp32"},
        ],
        lr=1e-2,
    )
    still = copies(params[:2])
    train(optimizer, params, 2)
    assert same_bits(params[:2], still)
    assert [sorted(set(optimizer.state[p]) - {"step"}) for p in params[::2]] == [
        ["exp_avg", "exp_avg_sq", "remainder"],
        ["exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "remainder"],
        ["exp_avg", "exp_avg_sq", "master"],
    ]
    assert native_calls == [5, 5]


def test_add_param_group_between_steps() -> None:
    params, twins = make_params(), make_params()
    ours, theirs = AdamW(params[:3], lr=1e-2), torch.optim.AdamW(twins[:3], lr=1e-2)
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": iter(params[3:]), "lr": 1e-3})
            theirs.add_param_group({"params": twins[3:], "lr": 1e-3})
        set_grads(params, twins, seed=step)
        ours.step()
        theirs.step()
    assert [ours.state[p]["step"].item() for p in params] == [4, 4, 4, 2, 2]
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)


@each("tensor_lr", [True, False])
def test_learning_rate_schedulers(tensor_lr: bool) -> None:
    params, twins = make_params(), make_params()
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    ours, theirs = AdamW(params, lr=lr), torch.optim.AdamW(twins, lr=0.1)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10) for opt in (ours, theirs)]
    for step in range(10):
        set_grads(params, twins, seed=step)
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert isinstance(ours.param_groups[0]["lr"], torch.Tensor) is tensor_lr
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-5)


def test_closure_runs_with_gradients_on_and_its_value_comes_back() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = SGD([weight], lr=0.25)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 4.0
    assert weight.item() == 1.0
    assert optimizer.step(closure=closure).item() == 1.0


def test_step_hooks_see_the_step_and_may_change_gradients() -> None:
    params = make_params((4,))
    optimizer = SGD(params, lr=1.0)
    order: list[str] = []

    def pre(opt: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        order.append("pre")
        params[0].grad.zero_()

    optimizer.register_step_pre_hook(pre)
    handle = optimizer.register_step_post_hook(lambda opt, args, kwargs: order.append("post"))
    before = params[0].detach().clone()
    set_grads(params)
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert order == ["pre", "post", "pre"]
    assert torch.equal(params[0], before)


def test_a_compiled_training_step_calls_the_optimizer() -> None:
    model, twin = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    twin.load_state_dict(model.state_dict())
    compiled, eager = AdamW(model.parameters(), lr=0.1), AdamW(twin.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    def step(module: torch.nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()

    run = torch.compile(step, backend="eager")
    for _ in range(3):
        run(model, compiled)
        step(twin, eager)
    assert same_bits(list(model.parameters()), list(twin.parameters()))


@each("state_format", ["fp32", "int8"])
def test_torchs_default_device_and_dtype_do_not_reach_the_state(state_format: str) -> None:
    params, twins = make_params((0, 300), BF16), make_params((0, 300), BF16)
    ours, reference = AdamW(params, state_format=state_format), AdamW(twins, state_format=state_format)
    train(reference, twins, 2)
    set_grads(params, seed=0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            ours.step()
            ours.load_state_dict(ours.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    train(ours, params, 1, start=1)
    assert same_bits(contents(ours, params), contents(reference, twins))


@each(
    "key, meant",
    [
        ("state_fmt", "state_format"),
        ("masterformat", "master_format"),
        ("weight_deacy", "weight_decay"),
        ("beta", "betas"),
    ],
)
def test_a_key_that_is_nearly_an_option_is_refused(key: str, meant: str) -> None:
    params = make_params()
    with pytest.raises(ValueError, match=rf"^param_group\['{key}'\]='int8': must be spelt '{meant}'"):
        AdamW([{"params": params, key: "int8"}])
    optimizer = AdamW(params[:1])
    for listed in (params[1:], params[1]):
        with pytest.raises(ValueError, match=meant):
            optimizer.add_param_group({"params": listed, key: 0.5})
    assert len(optimizer.param_groups) == 1


FOREIGN = (
    "name layer layer_name initial_lr max_lr min_lr lr_scale lr_mult wd_mult decay_mult weight_decay_scale "
    "initial_weight_decay max_momentum base_momentum is_expert_parallel use_muon group_name fused"
).split()


@each("maker", [AdamW, SGD])
def test_keys_that_frameworks_add_are_kept(maker: type[AdamW | SGD]) -> None:
    (group,) = maker([{"params": make_params(), **dict.fromkeys(FOREIGN, False)}]).param_groups
    assert set(FOREIGN) <= set(group)
    named = [(f"p{i}", param) for i, param in enumerate(make_params())]
    optimizer = maker([{"params": named}])
    again = maker([dict(group) for group in optimizer.param_groups])
    assert again.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]
