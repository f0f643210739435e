"""The partition against its promises, for any sizes; and against a search for what it could have done better."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerokern.core.units import BLOCK
from zerokern.zero.partition import Bucket, Member, Piece, partition, work_of

SIZES = st.one_of(st.integers(0, 3), st.integers(1, 700), st.sampled_from([127, 128, 129, 4096, 65_537]))
MEMBERS = st.builds(
    Member,
    numel=SIZES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    unit=st.integers(0, 2),
    trainable=st.booleans(),
    work=st.sampled_from([0, 0, 1, 5]),
)
ORDERED = st.lists(MEMBERS, max_size=12).map(lambda members: sorted(members, key=lambda member: member.unit))
CAPS = st.one_of(st.none(), st.integers(1, 5000))


def promises(members: list[Member], buckets: list[Bucket], world: int, cap: int | None) -> list[str]:
    """The promises that are broken."""
    broken = []
    placed = [place.param for bucket in buckets for place in bucket.places]
    if sorted(placed) != list(range(len(members))):
        broken.append("each parameter is in one bucket, once")
    for bucket in buckets:
        ends = sorted((place.offset, place.offset + place.numel) for place in bucket.places)
        if any(left[1] > right[0] for left, right in itertools.pairwise(ends)):
            broken.append("parameters do not overlap")
        if ends and ends[-1][1] > bucket.padded_numel:
            broken.append("parameters are inside of their bucket")
        if bucket.shard_numel % BLOCK or bucket.padded_numel != world * bucket.shard_numel:
            broken.append("shards are equal, and whole blocks")
        kinds = {(members[p.param].unit, members[p.param].dtype, members[p.param].trainable) for p in bucket.places}
        if kinds != {(bucket.unit, bucket.dtype, bucket.trainable)}:
            broken.append("a bucket never crosses a unit, a dtype, or what is trained")
        whole = {members[p.param].work > 0 for p in bucket.places}
        if len(whole) > 1:
            broken.append("what is updated whole has buckets of its own")
        if True in whole and any(
            pieces.numel != members[pieces.param].numel for r in range(world) for pieces in bucket.pieces(r)
        ):
            broken.append("what is updated whole is not cut")
        if (
            whole == {False}
            and cap is not None
            and len(bucket.places) > 1
            and sum(place.numel for place in bucket.places) > cap
        ):
            broken.append("a bucket of several parameters is not above its cap")
        if any(place.numel != members[place.param].numel or place.start for place in bucket.places):
            broken.append("a parameter is whole in its bucket")
        broken += broken_cuts(bucket, world)
    return broken


def broken_cuts(bucket: Bucket, world: int) -> list[str]:
    broken, covered = [], dict.fromkeys((place.param for place in bucket.places), 0)
    where = {place.param: place.offset for place in bucket.places}
    for rank in range(world):
        for piece in bucket.pieces(rank):
            if piece.start != covered[piece.param]:
                broken.append("pieces of a parameter follow one another, rank by rank")
            if piece.start % BLOCK:
                broken.append("a cut is a multiple of a block from element 0")
            if piece.offset + rank * bucket.shard_numel != where[piece.param] + piece.start:
                broken.append("a piece lies where its parameter does")
            if piece.offset < 0 or piece.offset + piece.numel > bucket.shard_numel or piece.numel <= 0:
                broken.append("a piece is inside of its rank's shard")
            covered[piece.param] += piece.numel
    if any(covered[place.param] != place.numel for place in bucket.places):
        broken.append("pieces cover their parameter")
    return broken


@settings(max_examples=300, deadline=None)
@given(ORDERED, st.sampled_from([1, 2, 3, 4, 8, 64]), CAPS)
def test_every_promise_for_any_sizes(members: list[Member], world: int, cap: int | None) -> None:
    assert promises(members, partition(members, world, cap), world, cap) == []


@settings(max_examples=100, deadline=None)
@given(ORDERED, st.sampled_from([2, 3, 8]), CAPS)
def test_padding_is_at_cuts_and_at_the_end_alone(members: list[Member], world: int, cap: int | None) -> None:
    for bucket in partition([replace(member, work=0) for member in members], world, cap):
        spans = sorted((place.offset, place.offset + place.numel) for place in bucket.places if place.numel)
        inner = [right[0] - left[1] for left, right in itertools.pairwise(spans)]
        assert sum(gap > 0 for gap in inner) <= world - 1, "a gap without a cut"
        assert all(gap < BLOCK for gap in inner)
        assert not spans or spans[0][0] == 0
        # what one more block for each shard, and one gap at each cut, explain
        assert bucket.padding < 2 * world * BLOCK + (world - 1) * BLOCK


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_padding_is_small_where_parameters_are_not(world: int) -> None:
    """Below 0.1 % where the mean parameter has 64 Ki elements: here 12 shapes of a GPT of odd width."""
    width = 333
    shapes = [width * width, 4 * width * width, 4 * width * width, 3 * width * width, width, width]
    members = [Member(numel, "float32", unit) for unit in range(6) for numel in shapes]
    assert sum(member.numel for member in members) / len(members) >= 1 << 16
    buckets = partition(members, world, 8 << 20)
    held = sum(bucket.padded_numel for bucket in buckets)
    assert sum(bucket.padding for bucket in buckets) < held / 1000


Shapes = list[tuple[int, int]]
LLAMA_8B: Shapes = 32 * [*[(4096, 4096)] * 2, *[(1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336)]
ATTENTION_V3 = [(1536, 7168), (128 * 192, 1536), (576, 7168), (128 * 256, 512), (7168, 128 * 128)]
EXPERT_V3 = [(2048, 7168), (2048, 7168), (7168, 2048)]
DEEPSEEK_V3: Shapes = (
    61 * ATTENTION_V3 + 3 * [(18432, 7168), (18432, 7168), (7168, 18432)] + 58 * 257 * EXPERT_V3
)  # fmt: skip
GPT_124M: Shapes = 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]


def imbalance(members: Sequence[Member], buckets: Sequence[Bucket]) -> float:
    """How much more work than the average the rank with most has in updates of whole matrices."""
    loads: dict[int, int] = {}
    for bucket in buckets:
        for rank in range(bucket.world):
            mine = sum(members[piece.param].work for piece in bucket.pieces(rank))
            loads[rank] = loads.get(rank, 0) + mine
    return max(loads.values()) * len(loads) / sum(loads.values()) - 1.0


def balance(shapes: Shapes, world: int) -> tuple[float, float]:
    """The padding that is sent, as a part of all, and the imbalance of what ranks compute."""
    members = [Member(rows * columns, "bfloat16", work=work_of((rows, columns))) for rows, columns in shapes]
    buckets = partition(members, world, 16 << 20)
    assert promises(members, buckets, world, 16 << 20) == []
    numel = sum(member.numel for member in members)
    return sum(bucket.padded_numel for bucket in buckets) / numel - 1, imbalance(members, buckets)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_whole_matrices_of_a_small_gpt_are_even(world: int) -> None:
    padding, uneven = balance(GPT_124M, world)
    assert padding < 0.01 and uneven < 0.03


@pytest.mark.parametrize("world", [8, 16, 32])
def test_whole_matrices_of_llama_8b_are_even(world: int) -> None:
    assert balance(LLAMA_8B, world) == (0, 0)


def least_uneven(shapes: Shapes, world: int) -> float:
    """The imbalance below which no assignment of whole matrices comes, whatever it sends.

    Of the `several * world + 1` matrices with most work some rank has `several + 1`, of which none has less than the
    last of them.
    """
    works = sorted(map(work_of, shapes), reverse=True)
    severals = range(-(-len(works) // world))
    bound = max((several + 1) * works[several * world] for several in severals)
    return max(bound * world / sum(works) - 1, 0.0)


@pytest.mark.parametrize("world, said", [(8, 0.0), (16, 0.0), (32, 0.0), (64, 0.057), (128, 0.057), (256, 1.11)])
def test_no_owners_of_whole_matrices_of_llama_8b_are_more_even(world: int, said: float) -> None:
    """The rows of docs/muon.md: where more than 5 % are left, it is the least that some rank must have."""
    least = least_uneven(LLAMA_8B, world)
    assert balance(LLAMA_8B, world)[1] == pytest.approx(least) and least == pytest.approx(said, rel=0.005)


def test_the_bound_is_that_of_all_assignments_of_a_few() -> None:
    """Compared with the best of all of them."""
    works = {(2, 2): 24, (2, 4): 40, (4, 4): 192}
    assert {shape: work_of(shape) for shape in works} == works
    for shapes, world in (([(4, 4)] * 3 + [(2, 2)] * 2, 2), ([(4, 4), (2, 4), (2, 4)], 3), ([(2, 2)] * 5, 3)):
        owners = itertools.product(range(world), repeat=len(shapes))
        loads = (
            [sum(works[s] for s, o in zip(shapes, own, strict=True) if o == r) for r in range(world)] for own in owners
        )
        best = min(map(max, loads)) * world / sum(works[shape] for shape in shapes) - 1
        assert 0 <= least_uneven(shapes, world) <= best + 1e-9
    assert least_uneven([(2, 2)] * 5, 3) == pytest.approx(0.2)


@pytest.mark.slow  # 12 s: 45,000 matrices
@pytest.mark.parametrize(
    "world, most, sent", [(8, 0.005, 0.001), (64, 0.04, 0.003), (128, 0.05, 0.006), (256, 0.05, 0.018)]
)
def test_whole_matrices_of_deepseek_v3_are_even(world: int, most: float, sent: float) -> None:
    """At 256 ranks the 61 widest matrices are on 61 of them, which have fewer elements for that."""
    padding, uneven = balance(DEEPSEEK_V3, world)
    assert least_uneven(DEEPSEEK_V3, world) == 0 and padding < sent and uneven < most


def test_a_rank_with_a_wide_matrix_has_fewer_elements_where_few_more_are_sent_for_that() -> None:
    """One of 8 ranks has the wide one, whose elements are as many as those of eight others and whose work is more."""
    shapes = [(1024, 1024), *[(128, 1024)] * 3200]
    padding, uneven = balance(shapes, 8)
    more = work_of((1024, 1024)) - 8 * work_of((128, 1024))
    assert 7 * more / sum(map(work_of, shapes)) > 0.1, "with as many elements on each rank"
    assert uneven <= 0.05 and 0 < padding < 1 / 32


def test_what_is_left_over_shares_a_bucket_with_as_many_others_as_make_it_even() -> None:
    members = [Member(rows * columns, "float32", work=work_of((rows, columns))) for rows, columns in GPT_124M]
    buckets = partition(members, 8, 1)
    assert sorted(len(bucket.places) for bucket in buckets) == [8, 8, 8, 8, 16]
    assert all(bucket.padding == 0 for bucket in buckets)
    assert [bucket.places[0].param for bucket in buckets] != [] and buckets == partition(members, 8, 1)


def test_a_broken_promise_is_found() -> None:
    members = [Member(200, "float32"), Member(56, "float32")]
    sound = Bucket(0, 0, "float32", True, 2, 128, (Piece(0, 0, 200, 0), Piece(1, 0, 56, 200)))
    assert promises(members, [sound], 2, None) == []
    shifted = Bucket(0, 0, "float32", True, 2, 128, (Piece(1, 0, 56, 0), Piece(0, 0, 200, 56)))
    assert promises(members, [shifted], 2, None) == ["a cut is a multiple of a block from element 0"]
    overlapping = Bucket(0, 0, "float32", True, 2, 128, (Piece(0, 0, 200, 0), Piece(1, 0, 56, 199)))
    assert "parameters do not overlap" in promises(members, [overlapping], 2, None)
    assert promises(members, [sound], 2, 100) == ["a bucket of several parameters is not above its cap"]
