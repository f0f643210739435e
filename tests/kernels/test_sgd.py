"""SGD with and without momentum: the kernels against the reference, the reference against torch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Case, check_update

from zerokern.kernels import reference


def test_same_bits_as_the_reference(impl: str, case: Case, sizes: tuple[int, ...]) -> None:
    check_update("sgd", case, sizes, impl)


def test_same_bits_when_misaligned(impl: str, case: Case) -> None:
    check_update("sgd", case, (1, 16, 129, 1000), impl, misaligned=True)


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True},
    ],
    ids=lambda hyper: "+".join(hyper) or "plain",
)
def test_reference_follows_torch(hyper: dict[str, object]) -> None:
    torch.manual_seed(0)
    param = torch.randn(1000)
    theirs = torch.nn.Parameter(param.double())
    optimizer = torch.optim.SGD([theirs], lr=0.1, **hyper)
    buffer = torch.full((1000,), torch.nan) if hyper.get("momentum") else None
    for step in range(1, 21):
        grad = torch.randn(1000)
        theirs.grad = grad.double()
        optimizer.step()
        reference.sgd(param, grad, buffer, lr=0.1, first_step=step == 1, **hyper)
    torch.testing.assert_close(param.double(), theirs.detach(), rtol=1e-5, atol=1e-5)
    if buffer is not None:
        theirs_buffer = optimizer.state[theirs]["momentum_buffer"]
        torch.testing.assert_close(buffer.double(), theirs_buffer, rtol=1e-5, atol=1e-5)
