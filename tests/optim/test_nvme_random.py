"""Random lives of an optimizer, with state on disk and in memory side by side: the bits agree at every look."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from optim_cases import BF16, EVERY_STATE, FP32, MASTERS, Twins, make_params, same_bits, set_grads

from zerokern.io import Nvme
from zerokern.optim.formats import as_kept

Tier = Callable[..., Nvme]
SIZES = (50_000, 3, 20_000, 129, 700, 0)
DEEDS = 25


class Life:
    """One deed after the other, done to both twins."""

    def __init__(self, tier: Tier, seed: int) -> None:
        self.draw = random.Random(seed)
        name, state_format = self.draw.choice(EVERY_STATE)
        dtype, master_format = self.draw.choice([one for one in MASTERS if one[0] in (FP32, BF16)])
        settings = {"state_format": state_format, "master_format": master_format, "max_grad_norm": 5.0}
        self.twins = Twins(name, tier(), SIZES, dtype, **settings)
        self.dtype, self.now, self.told = dtype, 0, [f"{name} {state_format} {dtype} {master_format}"]
        self.deeds = [
            *[self.step] * 8,
            self.overflow,
            self.write,
            self.exchange,
            self.refresh,
            self.forget,
            self.reload,
            self.hand_over,
            self.grow,
        ]

    def deed(self) -> None:
        chosen = self.draw.choice(self.deeds)
        self.told.append(chosen.__name__)
        chosen()

    def number(self) -> int:
        return self.draw.randrange(len(self.twins.params))

    def step(self) -> None:
        idle = [number for number in range(len(self.twins.params)) if self.draw.random() < 0.3]
        self.twins.train(1, self.now, idle=idle)
        self.now += 1

    def overflow(self) -> None:
        number = self.draw.choice([0, 2, 4])
        for optimizer, params in self.twins.pairs:
            set_grads(params, seed=self.now)
            params[number].grad[-1] = float("inf")
            optimizer.step()

    def write(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for _, params in self.twins.pairs:
            with torch.no_grad():
                params[number][::3] = value

    def exchange(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for _, params in self.twins.pairs:
            params[number].data = torch.full_like(params[number], value)

    def refresh(self) -> None:
        number, value = self.number(), self.draw.gauss(0.0, 50.0)
        for optimizer, params in self.twins.pairs:
            params[number].data[:7].fill_(value)
            optimizer.refresh_masters()

    def forget(self) -> None:
        number, entirely = self.number(), self.draw.random() < 0.5
        for optimizer, params in self.twins.pairs:
            if params[number] in optimizer.state:
                if entirely:
                    del optimizer.state[params[number]]
                else:
                    optimizer.state[params[number]].clear()

    def reload(self) -> None:
        saved = [optimizer.state_dict() for optimizer, _ in self.twins.pairs]
        crossed = self.draw.random() < 0.5
        for (optimizer, _), state_dict in zip(self.twins.pairs, saved[::-1] if crossed else saved, strict=True):
            optimizer.load_state_dict(state_dict)

    def hand_over(self) -> None:
        """State of a parameter becomes tensors that somebody else made."""
        number = self.number()
        for optimizer, params in self.twins.pairs:
            if params[number] in optimizer.state:
                optimizer.state[params[number]] = as_kept(optimizer.state_dict()["state"].get(number, {}))

    def grow(self) -> None:
        size, lr = self.draw.choice([5, 300, 9_000]), self.draw.random() / 10
        for optimizer, params in self.twins.pairs:
            params += make_params((size,), self.dtype, seed=len(params))
            optimizer.add_param_group({"params": params[-1:], "lr": lr})

    def agrees(self) -> bool:
        """The state of parameters that have none yet is nothing in one and an empty entry in the other."""
        states = [optimizer.state_dict()["state"] for optimizer, _ in self.twins.pairs]
        mine, theirs = ({number: entry for number, entry in state.items() if entry} for state in states)
        return (
            same_bits(self.twins.params, self.twins.straight)
            and mine.keys() == theirs.keys()
            and all(mine[number].keys() == theirs[number].keys() for number in mine)
            and all(same_bits([mine[n][key] for key in theirs[n]], list(theirs[n].values())) for n in theirs)
        )


@pytest.mark.filterwarnings("ignore:the remainders loaded for")
def live(tier: Tier, seeds: Iterable[int]) -> None:
    for seed in seeds:
        life = Life(tier, seed)
        for number in range(DEEDS):
            life.deed()
            assert number % 3 or life.agrees(), (seed, life.told)
        assert life.agrees(), (seed, life.told)


@pytest.mark.filterwarnings("ignore:the remainders loaded for")
def test_random_lives(tier: Tier) -> None:
    live(tier, range(6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remainders loaded for")
def test_more_random_lives(tier: Tier) -> None:
    live(tier, range(6, 90))
