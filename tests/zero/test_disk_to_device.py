"""Parameters that compute on a device and rest on a disk: the ring that they pass, and what goes wrong on the way."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from test_tier_failures import corrupt
from test_tiers import model_of, values
from test_tiers_on_device import SLOW, on, played, train

import zerokern as zk
from zerokern.api import sharding_of


@pytest.mark.parametrize("width", [1, 3, 1536])
def test_any_size_passes_a_ring_of_two_slots(width: int, tmp_path: Path) -> None:
    expected = train(zk.shard(model_of(width=width, count=2), stage=3), 2)
    with played(poison=True) as device:
        model = on(device, model_of(width=width, count=2))
        zk.shard(model, stage=3, tier=zk.Nvme(tmp_path, ring_nbytes="1M"))
        assert train(model, 2) == expected
        lift = sharding_of(model).memories[0].lift
        assert len(lift._slots) == 2 and lift.host.held()["ring"] == 1 << 20
        del model, lift


def test_what_cannot_be_read_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    expected = train(zk.shard(model_of(), stage=3), 2)
    with played(**SLOW) as device:
        model = zk.shard(on(device, model_of()), stage=3, tier=zk.Nvme(tmp_path, checksum=True))
        with torch.no_grad():
            model(torch.ones(2, 8))
        corrupt(model, 3)
        for _ in range(2):
            with pytest.raises(zk.IoError, match=r"unit 'blocks.2' cannot be fetched"):
                model(torch.ones(2, 8))
        corrupt(model, 3)
        assert train(model, 2) == expected
        assert all(torch.isfinite(value).all() for value in values(model).values())
        sharding_of(model).rests.drain()
        memories = sharding_of(model).memories
        assert not any(one.rest.is_here or one.full.untyped_storage().nbytes() for one in memories)
        del model, memories


def test_the_thread_ends_with_the_model(tmp_path: Path) -> None:
    with played() as device:
        model = zk.shard(on(device, model_of()), stage=3, tier=zk.Nvme(tmp_path))
        train(model, 1)
        lifting = [one for one in threading.enumerate() if one.name.startswith("zerokern lift")]
        assert lifting
        del model
        for _ in range(3):
            gc.collect()
        for one in lifting:
            one.join(5.0)
            assert not one.is_alive()
