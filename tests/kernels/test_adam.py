"""Adam and AdamW: the kernels against the reference, the reference against torch, int8 under sparse gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from kernel_cases import (
    BLOCK,
    Case,
    Row,
    assert_same,
    check_updates,
    every_impl,
    every_set,
    first_and_last_set,
    make_rows,
    run_op,
    run_reference,
    same_bits,
)
from tables import each

from zerokern.kernels import ops, reference


def test_same_bits_as_the_reference_at_any_alignment(every: bool) -> None:
    check_updates("adam", every)


@each("decoupled", [True, False])
@each("weight_decay", [0.0, 0.1])
@each("maximize", [True, False])
def test_reference_follows_torch(decoupled: bool, weight_decay: float, maximize: bool) -> None:
    torch.manual_seed(0)
    param = torch.randn(1000)
    theirs = torch.nn.Parameter(param.double())
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls([theirs], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay, maximize=maximize)
    exp_avg, exp_avg_sq = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 21):
        grad = torch.randn(1000)
        theirs.grad = grad.double()
        optimizer.step()
        hyper = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": weight_decay}
        reference.adam(param, grad, exp_avg, exp_avg_sq, step=step, decoupled=decoupled, maximize=maximize, **hyper)
    torch.testing.assert_close(param.double(), theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq.double(), optimizer.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=0)


@every_impl
def test_scale_multiplies_the_gradient(impl: str) -> None:
    rows = make_rows("adam", Case("bf16", "fp32", "split16", "none"), (1000,))
    scaled = [row.clone() for row in rows]
    plain = [row.clone() for row in rows]
    run_op("adam", scaled, {"lr": 0.1, "step": 3, "scale": 0.25}, impl)
    plain[0]["grad"].mul_(0.25)
    run_op("adam", plain, {"lr": 0.1, "step": 3}, impl)
    assert same_bits(scaled[0]["param"], plain[0]["param"])
    assert same_bits(scaled[0]["exp_avg_sq"], plain[0]["exp_avg_sq"])


@every_impl
def test_special_gradients_as_in_the_reference(impl: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])
    grad = special.repeat(30)
    for target in ("fp32", "split16", "split8", "none.bf16", "none.fp16"):
        rows = make_rows("adam", Case("fp32", "fp32", target, "bf16"), (grad.numel(),))
        rows[0]["grad"].copy_(grad)
        expected = [row.clone() for row in rows]
        hyper = {"lr": 0.1, "weight_decay": 0.1, "step": 2}
        run_op("adam", rows, hyper, impl)
        run_reference("adam", expected, hyper)
        for name in ("param", "exp_avg", "exp_avg_sq", "out"):
            assert same_bits(rows[0][name], expected[0][name]), (target, name)


@every_impl
def test_non_finite_gradient_poisons_its_int8_block_alone(impl: str) -> None:
    rows = make_rows("adam", Case("fp32", "int8", "split16", "none"), (4 * BLOCK,))
    rows[0]["grad"][BLOCK + 5] = math.nan
    expected = [row.clone() for row in rows]
    hyper = {"lr": 0.1, "step": 2}
    run_op("adam", rows, hyper, impl)
    run_reference("adam", expected, hyper)
    assert rows[0]["exp_avg_scale"].isnan().tolist() == [False, True, False, False]
    assert rows[0]["exp_avg_sq_scale"].isnan().tolist() == [False, True, False, False]
    assert rows[0]["param"].isnan().nonzero().tolist() == [[BLOCK + 5]]
    assert torch.equal(rows[0]["exp_avg"][2 * BLOCK :], expected[0]["exp_avg"][2 * BLOCK :])


@each("state", ["fp32", "bf16", "int8"])
@every_impl
def test_flat_span_and_list_give_the_same_bits(impl: str, state: str) -> None:
    blocks = 12 if impl == "triton" else 40  # that one is interpreted
    flat = make_rows("adam", Case("bf16", state, "split16", "bf16"), (blocks * BLOCK + 7,))[0]
    cuts = [0, BLOCK, 2 * BLOCK, 9 * BLOCK, blocks * BLOCK, blocks * BLOCK + 7]
    pieces = []
    whole = flat.clone()
    for start, end in itertools.pairwise(cuts):
        scales = slice(start // BLOCK, -(-end // BLOCK))
        span = slice(start, end)
        pieces.append(Row({n: t[scales if n.endswith("_scale") else span] for n, t in flat.tensors.items()}))
    hyper = {"lr": 0.1, "weight_decay": 0.1, "step": 4}
    run_op("adam", pieces, hyper, impl)
    run_op("adam", [whole], hyper, impl)
    for name, tensor in whole.tensors.items():
        assert same_bits(flat[name], tensor), name


@every_impl
def test_a_tensor_alone_needs_no_list(impl: str) -> None:
    param, exp_avg, exp_avg_sq = torch.ones(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
    assert ops.adam(param, torch.ones(3, 2), exp_avg, exp_avg_sq, lr=0.5, step=1, impl=impl) is None
    assert param.tolist() == [[0.5, 0.5]] * 3


@every_impl
def test_stochastic_rounding_is_unbiased_and_repeatable(impl: str) -> None:
    numel = 1 << (13 if impl == "triton" else 16)  # that one is interpreted
    row = Row({"param": torch.ones(numel, dtype=torch.bfloat16), "grad": torch.ones(numel)})
    row.tensors |= {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
    results = []
    for seed in (1, 1, 2):
        trial = row.clone()
        run_op("adam", [trial], {"lr": 2.0**-10, "step": 1, "stochastic_seed": seed}, impl)
        results.append(trial["param"])
    assert same_bits(results[0], results[1])
    assert not same_bits(results[0], results[2])
    # 1 - 2^-10 lies a quarter of the way from 1 to its lower neighbour 1 - 2^-8.
    lowered = (results[0] < 1).float().mean().item()
    assert abs(lowered - 0.25) < 5 * math.sqrt(0.25 * 0.75 / numel)


@every_impl
def test_a_span_draws_the_bits_of_its_place(impl: str) -> None:
    case = Case("fp32", "fp32", "none.bf16.random", "none")
    whole = make_rows("adam", case, (1000,))[0]
    tail = Row({name: tensor[384:].clone() for name, tensor in whole.tensors.items()})
    hyper = {"lr": 0.1, "step": 9, "stochastic_seed": 5, "key": 77}
    run_op("adam", [whole], hyper, impl)
    run_op("adam", [tail], hyper | {"first": 384}, impl)
    assert same_bits(tail["param"], whole["param"][384:])


class Int8Run:
    """AdamW with int8 states and an fp32 master, from zero."""

    def __init__(self, numel: int, impl: str) -> None:
        self.master, self.impl, self.step = torch.zeros(numel), impl, 0
        self.codes = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
        self.scales = torch.zeros(-(-numel // BLOCK)), torch.zeros(-(-numel // BLOCK))

    def update(self, grad: torch.Tensor, lr: float) -> torch.Tensor:
        """One step; what it added."""
        self.step += 1
        before = self.master.clone()
        exp_avg_scale, exp_avg_sq_scale = self.scales
        scales = {"exp_avg_scale": exp_avg_scale, "exp_avg_sq_scale": exp_avg_sq_scale}
        ops.adam(self.master, grad, *self.codes, lr=lr, step=self.step, **scales, impl=self.impl)
        return self.master - before


@each("magnitude", [0.0, 1e-45, 1e-30, 1e-15, 1.0, 1e10, 1e18, 1e25, 3e38])
@every_set
def test_int8_states_survive_every_magnitude(native_impl: str, magnitude: float) -> None:
    """A constant gradient moves a parameter as far as with fp32 states; where its square overflows, neither moves."""
    grad = torch.full((2 * BLOCK + 1,), magnitude)
    grad[::2] *= -1
    int8 = Int8Run(grad.numel(), native_impl)
    exact = torch.zeros(grad.numel()), torch.zeros(grad.numel()), torch.zeros(grad.numel())
    for step in range(1, 51):
        int8.update(grad, lr=0.1)
        ops.adam(exact[0], grad, *exact[1:], lr=0.1, step=step, impl=native_impl)
    torch.testing.assert_close(int8.master, exact[0], rtol=1e-3, atol=0)
    assert int8.master[0].abs().item() == pytest.approx(5.0 if 1e-15 < magnitude < 1e19 else 0.0, abs=1e-4)


@each("target", ["split16", "split8", "fp32>bf16"])
@every_set
def test_an_int8_block_that_is_unusual_in_one_thing(native_impl: str, target: str) -> None:
    """Blocks are usual but for one thing each, which decides how sets go on: all have the reference's bits."""
    unusual = 10
    rows = make_rows("adam", Case("bf16", "int8", target, "none"), (2 * unusual * BLOCK,))
    row = rows[0]
    exp_avg, exp_avg_sq, grad = row["exp_avg"], row["exp_avg_sq"], row["grad"]
    exp_avg_sq.clamp_(min=1)
    value = row["master"] if target == "fp32>bf16" else row["param"]
    first = itertools.count(BLOCK, 2 * BLOCK)  # a usual one follows each
    exp_avg[next(first) + 77] = -128
    exp_avg_sq[next(first) + 5] = 0  # with a gradient, and without one
    at = next(first)
    exp_avg_sq[at : at + 3], grad[at : at + 3] = 0, 0.0
    value[next(first) + 11] = math.nan
    value[next(first) + 64] = math.inf
    if target == "fp32>bf16":
        value[next(first) + 1 :][:2].view(torch.int32)[:] = torch.tensor([0x7FFFFFFF, 0x7F800001]).int()
    else:  # the halves of a NaN that rounding to nearest would carry over into the sign
        at = next(first)
        value[at].view(torch.int16).fill_(-0x8000)
        row["remainder"][at].fill_(-1)
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        row[name][next(first) // BLOCK] = 2.0**-120
    at = next(first)
    grad[at : at + BLOCK], row["exp_avg_scale"][at // BLOCK], row["exp_avg_sq_scale"][at // BLOCK] = 0.0, 0.0, 0.0
    grad[next(first)] = 3e38
    assert next(first) == (2 * unusual + 1) * BLOCK
    for hyper in (
        {"lr": 1e-3, "weight_decay": 0.1, "step": 3},
        {"lr": 1e-3, "step": 3, "eps": 0.0},
        {"lr": 0.5, "step": 9, "beta1": 0.5, "beta2": 1e-30},
        {"lr": 0.5, "step": 9, "beta1": 0.0, "beta2": 0.0},
    ):
        result, expected = [row.clone()], [row.clone()]
        run_op("adam", result, hyper, native_impl)
        run_reference("adam", expected, hyper)
        approximate = "avx512" in native_impl  # the parameter, not its state
        assert_same(result, expected, ("param", "remainder", "master") if approximate else ())


@each("silence", [20, 500])
@first_and_last_set
def test_sparse_gradients_never_enlarge_an_int8_update(native_impl: str, silence: int) -> None:
    """Most gradients are zero for many steps; no update passes 4x the bound that exact Adam keeps."""
    numel = 64 * BLOCK
    generator = torch.Generator().manual_seed(silence)
    run = Int8Run(numel, native_impl)
    magnitude = 10.0 ** (torch.rand(numel, generator=generator) * 8 - 6)
    for step in range(1, 601):
        speaks = torch.rand(numel, generator=generator) < 1 / silence
        grad = torch.where(speaks, torch.randn(numel, generator=generator) * magnitude, 0.0)
        assert run.update(grad, lr=1.0).abs().max().item() <= 4 * exact_bound(0.9, 0.999, step), step


@each("quiet", [0.3, 0.001])
@first_and_last_set
def test_a_loud_neighbour_never_enlarges_an_int8_update(native_impl: str, quiet: float) -> None:
    """One element of each block keeps the scales up while small ones fall silent and wait at the lowest codes."""
    numel = 64 * BLOCK
    run = Int8Run(numel, native_impl)
    for step in range(1, 601):
        grad = torch.zeros(numel)
        grad[::BLOCK] = 100.0 if step % 50 == 7 else 1.0
        if step % 200 < 6:
            grad[1::2] = quiet
        assert run.update(grad, lr=1.0).abs().max().item() <= 4 * exact_bound(0.9, 0.999, step), step


def exact_bound(beta1: float, beta2: float, step: int) -> float:
    """The largest |m_hat| / sqrt(v_hat) that any gradients give Adam after `step` steps (Cauchy-Schwarz)."""
    ratio = beta1 * beta1 / beta2
    weight = (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt((1 - ratio**step) / (1 - ratio))
    return weight * math.sqrt(1 - beta2**step) / (1 - beta1**step)
