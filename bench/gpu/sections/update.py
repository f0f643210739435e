"""Every update format on one flat span, against the copy bandwidth of the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...ops import adagrad, adam, lion, sgd
from ...step import Algorithm
from ..ours import DeviceStep, Layout
from ..problem import DeviceProblem
from ..report import Desk
from ..roof import roofs
from ..settings import Settings, flat
from ..turns import Contest

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (master, parameter, output) as a training loop would have them, the usual first
MASTERS = (
    ("split16", BF16, None),
    ("fp32", BF16, BF16),
    ("split8", BF16, None),
    ("fp32", F32, None),
    ("none", BF16, None),
    ("fp32", F16, F16),
    ("none", F16, None),
)
GRADS = (BF16, F32, F16)
# What the bits of changed values cost, beside the same formats without them. They add 0.25 bytes to each element: of
# 26, 18 and 12.125, so 1.010, 1.014 and 1.021 times as long where memory is all that a step waits for.
MARKED = (("split16", "fp32"), ("split16", "bf16"), ("split8", "int8"))
WARM_NUMEL = 1 << 20


def layouts(algorithm: Algorithm) -> list[list[Layout]]:
    """The formats, in the groups that are measured together: all of Adam's, the main ones of the others."""
    states = {"adam": ("fp32", "bf16", "int8"), "lion": ("fp32", "bf16", "int8")}.get(algorithm.name, ("fp32", "bf16"))
    grads = GRADS if algorithm.name == "adam" else (BF16,)
    masters = MASTERS if algorithm.name == "adam" else MASTERS[:4]
    marked = [Layout(BF16, master, state, changed=True) for master, state in MARKED]
    return [
        [Layout(grad, master, state, param, out) for master, param, out in masters for state in states]
        + (marked if grad == BF16 and algorithm.name == "adam" else [])
        for grad in grads
    ]


def algorithms() -> list[Algorithm]:
    return [module.ALGORITHM for module in (adam, lion, sgd, adagrad)]


def groups() -> list[tuple[Algorithm, list[Layout]]]:
    return [(algorithm, group) for algorithm in algorithms() for group in layouts(algorithm)]


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """A launch of each format on a little data; a process makes its problem once."""
    problems: dict[str, DeviceProblem] = {}

    def launch(algorithm: Algorithm, layout: Layout) -> None:
        if algorithm.name not in problems:
            numel = min(WARM_NUMEL, settings.sizes.flat)
            problems[algorithm.name] = DeviceProblem(algorithm, flat(numel), settings.device)
        step = DeviceStep(problems[algorithm.name], layout)
        step.fill()
        step.run()

    every = [(algorithm, layout) for algorithm, group in groups() for layout in group]
    chosen = every[:1] if settings.rehearse else every
    return [lambda a=a, layout=layout: launch(a, layout) for a, layout in chosen]


def run(desk: Desk) -> None:
    settings, shares, wrong, formats = desk.settings, {}, [], 0
    left = len(groups())
    problem: DeviceProblem | None = None
    for algorithm, group in groups():
        if problem is None or problem.algorithm is not algorithm:
            problem = None  # its memory goes first
            problem = DeviceProblem(algorithm, flat(settings.sizes.flat), settings.device)
        chosen = group[:: len(group) // 2] if settings.rehearse else group
        formats += len(chosen)
        if desk.budget.left < 0 and not settings.rehearse:
            desk.could_not(f"update.{algorithm.name}", f"late: {len(chosen)} formats, the first {chosen[0].name}")
            left -= 1
            continue
        outcome = desk.contest(_contest(problem, chosen, settings), left)
        left -= 1
        shares.update({row.name: row.roof_share for row in outcome.rows})
        wrong += [who for who in outcome.missing if who.startswith(algorithm.optimizer)]
    _conclude(desk, shares, wrong, formats)


def _contest(problem: DeviceProblem, group: list[Layout], settings: Settings) -> Contest:
    algorithm = problem.algorithm
    ours: Mapping[str, Callable[[], list]] = {
        f"{algorithm.optimizer}: {layout.name}": lambda layout=layout: [DeviceStep(problem, layout).provider()]
        for layout in group
    }
    states = len(algorithm.states)
    patterns = {layout.streams(states) for layout in group}
    resident = problem.shape.numel * max(layout.nbytes(algorithm.name) for layout in group) / 2
    name = f"{algorithm.optimizer} update, {problem.shape.numel:,} parameters, gradients {group[0].name.split()[0]}"
    return Contest(name, problem.shape.numel, ours, roofs=lambda: roofs(settings, resident, patterns))


def _conclude(desk: Desk, shares: Mapping[str, float], wrong: list[str], formats: int) -> None:
    if wrong or not shares:
        desk.could_not("update.copy_share", f"{len(wrong)} formats have no time: {', '.join(wrong[:3])}")
        return
    worst = min(shares, key=shares.__getitem__)
    desk.fact("update.formats", {"measured": len(shares), "of": formats})
    desk.figure("update.copy_share", shares[worst], of=f"{worst}; {len(shares)} of {formats} formats measured")
