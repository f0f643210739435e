"""The safetensors format against its own library, both ways, and files that are not what they say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from raw_cases import raw, some
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from zerokern.core.errors import IoError
from zerokern.interop.tensorfile import DTYPES, code_of, header, read_header, read_index

# of torch's dtypes, what the library that is installed writes too
TABLE = __import__("safetensors.torch").torch._TYPES
SHAPES = ((3, 5), (), (0, 4), (7,))


def written(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    first, offsets, nbytes = header([(n, t.dtype, t.shape) for n, t in tensors.items()], metadata)
    content = bytearray(nbytes)
    content[: len(first)] = first
    for name, tensor in tensors.items():
        assert offsets[name] % tensor.element_size() == 0
        content[offsets[name] : offsets[name] + tensor.nbytes] = raw(tensor)
    path.write_bytes(content)


def every_dtype() -> dict[str, torch.Tensor]:
    dtypes = [dtype for code, dtype in DTYPES.items() if code in TABLE]
    assert len(dtypes) >= 16
    return {f"{code_of('', d)} {shape} ä": some(d, shape) for d in dtypes for shape in SHAPES}


def test_their_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = every_dtype()
    written(tmp_path / "ours", tensors, {"format": "pt"})
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor)


def test_we_read_what_their_library_writes(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    found = read_header(tmp_path / "theirs")
    assert found.metadata == {"format": "pt"}
    content = (tmp_path / "theirs").read_bytes()
    assert found.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = found.entries[name]
        assert (entry.dtype, entry.shape, entry.numel) == (tensor.dtype, tuple(tensor.shape), tensor.numel())
        assert content[entry.offset : entry.offset + entry.nbytes] == raw(tensor)


GOOD = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def file_of(described: object, data: bytes = bytes(8)) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_(**changes: object) -> dict:
    return {"w": {**GOOD["w"], **changes}}


TWICE = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
TWO = {"dtype": "F32", "shape": [1]}
BROKEN = {
    "empty": (b"", "truncated"),
    "within the header": (file_of(GOOD)[:30], "truncated within the header"),
    "within the data": (file_of(GOOD)[:-3], "truncated"),
    "bytes behind": (file_of(GOOD, bytes(9)), "1 B behind the last tensor"),
    "overlapping": (
        file_of({"a": {**TWO, "data_offsets": [0, 4]}, "b": {**TWO, "data_offsets": [2, 6]}}, bytes(6)),
        "'b' and 'a' overlap",
    ),
    "a gap": (
        file_of({"a": {**TWO, "data_offsets": [0, 4]}, "b": {**TWO, "data_offsets": [6, 10]}}, bytes(10)),
        "2 B before 'b' belong to no tensor",
    ),
    "named twice": (file_of(TWICE), "'w' is there twice"),
    "no JSON": (file_of(b"{nothing}"), "JSON cannot be read"),
    "no text": (file_of(b'{"\xff": 1}'), "JSON cannot be read"),
    "deep": (file_of(b"[" * 100_000), "JSON cannot be read"),
    "a list": (file_of(b"[]"), "is a list, not an object"),
    "no description": (file_of({"w": 3}), "'w' is not described"),
    "a strange dtype": (file_of(with_(dtype="F33")), "'F33'"),
    "a negative shape": (file_of(with_(shape=[-2])), "has the shape [-2]"),
    "a shape of truth": (file_of(with_(shape=[True])), "has the shape [True]"),
    "three offsets": (file_of(with_(data_offsets=[0, 4, 8])), "needed: a begin and an end"),
    "backwards": (file_of(with_(data_offsets=[8, 0])), "needed: a begin and an end"),
    "another size": (file_of(with_(shape=[3])), "takes 12 B, and its data_offsets span 8 B"),
    "a huge shape": (file_of(with_(shape=[2**62, 2**62])), "data_offsets span 8 B"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}, **GOOD}), "__metadata__"),
    "a zip": (b"PK\x03\x04" + bytes(40), "torch.save"),
    "a pickle": (b"\x80\x02}q\x00." + bytes(40), "a pickle"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(40), "GGUF"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "Git LFS"),
    "an enormous header": (struct.pack("<Q", 2**50) + bytes(40), "not a safetensors file"),
}


def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for case, (content, says) in BROKEN.items():
        path.write_bytes(content)
        with pytest.raises(IoError) as caught:
            read_header(path)
        assert says in str(caught.value) and caught.value.path == str(path), (case, str(caught.value))
        with pytest.raises((SafetensorError, UnicodeDecodeError, ValueError, OSError)):  # theirs refuses it too
            load_file(path)
    with pytest.raises(IoError, match="No such file") as caught:
        read_header(tmp_path / "nowhere")
    assert caught.value.errno == 2


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="complex128"):
        header([("w", torch.complex128, [1])])
    with pytest.raises(ValueError, match="__metadata__"):
        header([("__metadata__", torch.float32, [1])])
    with pytest.raises(ValueError, match="names that differ"):
        header([("w", torch.float32, [1]), ("w", torch.float32, [1])])


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    for file in ("../model.safetensors", "/etc/passwd", "a\\b", "..", "", 3):
        path.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(IoError, match="weight_map" if file == 3 else "no name of a file beside it"):
            read_index(path)
