"""Adagrad: the kernels against the reference, the reference against torch."""

from __future__ import annotations

import torch
from kernel_cases import check_updates
from tables import each

from zerokern.kernels import reference


def test_same_bits_as_the_reference_at_any_alignment(every: bool) -> None:
    check_updates("adagrad", every)


@each("weight_decay", [0.0, 0.1])
@each("lr_decay", [0.0, 0.01])
@each("maximize", [True, False])
def test_reference_follows_torch(weight_decay: float, lr_decay: float, maximize: bool) -> None:
    torch.manual_seed(0)
    param = torch.randn(1000)
    theirs = torch.nn.Parameter(param.double())
    hyper = {"lr": 0.1, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": 1e-8, "maximize": maximize}
    optimizer = torch.optim.Adagrad([theirs], **hyper)
    state_sum = torch.zeros(1000)
    for step in range(1, 21):
        grad = torch.randn(1000)
        theirs.grad = grad.double()
        optimizer.step()
        reference.adagrad(param, grad, state_sum, step=step, **hyper)
    torch.testing.assert_close(param.double(), theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state_sum.double(), optimizer.state[theirs]["sum"], rtol=1e-5, atol=0)
