"""The device's kernels on CPU tensors: plain arithmetic and the native tables in the place of launches.

It follows what `zerokern.kernels.triton.table` documents, so that the host's side can be tested quickly; the kernels
themselves go through the interpreter elsewhere. A capture is a list of launches, and a replay makes them.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optim_cases import FP32, MAKERS, SIZES, make_params, same_bits, same_state, set_grads
from torch import Tensor

from zerokern.kernels.cpu import UpdateTable, sumsq_pointers
from zerokern.kernels.triton.upload import upload
from zerokern.optim import compute, device
from zerokern.optim.survey import added


class Double:
    """Serves CPU tensors as a device would be, while it is `on`.

    `launched` counts updates, `graph` is what is being captured; with `out_of_memory` nothing can be sent.
    """

    def __init__(self) -> None:
        self.graph: list[Callable[[], None]] | None = None
        self.launched = 0
        self.out_of_memory = False

    @contextlib.contextmanager
    def on(self, *, interpreted: bool = False) -> Iterator[None]:
        """With `interpreted` the kernels are the real ones."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "serves", lambda place: place.type == "cpu")
            if not interpreted:
                patch.setattr(device, "kernels", self._kernels)
                patch.setattr(device, "capturing", lambda place: self.graph is not None)
                patch.setattr("zerokern.kernels.triton.backend.check_device", lambda place: None)
                for module in (compute, device):
                    patch.setattr(module, "upload", self._upload)
            yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        """What is launched in the block is put into the list, not done."""
        self.graph = graph = []
        try:
            yield graph
        finally:
            self.graph = None

    def launch(self, work: Callable[..., None], **arguments: Any) -> None:
        """A graph knows addresses alone: what it reads must be kept for it, unless it has sent that itself."""
        if self.graph is None:
            work(**arguments)
            return
        known = {name: weakref.ref(value) for name, value in arguments.items() if hasattr(value, "__weakref__")}
        plain = {name: value for name, value in arguments.items() if name not in known}

        def replay() -> None:
            found = {name: reference() for name, reference in known.items()}
            assert all(value is not None for value in found.values()), f"the graph reads freed memory: {found}"
            work(**found, **plain)

        self.graph.append(replay)

    def _upload(self, values: array[Any], place: torch.device) -> Tensor:
        """What is sent in a capture arrives when that is replayed."""
        made = upload(values, place)
        if self.graph is not None:
            sent = made.clone()
            made.zero_()
            self.graph.append(lambda: made.copy_(sent))
        return made

    def _kernels(self) -> device.Kernels:
        def table(place: torch.device, nseg: int, ngroups: int) -> Table:
            return Table(self, place, nseg, ngroups)

        def sums(place: torch.device, numels: Sequence[int], dtype: torch.dtype) -> Sums:
            return Sums(self, numels, dtype)

        return device.Kernels(table, SimpleNamespace, sums)


class Table:
    def __init__(self, double: Double, place: torch.device, nseg: int, ngroups: int) -> None:
        self.double, self.device, self.table = double, place, UpdateTable(nseg, ngroups)
        self.columns = self.table.columns
        self.groups: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})] * ngroups
        self.begun = False

    def set_group(self, index: int, hyper: dict[str, Any], **formats: Any) -> None:
        self.groups[index] = hyper, formats

    def set_row(self, index: int, **words: int) -> None:
        self.table.set_row(index, **words)

    def run(
        self, scale: float, control: Any, begin: int = 0, end: int | None = None, *, prepared: bool = False
    ) -> None:
        assert len(control.witnesses) == len(self.groups)
        if self.double.out_of_memory:
            raise torch.OutOfMemoryError("of the device")
        self.begun = True
        rows = {"begin": begin, "end": end}
        self.double.launch(Table._update, table=self, scale=scale, rows=rows, prepared=prepared, **vars(control))

    @staticmethod
    def _update(*, table: Table, scale: float, rows: dict[str, Any], prepared: bool, **arguments: Any) -> None:
        self, control = table, SimpleNamespace(**arguments)
        self.double.launched += 1
        if not prepared:
            self.factor = Table._prepare(self, control, scale)
        if self.factor is not None:
            self.table.run(self.factor, **rows)

    @staticmethod
    def _prepare(self: Table, control: Any, scale: float) -> float | None:
        """What `prepare` leaves to the updates: what gradients are multiplied by; None if the step is skipped."""
        if control.grad_scale is not None:
            scale = 1.0 / float(control.grad_scale)
        skip = control.found_inf is not None and bool(control.found_inf)
        if control.sums is not None:
            norm = math.sqrt(added(control.sums.tolist())) * scale
            if not skip:
                control.outcome[0] = norm
            skip = skip or not math.isfinite(norm)
            scale *= min(1.0, control.max_norm / (norm + 1e-6))
        control.outcome[1:3] = torch.tensor([float(control.outcome[1]) + skip, skip], device="cpu")
        if skip:
            return None
        for index, ((hyper, formats), witness) in enumerate(zip(self.groups, control.witnesses, strict=True)):
            made = int(control.steps[witness])
            lr, first = float(hyper.get("lr", 0.0)), hyper.get("first_step", False) and made == 0
            self.table.set_group(index, {**hyper, "lr": lr, "step": made + 1, "first_step": first}, **formats)
        control.steps.data.add_(control.increments)  # .data: a kernel counts no version
        return scale


class Sums:
    def __init__(self, double: Double, numels: Sequence[int], dtype: torch.dtype) -> None:
        self.double, self.numels, self.dtype = double, array("q", numels), dtype

    def run(self, pointers: Tensor, out: Tensor, index: int, base: int = 0) -> None:
        self.double.launch(Sums._sum, sums=self, pointers=pointers, base=base, out=out, index=index)

    @staticmethod
    def _sum(*, sums: Sums, pointers: Tensor, base: int, out: Tensor, index: int) -> None:
        found = [base + pointer for pointer in pointers.tolist()]
        assert all(p or not n for p, n in zip(found, sums.numels, strict=True)), "read before it was sent"
        out[index] = added(sumsq_pointers(array("Q", found), sums.numels, sums.dtype))


class DeviceTwins:
    """The same optimizer with parameters on a device and in host memory.

    `on` is what makes CPU tensors a device's, for the first of them alone.
    """

    def __init__(
        self,
        on: Callable[[], contextlib.AbstractContextManager[None]],
        name: str,
        sizes: Sequence[int] = SIZES,
        dtype: torch.dtype | Sequence[torch.dtype] = FP32,
        place: str = "cpu",
        **settings: Any,
    ) -> None:
        self.on = on
        dtypes = [dtype] * len(sizes) if isinstance(dtype, torch.dtype) else dtype
        made = [
            make_params((size,), kind, seed)[0] for seed, (size, kind) in enumerate(zip(sizes, dtypes, strict=True))
        ]
        self.straight = made
        self.params = [torch.nn.Parameter(param.detach().to(place, copy=True)) for param in made]
        self.reference = MAKERS[name](self.straight, **settings)
        with on():
            self.ours = MAKERS[name](self.params, **settings)

    def set_grads(self, seed: int, *, idle: Sequence[int] = (), scale: float = 1.0) -> None:
        set_grads(self.straight, seed=seed, scale=scale)
        for number, (mine, theirs) in enumerate(zip(self.params, self.straight, strict=True)):
            if number in idle:
                theirs.grad = None
            mine.grad = None if theirs.grad is None else theirs.grad.to(mine.device, copy=True)

    def step(self) -> None:
        with self.on():
            self.ours.step()
        self.reference.step()

    def train(self, steps: int, start: int = 0, *, idle: Sequence[int] = (), scale: float = 1.0) -> None:
        """Steps with equal gradients, none for the parameters numbered in `idle`."""
        for step in range(start, start + steps):
            self.set_grads(step, idle=idle, scale=scale)
            self.step()

    def both(self, work: Callable[[Any, list[torch.nn.Parameter]], Any]) -> None:
        """The same from outside to either of them."""
        with self.on():
            work(self.ours, self.params)
        work(self.reference, self.straight)

    def agree(self) -> bool:
        """The same bits in all parameters and in all of state_dict."""
        with self.on():
            mine = self.ours.state_dict()
        mine["state"] = {
            key: {name: value.cpu() for name, value in entry.items()} for key, entry in mine["state"].items()
        }
        same = same_bits([param.detach().cpu() for param in self.params], self.straight)
        return same and same_state(mine, self.reference.state_dict())
