"""Our side of a full step: the kernels on plain tensors, and the public optimizer around them."""

from __future__ import annotations

import math
from array import array

import torch

import zerokern as zk
from zerokern.core import native
from zerokern.kernels import ops
from zerokern.kernels.cpu import UpdateTable, sumsq_pointers
from zerokern.kernels.formats import CODES, REMAINDERS, STATE_DTYPES

from .buffers import Buffers
from .contest import Contest, Provider, Request
from .peers import candidates as peer_candidates
from .step import CLIP_EPS, INT8_BLOCK, Algorithm, Format, Output, StepProblem, nearest_atol, reader

COLUMNS = tuple(CODES)
"""an algorithm's states, in the order of the native columns"""
# The clip factor reaches the kernel in fp32; Lion's sign turns on it where the momentum is next to nothing.
SCALE_ERROR = 1e-6
# int8 states are lossy, so their update may divide and take roots approximately.
UPDATE_RTOL = {"fp32": 0.0, "bf16": 0.0, "int8": 2**-12}
MASTER_RTOL = {"fp32": 1e-6, "split16": 1e-6, "split8": 2**-15, "none": 2**-8}


class KernelStep:
    """One full step by two native calls: the sum of squares, then the update with the clip factor folded in."""

    def __init__(self, problem: StepProblem, layout: Format) -> None:
        self.problem, self.layout = problem, layout
        self.grads = problem.views("grad", torch.bfloat16)
        self.columns: dict[str, list[torch.Tensor]] = {"grad": self.grads}
        self._lay_out_master()
        for name, column in zip(problem.algorithm.states, COLUMNS, strict=False):
            self._lay_out_state(name, column)
        self.table = self.new_table(range(len(self.grads)))
        self.grad_pointers = array("Q", [grad.data_ptr() for grad in self.grads])
        self.grad_numels = array("q", [grad.numel() for grad in self.grads])

    def _lay_out_master(self) -> None:
        if self.layout.master == "fp32":
            self.columns["master"] = self.problem.views("param", torch.float32)
            self.columns["out"] = self.problem.views("out", torch.bfloat16)
            return
        self.columns["param"] = self.problem.views("param", torch.bfloat16)
        if self.layout.master in REMAINDERS:
            self.columns["remainder"] = self.problem.views("remainder", REMAINDERS[self.layout.master])

    def _lay_out_state(self, name: str, column: str) -> None:
        if self.layout.state == "int8":
            self.columns[column] = self.problem.views(f"{name}_codes", CODES[column])
            self.columns[f"{column}_scale"] = self.problem.scales(name)
        else:
            dtype = STATE_DTYPES[self.layout.state]
            self.columns[column] = self.problem.views(name, dtype)

    def new_table(self, rows: range | list[int]) -> UpdateTable:
        """Rows may name the same tensor several times: one call then updates it as often."""
        table = UpdateTable(len(rows), 1)
        table.set_group(
            0,
            {"decoupled": self.problem.algorithm.decoupled, **self.problem.algorithm.hyper},
            algorithm=self.problem.algorithm.name,
            grad_dtype=torch.bfloat16,
            param_dtype=torch.bfloat16,
            master_format=self.layout.master,
            state_format=self.layout.state,
            out_dtype=torch.bfloat16 if self.layout.master == "fp32" else None,
        )
        for row, i in enumerate(rows):
            pointers = {name: tensors[i].data_ptr() for name, tensors in self.columns.items()}
            table.set_row(row, group=0, numel=self.grads[i].numel(), **pointers)
        return table

    def run(self) -> None:
        norm = math.sqrt(sum(sumsq_pointers(self.grad_pointers, self.grad_numels, torch.bfloat16)))
        self.table.run(scale=min(1.0, self.problem.max_norm / (norm + CLIP_EPS)))

    def fill(self) -> dict[str, torch.Tensor]:
        """Put the initial values into our formats; returns the values they hold, one period of each role."""
        problem = self.problem
        held = {"param": self._fill_master()}
        for name, column in zip(problem.algorithm.states, COLUMNS, strict=False):
            base = problem.base[name]
            if self.layout.state == "int8":
                codes, scale = ops.encode_int8(base, column)
                problem.fill(f"{name}_codes", CODES[column], codes)
                problem.fill(f"{name}_scale", torch.float32, scale, per=INT8_BLOCK)
                held[name] = ops.decode_int8(codes, scale, column)
            else:
                dtype = STATE_DTYPES[self.layout.state]
                problem.fill(name, dtype)
                held[name] = base.to(dtype).float()
        return held

    def _fill_master(self) -> torch.Tensor:
        problem, base = self.problem, self.problem.base["param"]
        if self.layout.master == "fp32":
            problem.fill("param", torch.float32)
            return base
        if self.layout.master == "none":
            problem.fill("param", torch.bfloat16)
            return base.bfloat16().float()
        upper, remainder = ops.split(base, self.layout.master)
        problem.fill("param", torch.bfloat16, upper)
        problem.fill("remainder", REMAINDERS[self.layout.master], remainder)
        return ops.join(upper, remainder)

    def check(self) -> None:
        """Parameters against the float64 truth, to the precision of their format; states to that of theirs."""
        held = self.fill()
        self.run()
        want, off = self.problem.truth(held), self.problem.truth(held, clip_error=SCALE_ERROR)
        slack = (off["param"] - want["param"]).abs()
        slack += UPDATE_RTOL[self.layout.state] * (want["param"] - held["param"]).abs()
        role = "master" if "master" in self.columns else "param"
        outputs = [
            Output("param", want["param"], self._read_param, MASTER_RTOL[self.layout.master], self._atol(role), slack)
        ]
        if "out" in self.columns:
            read = reader(self.columns["out"])
            outputs.append(Output("out", want["param"], read, 2**-8, self._atol("out"), slack))
        for name, column in zip(self.problem.algorithm.states, COLUMNS, strict=False):
            outputs.append(self._state_output(name, column, want[name]))
        self.problem.check(f"zerokern {self.layout.name}", outputs)

    def _atol(self, column: str) -> float:
        return 1e-8 + nearest_atol(self.columns[column][0].dtype)

    def _read_param(self, i: int, start: int, stop: int) -> torch.Tensor:
        if "master" in self.columns:
            return self.columns["master"][i][start:stop]
        param = self.columns["param"][i][start:stop]
        return ops.join(param, self.columns["remainder"][i][start:stop]) if "remainder" in self.columns else param

    def _state_output(self, name: str, column: str, want: torch.Tensor) -> Output:
        values = self.columns[column]
        if self.layout.state == "fp32":
            return Output(name, want, reader(values), 1e-6, 1e-7 * want.abs().max().item())
        if self.layout.state == "bf16":
            return Output(name, want, reader(values), 2**-8, 1e-7 * want.abs().max().item())
        scales = self.columns[f"{column}_scale"]

        def read(i: int, start: int, stop: int) -> torch.Tensor:
            blocks = scales[i][start // INT8_BLOCK : -(-stop // INT8_BLOCK)]
            decoded = ops.decode_int8(values[i][start:stop], blocks, column)
            return decoded.sqrt_() if column == "exp_avg_sq" else decoded

        # a code is off by less than one step, and a step is at most 1/64 (exp_avg) or 1/255 of the block's largest
        steps = 255 if column == "exp_avg_sq" else 64
        target = want.sqrt() if column == "exp_avg_sq" else want
        return Output(name, target, read, 1e-6, target.abs().max().item() / steps)

    def provider(self) -> Provider:
        states = len(self.problem.algorithm.states)
        return Provider(
            name=self.layout.name,
            run=self.run,
            check=self.check,
            nbytes=self.problem.shape.numel * self.layout.nbytes(states),
            use_threads=native.set_threads,
            streams=self.layout.streams(states),
            lossy=self.layout.lossy,
            wiring="kernels: sumsq, then one update",
        )


def optimizer_step(problem: StepProblem, layout: Format, name: str) -> Provider:
    """The same step by the public optimizer: `step()` with `max_grad_norm`, on bf16 parameters and gradients."""
    algorithm = problem.algorithm
    params = [torch.nn.Parameter(view) for view in problem.views("public param", torch.bfloat16)]
    for param, grad in zip(params, problem.views("grad", torch.bfloat16), strict=True):
        param.grad = grad
    optimizer = getattr(zk, algorithm.optimizer)(
        params,
        state_format=layout.state,
        master_format=layout.master,
        max_grad_norm=problem.max_norm,
        **algorithm.public_hyper,
    )

    def check() -> None:
        problem.fill("public param", torch.bfloat16, problem.base["param"])
        optimizer.state.clear()
        optimizer.step()
        start = {"param": problem.base["param"].bfloat16()}
        start.update({state: torch.zeros(problem.period) for state in algorithm.states})
        want = problem.truth(start, step=1)["param"]
        slack = (problem.truth(start, step=1, clip_error=SCALE_ERROR)["param"] - want).abs()
        problem.check(name, [Output("param", want, reader([p.detach() for p in params]), 2**-8, 1e-8, slack)])

    states = len(algorithm.states)
    return Provider(
        name=name,
        run=optimizer.step,
        check=check,
        nbytes=problem.shape.numel * layout.nbytes(states),
        use_threads=native.set_threads,
        streams=layout.streams(states),
        lossy=layout.lossy,
        wiring="the public optimizer's step()",
    )


def step_contests(algorithm: Algorithm, request: Request) -> list[Contest]:
    """The full step of an algorithm: every format and the public optimizer against every peer, all in one contest."""
    problem = StepProblem(algorithm, request.shape, Buffers(request.shape.span))
    ours = [KernelStep(problem, layout).provider() for layout in algorithm.formats]
    exact = Format("split16", "fp32")
    ours.append(optimizer_step(problem, exact, f"zk.{algorithm.optimizer}, {exact.name}"))
    peers = {peer: peer_candidates(peer, algorithm.name, problem) for peer in request.peers}
    return [Contest(name=f"{algorithm.optimizer} full step", numel=request.shape.numel, ours=ours, peers=peers)]
