"""How state is cut into records: every element once, nothing larger than a slot, cuts where the formats allow them."""

from __future__ import annotations

import random

import pytest
from tables import each

from zerokern.io.pieces import ALIGNMENT, PAGE, Width, columns, plan

FP32_ADAM = (Width(4, 1), Width(4, 1))
INT8_SPLIT8 = (Width(1, 1), Width(4, 128), Width(1, 1), Width(4, 128), Width(1, 1))


def random_case(seed: int) -> tuple[list[int], list[tuple[Width, ...]], int]:
    draw = random.Random(seed)
    numels = [draw.choice([0, 1, 10, 127, 128, 129, 1000, draw.randrange(300_000)]) for _ in range(40)]
    return numels, [draw.choice([FP32_ADAM, INT8_SPLIT8, ()]) for _ in numels], draw.choice([64, 100, 300]) << 10


@each("seed", range(20))
def test_every_element_has_one_place_of_its_own(seed: int) -> None:
    numels, widths, slot_nbytes = random_case(seed)
    covered = [0] * len(numels)
    for segments, nbytes in plan(numels, widths, slot_nbytes):
        assert nbytes <= slot_nbytes and nbytes % PAGE == 0
        end = 0
        for segment in segments:
            assert segment.offset >= end and segment.offset % ALIGNMENT == 0
            assert segment.start == covered[segment.param] and segment.start % 128 == 0
            assert segment.numel > 0
            covered[segment.param] += segment.numel
            end = segment.offset + columns(widths[segment.param], segment.numel)[1]
        assert nbytes - PAGE < end <= nbytes
    assert covered == [numel if mine else 0 for numel, mine in zip(numels, widths, strict=True)]


@each("widths", [FP32_ADAM, INT8_SPLIT8])
def test_records_of_a_large_parameter_are_full(widths: tuple[Width, ...]) -> None:
    *full, _ = plan([10_000_000], [widths], 1 << 20)
    per_parameter = sum(width.nbytes / width.per for width in widths)
    assert all(len(segments) == 1 and nbytes >= (1 << 20) - PAGE for segments, nbytes in full)
    assert sum(segments[0].numel * per_parameter for segments, _ in full) >= 0.99 * len(full) * (1 << 20)


def test_a_slot_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="a slot of 512 B cannot hold the state of 128 elements"):
        plan([1000], [FP32_ADAM], 512)


def test_a_model_of_seven_billion_parameters() -> None:
    widths = (*FP32_ADAM, Width(2, 1))
    pieces = plan([875_000_000] * 8, [widths] * 8, 8 << 20)
    assert sum(segment.numel for segments, _ in pieces for segment in segments) == 7_000_000_000
    assert sum(nbytes for _, nbytes in pieces) == pytest.approx(10 * 7e9, rel=1e-3)
