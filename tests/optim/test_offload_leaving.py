"""Gradients that leave during backward: who is told, for how long, and that nobody else is needed for it."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from dtensor_cases import on_ranks
from tables import each
from torch import nn

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.examples.played_device import PlayedDevice
from zerokern.zero.shard import shard_of


def built(device: PlayedDevice, stage: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8))
    if stage is not None:
        zk.shard(model, stage=stage)
    for param in model.parameters():
        device.own(param)
    return model


def train(device: PlayedDevice, model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        device.synchronize()
        loss = model(torch.randn(4, 24)).square().mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def step_alone(rank: int) -> list[float]:
    """A model that this rank alone has."""
    if rank:
        return []
    with_threads = PlayedDevice()
    model = built(with_threads)
    losses = train(with_threads, model, [zk.AdamW(model.parameters(), tier="cpu", schedule="overlap")], 3)
    with_threads.close()
    return losses


def test_a_rank_may_step_plain_parameters_alone() -> None:
    """Nobody waits for the others."""
    assert len(on_ranks(2, step_alone)[0]) == 3


def test_two_optimizers_of_one_model_both_hear_of_its_buckets(device: PlayedDevice) -> None:
    model = built(device, stage=2)
    first, second = (list(module.parameters()) for module in (model[0], model[2]))
    optimizers = [zk.AdamW(params, tier="cpu", schedule="overlap") for params in (first, second)]
    train(device, model, optimizers, 2)
    device.synchronize()
    model(torch.randn(4, 24)).square().mean().backward()
    assert all(optimizer.runner.leaving.take() for optimizer in optimizers)

    alone = built(device, stage=2)
    one = zk.AdamW([*alone[0].parameters(), *alone[2].parameters()], tier="cpu", schedule="overlap")
    again = built(device, stage=2)
    two = [zk.AdamW(module.parameters(), tier="cpu", schedule="overlap") for module in (again[0], again[2])]
    assert train(device, alone, [one], 4) == train(device, again, two, 4)


def test_listeners_go_with_their_optimizer(device: PlayedDevice) -> None:
    model = built(device, stage=2)
    optimizer = zk.AdamW(model.parameters(), tier="cpu", schedule="overlap")
    train(device, model, [optimizer], 2)
    params = list(model.parameters())

    def hooked() -> int:
        return sum(len(bucket.shown.listeners) for bucket in shard_of(params[0]).sharding.gradient_buckets)

    assert hooked()
    model(torch.randn(4, 24))  # publishes the last step
    del optimizer
    gc.collect()
    assert not hooked()


def pending(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = zk.SGD(model.parameters(), lr=0.5, momentum=0.9, schedule=zk.Delayed(after=0))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


@each("wrong", [torch.zeros(4, 3), torch.zeros(2, 3, dtype=torch.float64)])
def test_pending_values_of_another_kind_are_refused_before_anything_changes(wrong: torch.Tensor) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = pending(model)
    saved = optimizer.state_dict()
    expected = saved["state"][0]["pending"].clone()
    saved["state"][0] = {**saved["state"][0], "pending": wrong}
    with pytest.raises(StateError, match=r"'pending' of parameter 0.*nothing is cast"):
        optimizer.load_state_dict(saved)
    optimizer.flush()
    assert torch.equal(model.weight, expected)


def test_a_checkpoint_replaces_what_is_pending_without_a_warning() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = pending(model)
    weight, saved = model.weight.detach().clone(), optimizer.state_dict()
    expected = saved["state"][0]["pending"].clone()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({"weight": weight})
        optimizer.load_state_dict(saved)
    assert torch.equal(model.weight, weight)
    optimizer.flush()
    assert torch.equal(model.weight, expected)


def test_a_pending_update_of_a_parameter_that_is_frozen_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    saved = pending(model).state_dict()
    frozen = nn.Linear(3, 2)
    frozen.load_state_dict(model.state_dict())
    frozen.bias.requires_grad_(False)
    optimizer = zk.SGD(frozen.named_parameters(), lr=0.5, momentum=0.9, schedule=zk.Delayed(after=0))
    with pytest.raises(StateError, match=r"^bias is frozen, and this state has an update.*requires_grad=True"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    frozen.bias.requires_grad_(True)
    optimizer.load_state_dict(saved)
    optimizer.flush()
    assert torch.equal(frozen.bias, saved["state"][1]["pending"])


def test_a_frozen_parameter_may_be_loaded_with_the_values_that_it_has() -> None:
    model = nn.Linear(3, 2)
    saved = pending(model).state_dict()
    frozen = nn.Linear(3, 2)
    frozen.load_state_dict({"weight": model.weight, "bias": saved["state"][1]["pending"]})
    frozen.bias.requires_grad_(False)
    optimizer = zk.SGD(frozen.parameters(), lr=0.5, momentum=0.9, schedule=zk.Delayed(after=0))
    optimizer.load_state_dict(saved)
    optimizer.flush()
    assert torch.equal(frozen.weight, saved["state"][0]["pending"])
