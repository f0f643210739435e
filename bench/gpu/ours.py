"""Our side of a step on a GPU: the kernels in one launch, and the public optimizer around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import zerokern as zk
from zerokern.kernels import rules
from zerokern.kernels.formats import REMAINDERS

from ..contest import Provider
from ..ours import COLUMNS, SCALE_ERROR, UPDATE_RTOL, KernelStep
from ..step import Format, Output, nearest_atol, reader
from .problem import DeviceProblem
from .settings import Settings

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Layout:
    """An update format: dtypes of gradient, parameter and output, and the formats of master and state.

    `changed`: with a bit for each parameter, read and written, that says whether what is published became another.
    """

    grad: torch.dtype
    master: str
    state: str
    param: torch.dtype = torch.bfloat16
    out: torch.dtype | None = None
    changed: bool = False

    @property
    def name(self) -> str:
        kept = f"{SHORT[self.param]} parameters" if self.master == "none" else self.master
        published = f" + {SHORT[self.out]} out" if self.out else ""
        return f"{SHORT[self.grad]} grad, {kept}{published}, {self.state} states{' + changed bits' * self.changed}"

    @property
    def lossy(self) -> str:
        return Format(self.master, self.state).lossy

    def nbytes(self, algorithm: str) -> float:
        """Bytes per parameter that the update must move; the norm is not part of it."""
        moved = rules.bytes_per_parameter(algorithm, self.grad, self.master, self.state, self.param, self.out)
        return moved + (2 / 8 if self.changed else 0)

    def streams(self, states: int) -> tuple[int, int, int]:
        """How many streams are read, updated in place and written, the scales of int8 not counted."""
        return 1, (2 if self.master in REMAINDERS else 1) + states, int(self.out is not None)


class DeviceStep(KernelStep):
    """One update of a list of tensors by `DeviceTable`, the clip factor passed as the scale."""

    layout: Layout  # type: ignore[assignment]
    problem: DeviceProblem

    def __init__(self, problem: DeviceProblem, layout: Layout, config: object = None) -> None:
        """`config` is a launch configuration in place of the table's own choice."""
        self.problem, self.layout = problem, layout  # type: ignore[assignment]
        self.grads = problem.views("grad", layout.grad)
        self.columns: dict[str, list[torch.Tensor]] = {"grad": self.grads}
        self._lay_out_master()
        for name, column in zip(problem.algorithm.states, COLUMNS, strict=False):
            self._lay_out_state(name, column)
        self.changed = [
            torch.zeros(-(-grad.numel() // 8), dtype=torch.uint8, device=problem.device)
            for grad in (self.grads if layout.changed else ())
        ]
        self.table = self._device_table({} if config is None else {"config": config})

    def _lay_out_master(self) -> None:
        layout, views = self.layout, self.problem.views
        if layout.master == "fp32":
            self.columns["master"] = views("param", torch.float32)
            if layout.out is not None:
                self.columns["out"] = views("out", layout.out)
            return
        self.columns["param"] = views("param", layout.param)
        if layout.master in REMAINDERS:
            self.columns["remainder"] = views("remainder", REMAINDERS[layout.master])

    def _device_table(self, more: dict[str, Any]) -> Any:
        from zerokern.kernels.triton.table import DeviceTable

        algorithm, layout = self.problem.algorithm, self.layout
        table = DeviceTable(self.problem.device, len(self.grads), 1, **more)
        table.set_group(
            0,
            {"decoupled": algorithm.decoupled, **algorithm.hyper},
            algorithm=algorithm.name,
            grad_dtype=layout.grad,
            param_dtype=torch.float32 if layout.master == "fp32" and layout.out is None else layout.param,
            master_format=layout.master,
            state_format=layout.state,
            out_dtype=layout.out,
        )
        for row, grad in enumerate(self.grads):
            pointers = {name: tensors[row].data_ptr() for name, tensors in self.columns.items()}
            if self.changed:
                pointers["changed"] = self.changed[row].data_ptr()
            table.set_row(row, group=0, numel=grad.numel(), **pointers)
        return table

    def run(self) -> None:
        self.table.run(scale=self.problem.clip)

    def fill(self) -> dict[str, torch.Tensor]:
        problem, grad = self.problem, self.layout.grad
        problem.fill("grad", grad)
        return {**super().fill(), "grad": problem.base["grad"].to(grad).float()}

    def _fill_master(self) -> torch.Tensor:
        if self.layout.master != "none":
            return super()._fill_master()
        base, dtype = self.problem.base["param"], self.layout.param
        self.problem.fill("param", dtype)
        return base.to(dtype).float()

    def provider(self) -> Provider:
        algorithm = self.problem.algorithm
        return Provider(
            name=f"{algorithm.optimizer}: {self.layout.name}",
            run=self.run,
            check=self.check,
            nbytes=self.problem.shape.numel * self.layout.nbytes(algorithm.name),
            use_threads=lambda count: None,
            streams=self.layout.streams(len(algorithm.states)),
            lossy=self.layout.lossy,
        )


class PublicStep:
    """`step()` of the public optimizer on parameters of one dtype, from states that nobody has updated yet."""

    def __init__(self, problem: DeviceProblem, layout: Layout, settings: Settings, name: str) -> None:
        self.problem, self.layout, self.settings, self.name = problem, layout, settings, name
        dtype = layout.out or (torch.float32 if layout.master == "fp32" else layout.param)
        self.params = [torch.nn.Parameter(view) for view in problem.views("public param", dtype)]
        self.grads = problem.views("grad", layout.grad)
        self.optimizer: torch.optim.Optimizer | None = None

    def _build(self) -> torch.optim.Optimizer:
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        more = {"max_grad_norm": self.problem.max_norm} if self.problem.clips else {}
        return getattr(zk, self.problem.algorithm.optimizer)(
            self.params,
            state_format=self.layout.state,
            master_format=self.layout.master,
            **more,
            **self.problem.algorithm.public_hyper,
        )

    def run(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()

    def check(self) -> None:
        problem, dtype = self.problem, self.params[0].dtype
        problem.fill("grad", self.layout.grad)
        problem.fill("public param", dtype, problem.base["param"])
        self.optimizer = self._build()
        self.optimizer.step()
        start = {"param": problem.base["param"].to(dtype).float(), **problem.zeros()}
        want = problem.truth(start, step=1)["param"]
        slack = UPDATE_RTOL[self.layout.state] * (want - start["param"]).abs()
        if problem.clips:
            slack += (problem.truth(start, step=1, clip_error=SCALE_ERROR)["param"] - want).abs()
        rtol = 1e-6 if dtype == torch.float32 else 2**-8
        read, atol = reader([p.detach() for p in self.params]), 1e-8 + nearest_atol(dtype)
        problem.check(self.name, [Output("param", want, read, rtol, atol, slack)])

    def provider(self) -> Provider:
        algorithm, layout = self.problem.algorithm, self.layout
        norm = layout.grad.itemsize if self.problem.clips else 0
        return Provider(
            name=self.name,
            run=self.run,
            check=self.check,
            nbytes=self.problem.shape.numel * (layout.nbytes(algorithm.name) + norm),
            use_threads=lambda count: None,
            streams=layout.streams(len(algorithm.states)),
            lossy=layout.lossy,
        )


def through_the_device_path(settings: Settings) -> AbstractContextManager[object]:
    """In a rehearsal the public optimizers take CPU tensors for those of a device."""
    stack = ExitStack()
    if settings.rehearse:
        stack.enter_context(mock.patch("zerokern.optim.device.serves", return_value=True))
    return stack


def public(problem: DeviceProblem, layout: Layout, settings: Settings, name: str) -> Callable[[], Sequence[Provider]]:
    """The maker of a public optimizer's contestant."""
    return lambda: [PublicStep(problem, layout, settings, name).provider()]
