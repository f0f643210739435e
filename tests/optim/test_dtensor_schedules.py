"""DTensors under every schedule, in host memory and on a device that is played: the bits of plain parameters."""

from __future__ import annotations

from typing import Any

import torch
from dtensor_cases import SHAPES, Pair, built, cut, local, mesh_of, on_ranks, one_by_one
from optim_cases import BF16, FP32, same_bits
from torch.nn.utils import clip_grad_norm_

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import AdamW

SCHEDULES = ("sync", "overlap", zk.Delayed(after=2))


def played(pair: Pair, device: PlayedDevice) -> None:
    for param in pair.params:
        device.own(param)
        device.own(param._local_tensor)


def in_host_memory_and_across_a_link(rank: int) -> None:
    mesh = mesh_of(torch.distributed.get_world_size())
    for schedule in SCHEDULES:
        for dtype, across in ((FP32, False), (BF16, False), (BF16, True)):
            pair = Pair("adamw", mesh, dtype=dtype, tier="cpu", schedule=schedule, max_grad_norm=2.0)
            device = PlayedDevice(stretch=0.0005) if across else None
            if device is not None:
                played(pair, device)
            for seed in range(4):
                pair.train([seed])
                if device is not None:
                    device.synchronize()
                shown = [
                    (local(param), plain.detach()) for param, plain in zip(pair.params, pair.straight, strict=True)
                ]
                assert all(same_bits([mine], [local(cut(plain, mesh))]) for mine, plain in shown)
            assert pair.ours.grad_norm == pair.reference.grad_norm
            for one in (pair.ours, pair.reference):
                one.flush()
            if device is not None:
                device.synchronize()
            pair.agree()
            if device is not None:
                device.close()


def test_a_gradient_that_torch_clips_after_backward_is_the_one_that_counts() -> None:
    on_ranks(1, clipped_late)


def clipped_late(rank: int) -> None:
    """No counter of a DTensor shows what torch's function does to it."""
    mesh = mesh_of(1)
    device = PlayedDevice()
    ours, theirs = built(mesh), built(mesh)
    for param in ours.parameters():
        device.own(param)
        device.own(param._local_tensor)
    mine, other = AdamW(ours.parameters(), tier="cpu", schedule="overlap"), AdamW(theirs.parameters())
    for seed in range(4):
        torch.manual_seed(seed)
        batch = torch.randn(4, 7)
        for model, optimizer in ((ours, mine), (theirs, other)):
            model(batch).pow(2).sum().backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        device.synchronize()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(same_bits([local(param)], [local(twin)]) for param, twin in pairs)
    device.close()


def a_pending_update_is_saved_and_loaded(rank: int) -> None:
    mesh = mesh_of(2)
    settings: dict[str, Any] = {"dtype": BF16, "schedule": zk.Delayed(after=0), "max_grad_norm": 1.0}
    straight, first = Pair("adamw", mesh, **settings), Pair("adamw", mesh, **settings)
    straight.train(range(6))
    first.train(range(3))
    saved, values = first.ours.state_dict(), [param.detach().clone() for param in first.params]
    pending = saved["state"][2]["pending"]
    assert pending.placements == first.params[2].placements and pending.shape == SHAPES[2]
    again = Pair("adamw", mesh, **settings)
    with torch.no_grad():
        for param, value in zip(again.params, values, strict=True):
            param.copy_(value)
    again.ours.load_state_dict(saved)
    again.reference.load_state_dict(first.reference.state_dict())
    again.straight[:] = first.straight
    for seed in range(3, 6):
        again.set_grads(seed)
        again.ours.step()
    for one in (again, straight):
        one.ours.flush()
    found, expected = ([local(param) for param in one.params] for one in (again, straight))
    assert same_bits(found, expected)
    state, kept = (one.ours.state_dict()["state"] for one in (again, straight))
    for number, entry in kept.items():
        assert same_bits([local(state[number][key]) for key in entry], [local(value) for value in entry.values()])


def two_ranks_at_every_schedule(rank: int) -> None:
    one_by_one(rank, [in_host_memory_and_across_a_link, a_pending_update_is_saved_and_loaded])


def test_two_ranks_at_every_schedule() -> None:
    """In host memory, across a link, and saved and loaded with an update that is pending."""
    on_ranks(2, two_ranks_at_every_schedule)
