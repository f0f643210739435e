"""State of sharded parameters on disk: each rank has its own folder, and the bits of state in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import BF16, MAKERS, same_bits, same_state
from shard_double import Divided, gradients, on_ranks, whole_state
from tables import each

from zerokern.io import Nvme
from zerokern.optim.binding import Binding

Tier = Callable[..., Nvme]
SIZES = (20_000, 1, 300, 128, 0, 129)  # one that is cut into pieces on either rank


def trained(group: Any, tiers: list[Any], stage: int, dtype: torch.dtype, **settings: Any) -> tuple[Any, ...]:
    model = Divided(group, stage, SIZES, dtype)
    optimizer = MAKERS["adamw"](model.zero_order, tier=tiers[group.rank], max_grad_norm=1.0, **settings)
    for seed in range(3):
        model.set_grads(gradients(seed, SIZES))
        optimizer.step()
    return model.values(), whole_state(group, optimizer.state_dict()), optimizer, model


@each("stage", [0, 3])
def test_the_bits_of_state_in_memory(tier: Tier, stage: int) -> None:
    settings = {"master_format": "none", "stochastic_seed": 5}
    tiers = [tier(), tier()]
    expected = on_ranks(2, lambda group: trained(group, ["device"] * 2, stage, BF16, **settings))
    found = on_ranks(2, lambda group: trained(group, tiers, stage, BF16, **settings))
    for mine, theirs in zip(found, expected, strict=True):
        assert same_bits(mine[0], theirs[0]) and same_state(mine[1], theirs[1])
        assert mine[2].grad_norm == theirs[2].grad_norm


def test_initial_values_outlive_a_first_step_that_failed(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    places, broken, fetch = [tier(), tier()], threading.local(), Binding._fetch

    def fetched(*arguments: Any) -> Any:
        if getattr(broken, "yes", False):
            raise OSError("no such disk")
        return fetch(*arguments)

    monkeypatch.setattr(Binding, "_fetch", fetched)

    def begun(group: Any, place: Any) -> tuple[Divided, Any]:
        model = Divided(group, 2, SIZES, BF16)
        model.set_grads(gradients(0, SIZES))
        return model, MAKERS["adamw"](model.zero_order, tier=place, master_format="split8")

    def work(group: Any) -> None:
        model, optimizer = begun(group, places[group.rank])
        broken.yes = True
        with pytest.raises(OSError, match="no such disk"):
            optimizer.step()
        broken.yes = False
        optimizer.step()
        straight, reference = begun(group, "device")
        reference.step()
        assert same_bits(model.values(), straight.values())
        assert same_state(whole_state(group, optimizer.state_dict()), whole_state(group, reference.state_dict()))

    on_ranks(2, work)
