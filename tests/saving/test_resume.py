"""What one configuration has saved, another one loads: ranks, stages, tiers, schedules, buckets, formats."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BF16, Case, Run, digest, full_words, load, same, save
from worlds import on_ranks

import zerokern as zk
from zerokern.core.errors import StateError

SLOW = pytest.mark.slow
LONG = {"timeout": 120.0}


def first_run(case: Case, folder: Path, steps: int) -> Run:
    return case.begin(folder / "swap").train(steps)


def saved_by(rank: int, case: Case, folder: Path, name: str, steps: int = 2) -> dict[str, torch.Tensor]:
    """Trains, saves; the whole state."""
    run = first_run(case, folder, steps)
    run.save(folder / name)
    return run.whole()


def passed_on(
    rank: int, case: Case, folder: Path, name: str, then: str, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loads one, trains, saves another: the whole state after loading, and after training."""
    run = case.begin(folder / "swap", seed=rank + 5)
    run.load(folder / name, **settings)
    before = run.whole()
    run.train(1)
    run.save(folder / then)
    return before, run.whole()


def chain(folder: Path, links: list[tuple[int, Case]], settings: dict[str, Any] | None = None) -> None:
    """Each link loads what the one before it saved, bit for bit, and trains on."""
    size, case = links[0]
    last = on_ranks(size, saved_by, case, folder, "0", **LONG)[0]
    for number, (size, case) in enumerate(links[1:]):
        found = on_ranks(size, passed_on, case, folder, str(number), str(number + 1), settings or {}, **LONG)
        for before, after in found:
            same(before, last)
            same(after, found[0][1])
        last = found[0][1]


def test_on_1_2_4_and_3_ranks(tmp_path: Path) -> None:
    """Each stage in turn."""
    chain(tmp_path, [(1, Case()), (2, Case(stage=1)), (4, Case(stage=3)), (3, Case(stage=2, bucket_bytes=1024))])


@pytest.mark.parametrize(
    "links",
    [
        [(2, Case(3, "nvme", dtype=BF16)), (1, Case(dtype=BF16)), (2, Case(2, "cpu", dtype=BF16))],
        pytest.param([(2, Case(stage=1)), (2, Case(stage=3)), (2, Case(stage=2))], marks=SLOW),
        pytest.param([(2, Case(stage="fsdp2")), (3, Case(stage=3)), (2, Case(stage="ddp"))], marks=SLOW),
        pytest.param([(2, Case(stage="ddp", tier="cpu")), (2, Case(stage="fsdp2", tier="nvme"))], marks=SLOW),
        pytest.param(
            [
                (3, Case(stage=3, dtype=BF16, state_format="int8", master_format="split8")),
                (2, Case(stage=1, dtype=BF16, state_format="int8", master_format="split8", tier="nvme")),
                (1, Case(dtype=BF16, state_format="int8", master_format="split8", tier="cpu", schedule="overlap")),
            ],
            marks=SLOW,
        ),
    ],
    ids=["disk, plain, host", "stages 1, 3, 2", "fsdp2, stage 3, ddp", "ddp, fsdp2", "int8 split8"],
)
def test_from_one_configuration_to_the_next(links: list[tuple[int, Case]], tmp_path: Path) -> None:
    chain(tmp_path, links)


TIERS = [Case(), Case(tier="cpu", schedule="overlap"), Case(tier="nvme"), Case(stage=3, tier="cpu")]


def test_device_host_disk_and_back(tmp_path: Path) -> None:
    """One rank: the trajectory is that of a run that never changed its tier."""
    expected = Case().begin(tmp_path / "whole").train(len(TIERS) + 1).whole()
    run = Case().begin(tmp_path / "0").train(1)
    for number, case in enumerate(TIERS):
        run.save(tmp_path / f"step{number}")
        run = case.begin(tmp_path / f"{number + 1}", seed=3)
        run.load(tmp_path / f"step{number}")
        run.train(1)
    same(run.whole(), expected)


def continued(rank: int, case: Case, folder: Path) -> tuple[str, str]:
    """Digests of an uninterrupted run, and of one that another set of processes would have continued."""
    run = case.begin(folder / "a").train(3)
    run.save(folder / "x")
    run.train(3)
    other = case.begin(folder / "b", seed=rank + 1).train(1)
    random.seed(rank)
    torch.manual_seed(rank)
    other.load(folder / "x")
    other.train(3)
    return digest(run.whole()), digest(other.whole())


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=3, dtype=BF16, state_format="int8", settings={"max_grad_norm": 0.3}),
        pytest.param(Case(stage=2, tier="cpu", schedule=zk.Delayed(after=1)), marks=SLOW),
        pytest.param(Case(stage=3, tier="nvme", dtype=BF16), marks=SLOW),
        pytest.param(Case(stage=1, tier="cpu", schedule="overlap"), marks=SLOW),
        pytest.param(Case(stage="ddp"), marks=SLOW),
        pytest.param(Case(stage="fsdp2", tier="cpu", dtype=BF16), marks=SLOW),
    ],
    ids=full_words,
)
def test_the_same_configuration_on_two_ranks_goes_on_bit_for_bit(case: Case, tmp_path: Path) -> None:
    for expected, found in on_ranks(2, continued, case, tmp_path, **LONG):
        assert found == expected


def mean_of_two(rank: int, folder: Path, name: str | None) -> dict[str, torch.Tensor]:
    """Three steps on two ranks' data, from the start or from what one rank saved."""
    case = Case(stage=2 if name else None, optimizer="SGD", settings={"momentum": 0.9})
    run = case.begin(folder / "swap")
    run.model.eval()  # no dropout: who draws what depends on the ranks
    if name is None:
        run.train(3, rows=2).save(folder / "one")
        run.train(3, rows=2)
        return run.whole()
    run.load(folder / name)
    return run.train(3).whole()


def test_more_ranks_reach_the_same_within_rounding(tmp_path: Path) -> None:
    """Continuous in the gradient, so that only the order of sums differs: a few roundings for each of three steps."""
    (expected,) = on_ranks(1, mean_of_two, tmp_path, None, **LONG)
    for found in on_ranks(2, mean_of_two, tmp_path, "one", **LONG):
        for name, value in expected.items():
            if name != "seen":
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


def apart(rank: int, folder: Path) -> list[Any]:
    """Extra that differs by rank: each gets its own back."""
    model = zk.shard(torch.nn.Linear(4, 4), stage=3)
    extra = {"sampler": {"seen": rank, "order": torch.tensor([rank, 7])}, "step": 3}
    save(folder / "x", model, extra=extra)
    found = load(folder / "x", model)
    draws = torch.rand(1).item()
    return [found["sampler"]["seen"], found["sampler"]["order"].tolist(), found["step"], draws]


class Sampler:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is to be restored")


def test_extra_and_random_numbers_of_each_rank(tmp_path: Path) -> None:
    found = on_ranks(3, apart, tmp_path, **LONG)
    assert [one[:3] for one in found] == [[rank, [rank, 7], 3] for rank in range(3)]
    assert len({one[3] for one in found}) == 3
    model = torch.nn.Linear(4, 4)
    extra = load(tmp_path / "x", model)
    assert type(extra["sampler"]).__name__ == "EachRank" and extra["step"] == 3
    assert [one["order"].tolist() for one in extra["sampler"]] == [[0, 7], [1, 7], [2, 7]]
    with pytest.raises(StateError, match="'sampler' was not the same on all of the 3 ranks"):
        load(tmp_path / "x", model, extra={"sampler": Sampler()})


def refused_on_one(rank: int, folder: Path) -> list[str]:
    """What only one rank finds wrong is raised on all, with the same words, and nobody hangs."""
    model = zk.shard(torch.nn.Linear(4, 4), stage=2)
    said = []
    for work in (
        lambda: save(folder / "x", model, extra={"a": object() if rank else 1}),
        lambda: save(folder / "x", model, extra={"a" if rank else "b": 1}),
        lambda: load(folder / ("there" if rank else "not there"), model),
        lambda: load(folder / "there", torch.nn.Linear(4, 4 + rank)),
    ):
        save(folder / "there", model)
        try:
            work()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_all_ranks_refuse_what_one_refuses(tmp_path: Path) -> None:
    first, second = on_ranks(2, refused_on_one, tmp_path, **LONG)
    assert len(first) == 4 and first == second
    words = "extra['a']", "other keys", "not there", "(5, 4)"
    assert all(word in said for word, said in zip(words, first, strict=True)), first
    assert not (tmp_path / "x").exists()
