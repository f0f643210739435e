"""zk.Muon in bf16 on lists of equal matrices, against dion's Muon where it is installed and torch's own.

Of small ones also against itself with each product launched alone: what graphs of them save, and their bits.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

import zerokern as zk
from zerokern.optim import matrix_table

from ...contest import Missing, Provider, WrongResult
from ...matrix_steps import SETTINGS, _orthogonal
from ..report import Desk
from ..settings import Settings
from ..turns import Contest

BF16 = torch.bfloat16
# how many, of which shape: those of small blocks, of a 7B's, of a 70B's
LISTS = ((78, (1920, 1920)), (28, (4096, 11008)), (4, (16384, 16384)))
TOY_LISTS = ((3, (16, 24)), (2, (24, 24)))
OURS, HOST = "zk.Muon", "zk.Muon, state in host memory"
TORCH, DION, LAUNCHED = "torch.optim.Muon", "dion", "zk.Muon, launch by launch"
STEPS = 4  # of which bits are compared
SCALE = 0.002  # of parameters: as rounding bf16 ones hides updates, a check needs small ones
ALIKE = 0.4  # both iterations leave singular values between 0.7 and 1.2, each in its own way
NBYTES = 2 + 2 * 2 + 2 * 4  # gradient; parameter and fp32 average, read and written

Make = Callable[[list[torch.nn.Parameter]], Any]


def run(desk: Desk) -> None:
    lists = TOY_LISTS if desk.settings.rehearse else LISTS
    for place, (count, shape) in enumerate(lists):
        outcome = desk.contest(contest_of(desk.settings, count, shape, captured=place == 0), len(lists) - place)
        if place == 0:
            desk.ratio_to_fastest("muon.launched", outcome, OURS, [LAUNCHED])
            desk.figure("muon.bits", differing(desk.settings.device, min(count, 6), shape), of=f"{STEPS} steps")
            desk.ratio_to_fastest("muon.torch", outcome, OURS, [TORCH])
            desk.ratio_to_fastest("muon.dion", outcome, OURS, [DION])


class Launched:
    """zk.Muon that captures nothing."""

    def __init__(self, params: list[torch.nn.Parameter], **settings: Any) -> None:
        self._optimizer = zk.Muon(params, **settings)

    def step(self) -> None:
        most, matrix_table.CAPTURED_NUMEL = matrix_table.CAPTURED_NUMEL, 0
        try:
            self._optimizer.step()
        finally:
            matrix_table.CAPTURED_NUMEL = most


def differing(device: torch.device, count: int, shape: tuple[int, int]) -> int:
    """How many parameters of a few matrices are others after steps with graphs than after steps without."""
    problem, found = Matrices(device, count, shape), []
    for make in (zk.Muon, Launched):
        params = [torch.nn.Parameter(one.clone()) for one in problem.start]
        optimizer = make(params, **SETTINGS)
        for step in range(STEPS):
            for param, grad in zip(params, problem.grads, strict=True):
                param.grad = grad * (1.0 + step)
            optimizer.step()
        found.append(torch.stack([param.detach().view(torch.int16) for param in params]))
    return int((found[0] != found[1]).sum())


def contest_of(settings: Settings, count: int, shape: tuple[int, int], *, captured: bool = False) -> Contest:
    """`captured`: these are small enough to be captured."""
    problem = Matrices(settings.device, count, shape)
    ours: dict[str, Make] = {
        OURS: functools.partial(zk.Muon, **SETTINGS),
        HOST: functools.partial(zk.Muon, tier="cpu", **SETTINGS),
    }
    theirs = functools.partial(torch.optim.Muon, **SETTINGS)

    def maker(name: str, make: Make) -> Callable[[], Sequence[Provider]]:
        return lambda: [problem.provider(name, make)]

    title = f"Muon in bf16, {count} matrices of {shape[0]:,} x {shape[1]:,}"
    return Contest(
        title, count * shape[0] * shape[1],
        {name: maker(name, make) for name, make in ours.items()},
        {
            **({LAUNCHED: maker(LAUNCHED, functools.partial(Launched, **SETTINGS))} if captured else {}),
            TORCH: maker(TORCH, theirs),
            DION: lambda: [
                problem.provider(DION, functools.partial(dion, triton=triton), f"use_triton={triton}", ALIKE)
                for triton in (False, True)
            ],
        },
    )  # fmt: skip


def dion(params: list[torch.nn.Parameter], triton: bool) -> Any:
    """Its averages are in the dtype of the parameters, and its iteration has coefficients of its own for each step."""
    if importlib.util.find_spec("dion") is None:
        raise Missing("dion is not installed (pip install dion)")
    from dion import Muon

    how = {"lr": SETTINGS["lr"], "mu": SETTINGS["momentum"], "weight_decay": SETTINGS["weight_decay"]}
    return Muon(params, nesterov=True, use_triton=triton, **how)


class Matrices:
    """Values and gradients of one list. Each contestant has its own parameters: what another one writes, ours would
    have to look at.
    """

    def __init__(self, device: torch.device, count: int, shape: tuple[int, int]) -> None:
        draw = torch.Generator(device).manual_seed(5)

        def noise() -> torch.Tensor:
            return torch.randn(count, *shape, device=device, generator=draw, dtype=torch.float32).to(BF16)

        self.start = noise() * SCALE
        self.grads = [one.clone() for one in noise()]  # apart, as a model has them

    def provider(self, name: str, make: Make, wiring: str = "", alike: float = 0.0) -> Provider:
        """`alike`: how far an update may be from ours at least, of who iterates with other coefficients."""
        params = [torch.nn.Parameter(one.clone()) for one in self.start]
        for param, grad in zip(params, self.grads, strict=True):
            param.grad = grad
        optimizer = make(params)

        def check() -> None:
            """A first step of the last matrix, against the iteration in float64."""
            optimizer.step()
            start, end, grad = self.start[-1].double(), params[-1].detach().double(), self.grads[-1].double()
            want = _orthogonal(grad if start.shape[0] <= start.shape[1] else grad.T)
            want = want if start.shape[0] <= start.shape[1] else want.T
            kept = start * (1 - SETTINGS["lr"] * SETTINGS["weight_decay"])
            found = (kept - end) / SETTINGS["lr"]
            scale = float((found * want).sum() / want.square().sum())  # dion scales by the shape, torch by its sides
            off = float((found - scale * want).norm() / (scale * want).norm())
            rounded = torch.finfo(BF16).eps * float(start.norm() / (scale * want).norm()) / SETTINGS["lr"]
            most = max(alike, 3 * SETTINGS["ns_steps"] * torch.finfo(BF16).eps) + rounded
            if not (off <= most and scale > 0):
                raise WrongResult(f"{name}: the last matrix's update is {off:.2g} off, at most {most:.2g}")

        numel = self.start.numel()
        return Provider(name, optimizer.step, check, numel * NBYTES, lambda count: None, wiring=wiring or name)
