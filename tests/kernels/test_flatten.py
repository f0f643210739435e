"""Lists of tensors into a bucket and back: any views, cast and scale, the sum of squares of what was written."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from kernel_cases import every_impl, same_bits, spread_values
from tables import each, pairwise
from torch import Tensor

from zerokern.kernels import checks, flat, ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))
SIZES = (5, 0, 1, 128, 1001, 4099)
GAP = 3


def tensors_of(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [spread_values(numel, generator).to(dtype) for numel in sizes]


def views() -> dict[str, Tensor]:
    """Views of every kind, some of them over more than one tile of the strided kernel."""

    def values(*shape: int) -> Tensor:
        return spread_values(math.prod(shape), torch.Generator().manual_seed(sum(shape))).view(shape)

    return {
        "transposed": values(70, 40).t(),
        "columns": values(9, 50)[:, 3:40],
        "one column": values(100, 3)[:, 1],
        "every third": values(301)[::3],
        "expanded": values(7, 1).expand(7, 11),
        "one number": values(1).expand(77),
        "channels last": values(4, 6, 3, 3).contiguous(memory_format=torch.channels_last),
        "permuted": values(3, 4, 5, 6).permute(2, 0, 3, 1),
        "six dimensions": values(2, 3, 2, 3, 2, 3).permute(5, 3, 1, 4, 2, 0),
        "bf16 transposed": values(33, 65).bfloat16().t(),
        "nothing": values(4, 4)[:, :0].t(),
        "a scalar": values(1)[0],
    }


def back_to_back(tensors: list[Tensor]) -> list[int]:
    return [0, *itertools.accumulate(t.numel() + GAP for t in tensors)][:-1]


def bucket_for(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Full of a value that nothing else has; gaps must keep it."""
    return torch.full((sum(t.numel() + GAP for t in tensors) + 1,), 77.0, dtype=dtype)


def like(tensors: list[Tensor]) -> list[Tensor]:
    """Targets of the same shapes and strides in memory of their own, full of NaN; what is expanded is made whole."""
    return [
        torch.full(t.shape, math.nan, dtype=t.dtype)
        if 0 in t.stride()
        else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(math.nan)
        for t in tensors
    ]


@pairwise
@each("source, target", PAIRS)
@every_impl
def test_there_and_back_has_the_bits_of_the_reference(impl: str, source: torch.dtype, target: torch.dtype) -> None:
    tensors = tensors_of(SIZES, source)
    offsets = back_to_back(tensors)
    bucket, expected = bucket_for(tensors, target), bucket_for(tensors, target)
    flat.flatten(tensors, bucket, offsets=offsets, scale=0.3, impl=impl)
    flat.flatten(tensors, expected, offsets=offsets, scale=0.3, impl="reference")
    assert same_bits(bucket, expected)
    back, expected_back = like(tensors), like(tensors)
    flat.unflatten(bucket, back, offsets=offsets, scale=-2.0, impl=impl)
    flat.unflatten(bucket, expected_back, offsets=offsets, scale=-2.0, impl="reference")
    for got, want in zip(back, expected_back, strict=True):
        assert same_bits(got, want)


@each("name", views())
@every_impl
def test_any_view_there_and_back(impl: str, name: str) -> None:
    view = views()[name]
    bucket = torch.full((view.numel() + 2,), 77.0)
    flat.flatten([view], bucket, offsets=[1], impl=impl)
    assert same_bits(bucket[1:-1], view.float().reshape(-1))
    assert (bucket[0], bucket[-1]) == (77.0, 77.0)
    (back,) = like([view])
    flat.unflatten(bucket, [back], offsets=[1], scale=2.0, impl=impl)
    assert same_bits(back, (view.float() * 2.0).to(view.dtype))


@every_impl
def test_what_lies_between_the_elements_of_a_strided_target_is_left_alone(impl: str) -> None:
    matrix = torch.full((40, 70), 77.0)
    flat.unflatten(torch.zeros(80 + 33), [matrix[:, 5:7], matrix[3, 9::2][:30], matrix[5:8, 10].t()], impl=impl)
    touched = torch.zeros(40, 70, dtype=torch.bool)
    touched[:, 5:7] = touched[3, 9:69:2] = touched[5:8, 10] = True
    assert (matrix[touched] == 0.0).all() and (matrix[~touched] == 77.0).all()


@every_impl
def test_a_mixed_list_in_one_call(impl: str) -> None:
    tensors = [*tensors_of((5, 300), torch.bfloat16), *views().values(), *tensors_of((17, 0), torch.float32)]
    bucket = torch.zeros(sum(t.numel() for t in tensors), dtype=torch.bfloat16)
    flat.flatten(tensors, bucket, impl=impl)
    assert same_bits(bucket, torch.cat([t.float().reshape(-1) for t in tensors]).bfloat16())


@pairwise
@each("target", DTYPES)
@every_impl
def test_stats_are_of_what_was_written(impl: str, target: torch.dtype) -> None:
    tensors = [*tensors_of((1000, 7), torch.float32), views()["transposed"]]
    bucket, stats = bucket_for(tensors, target), torch.full((2,), math.nan, dtype=torch.float64)
    flat.flatten(tensors, bucket, scale=0.3, stats=stats, impl=impl)
    written = bucket[: sum(t.numel() for t in tensors)].double()
    assert stats[0].item() == pytest.approx(written.square().sum().item(), rel=1e-13)
    assert stats[1].item() == 0.0
    back = like(tensors)
    flat.unflatten(bucket, back, scale=0.7, stats=stats, impl=impl)
    assert stats[0].item() == pytest.approx(sum(t.double().square().sum().item() for t in back), rel=1e-13)


@every_impl
def test_one_element_that_is_not_finite_shows(impl: str) -> None:
    places = ((1, 0, math.nan), (2100, 2099, math.inf), (70, 0, -math.inf), (2100, 0, -math.inf), (70, 35, math.nan))
    for numel, place, bad in places[: 3 if impl == "triton" else None]:  # that one is interpreted
        tensor = torch.ones(numel)
        tensor[place] = bad
        for view in (tensor, tensor.view(-1, 2).t() if numel > 1 else tensor):
            bucket, stats = torch.zeros(numel + 5), torch.zeros(2, dtype=torch.float64)
            flat.flatten([torch.ones(5), view], bucket, stats=stats, impl=impl)
            assert not math.isfinite(stats[0].item()) and stats[1].item() == 1.0
            assert same_bits(bucket[5:], view.reshape(-1))


@every_impl
def test_what_overflows_in_the_cast_counts_as_not_finite(impl: str) -> None:
    bucket, stats = torch.zeros(3, dtype=torch.float16), torch.zeros(2, dtype=torch.float64)
    flat.flatten([torch.tensor([1.0, 65504.0, 65520.0])], bucket, stats=stats, impl=impl)
    assert stats.tolist() == [math.inf, 1.0]


@every_impl
def test_nothing_to_move_is_a_sum_of_zero(impl: str) -> None:
    for tensors in ([], [torch.empty(0)], [torch.empty(3, 0).t(), torch.empty(0, dtype=torch.bfloat16)]):
        bucket, stats = torch.full((4,), 77.0), torch.full((2,), math.nan, dtype=torch.float64)
        flat.flatten(tensors, bucket, stats=stats, impl=impl)
        assert stats.tolist() == [0.0, 0.0]
        stats.fill_(math.nan)
        flat.unflatten(bucket, tensors, stats=stats, impl=impl)
        assert stats.tolist() == [0.0, 0.0] and (bucket == 77.0).all()


@every_impl
def test_scale_may_be_a_tensor(impl: str) -> None:
    tensors = [*tensors_of((300,), torch.float32), views()["columns"]]
    by_number, by_tensor = bucket_for(tensors, torch.bfloat16), bucket_for(tensors, torch.bfloat16)
    flat.flatten(tensors, by_number, scale=0.3, impl=impl)
    flat.flatten(tensors, by_tensor, scale=torch.tensor([0.3]), impl=impl)
    assert same_bits(by_number, by_tensor)


@every_impl
def test_tensors_that_are_their_own_spans_are_scaled_in_place(impl: str) -> None:
    bucket = torch.arange(10.0)
    flat.flatten([bucket[:4], bucket[4:10].view(2, 3)], bucket, scale=2.0, impl=impl)
    assert same_bits(bucket, torch.arange(10.0) * 2.0)
    flat.unflatten(bucket, [bucket[:4], bucket[4:10].view(2, 3)], scale=0.5, impl=impl)
    assert same_bits(bucket, torch.arange(10.0))


@every_impl
def test_parameters_that_require_gradients(impl: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4, 2).t())]
    bucket = torch.zeros(11)
    flat.flatten(parameters, bucket, impl=impl)
    flat.unflatten(bucket, parameters, scale=3.0, impl=impl)
    assert all((p == 3.0).all() for p in parameters) and not bucket.requires_grad


@every_impl
def test_a_flattener_follows_other_tensors_and_other_buckets(impl: str) -> None:
    flattener = flat.Flattener([torch.empty(5), torch.empty(4, 3).t()], torch.float32, impl=impl)
    for seed in range(3):
        tensors = [torch.full((5,), float(seed)), torch.full((4, 3), float(-seed)).t()]
        bucket, stats = torch.full((flattener.numel,), math.nan), torch.zeros(2, dtype=torch.float64)
        flattener.flatten(tensors, bucket, stats=stats)
        assert bucket.tolist() == [float(seed)] * 5 + [float(-seed)] * 12
        assert stats.tolist() == [17.0 * seed * seed, 0.0]
        flattener.unflatten(bucket, tensors, scale=2.0)
        assert tensors[1].tolist() == [[-2.0 * seed] * 4] * 3


def test_stats_of_the_cpu_are_its_sum_of_squares() -> None:
    tensors, bucket, stats = (
        tensors_of(SIZES, torch.float32),
        torch.zeros(sum(SIZES)),
        torch.zeros(2, dtype=torch.float64),
    )
    flat.flatten(tensors, bucket, stats=stats)
    assert stats[0].item() == ops.sumsq(tensors)


def test_what_a_graph_may_launch_again_stays_when_another_kernel_comes() -> None:
    """A table is known by its kernel: another one does not take its place."""
    launched: list[Any] = []

    class Table:
        def __init__(self, *arguments: Any) -> None:
            pass

        def run(self, *arguments: Any) -> None:
            launched.append(self)

    class Other(Table):
        pass

    flattener, bucket = flat.Flattener([torch.ones(2)], torch.float32), torch.zeros(2)
    for kind in (Table, Other, Table):
        flattener._launch(kind, True, [torch.ones(2)], bucket, 1.0, None)
    assert launched[0] is launched[2] and launched[1] is not launched[0]


def test_what_lies_apart_by_its_addresses_is_what_the_long_check_allows() -> None:
    """Random lists in one memory: the quick answer is yes only where nothing is refused, and for most of these."""
    generator, agreed, refused = random.Random(0), 0, 0
    memory = torch.zeros(4096)
    for _ in range(600):
        sizes = [generator.randint(0, 40) for _ in range(generator.randint(1, 6))]
        begins = [generator.randint(0, 3000 if generator.random() < 0.8 else 300) for _ in sizes]
        tensors = [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        start = generator.choice([0, 100, 3500])
        bucket = memory[start : start + sum(sizes)]
        spans = checks.SpanList(tensors, None)
        into = generator.random() < 0.5
        quick = spans._lie_apart(into, tensors, bucket)
        spans._plain = False
        try:
            spans.check_memory(into, tensors, bucket)
        except ValueError:
            assert not quick
            refused += 1
        else:
            agreed += quick
    assert agreed > 200 and refused > 50
