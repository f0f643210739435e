"""The envelope: before + raw bytes + after is a file that torch.load reads without trust, of any dtype and size."""

from __future__ import annotations

import io
import itertools
import zipfile
from pathlib import Path

import pytest
import torch
from raw_cases import raw, some

from zerokern.checkpoint.torch_zip import ALIGN, LARGE, zip_around

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0, 2), (2, 3, 4, 5)]


def test_torch_reads_every_dtype_and_shape() -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        tensor = some(dtype, shape)
        before, after = zip_around(dtype, shape)
        found = torch.load(io.BytesIO(before + raw(tensor) + after), weights_only=True)
        assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
        assert raw(found) == raw(tensor)


def test_bytes_begin_at_whole_cache_lines() -> None:
    for shape in (*SHAPES, (123456789, 987654321)):
        assert len(zip_around(torch.int8, shape)[0]) % ALIGN == 0, shape
    assert zip_around(torch.float32, torch.Size([2, 3])) == zip_around(torch.float32, [2, 3])


def test_it_is_a_zip_of_stored_files() -> None:
    tensor = some(torch.int16, (5,))
    before, after = zip_around(tensor.dtype, tensor.shape)
    with zipfile.ZipFile(io.BytesIO(before + raw(tensor) + after)) as found:
        assert [one.filename for one in found.infolist()] == [
            f"archive/{name}" for name in ("data.pkl", "byteorder", "version", "data/0")
        ]
        assert {one.compress_type for one in found.infolist()} == {zipfile.ZIP_STORED}
        assert found.read("archive/version") == b"3\n"  # zipfile compares checksums: those of small files are real
        assert found.infolist()[-1].CRC == 0


@pytest.mark.parametrize("nbytes", [LARGE - 500, LARGE, 5 << 30])
def test_beyond_four_gigabytes(tmp_path: Path, nbytes: int) -> None:
    """The entry, its directory, or both lie beyond what 32 bits can say. The file has a hole, and takes no room."""
    before, after = zip_around(torch.uint8, (nbytes,))
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.write(before + b"\3")
        file.seek(len(before) + nbytes - 1)
        file.write(b"\7" + after)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found.shape == (nbytes,) and (found[0], found[-1], found[nbytes // 2]) == (3, 7, 0)
    with zipfile.ZipFile(path) as listed:
        assert listed.infolist()[-1].file_size == nbytes
