"""`zerokern checkpoint export`: the model of any checkpoint in one file, and nothing that was there is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tables import each
from torch import nn
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.cli.main import main
from zerokern.core.errors import BudgetError, IoError
from zerokern.interop import from_checkpoint
from zerokern.interop.from_checkpoint import export_checkpoint


def model() -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 5).bfloat16(), nn.Embedding(3, 5))
    made.register_buffer("nothing", torch.empty(0, 4))
    made.register_buffer("flag", torch.tensor(True))
    return made


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@ranked
def saves(world: World, folder: Path, stage: int) -> None:
    sharded = zk.shard(model(), stage=stage)
    opt = zk.AdamW(sharded.parameters(), lr=0.1, state_format="int8")
    zk.save(folder / "step-1", sharded, opt, extra={"step": 1})


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 3)])
def test_the_file_is_the_model_whatever_ranks_saved_it(
    size: int, stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(size, saves, tmp_path, stage)
    assert main(["checkpoint", "export", str(tmp_path / "step-1"), str(tmp_path / "m.safetensors")]) == 0
    assert "m.safetensors: 12 tensors" in capsys.readouterr().out
    same(load_file(tmp_path / "m.safetensors"), model().state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "step-1"]


def test_a_file_of_torch_too(tmp_path: Path) -> None:
    torch.save({"model": model().state_dict()}, tmp_path / "model.pt")
    export_checkpoint(tmp_path / "model.pt", tmp_path / "m.safetensors")
    same(load_file(tmp_path / "m.safetensors"), model().state_dict())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    zk.save(tmp_path / "step-1", model())
    return tmp_path / "step-1"


@each(
    "out, says",
    [
        ("there.safetensors", "exists already"),
        ("model.bin", "ends in .safetensors"),
        ("no/m.safetensors", "no folder"),
    ],
)
def test_what_is_refused_before_anything_is_written(out: str, says: str, saved: Path) -> None:
    place = saved.parent
    (place / "there.safetensors").write_text("mine")
    before = sorted(place.iterdir())
    with pytest.raises(IoError, match=says):
        export_checkpoint(saved, place / out)
    assert sorted(place.iterdir()) == before and (place / "there.safetensors").read_text() == "mine"


def test_damage_and_a_full_disk_leave_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(saved.parent.iterdir())
    monkeypatch.setattr(from_checkpoint, "free_nbytes", lambda _: 10)
    with pytest.raises(BudgetError, match="10 B are free"):
        export_checkpoint(saved, saved.parent / "m.safetensors")
    monkeypatch.undo()
    data = next(saved.glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    raw[5] ^= 1
    data.write_bytes(raw)
    with pytest.raises(IoError):
        export_checkpoint(saved, saved.parent / "m.safetensors")
    assert sorted(saved.parent.iterdir()) == before


@each("links", [True, False])
def test_a_file_that_comes_meanwhile_stays(links: bool, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = saved.parent / "m.safetensors"
    publish = from_checkpoint._publish

    def late(waiting: Path, target: Path) -> None:
        target.write_text("theirs")
        publish(waiting, target)

    def no_link(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(from_checkpoint, "_publish", late)
    if not links:
        monkeypatch.setattr(from_checkpoint.os, "link", no_link)
    with pytest.raises(IoError, match="exists already"):
        export_checkpoint(saved, out)
    assert out.read_text() == "theirs"
    out.unlink()
    monkeypatch.setattr(from_checkpoint, "_publish", publish)
    export_checkpoint(saved, out)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["m.safetensors", "step-1"]
    out.unlink()
