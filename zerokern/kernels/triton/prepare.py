"""What a step knows only when it runs, computed on the device by one program: whether it is skipped, what gradients are
multiplied by, the number of the step, and from it every scalar of every group.

The sequences are those of `reference.py` and of `scalars_of` in cpu/api.cpp, in float64, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.formats import FLAGS
from zerokern.kernels.rules import NUMBERS, RULES

__all__ = ["CONSTANTS", "GROUP", "GROUP_WORDS", "HEADER", "HEADER_WORDS", "WIDE", "prepare"]

# Words of the order that the host sends: a header, then one row for each group. Numbers are float64 by their bits;
# hyperparameters are in the order of the C ABI, which `_scalars` counts on.
HEADER = {
    name: i
    for i, name in enumerate(
        ("scale", "max_norm", "grad_scale", "found_inf", "sums", "nsums", "steps", "increments", "nparams")
    )
}
GROUP = {
    name: i
    for i, name in enumerate(
        ("lr", "lr_address", "lr_is_wide", *NUMBERS[1:], "flags", "algorithm", "step", "witness", "seed")
    )
}
HEADER_WORDS = tl.constexpr(16)
GROUP_WORDS = tl.constexpr(16)
CONSTANTS = tl.constexpr(32)  # fp32 words of a group's constants
WIDE = tl.constexpr(8)  # and its float64 words
LARGEST = tl.constexpr(3.4028234663852886e38)
POWER_BITS = tl.constexpr(31)
GROUPS_AT_ONCE = tl.constexpr(32)  # a group for each thread
STEPS_AT_ONCE = tl.constexpr(1024)
ADAM, LION, ADAGRAD, MUON = (tl.constexpr(RULES[name].number) for name in ("adam", "lion", "adagrad", "muon"))
DECOUPLED, MAXIMIZE, NESTEROV, FIRST_STEP = (
    tl.constexpr(FLAGS[name]) for name in ("decoupled", "maximize", "nesterov", "first_step")
)


@triton.jit
def _power(base, exponent):
    """base^exponent by repeated squaring, as `reference_int8.power`."""
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(POWER_BITS):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def _scalar(order, word, TYPE: tl.constexpr):
    """What lies at the address in a word of the header, 0 without one."""
    address = tl.load(order + word)
    return tl.load(address.to(tl.pointer_type(TYPE)), mask=address != 0, other=0.0)


@triton.jit
def _verdict(order, outcome):
    """(factor of the gradients, whether to skip); writes the norm and counts a skipped step."""
    numbers = order.to(tl.pointer_type(tl.float64))
    scale = tl.load(numbers + 0)
    if tl.load(order + 2) != 0:
        scale = 1.0 / _scalar(order, 2, tl.float32).to(tl.float64)
    skip = _scalar(order, 3, tl.float32) != 0.0
    nsums = tl.load(order + 5)
    if nsums > 0:
        sums = tl.load(order + 4).to(tl.pointer_type(tl.float64))
        total = tl.load(sums)
        for i in range(1, nsums.to(tl.int32)):
            total = total + tl.load(sums + i)
        norm = tl.sqrt(total) * scale
        if skip == 0:
            tl.store(outcome, norm)
        finite = tl.abs(norm) < float("inf")
        ratio = tl.load(numbers + 1) / (norm + 1e-6)
        scale = scale * tl.where(ratio < 1.0, ratio, 1.0)
        skip = skip | (finite == 0)
    skipped = tl.where(skip, 1.0, 0.0).to(tl.float64)
    tl.store(outcome + 1, tl.load(outcome + 1) + skipped)
    tl.store(outcome + 2, skipped)
    return scale, skip


@triton.jit
def _rate(numbers, row, mask):
    """The learning rates: a number, or what lies at an address."""
    rate = tl.load(numbers + row, mask=mask, other=1.0)
    words = numbers.to(tl.pointer_type(tl.int64))
    address = tl.load(words + row + 1, mask=mask, other=0)
    wide = tl.load(words + row + 2, mask=mask, other=0) != 0
    there = address != 0
    narrow = tl.load(address.to(tl.pointer_type(tl.float32)), mask=there & (wide == 0), other=0.0).to(tl.float64)
    double = tl.load(address.to(tl.pointer_type(tl.float64)), mask=there & wide, other=0.0)
    return tl.where(there, tl.where(wide, double, narrow), rate)


@triton.jit
def _count(order, skip):
    """One more step for those that take it, unless it is skipped."""
    nparams = tl.load(order + 8).to(tl.int32)
    steps = tl.load(order + 6).to(tl.pointer_type(tl.float32))
    increments = tl.load(order + 7).to(tl.pointer_type(tl.float32))
    if skip == 0:
        for start in range(0, nparams, STEPS_AT_ONCE):
            i = start + tl.arange(0, STEPS_AT_ONCE)
            mask = i < nparams
            made = tl.load(steps + i, mask=mask, other=0.0) + tl.load(increments + i, mask=mask, other=0.0)
            tl.store(steps + i, made, mask=mask)


@triton.jit
def _low(x):
    """What `pairs` adds to x in fp32 to have 48 bits of it; NaN, which leaves all to float64, where that is not so."""
    rest = x - x.to(tl.float32).to(tl.float64)
    low = rest.to(tl.float32)
    return tl.where(tl.abs(rest - low.to(tl.float64)) <= tl.abs(x) * 3.552713678800501e-15, low, float("nan"))  # 2^-48


@triton.jit
def _scalars(constants, wides, marks, order, group, ngroups, scale):
    """Writes the constants of some groups."""
    numbers = order.to(tl.pointer_type(tl.float64))
    mask = group < ngroups
    row = HEADER_WORDS + group * GROUP_WORDS
    lr = _rate(numbers, row, mask)
    beta1 = tl.load(numbers + row + 3, mask=mask, other=0.0)
    beta2 = tl.load(numbers + row + 4, mask=mask, other=0.0)
    eps = tl.load(numbers + row + 5, mask=mask, other=0.0)
    wd = tl.load(numbers + row + 6, mask=mask, other=0.0)
    momentum = tl.load(numbers + row + 7, mask=mask, other=0.0)
    undamped = 1.0 - tl.load(numbers + row + 8, mask=mask, other=0.0)
    lr_decay = tl.load(numbers + row + 9, mask=mask, other=0.0)
    flags = tl.load(order + row + 10, mask=mask, other=0)
    algorithm = tl.load(order + row + 11, mask=mask, other=0)
    step = tl.load(order + row + 12, mask=mask, other=1)
    witness = tl.load(order + row + 13, mask=mask, other=-1)
    seed = tl.load(order + row + 14, mask=mask, other=0)

    counted = mask & (witness >= 0)
    steps = tl.load(order + 6).to(tl.pointer_type(tl.float32))
    made = tl.load(steps + witness, mask=counted, other=0.0).to(tl.int64)
    first = ((flags & FIRST_STEP) != 0) & ((counted == 0) | (made == 0))
    step = tl.where(counted, made + 1, step)
    is_adam, is_adagrad = algorithm == ADAM, algorithm == ADAGRAD
    beta1 = tl.where(algorithm == MUON, momentum, beta1)
    decoupled = ((flags & DECOUPLED) != 0) | (algorithm == LION)
    unbias = 1.0 - _power(beta1, step)
    late = 1.0 + (step - 1).to(tl.float64) * lr_decay
    size = lr / tl.where(is_adam, unbias, tl.where(is_adagrad, late, 1.0))
    step_size = size.to(tl.float32)
    moves = step_size != 0.0
    per_step = tl.where(moves, 1.0 / size, LARGEST)
    slope = per_step / tl.sqrt(1.0 - _power(beta2, step))
    slope = tl.where(slope < LARGEST, slope, LARGEST).to(tl.float32)
    floor = tl.where(moves, (eps * per_step).to(tl.float32), float("inf"))
    factor = scale.to(tl.float32)
    factor = tl.where((flags & MAXIMIZE) != 0, -factor, factor)
    w1, w2 = 1.0 - beta1, 1.0 - beta2

    c = constants + group * CONSTANTS
    tl.store(c + 0, factor, mask=mask)
    tl.store(c + 1, lr.to(tl.float32), mask=mask)
    tl.store(c + 2, tl.where(decoupled, (lr * wd).to(tl.float32), 0.0), mask=mask)
    tl.store(c + 3, eps.to(tl.float32), mask=mask)
    tl.store(c + 4, wd.to(tl.float32), mask=mask)
    tl.store(c + 5, step_size, mask=mask)
    tl.store(c + 6, w1.to(tl.float32), mask=mask)
    tl.store(c + 7, w2.to(tl.float32), mask=mask)
    tl.store(c + 8, beta1.to(tl.float32), mask=mask)
    tl.store(c + 9, beta2.to(tl.float32), mask=mask)
    tl.store(c + 10, tl.sqrt(w2).to(tl.float32), mask=mask)
    tl.store(c + 11, tl.sqrt(beta2).to(tl.float32), mask=mask)
    tl.store(c + 12, slope, mask=mask)
    tl.store(c + 13, floor, mask=mask)
    tl.store(c + 14, momentum.to(tl.float32), mask=mask)
    tl.store(c + 15, undamped.to(tl.float32), mask=mask)
    tl.store(c + 16, tl.where((decoupled == 0) & (wd != 0.0), 1.0, 0.0), mask=mask)
    tl.store(c + 17, tl.where(first, 1.0, 0.0), mask=mask)
    tl.store(c + 18, tl.where((flags & NESTEROV) != 0, 1.0, 0.0), mask=mask)
    tl.store(c + 19, _low(w2), mask=mask)
    tl.store(c + 20, _low(wd), mask=mask)
    tl.store(c + 21, _low(lr), mask=mask)
    tl.store(c + 22, _low(momentum), mask=mask)
    tl.store(c + 23, _low(undamped), mask=mask)
    d = wides + group * WIDE
    tl.store(d + 0, w1, mask=mask)
    tl.store(d + 1, w2, mask=mask)
    tl.store(d + 2, wd, mask=mask)
    tl.store(d + 3, lr, mask=mask)
    tl.store(d + 4, momentum, mask=mask)
    tl.store(d + 5, undamped, mask=mask)
    tl.store(marks + 2 * group, seed, mask=mask)
    tl.store(marks + 2 * group + 1, step, mask=mask)


@triton.jit(do_not_specialize=["ngroups"])
def prepare(outcome, constants, wides, marks, order, ngroups):
    """`order` is what the host sent. Writes the constants of all groups: fp32, float64, and (seed, step) in `marks`."""
    scale, skip = _verdict(order, outcome)
    for start in range(0, ngroups, GROUPS_AT_ONCE):
        _scalars(constants, wides, marks, order, start + tl.arange(0, GROUPS_AT_ONCE), ngroups, scale)
    tl.debug_barrier()  # every step is read before any is counted
    _count(order, skip)
