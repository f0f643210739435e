"""The index says exactly what was written, or says that it does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerokern as zk
from zerokern.checkpoint.index import FORMAT, Box, FileRow, Index, TensorRow
from zerokern.core import native
from zerokern.core.errors import IoError, ZerokernError
from zerokern.core.units import itemsize

PATH = Path("step100") / "zerokern.json"


def sample() -> Index:
    """Two ranks: a matrix in two boxes, a scalar, an empty tensor."""
    files = [FileRow("s_0.distcp", 4100, 4096, 7), FileRow("s_1.distcp", (1 << 20) + 9, (1 << 20) + 1, 2**32 - 1)]
    matrix = TensorRow(
        "bfloat16", (4, 8), [Box(0, 64, (0, 0), (3, 8), (0, 200)), Box(1, 1 << 19, (3, 0), (1, 8), (1 << 19, 100))]
    )
    scalar = TensorRow("float32", (), [Box(0, 300, (), (), (256, 100))])
    empty = TensorRow("int8", (0, 3), [])
    tensors = {"model.w": matrix, "optim.state.w.step": scalar, "model.none": empty}
    return Index("20261122T070024-a1b2c3", 2, files, tensors, {"step": 4, "é": [1.5, None]}, {"torch": "2.13"})


def rewritten(change) -> bytes:
    """A sample whose content was changed by somebody who knows how to make the checksum right."""
    body = json.loads(sample().dump().partition(b"\n")[2])
    change(body)
    return with_checksum(body)


def with_checksum(body: Any) -> bytes:
    text = json.dumps(body).encode() + b"\n"
    return b'{"zerokern": 1, "crc32c": "%08x"}\n%s' % (native.library().zk_crc32c(0, text, len(text)), text)


def test_what_is_loaded_is_what_was_dumped_in_json_that_anybody_reads() -> None:
    assert Index.load(sample().dump(), PATH) == sample()
    assert sample().dump() == sample().dump()
    head, body = sample().dump().splitlines()
    assert json.loads(head)["zerokern"] == FORMAT
    assert json.loads(body)["tensors"]["model.w"][:2] == ["bfloat16", [4, 8]]


def test_any_changed_or_missing_byte_is_found() -> None:
    data = sample().dump()
    body = data.index(b"\n") + 1
    for at in range(body, len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(IoError, match=r"zerokern\.json (was edited or damaged|is truncated)") as refused:
            Index.load(changed, PATH)
        assert refused.value.path == str(PATH)
    for end in range(len(data)):
        with pytest.raises(IoError, match=r"truncated|edited"):
            Index.load(data[:end], PATH)


def test_a_newer_format_is_named() -> None:
    newer = sample().dump().replace(b'"zerokern": 1', b'"zerokern": 2', 1)
    with pytest.raises(IoError, match=r"has format 2; this zerokern reads format 1; a newer zerokern wrote it"):
        Index.load(newer, PATH)


def test_what_is_no_index_is_named_so() -> None:
    for foreign in (b"", b"[1]\n", b"{}\n{}\n", b"\x80\x04.", b'{"zerokern": 1}\n\n'):
        with pytest.raises(IoError, match="does not begin as an index of zerokern does"):
            Index.load(foreign, PATH)


def test_sound_checksums_do_not_excuse_nonsense() -> None:
    assert Index.load(rewritten(lambda body: None), PATH) == sample()
    for change, says in [
        (lambda b: b["files"][0].__setitem__(0, "../../etc/passwd"), "no name of a file"),
        (lambda b: b["files"][0].__setitem__(1, 4104), "cannot have 4104 bytes"),
        (lambda b: b["tensors"]["model.w"].__setitem__(1, [4, 9]), "do not make up its shape"),
        (lambda b: b["tensors"]["model.w"].__setitem__(1, [2, 8]), "in a tensor of"),
        (lambda b: b["tensors"]["model.w"].__setitem__(0, "pickle"), "name of no dtype"),
        (lambda b: b["tensors"]["model.w"][2].__setitem__(1, 9000), "not within"),
        (lambda b: b["tensors"]["model.w"][2].__setitem__(0, 2), "file number 2 of 2"),
        (lambda b: b["tensors"]["model.w"][2].pop(), "are no boxes of 2 dimensions"),
        (lambda b: b.pop("values"), "values"),
    ]:
        with pytest.raises(IoError, match=f"no sound content: .*{says}"):
            Index.load(rewritten(change), PATH)


NONSENSE: list[Any] = [None, True, -1, 1.5, math.nan, math.inf, 10**30, "", "x", [], [[]], [{}], {}, {"x": 1}]


def places(described: Any, at: tuple = ()) -> Iterator[tuple]:
    yield at
    if isinstance(described, dict | list):
        for key in described if isinstance(described, dict) else range(len(described)):
            yield from places(described[key], (*at, key))


def put(body: Any, at: tuple, value: Any) -> None:
    for key in at[:-1]:
        body = body[key]
    body[at[-1]] = value


def said_by(call: Callable[[], Any]) -> str:
    """What the library's own error says; empty: there was none."""
    try:
        call()
    except ZerokernError as error:
        return str(error)
    return ""


def test_any_value_in_any_place_is_refused_with_the_file_and_the_key() -> None:
    """Or it means something: another name, an empty list, another checksum."""
    body = json.loads(sample().dump().partition(b"\n")[2])
    for at in places(body):
        for value in NONSENSE if at else ():
            data = rewritten(lambda body, at=at, value=value: put(body, at, value))
            said = said_by(lambda data=data: Index.load(data, PATH))
            assert not said or (str(PATH) in said and any(str(key) in said for key in at)), (at, value, said)
            assert said or not isinstance(value, float) or at[0] in ("values", "versions"), (at, value)
            assert said or not isinstance(value, float) or math.isfinite(value), (at, value)
    with pytest.raises(IoError, match="does not begin as an index"):
        Index.load(b'{"zerokern": Infinity, "crc32c": ""}\n\n', PATH)


class Counter(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_any_value_among_what_is_no_tensor_is_loaded_or_refused_with_folder_and_key(tmp_path: Path) -> None:
    model = Counter(2, 1)
    opt = zk.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    extra = {"tree": {1: (2, b"x")}, "mean": torch.ones(2), "kept": zk.SGD(nn.Linear(1, 1).parameters())}
    zk.save(folder := tmp_path / "saved", model, opt, extra=extra, rng=True)
    data = (folder / "zerokern.json").read_bytes().partition(b"\n")[2]
    for at in places(json.loads(data)["values"], ("values",)):
        for value in (1.5, "x", [[]], {"x": 1}):
            put(body := json.loads(data), at, value)
            (folder / "zerokern.json").write_bytes(with_checksum(body))
            said = said_by(lambda: zk.load(folder, model, opt, rng=True))
            assert not said or (str(folder) in said and any(str(key) in said for key in at)), (at, value, said)


def test_itemsize_is_torchs() -> None:
    """But for what is quantized, and what is smaller than a byte."""
    odd = {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
    dtypes = {str(one)[6:]: one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    plain = {name: one for name, one in dtypes.items() if name not in odd and not name.startswith(("q", "bits"))}
    assert {"float32", "bfloat16", "int8", "bool", "complex64", "int16"} <= plain.keys()
    assert {name: itemsize(name) for name in plain} == {name: dtype.itemsize for name, dtype in plain.items()}
