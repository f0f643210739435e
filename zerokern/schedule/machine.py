"""A described machine: rates of computing, updating and moving bytes, each with its source. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path

from zerokern.core.errors import did_you_mean, got, whole_number
from zerokern.schedule.program import Op

__all__ = ["Machine", "machine_of", "shipped"]

_TEXT = ("name", "title", "sources")
_WHOLE = ("cores", "devices")
_PAIRS = {"down": "up", "up": "down", "read": "write", "write": "read"}
"""lanes that are slower while the other is busy too"""
_NEEDED = ("name", "flops_s", "device_gb_s", "down_gb_s", "up_gb_s", "host_gb_s")
_MAY_BE_ZERO = ("copy_us", "net_us", "step_us")


@dataclass(frozen=True)
class Machine:
    """Rates that are reached in practice, not those of data sheets: flops, GB (10^9 bytes) and elements per second.

    >>> machine = Machine("mine", flops_s=500e12, device_gb_s=2000, down_gb_s=50, up_gb_s=50, host_gb_s=150)
    >>> machine.seconds(Op("Fetch", "head", "down", nbytes=2 * 10**9))
    0.04
    """

    name: str
    flops_s: float
    """of forward and backward"""
    device_gb_s: float
    """memory of the device, read and written"""
    down_gb_s: float
    """device to host, nothing else crossing"""
    up_gb_s: float
    """host to device"""
    host_gb_s: float
    """what the update moves through host memory with all cores and nothing beside it"""
    down_both_gb_s: float | None = None
    """device to host while as much goes the other way; default: as alone"""
    up_both_gb_s: float | None = None
    """host to device while as much goes the other way"""
    host_all_gb_s: float | None = None
    """update and copies together; default: copies take nothing from the update"""
    cores: int = 1
    update_numel_s: float | None = None
    """elements that one core updates where memory does not limit it; default: it always does"""
    devices: int = 1
    """that share the host"""
    links_gb_s: float | None = None
    """all devices together, in one direction; default: each has its own"""
    net_gb_s: float | None = None
    """what one rank sends to others; None: there are no others"""
    read_gb_s: float | None = None
    """from the disk; None: there is none"""
    write_gb_s: float | None = None
    read_both_gb_s: float | None = None
    """from the disk while it is written too; half of `read_gb_s` where both share one rate; default: as alone"""
    write_both_gb_s: float | None = None
    disks_gb_s: float | None = None
    """all devices of a host together, read or written; default: each has a disk of its own"""
    device_memory_gb: float | None = None
    """what there is of each kind of memory: of a device, of the host, of its disks; None: unknown"""
    host_memory_gb: float | None = None
    disk_gb: float | None = None
    copy_us: float = 0.0
    """what a copy costs besides its bytes"""
    net_us: float = 0.0
    step_us: float = 0.0
    title: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name not in _TEXT:
                self._check(item.name, getattr(self, item.name), item.default is None)

    def _check(self, name: str, value: object, optional: bool) -> None:
        if value is None and optional:
            return
        number = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(value, bool)
        least = "from 0 on" if name in _MAY_BE_ZERO else "above 0"
        if not number:
            raise TypeError(got(f"machine {self.name!r}: {name}", value, f"a number {least}"))
        if not (value >= 0 if name in _MAY_BE_ZERO else value > 0):  # type: ignore[operator]
            raise ValueError(got(f"machine {self.name!r}: {name}", value, f"a number {least}"))

    def seconds(self, op: Op, beside: Collection[str] = ()) -> float:
        """Returns how long an op takes while the lanes `beside` are busy too.

        >>> store = Op("Store", "head", "up", nbytes=10**9)
        >>> round(machine_of("h100-pcie").seconds(store, beside={"down"}), 4)
        0.024
        """
        if op.lane == "device":
            return op.flops / self.flops_s + self._on_device(op) / (self.device_gb_s * 1e9)
        if op.lane in _PAIRS:
            return self.copy_us / 1e6 + op.nbytes / (self.rate(op.lane, beside) * 1e9) if op.nbytes else 0.0
        if op.lane == "net":
            if op.nbytes and self.net_gb_s is None:
                advice = "Give it where several ranks are to be simulated"
                raise ValueError(got(f"machine {self.name!r}: net_gb_s", None, "a rate in GB/s", advice))
            return self.net_us / 1e6 + op.nbytes / ((self.net_gb_s or 1.0) * 1e9) if op.nbytes else 0.0
        return self._on_host(op, beside)

    @staticmethod
    def _on_device(op: Op) -> int:
        """Returns the bytes that an op moves in device memory; published values are read and written."""
        return 2 * op.nbytes if op.verb == "Publish" else op.nbytes

    def rate(self, lane: str, beside: Collection[str] = ()) -> float:
        """Returns the rate of a link or of the disk, in GB/s, while the lanes `beside` are busy too.

        >>> h100 = machine_of("h100-pcie")
        >>> h100.rate("read"), h100.rate("read", beside={"write"})
        (6.0, 3.0)
        """
        alone, both = getattr(self, f"{lane}_gb_s"), getattr(self, f"{lane}_both_gb_s")
        if alone is None:
            advice = "Give it where something rests on the disk"
            raise ValueError(got(f"machine {self.name!r}: {lane}_gb_s", None, "a rate in GB/s", advice))
        return float(both if both is not None and _PAIRS[lane] in beside else alone)

    def _on_host(self, op: Op, beside: Collection[str]) -> float:
        rate = self.host_gb_s
        if self.host_all_gb_s is not None:
            copies = sum(self.rate(lane, beside) for lane in _PAIRS if lane in beside)
            # where links could take all of the memory, hardware shares it out
            rate = min(rate, max(self.host_all_gb_s - copies, self.host_all_gb_s / 4))
        arithmetic = 0.0
        if self.update_numel_s is not None and op.verb == "Step":
            arithmetic = op.numel / (self.update_numel_s * self.cores)
        multiplying = op.flops / self.flops_s  # only where the device is the host
        overhead = self.step_us / 1e6 if op.nbytes or op.numel else 0.0
        return max(op.nbytes / (rate * 1e9), arithmetic) + multiplying + overhead

    def shared_by(self, ranks: int) -> Machine:
        """Returns one rank's share of the machine: ranks on a host (at most one per device) divide its resources
        equally.

        >>> whole = machine_of("dgx2-v100")
        >>> whole.shared_by(16).down_gb_s, whole.shared_by(16).cores, whole.shared_by(1) == whole
        (3.0, 3, True)
        """
        together = min(whole_number("ranks", ranks), self.devices)
        if together == 1:
            return self
        rates: dict[str, float | None] = {}
        for lane, of_all in zip(_PAIRS, (*[self.links_gb_s] * 2, *[self.disks_gb_s] * 2), strict=True):
            most = math.inf if of_all is None else of_all / together
            for name in (f"{lane}_gb_s", f"{lane}_both_gb_s"):
                rate = getattr(self, name)
                rates[name] = None if rate is None else min(rate, most)
        return replace(
            self,
            **rates,  # type: ignore[arg-type]
            host_memory_gb=self.host_memory_gb and self.host_memory_gb / together,
            disk_gb=self.disk_gb and self.disk_gb / together,
            disks_gb_s=None,
            host_gb_s=self.host_gb_s / together,
            host_all_gb_s=self.host_all_gb_s and self.host_all_gb_s / together,
            cores=max(1, self.cores // together),
            devices=1,
            links_gb_s=None,
        )

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.title}" if self.title else self.name]
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in _TEXT and value != item.default:
                lines.append(f"  {item.name:<14} {value:>10.4g}  {self.sources.get(item.name, '')}".rstrip())
        return "\n".join(lines)


def shipped() -> tuple[str, ...]:
    """Returns the names of the machines that come with zerokern.

    >>> shipped()
    ('a100-pcie', 'dgx2-v100', 'gh200', 'h100-pcie', 'h200-pcie')
    """
    folder = resources.files("zerokern.schedule") / "machines"
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


def machine_of(what: str | os.PathLike[str] | Machine) -> Machine:
    """Returns a machine by name, or from a JSON file whose values are numbers or {"value": number, "source": text}.

    >>> machine_of("dgx2-v100").host_gb_s
    109
    """
    if isinstance(what, Machine):
        return what
    if not isinstance(what, (str, os.PathLike)):
        raise TypeError(got("machine", what, "a name, the path of a JSON file, or a zerokern.schedule.Machine"))
    if what in shipped():
        return _parse((resources.files("zerokern.schedule") / "machines" / f"{what}.json").read_text("utf-8"), what)
    path = Path(what)
    if not path.is_file():
        word = os.fspath(what)
        # the beginning of a name decides: h100 has more letters in common with gh200 than with h100-pcie
        begun = [name for name in shipped() if name.startswith(word.lower())]
        near = did_you_mean(word, begun, cutoff=0.4) or did_you_mean(word, shipped())
        advice = near or "A description is a JSON object with the fields of zerokern.schedule.Machine"
        raise ValueError(got("machine", word, f"a JSON file, or one of {', '.join(shipped())}", advice))
    return _parse(path.read_text("utf-8"), path)


def _parse(text: str, where: str | os.PathLike[str]) -> Machine:
    try:
        described = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(described, dict):
        raise ValueError(f"{where} holds a {type(described).__name__}; allowed: a JSON object that describes a machine")
    names = [item.name for item in fields(Machine) if item.name != "sources"]
    unknown, missing = sorted(described.keys() - names), [name for name in _NEEDED if name not in described]
    if unknown or missing:
        wrong = f"has the unknown field {unknown[0]!r}" if unknown else f"lacks {', '.join(missing)}"
        raise ValueError(f"machine {os.fspath(where)} {wrong}; its fields are {', '.join(names)}")
    values = {name: value["value"] if isinstance(value, dict) else value for name, value in described.items()}
    sources = {name: str(value.get("source", "")) for name, value in described.items() if isinstance(value, dict)}
    return Machine(**values, sources=sources)
