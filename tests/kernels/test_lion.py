"""Lion: the kernels against the reference, the reference against the published formula in float64."""

from __future__ import annotations

import torch
from kernel_cases import Case, check_updates, every_impl, make_rows, run_op, run_reference, same_bits

from zerokern.kernels import reference


def test_same_bits_as_the_reference_at_any_alignment(every: bool) -> None:
    check_updates("lion", every)


def test_reference_follows_the_formula_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    param, exp_avg = torch.randn(1000, generator=generator), torch.zeros(1000)
    p, m = param.double(), exp_avg.double()
    for step in range(1, 21):
        grad = torch.randn(1000, generator=generator)
        reference.lion(param, grad, exp_avg, lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, step=step)
        direction = torch.sign(0.9 * m + 0.1 * grad.double())
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * direction
        m = 0.99 * m + 0.01 * grad.double()
    torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(param.double(), p, rtol=1e-5, atol=1e-6)


@every_impl
def test_the_update_is_lr_up_lr_down_or_nothing(impl: str) -> None:
    row = make_rows("lion", Case("fp32", "fp32", "fp32", "none"), (6,))[0]
    row["param"].fill_(1.0)
    row["exp_avg"].zero_()
    row["grad"].copy_(torch.tensor([3.0, -1e-45, 0.0, -0.0, torch.inf, torch.nan]))
    expected = row.clone()
    run_op("lion", [row], {"lr": 0.5, "step": 1}, impl)
    run_reference("lion", [expected], {"lr": 0.5, "step": 1})
    assert row["param"][:5].tolist() == [0.5, 1.5, 1.0, 1.0, 0.5]
    assert row["param"][5].isnan()
    assert same_bits(row["exp_avg"], expected["exp_avg"])


@every_impl
def test_a_negative_zero_survives_an_update_of_nothing(impl: str) -> None:
    row = make_rows("lion", Case("fp32", "fp32", "fp32", "none"), (4,))[0]
    row["param"].copy_(torch.tensor([0.0, -0.0, 0.0, -0.0]))
    row["grad"].copy_(torch.tensor([0.0, 0.0, -0.0, -0.0]))
    row["exp_avg"].copy_(torch.tensor([0.0, 0.0, -0.0, -0.0]))
    expected = row.clone()
    run_op("lion", [row], {"lr": 0.5, "step": 1}, impl)
    run_reference("lion", [expected], {"lr": 0.5, "step": 1})
    assert same_bits(row["param"], expected["param"])
