"""The problem of a full optimizer step: bf16 gradients -> global norm -> clip -> update -> bf16 parameters to send.

The values repeat with a period, so that the float64 truth of one period checks every element of any size of tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .buffers import Buffers
from .contest import WrongResult
from .shapes import Shape

PERIOD = 1 << 20
INT8_BLOCK = 128
CLIP = 0.5
CLIP_EPS = 1e-6
# torch sums squares in fp32: on 64M elements its norm is 0.6 % off
PEER_NORM_ERROR = 0.01
STATE_NBYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / INT8_BLOCK}
MASTER_NBYTES = {"fp32": 4, "split16": 4, "split8": 3, "none": 2}
GRAD_NBYTES, OUT_NBYTES = 2, 2

Update = Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Format:
    """How the state of one contestant lies in memory, and so how many bytes its step must move."""

    master: str
    state: str

    @property
    def name(self) -> str:
        states = "exact" if self.state == "fp32" else f"{self.state} states"
        return f"{states}, {self.master}" + (" + bf16 out" if self.master == "fp32" else "")

    @property
    def lossy(self) -> str:
        parts = [] if self.state == "fp32" else [f"{self.state} states"]
        return ", ".join(parts + {"split8": ["24-bit master"], "none": ["no master"]}.get(self.master, []))

    def nbytes(self, states: int) -> float:
        """Bytes per parameter that the full step moves, the gradient's second reading for the norm included."""
        out = OUT_NBYTES if self.master == "fp32" else 0
        return 2 * GRAD_NBYTES + 2 * MASTER_NBYTES[self.master] + 2 * states * STATE_NBYTES[self.state] + out

    def streams(self, states: int) -> tuple[int, int, int]:
        """How many streams are read, updated in place and written."""
        halves = 2 if self.master.startswith("split") else 1
        return 1, halves + states, int(self.master == "fp32")


@dataclass(frozen=True)
class Algorithm:
    """An update rule: torch arithmetic that serves as truth in float64 and as torch.compile's source in float32."""

    name: str
    states: tuple[str, ...]
    hyper: Mapping[str, float]
    scalars: Callable[[Mapping[str, float]], dict[str, float]]
    update: Update
    formats: tuple[Format, ...]
    optimizer: str
    public_hyper: Mapping[str, object]
    initial: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    decoupled: bool = False


@dataclass(frozen=True)
class Output:
    """A result to compare: `read(i, start, stop)` gives those elements of parameter i, `want` is one period of truth.

    `slack` is further room for each element of the period.
    """

    role: str
    want: torch.Tensor
    read: Callable[[int, int, int], torch.Tensor]
    rtol: float
    atol: float = 0.0
    slack: torch.Tensor | None = None


def nearest_atol(dtype: torch.dtype) -> float:
    """How far a subnormal value may be from the truth when it is the dtype's nearest: half of their spacing.

    >>> nearest_atol(torch.float16) == 2**-25
    True
    """
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps / 2


class StepProblem:
    """Inputs, truth and comparison of one algorithm on one shape."""

    def __init__(self, algorithm: Algorithm, shape: Shape, buffers: Buffers) -> None:
        self.op, self.algorithm, self.shape, self.buffers = algorithm.name, algorithm, shape, buffers
        self.period = min(PERIOD, shape.span)
        noise = torch.Generator().manual_seed(0)
        draw = {role: torch.randn(self.period, generator=noise) for role in ("param", "grad", *algorithm.states)}
        self.base = {"param": draw["param"] * 0.02, "grad": (draw["grad"] * 0.05).bfloat16().float()}
        for state in algorithm.states:
            self.base[state] = algorithm.initial[state](draw[state])
        self.fill("grad", torch.bfloat16)
        self.max_norm = CLIP * self._norm()
        self.clip = min(1.0, CLIP * self._norm() / (self._norm() + CLIP_EPS))

    def views(self, role: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """The tensors of a role; contestants that ask for the same role and dtype share their memory."""
        flat = self.buffers.take(role, dtype, self.shape.span)
        pairs = zip(self.shape.offsets, self.shape.numels, strict=True)
        return [flat[offset : offset + numel] for offset, numel in pairs]

    def scales(self, role: str) -> list[torch.Tensor]:
        """The int8 scales of a role, one per started block of each tensor."""
        flat = self.buffers.take(f"{role}_scale", torch.float32, self.shape.span // INT8_BLOCK)
        pairs = zip(self.shape.offsets, self.shape.numels, strict=True)
        return [flat[offset // INT8_BLOCK :][: -(-numel // INT8_BLOCK)] for offset, numel in pairs]

    def fill(self, role: str, dtype: torch.dtype, base: torch.Tensor | None = None, per: int = 1) -> None:
        """Repeat one period of values (`self.base` of that role) over its buffer; `per` elements share one value."""
        base = self.base[role] if base is None else base
        flat = self.buffers.take(role, dtype, self.shape.span // per)
        whole = flat.numel() // base.numel()
        flat[: whole * base.numel()].view(whole, base.numel()).copy_(base)
        flat[whole * base.numel() :].copy_(base[: flat.numel() % base.numel()])

    def _norm(self) -> float:
        """The true global norm, from sums over whole periods and parts of one."""
        squares = torch.cat([torch.zeros(1, dtype=torch.float64), self.base["grad"].double().square().cumsum(0)])

        def until(end: int) -> float:
            return end // self.period * squares[-1].item() + squares[end % self.period].item()

        spans = zip(self.shape.offsets, self.shape.numels, strict=True)
        return math.sqrt(sum(until(offset + numel) - until(offset) for offset, numel in spans))

    def truth(
        self, start: Mapping[str, torch.Tensor] | None = None, *, clip_error: float = 0.0, **hyper: float
    ) -> dict[str, torch.Tensor]:
        """One period after one step in float64, from `self.base` with the roles in `start` replaced."""
        values = {role: value.double() for role, value in {**self.base, **(start or {})}.items()}
        states = tuple(values[state] for state in self.algorithm.states)
        scalars = self.algorithm.scalars({**self.algorithm.hyper, **hyper})
        grad = values["grad"] * self.clip * (1 + clip_error)
        param, states = self.algorithm.update(values["param"], grad, states, scalars)
        return {"param": param, **dict(zip(self.algorithm.states, states, strict=True))}

    def check(self, who: str, outputs: Sequence[Output]) -> None:
        """Compare every element; raises WrongResult."""
        for output in outputs:
            want = output.want.float()
            bound = want.abs() * output.rtol + output.atol
            if output.slack is not None:
                bound += output.slack.float()
            for i, start, stop, at in self._chunks():
                got = output.read(i, start, stop).float()
                excess = (got - want[at : at + stop - start]).abs_().sub_(bound[at : at + stop - start])
                worst = excess.argmax().item() if not excess.isnan().any() else excess.isnan().int().argmax().item()
                if not excess[worst] <= 0:
                    raise WrongResult(
                        f"{who}: {output.role}[{start + worst}] of tensor {i} is {got[worst].item():.9g}, "
                        f"the float64 truth is {want[at + worst].item():.9g}"
                    )

    def _chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """(tensor, start, stop, place of start within the period), never across a period."""
        for i, (offset, numel) in enumerate(zip(self.shape.offsets, self.shape.numels, strict=True)):
            start = 0
            while start < numel:
                at = (offset + start) % self.period
                stop = min(numel, start + self.period - at)
                yield i, start, stop, at
                start = stop


class PeerStep:
    """What every exact peer updates: fp32 masters and states in the shared buffers, a fp32 scratch for its casts."""

    def __init__(self, problem: StepProblem) -> None:
        self.problem = problem
        self.hyper = dict(problem.algorithm.hyper)
        self.grads = problem.views("grad", torch.bfloat16)
        self.params = problem.views("param", torch.float32)
        self.states = [problem.views(state, torch.float32) for state in problem.algorithm.states]
        self.outs = problem.views("out", torch.bfloat16)

    @functools.cached_property
    def grads32(self) -> list[torch.Tensor]:
        return self.problem.views("grad32", torch.float32)

    def clip_of(self, norm: torch.Tensor) -> torch.Tensor:
        return torch.clamp(self.problem.max_norm / (norm + CLIP_EPS), max=1.0)

    def check(self, who: str, run: Callable[[], object]) -> None:
        """Run once from the initial values and compare parameters, states and the bf16 output."""
        problem = self.problem
        problem.fill("param", torch.float32)
        for state in problem.algorithm.states:
            problem.fill(state, torch.float32)
        run()
        want, off = problem.truth(), problem.truth(clip_error=PEER_NORM_ERROR)
        slack = {role: (off[role] - want[role]).abs() for role in want}
        outputs = [
            Output("param", want["param"], reader(self.params), 1e-6, 1e-7, slack["param"]),
            Output("out", want["param"], reader(self.outs), 2**-8, 1e-7, slack["param"]),
        ]
        for name, views in zip(problem.algorithm.states, self.states, strict=True):
            outputs.append(Output(name, want[name], reader(views), 1e-4, 1e-8, slack[name]))
        problem.check(who, outputs)


def reader(views: Sequence[torch.Tensor]) -> Callable[[int, int, int], torch.Tensor]:
    """`Output.read` of plain tensors."""
    return lambda i, start, stop: views[i][start:stop]
