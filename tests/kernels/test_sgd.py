"""SGD with and without momentum: the kernels against the reference, the reference against torch."""

from __future__ import annotations

import torch
from kernel_cases import check_updates
from tables import each

from zerokern.kernels import reference


def test_same_bits_as_the_reference_at_any_alignment(every: bool) -> None:
    check_updates("sgd", every)


@each(
    "hyper",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True},
    ],
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
