"""A GPT of 1B with exact state, 16k tokens: on the GPU, on the host in each schedule, divided between both, and updated
on the GPU from the host; and whether "overlap" has the bits of "sync" after four clipped steps at this size.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...contest import Provider
from ...offload import device
from ...offload.case import COMPUTE
from ...offload.ours import RESIDENT
from .. import host_rate
from ..report import Desk
from ..training import Entrant, Settled, tell_speeds
from ..turns import Contest
from .offload import SHAPE, TOY

TOKENS, CHECKED_TOKENS, TOY_TOKENS = 16 << 10, 4 << 10, 64
FORM = "exact"
BUDGET, STREAMED = "zk overlap, device:8GiB", 'zk overlap, update="device"'
MORE: dict[str, dict[str, Any]] = {BUDGET: {"tier": ["device:8GiB", "cpu"]}, STREAMED: {"update": "device"}}
CLIP = 0.05  # so small that each step of a new model is clipped
TOY_BUDGET = ["device:512KiB", "cpu"]
OURS = (device.OVERLAP, device.DELAYED, BUDGET, STREAMED)
ASKED_OF = {"overlap": device.OVERLAP, "delayed": device.DELAYED, "budget": BUDGET, "update_device": STREAMED}


def run(desk: Desk) -> None:
    settings = desk.settings
    host_rate.tell(desk, "exact")
    backend = "gloo" if settings.rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = device.Stage(settings.device, TOY if settings.rehearse else SHAPE)
        _compare_bits(desk, stage)
        _free(desk)
        _measure(desk, stage)
    finally:
        dist.destroy_process_group()


def made(stage: device.Stage, name: str, rehearse: bool) -> device.Trainer:
    more = dict(MORE.get(name, {}))
    if rehearse and "tier" in more:
        more["tier"] = TOY_BUDGET
    return device.ours(stage, name if name not in MORE else device.OVERLAP, FORM, **more)


def _compare_bits(desk: Desk, stage: device.Stage) -> None:
    """Losses and parameters after four clipped steps, "overlap" against "sync", one after the other."""
    batch = stage.batch(TOY_TOKENS if desk.settings.rehearse else CHECKED_TOKENS)
    found = {}
    for name in (device.SYNC, device.OVERLAP):
        found[name] = after_steps(stage, name, batch)
        _free(desk)
    (losses, params, norm), (others, theirs, _) = found[device.SYNC], found[device.OVERLAP]
    if norm <= CLIP:
        desk.could_not("exact.bits", f"the last norm, {norm}, is not above {CLIP}: it was not clipped")
        return
    differ = sum(int((mine != other).sum()) for mine, other in zip(params, theirs, strict=True))
    differ += sum(mine != other for mine, other in zip(losses, others, strict=True))
    desk.fact("exact: losses of clipped steps", "rehearsed" if desk.settings.rehearse else [losses, others])
    desk.figure(
        "exact.bits", float(differ), of=f"{device.CHECKED_STEPS} clipped steps, {stage.shape.numel:,} parameters"
    )


def after_steps(
    stage: device.Stage, name: str, batch: Sequence[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor], float]:
    """The losses of some steps, copies of all parameters on the host, and the last norm.

    Nothing is read in between: a wait for the device could hide that something is not waited for.
    """
    kept: list[Any] = []
    trainer = device.ours(stage, name, FORM, max_grad_norm=CLIP, seen=lambda *made: kept.extend(made))
    losses = [trainer.step(*batch) for _ in range(device.CHECKED_STEPS)]
    trainer.settle()
    stage.synchronize()
    model, optimizer = kept
    params = [param.detach().cpu() for param in model.parameters()]
    return [loss.item() for loss in losses], params, optimizer.grad_norm


def _measure(desk: Desk, stage: device.Stage) -> None:
    rehearse, numel = desk.settings.rehearse, stage.shape.numel
    tokens, checked_on = (TOY_TOKENS, TOY_TOKENS) if rehearse else (TOKENS, CHECKED_TOKENS)
    batch, checked = stage.batch(tokens), stage.batch(checked_on)
    truths = {late: functools.cache(functools.partial(device.truth, stage, checked, late)) for late in (False, True)}

    def entrant(name: str) -> Entrant:
        if name == COMPUTE:
            return Entrant(name, functools.partial(device.compute_only, stage), tuple, checked, batch)
        return Entrant(
            name, functools.partial(made, stage, name, rehearse), truths[name == device.DELAYED], checked, batch
        )

    every = {name: entrant(name) for name in (*OURS, RESIDENT, COMPUTE)}
    desk.clock = Settled(desk.clock, list(every.values()))

    def maker(name: str) -> Callable[[], Sequence[Provider]]:
        return lambda: [every[name].provider(numel * device.HOST_BYTES[FORM] * (name != COMPUTE))]

    title = f"step of a bf16 GPT, {numel:,} parameters, {tokens:,} tokens, exact state"
    contest = Contest(
        title, numel, {name: maker(name) for name in OURS}, {name: maker(name) for name in (RESIDENT, COMPUTE)}
    )
    outcome = desk.contest(contest)
    for key, name in ASKED_OF.items():
        desk.ratio_to_fastest(f"exact.{key}", outcome, name, [RESIDENT])
    tell_speeds(desk, "exact", outcome, stage.shape, tokens, COMPUTE)


def _free(desk: Desk) -> None:
    gc.collect()
    if not desk.settings.rehearse:
        torch.cuda.empty_cache()
