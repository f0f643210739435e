"""A GPT of 1B parameters whose optimizer state lies on the host, in every schedule, against the same step without
offload and against what others offload with; and how often a step makes the host wait.

All take turns in one process, and whoever trains wrongly has no time. Shares are told of int8 states on the host
against int8 states on the device, at the number of tokens where they are worst.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerokern.examples.model import Shape

from ...contest import Missing, Provider, WrongResult
from ...offload import device, syncs
from ...offload.case import COMPUTE
from ...offload.ours import RESIDENT
from ...peers import deepspeed_offload, fsdp2_offload, torchao_offload
from ...run import Outcome
from ...timers import Estimate
from ..clock import Clock, Run
from ..report import Desk
from ..settings import Settings
from ..turns import Contest, Make

SHAPE, TOY = Shape(layers=20, width=2048, context=1024), Shape(layers=2, width=64, context=32)
TOKENS, TOY_TOKENS = (16 << 10, 32 << 10, 4 << 10, 64 << 10), (64, 128)
PEERS = {peer.NAME: peer for peer in (deepspeed_offload, fsdp2_offload, torchao_offload)}
SHARES = {"delayed": (device.DELAYED, 16 << 10), "overlap": (device.OVERLAP, 32 << 10)}
RESIDENT_INT8 = f"{RESIDENT}, int8"
SHALLOW, DEEP = 4, 8
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@dataclass
class Entrant:
    """Trains from one contest to the next; checked once, on the batch whose losses are known."""

    name: str
    build: Callable[[], device.Trainer]
    truth: Callable[[], Sequence[float]]
    checked_on: Sequence[torch.Tensor]
    batch: Sequence[torch.Tensor] = ()
    trainer: device.Trainer | None = None
    why_not: str = ""

    def run(self) -> None:
        assert self.trainer is not None
        self.trainer.step(*self.batch)

    def settle(self) -> None:
        if self.trainer is not None:
            self.trainer.settle()

    def check(self) -> None:
        if self.why_not:
            raise Missing(self.why_not)
        if self.trainer is None:
            try:
                self._begin()
            except Exception as error:
                self.trainer, self.why_not = None, str(error).strip() or type(error).__name__
                raise

    def _begin(self) -> None:
        self.trainer = self.build()
        for number, want in enumerate(self.truth(), 1):
            got = self.trainer.step(*self.checked_on).item()
            if not abs(got - want) <= device.TOLERANCE * want:
                raise WrongResult(f"{self.name}: the loss of step {number} is {got:.5f}, in fp32 it is {want:.5f}")

    def provider(self, numel: int, form: str) -> Provider:
        lossy = "int8 states" if form == "int8" else "bf16 masters" if self.name == torchao_offload.NAME else ""
        return Provider(
            name=self.name, run=self.run, check=self.check, nbytes=numel * device.HOST_BYTES.get(form, 0.0),
            use_threads=lambda count: None, lossy=lossy, wiring=self.name,
        )  # fmt: skip


@dataclass
class Settled:
    """A clock after whose samples nothing is under way: nobody shares the machine with the work of another."""

    clock: Clock
    entrants: Sequence[Entrant]

    def sample_ns(self, run: Run, repeats: int) -> float:
        ns = self.clock.sample_ns(run, repeats)
        for entrant in self.entrants:
            entrant.settle()
        return ns


def run(desk: Desk) -> None:
    settings = desk.settings
    _count_syncs(desk)
    os.environ.update(ALONE)  # DeepSpeed asks for them
    backend = "gloo" if settings.rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = device.Stage(settings.device, TOY if settings.rehearse else SHAPE)
        found = _contests(desk, stage, TOY_TOKENS if settings.rehearse else TOKENS)
    finally:
        dist.destroy_process_group()
    judge(desk, found)


def entrants(stage: device.Stage, tokens: int) -> dict[str, list[tuple[Entrant, str]]]:
    """By the name of whom they run for, with the format of what they keep; "" is us. All are checked on `tokens`."""
    batch = stage.batch(tokens)
    truths = {late: functools.cache(functools.partial(device.truth, stage, batch, late)) for late in (False, True)}

    def ours(name: str, form: str) -> tuple[Entrant, str]:
        build = functools.partial(device.ours, stage, name, form)
        return Entrant(f"{name}, {form}", build, truths[name == device.DELAYED], batch), form

    every = {"": [ours(name, form) for form in device.FORMATS for name in device.OFFLOADED]}
    for form in device.FORMATS:
        every[f"{RESIDENT}, {form}"] = [ours(RESIDENT, form)]
    every[COMPUTE] = [(Entrant(COMPUTE, functools.partial(device.compute_only, stage), tuple, batch), "")]
    for name, peer in PEERS.items():
        every[name] = [(Entrant(name, functools.partial(peer.on_device, stage), truths[False], batch), "exact")]
    return every


def _contests(desk: Desk, stage: device.Stage, tokens: Sequence[int]) -> dict[int, Outcome]:
    every, numel = entrants(stage, min(tokens)), stage.shape.numel
    desk.clock = Settled(desk.clock, [entrant for group in every.values() for entrant, _ in group])

    def made(group: Sequence[tuple[Entrant, str]]) -> Make:
        return lambda: [entrant.provider(numel, form) for entrant, form in group]

    found = {}
    for place, count in enumerate(tokens):
        batch = stage.batch(count)
        for group in every.values():
            for entrant, _ in group:
                entrant.batch = batch
        mine = {entrant.name: made([(entrant, form)]) for entrant, form in every[""]}
        others = {name: made(group) for name, group in every.items() if name}
        title = f"step of a bf16 GPT, {numel:,} parameters, {count:,} tokens"
        found[count] = desk.contest(Contest(title, numel, mine, others), len(tokens) - place)
        if not desk.settings.rehearse:
            rates = {row.name: round(count / row.ns.median * 1e9) for row in found[count].rows}
            desk.fact(f"offload: tokens/s at {count:,} tokens a step", rates)
    return found


def judge(desk: Desk, found: Mapping[int, Outcome]) -> None:
    """Of each thing that is asked, the number of tokens where it is worst."""
    for key, (name, least) in SHARES.items():
        counts = [count for count in found if count >= least or desk.settings.rehearse]
        _worst(desk, f"offload.{key}", {count: found[count] for count in counts}, f"{name}, int8", RESIDENT_INT8)
    for peer in (deepspeed_offload.NAME, fsdp2_offload.NAME):
        _worst(desk, f"offload.{peer}", found, f"{device.OVERLAP}, exact", peer)


def _worst(desk: Desk, key: str, found: Mapping[int, Outcome], name: str, peer: str) -> None:
    ratios: dict[int, Estimate] = {}
    why = "no contest came to its end"
    for count, outcome in found.items():
        row = next((row for row in outcome.rows if row.name == name), None)
        if row is not None and peer in row.ratio:
            ratios[count] = row.ratio[peer]
        else:
            reasons = [text for who, text in outcome.missing.items() if who.startswith((name, peer))]
            why = "; ".join(reasons) or f"{name} or {peer} did not take part"
    if not ratios:
        desk.could_not(key, why)
        return
    worst = min(ratios, key=lambda count: ratios[count].median)
    desk.figure(key, ratios[worst], of=f"{name}, {worst:,} tokens")


def _count_syncs(desk: Desk) -> None:
    """Of a step of a deeper model, beyond those of a shallow one."""
    grown = {}
    for name in device.OFFLOADED:
        counts = [_syncs_of(desk.settings, name, layers) for layers in (SHALLOW, DEEP)]
        grown[name] = counts[1] - counts[0]
        desk.fact(f"offload: host syncs of a step, {name}, {SHALLOW} and {DEEP} layers", counts)
    worst = max(grown, key=grown.__getitem__)
    desk.figure("offload.host_syncs", float(grown[worst]), of=worst)


def _syncs_of(settings: Settings, name: str, layers: int) -> int:
    stage = device.Stage(settings.device, Shape(layers, 64, 32))
    trainer, batch = device.ours(stage, name, "exact"), stage.batch(32)
    for _ in range(2):
        trainer.step(*batch)
    stage.synchronize()
    count = syncs.of_step(lambda: trainer.step(*batch))
    trainer.settle()
    return count
