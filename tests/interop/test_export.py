"""zk.export: what the safetensors package reads of it, exact masters, and what is refused first."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_cases import some
from safetensors import safe_open
from safetensors.torch import load_file
from tables import each
from torch import nn
from weight_cases import (
    BF16,
    HALF,
    INDEX,
    LARGE,
    SINGLE,
    SMALL,
    adamw_steps,
    export,
    filled,
    kept,
    load_pretrained,
    mixed,
    names,
    raw,
    theirs,
    whole,
)
from worlds import World, alone, on_ranks, ranked, refusal, says

import zerokern as zk
from zerokern.checkpoint.files import SlotWriter
from zerokern.core.errors import BudgetError, IoError
from zerokern.interop import exported
from zerokern.interop.tensorfile import DTYPES


def test_every_dtype_as_the_safetensors_package_has_it(tmp_path: Path) -> None:
    model = nn.Module()
    known = [dtype for code, dtype in DTYPES.items() if code in __import__("safetensors.torch").torch._TYPES]
    for number, dtype in enumerate(known):
        model.register_buffer(f"buffer{number}", some(dtype, (3, 5)))
    export(tmp_path, model)
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        assert (found[name].dtype, found[name].shape, raw(found[name])) == (buffer.dtype, buffer.shape, raw(buffer))


def test_several_files_and_their_index(tmp_path: Path) -> None:
    model, seen = mixed(), []
    told = {"metadata": {"made by": "a test"}, "progress": lambda *nbytes: seen.append(nbytes)}
    export(tmp_path, model, max_shard_nbytes=400, rename=lambda name: "net." + name, **told)
    assert seen[-1] == (sum(tensor.nbytes for tensor in kept(model).values()),) * 2
    wanted = {"net." + name: tensor for name, tensor in kept(model).items()}
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    assert names(tmp_path) == sorted([*files, INDEX])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert index["weight_map"].keys() == wanted.keys()
    for file in files:
        with safe_open(tmp_path / file, "pt") as one:
            assert one.metadata() == {"format": "pt", "made by": "a test"}
            some = {name: one.get_tensor(name) for name in one.keys()}  # noqa: SIM118
        assert all(index["weight_map"][name] == file and raw(some[name]) == raw(wanted[name]) for name in some)
        assert len(some) == 1 or sum(tensor.nbytes for tensor in some.values()) <= 400


def test_a_dtype_for_all_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerokern.checkpoint.files.BLOCK", 4096)  # large tensors in several slots, past the page cache
    sent: list[tuple[int, int]] = []
    send = SlotWriter.send

    def noted(self: SlotWriter, offset: int, nbytes: int, inside: int = 0) -> None:
        sent.append((offset, nbytes))
        send(self, offset, nbytes, inside)

    monkeypatch.setattr(SlotWriter, "send", noted)
    for source, dtype in itertools.product((torch.float32, BF16), (BF16, torch.float16, torch.float32, torch.float64)):
        model = mixed().to(source)
        model.large = nn.Sequential(nn.Linear(71, 123), nn.BatchNorm1d(3), nn.Linear(123, 77)).to(source)
        sent.clear()
        export(tmp_path, model, dtype=dtype)
        assert len(sent) >= 2 * 71 * 123 * dtype.itemsize // 4096 - 4
        assert not any(offset % 4096 or nbytes % 4096 for offset, nbytes in sent)
        for name, tensor in theirs(tmp_path).items():
            wanted = kept(model)[name]
            assert raw(tensor) == raw(wanted.to(dtype) if wanted.is_floating_point() else wanted), (source, dtype, name)


FORMATS: list[dict[str, Any]] = [
    {"master_format": "split16"}, {"master_format": "fp32"}, {"master_format": "split8"},
    {"tier": "cpu", "schedule": "overlap"}, {"tier": "cpu", "schedule": zk.Delayed(after=1)},
]  # fmt: skip


def begun(stage: object, shard: Callable[..., nn.Module]) -> nn.Module:
    return mixed(2).to(BF16) if stage == "plain" else shard(mixed(2), stage=stage, mp_policy=HALF, bucket_bytes=300)


def exact(opt: torch.optim.Optimizer, name: str, number: int, shown: torch.Tensor) -> torch.Tensor:
    """What state_dict() says of a parameter's master, by torch's arithmetic alone."""
    entry = opt.state_dict()["state"][number]
    local = {key: getattr(value, "local", value) for key, value in entry.items()}
    if "master" in local:
        return local["master"].reshape(shown.shape)
    high = local.get("pending", shown)
    shift = 8 if local["remainder"].dtype is torch.int8 else 0
    high_bits = high.reshape(-1).view(torch.int16).to(torch.int64) << 16
    bits = high_bits + (local["remainder"].reshape(-1).to(torch.int64) << shift)
    return ((bits + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32).reshape(shown.shape)


@ranked
def exported_masters(world: World, folder: Path, stage: object, settings: dict) -> None:
    model = begun(stage, world.shard)
    opt = zk.AdamW(model.parameters(), lr=0.01, **settings)
    adamw_steps(model, opt, 3, world)
    export(folder / "exact", model, dtype=torch.float32, opt=opt)
    export(folder / "rounded", model, dtype=torch.float32)
    export(folder / "as it is", model)
    adamw_steps(model, opt, 1, world)  # nothing of this disturbs it
    if world.size > 1:
        return
    found, rounded, plain = (theirs(folder / name) for name in ("exact", "rounded", "as it is"))
    differ = [name for name in found if not torch.equal(found[name], rounded[name])]
    assert {"blocks.0.weight", "enter.weight", "gain"} <= set(differ)
    assert all(torch.equal(rounded[name], plain[name].to(rounded[name].dtype)) for name in plain)
    if not isinstance(settings.get("schedule"), zk.Delayed):  # whose parameters are those of the update before
        assert all(torch.allclose(found[n].float(), plain[n].float(), rtol=1 / 128, atol=1e-9) for n in differ)


@each("stage", ["plain", 3])
def test_masters_are_exported_exactly(stage: object, tmp_path: Path) -> None:
    for settings in FORMATS:
        alone(exported_masters, tmp_path, stage, settings)
        model = begun(stage, zk.shard)
        opt = zk.AdamW(model.parameters(), lr=0.01, **settings)
        adamw_steps(model, opt, 3)
        found = theirs(tmp_path / "exact")
        trained = [(i, n, p) for i, (n, p) in enumerate(model.named_parameters()) if i in opt.state_dict()["state"]]
        assert len(trained) >= 7
        for number, name, param in trained:
            wanted = exact(opt, name, number, getattr(param, "local", param).detach())
            assert raw(found[name]) == raw(wanted), (settings, name)


class Config:
    """As far as a transformers model's is used."""

    dtype = "float32"
    architectures: list[str] | None = None

    def to_json_string(self) -> str:
        return json.dumps({"dtype": self.dtype, "architectures": self.architectures})


def test_the_config_goes_with_the_weights(tmp_path: Path) -> None:
    model = mixed()
    model.config = Config()
    export(tmp_path, nn.DataParallel(model), dtype=BF16)
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "bfloat16", "architectures": ["Mixed"]}
    assert (model.config.dtype, model.config.architectures) == ("float32", None)
    assert kept(mixed()).keys() == theirs(tmp_path).keys()


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "other.safetensors", "model-00009-of-00009.safetensors"):
        (tmp_path / name).write_text("mine")
    for most in (SMALL, LARGE, SMALL):
        export(tmp_path, filled(1.0), max_shard_nbytes=most)
    for name in ("tokenizer.json", "other.safetensors", "model-00009-of-00009.safetensors"):
        assert (tmp_path / name).read_text() == "mine"


def untouched(folder: Path, work: Callable[[], object], kinds: type) -> str:
    before = names(folder)
    said = refusal(work, kinds)
    assert names(folder) == before
    assert whole(folder) == 1.0
    return said


def test_no_space_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tmp_path, filled(1.0), max_shard_nbytes=SMALL)
    monkeypatch.setattr(exported, "free_nbytes", lambda path: 1000)
    said = untouched(tmp_path, lambda: export(tmp_path, filled(2.0)), BudgetError)
    says(said, ["1,000 B", str(tmp_path), "make room"])


def test_a_write_that_fails_leaves_the_old(tmp_path: Path) -> None:
    export(tmp_path, filled(1.0), max_shard_nbytes=SMALL)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for most in (SMALL, LARGE):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            said = refusal(lambda most=most: export(tmp_path, filled(2.0), max_shard_nbytes=most), IoError)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        says(said, ["cannot write", "File too large"])
        assert whole(tmp_path) == 1.0
        assert not [name for name in names(tmp_path) if name.endswith((".new", ".old", ".lock"))]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    from zerokern.io.lock import FolderLock

    export(tmp_path, filled(1.0))
    lock = FolderLock(tmp_path)
    says(untouched(tmp_path, lambda: export(tmp_path, filled(2.0)), IoError), ["in use by", str(os.getpid()), "wait"])
    lock.release()
    export(tmp_path, filled(2.0))
    assert whole(tmp_path) == 2.0


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "weights.safetensors"):
        with pytest.raises(ValueError, match="a folder, which is made where it is missing"):
            export(path, filled(1.0))
    with pytest.raises(IoError, match="A part of the path is a file"):
        export(tmp_path / "file" / "below", filled(1.0))
    export(tmp_path / "made" / "here", filled(1.0))
    assert whole(tmp_path / "made" / "here") == 1.0


def test_arguments_are_checked_first(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"dtype": "bf16"}, "dtype='bf16'"),
        ({"max_shard_nbytes": 0}, "max_shard_nbytes=0"),
        ({"max_shard_nbytes": "5 apples"}, "powers of 1024"),
        ({"metadata": {"a": 1}}, "a mapping of text to text"),
        ({"opt": 3, "dtype": torch.float32}, "the model's optimizer"),
        ({"opt": zk.AdamW(filled(1.0).parameters())}, "together with opt"),
        ({"rename": lambda name: "same"}, "the same name 'same'"),
        ({"rename": lambda name: None}, "a name for the tensor"),
        ({"rename": lambda name: "__metadata__"}, "not '__metadata__'"),
    ]
    for settings, words in rows:
        says(refusal(lambda s=settings: export(tmp_path / "new", filled(1.0), **s), (ValueError, TypeError)), [words])
        assert not (tmp_path / "new").exists()


@ranked
def masters_everywhere(world: World, folder: Path) -> None:
    """What one rank exports, several do: after no step, with remainders as they began."""
    for stage in (1, 3):
        model = world.shard(mixed(2), stage=stage, mp_policy=HALF, bucket_bytes=300)
        opt = zk.AdamW(model.parameters(), lr=0.01)
        export(folder / f"{stage} begun", model, dtype=torch.float32, opt=opt)
        found, wanted = theirs(folder / f"{stage} begun"), kept(mixed(2))
        assert all(raw(found[name]) == raw(wanted[name]) for name in wanted)
        exported_masters(world, folder / str(stage), stage, {})
        begin = theirs(folder / str(stage) / "exact")
        torch.distributed.barrier()
        again = world.shard(mixed(5), stage=stage, mp_policy=HALF)
        load_pretrained(again, folder / str(stage) / "exact")
        export(folder / f"{stage} again", again, dtype=torch.float32, opt=zk.AdamW(again.parameters()))
        found = theirs(folder / f"{stage} again")
        assert all(raw(found[name]) == raw(begin[name]) for name in begin)


@ranked
def beyond_blocks(world: World, folder: Path, stage: int, dtype: torch.dtype | None) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Module()
        for number, (numel, kind) in enumerate([(1_300_001, BF16), (3, BF16), (700_003, torch.float32), (5, BF16)]):
            model.register_parameter(f"one{number}", nn.Parameter(torch.randn(numel).to(kind)))
        model.register_buffer("beside", torch.arange(2_000_001) % 251 == 0)
        return model

    export(folder, zk.shard(wide(), stage=stage, mesh=None), dtype=dtype, max_shard_nbytes=4 << 20)
    if world.rank == 0:
        found, wanted = theirs(folder), wide().state_dict()
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            kind = dtype if dtype is not None and wanted[name].is_floating_point() else wanted[name].dtype
            assert raw(tensor) == raw(wanted[name].to(kind)), name


@ranked
def on_ranks_too(world: World, folder: Path) -> None:
    masters_everywhere(world, folder)
    for stage, dtype in ((1, torch.float32), (3, None)):
        beyond_blocks(world, folder / f"beyond {stage} {dtype}", stage, dtype)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_masters_of_ranks_and_tensors_that_end_anywhere_in_blocks_and_pages(size: int, tmp_path: Path) -> None:
    on_ranks(size, on_ranks_too, tmp_path)
