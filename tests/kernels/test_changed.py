"""The bits of what an update changes, on every instruction set and in every format; and deltas that are packed."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from kernel_cases import (
    SETS,
    Case,
    Row,
    assert_margins_intact,
    assert_same,
    cases_of,
    hyperparameters,
    make_rows,
    place,
    run_op,
)
from tables import each, run_table
from torch import Tensor

from zerokern.kernels import changed, ops, reference
from zerokern.kernels.changed import Packed, changed_mask, pack_changed, unpack_changed, weighted_sum

SIZES = (0, 1, 7, 8, 63, 129, 257, 1003, (1 << 16) | 133)
RATES = (0.3, 1e-3, 1e-3, 1e-6, 0.0)  # of all, some, few and no values; one after the other
LENGTHS = (0, 1, 5, 15, 16, 17, 100, 127, 128, 129, 143, 256, 1000, 4096 + 77, (3 << 16) + 77)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def with_strange_values(row: Row) -> Row:
    """Zeros of both signs, denormals, infinities and NaNs among the values; gradients of 0 and, of one, a NaN."""
    held = row["master"] if "master" in row.tensors else row["param"]
    strange = torch.tensor([0.0, -0.0, 1e-40, -6e-8, torch.inf, torch.nan, 1.0, 2.0**-130])
    some = held[5 : 5 + len(strange)]
    some.copy_(strange[: len(some)])
    row["grad"][3:9].zero_()
    row["grad"][64:200].zero_()
    row["grad"][40:41].fill_(torch.nan)
    return row


def published(row: Row) -> Tensor:
    return row["out"] if "out" in row.tensors else row["param"]


def published_before(row: Row) -> Tensor:
    """A copy that is rounded in another dtype than the parameter's is never read: it follows from what is kept."""
    told = published(row)
    if told is row["param"] or told.dtype == row["param"].dtype:
        return row["param"].clone()
    return reference.load_master(row["param"], row.tensors.get("remainder"), None).to(told.dtype)


def union_of(mask: Tensor, before: Tensor, after: Tensor, derived: bool) -> Tensor:
    if not derived:
        return mask | changed_mask(before, after)
    # torch and kernels differ in the NaN that they make
    nan = before.isnan() | after.isnan()
    return mask | changed_mask(before.masked_fill(nan, 0.0), after.masked_fill(nan, 0.0))


def check_changed(algorithm: str, case: Case, impl: str, misaligned: bool) -> None:
    """Bits are those of `changed_mask` over many steps, in slices of one mask; all else is as without a mask."""
    rows = [with_strange_values(row) for row in make_rows(algorithm, case, SIZES, seed=7, misaligned=misaligned)]
    hyper = hyperparameters(algorithm, case)
    run_op(algorithm, rows, hyper, impl)  # what was published before is a kernel's, NaNs too
    plain = [row.clone() for row in rows]
    nbytes = [-(-numel // 8) for numel in SIZES]
    holder = Row({})
    place(holder, "changed", torch.zeros(sum(nbytes), dtype=torch.uint8), misaligned)
    bits = holder["changed"].split(nbytes)
    for row, mask in zip(rows, bits, strict=True):
        row.tensors["changed"] = mask
    expected = [torch.zeros_like(mask) for mask in bits]
    derived = "out" in rows[0].tensors and rows[0]["out"].dtype != rows[0]["param"].dtype
    for step, rate in enumerate(RATES, 2):
        settings = hyper | {"lr": rate, "step": step}
        before = [published_before(row) for row in rows]
        run_op(algorithm, rows, settings, impl)
        run_op(algorithm, plain, settings, impl)
        assert_same(plain, rows)
        for i, row in enumerate(rows):
            expected[i] = union_of(expected[i], before[i], published(row), derived)
            wrong = (expected[i] ^ row["changed"]).nonzero().view(-1)
            if derived:
                nan = changed_mask(torch.zeros(SIZES[i]), (before[i].isnan() | published(row).isnan()).float())
                wrong = ((expected[i] ^ row["changed"]) & ~nan).nonzero().view(-1)
            assert not wrong.numel(), f"byte {int(wrong[0])} of {SIZES[i]} elements, step {step}, lr {rate}"
    assert_margins_intact([holder])


def impls() -> list[str]:
    return [*SETS, "reference"]


@each("algorithm", ["adam", "lion", "adagrad", "sgd"])
def test_bits_are_set_where_published_values_become_others(algorithm: str, every: bool) -> None:
    table = [
        (case, impl, number % 2 == 1) for number, case in enumerate(cases_of(algorithm, every)) for impl in impls()
    ]
    run_table(check_changed, ["case", "impl", "misaligned"], table, (algorithm,))


@each("impl", impls())
def test_nothing_and_everything(impl: str) -> None:
    """Without a rate no bit is set; where all values move, all are, but none behind the last element."""
    for numel in (1, 130, 1001):
        for dtype in (torch.float32, torch.bfloat16):
            param, grad = torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype)
            mask = torch.zeros(-(-numel // 8), dtype=torch.uint8)
            ops.sgd(param, grad, lr=0.0, changed=mask, impl=impl)
            assert not mask.any()
            ops.sgd(param, grad, lr=0.5, changed=mask, impl=impl)
            assert torch.equal(mask, changed_mask(torch.zeros(numel), torch.ones(numel)))
            ops.sgd(param, grad, lr=0.0, changed=mask, impl=impl)
            assert torch.equal(mask, changed_mask(torch.zeros(numel), torch.ones(numel)))


@each("impl", impls())
def test_few_bf16_values_change_at_a_small_rate(impl: str) -> None:
    """What the mask is for: the masters of all move, the upper halves of few do."""
    generator = torch.Generator().manual_seed(0)
    param = (torch.randn(100_000, generator=generator) * 0.02).bfloat16()
    remainder = torch.randint(-(1 << 15), 1 << 15, (100_000,), generator=generator).to(torch.int16)
    grad = torch.randn(100_000, generator=generator).bfloat16()
    moments, mask = torch.zeros(2, 100_000), torch.zeros(12_500, dtype=torch.uint8)
    before = param.clone()
    ops.adam(param, grad, *moments, lr=1e-6, step=1, remainder=remainder, changed=mask, impl=impl)
    assert torch.equal(mask, changed_mask(before, param))
    assert 0 < int(changed._bits_of(mask).sum()) < 10_000


def test_masks_are_checked() -> None:
    param, grad = torch.ones(9), torch.ones(9)
    for mask, error in [
        (torch.zeros(1, dtype=torch.uint8), "changed has 1 elements (shape (1,)); allowed: 2, one bit for each of 9"),
        (torch.zeros(2, dtype=torch.int8), "changed has dtype torch.int8; allowed: torch.uint8"),
        (param.view(torch.uint8)[:2], "share memory"),
        ([torch.zeros(2, dtype=torch.uint8)] * 2, "changed has 2 tensors, param has 1"),
    ]:
        with pytest.raises((ValueError, TypeError), match=re.escape(error)):
            ops.sgd(param, grad, lr=1.0, changed=mask)
    assert torch.equal(param, torch.ones(9))


def masks_of(numel: int) -> list[Tensor]:
    """Nothing, everything, few, about 16 in a block, many, and blocks of all kinds."""
    generator = torch.Generator().manual_seed(numel)
    shares = [0.0, 1.0, 0.03, 0.12, 0.5, 0.97]
    chance = torch.rand(numel, generator=generator)
    found = [changed_mask(torch.zeros(numel), (chance < share).float()) for share in shares]
    each_block = torch.tensor(shares)[torch.randint(len(shares), (-(-numel // 128),), generator=generator)]
    return [*found, changed_mask(torch.zeros(numel), (chance < each_block.repeat_interleave(128)[:numel]).float())]


def same(a: Packed, b: Packed) -> bool:
    parts = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a) if f.name != "numel"]
    return a.numel == b.numel and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in parts)


@each("numel", LENGTHS)
@each("dtype", DTYPES)
def test_what_is_packed_is_unpacked(numel: int, dtype: torch.dtype) -> None:
    """By native calls as by torch's operations, and bits behind the last element count for nothing."""
    after = torch.arange(numel).to(dtype) + 1
    for mask in masks_of(numel):
        packed = pack_changed(mask, after)
        assert same(packed, changed._pack(mask, after))
        if numel % 8:
            spoilt = mask.clone()
            spoilt[-1] |= 0x80
            assert same(packed, pack_changed(spoilt, after)) and same(packed, changed._pack(spoilt, after))
        chosen = changed._bits_of(mask)[:numel]
        for unpack in (unpack_changed, changed._unpack):
            out = torch.zeros(numel, dtype=dtype)
            unpack(packed, out)
            assert torch.equal(out, torch.where(chosen, after, 0))


def test_nans_keep_their_bits() -> None:
    words = torch.tensor([0x7FC1, -63, 0x7F81, 0], dtype=torch.int16)
    out = torch.zeros(4, dtype=torch.bfloat16)
    unpack_changed(pack_changed(torch.tensor([7], dtype=torch.uint8), words.view(torch.bfloat16)), out)
    assert out.view(torch.int16).tolist() == [0x7FC1, -63, 0x7F81, 0]


@each("unpack", [unpack_changed, changed._unpack])
def test_malformed_deltas_are_refused(unpack: object) -> None:
    """Whatever is wrong with one, nothing is written."""
    numel = 128 + 128 + 20
    mask = torch.zeros(-(-numel // 8), dtype=torch.uint8)
    mask[0], mask[16:20], mask[32:34] = 0b1011, 0xFF, 0x7F  # a list of 3, and bits of 32; the last block has 14
    good = pack_changed(mask, torch.ones(numel))
    assert good.counts.tolist() == [3, 32, 14] and good.places.numel() == 3 + 16 + 14

    def spoilt(name: str, at: int, value: int) -> Packed:
        part = getattr(good, name).clone()
        part[at] = value
        return dataclasses.replace(good, **{name: part})

    for bad in [
        spoilt("counts", 0, 2), spoilt("counts", 0, 128), spoilt("counts", 0, 255), spoilt("counts", 2, 20),
        spoilt("counts", 2, 21), spoilt("counts", 1, 31), spoilt("counts", 1, 15), spoilt("counts", 1, 0),
        spoilt("places", 0, 1), spoilt("places", 1, 0), spoilt("places", 2, 128), spoilt("places", 2, 255),
        spoilt("places", 3, 0xFE), spoilt("places", 10, 1), spoilt("places", 19 + 13, 20),
        dataclasses.replace(good, places=good.places[:-1]), dataclasses.replace(good, values=good.values[:-1]),
        dataclasses.replace(good, places=torch.cat([good.places, good.places[:1]])),
        dataclasses.replace(good, values=torch.cat([good.values, good.values[:1]])),
    ]:  # fmt: skip
        out = torch.zeros(numel)
        with pytest.raises(ValueError, match="packed is malformed"):
            unpack(bad, out)
        assert not out.any()
    # bits behind the end of the last block
    tail = pack_changed(torch.tensor([0xFF, 0xFF, 0x03], dtype=torch.uint8), torch.ones(19))
    places = tail.places.clone()
    places[2] = 0x0A
    with pytest.raises(ValueError, match="packed is malformed"):
        unpack(dataclasses.replace(tail, places=places), torch.zeros(19))


def test_other_dtypes_and_lengths_are_refused() -> None:
    good = pack_changed(torch.tensor([3], dtype=torch.uint8), torch.ones(4))
    for out, error in [
        (torch.zeros(5), "packed.numel=4"),
        (torch.zeros(4, dtype=torch.bfloat16), "packed.values has dtype"),
        (torch.zeros(2, 2), "out has shape (2, 2); allowed: one dimension"),
    ]:
        with pytest.raises((ValueError, TypeError), match=re.escape(error)):
            unpack_changed(good, out)
    with pytest.raises(ValueError, match="mask has 2 elements"):
        pack_changed(torch.zeros(2, dtype=torch.uint8), torch.ones(4))


# With words of 1, 2, 4 and 8 bytes rows of 16, 8, 4 and 2; 256 rows are taken together, 65536 words by a thread.
SUMS = (0, 1, 15, 2047, 2048, 2049, 4096 + 7, (1 << 16) + 2048 + 3, (1 << 17) + 1)
SUMMED = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex128)


@each("dtype", SUMMED)
def test_the_native_sum_is_that_of_torch(dtype: torch.dtype) -> None:
    """On random bits and on the largest words, from any number on, off the alignment of vectors, part by part."""
    generator = torch.Generator().manual_seed(0)
    nbytes = torch.empty((), dtype=dtype).itemsize
    for numel in SUMS:
        some = torch.randint(256, (nbytes * (numel + 1),), generator=generator, dtype=torch.uint8)
        for bits in (some, torch.full_like(some, 255)):
            flat = (bits & 1).bool() if dtype == torch.bool else bits.view(dtype)
            for tensor, first in ((flat[:numel], 0), (flat[1:], 3), (flat[1:], (1 << 63) + 5)):
                words = tensor.view(changed._WORDS[nbytes])
                assert weighted_sum(tensor, first) == changed._weighted_sum(words, first)
                at = min(numel, 2048) * words.numel() // max(numel, 1)
                both = weighted_sum(words[:at], first) + weighted_sum(words[at:], first + at)
                assert weighted_sum(tensor, first) == both % (1 << 64)


def test_the_sum_is_what_it_says() -> None:
    words = [3, 65535, 0, 1 << 15]
    expected = sum((10 + place + 1) * word for place, word in enumerate(words))
    flat = torch.tensor([word - (word >> 15 << 16) for word in words], dtype=torch.int16)
    assert weighted_sum(flat, 10) == changed._weighted_sum(flat, 10) == expected
