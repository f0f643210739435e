"""What a step costs on this machine, measured before an act chooses its size and its memory cap."""

from __future__ import annotations

import gc
import time
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from ..contenders import CONTENDERS
from ..model import GPT
from ..text import Batches, read_text
from ..widen import bf16_is_slow
from .act import Act, NotHereError
from .processes import Processes, emit, return_freed_memory, status_nbytes

STEPS = 2  # the second one is timed: in the first memory is new


@dataclass(frozen=True)
class Cost:
    """Of forward and backward, without an optimizer."""

    nbytes: int
    """the most that they need beside parameters and gradients"""
    seconds: float
    widen: bool
    """whether bf16 products are computed in fp32, because this CPU multiplies bf16 slowly"""


def main(text: str, name: str) -> None:
    """Trains a contender's model without an optimizer, and tells what that needs."""
    act, dtype = Act.of_json(text), CONTENDERS[name].dtype
    return_freed_memory()
    widen = dtype == torch.bfloat16 and bf16_is_slow()
    batches = Batches(read_text(), act.rows, act.shape.context, seed=0)

    def train(layers: int) -> tuple[float, int]:
        model = GPT(replace(act.shape, layers=layers), widen).to(dtype)
        for _ in range(STEPS):
            model.zero_grad()
            start = time.perf_counter()
            model(*batches.next()).backward()
            seconds = time.perf_counter() - start
        return seconds, sum(p.nbytes for p in model.parameters())

    train(1)  # starts the threads: one that starts later would count
    gc.collect()
    base = status_nbytes("VmSize")
    seconds, nbytes = train(act.shape.layers)
    # the peak of all addresses that are mapped: what comes to them in training is private memory, as the cap counts it
    needed = status_nbytes("VmPeak") - base - 2 * nbytes
    emit("cost", nbytes=max(0, needed), seconds=seconds, widen=widen)


def measure(act: Act, name: str, deadline: float | None = None) -> Cost:
    """What a step of a contender's model costs, measured in a process of its own."""
    found: list[Cost] = []
    with closing(Processes("cost", [[act.to_json(), name]], deadline)) as processes:
        for _, event in processes.events():
            if event["event"] == "cost":
                found.append(Cost(event["nbytes"], event["seconds"], event["widen"]))
        failures = processes.failures()
        if not found:
            reason = processes.reason()
            if reason:
                raise NotHereError(reason)
            raise RuntimeError(f"measuring a step: {failures.get(0, 'ended without a word')}")
    return found[0]
