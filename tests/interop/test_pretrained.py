"""zk.load_pretrained: what others wrote, into every kind of model, to the bit; and what does not fit."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from weight_cases import (
    BF16,
    HALF,
    INDEX,
    Mixed,
    adamw_steps,
    export,
    kept,
    llama,
    load_pretrained,
    logits,
    mixed,
    raw,
    theirs,
)
from worlds import World, alone, built, on_ranks, ranked, refusal, says

import zerokern as zk
from zerokern.core.errors import IoError, StateError


def same(model: nn.Module, reference: nn.Module) -> None:
    with zk.gathered(model):
        mine, wanted = model.state_dict(), reference.state_dict()
        assert mine.keys() == wanted.keys()
        different = [name for name in wanted if raw(mine[name]) != raw(wanted[name])]
        assert not different


@ranked
def from_transformers(world: World, folder: Path, tied: bool, stages: tuple[int, ...]) -> None:
    reference = built(llama(tied), seed=3)
    wanted = logits(reference)
    if world.rank == 0:
        reference.save_pretrained(folder / "theirs")
    if world.size > 1:
        torch.distributed.barrier()
    for stage in stages:
        model = zk.build(llama(tied), stage=stage)
        assert load_pretrained(model, folder / "theirs") == ([], [])
        assert torch.equal(logits(model), wanted)
        out = folder / f"stage{stage}"
        export(out, model, max_shard_nbytes=9000)
        found = type(reference).from_pretrained(out)
        assert torch.equal(logits(found), wanted)
        assert theirs(out).keys() == theirs(folder / "theirs").keys()


def test_a_transformers_model_goes_in_and_out(tmp_path: Path) -> None:
    for tied in (False, True):
        alone(from_transformers, tmp_path / str(tied), tied, (0, 3))


@ranked
def every_kind(world: World, folder: Path) -> None:
    """Plain, each stage and FSDP2, by rows and by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    reference = mixed(3)
    models: dict[str, nn.Module] = {"plain": mixed(world.rank + 4)}
    models |= {f"stage {stage}": world.shard(mixed(4), stage=stage, bucket_bytes=300) for stage in range(4)}
    models["DDP"] = nn.parallel.DistributedDataParallel(mixed(4))
    mesh = init_device_mesh("cpu", (world.size,))
    for name, dim in (("rows", 0), ("columns", 1)):
        model = mixed(4)
        columns = [p for p in model.parameters() if p.ndim > 1 and p.shape[1] % 6 == 0]
        placed = (lambda p, some=columns: Shard(int(any(p is one for one in some)))) if dim else None
        table, gain = model.table.detach(), model.gain.detach()
        del model.table, model.gain  # FSDP2 takes neither whole numbers nor scalars
        model.register_buffer("table", table)
        model.register_buffer("gain", gain)
        models[f"FSDP2 by {name}"] = fully_shard(model, mesh=mesh, shard_placement_fn=placed)
    for kind, model in models.items():
        load_pretrained(model, folder / "theirs")
        out = folder / kind.replace(" ", "-")
        export(out, model, max_shard_nbytes=500)
        if kind.startswith("FSDP2") or kind == "DDP":
            inner = model.module if kind == "DDP" else model
            for name, tensor in inner.state_dict().items():
                full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                assert raw(full) == raw(reference.state_dict()[name]), (kind, name)
        else:
            same(model, reference)
        found, wanted = theirs(out), kept(reference)
        assert found.keys() == wanted.keys(), kind
        assert all(raw(found[name]) == raw(wanted[name]) for name in wanted), kind


def floats_as(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in kept(model).items()}


def test_floats_are_converted_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerokern.interop.pretrained.PIECE_NBYTES", 64)  # each tensor in several pieces
    for source in (torch.float64, torch.float32, BF16, torch.float16, torch.float8_e4m3fn):
        file = floats_as(mixed(3), source)
        save_file(file, tmp_path / "theirs")
        for target in (torch.float32, BF16, torch.float16):
            load_pretrained(model := mixed(4).to(target), tmp_path / "theirs")
            for name, tensor in kept(model).items():
                wanted = file[name].to(target) if file[name].is_floating_point() else file[name]
                assert raw(tensor) == raw(wanted), (source, target, name)


def same_training(world: World, folder: Path, stage: int, policy: object = HALF) -> None:
    """Masters begin with the exact values: as if the model had been sharded with them."""
    mine = world.shard(mixed(4), stage=stage, mp_policy=policy, bucket_bytes=300)
    other = world.shard(mixed(3), stage=stage, mp_policy=policy, bucket_bytes=300)
    load_pretrained(mine, folder / "theirs")
    exact, exact_other = (zk.AdamW(m.parameters(), lr=1e-3) for m in (mine, other))
    if world.mesh is None:
        export(folder / f"before{stage}", mine, dtype=torch.float32, opt=exact)
        found, wanted = theirs(folder / f"before{stage}"), kept(mixed(3))
        assert all(raw(found[name]) == raw(wanted[name]) for name in wanted)
    for step_model, opt in ((mine, exact), (other, exact_other)):
        adamw_steps(step_model, opt, 2, world)
    same_states = [
        all(torch.equal(a, b) for a, b in zip(local(mine), local(other), strict=True)),
        states(exact) == states(exact_other),
    ]
    assert same_states == [True, True]


def local(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "local", p).detach() for p in model.parameters()]


def states(opt: torch.optim.Optimizer) -> list[bytes]:
    entries = opt.state_dict()["state"].values()
    return [raw(getattr(t, "local", t)) for entry in entries for t in entry.values() if isinstance(t, torch.Tensor)]


def test_what_rounding_takes_begins_the_masters(tmp_path: Path) -> None:
    save_file(kept(mixed(3)), tmp_path / "theirs")
    for dtype, stage in itertools.product((BF16, torch.float16), range(4)):
        policy = type(HALF)(param_dtype=dtype, reduce_dtype=torch.float32)
        alone(same_training, tmp_path, stage, policy)


@ranked
def kinds_and_masters(world: World, folder: Path) -> None:
    every_kind(world, folder)
    for stage in (0, 1, 3):
        same_training(world, folder, stage)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_kind_of_model_and_exact_masters_on_ranks(size: int, tmp_path: Path) -> None:
    save_file(kept(mixed(3)), tmp_path / "theirs")
    on_ranks(size, kinds_and_masters, tmp_path)


def test_a_master_made_before_follows_what_is_loaded(tmp_path: Path) -> None:
    save_file(kept(mixed(3)), tmp_path / "theirs")
    model = zk.shard(mixed(4), stage=3, mp_policy=HALF)
    opt = zk.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    adamw_steps(model, opt, 1)
    load_pretrained(model, tmp_path / "theirs")
    adamw_steps(model, opt, 1)
    found = dict(zip([n for n, _ in model.named_parameters()], local(model), strict=True))
    assert torch.equal(found["blocks.0.weight"], kept(mixed(3))["blocks.0.weight"].to(BF16).view(-1))


def changed(model: nn.Module, work: Callable[[], object], kinds: type = StateError) -> str:
    """What the refusal says; the model must be as it was."""
    before = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    said = refusal(work, kinds)
    assert {name: raw(tensor) for name, tensor in model.state_dict().items()} == before
    return said


def test_all_differences_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    file = kept(mixed(3))
    del file["blocks.0.bias"], file["gain"]
    file |= {"head.weight": torch.ones(2), "blocks.1.weight": torch.ones(3, 3), "table": torch.ones(3, 5)}
    file["norm.weight"] = torch.ones(7, dtype=torch.int32)
    save_file(file, tmp_path / "theirs")
    model = mixed(4)
    said = changed(model, lambda: load_pretrained(model, tmp_path / "theirs"))
    words = [
        "missing (2):", "'blocks.0.bias'", "'gain'", "unexpected (1):", "'head.weight'", "mis-shaped (1):",
        "'blocks.1.weight' is (3, 3) in the file and (7, 42) in the model", "of another dtype (2):",
        "'table' is F32 in the file and torch.int64", "'norm.weight' is I32", "Nothing was changed",
    ]  # fmt: skip
    says(said, words)
    said = changed(model, lambda: load_pretrained(model, tmp_path / "theirs", strict=False))
    assert "missing" not in said and "mis-shaped (1):" in said  # what does not fit is never passed over


def test_not_strict_loads_what_both_have_and_returns_the_rest(tmp_path: Path) -> None:
    file = kept(mixed(3))
    del file["gain"]
    save_file({**file, "head": torch.ones(2)}, tmp_path / "theirs")
    model = mixed(4)
    seen: list[tuple[int, int]] = []
    found = load_pretrained(model, tmp_path / "theirs", strict=False, progress=lambda *nbytes: seen.append(nbytes))
    assert found == (["gain"], ["head"])
    assert seen == sorted(seen) and seen[-1] == (sum(one.nbytes for one in file.values()),) * 2
    assert found.missing == ["gain"]
    wanted = {**kept(mixed(3)), "gain": mixed(4).gain}
    assert all(raw(tensor) == raw(wanted[name]) for name, tensor in kept(model).items())


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_common_prefix_is_found_and_renamed(prefix: str, tmp_path: Path) -> None:
    inner = kept(mixed(3))
    save_file({prefix + name: tensor for name, tensor in inner.items()}, tmp_path / "theirs")
    model: nn.Module = mixed(4) if prefix else nn.ModuleDict({"model": mixed(4)})
    said = changed(model, lambda: load_pretrained(model, tmp_path / "theirs"))
    advice = said.partition("rename=")[2].partition(". rename=")[0]
    rename = eval(advice)
    load_pretrained(model, tmp_path / "theirs", rename=rename)
    found = kept(model if prefix else model["model"])
    assert all(raw(found[name]) == raw(inner[name]) for name in inner)


def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    file = kept(mixed(3))
    weight = file.pop("enter.weight")
    save_file({**file, "leave.weight": weight}, tmp_path / "other")
    save_file({**file, "leave.weight": weight.clone(), "enter.weight": weight}, tmp_path / "both")
    save_file({**file, "leave.weight": weight + 1, "enter.weight": weight}, tmp_path / "untied")
    for name in ("other", "both"):
        model = mixed(4)
        load_pretrained(model, tmp_path / name)
        same(model, mixed(3))
        assert model.leave.weight is model.enter.weight
    model = mixed(4)
    said = changed(model, lambda: load_pretrained(model, tmp_path / "untied"))
    says(said, ["'enter.weight' and 'leave.weight' are one tied weight", "tie_word_embeddings=False"])


def second_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def alone_in(folder: Path, name: str, content: object) -> None:
    for file in folder.iterdir():
        file.unlink()
    torch.save(content, folder / name)


DAMAGES: dict[str, Callable[[Path], object]] = {  # by what the error names
    "00002-of": lambda folder: os.truncate(second_file(folder), second_file(folder).stat().st_size - 1),
    "model-00002-of": lambda folder: second_file(folder).unlink(),
    "-00002-of": lambda folder: save_file({"strange": torch.ones(2)}, second_file(folder)),
    "pytorch_model.bin": lambda folder: alone_in(folder, "pytorch_model.bin", {}),
    "torch.save": lambda folder: alone_in(folder, "model.safetensors", {"w": torch.ones(3)}),
    "JSON cannot be read": lambda folder: (folder / INDEX).write_text('{"weight_map": '),
}


def test_damage_is_named_before_anything_is_changed(tmp_path: Path) -> None:
    for number, (named, damage) in enumerate(DAMAGES.items()):
        folder, model = tmp_path / str(number), mixed(4)
        export(folder, mixed(3), max_shard_nbytes=500)
        damage(folder)
        says(changed(model, lambda folder=folder, model=model: load_pretrained(model, folder), IoError), [named])


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file(kept(mixed(3)), tmp_path / "a.safetensors")
    save_file(kept(mixed(5)), tmp_path / "b.safetensors")
    model = mixed(4)
    assert "a.safetensors, b.safetensors; name one" in changed(model, lambda: load_pretrained(model, tmp_path), IoError)
    half = dict.fromkeys(list(kept(mixed(3)))[:3], "a.safetensors") | {"mask": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": half}))
    assert "lie mixed" in changed(model, lambda: load_pretrained(model, tmp_path), IoError)


def test_a_value_beyond_the_range_is_refused(tmp_path: Path) -> None:
    file = {"weight": torch.tensor([[1.0, 7e4, torch.inf]])}
    save_file(file, tmp_path / "theirs")
    model = nn.Linear(3, 1, bias=False, dtype=torch.float16)
    says(refusal(lambda: load_pretrained(model, tmp_path / "theirs")), ["1 values of 'weight'", "torch.float16"])


def test_what_is_not_a_model_or_has_no_memory() -> None:
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module"):
        load_pretrained(3, "nowhere")  # type: ignore[arg-type]
    with pytest.raises(IoError, match="cannot read nowhere"):
        load_pretrained(nn.Linear(2, 2), "nowhere")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs"
    save_file(kept(mixed(3)), path)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: os.truncate(path, 700) or read(*given))
    says(refusal(lambda: load_pretrained(mixed(4), path), IoError), ["was cut off while it was read", str(path)])


def test_graphs_of_the_old_values_end(tmp_path: Path) -> None:
    save_file(kept(mixed(3)), tmp_path / "theirs")
    model = Mixed()
    loss = model(torch.zeros(2, 6, dtype=torch.int64)).sum()
    load_pretrained(model, tmp_path / "theirs")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
