"""How often a step makes the host wait for the device, as CUDA's own calls tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCH = "cudaLaunchKernel"


def of_step(step: Callable[[], object]) -> int:
    """Calls that wait, on the threads that launch kernels; the worker that feeds the host's update may wait."""
    kinds = torch.profiler.ProfilerActivity
    on_device = torch.cuda.is_available()
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_device else [])]) as profile:
        step()
    return counted(profile.events() or [])


def counted(events: Iterable[Any]) -> int:
    """
    >>> from types import SimpleNamespace as Event
    >>> user, worker = [("cudaLaunchKernel", 1), ("cudaEventSynchronize", 1)], [("cudaEventSynchronize", 2)] * 5
    >>> counted([Event(name=name, thread=thread) for name, thread in user + worker])
    1
    """
    by_thread: Counter[tuple[str, int]] = Counter((event.name, event.thread) for event in events)
    launching = {thread for name, thread in by_thread if name.startswith(LAUNCH)}
    return sum(count for (name, thread), count in by_thread.items() if name in WAITS and thread in launching)
