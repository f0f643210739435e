"""A folder holds the old checkpoint whole or the new one whole, whatever happens to the process that saves."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerokern.checkpoint.folder import Draft, latest, leftovers, read_published, saved_at
from zerokern.checkpoint.index import Box, FileRow, Index, TensorRow
from zerokern.checkpoint.source import open_checkpoint
from zerokern.core.errors import BudgetError, IoError

STEPS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "close", "ftruncate", "replace", "pwrite")
NBYTES = 4096


def fill(draft: Draft, byte: int, ranks: int = 2) -> Index:
    """Writes each rank's data file, as a save does, and makes the index for them."""
    rows, boxes = [], []
    for rank in range(ranks):
        path = draft.file(rank)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(fd, bytes([byte]) * NBYTES)
        os.write(fd, bytes(4))
        os.fsync(fd)
        os.close(fd)
        rows.append(FileRow(path.name, NBYTES + 4, NBYTES, 0))
        boxes.append(Box(rank, 0, (rank * NBYTES,), (NBYTES,), (0, NBYTES)))
    tensors = {"model.w": TensorRow("uint8", (ranks * NBYTES,), boxes)}
    return Index(draft.save_id, ranks, rows, tensors, {"byte": byte})


def save(folder: Path, byte: int) -> str:
    draft = Draft.begin(folder, 2 * NBYTES)
    draft.publish(fill(draft, byte), metadata=draft.save_id.encode())
    return draft.save_id


def bytes_of(folder: Path) -> int:
    """The byte that all of a published checkpoint is full of."""
    source = open_checkpoint(folder)
    index = read_published(folder)
    data = b"".join((folder / file.name).read_bytes()[:NBYTES] for file in index.files)
    assert source.values == index.values
    assert data == bytes([source.values["byte"]]) * len(data) and len(data) == 2 * NBYTES
    return source.values["byte"]


def outcome(folder: Path) -> int | None:
    """That byte, or None where the error says that there is none."""
    if (folder / "zerokern.json").exists():
        return bytes_of(folder)
    with pytest.raises(IoError, match=r"does not exist|never published|is no checkpoint: .* nothing at all"):
        open_checkpoint(folder)
    return None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Runs `work` in a child that is killed before that call of the system; whether it came to its end instead."""
    pid = os.fork()
    if pid == 0:
        calls = itertools.count()

        def counted(call: Callable) -> Callable:
            def counting(*arguments: object, **keywords: object) -> object:
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **keywords)

            return counting

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child ended with status {status}"
    return status == 0


@pytest.mark.parametrize("old, every", [(1, 5), *(pytest.param(old, 1, marks=pytest.mark.slow) for old in (1, None))])
def test_a_kill_between_any_two_steps_leaves_the_old_or_the_new(tmp_path: Path, old: int | None, every: int) -> None:
    """Before every fifth call of the system, or every one; with and without an older checkpoint."""
    outcomes = []
    for step in range(0, 200, every):
        folder = tmp_path / f"kill{step}"
        if old:
            save(folder, old)
        ended = killed_at(step, lambda folder=folder: save(folder, 2))
        outcomes.append(outcome(folder))
        assert old is None or outcomes[-1] is not None
        if outcomes[-1] is not None:
            # torch's own index, too, speaks of files that are there
            torchs = (folder / ".metadata").read_text() if (folder / ".metadata").exists() else None
            assert torchs is None or (folder / f"{torchs}_1.distcp").exists()
        if ended:
            break
        third = save(folder, 3)  # the next save removes what was left
        assert bytes_of(folder) == 3
        assert names(folder) == [".metadata", f"{third}_0.distcp", f"{third}_1.distcp", "zerokern.json"]
        assert (folder / ".metadata").read_text() == third
    assert ended, "more than 200 steps"
    assert set(outcomes) == {old, 2}
    assert outcomes == sorted(outcomes, key=lambda byte: byte == 2), "once published, it stays"
    assert step > 25, "the child was killed at fewer steps than a save has"


def test_the_order_of_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is renamed before all of it lasts, nothing goes before the rename lasts."""
    save(tmp_path / "c", 1)
    draft = Draft.begin(tmp_path / "c", 0)
    index = fill(draft, 2)
    told: list[str] = []

    def name_of(what: object) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what))
        return path.name.replace(draft.save_id, "ID")

    for name in ("fsync", "rename", "unlink"):
        real = getattr(os, name)

        def call(what: object, *rest: object, n: str = name, f: Callable = real, **more: object) -> object:
            told.append(f"{n} {name_of(what)}")
            return f(what, *rest, **more)

        monkeypatch.setattr(os, name, call)
    draft.publish(index, b"")
    renames = ["rename zerokern.json.new", "rename .metadata.ID.new", "fsync c"]
    assert told[:6] == ["fsync .metadata.ID.new", "fsync zerokern.json.new", "fsync c", *renames]
    assert [word.split()[0] for word in told[6:8]] == ["unlink", "unlink"]
    assert all(word.endswith((".distcp", "zerokern.lock")) for word in told[6:])


def test_a_disk_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **folders: int) -> None:
        raise OSError(errno.EIO, "the disk says no")

    first = save(tmp_path, 1)
    for failing in ("fsync", "rename"):
        draft = Draft.begin(tmp_path, 0)
        index = fill(draft, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fails)
            with pytest.raises(IoError, match=r"Publishing the checkpoint .*EIO") as refused:
                draft.publish(index, b"")
        assert refused.value.errno == errno.EIO
        draft.abandon()
        assert bytes_of(tmp_path) == 1
        assert names(tmp_path) == [".metadata", f"{first}_0.distcp", f"{first}_1.distcp", "zerokern.json"]


@pytest.mark.parametrize("killed", [False, True])
def test_an_error_after_the_rename_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    folder = tmp_path / "c"
    save(folder, 1)
    draft = Draft.begin(folder, 0)
    index = fill(draft, 2)
    rename = os.rename

    def second_fails(source: str, target: str, **folders: int) -> None:
        if target == ".metadata":
            raise OSError(errno.ENOSPC, "full")
        rename(source, target, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", second_fails)
        with pytest.raises(IoError, match=r"ENOSPC"):
            draft.publish(index, b"the second")
    index = read_published(folder)
    assert (folder / f".metadata.{index.save_id}.new").exists() and len(leftovers(folder, index)) == 3
    draft._release() if killed else draft.abandon()
    Draft.begin(folder, 0).abandon()
    # torch's own index speaks of the files that are left
    assert (folder / ".metadata").read_bytes() == b"the second"
    assert leftovers(folder, index) == []
    assert bytes_of(folder) == 2


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    draft = Draft.begin(tmp_path / "c", 0)
    with pytest.raises(IoError, match=r"in use by this process \(pid \d+\) itself, since .* call wait\(\)"):
        Draft.begin(tmp_path / "c", 0)
    draft.abandon()
    assert not (tmp_path / "c").exists(), "a folder that was made for nothing"

    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        Draft.begin(tmp_path / "c", 0)
        os.write(ready[1], b"1")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(
            IoError, match=rf"in use by the process with pid {pid} on .*, since .* choose another folder"
        ):
            Draft.begin(tmp_path / "c", 0)
        with pytest.raises(IoError, match=rf"no published checkpoint: a save is being written by .* pid {pid}"):
            read_published(tmp_path / "c")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert save(tmp_path / "c", 5)  # the lock died with its owner


def test_no_space_is_told_before_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path / "c", 1)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3 << 10, f_frsize=1 << 10))
    with pytest.raises(BudgetError) as refused:
        Draft.begin(tmp_path / "c", 5 << 20)
    said = str(refused.value)
    assert "nothing was written" in said and "6.0 MiB" in said and "3.0 MiB" in said
    assert "kept until the new one is published" in said
    assert names(tmp_path / "c") == [".metadata", f"{first}_0.distcp", f"{first}_1.distcp", "zerokern.json"]
    with pytest.raises(BudgetError):
        Draft.begin(tmp_path / "d" / "e", 5 << 20)
    assert not (tmp_path / "d" / "e").exists()
    Draft.begin(tmp_path / "c", 2 << 20).abandon()
    assert bytes_of(tmp_path / "c") == 1


def test_what_is_no_checkpoint_is_told_with_what_is(tmp_path: Path) -> None:
    """Never published, not there, something else: and which is the newest beside it or within it."""
    draft = Draft.begin(tmp_path / "a" / "b" / "only", 0)
    fill(draft, 1)
    draft._release()
    with pytest.raises(IoError, match=r"never published, and is ignored. No other checkpoint was ever published"):
        open_checkpoint(tmp_path / "a" / "b" / "only")
    save(tmp_path / "step1", 1)
    with pytest.raises(IoError, match=rf"step9 does not exist. The newest .* {tmp_path / 'step1'}"):
        open_checkpoint(tmp_path / "step9")
    save(tmp_path / "step2", 2)
    os.utime(tmp_path / "step1" / "zerokern.json", (1, 1))
    draft = Draft.begin(tmp_path / "step3", 0)
    index = fill(draft, 3)
    (draft.folder / "zerokern.json.new").write_bytes(index.dump()[:100])
    draft._release()
    for path, says in {
        "step3": rf"was begun and never published, and is ignored.*beside it is {tmp_path / 'step2'}: load that",
        "": rf"newest checkpoint within it is {tmp_path / 'step2'}",
    }.items():
        with pytest.raises(IoError, match=says):
            open_checkpoint(tmp_path / path)
    assert latest(tmp_path) == tmp_path / "step2" and latest(tmp_path / "step1") is None
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").write_text("")
    with pytest.raises(IoError, match=r"is no checkpoint: there is no zerokern\.json in it, but read\.me"):
        open_checkpoint(tmp_path / "notes")


def test_a_damaged_data_file_is_named(tmp_path: Path) -> None:
    save(tmp_path / "step1", 1)
    damages: dict[str, Callable[[Path], object]] = {
        "is truncated: it has 100 bytes, 4,100 were written": lambda path: os.truncate(path, 100),
        "is longer than it was: it has 5,000 bytes": lambda path: path.write_bytes(bytes(5000)),
        "4,100 B, is missing": lambda path: path.unlink(),
    }
    for says, damage in damages.items():
        save_id = save(tmp_path / "step2", 2)
        damage(tmp_path / "step2" / f"{save_id}_1.distcp")
        with pytest.raises(IoError, match=rf"is not whole: {save_id}_1\.distcp.*{says}.*{tmp_path / 'step1'}"):
            open_checkpoint(tmp_path / "step2")
        draft = Draft.begin(tmp_path / "step1", 0)
        index = fill(draft, 3)
        damage(draft.file(1))
        with pytest.raises(IoError, match=r"is not published: .*The one before it is untouched"):
            draft.publish(index, b"")
        draft.abandon()
        assert bytes_of(tmp_path / "step1") == 1


def test_what_is_edited_torchs_or_no_folder_is_not_saved_over(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    path = tmp_path / "c" / "zerokern.json"
    path.write_bytes(path.read_bytes().replace(b'"byte":1', b'"byte":9'))
    before = names(tmp_path / "c")
    with pytest.raises(IoError, match=r"was edited or damaged"):
        open_checkpoint(tmp_path / "c")
    (tmp_path / "torchs").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / "torchs" / name).write_bytes(b"torch's")
    (tmp_path / "file").write_text("")
    for name, says in {
        "c": r"was edited or damaged.*Nothing is saved over it",
        "torchs": r"holds a checkpoint of torch.distributed.checkpoint",
        **dict.fromkeys(("file", "file/below"), "ENOTDIR|EEXIST"),
    }.items():
        with pytest.raises(IoError, match=says):
            Draft.begin(tmp_path / name, 0)
    assert names(tmp_path / "c") == before and names(tmp_path / "torchs") == [".metadata", "__0_0.distcp"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Of ours goes what another save has left; when one began is in its name."""
    draft = Draft.begin(tmp_path, 0)
    assert abs(saved_at(draft.save_id) - (tmp_path / "zerokern.lock").stat().st_mtime) < 5
    draft.abandon()
    assert tmp_path.exists(), "it was there before"
    save(tmp_path, 1)
    for name in ("notes.txt", "20261122T070024-a1b2c3_0.distcp.bak", "__0_0.distcp"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "20261122T070024-a1b2c3_7.distcp").write_text("of a killed save")
    assert [path.name for path in leftovers(tmp_path, read_published(tmp_path))] == ["20261122T070024-a1b2c3_7.distcp"]
    save(tmp_path, 2)
    assert {"notes.txt", "20261122T070024-a1b2c3_0.distcp.bak", "__0_0.distcp"} <= set(names(tmp_path))
    assert "20261122T070024-a1b2c3_7.distcp" not in names(tmp_path)


def test_other_ranks_must_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft.begin(tmp_path / "c", 0)
    other = Draft.join(tmp_path / "c", draft.save_id, rank=1)
    assert other.file(1) == draft.file(1)
    with pytest.raises(ValueError, match=r"only rank 0 publishes"):
        other.publish(Index(draft.save_id, 2, [], {}, {}), b"")
    other.abandon()
    assert (tmp_path / "c").exists()
    draft.abandon()
    monkeypatch.setattr("zerokern.checkpoint.folder.APPEARS_S", 0.1)
    with pytest.raises(IoError, match=r"rank 1 does not see .* a file system that every host mounts"):
        Draft.join(tmp_path / "elsewhere", draft.save_id, rank=1)


def test_a_save_that_replaces_what_is_being_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading the index and looking at the files it names, another process publishes."""
    save(tmp_path, 1)
    load, calls = Index.load, []

    def meanwhile(data: bytes, path: Path) -> Index:
        index = load(data, path)
        if not calls:
            calls.append(index.save_id)
            monkeypatch.setattr(Index, "load", staticmethod(load))
            save(tmp_path, 2)
        return index

    monkeypatch.setattr(Index, "load", staticmethod(meanwhile))
    assert read_published(tmp_path).values == {"byte": 2}
    assert calls


def test_newer_ones_that_are_not_complete_are_skipped_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert latest(tmp_path / "not there") is None and latest(str(tmp_path)) is None
    for step in range(1, 6):
        save(tmp_path / f"step{step}", step)
        os.utime(tmp_path / f"step{step}" / "zerokern.json", (step, step))
    assert latest(tmp_path) == tmp_path / "step5" and not caplog.text
    draft = Draft.begin(tmp_path / "step6", 0)
    draft.file(0).write_bytes(b"half of it")
    draft._release()
    (tmp_path / "step5" / "zerokern.json").write_text("{")
    os.utime(tmp_path / "step5" / "zerokern.json", (5, 5))
    next((tmp_path / "step4").glob("*.distcp")).unlink()
    next((tmp_path / "step3").glob("*.distcp")).write_bytes(b"short")
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == tmp_path / "step2"
    told = {Path(record.args[0]).name: record.args[1] for record in caplog.records}
    assert list(told) == ["step6", "step5", "step4", "step3"]
    assert "never published" in told["step6"] and "is missing" in told["step4"] and "truncated" in told["step3"]


def test_the_newest_checkpoint_is_the_one_that_was_saved_last_whatever_its_files_say(tmp_path: Path) -> None:
    """`cp -r` writes files in any order. Within a second, too; and a checkpoint that says nothing goes by its file."""
    for step in range(1, 5):
        save(tmp_path / f"step{step}", step)
    for step in range(1, 5):
        for path in [*(tmp_path / f"step{step}").iterdir(), tmp_path / f"step{step}"]:
            os.utime(path, (2e9 - step, 2e9 - step))
    assert latest(tmp_path) == tmp_path / "step4"
    save(tmp_path / "step2", 5)  # again, after the others
    os.utime(tmp_path / "step2" / "zerokern.json", (1, 1))
    assert latest(tmp_path) == tmp_path / "step2"
    (tmp_path / "step2" / "zerokern.json").write_text("")
    assert latest(tmp_path) == tmp_path / "step4"
