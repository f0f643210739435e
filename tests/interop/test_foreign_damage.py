"""Files of others that are damaged, packed otherwise or made to deceive: the right values, or an error of ours."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_cases import Small, everything, expected, same, trained, universal
from raw_cases import flip, raw
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import zerokern as zk
from zerokern.checkpoint.source import open_checkpoint
from zerokern.cli.main import main
from zerokern.core.errors import BudgetError, IoError, ZerokernError
from zerokern.interop import torchfile

NAMES = ["first.weight", "first.bias", "second.weight"]


def torch_file(path: Path) -> dict[str, Any]:
    """A file of torch.save, and what is in it by our keys."""
    model, opt = trained()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": 3, "ids": torch.arange(9)}, path)
    return expected(model, opt)


def repacked(path: Path, method: int = zipfile.ZIP_DEFLATED) -> None:
    """The same records in a zip that is packed otherwise, as a tool or a file server makes it."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", method) as new:
        for name, data in records.items():
            new.writestr(name, data)


def spoiled(path: Path, whole: torch.Tensor) -> None:
    """One bit of this tensor's bytes is another."""
    flip(path, path.read_bytes().index(raw(whole)) + 5)


def test_what_was_packed_again_is_read(tmp_path: Path) -> None:
    wanted = torch_file(tmp_path / "c.pt")
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        repacked(tmp_path / "c.pt", method)
        source = open_checkpoint(tmp_path / "c.pt")
        source.verify()
        source.name_parameters([NAMES])
        same(everything(source, wanted), wanted)
    model, opt = trained()
    universal(tmp_path / "u", model, opt)
    for file in (tmp_path / "u").rglob("*.pt"):
        repacked(file)
    source = open_checkpoint(tmp_path / "u")
    source.verify()
    same(everything(source), expected(model, opt))


def test_what_does_not_fit_unpacked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "c.pt")
    repacked(tmp_path / "c.pt")
    monkeypatch.setattr(torchfile, "memory_left", lambda: {"free memory": 1 << 20})
    with pytest.raises(BudgetError, match=r"c\.pt has .*, is compressed and takes .* unpacked"):
        open_checkpoint(tmp_path / "c.pt")


def test_damage_is_found_by_its_checksum(tmp_path: Path, capsys: Any) -> None:
    model, opt = trained()
    torch_file(tmp_path / "torch")
    universal(tmp_path / "u", model, opt)
    damaged = {"torch": tmp_path / "torch", "u": tmp_path / "u" / "zero" / "second.weight" / "fp32.pt"}
    for name, file in damaged.items():
        spoiled(file, model.second.weight.detach())
        path = tmp_path / name
        assert [error.key for error in open_checkpoint(path).find_damage()] == ["model.second.weight"]
        assert main(["checkpoint", "verify", str(path)]) == 1
        assert "model.second.weight" in capsys.readouterr().err
        for verify in ("first", "reading"):
            ours = Small()
            before = [param.detach().clone() for param in ours.parameters()]
            with pytest.raises(IoError, match=r"model\.second\.weight: Bad CRC-32"):
                zk.load(path, ours, zk.AdamW(ours.parameters()), verify=verify)
            assert verify == "reading" or all(map(torch.equal, ours.parameters(), before))


def test_what_has_no_checksums_is_said(tmp_path: Path, capsys: Any) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "new.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    for name in ("old.pt", "new.pt"):
        assert main(["checkpoint", "verify", str(tmp_path / name)]) == 0
        assert "not all have checksums" in capsys.readouterr().out
        same(everything(open_checkpoint(tmp_path / name)), {"model.w": torch.ones(3)})


def dcp_folder(folder: Path, change: Callable[[Any], object]) -> Path:
    """A matrix of two ranks' rows, whose index is changed by `change`."""
    from test_storage import Boxed

    whole = torch.arange(24.0).view(6, 4)
    cut = Boxed.of(whole, [((0, 0), (3, 4)), ((3, 0), (3, 4))])
    dcp.save({"w": cut}, checkpoint_id=folder, no_dist=True)
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))
    return folder


def chunks(found: Any) -> list[Any]:
    return found.state_dict_metadata["w"].chunks


def move(found: Any, to: tuple[int, int]) -> None:
    """The second box lies elsewhere, for both tables of the index."""
    chunks(found)[1] = ChunkStorageMetadata(torch.Size(to), torch.Size([3, 4]))
    stored = found.storage_data
    last = next(at for at in stored if tuple(at.offset) == (3, 0))
    stored[MetadataIndex(last.fqn, torch.Size(to), last.index)] = stored.pop(last)


COVERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "lacks": (lambda found: chunks(found).pop(), "do not make up its shape"),
    "one row off": (lambda found: move(found, (2, 0)), "overlap"),
    "at another's place": (lambda found: move(found, (0, 0)), "are stored in all"),
    "beyond": (lambda found: move(found, (4, 0)), "in a tensor of"),
    "twice": (lambda found: chunks(found).append(chunks(found)[0]), "are stored in all"),
    "often": (lambda found: chunks(found).__setitem__(slice(None), chunks(found) * 1000), "are stored in all"),
    "not stored": (lambda found: found.storage_data.popitem(), "was edited"),
}


def test_every_element_is_covered_once_or_nothing_changes(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.full((6, 4), -1.0))
    zk.load(dcp_folder(tmp_path / "sound", lambda found: None), model)
    assert torch.equal(model.w, torch.arange(24.0).view(6, 4))
    torch.nn.init.constant_(model.w, -1)
    for name, (change, says) in COVERS.items():
        with pytest.raises(IoError, match=says):
            zk.load(dcp_folder(tmp_path / name, change), model)
        assert bool((model.w == -1).all()), name


def test_a_checkpoint_of_ours_without_its_index_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    opt = zk.AdamW(model.parameters(), lr=0.5)
    zk.save(tmp_path / "c", model, opt)
    (tmp_path / "c" / "zerokern.json").unlink()
    with pytest.raises(IoError, match=r"is a checkpoint of zk\.save .* without its zerokern\.json"):
        zk.load(tmp_path / "c", model, opt)
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) != 0


def zip_of(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("archive/data.pkl", pickled)
        for name, data in (records or {}).items():
            made.writestr(f"archive/{name}", data)
    return stream.getvalue()


def tensor(numel: int, size: int, stride: int = 1) -> bytes:
    """A pickle of {"w": a tensor} whose header says what it is told to."""
    from zerokern.checkpoint.torch_zip import PROTOCOL, _Pickler, _Storage

    class Lying:
        def __reduce__(self) -> Any:
            rest = (0, (size,), (stride,), False, __import__("collections").OrderedDict())
            return torch._utils._rebuild_tensor_v2, (_Storage(torch.FloatStorage, numel), *rest)

    stream = io.BytesIO()
    _Pickler(stream, PROTOCOL).dump({"w": Lying()})
    return stream.getvalue()


LIST = b"](" + b"K\x01" * 50_000 + b"e"
BOMBS = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x0f.",
    "memo in words": b"\x80\x02Np268435455\n.",
    "text": b"\x80\x02X\xff\xff\xff\x7fa.",
    "bytes": b"\x80\x04\x8e\xff\xff\xff\xff\x01\0\0\0a.",
    "names": b"\x80\x02]" + b"".join(b"cm%d\nn\n0" % n for n in range(5_000)) + b".",
    "one list again and again": b"\x80\x02" + LIST + b"q\0]q\1(" + b"ctorch\nSize\nh\0\x85R" * 2_000 + b"e.",
    "one list in many objects": b"\x80\x02" + LIST + b"q\0]q\1(" + b"cbuiltins\nset\nh\0\x85R" * 2_000 + b"e.",
    "a bytearray": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a tensor": b"\x80\x02ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R.",
}


@pytest.mark.parametrize("kind", ["dcp", "zip", "legacy"])
def test_a_header_gets_no_more_memory_than_it_has_bytes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".metadata" if kind == "dcp" else tmp_path / "c.pt"
    for name, bomb in BOMBS.items():
        path.write_bytes(zip_of(bomb) if kind == "zip" else bomb)
        tracemalloc.start()
        try:
            with pytest.raises(IoError, match=r"was truncated or edited|which no index"):
                open_checkpoint(tmp_path if kind == "dcp" else path)
            assert tracemalloc.get_traced_memory()[1] < (20 << 20), name
        finally:
            tracemalloc.stop()


def test_no_tensor_is_larger_than_its_record(tmp_path: Path) -> None:
    for numel, size, stride in [(1 << 28, 1 << 28, 1), (4, 1 << 28, 1), (4, 4, 1 << 28), (4, -4, 1), (8, 4, 1)]:
        (tmp_path / "c.pt").write_bytes(zip_of(tensor(numel, size, stride), {"data/0": bytes(16)}))
        with pytest.raises(IoError, match=r"reaches beyond|is to have|has the size"):
            open_checkpoint(tmp_path / "c.pt")


def test_dictionaries_without_end_are_refused(tmp_path: Path) -> None:
    """Each holds itself, or the one before twice: 2^40 leaves in 40 lines."""
    own: dict[str, Any] = {}
    own["again"] = own
    torch.save(own, tmp_path / "own.pt")
    twice: dict[str, Any] = {"x": 1}
    for _ in range(40):
        twice = {"a": twice, "b": twice}
    torch.save(twice, tmp_path / "twice.pt")
    for name in ("own", "twice"):
        with pytest.raises(IoError, match="without end"):
            open_checkpoint(tmp_path / f"{name}.pt")


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["torch", "packed", "dcp", "dcp index", "universal"])
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path: Path, kind: str, count: int) -> None:
    model, opt = trained()
    path = tmp_path / "c"
    if kind in ("torch", "packed"):
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path)
        if kind == "packed":
            repacked(path)
        victim = path
    elif kind == "universal":
        universal(path, model, opt)
        victim = path / "zero" / "first.weight" / "exp_avg.pt"
    else:
        dcp.save({"model": model.state_dict(), "optim": opt.state_dict()}, checkpoint_id=path, no_dist=True)
        victim = path / (".metadata" if kind == "dcp index" else "__0_0.distcp")
    whole = victim.read_bytes()
    room, start = Small(), Small()
    resumed = zk.AdamW(room.parameters())
    harmless = 0
    for at, bit in [(n * len(whole) // count, n % 8) for n in range(count)]:  # evenly: every region has some
        victim.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        room.load_state_dict(start.state_dict())
        try:
            zk.load(path, room, resumed)
        except (ZerokernError, ValueError):
            same(room.state_dict(), start.state_dict())
        else:
            harmless += 1
            same(room.state_dict(), model.state_dict())
            for mine, theirs in zip(room.parameters(), model.parameters(), strict=True):
                for key, value in opt.state[theirs].items():
                    assert torch.equal(resumed.state[mine][key], value), (at, bit, key)
    assert harmless < count


def test_an_item_is_not_larger_than_its_file_says(tmp_path: Path) -> None:
    """What is packed to a thousandth is refused before any of it is unpacked."""
    dcp.save({"w": torch.ones(3), "note": bytes(1 << 24)}, checkpoint_id=tmp_path, no_dist=True)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    where = next(where for at, where in index.storage_data.items() if at.fqn == "note")
    file = tmp_path / where.relative_path
    data = file.read_bytes()
    (tmp_path / "item").write_bytes(data[where.offset : where.offset + where.length])
    repacked(tmp_path / "item")
    where.offset, where.length = len(data), (tmp_path / "item").stat().st_size
    file.write_bytes(data + (tmp_path / "item").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    tracemalloc.start()
    try:
        with pytest.raises(IoError, match=r"note is damaged: what is packed in it says that it has 16,\d*,\d* bytes"):
            open_checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
