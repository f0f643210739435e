"""What a call that cannot be is told: which argument, which parameter, and the nearest name that there is."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import nn

import zerokern as zk
from zerokern.core import errors
from zerokern.optim import checks

PACKAGE = Path(zk.__file__).parent


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 2)


def opts(model: nn.Module) -> tuple[Any, Any]:
    matrices, rest = zk.muon_groups(model)
    return zk.Muon(matrices), zk.AdamW(rest)


def in_two() -> Any:
    model = Model()
    named = list(model.named_parameters())
    return zk.ChainedOptimizer([zk.AdamW(named), zk.Lion(named[:1])])


def loaded(folder: Path, order: Callable[[Any, Any], Any]) -> Any:
    model = Model()
    both = opts(model)
    zk.save(folder / "step", model, both)
    other = Model()
    return zk.load(folder / "step", other, order(*opts(other)))


def adamw(**given: Any) -> Any:
    return zk.AdamW(Model().parameters(), **given)


def moments(first: torch.dtype, second: torch.dtype) -> Any:
    param, grad = torch.zeros(4), torch.zeros(4)
    return zk.kernels.adam(param, grad, torch.zeros(4, dtype=first), torch.zeros(4, dtype=second), lr=0.1, step=1)


def predicted(machine: str) -> Any:
    return zk.plan("1B", tier="cpu").predict(machine)


MESSAGES: list[tuple[str, Callable[[Path], Any], list[str]]] = [
    (
        "moments of two dtypes",
        lambda _: moments(torch.bfloat16, torch.float32),
        ["exp_avg is torch.bfloat16 and exp_avg_sq is torch.float32", "one dtype for both"],
    ),
    ("a parameter of two", lambda _: in_two(), ["optimizers=", "blocks.0.weight in optimizers[0] and optimizers[1]"]),
    (
        "a pattern",
        lambda _: zk.muon_groups(Model(), matrices=["blcoks.*"]),
        ["matrices='blcoks.*'", "Did you mean 'blocks.*'?"],
    ),
    ("of rest", lambda _: zk.muon_groups(Model(), rest=["heda.weight"]), ["rest=", "Did you mean 'head.weight'?"]),
    ("of split", lambda _: zk.muon_groups(Model(), split={"qkv": 3}), ["split='qkv'", "No parameter has such a name"]),
    ("a class", lambda _: zk.shard(Model(), stage=3, units="Linear"), ["units='Linear'", "== 'Linear'"]),
    ("a class, nearly", lambda _: zk.shard(Model(), stage=3, units=["Liner"]), ["units='Liner'", "== 'Linear'"]),
    ("a module", lambda _: zk.shard(Model(), stage=3, units=["blocks.1"]), ["get_submodule('blocks.1')"]),
    ("a device's budget", lambda _: adamw(tier="gpu:8GB"), ["tier='gpu:8GB'", "Did you mean 'device:8GB'?"]),
    ("in a list", lambda _: adamw(tier=["gpu:8GB", "cpu"]), ["tier='gpu:8GB'", "Did you mean 'device:8GB'?"]),
    ("a disk", lambda _: adamw(tier="nmve:/x"), ["tier='nmve:/x'", "Did you mean 'nvme:/x'?"]),
    ("a host", lambda _: adamw(tier="host"), ["tier='host'", "Did you mean 'cpu'?"]),
    ("a folder", lambda _: adamw(tier="/mnt/disk"), ["A folder becomes a tier with zk.Nvme(path)"]),
    ("a tier of a plan", lambda _: zk.plan("1B", tier="gpu"), ["tier='gpu'", "Did you mean 'device'?"]),
    (
        "an optimizer for a model",
        lambda folder: zk.save(folder / "step", adamw()),
        ["model=<AdamW>: must be a torch.nn.Module", "zk.save(path, model, opt)"],
    ),
    (
        "no matrices",
        lambda _: zk.Muon(zk.muon_groups(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[0]),
        ["params=[]", "at least one matrix", "nn.ModuleList", "matrices=[...]"],
    ),
    (
        "another order",
        lambda folder: loaded(folder, lambda muon, rest: [rest, muon]),
        ["the same optimizers in other order; pass opt[1], opt[0]"],
    ),
    ("one of two", lambda folder: loaded(folder, lambda muon, _: muon), ["holds 2 optimizers; 1 was passed"]),
    (
        "an option of another optimizer",
        lambda _: zk.Muon([nn.Parameter(torch.ones(2, 2))], betas=(0.9, 0.95)),
        ["Muon() has no argument 'betas'; it has 'momentum'"],
    ),
    ("its counterpart", lambda _: adamw(momentum=0.9), ["AdamW() has no argument 'momentum'; it has 'betas'"]),
    ("a format", lambda _: adamw(state_format="int-8"), ["state_format='int-8'", "Did you mean 'int8'?"]),
    ("a format of a plan", lambda _: zk.plan("1B", state_format="pf32"), ["Did you mean 'fp32'?"]),
    ("a master", lambda _: zk.plan("1B", master_format="spilt16"), ["Did you mean 'split16'?"]),
    ("an optimizer", lambda _: zk.plan("1B", optimizer="AdamW"), ["optimizer='AdamW'", "Did you mean 'adamw'?"]),
    (
        "a dtype",
        lambda _: zk.plan("1B", param_dtype="bfloat-16"),
        ["param_dtype='bfloat-16'", "Did you mean 'bfloat16'?"],
    ),
    ("a dimension", lambda _: zk.plan("1B", mesh={"dp_shrad": 2}), ["mesh=", "Did you mean 'dp_shard'?"]),
    ("a place", lambda _: adamw(tier="cpu", update="hots"), ["update='hots'", "Did you mean 'host'?"]),
    ("a place of a plan", lambda _: zk.plan("1B", tier="cpu", update="devcie"), ["Did you mean 'device'?"]),
    ("a reduction", lambda _: zk.shard(Model(), reduce="mena"), ["reduce='mena'", "Did you mean 'mean'?"]),
    ("a moment", lambda folder: zk.load(folder, Model(), verify="frist"), ["verify=", "Did you mean 'first'?"]),
    ("a model", lambda _: zk.plan("llama3-8b"), ["Did you mean 'llama-3-8b'?"]),
    ("a schedule", lambda _: adamw(schedule="overlp"), ["schedule='overlp'", "Did you mean 'overlap'?"]),
    ("a delay", lambda _: adamw(schedule="delayd"), ["zk.Delayed(after=40)"]),
    ("a schedule of a plan", lambda _: zk.plan("1B", tier="cpu", schedule="snyc"), ["Did you mean 'sync'?"]),
    ("a machine in short", lambda _: predicted("h10"), ["machine='h10'", "Did you mean 'h100-pcie'?"]),
    ("a machine that is like two", lambda _: predicted("H100"), ["machine='H100'", "Did you mean 'h100-pcie'?"]),
    ("a machine", lambda _: predicted("gb200"), ["machine='gb200'", "Did you mean 'gh200'?"]),
    ("a description", lambda _: predicted("mine.json"), ["machine='mine.json'", "A description is a JSON object"]),
    ("a class of the library", lambda _: zk.adamw, ["no attribute 'adamw'. Did you mean 'AdamW'?"]),
    ("a function of the library", lambda _: zk.shards_, ["no attribute 'shards_'. Did you mean 'shards'?"]),
]


@each("which, call, parts", MESSAGES)
def test_a_message_names_what_is_meant(which: str, call: Callable, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, zk.ZerokernError)) as refused:
        call(tmp_path)
    said = str(refused.value)
    assert all(part in said for part in parts), (which, said)
    assert len(said.splitlines()) <= 3, said


def test_a_name_that_is_like_none_gets_no_suggestion() -> None:
    for call in (
        lambda: adamw(state_format="x"),
        lambda: adamw(tier="elsewhere"),
        lambda: zk.plan("1B", optimizer="q"),
    ):
        with pytest.raises(ValueError, match="must be") as refused:
            call()
        assert "mean" not in str(refused.value)
    with pytest.raises(AttributeError, match=r"has no attribute .quantum.\. It has SGD, Adagrad, "):
        _ = zk.quantum
    assert errors.did_you_mean(("adam",), ["adam"]) == ""
    assert checks.misspelt("max_momentum", ["momentum"]) is None, "a framework's key"


def overlapping() -> None:
    model = Model()
    opt = zk.AdamW(model.parameters(), schedule="overlap")
    model.head(torch.ones(1, 4)).sum().backward()
    opt.step()


def fused() -> None:
    model = Model()
    model.blocks[0].qkv = nn.Linear(4, 12, bias=False)
    zk.muon_groups(model)


def twice() -> None:
    model = Model()
    first, second = zk.AdamW(model.parameters()), zk.AdamW(model.parameters())
    model.head(torch.ones(1, 4)).sum().backward()
    first.step()
    second.step()


def skipped() -> None:
    model = Model()
    opt = zk.AdamW(model.parameters(), max_grad_norm=1.0)
    for _ in range(60):
        for param in model.parameters():
            param.grad = torch.full_like(param, float("nan"))
        opt.step()


@each("call", [overlapping, fused, twice, skipped])
def test_a_warning_shows_the_line_of_the_caller(call: Callable) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call()
    ours = [one for one in heard if one.category is UserWarning]
    assert ours, call
    lines, first = inspect.getsourcelines(call)
    for one in ours:
        assert one.filename == __file__ and first <= one.lineno < first + len(lines), (one.filename, one.lineno)


def test_a_warning_within_torch_or_a_thread_shows_no_line_of_ours() -> None:
    """What has no program above it, as a hook of autograd's thread, shows none."""
    frames = {"__name__": "zerokern.within", "warn": errors.warn}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        exec("def deep(call): call('from above')", frames)
        between: dict[str, Any] = {"__name__": "torch.optim.optimizer", "deep": frames["deep"], "warn": errors.warn}
        exec("def through(): deep(warn)", between)
        between["through"]()
    assert [one.filename for one in heard] == [__file__]


def test_every_warning_goes_through_the_one_function() -> None:
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"\bwarnings\.warn\(|stacklevel", path.read_text(encoding="utf-8"))
    ]
    assert found == ["core/errors.py"]
