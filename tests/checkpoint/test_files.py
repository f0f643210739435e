"""Data files: what was appended is what is read, on every engine, and no byte is believed that was not written."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from pages import large_things_apart
from raw_cases import flip
from torch import Tensor
from worlds import World, ranked

from zerokern.checkpoint.files import (
    BLOCK,
    SLOTS,
    FileReader,
    FileWriter,
    PartsWriter,
    Slots,
    SlotWriter,
    Span,
    copy_into,
)
from zerokern.checkpoint.folder import OpenFiles
from zerokern.checkpoint.index import Box, FileRow, TensorRow
from zerokern.checkpoint.source import BoxTargets, box_reads
from zerokern.core import native
from zerokern.core.errors import IoError
from zerokern.io import Faults

BAD_DAY = Faults(seed=11, delay=20000, delay_us=300, shorten=10000, interrupt=5000, again=5000, full=5000)
ENGINES = {
    "auto": {},
    "threads": {"engine": "threads"},
    "bad day": {"engine": "threads", "faults": BAD_DAY},
    "small blocks": {"block": 1 << 16, "depth": 3},
}
EDGES = [0, 1, 511, 512, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def pattern(nbytes: int, seed: int = 0) -> Tensor:
    """Bytes that tell where they belong."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def write(path: Path, *data: bytes | Tensor, **settings: object) -> FileRow:
    with FileWriter(path, **settings) as writer:
        for one in data:
            writer.append(one)
        return writer.finish()


@contextmanager
def reading(folder: Path, row: FileRow, **settings: object) -> Iterator[FileReader]:
    with Slots(folder, **settings) as slots, FileReader(folder, row, slots, OpenFiles()) as reader:
        yield reader


def read(folder: Path, row: FileRow, offset: int = 0, nbytes: int | None = None, **settings: object) -> Tensor:
    nbytes = row.table - offset if nbytes is None else nbytes
    found = torch.zeros(nbytes, dtype=torch.uint8)

    def take(piece: Tensor, at: int) -> None:
        found[at : at + len(piece)] = piece

    with reading(folder, row, **settings) as reader:
        reader.read([(offset, nbytes, take)])
    return found


def flat(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def test_what_was_appended_is_read(tmp_path: Path, nothing_left_open: None) -> None:
    for nbytes in EDGES:
        data, path = pattern(nbytes), tmp_path / str(nbytes)
        row = write(path, data)
        assert (row.name, row.table, row.nbytes) == (str(nbytes), nbytes, nbytes + 4 * -(-nbytes // BLOCK))
        assert path.stat().st_size == row.nbytes and path.read_bytes()[:nbytes] == bytes(data.numpy())
        assert torch.equal(read(tmp_path, row), data), nbytes


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_on_every_engine(tmp_path: Path, engine: dict[str, object], nothing_left_open: None) -> None:
    data = pattern((SLOTS + 2) * BLOCK + 12345)  # every slot is used twice
    row = write(tmp_path / "a", data[:777], data[777:], **engine)
    assert torch.equal(read(tmp_path, row, **engine), data)
    assert torch.equal(read(tmp_path, row, BLOCK - 5, 11, **engine), data[BLOCK - 5 : BLOCK + 6])


def test_tensors_of_any_strides(tmp_path: Path) -> None:
    makes = {
        "transposed": torch.randn(1000, 700).t(),
        "sliced": torch.randn(3, 2000, 5, 300)[:, ::3, 1:4],
        "overlapping": torch.randn(1 << 21).as_strided((1 << 18, 3), (8, 2)),
        "expanded": torch.randn(1, 1 << 21).expand(3, -1).t(),
        "conj": torch.randn(50, 60, dtype=torch.complex64).t().conj(),
        "neg": torch.randn(50, dtype=torch.complex64).conj().imag,
        "channels_last": torch.randn(64, 3, 9, 9).to(memory_format=torch.channels_last),
        "bool": torch.rand(77) < 0.5,
        "fp8": torch.randn(33).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(9, 9)),
    }
    for name, tensor in makes.items():
        row = write(tmp_path / name, b"xyz", tensor, b"end")
        assert torch.equal(read(tmp_path, row, 3, tensor.nbytes), flat(tensor.detach())), name
        assert bytes(read(tmp_path, row, row.table - 3).tolist()) == b"end", name


class Played(torch.Tensor):
    """Says that it is on a device, and can be copied from."""

    device = property(lambda self: torch.device("cuda"))


def test_from_a_device(tmp_path: Path) -> None:
    data = pattern((SLOTS + 1) * BLOCK + 77)
    rows = pattern(5 * BLOCK).view(5, BLOCK)
    row = write(tmp_path / "a", b"abc", data.as_subclass(Played), rows.t().as_subclass(Played), b"end")
    assert torch.equal(read(tmp_path, row, 3, len(data)), data)
    assert torch.equal(read(tmp_path, row, 3 + len(data), 5 * BLOCK), flat(rows.t()))


@pytest.mark.gpu
def test_from_a_gpu(tmp_path: Path) -> None:
    data = torch.randn(SLOTS * BLOCK // 4 + 77, device="cuda")
    rows = torch.randn(500, 300, device="cuda")
    row = write(tmp_path / "a", b"abcd", data, rows.t())
    assert torch.equal(read(tmp_path, row, 4, data.nbytes), flat(data.cpu()))
    assert torch.equal(read(tmp_path, row, 4 + data.nbytes), flat(rows.t().cpu()))


def test_the_table_is_crc32c_of_each_block(tmp_path: Path) -> None:
    """Bit by bit, as the definition says, against the instruction of the processor."""
    row = write(tmp_path / "a", b"123456789")
    assert struct.unpack("<I", (tmp_path / "a").read_bytes()[row.table :]) == (0xE3069283,)
    assert row.crc == crc32c_by_definition(struct.pack("<I", 0xE3069283))
    data = bytes(pattern(BLOCK + 300).tolist())
    row = write(tmp_path / "b", data)
    sums = struct.unpack("<2I", (tmp_path / "b").read_bytes()[row.table :])
    assert sums[1] == crc32c_by_definition(data[BLOCK:])
    assert sums[0] == native.library().zk_crc32c(0, data[:BLOCK], BLOCK)


def crc32c_by_definition(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_readers_may_read_it_and_nothing_is_written_over(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    (tmp_path / "b").write_bytes(b"mine")
    with pytest.raises(IoError, match="EEXIST") as caught:
        FileWriter(tmp_path / "b")
    assert caught.value.errno == errno.EEXIST and (tmp_path / "b").read_bytes() == b"mine"


def test_a_block_that_ends_in_an_error_leaves_no_file(tmp_path: Path, nothing_left_open: None) -> None:
    writer = FileWriter(tmp_path / "a")
    writer.append(pattern(9 * BLOCK))
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="finished or abandoned"):
        writer.append(b"more")


def test_a_failed_write_is_told(tmp_path: Path, nothing_left_open: None) -> None:
    """And more than the disk has is refused at once."""
    begin = 5 * BLOCK + 3 * BLOCK
    for number in (errno.ENOSPC, errno.EIO):
        faults = Faults(fail=0, fail_op=native.IO_WRITE, fail_begin=begin, fail_end=begin + 1, fail_errno=number)
        with pytest.raises(IoError, match="Writing") as caught:
            write(tmp_path / "a", pattern(20 * BLOCK), faults=faults, block=BLOCK, depth=8)
        found = caught.value
        assert (found.path, found.offset, found.errno) == (str(tmp_path / "a"), begin, number)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(IoError, match="Making") as caught:
        FileWriter(tmp_path / "a", expected=1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG) and list(tmp_path.iterdir()) == []


def test_spans_in_any_order_that_overlap(tmp_path: Path) -> None:
    data = pattern(23 * BLOCK + 99)
    row = write(tmp_path / "a", data)
    spans = []
    for _ in range(60):
        begin = random.randrange(len(data))
        spans.append((begin, random.choice([0, 1, 100, BLOCK, 5 * BLOCK, len(data)])))
    spans = [(begin, min(nbytes, len(data) - begin)) for begin, nbytes in spans]
    found = [torch.zeros(nbytes, dtype=torch.uint8) for _, nbytes in spans]

    def into(i: int) -> Callable[[Tensor, int], None]:
        def take(piece: Tensor, at: int) -> None:
            found[i][at : at + len(piece)] = piece

        return take

    takes = [into(i) if i % 2 else one.data_ptr() for i, one in enumerate(found)]  # half of them by address
    told: list[int] = []
    with reading(tmp_path, row) as reader:
        reader.read([(begin, nbytes, take) for (begin, nbytes), take in zip(spans, takes, strict=True)], told.append)
    for (begin, nbytes), one in zip(spans, found, strict=True):
        assert torch.equal(one, data[begin : begin + nbytes])
    assert sum(told) == sum(nbytes for _, nbytes in spans)


def test_whole_rows_in_host_memory_are_read_without_a_tensor_for_each_block() -> None:
    into, row = (
        torch.zeros(2, 4, dtype=torch.bfloat16),
        TensorRow("bfloat16", (4, 4), [Box(0, 100, (0, 0), (4, 4), (0, 200))]),
    )

    def takes(offsets: tuple[int, ...], target: Tensor) -> list[Span]:
        parts = BoxTargets(torch.Size([4, 4]))
        parts.boxes.append((offsets, target))
        return [span for read in box_reads([("x", parts)], {"x": row}) for span in read.spans()]

    assert takes((1, 0), into) == [(100 + 4 * 2, 16, into.data_ptr())]
    for offsets, target in (((0, 0), into[:, :3]), ((0, 1), torch.zeros(4, 2, dtype=torch.bfloat16))):
        assert all(callable(take) for _, _, take in takes(offsets, target)), "rows have gaps here, or in the file"


def test_a_block_is_read_once_and_only_if_it_is_wanted(tmp_path: Path) -> None:
    row = write(tmp_path / "a", pattern(20 * BLOCK))
    with Slots(tmp_path) as slots, FileReader(tmp_path, row, slots, OpenFiles()) as reader:
        spans = [(BLOCK + 5, 10), (2 * BLOCK - 1, 2), (BLOCK, 100), (9 * BLOCK, BLOCK), (15 * BLOCK + 1, 1)]
        reader.read([(begin, nbytes, lambda piece, at: None) for begin, nbytes in spans])
        assert slots.engine.stats()["read_nbytes"] == 4 * BLOCK  # blocks 1, 2, 9 and 15


def test_what_is_outside_is_refused_and_an_error_of_the_taker_passes(tmp_path: Path) -> None:
    row = write(tmp_path / "a", pattern(9 * BLOCK))
    with reading(tmp_path, row) as reader:
        for begin, nbytes in ((0, row.table + 1), (row.table, 1), (-1, 2)):
            with pytest.raises(ValueError, match="no span of the"):
                reader.read([(begin, nbytes, lambda piece, at: None)])
        with pytest.raises(KeyboardInterrupt):
            reader.read([(0, row.table, lambda piece, at: exec("raise KeyboardInterrupt"))])
        assert not list(reader.find_damage(range(row.blocks)))
    with pytest.raises(ValueError, match="is closed"):
        reader.read([(0, 1, lambda piece, at: None)])


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, FileRow]:
    """A file of 13 blocks, of which 2 and 12 have one other bit."""
    row = write(tmp_path / "a", pattern(12 * BLOCK + 500))
    for place in (3 * BLOCK - 1, 12 * BLOCK + 1):
        flip(tmp_path / "a", place)
    return tmp_path, row


def test_damage_is_found_where_it_is(damaged: tuple[Path, FileRow]) -> None:
    folder, row = damaged
    told: list[int] = []
    with reading(folder, row) as reader:
        found = list(reader.find_damage(range(row.blocks), told.append))
        told_of = [(one.offset, one.nbytes, one.errno) for one in found]
        assert told_of == [(2 * BLOCK, BLOCK, errno.EBADMSG), (12 * BLOCK, 500, errno.EBADMSG)]
        assert sum(told) == row.table
        assert all(one.path == str(folder / "a") and "CRC32C" in str(one) for one in found)
        assert [one.offset for one in reader.find_damage(range(3, 12))] == []
        assert [f"offset {12 * BLOCK}" in str(one) for one in reader.find_damage(range(3, row.blocks))] == [True]


def test_no_damaged_byte_is_handed_out(damaged: tuple[Path, FileRow]) -> None:
    folder, row = damaged
    taken: list[tuple[int, int]] = []
    with reading(folder, row) as reader:
        with pytest.raises(IoError, match=f"offset {2 * BLOCK}"):
            reader.read([(0, row.table, lambda piece, at: taken.append((at, at + len(piece))))])
        assert max(end for _, end in taken) == 2 * BLOCK
        with pytest.raises(IoError):
            reader.read([(2 * BLOCK, 1, lambda piece, at: pytest.fail("unchecked"))])
        kept = torch.zeros(row.table, dtype=torch.uint8)
        with pytest.raises(IoError):
            reader.read([(0, row.table, kept.data_ptr())])
        assert torch.equal(kept[: 2 * BLOCK], pattern(row.table)[: 2 * BLOCK]) and not kept[2 * BLOCK :].any()
        reader.read([(3 * BLOCK, 9 * BLOCK, lambda piece, at: taken.append((0, 0)))])
    assert taken[-1] == (0, 0)


def test_other_lengths_are_refused(tmp_path: Path, nothing_left_open: None) -> None:
    row = write(tmp_path / "a", pattern(BLOCK + 9))
    whole = (tmp_path / "a").read_bytes()
    for data, says in (
        (whole[:-1], "truncated"),
        (whole[:5], "truncated"),
        (b"", "truncated"),
        (whole + b"x", "written to"),
    ):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(IoError, match=says) as caught, reading(tmp_path, row):
            pass
        assert caught.value.path == str(tmp_path / "a") and f"{row.nbytes} were written" in str(caught.value)
    (tmp_path / "a").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(IoError, match="table of checksums"), reading(tmp_path, row):
        pass
    (tmp_path / "a").unlink()
    with pytest.raises(IoError, match=r"Opening .*ENOENT"), reading(tmp_path, row):
        pass


def test_a_device_that_cannot_read_is_told(tmp_path: Path) -> None:
    row = write(tmp_path / "a", pattern(9 * BLOCK))
    begin = 3 * BLOCK + BLOCK
    faults = Faults(fail_op=native.IO_READ, fail_begin=begin, fail_end=begin + 1)
    with (
        Slots(tmp_path, faults=faults, block=BLOCK, depth=8) as slots,
        FileReader(tmp_path, row, slots, OpenFiles()) as reader,
    ):
        with pytest.raises(IoError, match=r"Reading .*EIO") as caught:
            reader.read([(0, row.table, lambda piece, at: None)])
        assert caught.value.offset == begin
        assert [one.errno for one in reader.find_damage(range(row.blocks))] == [errno.EIO]
        assert not list(reader.find_damage(range(4)))


def test_what_is_on_no_host_is_copied_by_torch() -> None:
    """By its address a copy of memory would end the process."""
    copy_into(torch.empty(3, device="meta"), torch.ones(3))
    turned = torch.zeros(2, 3).t()
    copy_into(turned, torch.arange(6.0).view(3, 2))
    assert torch.equal(turned, torch.arange(6.0).view(3, 2))


@ranked
def grown(world: World, folder: Path) -> int:
    large_things_apart()
    tensor = torch.ones(1, dtype=torch.float32).expand(2 * SLOTS * BLOCK // 4).view(2, -1).t()
    with FileWriter(folder / "a") as writer:
        writer.append(tensor[: BLOCK // 8])
        before = resident()
        most = []
        for part in tensor.split(BLOCK):
            writer.append(part)
            most.append(resident())
        writer.finish()
    return max(most) - before


def resident() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize("preferred", [4096, 1 << 16, 4 << 20])
def test_parts_go_past_the_page_cache_whatever_size_the_file_system_prefers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preferred: int
) -> None:
    """Parts of a file that others write into as well."""
    data = torch.randint(0, 256, (2 * BLOCK + 9000,), dtype=torch.uint8)
    begin, sent = 777, []
    (tmp_path / "a").write_bytes(bytes(begin + len(data) + 5))
    fstat, send = os.fstat, SlotWriter.send

    def noted(self: SlotWriter, offset: int, nbytes: int, inside: int = 0) -> None:
        sent.append((offset, nbytes))
        send(self, offset, nbytes, inside)

    monkeypatch.setattr(os, "fstat", lambda fd: mock.Mock(wraps=fstat(fd), st_blksize=preferred))
    monkeypatch.setattr(SlotWriter, "send", noted)
    fds = [os.open(tmp_path / "a", os.O_RDWR) for _ in range(2)]
    with Slots(tmp_path) as slots, PartsWriter(slots, tmp_path / "a", *fds) as writer:
        at = 0
        while at < len(data):
            room = writer.buffer(begin + at)[: len(data) - at]
            room.copy_(data[at : at + len(room)])
            writer.advance(len(room))
            at += len(room)
        writer.finish()
    for fd in fds:
        os.close(fd)
    assert (BLOCK, BLOCK) in sent
    assert (tmp_path / "a").read_bytes() == bytes(begin) + bytes(data.numpy()) + bytes(5)
