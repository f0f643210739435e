"""Large parts go in pieces: the bits of whole ones, and the first of them is back before the last has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from nvme_cases import row_of, small
from offload_cases import SCHEDULES, Row
from optim_cases import MAKERS, same_bits
from played_cases import SLOW, SMALL, compare, played, the_same
from ran_cases import every_edge_held, the_same_ops
from tables import each
from worlds import anywhere, on_threads

import zerokern as zk
from zerokern.core.units import BLOCK
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import parts
from zerokern.optim.hosted import HostCopies
from zerokern.planner import forecast
from zerokern.planner.forecast import step_program
from zerokern.planner.transformer import preset
from zerokern.schedule import machine_of, program, simulate
from zerokern.schedule.recorder import Event, Recorder
from zerokern.zero.shard import shards_of

INT8 = (("state_format", "int8"), ("master_format", "split8"))


@each("slow", ["compute", "copies down", "copies up", "the link", "everything"])
@each("schedule", ["overlap", "delayed"])
def test_pieces_have_the_bits_of_whole_parts(
    schedule: str, slow: str, devices: Callable, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, some steps skipped, micro-batches added up: the norm is known before the first piece is updated. Where
    everything is slow, the memory of the library is poisoned."""
    monkeypatch.setenv("ZEROKERN_POISON", str(int(slow == "everything")))
    cut.clear()
    settings = {"accumulate": 2, "dtype": torch.bfloat16, "broken": (3,), "steps": 6}
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], **settings))
    assert cut[-1] == 30


def test_parts_are_what_a_link_is_fast_at_and_pieces_are_equal() -> None:
    """Plain parameters go together until they have 8 MiB, again and again; a larger part goes in pieces of one size."""
    tensors = [torch.empty(numel, device="meta") for numel in (*[1 << 20] * 9, 40_000_000)]  # 4 MiB each, and 160 MB
    found = parts.parts_of(tensors, shards_of(tensors, map(str, range(10))))
    assert [tuple(part.members) for part in found] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    whole, large = (parts.in_pieces(part, tensors, part.members) for part in found[-2:])
    sizes = [sum(4 * portion.numel for portion in piece) for piece in large.pieces]
    assert not whole.pieces and sum(sizes) == sum(4 * tensors[member].numel() for member in large.members)
    assert len(sizes) == -(-sum(sizes) // program.PIECE_NBYTES) == 3
    assert max(sizes) - min(sizes) <= 2 * 4 * BLOCK


@each("size, schedule, row, tier", [
    (1, "overlap", Row("stage 2", "bf16", "random", broken=(3,)), "cpu"),
    (1, "overlap", Row("stage 3", "bf16", "often", accumulate=2, formats=INT8), "cpu"),
    (1, "overlap", Row("stage 0", "mixed", "random", scaled=True, broken=(2,)), "cpu"),
    (1, "overlap", Row("plain", "bf16", "none", formats=(("master_format", "none"), ("stochastic_seed", 7))), "cpu"),
    (1, "overlap", Row("stage 1", "fp32", "random", name="sgd", formats=(("dampening", 0.3),)), "cpu"),
    (1, "delayed after 2", Row("stage 3", "bf16", "random", formats=INT8), "cpu"),
    (2, "overlap", row_of("stage 1", "mixed", accumulate=2), "cpu"),
    (2, "overlap", row_of("stage 2", "bf16", broken=(2,)), ["device:8KiB", "cpu"]),
    (2, "delayed", row_of("stage 3", "bf16", formats=INT8), "cpu"),
])  # fmt: skip
def test_pieces_of_every_format(size: int, schedule: str, row: Row, tier: Any, cut: list[int]) -> None:
    """Of two ranks they are reduced and gathered as a whole: those of different sizes may have different pieces."""
    anywhere(size, compare, replace(row, steps=7 - size), SCHEDULES[schedule], [tier] * size)
    assert any(cut)


def test_a_first_unit_without_room_on_the_device_goes_in_pieces_and_others_stay(
    devices: Callable, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LEAST_NBYTES", 1)
    training = PlayedTraining(devices(**SLOW["the link"]), (9000, 700, 500))
    plain = training.reference()
    ours = zk.AdamW(training.parameters, tier=["device:16KiB", "cpu"], schedule="overlap", max_grad_norm=1.0)
    twin = zk.AdamW(plain.parameters, max_grad_norm=1.0)
    training.train(ours, 4)
    plain.train(twin, 4)
    ours.flush()
    assert training.losses() == plain.losses() and same_bits(training.values(), plain.values())
    copies = ours.holdings.host.of(ours.holdings.shards.local)
    assert [copy.stays for copy in copies] == [None, 8 * 700, 8 * 500]
    assert max(cut) == -(-4 * 9000 // SMALL)


def test_what_streams_from_a_disk_goes_as_a_whole(tier: Callable, cut: list[int]) -> None:
    """Its records are the pieces, and the disk is slower than the link."""
    places = [["cpu:8KiB", where] for where in small(tier, 2)]
    on_threads(2, compare, row_of("stage 2", "bf16", steps=5), "overlap", places)
    assert not any(cut)


@pytest.mark.parametrize("schedule", ["overlap", "delayed"])
def test_a_norm_that_the_host_measures_waits_for_all_pieces(
    schedule: str, devices: Callable, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "measure", lambda self, pairs: None)
    device = devices(**SLOW["the link"], poison=True)
    the_same(*played(device, SCHEDULES[schedule], dtype=torch.bfloat16, steps=4))
    assert any(cut)


@pytest.mark.parametrize("schedule", ["overlap", "delayed"])
def test_every_op_and_edge_of_pieces(
    schedule: str, submitted: Callable, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are ops of the program that ran, and the simulator times."""
    monkeypatch.setattr(program, "PIECE_NBYTES", 8000)
    read: list[int] = []
    consumed = HostCopies.consumed

    def told(self: HostCopies, *arguments: Any, **named: Any) -> None:
        read.append(time.perf_counter_ns())
        consumed(self, *arguments, **named)

    monkeypatch.setattr(HostCopies, "consumed", told)
    device, recorder = PlayedDevice(poison=True, stretch=0.001), Recorder()
    training = PlayedTraining(device, (9000, 700, 5000), forward_seconds=1e-4, backward_seconds=1e-4, recorder=recorder)
    optimizer = MAKERS["adamw"](training.parameters, tier="cpu", schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    optimizer.holdings.recorder = recorder
    training.train(optimizer, 6)
    optimizer.flush()
    training.synchronize()
    device.close()
    names = {str(unit): f"parameters {unit} to {unit}" for unit in range(3)}
    events = [replace(event, what=names.get(event.what, event.what)) for event in recorder.events]
    last = [event for event in events if event.verb == "Step" and is_last(event)]  # of its part: it frees the gradient
    events = [event for event in events if event not in last]
    events += [replace(event, end_ns=at) for event, at in zip(last, read, strict=True)]
    events.sort(key=lambda event: event.begin_ns)
    runs = submitted(recorder)
    assert {op.what for op in runs[0].program.ops if op.verb == "Step"} == {
        *(f"parameters 0 to 0, piece {number} of 5" for number in range(1, 6)), "parameters 1 to 1",
        *(f"parameters 2 to 2, piece {number} of 3" for number in range(1, 4)),
    }  # fmt: skip
    the_same_ops([event for event in events if event.step <= 5], runs[:5], model_since=6)
    every_edge_held(events, runs, range(2, 6))


def is_last(event: Event) -> bool:
    _, _, piece = event.what.partition(", piece ")
    number, _, count = piece.partition(" of ")
    return number == count


@pytest.mark.parametrize("count", [1, 8])
def test_the_first_piece_comes_back_before_the_last_has_left(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one large first unit, at a link that takes 84 ms each way: down, update and up stood in a row."""
    numel = 4 << 20
    monkeypatch.setattr(parts, "LEAST_NBYTES", 1)
    monkeypatch.setattr(program, "PIECE_NBYTES", 2 * numel // count)
    device, recorder = PlayedDevice(down_gb_s=0.1, up_gb_s=0.1), Recorder()
    training = PlayedTraining(device, (numel, 1000), dtype=torch.bfloat16, light=True, recorder=recorder)
    optimizer = zk.AdamW(training.parameters, tier="cpu", schedule="overlap", max_grad_norm=1.0)
    optimizer.holdings.recorder = recorder
    training.train(optimizer, 3)
    optimizer.flush()
    training.synchronize()
    device.close()
    for step in (2, 3):
        events = [event for event in recorder.events if event.step == step and event.what.startswith("parameters 0")]
        down, made, up = ([event for event in events if event.verb == verb] for verb in ("Fetch", "Step", "Store"))
        assert len(down) == len(made) == len(up) == count
        assert (up[0].begin_ns < down[-1].end_ns) == (count > 1)
        for before, after in ((down, made), (made, up)):
            assert all(one.end_ns <= other.begin_ns for one, other in zip(before, after, strict=True)), "each its own"


@each("name, whole, bare", [("h100-pcie", 132.3, 106.8), ("gh200", 43.5, 42.1)])
def test_a_plan_predicts_it(name: str, whole: float, bare: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds between the last backward and the next forward of Llama 3 8B at 16k tokens."""
    plan = zk.plan(preset("llama-3-8b"), stage=2, tier="cpu", schedule="overlap")
    machine = machine_of(name)
    for nbytes, expected in ((1 << 40, whole), (forecast.PIECE_NBYTES, bare)):
        monkeypatch.setattr(forecast, "PIECE_NBYTES", nbytes)
        events = simulate(step_program(plan, "overlap", 16_384), machine, steps=8).events
        begin = max(event.end_ns for event in events if (event.step, event.verb) == (5, "Backward"))
        end = min(event.begin_ns for event in events if (event.step, event.verb) == (6, "Forward"))
        assert (end - begin) / 1e6 == pytest.approx(expected, abs=0.1)
