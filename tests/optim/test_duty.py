"""Writes that torch does not count: after `opt.refresh_masters()` they are followed as counted ones are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from optim_cases import BF16, FP16, FP32, contents, make_params, same_bits, set_grads, train
from tables import each
from torch import Tensor

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


def by_numpy(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    for param in params:
        param.detach().view(torch.uint8).numpy().reshape(param.numel(), -1)[: param.numel() // 2] = 0


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
    by_numpy,
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
    if write is by_numpy:
        torch._foreach_zero_([param.detach().view(-1)[: param.numel() // 2] for param in params])
        return
    write([Counted(param) for param in params], held)


def run(name: str, folder: Path, write: Callable, *, counts: bool, refreshes: bool) -> list[Tensor]:
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
            optimizer.refresh_masters() if refreshes else None
        optimizer.flush()
    state = optimizer.state_dict()["state"]
    said = torch.tensor([len(str(one.message)) for one in heard])
    return [*(param.detach() for param in params), *(v for one in state.values() for v in one.values()), said]


WHOLE = ("bf16 fp32", "delayed masters")  # the others show the ways that differ most
SHORT = (clipped, by_numpy, by_what_is_kept)


@each("name, write", [(name, write) for name in SETTINGS for write in (WRITES if name in WHOLE else SHORT)])
def test_a_write_counts_as_one_that_torch_counts(name: str, write: Callable, tmp_path: Path) -> None:
    ours, theirs = (run(name, tmp_path, write, counts=counts, refreshes=not counts) for counts in (False, True))
    assert same_bits(ours, theirs)


@each("name", SETTINGS)
def test_who_only_reads_changes_nothing(name: str, tmp_path: Path) -> None:
    def read(params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        for param in params:
            param.data.norm(), copy.deepcopy(param), param.data.view(-1)[:1].clone()

    ours = run(name, tmp_path / "read", read, counts=False, refreshes=False)
    assert same_bits(ours, run(name, tmp_path / "alone", lambda params, held: None, counts=False, refreshes=False))


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
                optimizer.refresh_masters() if not counts else None
            optimizer.flush()
        made.append(contents(optimizer, params))
    assert same_bits(*made)
