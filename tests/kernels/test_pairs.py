"""Exact Lion, Adagrad and SGD in pairs of fp32 numbers: the bits of float64 wherever these say that they are sure, on
numbers of every kind; float64 wherever they are not, which is little of what training meets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from kernel_cases import Case, assert_same, make_rows, run_op, run_reference
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from zerokern.kernels.reference_int8 import to_fp32
from zerokern.kernels.triton import adagrad, backend, lion, pairs, sgd
from zerokern.kernels.triton.table import DeviceTable

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
NUMEL = 1 << 14

KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "any bits": lambda g: torch.randint(-(1 << 31), 1 << 31, (NUMEL,), generator=g).to(torch.int32).view(torch.float32),
    "normal": lambda g: torch.randn(NUMEL, generator=g),
    "bf16": lambda g: torch.randn(NUMEL, generator=g).bfloat16().float(),
    "small": lambda g: 1e-4 * torch.randn(NUMEL, generator=g),
    "of any size": lambda g: torch.randn(NUMEL, generator=g) * 2.0 ** torch.randint(-30, 30, (NUMEL,), generator=g),
    "nearly subnormal": lambda g: (
        torch.randn(NUMEL, generator=g) * 2.0 ** torch.randint(-149, -80, (NUMEL,), generator=g)
    ),
    "subnormal": lambda g: torch.randint(-100, 100, (NUMEL,), generator=g).float() * 2.0**-149,
    "huge": lambda g: torch.randn(NUMEL, generator=g) * 2.0**126,
    "integers": lambda g: torch.randint(-16, 17, (NUMEL,), generator=g).float(),
    "special": lambda g: torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4028234663852886e38, 1.1754943508222875e-38]
    )[torch.randint(0, 9, (NUMEL,), generator=g)],
    "zeros": lambda g: torch.tensor([0.0, -0.0])[torch.randint(0, 2, (NUMEL,), generator=g)],
}
WEIGHTS = (0.1, 0.01, 1 - 0.99, 1 - 0.9, 0.5, 1.0, 0.0, 1 - 0.999, 2.0**-40)
RATES = (0.1, 0.01, 3e-4, 1.0, 0.5, 2.0**-7, 0.0, 1e-46, 1e-39, 1e30, 1e300, -0.1, to_fp32(0.1))
DECAYS = (0.0, 0.0, 0.1, 1e-4, 0.5, 1e-46, 1e300, to_fp32(0.1))
MOMENTA = (0.9, 0.99, 0.5, 1e-46, 1.0, 1e3)


@triton.jit
def rules(RULE: tl.constexpr, a, b, c, scalars, flags, x, y, sure, NUMEL: tl.constexpr):
    at = tl.arange(0, NUMEL)
    a, b, c = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    s0, s1, s2, s3 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    f0, f1, f2 = tl.load(flags) != 0, tl.load(flags + 1) != 0, tl.load(flags + 2) != 0
    if RULE == "lion":
        found, other, certain = lion.in_pairs(a, b, s0, s2, s3)
    elif RULE == "adagrad":
        found, other, certain = adagrad.in_pairs(a, b, c, s0, s1, f0)
    else:
        s4, s5, s6, s7 = (
            tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7),
        )  # fmt: skip
        narrow = (s0, s1, s2, s3, s4, s5, s6, s7)
        found, other, certain = sgd.in_pairs(a, b, c, narrow, f0, f1, f2, RULE == "sgd")
    tl.store(x + at, found)
    tl.store(y + at, other)
    tl.store(sure + at, certain.to(tl.int32))


def low(x: float) -> float:
    """As `prepare` has it."""
    rest = x - to_fp32(x)
    return to_fp32(rest) if abs(rest - to_fp32(rest)) <= abs(x) * 2.0**-48 else torch.nan


def unsure(rule: str, tensors: list[Tensor], scalars: list[float], flags: list[bool], expected: list[Tensor]) -> float:
    """What share is not sure; all that is sure must have the expected bits, but for which NaN a NaN is."""
    halves = [half for x in scalars for half in (to_fp32(x) if abs(x) < 1e38 else torch.inf * x, low(x))]
    narrow = torch.tensor((halves + [0.0] * 8)[:8], dtype=torch.float32, device=DEVICE)
    found = [torch.empty(NUMEL, device=DEVICE) for _ in range(2)]
    sure = torch.empty(NUMEL, dtype=torch.int32, device=DEVICE)
    marks = torch.tensor((flags + [False] * 3)[:3], dtype=torch.int32, device=DEVICE)
    given = [(tensors * 2)[i].to(DEVICE) for i in range(3)]
    rules[(1,)](rule, *given, narrow, marks, *found, sure, NUMEL=NUMEL)
    sure = sure.cpu().bool()
    for one, other in zip(found, expected, strict=True):
        bits, wanted = (torch.where(t.isnan(), torch.nan, t).view(torch.int32) for t in (one.cpu(), other))
        wrong = (sure & (bits != wanted)).nonzero().flatten()[:3].tolist()
        assert not wrong, (rule, scalars, flags, [[float(t[i]).hex() for t in (*tensors, one, other)] for i in wrong])
    return 1.0 - sure.float().mean().item()


def lions(g: Tensor, m: Tensor, w1: float, w2: float) -> float:
    wide = m.double()
    difference = g.double() - wide
    c = wide + w1 * difference
    sign = torch.where(c.isnan(), torch.nan, c.sign()).float() + 0.0
    return unsure("lion", [g, m], [w1, w2], [], [sign, (wide + w2 * difference).float()])


def adagrads(p: Tensor, g: Tensor, total: Tensor, decay: float) -> float:
    wide = g.double() + decay * p.double() if decay else g.double()
    after = (total.double() + wide * wide).float()
    return unsure("adagrad", [p, g, total], [decay], [decay != 0.0], [wide.float(), after])


def sgds(
    p: Tensor, g: Tensor, buffer: Tensor, lr: float, decay: float = 0.0, momentum: float = 0.9, undamped: float = 1.0,
    first: bool = False, nesterov: bool = False, plain: bool = False,
) -> float:  # fmt: skip
    d, before, kept = g.double(), p.double(), buffer
    if decay:
        d = d + decay * before
    if not plain:
        kept = (d if first else momentum * buffer.double() + undamped * d).float()
        d = d + momentum * kept.double() if nesterov else kept.double()
    expected = [(before - lr * d).float(), kept]
    rule = "sgd without a buffer" if plain else "sgd"
    flags = [decay != 0.0, first, nesterov]
    return unsure(rule, [p, g, buffer], [lr, decay, momentum, undamped], flags, expected)


def test_what_is_sure_has_the_bits_of_float64(every: bool) -> None:
    """Three tensors of any kinds, related now and then so that sums cancel, under scalars of any kind."""
    generator = torch.Generator().manual_seed(31)

    def one_of(choices: tuple[float, ...]) -> float:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for number in range(120 if every else 8):
        kinds = [list(KINDS.values())[int(i)] for i in torch.randint(len(KINDS), (3,), generator=generator)]
        p, g, m = (kind(generator) for kind in kinds)
        if number % 5 == 0:
            m = -g * one_of((1.0, 0.5, 9.0, 0.1 / 0.9))
        if number % 5 == 1:
            p = g * one_of((1.0, -1.0, 0.1, 10.0)) * (1 + 2.0**-20 * torch.randn(NUMEL, generator=generator))
        lions(g, m, one_of(WEIGHTS), one_of(WEIGHTS))
        adagrads(p, g, m.abs(), one_of(DECAYS))
        first, nesterov, plain = (bool(bit) for bit in torch.randint(2, (3,), generator=generator))
        sgds(
            p, g, m, one_of(RATES), one_of(DECAYS), one_of(MOMENTA), one_of(WEIGHTS), first, nesterov, plain
        )  # fmt: skip


def test_little_of_what_training_meets_is_not_sure() -> None:
    """Weights of few decimals bring ties: a multiple of 100, times 0.01, has few bits. Hence the percents."""
    generator = torch.Generator().manual_seed(7)
    p, buffer, m = (size * torch.randn(NUMEL, generator=generator) for size in (3e-2, 3e-3, 3e-4))
    g = (1e-3 * torch.randn(NUMEL, generator=generator)).bfloat16().float()
    zeros = torch.zeros(NUMEL)
    assert lions(g, m, 1 - 0.9, 1 - 0.99) < 0.02
    assert lions(zeros, zeros, 1 - 0.9, 1 - 0.99) == 0.0
    assert adagrads(p, g, g * g, 0.0) == 0.0
    assert adagrads(p, zeros, zeros, 0.0) == 0.0
    assert adagrads(p, g, m.abs(), 0.01) < 0.005
    assert sgds(p, g, buffer, 0.1, plain=True) < 0.005
    assert sgds(p, zeros, zeros, 0.1) == 0.0
    assert sgds(p, g, buffer, 0.1, 1e-4) < 0.04
    assert sgds(p, g, buffer, 0.1) < 0.12
    for lr in (0.5, 2.0**-10):  # every sum has few bits
        assert sgds(p, g, buffer, lr, plain=True) == 0.0


@triton.jit
def magnitude(a, b, c, scalars):
    return tl.abs(b), c * scalars[0]


@triton.jit
def settle(x, y, sure, a, b, c, APART: tl.constexpr, VEC: tl.constexpr):
    at = tl.arange(0, 8)[:, None] * 128 + tl.arange(0, 128)[None, :]
    certain = tl.load(sure + at) != 0
    found, other = pairs.settled(
        tl.load(x + at), tl.load(y + at), certain, tl.load(a + at), tl.load(b + at), tl.load(c + at), (2.0,), magnitude,
        APART, VEC,
    )  # fmt: skip
    tl.store(x + at, found)
    tl.store(y + at, other)


@each("share", [0.0, 0.01, 1.0])
@each("apart, vec", [(2, 4), (1, 8), (4, 2), (8, 1)])
def test_each_element_that_is_not_sure_is_settled_and_no_other(apart: int, vec: int, share: float) -> None:
    generator = torch.Generator().manual_seed(vec)
    x, y, b, c = (torch.randn(8, 128, generator=generator) for _ in range(4))
    b[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    sure = torch.rand(8, 128, generator=generator) >= share
    expected = torch.where(sure, x, b.abs()), torch.where(sure, y, c * 2)
    found = [x.to(DEVICE), y.to(DEVICE)]
    settle[(1,)](*found, sure.int().to(DEVICE), b.to(DEVICE), b.to(DEVICE), c.to(DEVICE), APART=apart, VEC=vec)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu().view(torch.int32), other.view(torch.int32))


UPDATES: list[tuple[str, dict[str, object]]] = [
    ("lion", {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    ("adagrad", {"eps": 1e-10, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    ("adagrad", {"lr_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "dampening": 0.1}),
    ("sgd", {}),
]


def test_whole_updates_have_the_bits_of_the_reference(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with numbers that are not finite among them; aligned, and not."""
    if backend.interpreted():
        for module in (lion, adagrad, sgd):
            monkeypatch.setattr(module, "float64_is_scarce", lambda: True)
    targets = ("split16", "fp32", "none.bf16") if every else ("split16",)
    updates = UPDATES if every else [*UPDATES[:3], UPDATES[-1]]
    for (algorithm, values), target, misaligned in product(updates, targets, (False, True)):
        if misaligned and not every and algorithm != "lion":
            continue
        state = "none" if algorithm == "sgd" and "momentum" not in values else "fp32"
        case = Case("bf16", state, target, "none")
        rows, expected = (make_rows(algorithm, case, (5, 1029), misaligned=misaligned) for _ in range(2))
        for row in (rows[1], expected[1]):
            row["grad"][:8] = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-39, 3e38, 0.0, -0.0])
            for name in row.tensors.keys() - {"grad"}:  # and zeros that have a sign
                row[name][6:8] = -0.0 if name == "param" else 0
        run_op(algorithm, rows, {"lr": 0.1, "step": 2, **values}, "triton")
        run_reference(algorithm, expected, {"lr": 0.1, "step": 2, **values})
        assert_same(rows, expected)


def test_the_lower_halves_of_scalars_are_there_or_nan() -> None:
    numbers = [0.0, 0.1, 1.0, 2.0**-20, 1e30, 1e-30, 1e-38, 1e-46, 1e300, to_fp32(0.3)]
    table = DeviceTable(DEVICE, 1, len(numbers))
    kinds = {"grad_dtype": torch.float32, "param_dtype": torch.float32, "master_format": "fp32", "state_format": "none"}
    for group, x in enumerate(numbers):
        table.set_group(group, {"lr": x, "weight_decay": x, "dampening": 0.9}, algorithm="sgd", **kinds)
    p, g = torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    table.set_row(0, group=0, numel=1, master=p.data_ptr(), grad=g.data_ptr())
    table.run()
    found = table._constants.view(len(numbers), -1)[:, 20:24].cpu()
    expected = torch.tensor([[low(x), low(x), 0.0, low(1 - 0.9)] for x in numbers])
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isnan().any(1).tolist() == [x in (1e-38, 1e-46, 1e300) for x in numbers]
