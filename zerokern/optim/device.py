"""Says which devices are supported and how copies reach them, and keeps step counters there."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got, warn
from zerokern.kernels.triton import backend
from zerokern.kernels.triton.backend import capturing as capturing
from zerokern.kernels.triton.upload import upload
from zerokern.memory.copies import Driver
from zerokern.memory.staging import EMULATED_DRIVERS
from zerokern.zero.watch import Watch

__all__ = ["DeviceSteps", "Kernels"]


def serves(device: torch.device) -> bool:
    """Whether kernels update parameters on this device in place.

    >>> serves(torch.device("cuda", 1)), serves(torch.device("cpu"))
    (True, False)
    """
    return device.type == "cuda"


def refuse_capture(device: torch.device) -> None:
    """Raises while a CUDA graph is captured: state that is made in one would be made again at every replay."""
    if capturing(device):
        raise StateError(
            "a step that makes or takes over optimizer state cannot go into a CUDA graph, which would repeat that at "
            "every replay; call step() once with the same gradients set before the capture begins"
        )


def refuse_update_in_graph() -> None:
    """Raises while a CUDA graph is captured: a replay would not make an update of the host's."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise StateError(
            "an update in host memory, or of state in another tier, cannot go into a CUDA graph, whose replays the "
            "host has no part in; capture forward and backward alone and call step() after each replay, or keep "
            'parameters and state on the device (tier="device")'
        )


def require(device: torch.device, tier: Any) -> None:
    """Raises if the device cannot reach the tier, or the kernels do not run on it."""
    if tier != "device":
        raise ValueError(got("tier", tier, f"'device' for parameters on {device}", "Or move the model to the CPU"))
    backend.check_device(device)


class Kernels(NamedTuple):
    """The classes that launch an update, from `kernels/triton`."""

    table: Any
    control: Any
    sums: Any


def kernels() -> Kernels:
    """Imports Triton, when there is a parameter that needs it."""
    from zerokern.kernels.triton.sumsq import SumsqTable
    from zerokern.kernels.triton.table import Control, DeviceTable

    return Kernels(DeviceTable, Control, SumsqTable)


def is_apart(param: Tensor) -> bool:
    """Whether a parameter lies on a device, and not in host memory."""
    return serves(param.device) or (len(EMULATED_DRIVERS) > 0 and param in EMULATED_DRIVERS)


def put_in_place(driver: Driver, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies (dst, src) on the device, after all work that its compute stream has; the host does not wait.

    The tensors' versions are the caller's to count, now.
    """

    def copy() -> None:
        with torch.no_grad():
            torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])

    launch = getattr(driver, "launch", None)
    copy() if launch is None else launch(copy)


_STALE = (
    "a CUDA graph that was captured before this step counts steps wrongly from now on, if it is replayed again: %s; "
    "capture it anew"
)
_CLASSES = 128  # of counters that may be equal without being known to be; beyond that they are read once


class DeviceSteps:
    """Keeps the step counters of all parameters side by side on their device; 0-dim views of them are state.

    The host does not read them, for a step that the device skips counts nowhere, and the host hears of it only when it
    asks. But it knows which of them are equal: counters of one class have the same value, whatever it is. Those of a
    class that take part in an update without the others become a class of their own. Class 0 is what never moved.

    >>> params, entries = [torch.ones(2), torch.ones(2)], [{"step": torch.tensor(3.0)}, {"step": 4}]
    >>> book = DeviceSteps(torch.device("cpu"), params, None)
    >>> book.adopt(entries)
    >>> entries[1]["step"], book.choose([0, 1]), book.increments
    (tensor(4.), [0, 1], tensor([1., 1.]))
    """

    def __init__(self, place: torch.device, params: Sequence[Tensor], last: DeviceSteps | None) -> None:
        """All at 0, but for the parameters that `last` has counted."""
        self.place, self.params = place, list(params)  # held, so that no other parameter has one of their ids
        self._numbers = {id(param): number for number, param in enumerate(params)}
        self._ids: Iterator[int] = itertools.count(1) if last is None else last._ids
        self._bound, self._captured = _CLASSES, False
        self._active: list[int] = []
        self._captures: list[set[int]] = []  # counters that a graph takes for equal
        self._replaced: dict[int, Tensor] = {}  # views of the last book whose values are here
        self._classes, self._graphs = [0] * len(self.params), [0] * len(self.params)  # graphs: by which move them
        with torch.no_grad(), torch.inference_mode(False):
            self.steps = upload(array("f", bytes(4 * len(self.params))), place)
            self._views: list[Tensor] = list(self.steps.unbind())
            if last is not None:
                self._carry_over(last)
        self._note_views([])

    def _carry_over(self, last: DeviceSteps) -> None:
        last._read_if_written()
        if last._captures:
            warn(_STALE % "parameters were added or taken away")
        pairs = [(now, last._numbers[key]) for key, now in self._numbers.items() if key in last._numbers]
        for now, then in pairs:
            self._classes[now], self._replaced[now] = last._classes[then], last._views[then]
        self._put([now for now, _ in pairs], last.steps[upload(array("q", [then for _, then in pairs]), self.place)])

    def adopt(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replaces each `entries[i]["step"]` that is not a view of the book by one with the same value."""
        self._read_if_written()
        found = [(number, entry["step"]) for number, entry in enumerate(entries) if "step" in entry]
        others = [(number, value) for number, value in found if value is not self._views[number]]
        unread = [(number, value) for number, value in others if value is not self._replaced.get(number)]
        values = zip((number for number, _ in unread), _numbers([value for _, value in unread]), strict=True)
        moved = {number: int(value) for number, value in values if int(value) or self._classes[number]}
        self._classify(moved)
        self._drop_captures(set(moved), "counters were written")
        with torch.no_grad(), torch.inference_mode(False):
            self._put(list(moved), upload(array("f", moved.values()), self.place))
        self._replaced = {}
        for number, _ in others:
            entries[number]["step"] = self._views[number]
        self._note_views([number for number, _ in found])

    def restart(self, number: int) -> None:
        """Resets the counter of a parameter that has none in its state, right after `adopt`."""
        if self._classes[number]:
            self._views[number].zero_()
            self._classify({number: 0})
            self.watch.accept_writes()

    def _put(self, numbers: Sequence[int], values: Tensor) -> None:
        if numbers:
            self.steps.index_copy_(0, upload(array("q", numbers), self.place), values)

    def _note_views(self, numbers: list[int]) -> None:
        """Records the views that are in the state, where users may write or exchange them."""
        self._adopted = numbers
        self.watch = Watch([self.steps, *(self._views[number] for number in numbers)])

    def _read_if_written(self) -> None:
        self._note_capture()
        if self.watch.written():
            self._drop_captures(set(self._adopted), "counters were written")
            self._read()
            self.watch.accept_writes()

    def _read(self) -> None:
        """Waits for the device, and learns which counters are equal by chance."""
        self._classify({number: int(value) for number, value in enumerate(self.steps.tolist())})

    def _classify(self, values: Mapping[int, int]) -> None:
        """Classifies counters by their values. Those that a CUDA graph moves stay apart: replays move them."""
        known = {(0, 0): 0}
        for number, value in values.items():
            key = self._graphs[number], value
            if key not in known:
                known[key] = next(self._ids)
            self._classes[number] = known[key]

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Sets which counters the next updates increment. Returns a label for each: those of one label are equal."""
        self._note_capture()
        self._active = list(numbers)
        chosen = set(numbers)  # a graph keeps the labels of its capture: it must not see those of one label move apart
        self._drop_captures(chosen, "some of its parameters take a step without the others", but=chosen.issuperset)
        labels = self._labels()
        if max(labels, default=0) >= self._bound and not capturing(self.place):
            self._read()
            labels = self._labels()
            self._bound = max(_CLASSES, 4 * max(labels))
        self._chosen = labels
        moved = array("f", bytes(4 * len(self._classes)))
        for number in numbers:
            moved[number] = 1.0
        self.increments = upload(moved, self.place)
        return labels

    def _labels(self) -> list[int]:
        """Separates the chosen from the others of their classes; returns the label of each."""
        self._split(self._classes)
        labels: dict[int, int] = {}
        return [labels.setdefault(self._classes[number], len(labels)) for number in self._active]

    def _split(self, ids: list[int]) -> None:
        fresh: dict[int, int] = {}
        for number in self._active:
            if ids[number] not in fresh:
                fresh[ids[number]] = next(self._ids)
            ids[number] = fresh[ids[number]]

    def _drop_captures(
        self, moved: set[int], why: str, but: Callable[[set[int]], bool] = lambda members: False
    ) -> None:
        """Warns of graphs some of whose counters moved, unless these are equal still."""
        broken = [members for members in self._captures if members & moved and not but(members)]
        if broken:
            self._captures = [members for members in self._captures if members not in broken]
            warn(_STALE % why)

    def advance(self) -> None:
        """Notes an update of the chosen, which the device may have skipped.

        An update that goes into a CUDA graph is made as often as that is replayed.
        """
        self._captured = self._captured or capturing(self.place)

    def _note_capture(self) -> None:
        """Notes a graph that captured updates since `choose`: it takes counters of one label for equal."""
        if not self._captured:
            return
        self._captured = False
        self._split(self._graphs)
        alike: dict[int, set[int]] = {}
        for number, label in zip(self._active, self._chosen, strict=True):
            alike.setdefault(label, set()).add(number)
        self._captures += alike.values()

    def untouched(self) -> bool:
        """Whether nobody has written a counter since, or exchanged the memory of one."""
        return self.watch.unchanged()


def _numbers(values: Sequence[Any]) -> list[float]:
    """Returns the values; those of tensors on a device are read at once."""
    far = [value for value in values if isinstance(value, Tensor) and not value.is_cpu]
    read = iter(torch.stack([v.detach().float().reshape(()).to(far[0].device) for v in far]).tolist() if far else ())
    return [next(read) if isinstance(v, Tensor) and not v.is_cpu else float(v) for v in values]
