"""Random lives of an optimizer with state on disk, also of parameters on a played device, beside one in memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from nvme_cases import Tier
from offload_cases import SCHEDULES
from optim_cases import BF16, EVERY_STATE, FP32, MAKERS, MASTERS, make_params, same_bits, set_grads
from played_cases import SLOW
from waiting_device import HostComputes

from zerokern.examples.played_device import PlayedDevice
from zerokern.optim.formats import as_kept

SIZES = (50_000, 3, 20_000, 129, 700, 0)
DEEDS = 25


class Life:
    """One deed after the other, done to both twins, on a device where there is one."""

    def __init__(
        self, tier: Tier, seed: int, device: PlayedDevice | None = None, schedule: Any = "sync", budgets: Any = ()
    ) -> None:
        self.draw, self.device, self.now = random.Random(seed), device, 0
        name, state_format = self.draw.choice(EVERY_STATE)
        self.dtype, master_format = self.draw.choice([one for one in MASTERS if one[0] in (FP32, BF16)])
        settings = {"state_format": state_format, "master_format": master_format, "max_grad_norm": 5.0}
        self.told = [f"seed {seed}: {name} {state_format} {self.dtype} {master_format} {schedule}"]
        where = [*budgets, tier(ring_nbytes=1 << 19)] if "cpu" not in budgets else list(budgets)
        self.params, self.straight = make_params(SIZES, self.dtype), make_params(SIZES, self.dtype)
        for param in self.params if device is not None else ():
            device.own(param)
        ours = MAKERS[name](self.params, tier=where if budgets else where[0], schedule=schedule, **settings)
        reference = MAKERS[name](self.straight, tier="cpu", schedule=schedule, **settings)
        self.pairs = [(ours, self.params), (reference, self.straight)]
        self.handles = [[param.detach() for param in params] for _, params in self.pairs]
        self.deeds = [
            *[self.step] * 8, self.overflow, self.write, self.exchange, self.refresh, self.forget, self.reload,
            self.hand_over, self.grow, self.write_by_handle, self.flush, self.freeze, self.accumulate,
        ]  # fmt: skip

    def deed(self) -> None:
        chosen = self.draw.choice(self.deeds)
        self.told.append(chosen.__name__)
        chosen()

    def number(self) -> int:
        return self.draw.randrange(len(self.params))

    def step(self, infinite: int | None = None) -> None:
        idle = [] if infinite is not None else [n for n in range(len(self.params)) if self.draw.random() < 0.3]
        for optimizer, params in self.pairs:
            set_grads(params, seed=self.now)
            for number, param in enumerate(params):
                if number in idle or not param.requires_grad:
                    param.grad = None
            if infinite is not None and params[infinite].grad is not None:
                params[infinite].grad[-1] = float("inf")
            optimizer.step()
        self.now += infinite is None

    def overflow(self) -> None:
        self.step(self.draw.choice([0, 2, 4]))

    def write(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for _, params in self.pairs:
            with torch.no_grad():
                params[number][::3] = value

    def exchange(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for handles, (_, params) in zip(self.handles, self.pairs, strict=True):
            params[number].data = torch.full_like(params[number], value)
            handles[number] = params[number].detach()

    def refresh(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for optimizer, params in self.pairs:
            params[number].data[:7].fill_(value)
            optimizer.refresh_masters()

    def forget(self) -> None:
        number, entirely = self.number(), self.draw.random() < 0.5
        for optimizer, params in self.pairs:
            if params[number] in optimizer.state:
                if entirely:
                    del optimizer.state[params[number]]
                else:
                    optimizer.state[params[number]].clear()

    def reload(self) -> None:
        saved = [optimizer.state_dict() for optimizer, _ in self.pairs]
        crossed = self.draw.random() < 0.5
        for (optimizer, _), state_dict in zip(self.pairs, saved[::-1] if crossed else saved, strict=True):
            optimizer.load_state_dict(state_dict)

    def hand_over(self) -> None:
        """State of a parameter becomes tensors that somebody else made."""
        number = self.number()
        for optimizer, params in self.pairs:
            if params[number] in optimizer.state:
                optimizer.state[params[number]] = as_kept(optimizer.state_dict()["state"].get(number, {}))

    def grow(self) -> None:
        size, lr = self.draw.choice([5, 300, 9_000]), self.draw.random() / 10
        for handles, (optimizer, params) in zip(self.handles, self.pairs, strict=True):
            params += make_params((size,), self.dtype, seed=len(params))
            optimizer.add_param_group({"params": params[-1:], "lr": lr})
            handles.append(params[-1].detach())
        if self.device is not None:
            self.device.own(self.params[-1])

    def accumulate(self) -> None:
        for optimizer, params in self.pairs:
            optimizer.zero_grad()
            for scale in (1.0, 0.5):
                terms = [(one.float() * one.detach().float().sin() * scale).sum() for one in params]
                torch.stack(terms).sum().backward()
            optimizer.step()

    def write_by_handle(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 5.0)
        for handles in self.handles:
            handles[number].mul_(0.5).add_(value)

    def flush(self) -> None:
        for optimizer, _ in self.pairs:
            optimizer.flush()

    def freeze(self) -> None:
        """Or train it again; one of them always is."""
        number = self.number()
        for _, params in self.pairs:
            params[number].requires_grad_(not params[number].requires_grad)
            if not any(param.requires_grad for param in params):
                params[0].requires_grad_(True)

    def agrees(self) -> bool:
        """The state of parameters that have none yet is nothing in one and an empty entry in the other."""
        if self.device is not None:
            self.device.synchronize()
        states = [optimizer.state_dict()["state"] for optimizer, _ in self.pairs]
        mine, theirs = ({number: entry for number, entry in state.items() if entry} for state in states)
        return (
            same_bits(self.params, self.straight)
            and mine.keys() == theirs.keys()
            and all(mine[number].keys() == theirs[number].keys() for number in mine)
            and all(same_bits([mine[n][key] for key in theirs[n]], list(theirs[n].values())) for n in theirs)
        )


def lives(life: Life) -> None:
    for number in range(DEEDS):
        life.deed()
        assert number % 3 or life.agrees(), life.told
    assert life.agrees(), life.told


def live(tier: Tier, seeds: Iterable[int], schedules: Iterable[str], budgets: Sequence[str] = ()) -> None:
    for seed, schedule in itertools.product(seeds, schedules):
        device = HostComputes(poison=True, **(SLOW["everything"] if seed % 2 else {}))
        lives(Life(tier, seed, device, SCHEDULES[schedule], budgets))
        device.close()


@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_random_lives_on_a_device(tier: Tier) -> None:
    live(tier, [0], SCHEDULES)
    live(tier, [1], ["overlap", "delayed"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_more_random_lives_on_a_device(tier: Tier) -> None:
    live(tier, range(2, 7), SCHEDULES)


SPLITS = [("device:150KB", "cpu:100KB"), ("device:300KB", "cpu")]


@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_random_lives_of_a_split(tier: Tier) -> None:
    live(tier, [0], ["overlap", "delayed", "delayed after 2"], SPLITS[0])
    live(tier, [1], ["delayed"], SPLITS[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remainders loaded for", "ignore:.*while an update of them was pending")
def test_more_random_lives_of_a_split(tier: Tier) -> None:
    for budgets in SPLITS:
        live(tier, range(2, 6), SCHEDULES, budgets)


@pytest.mark.filterwarnings("ignore:the remainders loaded for")
def test_random_lives(tier: Tier) -> None:
    for seed in range(6):
        lives(Life(tier, seed))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remainders loaded for")
def test_more_random_lives(tier: Tier) -> None:
    for seed in range(6, 40):
        lives(Life(tier, seed))
