"""What the GPU's flatten and sums promise beyond the ops: orders of addition, alignment, tables, far addresses."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import same_bits
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from zerokern.kernels import flat, ops, reference, reference_device
from zerokern.kernels.checks import SpanList
from zerokern.kernels.dispatch import implementation
from zerokern.kernels.triton import sumsq
from zerokern.kernels.triton import upload as uploading
from zerokern.kernels.triton.bucket import BucketTable
from zerokern.kernels.triton.codecs import TYPES
from zerokern.kernels.triton.flatten import move_rows
from zerokern.kernels.triton.rows import NUM_WARPS, TILE_ROWS, row_width, sum_columns
from zerokern.kernels.triton.strided import merged, move_strided, strided_rows
from zerokern.kernels.triton.sumsq import SumsqTable

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = reference.SUMSQ_CHUNK
FAR = 1 << 33


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of one magnitude, so that every addition rounds."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype).to(DEVICE)


def addresses(*tensors: Tensor) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], device=DEVICE)


def device_sumsq(*tensors: Tensor) -> float:
    out = torch.full((1,), math.nan, dtype=torch.float64, device=DEVICE)
    sumsq.sumsq(tensors, out)
    return out.item()


def launches_of_reference(tensors: list[Tensor], written: list[Tensor], itemsize: int) -> float:
    """One launch for each dtype of the tensors, added in order."""
    total = 0.0
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        chosen = [w.cpu() for t, w in zip(tensors, written, strict=True) if t.dtype == dtype]
        total += reference_device.moved_sumsq(chosen, max(dtype.itemsize, itemsize))
    return total


@each("dtype, most", [(torch.float32, 3000), (torch.bfloat16, CHUNK + 8), (torch.float16, 3000)])
def test_a_sum_has_the_bits_of_its_reference(dtype: torch.dtype, most: int) -> None:
    tensors = [values(numel, dtype) for numel in (5, 0, most, 64, 1, 1100, 2048)]
    assert device_sumsq(*tensors) == reference_device.sumsq([t.cpu() for t in tensors])


def test_one_chunk_has_the_bits_of_the_cpu() -> None:
    for numel in (1, 64, 1024, 3000):
        tensor = values(numel)
        assert device_sumsq(tensor) == ops.sumsq([tensor.cpu()])


@triton.jit
def add_up(out, partials, count):
    tl.store(out, sum_columns(partials, count))


@each("count", [0, 1, 1023, 1024, 1025, 3000])
def test_any_number_of_partial_sums(count: int) -> None:
    partials, out = values(count).double(), torch.full((1,), math.nan, dtype=torch.float64, device=DEVICE)
    add_up[(1,)](out, partials, count)
    assert out.item() == reference_device.columns(partials.tolist())


def test_dtypes_are_added_in_the_order_in_which_they_appear() -> None:
    tensors = [values(300, dtype) for dtype in (*DTYPES[::-1], *DTYPES)]
    assert device_sumsq(*tensors) == reference_device.sumsq([t.cpu() for t in tensors])


@each("dtype", DTYPES)
def test_alignment_does_not_show_in_a_sum(dtype: torch.dtype) -> None:
    tensor = values(1301, dtype)
    shifted = [torch.empty(1301 + i, dtype=dtype, device=DEVICE)[i:].copy_(tensor) for i in (1, 3)]
    assert {device_sumsq(t) for t in shifted} == {device_sumsq(tensor)}
    assert device_sumsq(*shifted, tensor) == reference_device.sumsq([tensor.cpu()] * 3)


def test_a_table_runs_again_and_again() -> None:
    x, y = values(300), values(70)
    out = torch.full((3,), 77.0, dtype=torch.float64, device=DEVICE)
    table = SumsqTable(DEVICE, [300, 70], torch.float32)
    for factor in (1.0, 3.0):
        x.mul_(factor)
        table.run(addresses(x, y), out, 1)
        assert out.tolist() == [77.0, reference_device.sumsq([x.cpu(), y.cpu()]), 77.0]


@each("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_a_sum(bad: float) -> None:
    tensor = values(2100)
    tensor[2099] = bad
    assert not math.isfinite(device_sumsq(values(8), tensor))


@each("source, target", [*itertools.product(DTYPES[:2], DTYPES[:2])])
def test_stats_have_the_bits_of_their_reference_at_any_alignment(source: torch.dtype, target: torch.dtype) -> None:
    sizes = (5000, 5, 1024)
    tensors = [values(numel, source) for numel in sizes]
    expected = launches_of_reference(tensors, [t.to(target) for t in tensors], target.itemsize)
    bucket, stats = torch.zeros(sum(sizes) + 8, dtype=target, device=DEVICE), torch.zeros(2, dtype=torch.float64)
    stats = stats.to(DEVICE)
    for shift in (0, 1):
        flat.flatten(tensors, bucket[shift:], stats=stats, impl="triton")
        assert stats.tolist() == [expected, 0.0]
    stats.zero_()
    flat.unflatten(bucket[1:], tensors, stats=stats, impl="triton")
    assert stats[0].item() == launches_of_reference(tensors, tensors, target.itemsize)


def test_launches_of_a_mixed_list_are_added_in_order() -> None:
    tensors = [values(500, torch.bfloat16), values(600), values(700, torch.bfloat16)]
    bucket, stats = torch.zeros(1800, device=DEVICE), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    flat.flatten(tensors, bucket, stats=stats, impl="triton")
    assert stats[0].item() == launches_of_reference(tensors, [t.float() for t in tensors], 4)


def test_strided_stats_are_the_same_in_every_run() -> None:
    matrix = values(70 * 50).view(70, 50)
    seen = set()
    for shift in (0, 0, 1):
        bucket = torch.zeros(3502, device=DEVICE)
        stats = torch.zeros(2, dtype=torch.float64, device=DEVICE)
        flat.flatten([matrix.t()], bucket[shift:], stats=stats, impl="triton")
        seen.add(stats[0].item())
    assert len(seen) == 1
    assert seen.pop() == pytest.approx(matrix.double().square().sum().item(), rel=1e-13)


def test_distances_are_uploaded_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that moves as a whole sends nothing, and so does one tensor."""
    from zerokern.kernels.triton import upload as module

    uploads: list[str] = []
    for name in ("upload", "refresh"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: (uploads.append(name), real(*args))[1])
    memory, bucket = values(100), torch.zeros(9, device=DEVICE)
    table = BucketTable(DEVICE, SpanList([memory[:5], memory[:4]], None).members, torch.float32)
    alone = BucketTable(DEVICE, SpanList([memory[:9]], None).members, torch.float32)
    counts = []
    for first, second in ((0, 50), (0, 50), (3, 53), (3, 20), (30, 7)):
        before = len(uploads)
        table.run(True, [memory[first:].data_ptr(), memory[second:].data_ptr()], bucket, 1.0)
        assert torch.equal(bucket, torch.cat([memory[first : first + 5], memory[second : second + 4]]))
        alone.run(True, [memory[second:].data_ptr()], bucket, 1.0)
        assert torch.equal(bucket, memory[second : second + 9])
        counts.append(len(uploads) - before)
    assert counts == [2, 0, 0, 1, 1]
    assert uploads == ["upload", "upload", "refresh", "refresh"]


@each("into", [True, False])
def test_the_last_tile_of_2_to_the_33_elements(into: bool) -> None:
    """Its table is made by hand, with addresses as far below the memory as the tile lies behind the start."""
    tile = TILE_ROWS.value * row_width(4)
    number = FAR // tile - 1
    base = number * tile
    source, target = values(tile), torch.full((tile + 1,), 77.0, device=DEVICE)
    bucket, tensor = (target, source) if into else (source, target)
    move_rows[(1,)](
        bucket, None, None, None,
        torch.tensor([[0, number]], dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE), tensor.data_ptr() - 4 * base,
        torch.tensor([-base], device=DEVICE),
        torch.tensor([FAR], device=DEVICE),
        2.0, None, 0,
        TYPE=TYPES[torch.float32], IN=into, VEC=4, WIDTH=row_width(4), STATS=False, num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    assert same_bits(target[:-1].cpu(), (source * 2.0).cpu()) and target[-1] == 77.0


def test_the_last_chunk_of_2_to_the_33_elements() -> None:
    tensor = values(CHUNK, torch.bfloat16)
    number = FAR // CHUNK - 1
    table = SumsqTable(DEVICE, [CHUNK], torch.bfloat16)
    table._chunks[0, 1] = number
    table._numels[0] = FAR
    out = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    table.run(addresses(tensor) - 2 * number * CHUNK, out, 0)
    assert out.item() == reference.sumsq([tensor.cpu()])


def test_the_last_tile_of_a_strided_tensor_over_2_to_the_33_elements() -> None:
    rows, columns = 1 << 18, 1 << 15
    ((words, ntiles),) = strided_rows(0, 0, (rows, columns), (columns + 3, 1))
    source, target = values(32 * 32), torch.full((32 * 32,), 77.0, device=DEVICE)
    # of the last tile one row lies in real memory; the words say that the rows end with it
    first = (rows - 32) * (columns + 3) + columns - 32
    offset = -((rows - 32) * columns + columns - 32)
    one_row = torch.tensor([*words[:2], offset, rows - 31, *words[4:]], device=DEVICE)
    move_strided[(1,)](
        target, None, None, None,
        torch.tensor([[0, ntiles - 1]], dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE), source.data_ptr() - 4 * first,
        one_row,
        1.0, None, 0,
        TYPE=TYPES[torch.float32], IN=True, STATS=False, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    assert same_bits(target[:32].cpu(), source[:32].cpu()) and (target[32:] == 77.0).all()


def test_dimensions_that_run_on_are_merged() -> None:
    assert merged((4, 1, 5), (5, 77, 1)) == [(20, 1)]
    assert merged((8, 3, 3), (9, 3, 1)) == [(72, 1)]
    assert merged((3, 4), (0, 1)) == [(3, 0), (4, 1)]
    assert merged((1, 1), (5, 9)) == []


def test_a_tensor_of_many_dimensions_takes_more_rows_not_more_words() -> None:
    shape = (2, 3, 2, 3, 2, 3, 2)
    reversed_strides = torch.empty(shape[::-1]).permute(6, 5, 4, 3, 2, 1, 0).stride()
    rows = list(strided_rows(0, 0, shape, reversed_strides))
    assert len(rows) > 1 and len({len(row.words) for row in rows}) == 1


def uneven(count: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = torch.randint(1, 400_000, (count,)).tolist()
    return [torch.randn(numel, device=DEVICE).to(dtype) for numel in sizes]


@pytest.mark.gpu
@each("dtype", DTYPES)
def test_sums_of_many_uneven_tensors_on_a_gpu(dtype: torch.dtype) -> None:
    """Thousands of programs that end in any order: the same bits every time, those of the reference."""
    tensors = uneven(300, dtype)
    truth = sum(t.double().square().sum().item() for t in tensors)
    seen = {device_sumsq(*tensors) for _ in range(20)}
    assert seen == {reference_device.sumsq([t.cpu() for t in tensors])}
    assert seen.pop() == pytest.approx(truth, rel=1e-12)


@pytest.mark.gpu
@each("target", DTYPES)
def test_flatten_of_many_uneven_tensors_on_a_gpu(target: torch.dtype) -> None:
    tensors = uneven(300, torch.bfloat16)
    flattener = flat.Flattener(tensors, target)
    seen = set()
    for _ in range(20):
        bucket = torch.full((flattener.numel,), math.nan, dtype=target, device=DEVICE)
        stats = torch.full((2,), math.nan, dtype=torch.float64, device=DEVICE)
        flattener.flatten(tensors, bucket, scale=0.3, stats=stats)
        assert torch.equal(bucket, (torch.cat(tensors).float() * 0.3).to(target))
        seen.add(tuple(stats.tolist()))
    written = [(t.cpu().float() * 0.3).to(target) for t in tensors]
    assert seen == {(launches_of_reference(tensors, written, target.itemsize), 0.0)}


@pytest.mark.gpu
def test_a_captured_sum_follows_the_memory() -> None:
    x, out = torch.ones(200_000, device=DEVICE), torch.zeros(1, dtype=torch.float64, device=DEVICE)
    table, pointers = SumsqTable(DEVICE, [200_000], torch.float32), addresses(x)
    table.run(pointers, out, 0)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.run(pointers, out, 0)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert out.item() == 200_000 * value * value


@pytest.mark.gpu
def test_more_than_2_to_the_32_elements_on_a_gpu() -> None:
    numel = (1 << 32) + 12_345
    tensor = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE).uniform_(-1, 1)
    bucket = torch.zeros(numel + 1, dtype=torch.bfloat16, device=DEVICE)
    stats = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for shift in (0, 1):
        flat.flatten([tensor], bucket[shift:], stats=stats)
        assert torch.equal(bucket[shift : shift + numel], tensor)
    assert stats[0].item() == pytest.approx(device_sumsq(tensor), rel=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; test_gpu.py has the GPU's turn")
@each("source, target", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_warm_compiles_what_later_lists_need(
    source: torch.dtype, target: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that torch copies in the first pass may be one of ours in a later one: it has gaps then, or strides."""
    compiled: list[tuple[Any, ...]] = []
    run = InterpretedFunction.run

    def noted(kernel: InterpretedFunction, *given: Any, **settings: Any) -> Any:
        kinds = [getattr(one, "dtype", type(one)) for one in (*given, *settings.values())]
        wide = {name: str(one) for name, one in settings.items() if name.isupper()}
        compiled.append((kernel.fn.__name__, kinds, wide))
        return run(kernel, *given, **settings)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(flat, "_is_gpu", lambda device: True)
    monkeypatch.setattr(flat, "implementation", lambda name, device: implementation(name or "triton", device))
    monkeypatch.setattr(uploading, "_in_place", lambda device: False)
    monkeypatch.setattr(uploading, "_mark", lambda device: (None, SimpleNamespace(query=lambda: True)))
    flat.warm(torch.device("cpu"), [(source, target)])
    warmed = list(compiled)
    for count, gap, turned in ((3, 0, False), (12, 1, False), (12, 0, True), (300, 1, True)):
        tensors = [torch.ones(4, 2, dtype=source).t() if turned else torch.ones(2, 4, dtype=source)] * count
        offsets = [number * (8 + gap) for number in range(count)]
        flat.Flattener(tensors, target, offsets=offsets).flatten(tensors, torch.zeros(9 * count, dtype=target))
    assert {"move_rows", "move_strided", "copy_words"} <= {name for name, *_ in compiled}
    assert [one for one in compiled if one not in warmed] == []
