"""What torch and DeepSpeed wrote is read by our keys, bit for bit; nothing in it is ever run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_cases import (
    Evil,
    Scaler,
    Small,
    everything,
    expected,
    fsdp_loads,
    fsdp_saves,
    poisoned,
    same,
    trained,
    universal,
)
from raw_cases import flip, raw
from torch.distributed.checkpoint.state_dict import get_state_dict
from worlds import on_ranks

import zerokern as zk
from zerokern.checkpoint.extra import decode_extra
from zerokern.checkpoint.loader import load
from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.source import open_checkpoint
from zerokern.core.errors import IoError, StateError
from zerokern.interop.naming import named

GROUP = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.01}
NAMES = ["first.weight", "first.bias", "second.weight"]


def extra_of(source) -> dict:
    tensors = everything(source, [key for key in source.tensors if key.startswith("extra.")])
    return decode_extra(source.values["extra"], tensors, Ranks.of(None))


def test_fsdp2_of_two_ranks_is_read_by_one_and_by_three(tmp_path: Path) -> None:
    wanted = on_ranks(2, fsdp_saves, str(tmp_path))[0]
    for wrapped in (False, True):
        source = open_checkpoint(tmp_path / ("app" if wrapped else "plain"))
        assert source.kind == "dcp" and not source.numbered
        assert len(source.tensors["model.first.weight"].boxes) == 2
        source.verify()
        tensors = [key for key in source.tensors if not key.startswith("extra.")]
        same(everything(source, tensors), wanted)
        ((group,),) = source.values["groups"]
        assert group["params"] == NAMES and GROUP.items() <= group.items()
        said = extra_of(source)
        assert (said["app"] if wrapped else said) == {"epoch": 3, "note": {"seen": [1, 2]}}
    for found in on_ranks(3, fsdp_loads, str(tmp_path / "plain")):
        same(found, wanted)


def test_dcp_of_a_bare_model_and_of_numbered_state(tmp_path: Path) -> None:
    model, opt = trained()
    dcp.save({**model.state_dict(), "optimizer": opt.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    source = open_checkpoint(tmp_path)
    assert source.numbered and "optim.state.2.exp_avg" in source.tensors
    with pytest.raises(StateError, match=r"one with number 1; what it is loaded into has 1 parameters"):
        source.name_parameters([NAMES[:1]])
    source.name_parameters([NAMES])
    same(everything(source), expected(model, opt))
    assert source.values["groups"][0][0]["params"] == NAMES


def test_wrappers_and_flattened_options(tmp_path: Path) -> None:
    """As DDP, torch.compile and activation checkpointing name things, and as torchtitan flattens options."""
    model, opt = trained()
    state = {f"module._orig_mod.{name}": one for name, one in model.state_dict().items()}
    flat = {f"state.{name}.exp_avg": opt.state[param]["exp_avg"] for name, param in model.named_parameters()}
    flat |= {f"param_groups.{name}.lr": 0.1 if "bias" in name else 0.2 for name in NAMES}
    dcp.save({"model": state, "optimizer": flat}, checkpoint_id=tmp_path, no_dist=True)
    source = open_checkpoint(tmp_path)
    wanted = {key: one for key, one in expected(model, opt).items() if key.endswith("exp_avg") or key[:6] == "model."}
    same(everything(source), wanted)
    groups = sorted(source.values["groups"][0], key=lambda group: group["lr"])
    assert groups == [{"lr": 0.1, "params": NAMES[1:2]}, {"lr": 0.2, "params": [NAMES[0], NAMES[2]]}]


def test_models_whose_own_names_begin_like_a_section() -> None:
    """As Llama of transformers is: model.embed.weight and lm_head.weight, saved without a section."""
    bare = named([("model.embed.weight",), ("lm_head.weight",)], [])
    assert sorted(bare.keys.values()) == ["model.lm_head.weight", "model.model.embed.weight"]
    within = named([("model", "model.embed.weight"), ("model", "lm_head.weight"), ("ema", "w")], [])
    assert sorted(within.keys.values()) == ["model.lm_head.weight", "model.model.embed.weight"]
    assert within.rest == [("ema", "w")]


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    """As a zip, and as before torch 1.6."""
    model, opt = trained()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    for legacy in (False, True):
        names = ("model_state_dict", "optimizer_state_dict") if legacy else ("model", "optimizer")
        content = {names[0]: model.state_dict(), names[1]: opt.state_dict(), "epoch": 3, "rng": torch.get_rng_state()}
        content["scheduler"] = scheduler.state_dict()
        torch.save(content, tmp_path / "last.pt", _use_new_zipfile_serialization=not legacy)
        source = open_checkpoint(tmp_path / "last.pt")
        assert source.kind == "torch" and source.numbered
        source.verify()
        source.name_parameters([NAMES])
        wanted = expected(model, opt)
        same(everything(source, wanted), wanted)
        ((group,),) = source.values["groups"]
        assert group["params"] == NAMES and group["initial_lr"] == 0.01
        said = extra_of(source)
        assert said["epoch"] == 3 and torch.equal(said["rng"], torch.get_rng_state())
        scheduler.load_state_dict(said["scheduler"])


def test_a_bare_state_dict_and_lightnings_names(tmp_path: Path) -> None:
    model, opt = trained()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    source = open_checkpoint(tmp_path / "model.pth")
    assert sorted(source.tensors) == sorted(f"model.{name}" for name in model.state_dict())
    lightning = {"state_dict": model.state_dict(), "optimizer_states": [opt.state_dict()], "global_step": 2}
    torch.save(lightning, tmp_path / "last.ckpt")
    source = open_checkpoint(tmp_path / "last.ckpt")
    source.name_parameters([NAMES])
    wanted = expected(model, opt)
    same(everything(source, wanted), wanted)
    assert len(source.values["groups"]) == 1


def test_deepspeeds_universal_folder(tmp_path: Path) -> None:
    model, opt = trained()
    # of stage 2; of stage 3, with DeepSpeed's Adam and with torch's
    for number, (flat, step) in enumerate([(False, 2), (True, 2), (True, torch.tensor(2.0))]):
        parent = tmp_path / str(number)
        universal(parent / "step2_universal", model, opt, flat=flat, step=step)
        for path in (parent, parent / "step2_universal"):
            source = open_checkpoint(path)
            assert source.kind == "universal"
            source.verify()
            same(everything(source), expected(model, opt))
            ((group,),) = source.values["groups"]
            assert GROUP.items() <= group.items() and "params" not in group


def test_nothing_of_an_index_is_run(tmp_path: Path) -> None:
    model, _ = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    poisoned(tmp_path / "c", tmp_path / "proof")
    with pytest.raises(IoError, match=r"\.metadata names posix\.system, which no index .* Nothing was run") as refused:
        open_checkpoint(tmp_path / "c")
    assert refused.value.key == "posix.system"
    assert not (tmp_path / "proof").exists()
    pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    assert (tmp_path / "proof").exists(), "the command would have run: the test proves something"


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    """DeepSpeed's common file is read for the options, whatever else it holds."""
    model, opt = trained()
    evil = Evil(tmp_path / "proof")
    dcp.save({"model": model.state_dict(), "note": evil}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"model": model.state_dict(), "args": evil}, tmp_path / "c.pt")
    universal(tmp_path / "u", model, opt)
    common = {"loss_scaler": evil, "more": Scaler(), "param_groups": [{"lr": 0.5, "params": []}]}
    torch.save(common, tmp_path / "u" / "zero" / "optimizer_state.pt")
    assert open_checkpoint(tmp_path / "u").values["groups"] == [[{"lr": 0.5}]]
    torch.save(evil, tmp_path / "u" / "zero" / "first.bias" / "exp_avg.pt")
    for name in ("dcp", "c.pt", "u"):
        with pytest.raises(IoError, match=r"holds an object of posix\.system, and loading that would run its code"):
            open_checkpoint(tmp_path / name)
    assert not (tmp_path / "proof").exists()


def dcp_of(folder: Path) -> Path:
    model, opt = trained()
    dcp.save({"model": model.state_dict(), "optim": opt.state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder / "__0_0.distcp"


def test_truncated_and_missing_data_are_named(tmp_path: Path) -> None:
    data = dcp_of(tmp_path)
    os.truncate(data, 500)
    with pytest.raises(IoError, match=r"__0_0\.distcp is truncated: it has 500 bytes of at least"):
        open_checkpoint(tmp_path)
    data.unlink()
    with pytest.raises(IoError, match=r"__0_0\.distcp is missing"):
        open_checkpoint(tmp_path)


def test_a_changed_byte_is_found_with_its_key(tmp_path: Path) -> None:
    data = dcp_of(tmp_path)
    source = open_checkpoint(tmp_path)
    box = source.tensors["model.first.weight"].boxes[0]
    flip(data, data.read_bytes().index(raw(trained()[0].state_dict()["first.weight"]), box.item[0]) + 7)
    says = r"__0_0\.distcp at offset \d+, \d+ bytes: model\.first\.weight is damaged"
    with pytest.raises(IoError, match=says) as refused:
        open_checkpoint(tmp_path).verify()
    assert refused.value.key == "model.first.weight" and refused.value.offset == box.item[0]
    assert len(list(open_checkpoint(tmp_path).find_damage())) == 1
    shares = [list(open_checkpoint(tmp_path).find_damage(rank, 3)) for rank in range(3)]
    assert sorted(map(len, shares)) == [0, 0, 1]


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    dcp_of(tmp_path / "c")
    path = tmp_path / "c" / ".metadata"
    found = pickle.loads(path.read_bytes())
    for where in found.storage_data.values():
        where.relative_path = "../secret"
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(IoError, match=r"'\.\./secret' is no name of a file in the folder"):
        open_checkpoint(tmp_path / "c")


def test_what_is_no_checkpoint_is_told_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"")
    for path in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors"):
        with pytest.raises(IoError, match=r"zk\.load_pretrained\(model, path\) reads them"):
            open_checkpoint(path)
    (tmp_path / "ds" / "global_step1").mkdir(parents=True)
    (tmp_path / "ds" / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(IoError, match=r"ds_to_universal --inject_missing_state --input_folder"):
        open_checkpoint(tmp_path / "ds")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(IoError, match=r"text\.pt was truncated or edited, or is something else"):
        open_checkpoint(tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(IoError, match=r"holds a list, no dict of tensors by name"):
        open_checkpoint(tmp_path / "list.pt")


@pytest.mark.parametrize("kind", ["dcp by name", "dcp by number", "torch", "stage 2", "stage 3"])
def test_zk_load_goes_on_where_the_others_stopped(tmp_path: Path, kind: str) -> None:
    model, opt = trained()
    path = tmp_path / "c"
    if kind.startswith("dcp"):
        models, optims = model.state_dict(), opt.state_dict()
        if kind == "dcp by name":
            models, optims = get_state_dict(model, opt)
        dcp.save({"model": models, "optim": optims}, checkpoint_id=path, no_dist=True)
    elif kind == "torch":
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path)
    else:
        universal(path, model, opt, flat=kind == "stage 3")
    ours = Small()
    ours.mean.zero_()
    resumed = zk.AdamW(ours.parameters(), lr=9.0)
    load(path, ours, resumed)
    assert resumed.param_groups[0]["lr"] == 0.01 and resumed.param_groups[0]["betas"] == (0.8, 0.9)
    same(ours.state_dict(), model.state_dict())
    for theirs, param in zip(model.parameters(), ours.parameters(), strict=True):
        assert resumed.state[param].keys() == opt.state[theirs].keys()
        for key, value in opt.state[theirs].items():
            assert torch.equal(resumed.state[param][key].float(), value), key
