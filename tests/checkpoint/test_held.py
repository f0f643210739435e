"""What is loaded is what was looked at: on every rank the same, and nothing of a save that comes between."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import zerokern as zk
from zerokern.checkpoint.folder import OpenFiles, fingerprint
from zerokern.checkpoint.ranks import Ranks, open_same
from zerokern.checkpoint.source import Saved
from zerokern.core.errors import StateError
from zerokern.interop import pretrained

Load: Any = __import__("importlib").import_module("zerokern.checkpoint.loader")


pytestmark = pytest.mark.usefixtures("nothing_left_open")


def model_of(value: float) -> tuple[torch.nn.Linear, zk.AdamW]:
    model = torch.nn.Linear(40, 30)
    opt = zk.AdamW(model.parameters(), lr=value)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    model(torch.ones(1, 40)).sum().backward()
    opt.step()
    return model, opt


def test_what_was_verified_is_checked_again(tmp_path: Path) -> None:
    zk.save(tmp_path / "c", torch.nn.Linear(40, 30), rng=False)
    source = Saved(tmp_path / "c")
    source.verify()
    with open(tmp_path / "c" / source.index.files[0].name, "r+b") as file:
        file.seek(500)
        file.write(b"spoilt")
    assert [error.errno for error in source.find_damage()] == [errno.EBADMSG]
    source.close()


@pytest.mark.parametrize("when", ["check", "read_values"])
@pytest.mark.parametrize("verify", ["first", "reading"])
def test_a_save_into_the_folder_does_not_change_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, verify: str
) -> None:
    one, two = model_of(1.0), model_of(2.0)
    zk.save(tmp_path / "c", *one)
    before = getattr(Load.Loading, when)

    def saving(self: Any, *given: Any) -> Any:
        zk.save(tmp_path / "c", *two)
        return before(self, *given)

    monkeypatch.setattr(Load.Loading, when, saving)
    into = model_of(3.0)
    zk.load(tmp_path / "c", *into, verify=verify)
    assert torch.equal(into[0].weight, one[0].weight) and into[1].param_groups[0]["lr"] == 1.0
    for mine, theirs in zip(into[0].parameters(), one[0].parameters(), strict=True):
        assert torch.equal(into[1].state[mine]["exp_avg"], one[1].state[theirs]["exp_avg"])
    monkeypatch.undo()
    zk.load(tmp_path / "c", *into)
    assert torch.equal(into[0].weight, two[0].weight)


def test_an_export_into_the_folder_does_not_change_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, into = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    zk.export(tmp_path / "c", one)
    before = pretrained._read

    def exporting(*given: Any) -> None:
        zk.export(tmp_path / "c", two, dtype=torch.bfloat16)
        before(*given)

    monkeypatch.setattr(pretrained, "_read", exporting)
    zk.load_pretrained(into, tmp_path / "c")
    assert torch.equal(into.weight, one.weight)


def test_more_files_than_may_be_open_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFiles, "fd", lambda self, path: None)
    one, into = model_of(1.0), model_of(2.0)
    zk.save(tmp_path / "c", *one)
    zk.load(tmp_path / "c", *into)
    assert torch.equal(into[0].weight, one[0].weight)


class Told(Ranks):
    """Two ranks, of which the second sees what it is told to."""

    def __init__(self, theirs: list[str]) -> None:
        super().__init__(None)
        self.theirs = iter(theirs)

    def all_gather(self, what: str, work: Any) -> list[Any]:
        return [work(), next(self.theirs)]


def test_a_save_between_two_looks_is_looked_at_again(tmp_path: Path) -> None:
    mine = iter(["a", "b", "b"])
    open_same(Told(["b", "b"]), tmp_path, lambda: next(mine))
    assert next(mine) == "b"
    with pytest.raises(StateError, match=r"rank 0 sees a, rank 1 sees b; nothing was changed"):
        open_same(Told(["b", "b"]), tmp_path, lambda: "a")


def test_likeness_tells_steps_apart_and_not_places(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.zeros(1 << 20)}, tmp_path / name / "a.pt")
    paths = [tmp_path / name / "a.pt" for name in ("x", "y")]
    assert fingerprint(paths[:1]) == fingerprint(paths[1:])
    torch.save({"w": torch.full((1 << 20,), 1e-3)}, paths[1])
    assert fingerprint(paths[:1]) != fingerprint(paths[1:])
    held = OpenFiles()
    held.fd(paths[0])
    assert held.fingerprint() == fingerprint(paths[:1])
    held.close()
