"""The contests of `bench/gpu.sh`: turns, roofs, peers, what is compared before anything is timed, what is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch
from tables import each

MODULES = (
    "gpu.asked", "gpu.clock", "gpu.lists", "gpu.ours", "gpu.problem", "gpu.report", "gpu.sections", "gpu.settings",
    "gpu.turns", "gpu.peers.eight_bit", "gpu.sections.update", "gpu.sections.spans",
)  # fmt: skip
(
    asked, clock, lists, ours, problem, report, sections, settings, turns, eight_bit, update, spans
) = (import_module(f"zerokern.bench.{name}") for name in MODULES)  # fmt: skip
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
        assert found.rows[0].ratio["torch"] == timers.Estimate(2.0, 2.0, 2.0)
        assert {row.name for row in found.rows if row.is_peer} == {"torch, slow", "torch, quick"}

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

    @each("layout", [
        ours.Layout(torch.float16, "none", "fp32", torch.float16),
        ours.Layout(torch.float16, "fp32", "fp32", out=torch.float16),
    ])  # fmt: skip
    def test_a_subnormal_that_is_the_nearest_is_right(self, layout: object, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu, table = import_module("zerokern.kernels.cpu"), import_module("zerokern.kernels.triton.table")
        monkeypatch.setattr(table, "DeviceTable", lambda device, rows, groups: cpu.UpdateTable(rows, groups))
        still = dataclasses.replace(adam.ALGORITHM, hyper={**adam.HYPER, "lr": 1e-9})
        made = problem.DeviceProblem(still, settings.uneven(3, 700), torch.device("cpu"))
        made.base["param"] *= 2**-14  # at most 5e-6, where float16's values are 6e-8 apart
        one = ours.DeviceStep(made, layout)
        one.check()
        column = one.columns["out" if layout.out else "param"]
        monkeypatch.setattr(one, "run", lambda: (ours.DeviceStep.run(one), column[0].add_(2**-24)))
        with pytest.raises(contest.WrongResult, match=r"\[\d+\] of tensor 0"):
            one.check()

    def test_poison_in_a_bucket_is_found(self) -> None:
        one = lists.Lists(settings.uneven(4, 100), torch.float32, torch.bfloat16, torch.device("cpu"))
        lazy = one.provider("lazy", lambda: None, lists.Lists.check_bucket, lists.Lists.before_flatten)
        with pytest.raises(contest.WrongResult, match="lazy: element 0 is nan"):
            lazy.check()


class PlayedStream:
    """A stream whose work takes time that is known when it is queued."""

    current: PlayedStream

    def __init__(self, *device: object, priority: int = 0) -> None:
        self.ms = 0.0

    def wait_stream(self, other: PlayedStream) -> None:
        self.ms = max(self.ms, other.ms)

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        before, PlayedStream.current = PlayedStream.current, self
        yield
        PlayedStream.current = before


class PlayedEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.ms = PlayedStream.current.ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: PlayedEvent) -> float:
        return end.ms - self.ms


class TestSpans:
    @each("copied_ms, SMs, under_way", [(1.0, 26.4, 1.0), (0.0, 0.0, 0.0)])
    def test_what_a_copy_costs_a_kernel_beside_it(
        self, copied_ms: float, SMs: float, under_way: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that takes a fifth of 132 multiprocessors makes a computation take 1.25 times as long."""
        main, copying = PlayedStream(), []
        PlayedStream.current = main
        played = {
            "Stream": PlayedStream, "Event": PlayedEvent, "current_stream": lambda device: main,
            "stream": PlayedStream.made_current, "synchronize": lambda device: None, "_sleep": lambda cycles: None,
            "get_device_properties": lambda device: types.SimpleNamespace(multi_processor_count=132),
        }  # fmt: skip
        for name, one in played.items():
            monkeypatch.setattr(torch.cuda, name, one)

        def copy() -> None:
            PlayedStream.current.ms += copied_ms
            copying.append(PlayedStream.current)

        def compute() -> None:
            beside = copying[-1:] and copying[-1] is not main and copying[-1].ms > main.ms
            main.ms += 1.25 if beside else 1.0

        assert spans._cost(torch.device("cpu"), compute, copy) == {"SMs": SMs, "under way": under_way}

    def test_what_a_call_takes_of_the_host_is_told_of_each(self) -> None:
        contest_, us = spans.flattens(TOY, 3, 1024)
        found = turns.run(contest_, TOY, clock.RehearsalClock(), clock.Budget(60.0), lambda text: None)
        assert us.keys() == {row.name.partition(", ")[2] if row.is_peer else row.name for row in found.rows}
        assert all(one > 0 for one in us.values()) and len(us) == 5

    def test_a_list_is_never_larger_than_its_memory(self) -> None:
        cases = spans.cases_of(spans.SIZES, spans.COUNTS)
        assert all(count * nbytes <= spans.LIST_NBYTES for count, nbytes in (*cases, spans.BESIDE))
        assert (1344, 28 << 10) in cases and (1, 64 << 20) in cases and len(cases) == len(set(cases))


class TestEightBitPeers:
    def test_one_that_is_installed_takes_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The wiring and its check, with torch's AdamW in the peer's place."""

        def flash(params, master_weight_bits: int, **more):
            assert master_weight_bits == 24
            return torch.optim.AdamW(params, **more)

        module = types.ModuleType("flashoptim")
        module.FlashAdamW = flash
        module.__spec__ = importlib.machinery.ModuleSpec("flashoptim", None)
        monkeypatch.setitem(sys.modules, "flashoptim", module)
        made = problem.DeviceProblem(adam.ALGORITHM, settings.flat(3000), torch.device("cpu"), clip=False)
        (one,) = eight_bit.direct("flashoptim", made)()
        one.check()
        assert one.nbytes == 3000 * 12  # gradient 2, parameter 2+2, remainder 1+1, states 2+2
        made.base["grad"] *= -1  # the truth is now of other gradients
        with pytest.raises(contest.WrongResult, match="flashoptim on bf16 parameters"):
            one.check()


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
