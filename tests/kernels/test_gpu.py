"""The update kernels and codecs on a real GPU: random inputs, poisoned outputs, margins, against the reference on the
CPU bit for bit and against float64. What the interpreter cannot show is shown here."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from threading import Event, Thread
from unittest.mock import MagicMock

import pytest
import torch
from exact_cases import Float64, Hyper, errors, theirs, training_state
from kernel_cases import (
    BLOCK,
    DTYPES,
    SIZES,
    STATES,
    Case,
    Row,
    assert_close_parameters,
    assert_margins_intact,
    assert_published,
    assert_same,
    cases_of,
    hyperparameters,
    make_rows,
    run_op,
    run_reference,
    same_bits,
)
from tables import each

from zerokern.kernels import flat, ops
from zerokern.kernels.captured import Captured
from zerokern.kernels.changed import changed_mask
from zerokern.kernels.orthogonal import iterate_
from zerokern.kernels.triton.upload import upload
from zerokern.memory.staging import cuda_driver

pytestmark = pytest.mark.gpu

GPU_SIZES = (*SIZES, (1 << 20) | 3, 1 << 20)
# On a GPU the root and the reciprocal of an int8 update are approximate, each within a unit in the last place; the
# reference rounds to half of one.
APPROXIMATE = 2.0**-22


def on_gpu(rows: list[Row]) -> list[Row]:
    """The same rows in device memory, with their margins and their misalignment."""
    moved = []
    for row in rows:
        one = Row({})
        for name, buffer, _ in row.buffers:
            there, start = buffer.cuda(), row[name].storage_offset()
            one.tensors[name] = there[start : start + row[name].numel()]
            one.buffers.append((name, there, there.clone()))
        moved.append(one)
    return moved


def on_cpu(rows: list[Row]) -> list[Row]:
    return [Row({name: tensor.cpu() for name, tensor in row.tensors.items()}) for row in rows]


@pytest.mark.parametrize("algorithm", STATES)  # each compiles kernels for half a minute
@each("misaligned", [False, True])
def test_every_format_has_the_bits_of_the_reference(algorithm: str, misaligned: bool, every: bool) -> None:
    for case in cases_of(algorithm, every):
        before = make_rows(algorithm, case, GPU_SIZES, seed=7, misaligned=misaligned)
        rows, hyper = on_gpu(before), hyperparameters(algorithm, case)
        expected = [row.clone() for row in before]
        run_reference(algorithm, expected, hyper)
        run_op(algorithm, rows, hyper)
        assert_margins_intact(rows)
        if algorithm == "adam" and case.state == "int8":
            assert_close(on_cpu(rows), expected, before, case, hyper)
        else:
            assert_same(on_cpu(rows), expected)


def assert_close(rows: list[Row], expected: list[Row], before: list[Row], case: Case, hyper: dict[str, object]) -> None:
    """Codes within one, scales and parameters within what two approximate instructions explain."""
    assert_published(rows)
    assert_close_parameters(rows, expected, before, case, hyper)
    for row, want in zip(rows, expected, strict=True):
        for name in ("exp_avg", "exp_avg_scale"):  # nothing in it is approximate
            assert same_bits(row[name], want[name]), name
        scale, right_scale = row["exp_avg_sq_scale"], want["exp_avg_sq_scale"]
        assert ((scale - right_scale).abs() <= APPROXIMATE * right_scale).all()
        assert ((row["exp_avg_sq"].int() - want["exp_avg_sq"].int()).abs() <= 1).all()
        positive = want["exp_avg_sq"] > 0
        assert (row["exp_avg_sq"][positive] > 0).all()


@each("dtype", [torch.bfloat16, torch.float32])
def test_an_update_says_what_it_changed(dtype: torch.dtype) -> None:
    for numel in (129, 4096 + 8, 1 << 20):
        param = torch.randn(numel, device="cuda").to(dtype)
        state = {name: torch.zeros(numel, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
        if dtype is torch.bfloat16:
            state["remainder"] = torch.zeros(numel, dtype=torch.int16, device="cuda")
        before, changed = param.clone(), torch.zeros(-(-numel // 8), dtype=torch.uint8, device="cuda")
        grad = torch.randn(numel, device="cuda").to(dtype)
        ops.adam(param, grad, **state, lr=1e-4, step=1, changed=changed)
        assert torch.equal(changed, changed_mask(before, param)) and bool(changed.any())


@each("kind", ["exp_avg", "exp_avg_sq"])
def test_codecs_have_the_bits_of_the_reference(kind: str) -> None:
    for exponent in range(-38, 38, 4):
        x = torch.randn(BLOCK * 40 + 5) * 10.0**exponent
        x = x.abs() if kind == "exp_avg_sq" else x
        codes, scale = ops.encode_int8(x.cuda(), kind)
        for got, want in zip((codes, scale), ops.encode_int8(x, kind, impl="reference"), strict=True):
            assert same_bits(got.cpu(), want)
        assert same_bits(ops.decode_int8(codes, scale, kind).cpu(), ops.decode_int8(codes.cpu(), scale.cpu(), kind))


def test_every_code_decodes_as_the_reference_has_it() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(64)
    scale = torch.rand(codes.numel() // BLOCK) + 0.5
    assert same_bits(ops.decode_int8(codes.cuda(), scale.cuda()).cpu(), ops.decode_int8(codes, scale, impl="reference"))


@each("master_format", ["split16", "split8"])
def test_splits_have_the_bits_of_the_reference(master_format: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    pair = ops.split(x.cuda(), master_format)
    for got, want in zip(pair, ops.split(x, master_format, impl="reference"), strict=True):
        assert same_bits(got.cpu(), want)
    assert same_bits(ops.join(*pair).cpu(), ops.join(*(part.cpu() for part in pair), impl="reference"))


def test_fp32_adam_is_no_further_from_float64_than_torch_fused() -> None:
    state, h = training_state(1 << 20, torch.Generator().manual_seed(3)), Hyper()
    truth = Float64(state)
    start = {name: getattr(truth, name) for name in ("param", "exp_avg", "exp_avg_sq")}
    truth.step(state["grad"], h)
    row = Row({name: value.cuda() for name, value in state.items()})
    run_op("adam", [row], vars(h))
    theirs_state = {name: value.clone() for name, value in state.items()}
    theirs(theirs_state, h)
    for name in start:
        ours, other = (errors(one, getattr(truth, name), start[name]) for one in (row[name].cpu(), theirs_state[name]))
        assert ours.mean() <= other.mean(), name


def test_addresses_beyond_32_bits() -> None:
    """Elements on both sides of 2^32 bytes and of 2^31 elements are where they belong."""
    numel = (1 << 31) + 4096 + 5
    if torch.cuda.mem_get_info()[0] < 4 * numel * DTYPES["bf16"].itemsize:
        pytest.skip("needs a CUDA GPU with 20 GB free")
    param = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    grad = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    ops.sgd(param, grad, lr=0.5)
    assert (param == 0.5).all()


def test_a_launch_waits_for_nothing() -> None:
    param, grad = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    ops.sgd(param, grad, lr=0.5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.sgd(param, grad, lr=0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (param == 0.25).all()


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grad is on device cpu and param on cuda:0; allowed: all on one device"):
        ops.sgd(torch.ones(3, device="cuda"), torch.ones(3), lr=0.5)


def test_pinned_words_are_kept_while_the_device_is_busy() -> None:
    """Torch's allocator is asked for as much again while the device is busy."""
    place, sleep = torch.device("cuda"), 50_000_000
    torch.cuda._sleep(sleep)
    made = [upload(array("q", range(number, number + 5000)), place) for number in range(50)]
    for number, one in enumerate(made):
        assert one.tolist() == list(range(number, number + 5000))


def test_words_in_a_graph_are_written_at_every_replay() -> None:
    place = torch.device("cuda")
    for count in (3, 5000):
        upload(array("q", range(count)), place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = upload(array("q", range(count)), place)
        for _ in range(2):
            upload(array("q", [1] * count), place)
            made.zero_()
            graph.replay()
            assert made.tolist() == list(range(count))


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_list_that_only_moves_is_one_launch_of_torch_each_way(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launch itself, for a list too long for one of its kernels' arguments too. No memory is copied beside."""
    torch.manual_seed(3)
    for shapes in ([(3, 5), (7,), (0, 4), (2, 3, 4), (), (70_001,)], [(int(n),) for n in torch.randint(1, 99, (700,))]):
        tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
        bucket = torch.full((sum(one.numel() for one in tensors) + 5,), 77.0, device="cuda", dtype=dtype)
        expected = torch.cat([*(one.view(-1) for one in tensors), bucket[-5:]])
        back = [torch.zeros_like(one) for one in tensors]
        flattener = flat.Flattener(tensors, dtype)
        launch = MagicMock(wraps=torch._foreach_copy_)
        monkeypatch.setattr(torch, "_foreach_copy_", launch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flattener.flatten(tensors, bucket)
            flattener.unflatten(bucket, back)
            torch.cuda.synchronize()
        monkeypatch.undo()
        assert launch.call_count == 2 and not flattener._tables
        assert not [event.key for event in profile.key_averages() if "Memcpy" in event.key]
        assert same_bits(bucket.cpu(), expected.cpu())
        assert all(same_bits(one.cpu(), other.cpu()) for one, other in zip(back, tensors, strict=True))


@each("stats", [False, True])
def test_a_captured_flatten_follows_the_memory(stats: bool) -> None:
    """By torch's launch, and by Triton's where squares are asked for: replays read what is there then."""
    tensors = [torch.ones(70_000, device="cuda"), torch.ones(3, 5, device="cuda")]
    numel = sum(one.numel() for one in tensors)
    bucket, back = torch.zeros(numel, device="cuda"), [torch.zeros_like(one) for one in tensors]
    outcome = torch.zeros(2, dtype=torch.float64, device="cuda") if stats else None
    flattener = flat.Flattener(tensors, torch.float32)

    def there_and_back() -> None:
        flattener.flatten(tensors, bucket, stats=outcome)
        flattener.unflatten(bucket, back, stats=outcome)

    there_and_back()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back()
    assert bool(flattener._tables) == stats
    for value in (2.0, 3.0):
        for one in tensors:
            one.fill_(value)
        graph.replay()
        assert (bucket == value).all() and all((one == value).all() for one in back)
        assert outcome is None or outcome.tolist() == [numel * value * value, 0.0]


@each("dtype", [torch.bfloat16, torch.float32])
@each("shape", [(256, 1024), (1024, 256), (1920, 1920), (7, 192, 320), (3, 64, 1)])
def test_a_captured_iteration_has_the_bits_of_its_launches(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of new values at each replay, while torch's allocator gives memory out and another stream multiplies."""
    place, beside = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    x, sums = torch.empty(shape, dtype=dtype, device=place), torch.ones(1, dtype=torch.float64, device=place)
    sums = sums.repeat(*shape[:-2], 1) if len(shape) > 2 else sums
    captured = Captured(place, lambda: cuda_driver(place))
    noise = torch.randn(2048, 2048, device=place, dtype=dtype)
    replayed = 0
    for step in range(6):
        work = captured.of((shape, dtype, "a test"), lambda: iterate_(x, sums), x, sums)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(place, dtype)
        norms = values.double().square().sum((-2, -1)).view(sums.shape)
        expected = values.clone()
        iterate_(expected, norms)
        x.copy_(values)
        sums.copy_(norms)
        with torch.cuda.stream(beside):
            for _ in range(4):
                noise @ noise
        work()
        torch.cuda.empty_cache()
        assert same_bits(x.cpu(), expected.cpu()), step
        replayed += getattr(work, "__name__", "") == "replay"
    assert replayed == 5, "it was captured, and its trial had the bits of launches"


def test_graphs_of_the_program_and_ours_work_in_memory_of_their_own() -> None:
    """The program's is captured behind products on its stream, before ours is. They replay while free memory is given
    out; ours also when cuBLAS's workspaces have been cleared, as torch.compile does for graphs of its own."""
    place, beside = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    a, b = torch.randn(64, 1 << 16, device=place), torch.randn(1 << 16, 64, device=place)  # parts of sums need a place
    out, theirs = torch.empty(64, 64, device=place), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        torch.mm(a, b, out=out)
    with torch.cuda.graph(theirs, stream=beside):
        torch.mm(a, b, out=out)

    def exact(replay: Callable[[], None], result: torch.Tensor, given: torch.Tensor, expected: torch.Tensor) -> bool:
        taken = []
        for stream in (torch.cuda.current_stream(), beside):
            with torch.cuda.stream(stream):
                sizes = [1 << power for power in range(20, 26) for _ in range(4)]
                taken += [torch.full((nbytes,), 7, dtype=torch.uint8, device=place) for nbytes in sizes]
        torch.cuda.synchronize()
        result.copy_(given)
        replay()
        torch.cuda.synchronize()
        return same_bits(result.cpu(), expected.cpu()) and all(bool((one == 7).all()) for one in taken)

    theirs.replay()
    product = out.clone()
    x, sums = torch.empty(512, 768, device=place), torch.empty(1, dtype=torch.float64, device=place)
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(place)
    squares = values.double().square().sum().view(1)
    iterate_(expected := values.clone(), squares.clone())

    def ours() -> None:
        sums.copy_(squares)
        work()

    for _ in range(2):  # and again when the first graph has gone
        captured = Captured(place, lambda: cuda_driver(place))
        for _ in range(3):
            work = captured.of("beside the program's", lambda: iterate_(x, sums), x, sums)
            assert exact(ours, x, values, expected)
        assert getattr(work, "__name__", "") == "replay"
        assert exact(theirs.replay, out, torch.zeros_like(out), product)
    torch._C._cuda_clearCublasWorkspaces()
    assert exact(ours, x, values, expected)


def test_a_capture_of_another_thread_goes_on_beside_ours() -> None:
    """And ours is not part of it."""
    place = torch.device("cuda", torch.cuda.current_device())
    x, sums = torch.randn(256, 256, device=place), torch.full((1,), 65536.0, dtype=torch.float64, device=place)
    captured = Captured(place, lambda: cuda_driver(place))
    works: list[Callable[[], None]] = []
    warm, begin = Event(), Event()

    def iterate() -> None:
        works.append(captured.of("beside another", lambda: iterate_(x, sums), x, sums))
        works[-1]()

    def ours() -> None:
        iterate()  # cuBLAS makes what this thread needs, which breaks captures of others off
        warm.set()
        begin.wait(60)
        for _ in range(2):
            iterate()

    counter, graph = torch.zeros(1, device=place), torch.cuda.CUDAGraph()
    thread = Thread(target=ours)
    thread.start()
    warm.wait(60)
    with torch.cuda.graph(graph):
        counter.add_(1)
        begin.set()
        thread.join()
        counter.add_(1)
    before = x.clone()
    graph.replay()
    assert counter.item() == 2 and same_bits(x.cpu(), before.cpu())
    assert getattr(works[-1], "__name__", "") == "replay"
