"""Folders that somebody else may write to, that cannot be locked, that fail: nothing elsewhere is touched."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zerokern as zk
from zerokern.checkpoint import folder
from zerokern.core.errors import IoError
from zerokern.interop import exported
from zerokern.io import Store
from zerokern.io import files as io_files


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


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file elsewhere, which nothing may touch."""
    (tmp_path / "secret").write_text("as it was")
    yield tmp_path / "secret"
    assert (tmp_path / "secret").read_text() == "as it was"


def planted(place: Path, secret: Path, names: Sequence[str], hard: bool) -> None:
    place.mkdir()
    for name in names:
        (place / name).hardlink_to(secret) if hard else (place / name).symlink_to(secret)


BOTH = pytest.mark.parametrize("hard", [False, True], ids=["symbolic", "hard"])


@BOTH
def test_an_export_follows_no_link(secret: Path, hard: bool) -> None:
    for nbytes in (64, "5G"):
        place, model = secret.with_name(f"theirs {nbytes}"), model_of()
        planted(place, secret, PLANTED, hard)
        model.config = Config()
        zk.export(place, model, max_shard_nbytes=nbytes)
        zk.load_pretrained(into := model_of(2.0), place)
        assert torch.equal(into.weight, model.weight)


@BOTH
@pytest.mark.parametrize("what", ["save", "export"])
def test_no_lock_and_no_index_is_a_link(secret: Path, hard: bool, what: str) -> None:
    call = getattr(zk, what)
    planted(place := secret.with_name("locked"), secret, ["zerokern.lock"], hard)
    with pytest.raises(IoError, match=r"zerokern\.lock .*: remove it"):
        call(place, model_of())
    planted(place := secret.with_name("indexed"), secret, ["zerokern.json.new"], hard)
    call(place, model_of())


def test_a_file_that_was_exchanged_while_it_was_written_is_refused(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = exported.Target.start

    def exchanged(self: Any, number: int, first: bytes, nbytes: int) -> None:
        before(self, number, first, nbytes)
        path = self.folder / self.files[number]
        path.unlink()
        path.symlink_to(secret)

    monkeypatch.setattr(exported.Target, "start", exchanged)
    with pytest.raises(IoError, match="cannot write"):
        zk.export(tmp_path / "c", model_of())


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


def test_paths_that_are_none_are_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (zk.save, zk.load, zk.export):
        with pytest.raises(ValueError, match="path=''"):
            call("", model_of())
        for name in ("x" * 300, "a/" * 3000):
            with pytest.raises(IoError, match=r"ENAMETOOLONG|does not exist"):
                call(tmp_path / name, model_of())
    assert not list(tmp_path.iterdir())


def failing(call: Callable[..., Any], *, when: str = "", number: int = errno.EIO) -> Callable[..., Any]:
    """The system's call, failing for paths that end so."""

    def inside(path: Any, *given: Any, **named: Any) -> Any:
        if str(path).endswith(when):
            raise OSError(number, os.strerror(number), str(path))
        return call(path, *given, **named)

    return inside


@pytest.mark.parametrize("call", [zk.save, zk.export])
def test_a_lock_that_fails_teaches(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that stays behind is no error: what was saved is published by then."""
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", failing(fcntl.flock, number=errno.ENOLCK))
        with pytest.raises(IoError, match=r"this file system has no flock\(\).*: choose a folder"):
            call(tmp_path / "c", model_of())
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(os.open, when="zerokern.lock"))
        with pytest.raises(IoError, match=r"is not possible: Input/output error \(EIO\)"):
            call(tmp_path / "c", model_of())
    monkeypatch.setattr(os, "unlink", failing(os.unlink, when="zerokern.lock"))
    for _ in range(2):
        call(tmp_path / "c", model_of())
    assert "stays behind, unlocked" in caplog.text


def test_new_folders_last_with_those_above_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    before = io_files.sync_folder

    def syncing(path: Path) -> None:
        synced.append(path)
        before(path)

    monkeypatch.setattr(io_files, "sync_folder", syncing)
    monkeypatch.setattr(folder, "sync_folder", syncing)
    makes = (
        lambda place: zk.save(place, model_of()),
        lambda place: zk.export(place, model_of()),
        lambda place: Store(place, budget=1 << 20, durable=True).close(),
    )
    for number, make in enumerate(makes):
        above = tmp_path / str(number)
        above.mkdir()
        synced.clear()
        make(above / "a" / "b" / "c")
        assert synced[:3] == [above, above / "a", above / "a" / "b"]
