"""Measures steps, for loggers: bytes by tier, and what was waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerokern.optim.disk import on_disk_of
from zerokern.zero.kinds import local_of

if TYPE_CHECKING:
    from zerokern.optim.holdings import Holdings
    from zerokern.optim.step import StepRunner

__all__ = ["Reporting"]

_LANES = {"update": ("cpu",), "ranks": ("net",), "link": ("down", "up"), "disk": ("read", "write", "ring")}


class Reporting:
    """Mixin of optimizers that measures steps, and tells loggers of the last one."""

    holdings: Holdings
    runner: StepRunner
    param_groups: list[dict[str, Any]]
    _waited_ns: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})  # until the step before, and until the last one
    _steps = 0
    _step_s = 0.0

    def statistics(self) -> dict[str, float]:
        """Of the last `step()`, under names that go to a logger as they are.

        `steps` and `skipped_steps`: how many there were, how many of them changed nothing. `grad_norm`, where it is
        known. `step_s`: seconds that `step()` took. `waited_s/update`: seconds between the two last calls of `step()`
        in which a forward, a backward or `step()` itself waited for the update; `waited_s/link`, `/disk` and `/ranks`:
        in which somebody, the update's own thread mostly, waited for a copy between host and device, for the disk of
        `tier=zk.Nvme(path)`, for other ranks' parts of parameters. `state_bytes/device`, `/cpu` and `/disk`: what
        state this rank has, and where; with `zk.Delayed` also the parameters that wait to be published.
        `state_budget_bytes/device`: what "device:auto" has become.

        Asking waits for the decision to step, and on a GPU for the step.

        >>> import torch, zerokern as zk
        >>> weight = torch.nn.Parameter(torch.ones(1024))
        >>> opt = zk.AdamW([weight], max_grad_norm=1.0)
        >>> weight.grad = torch.ones(1024); opt.step()
        >>> found = opt.statistics()
        >>> found["steps"], found["grad_norm"], found["state_bytes/cpu"], found["waited_s/update"]
        (1, 32.0, 8196, 0.0)
        """
        opt: Any = self
        norm = opt.grad_norm
        before, now = self._waited_ns
        waited = {
            f"waited_s/{what}": sum(now.get(lane, 0) - before.get(lane, 0) for lane in lanes) / 1e9
            for what, lanes in _LANES.items()
        }
        return {
            "steps": self._steps,
            "skipped_steps": opt.skipped_steps,
            **({} if norm is None else {"grad_norm": norm}),
            "step_s": self._step_s,
            **waited,
            **_bytes_of(self.holdings),
        }

    def _measure(self, began: float) -> None:
        """Records a step that has just ended, and what was waited for since the one before."""
        self._step_s = time.perf_counter() - began
        self._steps += 1
        disk = self.holdings.disk
        ring_ns = disk.ring.waited_ns if disk is not None and disk.is_open else 0
        self._waited_ns = self._waited_ns[1], {**self.runner.waited_ns, "ring": ring_ns}


def _bytes_of(holdings: Holdings) -> dict[str, float]:
    """Returns the bytes of this rank's state by tier; state on disk counts there alone."""
    found = dict.fromkeys(("device", "cpu", "disk"), 0)
    seen: set[int] = set()
    for entry in holdings.held.values():
        if not isinstance(entry, dict):
            continue
        for value in entry.values():
            if isinstance(value, Tensor) and (local := local_of(value)).nbytes and local.data_ptr() not in seen:
                seen.add(local.data_ptr())
                found["cpu" if local.device.type == "cpu" else "device"] += local.nbytes
        owner = on_disk_of(entry)
        if owner is not None:
            found["disk"] += owner.nbytes
    free = holdings.placing.free
    budget = {} if free is None else {"state_budget_bytes/device": float(free)}
    return {**{f"state_bytes/{tier}": nbytes for tier, nbytes in found.items()}, **budget}
