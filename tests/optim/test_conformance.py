"""What frameworks and users do to an optimizer, one failure seen elsewhere per test.

The numbers are those of the conformance list that the optimizers are held to: 1-8, 10 and 15 here, 19 and 20 in
test_process.py.
"""

from __future__ import annotations

import io

import pytest
import torch
from optim_cases import BF16, FP32, contents, copies, make_params, same_bits, set_grads, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from zerokern import StateError
from zerokern.optim import SGD, Adagrad, AdamW, Lion

ALL = [AdamW, Lion, Adagrad, SGD]


class Router(torch.nn.Module):
    """A bf16 model with an fp32 router, as mixture-of-experts models have."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 2)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8, dtype=BF16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x.to(BF16)) for expert in self.experts], -1)
        return (outputs * weight.unsqueeze(-2)).sum(-1).square().mean()


@pytest.mark.parametrize("cls", ALL)
def test_1_parameters_swapped_after_construction(cls: type) -> None:
    """Accelerate puts placeholders into the groups, then the sharded parameters."""
    optimizer = cls(make_params(), lr=0.1)
    real, twins = make_params(), make_params()
    optimizer.param_groups[0]["params"] = [torch.empty(1) for _ in real]
    optimizer.param_groups[0]["params"] = list(real)
    reference = cls(twins, lr=0.1)
    train(optimizer, real, 2)
    train(reference, twins, 2)
    assert same_bits(contents(optimizer, real), contents(reference, twins))


@pytest.mark.parametrize("state_format", ["fp32", "int8"])
def test_2_state_moved_behind_our_back(state_format: str) -> None:
    """Lightning and Accelerate replace every state tensor by a moved copy."""
    params, twins = make_params(dtype=BF16), make_params(dtype=BF16)
    optimizer, reference = AdamW(params, state_format=state_format), AdamW(twins, state_format=state_format)
    train(optimizer, params, 1)
    train(reference, twins, 1)
    for param, entry in optimizer.state.items():
        optimizer.state[param] = {key: value.to("cpu", copy=True) for key, value in entry.items()}
    train(optimizer, params, 1, start=1)
    train(reference, twins, 1, start=1)
    assert same_bits(contents(optimizer, params), contents(reference, twins))
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].double()
    with pytest.raises(StateError, match=r"exp_avg.*float64"):
        optimizer.step()


@pytest.mark.gpu
def test_2_state_moved_to_a_gpu_is_pulled_back() -> None:
    params, twins = make_params(dtype=BF16), make_params(dtype=BF16)
    optimizer, reference = AdamW(params), AdamW(twins)
    train(optimizer, params, 1)
    train(reference, twins, 1)
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                entry[key] = value.cuda()
    train(optimizer, params, 1, start=1)
    train(reference, twins, 1, start=1)
    assert same_bits(contents(optimizer, params), contents(reference, twins))


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    "formats", [{}, {"state_format": "int8", "master_format": "split8"}, {"master_format": "fp32"}]
)
def test_3_initialised_by_a_step_with_zero_gradients_then_loaded(formats: dict, flatten: bool) -> None:
    """torch.distributed.checkpoint assigns zero gradients, sets lr to 0, steps, and loads into the state that made."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, twin = Router(), Router()
    first = AdamW(model.parameters(), lr=0.1, **formats)
    for _ in range(3):
        first.zero_grad()
        model(torch.randn(4, 8)).backward()
        first.step()
    saved = get_optimizer_state_dict(model, first, options=options)
    twin.load_state_dict(model.state_dict())
    second = AdamW(twin.parameters(), lr=0.1, **formats)
    set_optimizer_state_dict(twin, second, saved, options=options)
    assert {entry["step"].item() for entry in second.state.values()} == {3.0}
    assert same_bits(contents(second, list(twin.parameters())), contents(first, list(model.parameters())))
    train(first, list(model.parameters()), 2)
    train(second, list(twin.parameters()), 2)
    assert same_bits(contents(second, list(twin.parameters())), contents(first, list(model.parameters())))


@pytest.mark.parametrize("cls", ALL)
def test_3_a_step_with_lr_0_and_zero_gradients_changes_no_parameter(cls: type) -> None:
    params = make_params(dtype=BF16)
    optimizer = cls(params, lr=0.0, weight_decay=0.1)
    before = copies(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step(closure=None)
    assert same_bits(params, before)


def test_4_load_state_dict_keeps_fp32_state_of_bf16_parameters() -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    again = AdamW(copies(params))
    again.load_state_dict(optimizer.state_dict())
    for entry in again.state.values():
        assert {key: value.dtype for key, value in entry.items()} == {
            "step": FP32, "exp_avg": FP32, "exp_avg_sq": FP32, "remainder": torch.int16
        }  # fmt: skip
        assert {value.device.type for value in entry.values()} == {"cpu"}
    assert same_bits(
        [value for entry in again.state.values() for value in entry.values()],
        [value for entry in optimizer.state.values() for value in entry.values()],
    )


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("master_format", ["split16", "split8", "fp32"])
def test_5_a_model_loaded_after_the_optimizer_was_made_refreshes_masters(master_format: str, stepped: bool) -> None:
    model, other = torch.nn.Linear(64, 64, dtype=BF16), torch.nn.Linear(64, 64, dtype=BF16)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, master_format=master_format)
    if stepped:
        train(optimizer, list(model.parameters()), 3)
    model.load_state_dict(other.state_dict())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()
    optimizer.step()
    assert same_bits(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "int8"])
def test_6_weights_only_round_trip(state_format: str) -> None:
    model = torch.nn.Linear(64, 64, dtype=BF16)
    optimizer = AdamW(model.named_parameters(), lr=torch.tensor(0.1), state_format=state_format)
    train(optimizer, list(model.parameters()), 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = torch.nn.Linear(64, 64, dtype=BF16)
    twin.load_state_dict(model.state_dict())
    again = AdamW(twin.named_parameters(), state_format=state_format)
    again.load_state_dict(saved)
    train(optimizer, list(model.parameters()), 1)
    train(again, list(twin.parameters()), 1)
    assert same_bits(contents(again, list(twin.parameters())), contents(optimizer, list(model.parameters())))


@pytest.mark.parametrize("cls", ALL)
def test_7_forward_backward_and_clipping_inside_the_closure(cls: type) -> None:
    """Lightning's steps always come with a closure."""
    model, twin = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    twin.load_state_dict(model.state_dict())
    ours, plain = cls(model.parameters(), lr=0.01), cls(twin.parameters(), lr=0.01)

    def closure(module: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        return loss.detach()

    for _ in range(3):
        x = torch.randn(4, 8)
        loss = ours.step(lambda x=x: closure(model, ours, x))
        assert loss == closure(twin, plain, x)
        plain.step()
    assert same_bits(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_8_one_cycle_drives_lr_and_betas(lr: float | torch.Tensor) -> None:
    params, twins = make_params(), make_params()
    ours, plain = AdamW(params, lr=lr), AdamW(twins, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(ours, max_lr=0.1, total_steps=10)
    betas = set()
    for step in range(9):
        plain.param_groups[0].update(lr=float(ours.param_groups[0]["lr"]), betas=ours.param_groups[0]["betas"])
        betas.add(ours.param_groups[0]["betas"])
        train(ours, params, 1, start=step)
        train(plain, twins, 1, start=step)
        schedule.step()
    assert same_bits(params, twins)
    assert len(betas) == 9


@pytest.mark.parametrize("own_clip", [True, False])
def test_10_torchs_clipping_saw_the_gradients(own_clip: bool) -> None:
    params, twins = make_params(), make_params()
    limit = 0.1 if own_clip else None
    ours, theirs = SGD(params, lr=1.0, max_grad_norm=limit), torch.optim.SGD(twins, lr=1.0)
    set_grads(params, twins)
    norm = torch.nn.utils.clip_grad_norm_(twins, 0.1)
    if own_clip:
        ours.step()
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    else:
        assert torch.nn.utils.clip_grad_norm_(params, 0.1).item() == pytest.approx(norm.item(), rel=1e-6)
        ours.step()
    theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "formats", [{}, {"master_format": "split16"}, {"state_format": "int8", "master_format": "split8"}]
)
def test_15_bf16_and_fp32_parameters_in_one_group(formats: dict, native_calls: list[int]) -> None:
    model = Router()
    optimizer = AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0, **formats)
    losses = []
    x = torch.randn(64, 8)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert native_calls == [6] * 30
    assert "remainder" not in optimizer.state[model.router.weight]
    assert "remainder" in optimizer.state[model.experts[0].weight]
