"""`zerokern checkpoint`: what is there is told, what is broken is named, and the exit status says which."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import zerokern as zk
from zerokern.checkpoint.folder import Draft, read_published
from zerokern.checkpoint.saver import save
from zerokern.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a model with bf16 state, after two steps."""
    model = torch.nn.Linear(64, 512)
    opt = zk.AdamW(model.parameters(), lr=0.5, state_format="bf16")
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
    save(tmp_path / "step2", model, opt, extra={"epoch": 1, "note": "first"})
    return tmp_path / "step2"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == status
    told = capsys.readouterr()
    return told.out if status == 0 else told.err


def test_show_says_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "show", folder)
    assert "a checkpoint of zk.save" in page and "by 1 rank (" in page and "step 2," in page
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line}
    assert rows["model"][1:4] == ["2", "33,280", "133,120"] and rows["model"][-1] == "float32"
    assert rows["exp_avg"][2] == "33,280" and rows["exp_avg"][-1] == "bfloat16"
    assert "lr=0.5" in page and "extra: epoch, note" in page
    assert rows["model.weight"][1:] == ["float32", "[512,", "64]"]


def test_json_has_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "show", folder, "--json"))
    assert found["kind"] == "zerokern" and found["step"] == 2 and found["world"] == 1
    assert found["tensors"]["model.bias"] == ["float32", [512], 1]
    assert found["roles"]["exp_avg_sq"]["nbytes"] == 2 * 33280
    assert found["values"]["groups"][0][0]["lr"] == 0.5 and "torch" in found["versions"]


def test_a_parent_lists_its_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder.parent / "step1", torch.nn.Linear(2, 2))
    os.utime(folder.parent / "step1" / "zerokern.json", (1, 1))
    draft = Draft.begin(folder.parent / "step3", 0)
    draft.file(0).write_bytes(b"half of it")
    draft._release()
    save(folder.parent / "step4", torch.nn.Linear(2, 2))
    os.truncate(folder.parent / "step4" / read_published(folder.parent / "step4").files[0].name, 10)
    (folder.parent / "notes").mkdir()
    page = said(capsys, "show", folder.parent)
    rows = {line.split()[0]: line for line in page.splitlines()[2:]}
    assert sorted(rows) == ["step1", "step2", "step3", "step4"]
    assert "days" in rows["step1"] and rows["step2"].endswith("published")
    assert "partial: a save of" in rows["step3"] and "never published" in rows["step3"]
    assert "broken: " in rows["step4"] and "is truncated: it has 10 bytes" in rows["step4"]
    found = {row["name"]: row["state"] for row in json.loads(said(capsys, "show", folder.parent, "--json"))}
    assert found == {"step1": "published", "step2": "published", "step3": "partial", "step4": "broken"}


def test_verify_says_that_it_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "are as they were written" in said(capsys, "verify", folder)


def test_verify_names_each_broken_block_and_what_lies_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = read_published(folder)
    box = index.tensors["model.weight"].boxes[0]
    with open(folder / index.files[box.file].name, "r+b") as file:
        file.seek(box.offset + 5)
        byte = file.read(1)
        file.seek(box.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    heard = said(capsys, "verify", folder, status=1)
    assert index.files[box.file].name in heard and "model.weight" in heard
    assert "1 broken part in" in heard


def test_a_file_of_torch_is_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 4}, tmp_path / "last.pt")
    page = said(capsys, "show", tmp_path / "last.pt")
    assert "a file of torch.save" in page and "step unknown" in page and "extra: epoch" in page
    assert "are as they were written" in said(capsys, "verify", tmp_path / "last.pt")


def test_what_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in said(capsys, "show", tmp_path / "none", status=1)
    assert "nothing at all" in said(capsys, "verify", tmp_path, status=1)
