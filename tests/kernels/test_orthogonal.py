"""The iteration against torch's own, bit for bit from the same matrix; norms, layouts and memory; how it is applied."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest
import torch
from kernel_cases import same_bits
from tables import each
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from zerokern.kernels import ops, reference
from zerokern.kernels.orthogonal import (
    COEFFICIENTS,
    EPS,
    STEPS,
    adjusted_lr,
    apply_settings,
    iterate_,
    workspace_numel,
)

SHAPES = [(64, 64), (100, 300), (300, 100), (513, 128), (7, 1), (1, 9)]
DTYPES = [torch.bfloat16, torch.float32]


def sums_of(x: Tensor) -> Tensor:
    """As `ops.muon` writes them."""
    matrices = x.reshape(-1, x.shape[-2] * x.shape[-1])
    sums = [[ops.sumsq(chunk) for chunk in one.split(reference.SUMSQ_CHUNK)] for one in matrices]
    found = torch.tensor(sums, dtype=torch.float64)
    return found if x.dim() == 3 else found[0]


def orthogonalized(x: Tensor, steps: int = STEPS) -> Tensor:
    found = x.clone()
    iterate_(found, sums_of(x), steps=steps)
    return found


def newton_schulz(x: Tensor, steps: int = STEPS) -> Tensor:
    """Torch's loop, from a matrix that is normalised already."""
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    now = x.T if tall else x
    for _ in range(steps):
        gram = now @ now.T
        now = torch.addmm(now, torch.addmm(gram, gram, gram, beta=b, alpha=c), now, beta=a)
    return now.T.contiguous() if tall else now


def matrix(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.01).to(dtype)


def test_a_new_thread_multiplies_with_as_many_threads_as_the_program_has_set() -> None:
    """By MKL the bits of a product depend on that number, and a thread in which torch has done nothing has another."""
    x = matrix((10, 23), torch.float32)
    other = x.clone()
    beside = threading.Thread(target=iterate_, args=(other, sums := sums_of(x), COEFFICIENTS, STEPS, EPS))
    beside.start()
    beside.join()
    iterate_(x, sums, COEFFICIENTS, STEPS, EPS)
    assert same_bits(x, other)


@each("dtype", DTYPES)
@each("shape", SHAPES)
def test_the_bits_are_those_of_torch_from_the_same_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = matrix(shape, dtype)
    normalised = (x.float() / max(math.sqrt(ops.sumsq(x)), EPS)).to(dtype)
    for steps in (5, 4, 1, 0):
        assert same_bits(orthogonalized(x, steps), newton_schulz(normalised, steps)), steps


def test_that_loop_is_the_one_of_torch() -> None:
    x = matrix((96, 40), torch.bfloat16)
    assert same_bits(
        newton_schulz(x.div(x.norm())), _zeropower_via_newtonschulz(x.clone(), COEFFICIENTS, STEPS, EPS).contiguous()
    )


def test_no_further_from_float64_than_torch() -> None:
    """In bf16 roundings of the products decide, whatever the norm's are: the mean of many matrices. In fp32 none do."""
    errors = {"ours": 0.0, "ours in fp32": 0.0, "torch's": 0.0}
    for seed in range(40):
        u = matrix((48, 96), torch.float32, seed)
        exact = newton_schulz(u.double() / u.double().norm())
        found = {
            "ours": orthogonalized(u.bfloat16()),
            "ours in fp32": orthogonalized(u),
            "torch's": _zeropower_via_newtonschulz(u, COEFFICIENTS, STEPS, EPS),
        }
        for name, one in found.items():
            errors[name] += (one.double() - exact).norm().item() / 40
    assert errors["ours"] <= 1.01 * errors["torch's"]
    assert errors["ours in fp32"] <= 1e-3 * errors["torch's"]


@each("dtype", DTYPES)
@each("shape", [(3, 40, 90), (3, 90, 40), (1, 8, 8)])
def test_a_batch_has_the_bits_of_its_matrices(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = matrix(shape, dtype)
    for one, mine in zip(x, orthogonalized(x), strict=True):
        assert same_bits(mine, orthogonalized(one))


@each("dtype", DTYPES)
@each("shape", [(5, 91, 91), (5, 91, 320), (5, 320, 91), (5, 64, 64), (9, 16, 1024), (9, 1024, 16), (3, 7, 1)])
def test_a_batch_at_once_has_the_bits_of_its_matrices(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of these some are multiplied at once, and some are not, because a library adds in another order then."""
    x = matrix(shape, dtype)
    found = x.clone()
    iterate_(found, sums_of(x), COEFFICIENTS, STEPS, EPS)
    for one, mine in zip(x, found, strict=True):
        assert same_bits(mine, orthogonalized(one))


@each("shape", [(8, 6, 5), (9, 7, 165), (5, 2, 63), (4, 7, 2), (13, 5, 116), (12, 4, 211), (3, 7, 141), (9, 33, 65)])
def test_a_batch_whose_bits_seldom_differ_is_found_out(shape: tuple[int, int, int]) -> None:
    """Of few terms, and in bf16, another order or rounding shows in few results."""
    for seed in range(40):
        batch = matrix(shape, torch.bfloat16, seed)
        together = batch.clone()
        iterate_(together, sums_of(batch), COEFFICIENTS, STEPS, EPS)
        alone = [orthogonalized(one) for one in batch]
        assert same_bits(together, torch.stack(alone)), seed


def test_a_batch_is_multiplied_at_once_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerokern.kernels import products

    calls: list[str] = []
    bmm = torch.bmm
    monkeypatch.setattr(products, "_goes_at_once", lambda *given: True)
    monkeypatch.setattr(torch, "bmm", lambda *given, **named: calls.append("bmm") or bmm(*given, **named))
    x = matrix((4, 8, 8), torch.float32)
    iterate_(x, sums_of(x))
    assert len(calls) == STEPS


@each("steps, before", [(0, 0), (1, 0), (4, 2), (5, 2)])
def test_what_goes_on_beside_it_is_called_once_in_the_middle(
    steps: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerokern.kernels import orthogonal

    said: list[str] = []
    multiply = orthogonal.multiply
    monkeypatch.setattr(orthogonal, "multiply", lambda *given: said.append("step") or multiply(*given))
    x = matrix((9, 5), torch.float32)
    iterate_(x, sums_of(x), COEFFICIENTS, steps, EPS, lambda: said.append("halfway"))
    assert said == ["step"] * before + ["halfway"] + ["step"] * (steps - before)


def test_a_batch_whose_bits_differ_is_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever libraries do: here a product of a batch adds its terms in two halves."""
    from zerokern.kernels import products

    mm, baddbmm = torch.mm, torch.baddbmm
    calls: list[str] = []

    def halves(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        calls.append("bmm")
        middle = a.shape[-1] // 2
        for one, other, to in zip(a, b, out, strict=True):
            to.copy_(mm(one[:, :middle], other[:middle]) + mm(one[:, middle:], other[middle:]))

    monkeypatch.setattr(torch, "bmm", halves)
    monkeypatch.setattr(torch, "baddbmm", lambda *given, **named: calls.append("baddbmm") or baddbmm(*given, **named))
    products._FOUND.clear()
    x = matrix((4, 48, 48), torch.float32)
    for _ in range(2):
        found = x.clone()
        iterate_(found, sums_of(x), COEFFICIENTS, STEPS, EPS)
        for one, mine in zip(x, found, strict=True):
            assert same_bits(mine, orthogonalized(one))
    assert calls.count("bmm") == 1, "tried once"
    products._FOUND.clear()


PRECISIONS = """
import torch
from zerokern.kernels.orthogonal import iterate_
from zerokern.kernels.products import way_of

places = torch.device("cpu"), torch.device("cuda")
ways = [[way_of(place) for place in places]]
torch.set_float32_matmul_precision("medium")
ways.append([way_of(place) for place in places])
torch.backends.mkldnn.matmul.fp32_precision = "ieee"
ways.append([way_of(place) for place in places])
torch.backends.cuda.matmul.fp32_precision = "ieee"
ways.append([way_of(place) for place in places])
for split_k in True, False:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, split_k
    ways.append([way_of(place) for place in places])
print([[now != then for now, then in zip(*pair)] for pair in zip(ways[1:], ways)])
iterate_(torch.eye(8).repeat(3, 1, 1), torch.full((3, 1), 8.0, dtype=torch.float64))
"""


def test_a_precision_may_be_set_by_older_and_by_newer_names() -> None:
    """Once a program has used the newer ones, torch refuses to tell the older."""
    ran = subprocess.run([sys.executable, "-c", PRECISIONS], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[0] == str([[True, True], [True, False], *[[False, True]] * 3])


@each("steps", [0, 1, 4, STEPS])
@each("shape", [(3, 40, 90), (3, 90, 40), (40, 90), (90, 40), (300, 300)])
def test_products_as_a_gpu_has_them(shape: tuple[int, ...], steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_iterate` with norms as a tensor, a batch at once: the way of tensors on a GPU, on this CPU."""
    from zerokern.kernels import orthogonal, products

    monkeypatch.setattr(products, "_goes_at_once", lambda *given: True)
    x = matrix(shape, torch.float32)
    room = torch.empty(3 * workspace_numel(x))
    found = x.clone()
    orthogonal._iterate(found, orthogonal._norms(sums_of(x), EPS), room, [COEFFICIENTS] * steps)
    torch.testing.assert_close(found, orthogonalized(x, steps), rtol=1e-4, atol=1e-5)


@each("shape", [(40, 90), (90, 40), (300, 300)])
def test_one_matrix_of_a_device_keeps_its_shape(shape: tuple[int, int]) -> None:
    """Shapes alone, on torch's meta device: what a CPU cannot run of the way of tensors on a GPU."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    sums = torch.empty(-(-x.numel() // reference.SUMSQ_CHUNK), dtype=torch.float64, device="meta")
    for steps in (0, 1, STEPS):
        iterate_(x, sums, COEFFICIENTS, steps, EPS)
    assert x.shape == shape


def test_a_tensor_as_divisor_has_the_bits_of_a_number() -> None:
    x, norm = matrix((64, 64), torch.bfloat16), torch.tensor(0.637)
    by_tensor = torch.div(x, norm.view(1, 1), out=torch.empty_like(x))
    assert same_bits(by_tensor, torch.div(x, norm.item(), out=torch.empty_like(x)))
    assert same_bits(by_tensor, (x.float() / norm).bfloat16())


def test_the_norm_has_the_bits_of_sumsq_and_eps_below_it() -> None:
    from zerokern.kernels import orthogonal

    x = matrix((300, 700), torch.bfloat16)
    assert orthogonal._norm(sums_of(x).tolist(), 0.0) == torch.tensor(math.sqrt(ops.sumsq(x))).float().item()
    tiny = torch.full((4, 4), 1e-12)
    assert same_bits(orthogonalized(tiny, 0), tiny / 1e-7)
    assert orthogonalized(torch.zeros(4, 4)).tolist() == [[0.0] * 4] * 4
    assert orthogonalized(torch.full((4, 4), torch.nan)).isnan().all()


@each("dtype", DTYPES)
@each("shape", [(128, 256), (256, 128)])
def test_one_matrix_and_two_squares_beside_it(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = matrix(shape, dtype)
    sums, bound = sums_of(x), (math.prod(shape) + 2 * min(shape) ** 2) * x.itemsize
    assert workspace_numel(x) * x.itemsize == bound
    assert peak(lambda: iterate_(x, sums)) <= bound + 4096


def peak(call: object) -> int:
    """The most bytes that torch's allocator lends at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    lent = most = 0
    for event in profile.events():
        if event.name == "[memory]":
            lent += event.cpu_memory_usage
            most = max(most, lent)
    return most


@each("rule", [None, "original", "match_rms_adamw"])
@each("shape", [(400, 100), (100, 400), (64, 64), (7, 3)])
def test_learning_rates_are_adjusted_as_torch_does(rule: str | None, shape: tuple[int, int]) -> None:
    assert adjusted_lr(0.02, rule, shape) == _adjust_lr(0.02, rule, torch.Size(shape))


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adjust_lr_fn='adamw'.*'match_rms_adamw'"):
        adjusted_lr(0.02, "adamw", (2, 2))


@each("direction", DTYPES)
@each("master", ["fp32", "split16"])
def test_applied_by_sgd_it_is_nearer_to_float64_than_torch(master: str, direction: torch.dtype) -> None:
    """One pass against torch's two statements on fp32 parameters, of a value that both hold."""
    lr, weight_decay = 0.02, 0.1
    adjusted = adjusted_lr(lr, "match_rms_adamw", (300, 100))
    generator = torch.Generator().manual_seed(0)
    start, o = torch.randn(300, 100, generator=generator), torch.randn(300, 100, generator=generator).to(direction)
    exact = start.double() * (1.0 - lr * weight_decay) - adjusted * o.double()
    theirs = start.clone().mul_(1 - lr * weight_decay).add_(o.float(), alpha=-adjusted)
    settings = apply_settings(lr, adjusted, weight_decay)
    if master == "fp32":
        mine = start.clone()
        ops.sgd(mine, o, **settings)
    else:
        hi, low = ops.split(start, "split16")
        ops.sgd(hi, o, remainder=low, **settings)
        mine = ops.join(hi, low)
    ours, torchs = ((one.double() - exact).abs() for one in (mine, theirs))
    assert ours.max() < torchs.max() and ours.mean() < 0.8 * torchs.mean()
    assert same_bits(mine, exact.float()) or (mine != exact.float()).sum() < 5  # rounded once


def test_without_a_rate_nothing_is_decayed() -> None:
    assert apply_settings(0.0, 0.0, 0.1) == {"lr": 0.0, "weight_decay": 0.0}
