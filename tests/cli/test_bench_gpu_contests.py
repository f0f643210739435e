"""The contests of `bench/gpu.sh`: turns, roofs, what is compared before anything is timed, and what is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from tables import each

asked, clock, lists, problem, report, settings, turns = (
    import_module(f"zerokern.bench.gpu.{name}")
    for name in ("asked", "clock", "lists", "problem", "report", "settings", "turns")
)
adam, contest, step, timers = (
    import_module(f"zerokern.bench.{name}") for name in ("ops.adam", "contest", "step", "timers")
)
TOY = settings.Settings(rehearse=True)


class Ticking:
    """A clock that runs what it measures and reports times from a list."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.ran = times, []

    def sample_ns(self, run: Callable[[], str], repeats: int) -> float:
        self.ran.append(run())
        return self.times[self.ran[-1]]


def provider(name: str, wiring: str = "", check: Callable[[], None] = lambda: None, **more):
    return contest.Provider(name, lambda: wiring or name, check, 1000.0, lambda count: None, wiring=wiring, **more)


def measured(times: dict[str, float], ours: dict, peers: dict, budget: float = 60.0, **more):
    said: list[str] = []
    found = turns.run(
        turns.Contest("contest", 10, ours, peers, **more), TOY, Ticking(times), clock.Budget(budget), said.append
    )
    return found, said


class TestTurns:
    def test_the_fastest_wiring_is_the_one_we_are_compared_with(self) -> None:
        peers = {"torch": lambda: [provider("torch", "slow"), provider("torch", "quick")]}
        found, _ = measured({"a": 10.0, "slow": 50.0, "quick": 20.0}, {"a": lambda: [provider("a")]}, peers)
        assert found.chosen == {"torch": {"wiring": "quick"}}
        assert found.rows[0].ratio["torch"].median == 2.0
        assert {row.name for row in found.rows if row.is_peer} == {"torch, slow", "torch, quick"}

    @each("rounds, told", [(3, False), (6, False), (7, True)])
    def test_fewer_rounds_than_seven_have_no_interval(
        self, rounds: int, told: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The lowest and the highest of 3 rounds were printed as one."""
        monkeypatch.setattr(settings, "TOY", dataclasses.replace(settings.TOY, rounds=rounds))
        peers = {"torch": lambda: [provider("torch", "fused")]}
        found, _ = measured({"a": 10.0, "fused": 20.0}, {"a": lambda: [provider("a")]}, peers)
        (line,) = [one for one in report.outcome_lines(found, False) if one.strip().startswith("a ")]
        assert ("2.00x [2.00 2.00]" in line) == told and "2.00x" in line
        row = report.outcome_json(found, False)["rows"][0]
        assert row["ns_interval"] == ([10.0, 10.0] if told else None)
        assert row["ratio_interval"] == {"torch": [2.0, 2.0] if told else None}

    def test_shares_are_of_the_fastest_copy(self) -> None:
        def roofs() -> list:
            return [
                provider("copy", streams=(1, 0, 1)),
                provider("quicker copy", streams=(1, 0, 1)),
                provider("no copy", streams=(1, 4, 0)),
            ]

        times = {"a": 10.0, "copy": 9.0, "quicker copy": 8.0, "no copy": 5.0}
        found, _ = measured(times, {"a": lambda: [provider("a")]}, {}, roofs=roofs)
        assert (found.roof, found.rows[0].roof_share) == ("quicker copy", 0.8)
        assert found.roof_gb_s["no copy"] == 200.0

    def test_a_wrong_result_gets_no_time_and_the_others_do(self) -> None:
        def wrong() -> None:
            raise contest.WrongResult("element 3")

        ours = {"a": lambda: [provider("a", check=wrong)], "b": lambda: [provider("b")]}
        found, said = measured({"b": 1.0}, ours, {"torch": lambda: [provider("torch", "fused", check=wrong)]})
        assert [row.name for row in found.rows] == ["b"]
        assert found.missing == {
            "a": "its result is wrong: element 3",
            "torch: fused": "its result is wrong: element 3",
        }
        assert "WRONG, and so not timed: element 3" in said


class TestProblem:
    @each("at", [0, 127, 128, 4999])
    @each("numels", [(5000,), (1, 4000, 999, 17)])
    def test_one_wrong_element_is_found(
        self, numels: tuple[int, ...], at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(problem, "BATCH", 1024)
        monkeypatch.setattr(step, "PERIOD", 512)
        shape = settings.Shape("some", numels)
        made = problem.DeviceProblem(adam.ALGORITHM, shape, torch.device("cpu"))
        made.fill("param", torch.float32)
        views = made.views("param", torch.float32)
        want = made.base["param"].double()
        output = step.Output("param", want, step.reader(views), 1e-6)
        made.check("someone", [output])
        spans = [(i, element) for i, numel in enumerate(numels) for element in range(numel)]
        i, element = spans[at]
        views[i][element] += 1.0
        with pytest.raises(contest.WrongResult, match=rf"param\[{element}\] of tensor {i} "):
            made.check("someone", [output])

    def test_poison_in_a_bucket_is_found(self) -> None:
        one = lists.Lists(settings.uneven(4, 100), torch.float32, torch.bfloat16, torch.device("cpu"))
        lazy = one.provider("lazy", lambda: None, lists.Lists.check_bucket, lists.Lists.before_flatten)
        with pytest.raises(contest.WrongResult, match="lazy: element 0 is nan"):
            lazy.check()


class TestVerdict:
    @each(
        "key, value, met",
        [
            ("update.copy_share", 0.92, "yes"),
            ("update.copy_share", 0.9199, "no"),
            ("step1b.ms", 6.6, "yes"),
            ("step1b.ms", 6.61, "no"),
        ],
    )
    def test_bounds_are_inclusive(self, key: str, value: float, met: str) -> None:
        lines = asked.verdicts({key: {"value": value, "of": ""}}, {}, [key.partition(".")[0]], False)
        assert [line["met"] for line in lines if line["key"] == key] == [met]
