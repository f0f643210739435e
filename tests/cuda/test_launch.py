"""The launcher: what it refuses and in which words, what it uploads and when, what it says to CuPy."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch
from cuda_cases import Machine, aligned, same, values

from zerokern.core.errors import BackendError, KernelError
from zerokern.kernels import cuda, cuda_build


def run(machine: Machine, table: cuda.HostTable, tensors: list[torch.Tensor], bucket: torch.Tensor, **others) -> None:
    machine.clear()
    machine.allow(bucket, writable=True, link=True)
    for tensor in tensors:
        machine.allow(tensor, writable=False)
    table.gather(tensors, bucket, **others)
    assert same(bucket, torch.cat([t.view(-1).to(bucket.dtype) for t in tensors]))


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many words each upload had."""
    counts: list[int] = []
    real = cuda.upload

    def counted(words, device):
        counts.append(len(words))
        return real(words, device)

    monkeypatch.setattr(cuda, "upload", counted)
    return counts


def test_only_what_has_changed_is_uploaded(machine: Machine, uploads: list[int]) -> None:
    tensors = [values(100, torch.float32) for _ in range(5)]
    table, bucket = cuda.HostTable(tensors, torch.float32), aligned(500, torch.float32)
    run(machine, table, tensors, bucket)
    assert uploads == [5, 5, 2]
    tensors[3].add_(1)
    run(machine, table, tensors, bucket)
    assert uploads == [5, 5, 2], "the pointers are the same"
    tensors[3] = values(100, torch.float32)
    run(machine, table, tensors, bucket)
    assert uploads == [5, 5, 2, 5]


def test_each_stream_has_a_table_of_its_own(machine: Machine, uploads: list[int]) -> None:
    tensors, bucket = [values(10, torch.float32)], aligned(10, torch.float32)
    table = cuda.HostTable(tensors, torch.float32)
    for stream in (0, 8, 0, 8):
        machine.stream = stream
        run(machine, table, tensors, bucket)
    assert len(uploads) == 6
    tables = list(table._residents.values())
    assert len(tables) == 2 and tables[0].partials.data_ptr() != tables[1].partials.data_ptr()


def test_a_captured_launch_shares_nothing(machine: Machine, uploads: list[int]) -> None:
    """What a graph uploads is not there before it is replayed, so no other launch relies on it; what was there before
    the capture serves the graph, and stays when the pointers change."""
    tensors, bucket = [values(10, torch.float32)], aligned(10, torch.float32)
    table = cuda.HostTable(tensors, torch.float32)
    for capturing in (True, False, True, False):
        machine.is_capturing = capturing
        run(machine, table, tensors, bucket)
    assert len(uploads) == 6 and len(table._captured) == 2 and len(table._residents) == 1
    eager, graph = table._residents[0], table._captured[1]
    assert eager.addresses is graph.addresses and eager.counter is not graph.counter
    machine.is_capturing = False
    run(machine, table, [values(10, torch.float32)], bucket)
    assert graph.addresses.item() == tensors[0].data_ptr() != eager.addresses.item()


def test_the_counter_is_zero_after_each_launch(machine: Machine) -> None:
    tensors, bucket = [values(40_000, torch.float32)], aligned(40_000, torch.float32)
    table, stats = cuda.HostTable(tensors, torch.float32), torch.empty(2, dtype=torch.float64)
    found = []
    for _ in range(3):
        stats.fill_(torch.nan)
        run(machine, table, tensors, bucket, stats=stats)
        found.append(stats.tolist())
        assert table._residents[0].counter.item() == 0
    assert found[0] == found[1] == found[2] and found[0][1] == 0.0


@pytest.mark.parametrize(
    "tensors, offsets, error, says",
    [
        ([torch.ones(2), torch.ones(2, device="meta")], None, ValueError, "on cpu and meta; allowed: one device"),
        ([torch.ones(2).double()], None, TypeError, r"tensors\[0\] is torch.float64, torch.strided; allowed: dense"),
        ([torch.ones(2), 3.0], None, TypeError, r"tensors\[1\] is float; allowed"),
        ([torch.ones(2, 2).to_sparse()], None, TypeError, "torch.sparse_coo; allowed: dense tensors"),
        ([torch.ones(4, 4).t()[:2]], None, ValueError, r"strides \(1, 4\); allowed: contiguous .*flatten takes any"),
        ([torch.ones(2)] * 2, [0], ValueError, "offsets has 1 numbers for 2 tensors"),
        ([torch.ones(2)] * 2, [0, -1], ValueError, r"offsets\[1\]=-1 is not possible"),
        ([torch.ones(2)], [0.5], TypeError, r"offsets\[0\]=0.5 is not possible"),
        ([torch.ones(5), torch.ones(5)], [0, 4], ValueError, r"tensors\[0\] and tensors\[1\] overlap .* element 4"),
        ([torch.ones(5), torch.ones(5)], [3, 0], ValueError, r"tensors\[1\] and tensors\[0\] overlap .* element 3"),
        ([torch.ones(90), torch.ones(20)], [0, 81], ValueError, "overlap"),
        ([torch.ones(20)], [90], ValueError, r"bucket has shape \(100,\); allowed: one dimension of at least 110"),
    ],
)
def test_bad_lists_are_refused(machine: Machine, tensors, offsets, error: type, says: str) -> None:
    bucket = aligned(100, torch.float32)
    before = bucket.clone()
    with pytest.raises(error, match=says):
        cuda.gather(tensors, bucket, offsets=offsets)
    with pytest.raises(error, match=says):
        cuda.scatter(bucket, tensors, offsets=offsets)
    assert machine.launches == [] and same(bucket, before)


@pytest.mark.parametrize(
    "bucket, says",
    [
        (torch.ones(100, device="meta"), "bucket is on device meta; allowed: cpu"),
        (torch.ones(100).double(), "bucket has dtype torch.float64"),
        (aligned(100, torch.float32).view(10, 10), r"bucket has shape \(10, 10\)"),
        (aligned(101, torch.float32)[1:], "bucket lies at 4 modulo 128; allowed: multiples of 128 bytes"),
        (aligned(200, torch.float32)[::2], "bucket of shape .* has strides"),
    ],
)
def test_bad_buckets_are_refused(machine: Machine, bucket: torch.Tensor, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        cuda.gather([torch.ones(100)], bucket)
    assert machine.launches == []


@pytest.mark.parametrize(
    "others, says",
    [
        ({"scale": torch.nan}, "scale=nan is not possible"),
        ({"scale": torch.ones(2)}, "scale has 2 elements of torch.float32 on cpu; allowed: a number, or"),
        ({"scale": torch.ones(1).double()}, "scale has 1 elements of torch.float64"),
        ({"scale": torch.ones(1, device="meta")}, "on meta; allowed"),
        ({"stats": torch.ones(2)}, r"stats has shape \(2,\) and dtype torch.float32; allowed: two contiguous"),
        ({"stats": torch.ones(3).double()}, r"stats has shape \(3,\)"),
        ({"stats": torch.ones(2, device="meta").double()}, "stats is on meta; allowed: cpu, or pinned host"),
    ],
)
def test_bad_scales_and_stats_are_refused(machine: Machine, others: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cuda.gather([torch.ones(100)], aligned(100, torch.float32), **others)
    assert machine.launches == []


def test_a_list_that_is_not_the_tables_is_refused(machine: Machine) -> None:
    table, bucket = cuda.HostTable([torch.ones(5), torch.ones(6)], torch.float32), aligned(20, torch.float32)
    with pytest.raises(ValueError, match="tensors has 3, and the table is of 2; allowed: as many as it was made for"):
        table.gather([torch.ones(5), torch.ones(6), torch.ones(1)], bucket)
    for other in (torch.ones(7), torch.ones(6).half(), torch.ones(6, device="meta")):
        with pytest.raises(ValueError, match=r"tensors\[1\] has . elements of .* make a HostTable for this list"):
            table.gather([torch.ones(5), other], bucket)
    with pytest.raises(TypeError, match=r"bucket has dtype torch.bfloat16; allowed: torch.float32"):
        table.gather([torch.ones(5), torch.ones(6)], aligned(20, torch.bfloat16))
    with pytest.raises(TypeError, match=r"bucket_dtype=torch.int8 is not possible"):
        cuda.HostTable([torch.ones(5)], torch.int8)


def test_a_list_longer_than_any_table_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST", 3)
    with pytest.raises(ValueError, match=r"the list='4 tensors in 1 tiles of 16 KiB' .* at most 3 .* in parts"):
        cuda.HostTable([torch.ones(1)] * 4, torch.float32)
    with pytest.raises(ValueError, match="'1 tensors in 4 tiles"):
        cuda.HostTable([torch.ones(3 * 4096 + 1)], torch.float32)


def test_destinations_that_overlap_are_refused(machine: Machine) -> None:
    whole, bucket = torch.zeros(10), aligned(20, torch.float32)
    machine.allow(bucket, writable=False, link=True)
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] share memory"):
        cuda.scatter(bucket, [whole[:6], whole[5:]])
    machine.allow(whole, writable=False)
    cuda.gather([whole, whole], aligned_writable(machine, 20))  # reading twice is fine
    assert machine.launches == [("gather_fp32", 1)]


def aligned_writable(machine: Machine, numel: int) -> torch.Tensor:
    bucket = aligned(numel, torch.float32)
    machine.allow(bucket, writable=True, link=True)
    return bucket


def test_tensors_on_the_host_are_no_matter_of_a_gpu() -> None:
    with pytest.raises(ValueError, match="the tensors are on device cpu; allowed: cuda devices from sm_80 on"):
        cuda.gather([torch.ones(4)], torch.ones(4))


class FakeCuPy:
    """What the launcher uses of CuPy, without a GPU."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.refused_loads = 0
        self.launch_error: Exception | None = None
        self.calls: list[tuple] = []
        self.attributes: dict[int, SimpleNamespace] = {}
        self.host = SimpleNamespace(type=1, devicePointer=0x1000)

        class CUDADriverError(RuntimeError):
            pass

        self.error = CUDADriverError
        fake = self

        class Module:
            def load(self, module: bytes) -> None:
                fake.loaded.append(module)
                if fake.refused_loads >= len(fake.loaded):
                    raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")

            def get_function(self, name: str):
                return lambda grid, block, args, stream: fake.launch(name, grid, block, args, stream)

        class Device:
            def __init__(self, index: int) -> None:
                assert index == 0

            def __enter__(self) -> None: ...

            def __exit__(self, *error: object) -> None: ...

        self.cuda = SimpleNamespace(
            Device=Device,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            function=SimpleNamespace(Module=Module),
            runtime=SimpleNamespace(
                memoryTypeHost=1, pointerGetAttributes=lambda at: self.attributes.get(at, self.host)
            ),
        )

    def launch(self, name, grid, block, args, stream) -> None:
        if self.launch_error:
            raise self.launch_error
        self.calls.append((name, grid, block, args, stream.ptr))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    fake = FakeCuPy()
    monkeypatch.setattr(cuda, "_cupy", lambda: fake)
    monkeypatch.setattr(cuda_build, "compiler", lambda: fake)
    monkeypatch.setattr(cuda_build, "binary", lambda capability, fresh=False: b"fresh" if fresh else b"kept")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0xABC))
    return fake


def gpu() -> cuda.Gpu:
    return cuda.Gpu(torch.device("cuda", 0))


def test_a_launch_is_on_torchs_stream_with_the_whole_job_by_value(cupy: FakeCuPy) -> None:
    pytest.importorskip("numpy", reason="needs CuPy")
    job = struct.pack("=12Q", *range(12))
    gpu().launch("gather_bf16", 7, job)
    ((name, grid, block, (argument,), stream),) = cupy.calls
    assert (name, grid, block, stream) == ("gather_bf16", (7,), (256,), 0xABC)
    assert argument.size == 1 and argument.nbytes == 96 and argument.tobytes() == job, "CuPy passes one item by value"


def test_a_refused_launch_surfaces(cupy: FakeCuPy) -> None:
    pytest.importorskip("numpy", reason="needs CuPy")
    one = gpu()
    cupy.launch_error = cupy.error("CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(
        KernelError, match="gather_fp32 could not be launched with 3 blocks: CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        one.launch("gather_fp32", 3, bytes(96))


def test_a_module_that_the_driver_refuses_is_compiled_again(cupy: FakeCuPy) -> None:
    cupy.refused_loads = 1
    gpu()
    assert cupy.loaded == [b"kept", b"fresh"]
    cupy.refused_loads = 9
    with pytest.raises(KernelError, match="the driver refused the kernels of cuda/ on NVIDIA H200, sm_90: CUDA_ERROR"):
        gpu()


def test_memory_that_the_gpu_cannot_reach_is_refused(cupy: FakeCuPy) -> None:
    tensor, one = torch.ones(4), gpu()
    assert one.host_address("bucket", tensor) == 0x1000
    assert one.host_address("bucket", torch.ones(0)) == 0
    last = tensor.data_ptr() + 15
    for at in (tensor.data_ptr(), last):
        cupy.attributes = {at: SimpleNamespace(type=0, devicePointer=0)}
        with pytest.raises(ValueError, match="bucket is not pinned, so cuda:0 cannot reach it; allowed: leases of a"):
            one.host_address("bucket", tensor)
    cupy.attributes = {last: SimpleNamespace(type=1, devicePointer=0)}
    with pytest.raises(ValueError, match="bucket is pinned but not mapped into the memory of cuda:0"):
        one.host_address("bucket", tensor)


def test_an_old_gpu_is_refused_whatever_else_is_missing(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(
        cuda_build, "compiler", lambda: pytest.fail("first the GPU, then what would have to be installed")
    )
    with pytest.raises(BackendError, match="NVIDIA H200 is sm_75, and the kernels of cuda/ need sm_80 or newer"):
        gpu()
    assert cupy.loaded == []
