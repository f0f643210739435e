"""`zk.trace`: what runs when in a training loop, as a file for ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from zerokern.core.errors import IoError, StateError
from zerokern.io.advice import file_error, on_disk

__all__ = ["trace"]


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Context manager that writes what runs within it as a trace, for ui.perfetto.dev or chrome://tracing.

    Put it around a few steps of any training loop, behind the first ones. Beside torch's ops and kernels the file has
    ranges of zerokern by name, in the threads that run them: `unshard layers.3`, `wait for layers.3`,
    `reduce layers.3`, `update bucket 2`. `torch.profiler.profile` shows the same ranges. Each of several ranks writes
    a file of its own: `trace.json` becomes `trace.rank0.json`. The file is written, too, if the loop raises.

    Args:
        path: a file that does not exist.

    Returns:
        the `torch.profiler.profile` that runs, for `key_averages()`.

    >>> import json, pathlib, tempfile, torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(8, 8), stage=2)
    >>> opt = zk.AdamW(model.parameters(), tier="cpu", schedule="overlap")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with zk.trace(f"{folder}/trace.json"):
    ...         model(torch.ones(2, 8)).sum().backward()
    ...         opt.step()
    ...         opt.flush()
    ...     events = json.loads(pathlib.Path(folder, "trace.json").read_text())["traceEvents"]
    >>> any(event["name"].startswith("update ") for event in events)
    True
    """
    place = Path(path)
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        place = place.with_name(f"{place.stem}.rank{distributed.get_rank()}{place.suffix}")
    if not place.resolve().parent.is_dir():
        raise IoError(f"{place}: there is no folder {place.resolve().parent}", path=str(place))
    if torch.autograd.profiler._is_profiler_enabled:
        raise StateError("a profiler is running already; it has the same ranges: profile.export_chrome_trace(path)")
    with on_disk(place, "cannot write the trace"):  # now: torch logs what it cannot write, and raises nothing
        try:
            place.open("x").close()
        except FileExistsError:
            raise file_error(place, "exists already, and a trace is never overwritten; name another file", 0) from None
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the update has its own
    profile = torch.profiler.profile(activities=activities, experimental_config=every_thread)
    try:
        with profile:
            yield profile
    finally:
        profile.export_chrome_trace(str(place))
    if not place.exists() or not place.stat().st_size:
        raise file_error(place, "could not be written; torch's log says why", 0)
