"""Folders that somebody else may write to, that cannot be locked, that fail: nothing elsewhere is touched."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zerokern as zk
from zerokern.core.errors import IoError
from zerokern.io import files as io_files
from zerokern.saving import exported, folder


def model_of(value: float = 1.0) -> torch.nn.Linear:
    model = torch.nn.Linear(6, 5)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


class Config:
    """As transformers has it: a file beside the weights."""

    def to_json_string(self) -> str:
        return "{}"


PLANTED = [
    "model.safetensors", "model.safetensors.new", "model.safetensors.index.json", "model.safetensors.index.json.new",
    "model.safetensors.index.json.old", "config.json", "config.json.single.new", "config.json.index.new",
]  # fmt: skip


@pytest.mark.parametrize("several", [False, True], ids=["one file", "several"])
@pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])
def test_an_export_follows_no_link(tmp_path: Path, several: bool, hard: bool) -> None:
    place, secret = tmp_path / "theirs", tmp_path / "secret"
    place.mkdir()
    secret.write_text("as it was")
    for name in PLANTED:
        (place / name).hardlink_to(secret) if hard else (place / name).symlink_to(secret)
    model = model_of()
    model.config = Config()
    zk.export(place, model, max_shard_nbytes=64 if several else "5G")
    assert secret.read_text() == "as it was"
    into = model_of(2.0)
    zk.load_pretrained(into, place)
    assert torch.equal(into.weight, model.weight)


def test_a_file_that_was_exchanged_while_it_was_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("as it was")
    before = exported.Target.start

    def exchanged(self: Any, number: int, first: bytes, nbytes: int) -> None:
        before(self, number, first, nbytes)
        path = self.folder / self.files[number]
        path.unlink()
        path.symlink_to(secret)

    monkeypatch.setattr(exported.Target, "start", exchanged)
    with pytest.raises(IoError, match="cannot write"):
        zk.export(tmp_path / "c", model_of())
    assert secret.read_text() == "as it was"


@pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])
@pytest.mark.parametrize("name", ["zerokern.lock", "zerokern.json.new"])
@pytest.mark.parametrize("what", ["save", "export"])
def test_no_lock_and_no_index_is_a_link(tmp_path: Path, hard: bool, name: str, what: str) -> None:
    place, secret = tmp_path / "theirs", tmp_path / "secret"
    place.mkdir()
    secret.write_text("as it was")
    (place / name).hardlink_to(secret) if hard else (place / name).symlink_to(secret)
    if name == "zerokern.lock":
        with pytest.raises(IoError, match=r"zerokern\.lock .*: remove it"):
            getattr(zk, what)(place, model_of())
    else:
        getattr(zk, what)(place, model_of())
    assert secret.read_text() == "as it was"


def test_a_link_to_the_folder_is_followed(tmp_path: Path) -> None:
    """`latest -> step-100` is the user's own."""
    (tmp_path / "step-100").mkdir()
    (tmp_path / "latest").symlink_to("step-100")
    zk.save(tmp_path / "latest", model_of(3.0))
    into = model_of()
    zk.load(tmp_path / "latest", into)
    assert into.weight[0, 0] == 3 and (tmp_path / "step-100" / "zerokern.json").exists()
    zk.export(tmp_path / "latest", into)
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "step-100" / "model.safetensors").exists()


@pytest.mark.parametrize("call", ["save", "load", "export"])
def test_no_path_is_no_folder(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path=''"):
        getattr(zk, call)("", model_of())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["save", "export"])
def test_without_flock_it_is_said_what_to_do(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(IoError, match=r"this file system has no flock\(\).*: choose a folder"):
        getattr(zk, call)(tmp_path / "c", model_of())


@pytest.mark.parametrize("call", ["save", "export"])
def test_a_lock_that_cannot_be_made_teaches(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.open

    def failing(path: Any, *given: Any, **named: Any) -> int:
        if str(path).endswith("zerokern.lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return before(path, *given, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(IoError, match=r"is not possible: Input/output error \(EIO\)"):
        getattr(zk, call)(tmp_path / "c", model_of())


@pytest.mark.parametrize("call", ["save", "export"])
def test_a_lock_that_stays_behind_is_no_error(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was saved is published by then."""
    before = os.unlink

    def failing(path: Any, **named: Any) -> None:
        if str(path).endswith("zerokern.lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        before(path, **named)

    monkeypatch.setattr(os, "unlink", failing)
    getattr(zk, call)(tmp_path / "c", model_of())
    getattr(zk, call)(tmp_path / "c", model_of())
    assert "stays behind, unlocked" in caplog.text


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000], ids=["a long name", "a long path"])
@pytest.mark.parametrize("call", ["save", "load", "export"])
def test_names_beyond_the_system_s_are_refused_with_its_reason(tmp_path: Path, name: str, call: str) -> None:
    with pytest.raises(IoError, match=r"ENAMETOOLONG|does not exist"):
        getattr(zk, call)(tmp_path / name, model_of())


@pytest.mark.parametrize("call", ["save", "export", "swap"])
def test_new_folders_last_with_those_above_them(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    before = io_files.sync_folder

    def syncing(path: Path) -> None:
        synced.append(path)
        before(path)

    monkeypatch.setattr(io_files, "sync_folder", syncing)
    monkeypatch.setattr(folder, "sync_folder", syncing)
    place = tmp_path / "a" / "b" / "c"
    if call == "swap":
        from zerokern.io import Store

        Store(place, budget=1 << 20, durable=True).close()
    else:
        getattr(zk, call)(place, model_of())
    assert synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
