"""Parts of a file that others write into as well, and what is copied into their slots."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from zerokern.saving.files import PartsWriter
from zerokern.saving.staging import BLOCK, Outgoing, Staging, put


@pytest.mark.parametrize("preferred", [4096, 1 << 16, 4 << 20])
def test_parts_go_past_the_page_cache_whatever_size_the_file_system_prefers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preferred: int
) -> None:
    data = torch.randint(0, 256, (2 * BLOCK + 9000,), dtype=torch.uint8)
    begin, sent = 777, []
    (tmp_path / "a").write_bytes(bytes(begin + len(data) + 5))
    fstat, send = os.fstat, Outgoing.send

    def noted(self: Outgoing, offset: int, nbytes: int, inside: int = 0) -> None:
        sent.append((offset, nbytes))
        send(self, offset, nbytes, inside)

    monkeypatch.setattr(os, "fstat", lambda fd: mock.Mock(wraps=fstat(fd), st_blksize=preferred))
    monkeypatch.setattr(Outgoing, "send", noted)
    fds = [os.open(tmp_path / "a", os.O_RDWR) for _ in range(2)]
    with Staging(tmp_path) as staging, PartsWriter(staging, tmp_path / "a", *fds) as writer:
        at = 0
        while at < len(data):
            room = writer.room(begin + at)[: len(data) - at]
            room.copy_(data[at : at + len(room)])
            writer.took(len(room))
            at += len(room)
        writer.finish()
    for fd in fds:
        os.close(fd)
    assert (BLOCK, BLOCK) in sent
    assert (tmp_path / "a").read_bytes() == bytes(begin) + bytes(data.numpy()) + bytes(5)


@pytest.mark.parametrize("there", [3, 5])
def test_more_or_fewer_elements_than_there_is_room_for_are_refused(there: int) -> None:
    around = torch.zeros(8)
    with pytest.raises(RuntimeError):
        put(around[:4], torch.ones(16)[:there])
    assert not around.any()
