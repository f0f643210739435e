"""What an optimizer learned in earlier steps, and the binding that fits where its state lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerokern.memory import HostPlace
from zerokern.optim.binding import Binding
from zerokern.optim.decide import Decision
from zerokern.optim.device_binding import DeviceBinding
from zerokern.optim.disk import Disk
from zerokern.optim.disk_binding import DiskBinding
from zerokern.optim.formats import Algorithm, FormatKey
from zerokern.optim.outside import WatchedState, Witness
from zerokern.optim.survey import Groups, Survey

__all__ = ["Bound", "bind"]


@dataclass
class Bound:
    """All of it can be learned anew from parameters, groups and state."""

    binding: Binding | None = None
    witness: Witness | None = None
    formats: list[FormatKey] = field(default_factory=list)


def bind(
    subject: tuple[Algorithm, Survey, Groups, WatchedState],
    disk: Disk | None,
    decision: Decision,
    last: Binding | None,
    previous: Binding | None,
    room: HostPlace | None = None,
    **begins: Any,
) -> Binding:
    """State on disk, on a device or in host memory. `last` is the binding before, `previous` is the same if intact.

    `begins`: what new state and its witness begin with.
    """
    if disk is not None:
        return DiskBinding(*subject, disk, **begins)
    if decision.device is not None:
        before = last if isinstance(last, DeviceBinding) and last.place == subject[1].device else None
        intact = before if before is previous else None
        return DeviceBinding(*subject, decision, previous=intact, last=before, **begins)
    return Binding(*subject, previous=previous if type(previous) is Binding else None, room=room, **begins)
