"""int8 states with split8 against the 8-bit optimizers of others, where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from ...contest import Provider
from ...ops.adam import ALGORITHM
from ...peers import candidates
from ...run import Outcome
from ..ours import Layout, public, through_the_device_path
from ..peers import eight_bit
from ..problem import DeviceProblem
from ..report import Desk
from ..roof import roofs
from ..settings import flat
from ..turns import Contest

INT8 = Layout(torch.bfloat16, "split8", "int8")
OURS = "zk.AdamW, split8, int8 states"
MASTERED = ("bitsandbytes", "torchao")


def run(desk: Desk) -> None:
    """One contest for each peer: what one of them leaves behind in a context must not stop the others."""
    there = {peer for peer in (*eight_bit.KINDS, *MASTERED) if importlib.util.find_spec(peer) is not None}
    for peer in sorted({*eight_bit.KINDS, *MASTERED} - there):
        desk.could_not(f"eightbit.{peer}", f"{peer} is not installed (pip install {peer}, or WHEELS=FOLDER)")
    left = len(there & eight_bit.KINDS.keys()) + len(there & {*MASTERED})
    for peer in (peer for peer in eight_bit.KINDS if peer in there):
        problem = _problem(desk, clip=False)
        outcome = _contest(desk, problem, {peer: eight_bit.direct(peer, problem)}, left)
        desk.ratio_to_fastest(f"eightbit.{peer}", outcome, OURS, [peer])
        left -= 1
    for peer in (peer for peer in MASTERED if peer in there):
        problem = _problem(desk, clip=True)
        _contest(desk, problem, {f"{peer}, fp32 masters": candidates(peer, "adam", problem)}, left)
        left -= 1


def _problem(desk: Desk, *, clip: bool) -> DeviceProblem:
    return DeviceProblem(ALGORITHM, flat(desk.settings.sizes.flat), desk.settings.device, clip=clip)


def _contest(
    desk: Desk, problem: DeviceProblem, peers: dict[str, Callable[[], Sequence[Provider]]], left: int
) -> Outcome:
    settings, numel = desk.settings, problem.shape.numel
    contest = Contest(
        f"int8 states, split8, {numel:,} parameters{', clipped' if problem.clips else ''}, vs {', '.join(peers)}",
        numel,
        {OURS: public(problem, INT8, settings, OURS)},
        peers,
        roofs=lambda: roofs(settings, numel * INT8.nbytes("adam") / 2, [INT8.streams(2)]),
    )
    with through_the_device_path(settings):
        return desk.contest(contest, left)
