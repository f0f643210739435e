"""Random lives of an optimizer with state on disk and parameters on a played device, beside one all on the host."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from nvme_cases import Tier
from offload_cases import SCHEDULES
from optim_cases import BF16, EVERY_STATE, FP32, MAKERS, MASTERS, make_params, set_grads
from test_nvme_random import DEEDS, SIZES, Life
from test_offload_played import SLOW
from waiting_device import HostComputes

from zerokern.examples.played_device import PlayedDevice


class OnDevice(Life):
    """Besides, parameters are frozen for a while, written by views and stepped with what autograd accumulates."""

    def __init__(self, tier: Tier, seed: int, device: PlayedDevice, schedule: Any, budgets: Sequence[str] = ()) -> None:
        super().__init__(tier, seed)
        draw, twins = random.Random(seed), self.twins
        name, state_format = draw.choice(EVERY_STATE)
        dtype, master_format = draw.choice([one for one in MASTERS if one[0] in (FP32, BF16)])
        settings = {"state_format": state_format, "master_format": master_format, "max_grad_norm": 5.0}
        twins.params, twins.straight = make_params(SIZES, dtype), make_params(SIZES, dtype)
        for param in twins.params:
            device.own(param)
        where = [*budgets, tier(ring_nbytes=1 << 19)] if "cpu" not in budgets else list(budgets)
        where = where if budgets else where[0]
        twins.ours = MAKERS[name](twins.params, tier=where, schedule=schedule, **settings)
        twins.reference = MAKERS[name](twins.straight, tier="cpu", schedule=schedule, **settings)
        self.device, self.told = device, [*self.told, str(schedule)]
        self.handles = [[param.detach() for param in params] for _, params in twins.pairs]
        self.deeds += [self.write_by_handle, self.flush, self.freeze, self.accumulate]

    def step(self) -> None:
        params = self.twins.params
        idle = [n for n, param in enumerate(params) if self.draw.random() < 0.3 or not param.requires_grad]
        self.twins.train(1, self.now, idle=idle)
        self.now += 1

    def overflow(self) -> None:
        number = self.draw.choice([0, 2, 4])
        for optimizer, params in self.twins.pairs:
            set_grads(params, seed=self.now)
            for param in params:
                if not param.requires_grad:
                    param.grad = None
            if params[number].grad is not None:
                params[number].grad[-1] = float("inf")
            optimizer.step()

    def accumulate(self) -> None:
        for optimizer, params in self.twins.pairs:
            optimizer.zero_grad()
            for scale in (1.0, 0.5):
                terms = [(one.float() * one.detach().float().sin() * scale).sum() for one in params]
                torch.stack(terms).sum().backward()
            optimizer.step()

    def exchange(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for handles, (_, params) in zip(self.handles, self.twins.pairs, strict=True):
            params[number].data = torch.full_like(params[number], value)
            handles[number] = params[number].detach()

    def write_by_handle(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 5.0)
        for handles in self.handles:
            handles[number].mul_(0.5).add_(value)

    def flush(self) -> None:
        for optimizer, _ in self.twins.pairs:
            optimizer.flush()

    def freeze(self) -> None:
        """Or train it again; one of them always is."""
        number = self.number()
        for _, params in self.twins.pairs:
            params[number].requires_grad_(not params[number].requires_grad)
            if not any(param.requires_grad for param in params):
                params[0].requires_grad_(True)

    def grow(self) -> None:
        super().grow()
        self.device.own(self.twins.params[-1])
        for handles, (_, params) in zip(self.handles, self.twins.pairs, strict=True):
            handles.append(params[-1].detach())

    def agrees(self) -> bool:
        self.device.synchronize()
        return super().agrees()


def live(tier: Tier, seeds: Iterable[int], schedules: Iterable[str], budgets: Sequence[str] = ()) -> None:
    for seed, schedule in itertools.product(seeds, schedules):
        device = HostComputes(poison=True, **(SLOW["everything"] if seed % 2 else {}))
        life = OnDevice(tier, seed, device, SCHEDULES[schedule], budgets)
        for number in range(DEEDS):
            life.deed()
            assert number % 3 or life.agrees(), (seed, life.told)
        assert life.agrees(), (seed, life.told)
        device.close()


@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_random_lives_on_a_device(tier: Tier) -> None:
    live(tier, [0], SCHEDULES)
    live(tier, [1], ["overlap", "delayed"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_more_random_lives_on_a_device(tier: Tier) -> None:
    live(tier, range(2, 12), SCHEDULES)


SPLITS = [("device:150KB", "cpu:100KB"), ("device:300KB", "cpu")]


@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_random_lives_of_a_split(tier: Tier) -> None:
    live(tier, [0], ["overlap", "delayed", "delayed after 2"], SPLITS[0])
    live(tier, [1], ["delayed"], SPLITS[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_more_random_lives_of_a_split(tier: Tier) -> None:
    for budgets in SPLITS:
        live(tier, range(2, 12), SCHEDULES, budgets)
