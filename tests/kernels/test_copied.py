"""Lists that only move are torch's: which of its launches ran, and that bits and versions are those of our kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_cases import same_bits, spread_values
from tables import each
from torch import Tensor

from zerokern.kernels import flat

SHAPES = ((3, 5), (7,), (0, 4), (2, 3, 4), (1,), (129,))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of torch, as on a GPU."""
    names: list[str] = []
    for name in ("_chunk_cat", "_foreach_copy_"):
        call = getattr(torch, name)

        def called(*given: Any, name: str = name, call: Any = call, **more: Any) -> Any:
            names.append(name)
            return call(*given, **more)

        monkeypatch.setattr(torch, name, called)
    monkeypatch.setattr(flat, "_is_gpu", lambda device: True)
    return names


def tensors_of(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(7)
    return [spread_values(torch.Size(shape).numel(), numbers).to(dtype).view(shape) for shape in shapes]


def offsets_of(tensors: list[Tensor], gap: int) -> list[int]:
    return [0, *itertools.accumulate(one.numel() + gap for one in tensors)][:-1]


@each("dtype", DTYPES)
def test_a_list_of_one_dtype_is_one_launch_of_torch_each_way(dtype: torch.dtype, ran: list[str]) -> None:
    """`_chunk_cat` would pin memory and ask events, which breaks off a capture of another thread, and queue an upload
    of its table behind those of the copy engine."""
    tensors = tensors_of(dtype)
    bucket = torch.full((sum(map(Tensor.numel, tensors)) + 3,), 77.0, dtype=dtype)
    flattener = flat.Flattener(tensors, dtype)
    expected = bucket.clone()
    flat.flatten(tensors, expected, impl="reference")
    ran.clear()
    flattener.flatten(tensors, bucket)
    assert ran == ["_foreach_copy_"] and same_bits(bucket, expected)
    back = [torch.full_like(one, 77.0) for one in tensors]
    flattener.unflatten(bucket, back)
    assert ran == ["_foreach_copy_"] * 2
    assert all(map(same_bits, back, tensors))


def test_what_lies_between_spans_is_left_alone(ran: list[str]) -> None:
    """Each run of spans side by side is a launch; many of them are one launch of ours."""
    for shapes, launches in ((SHAPES, 5), (SHAPES * 2, 0)):
        tensors = tensors_of(torch.bfloat16, shapes)
        offsets = offsets_of(tensors, 2)
        buckets = [torch.full((offsets[-1] + 200,), 77.0, dtype=torch.bfloat16) for _ in range(2)]
        ran.clear()
        flat.flatten(tensors, buckets[0], offsets=offsets)
        assert ran == ["_foreach_copy_"] * launches
        flat.flatten(tensors, buckets[1], offsets=offsets, impl="reference")
        assert same_bits(*buckets)


@each("more", ["scale", "factor", "stats", "dtype", "bucket dtype", "strided", "in place", "asked for"])
def test_what_is_more_than_a_copy_is_ours(more: str, ran: list[str]) -> None:
    tensors = tensors_of(torch.float32)
    settings: dict[str, Any] = {}
    bucket = torch.zeros(sum(map(Tensor.numel, tensors)))
    if more == "scale":
        settings["scale"] = 0.5
    elif more == "factor":
        settings["scale"] = torch.ones(1)
    elif more == "stats":
        settings["stats"] = torch.zeros(2, dtype=torch.float64)
    elif more == "dtype":
        tensors[1] = tensors[1].bfloat16()
    elif more == "bucket dtype":
        bucket = bucket.bfloat16()
    elif more == "strided":
        tensors[0] = torch.ones(5, 3).t()
    elif more == "in place":
        tensors[0] = bucket[:15].view(3, 5)
    else:
        settings["impl"] = "reference"
    flat.flatten(tensors, bucket, **settings)
    assert ran == []
    flat.unflatten(bucket, tensors, **settings)
    assert ran == []


def test_autograd_hears_of_it_what_it_hears_of_ours(ran: list[str]) -> None:
    """Nothing from a `Flattener`, once from a call."""
    tensors = tensors_of(torch.float32)
    bucket = torch.zeros(sum(map(Tensor.numel, tensors)))
    flattener = flat.Flattener(tensors, torch.float32)
    flattener.flatten(tensors, bucket)
    flattener.unflatten(bucket, tensors)
    assert len(ran) == 2 and bucket._version == 0 and {one._version for one in tensors} == {0}
    weights = [torch.nn.Parameter(torch.zeros_like(one)) for one in tensors]
    flat.flatten(weights, bucket)
    flat.unflatten(bucket, weights)
    assert len(ran) == 4 and bucket._version == 1 and {one._version for one in weights if one.numel()} == {1}


def test_a_torch_that_lacks_it_has_ours(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(torch.float32)
    monkeypatch.delattr(torch, "_foreach_copy_")
    ran.clear()
    bucket = torch.zeros(sum(map(Tensor.numel, tensors)))
    flat.flatten(tensors, bucket)
    back = [torch.zeros_like(one) for one in tensors]
    flat.unflatten(bucket, back)
    assert ran == [] and same_bits(bucket, torch.cat([one.view(-1) for one in tensors]))
    assert all(map(same_bits, back, tensors))


@each("dtype", DTYPES)
def test_memory_of_inference_mode_is_written_outside_of_it(dtype: torch.dtype, ran: list[str]) -> None:
    """torch raised after the launch, with the bucket written."""
    tensors = tensors_of(dtype)
    ran.clear()
    with torch.inference_mode():
        bucket = torch.zeros(sum(map(Tensor.numel, tensors)), dtype=dtype)
        back = [torch.zeros_like(one) for one in tensors]
    flattener = flat.Flattener(tensors, dtype)
    flattener.flatten(tensors, bucket)
    flattener.unflatten(bucket, back)
    assert ran == ["_foreach_copy_"] * 2 and all(map(same_bits, back, tensors))
    flat.flatten(tensors, bucket)
    flat.unflatten(bucket, back)
    with torch.inference_mode():
        flattener.flatten(back, bucket)
        flattener.unflatten(bucket, tensors)
    assert len(ran) == 6 and all(map(same_bits, back, tensors))
