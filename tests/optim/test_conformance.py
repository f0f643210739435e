"""What frameworks and users do to an optimizer, one failure seen elsewhere per test.

The numbers are those of the conformance list that the optimizers are held to. Where they are missing here another file
has them: 1 test_elsewhere.py and test_dtensors.py, 2 and 5 test_writes.py, 4 test_state_dict.py, 7 and 8
test_groups.py, 10 test_gradient_edits.py, 19 and 20 test_process.py.
"""

from __future__ import annotations

import io

import pytest
import torch
from optim_cases import BF16, contents, make_params, same_bits, train
from tables import each
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from zerokern.optim import AdamW


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


@each("flatten", [True, False])
@each("formats", [{}, {"state_format": "int8", "master_format": "split8"}, {"master_format": "fp32"}])
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


@each("state_format", ["fp32", "bf16", "int8"])
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


@each("formats", [{}, {"state_format": "int8", "master_format": "split8"}])
def test_15_bf16_and_fp32_parameters_in_one_group(formats: dict, native_calls: list[int]) -> None:
    native_calls.clear()  # of the row before
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
