"""A GPT of 1B parameters whose optimizer state lies on the host, in every schedule, against the same step without
offload and against what others offload with; and how often a step makes the host wait.

All take turns in one process, and whoever trains wrongly has no time. Shares are told of int8 states on the host
against int8 states on the device, at the number of tokens where they are worst; the exposed time is that of exact
states beyond forward and backward alone. Numbers of tokens and contestants for which there is no time are named.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from zerokern.examples.model import Shape

from ...offload import device, syncs
from ...offload.case import COMPUTE
from ...offload.ours import RESIDENT
from ...peers import deepspeed_offload, fsdp2_offload, torchao_offload
from ...run import Outcome
from ...timers import Estimate
from .. import host_rate
from ..report import Desk
from ..settings import Settings
from ..training import Entrant, Settled, tell_speeds
from ..turns import LEAST_ROUNDS, Contest, Make

SHAPE, TOY = Shape(layers=20, width=2048, context=1024), Shape(layers=2, width=64, context=32)
TOKENS, TOY_TOKENS = (16 << 10, 32 << 10, 4 << 10, 64 << 10), (64, 128)
SHORT_S = 150.0  # with less than this, those whom nothing is asked of are left out
ASKED_OF = ((device.DELAYED, "int8"), (device.OVERLAP, "int8"), (device.OVERLAP, "exact"))
PEERS = {peer.NAME: peer for peer in (deepspeed_offload, fsdp2_offload, torchao_offload)}
SHARES = {"delayed": (device.DELAYED, 16 << 10), "overlap": (device.OVERLAP, 32 << 10)}
RESIDENT_INT8 = f"{RESIDENT}, int8"
EXPOSED_FROM = 16 << 10
SHALLOW, DEEP = 4, 8
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def run(desk: Desk) -> None:
    settings = desk.settings
    host_rate.tell(desk, "offload")
    os.environ.update(ALONE)  # DeepSpeed asks for them
    backend = "gloo" if settings.rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = device.Stage(settings.device, TOY if settings.rehearse else SHAPE)
        judge(desk, _contests(desk, stage, TOY_TOKENS if settings.rehearse else TOKENS))
    finally:
        dist.destroy_process_group()
    _count_syncs(desk)  # last: what profiles calls may slow them


def entrants(stage: device.Stage, tokens: int, short: bool = False) -> dict[str, list[tuple[Entrant, str]]]:
    """By the name of whom they run for, with the format of what they keep; "" is us. All are checked on `tokens`.

    `short`: those alone of whom something is asked.
    """
    batch = stage.batch(tokens)
    truths = {late: functools.cache(functools.partial(device.truth, stage, batch, late)) for late in (False, True)}

    def ours(name: str, form: str) -> tuple[Entrant, str]:
        build = functools.partial(device.ours, stage, name, form)
        return Entrant(f"{name}, {form}", build, truths[name == device.DELAYED], batch), form

    all_of_ours = [(name, form) for form in device.FORMATS for name in device.OFFLOADED]
    every = {"": [ours(name, form) for name, form in (ASKED_OF if short else all_of_ours)]}
    for form in ("int8",) if short else device.FORMATS:
        every[f"{RESIDENT}, {form}"] = [ours(RESIDENT, form)]
    every[COMPUTE] = [(Entrant(COMPUTE, functools.partial(device.compute_only, stage), tuple, batch), "")]
    for name, peer in PEERS.items():
        every[name] = [(Entrant(name, functools.partial(peer.on_device, stage), truths[False], batch), "exact")]
    return every


def _contests(desk: Desk, stage: device.Stage, tokens: Sequence[int]) -> dict[int, Outcome]:
    short = desk.budget.seconds < SHORT_S and not desk.settings.rehearse
    if short:
        desk.could_not("offload: all schedules and formats", f"{desk.budget.seconds:.0f} s are for what is asked alone")
    every, numel = entrants(stage, min(tokens), short), stage.shape.numel
    desk.clock = Settled(desk.clock, [entrant for group in every.values() for entrant, _ in group])

    def made(group: Sequence[tuple[Entrant, str]]) -> Make:
        def lossy(entrant: Entrant, form: str) -> str:
            return "int8 states" if form == "int8" else "bf16 masters" if entrant.name == torchao_offload.NAME else ""

        return lambda: [
            entrant.provider(numel * device.HOST_BYTES.get(form, 0.0), lossy=lossy(entrant, form))
            for entrant, form in group
        ]

    found: dict[int, Outcome] = {}
    for place, count in enumerate(tokens):
        if found and not desk.settings.rehearse and (why := _no_time(desk, found, count)):
            desk.could_not(f"offload: {count:,} tokens a step", why)
            continue
        batch = stage.batch(count)
        for group in every.values():
            for entrant, _ in group:
                entrant.batch = batch
        mine = {entrant.name: made([(entrant, form)]) for entrant, form in every[""]}
        others = {name: made(group) for name, group in every.items() if name}
        title = f"step of a bf16 GPT, {numel:,} parameters, {count:,} tokens, state on the host"
        # those who come later have been made already
        contest = Contest(title, numel, mine, others, making_share=0.6 if not found else float("inf"))
        found[count] = desk.contest(contest, 1 if short else len(tokens) - place)
        judge(desk, found, so_far=True)  # if the next one does not come to its end
        tell_speeds(desk, f"offload: {count:,} tokens a step", found[count], stage.shape, count, COMPUTE)
    return found


def _no_time(desk: Desk, found: Mapping[int, Outcome], count: int) -> str:
    """Why a contest of so many tokens would not come to its end; "" where it would, by the times of the last one."""
    known, outcome = next(reversed(found.items()))
    a_round_s = sum(row.ns.median for row in outcome.rows) / 1e9 * max(1.0, count / known)
    needed = 2 * LEAST_ROUNDS * a_round_s  # each sample is one step before the clock and one on it
    return f"{desk.budget.left:.0f} s were left for it, and it needs {needed:.0f}" if desk.budget.left < needed else ""


def judge(desk: Desk, found: Mapping[int, Outcome], so_far: bool = False) -> None:
    """Of each thing that is asked, the number of tokens where it is worst; what is missing, once all is over."""

    def worst(key: str, least: int, name: str, peer: str) -> None:
        counts = [count for count in found if count >= least or desk.settings.rehearse]
        ratio = _worst({count: found[count] for count in counts}, name, peer)
        if isinstance(ratio, str):
            if not so_far:
                desk.could_not(key, ratio if counts else f"no contest of {least:,} tokens or more came to its end")
        elif key == "offload.exposed":
            count, share = ratio
            exposed = Estimate(*(100 * (1 - value) for value in (share.median, share.high, share.low)))
            desk.figure(key, exposed, of=f"{name}, {count:,} tokens")
        else:
            desk.figure(key, ratio[1], of=f"{name}, {ratio[0]:,} tokens")

    for key, (name, least) in SHARES.items():
        worst(f"offload.{key}", least, f"{name}, int8", RESIDENT_INT8)
    for peer in (deepspeed_offload.NAME, fsdp2_offload.NAME):
        worst(f"offload.{peer}", 0, f"{device.OVERLAP}, exact", peer)
    worst("offload.exposed", EXPOSED_FROM, f"{device.OVERLAP}, exact", COMPUTE)


def _worst(found: Mapping[int, Outcome], name: str, peer: str) -> tuple[int, Estimate] | str:
    """The number of tokens where a row is slowest against a peer, and the ratio; or why there is none."""
    ratios: dict[int, Estimate] = {}
    why = ""
    for count, outcome in found.items():
        row = next((row for row in outcome.rows if row.name == name), None)
        if row is not None and peer in row.ratio:
            ratios[count] = row.ratio[peer]
        else:
            reasons = [text for who, text in outcome.missing.items() if who.startswith((name, peer))]
            why = "; ".join(reasons) or f"{name} or {peer} did not take part"
    if not ratios:
        return why
    worst = min(ratios, key=lambda count: ratios[count].median)
    return worst, ratios[worst]


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
