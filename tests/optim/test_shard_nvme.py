"""State of sharded parameters on disk: each rank has its own folder, and the bits of state in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from optim_cases import BF16, MAKERS, same_bits, same_state
from shard_double import Divided, gradients, on_ranks, whole_state

from zerokern.io import Nvme
from zerokern.optim.binding import Binding

Tier = Callable[..., Nvme]
SIZES = (20_000, 1, 300, 128, 0, 129)  # one that is cut into pieces on either rank


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
