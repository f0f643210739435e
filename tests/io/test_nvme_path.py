"""A path or a budget that cannot be is told where zk.Nvme is made, and not by the first step hours later."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

import zerokern as zk
from zerokern.io.tier import below


@pytest.mark.parametrize("path, number, says", [
    ("missing/swap", errno.ENOENT, r"cannot be made: there is no folder .*missing\. Make it, or correct the path"),
    ("file", errno.ENOTDIR, "A part of the path is a file"),
    ("file/swap", errno.ENOTDIR, "A part of the path is a file"),
], ids=str)  # fmt: skip
def test_a_path_that_cannot_be_is_told_where_the_tier_is_made(
    path: str, number: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(zk.IoError, match=says) as caught:
        zk.Nvme(tmp_path / path)
    assert (caught.value.errno, caught.value.path) == (number, str(tmp_path / path))
    zk.Nvme(tmp_path / "not there yet"), zk.Nvme(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"], "nothing is made before it is needed"


@pytest.mark.parametrize("name", ["", "swap"])
def test_a_folder_that_may_not_be_written_is_told_where_the_tier_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swap").mkdir()
    given = tmp_path / "swap" / name if name else tmp_path / "swap"
    monkeypatch.setattr(
        os, "access", lambda path, mode, **_: Path(path) != tmp_path / "swap"
    )  # root may write anywhere
    with pytest.raises(zk.IoError, match="This user may not: choose another folder, or change its mode") as caught:
        zk.Nvme(given)
    assert caught.value.errno == errno.EACCES


def test_a_read_only_file_system_is_told_where_the_tier_is_made(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        for path in (tmp_path, tmp_path / "swap"):
            with pytest.raises(zk.IoError, match=r"Read-only file system \(EROFS\).*choose another folder"):
                zk.Nvme(path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_budget_beyond_the_whole_disk_is_told_where_the_tier_is_made(tmp_path: Path) -> None:
    size = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    with pytest.raises(zk.BudgetError, match=r"does not fit on the file system of .*in all; ask for less"):
        zk.Nvme(tmp_path / "swap", budget=size + 1)
    assert zk.Nvme(tmp_path / "swap", budget=size).budget == size


def test_a_folder_below_need_not_be_there(tmp_path: Path) -> None:
    """Each rank has one, and a configuration of DeepSpeed names them so."""
    tier = zk.Nvme(tmp_path / "swap", budget="1M", checksum=True)
    made = below(tier, "zerokern", "rank0")
    assert made == below(zk.Nvme(tmp_path, budget="1M", checksum=True), "swap", "zerokern", "rank0") != tier
    assert made.path == str(tmp_path / "swap/zerokern/rank0") and tier.path == str(tmp_path / "swap")
