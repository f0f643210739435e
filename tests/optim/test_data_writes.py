"""Writes by way of `.data`, which torch does not count: the next step follows them as it follows counted ones."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_cases import BF16, FP16, FP32, contents, make_params, python_calls, same_bits, set_grads, train
from tables import each
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import AdamW

SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 fp32": (BF16, {"master_format": "fp32"}),
    "fp16": (FP16, {}),
    "bf16 split16": (BF16, {}),
    "cpu": (BF16, {"master_format": "fp32", "tier": "cpu", "schedule": "overlap"}),
    "delayed fp32": (FP32, {"schedule": zk.Delayed(after=1)}),
    "delayed masters": (BF16, {"master_format": "fp32", "schedule": zk.Delayed(after=1)}),
    "disk": (BF16, {"master_format": "fp32"}),
}


def clipped(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    for param in params:
        param.data.clamp_(-0.5, 0.5)


def all_at_once(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    torch._foreach_mul_([param.data for param in params], 0.5)


def through_a_view(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    for param in params:
        param.data.view(-1)[:1].fill_(0.75)


def exchanged_twice(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """The second time, the memory may come from where it was at first."""
    for param in params:
        param.data = param.data * 0.5
        param.data = param.data * 0.5


def given_what_is_written_later(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    for param in params:
        value = param.detach().clone()
        param.data = value
        value.mul_(0.5)


def by_what_is_kept(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    torch._foreach_mul_(list(held), 0.5)


WRITES = [
    clipped,
    all_at_once,
    through_a_view,
    exchanged_twice,
    given_what_is_written_later,
    by_what_is_kept,
]


class Counted:
    """What a parameter's `.data` is, and counts: the program that the one by way of `.data` is held to."""

    def __init__(self, param: Tensor) -> None:
        self.param = param

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            with torch.no_grad():
                self.param.copy_(value)
        else:
            super().__setattr__(name, value)

    @property
    def data(self) -> Tensor:
        return self.param.detach()

    def detach(self) -> Tensor:
        return self.param.detach()


def counted(write: Callable, params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    if write is given_what_is_written_later:
        write = all_at_once
    write([Counted(param) for param in params], held)


def run(name: str, folder: Path, write: Callable, *, counts: bool) -> list[Tensor]:
    dtype, settings = SETTINGS[name]
    params = make_params(dtype=dtype)
    if name == "disk":
        folder.mkdir(exist_ok=True)
        settings = {**settings, "tier": zk.Nvme(folder / str(counts))}
    optimizer = AdamW(params, lr=1e-2, **settings)
    held = [param.detach() if counts else param.data for param in params]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(4):
            train(optimizer, params, 1, start=step)
            counted(write, params, held) if counts else write(params, held)
        optimizer.flush()
    state = optimizer.state_dict()["state"]
    said = torch.tensor([len(str(one.message)) for one in heard])
    return [*(param.detach() for param in params), *(v for one in state.values() for v in one.values()), said]


WHOLE = ("bf16 fp32", "delayed masters")  # the others show the ways that differ most
SHORT = (clipped, exchanged_twice, by_what_is_kept)


@each("name, write", [(name, write) for name in SETTINGS for write in (WRITES if name in WHOLE else SHORT)])
def test_a_write_counts_as_one_that_torch_counts(name: str, write: Callable, tmp_path: Path) -> None:
    ours, theirs = (run(name, tmp_path, write, counts=counts) for counts in (False, True))
    assert same_bits(ours, theirs)


@each("name", SETTINGS)
def test_who_only_reads_changes_nothing(name: str, tmp_path: Path) -> None:
    def read(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        for param in params:
            param.data.norm(), copy.deepcopy(param), param.data.view(-1)[:1].clone()

    ours = run(name, tmp_path / "read", read, counts=False)
    assert same_bits(ours, run(name, tmp_path / "left alone", lambda params, held: None, counts=False))


@each("schedule", ["sync", "overlap", zk.Delayed(after=1)])
def test_twins_in_host_memory_follow(schedule: Any, device: PlayedDevice) -> None:
    made = []
    for counts in (False, True):
        params = make_params(dtype=FP32)
        for param in params:
            device.own(param)
        optimizer = AdamW(params, lr=1e-2, tier="cpu", schedule=schedule)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(4):
                set_grads(params, seed=step)
                for param in params:
                    device.own(param.grad)
                optimizer.step()
                optimizer.flush() if schedule == "overlap" else None
                counted(clipped, params, []) if counts else clipped(params, [])
            optimizer.flush()
        made.append(contents(optimizer, params))
    assert same_bits(*made)


def test_what_is_saved_has_followed() -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=1e-2, master_format="fp32")
    train(optimizer, params, 2)
    params[4].data.fill_(1.0)
    assert optimizer.state_dict()["state"][4]["master"].to(BF16).eq(1.0).all()
    params[4].data.fill_(2.0)
    assert copy.deepcopy(optimizer).state[params[4]] is not None
    assert optimizer.state[params[4]]["master"].to(BF16).eq(2.0).all()


def test_a_pending_update_gives_way_and_says_so() -> None:
    params = make_params()
    optimizer = AdamW(params, lr=1e-2, schedule=zk.Delayed(after=0))
    train(optimizer, params, 2)
    params[4].data.fill_(3.0)
    with pytest.warns(UserWarning, match="1 parameters were written while an update of them was pending"):
        optimizer.flush()
    assert params[4].eq(3.0).all()


def test_parameters_stay_what_they_are() -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=1e-2, master_format="fp32")
    train(optimizer, params, 1)
    assert all(type(one) is nn.Parameter for one in (*params, nn.Parameter(params[0]), copy.deepcopy(params[0])))
    assert type(params[0].data) is Tensor and nn.Parameter.data is Tensor.data
    assert torch.equal(pickle.loads(pickle.dumps(params[4])), params[4])


def test_what_was_handed_out_is_not_kept() -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=1e-2, master_format="fp32")
    seen = []
    for _ in range(200):
        one = params[4].data
        seen.append(weakref.ref(one))
        del one
    assert sum(one() is not None for one in seen) < 100
    old = StorageWeakRef(params[4].data.untyped_storage())
    params[4].data = params[4].data.clone()
    assert old.expired()  # who moves parameters away gets the memory back at once
    train(optimizer, params, 1)
    assert not any(one() is not None for one in seen)
    gone = [weakref.ref(optimizer)]
    del optimizer
    gc.collect()
    assert gone[0]() is None


def test_who_never_asks_pays_nothing() -> None:
    params = make_params((4,) * 300, BF16)
    optimizer = AdamW(params, master_format="fp32")
    train(optimizer, params, 1)
    calls = python_calls(optimizer.holdings.data_writes.count)
    assert calls <= 2


def test_parameters_that_left_are_not_kept() -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, master_format="fp32")
    train(optimizer, params, 1)
    old, params[0] = weakref.ref(params[0]), nn.Parameter(params[0].detach().clone())
    optimizer.param_groups[0]["params"][0] = params[0]
    optimizer.state[params[0]] = optimizer.state.pop(old())
    train(optimizer, params, 1, start=1)
    gc.collect()
    assert old() is None
