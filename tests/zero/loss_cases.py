"""A GPT trained three ways on the same ranks and data: sharded, under DDP (or FSDP2), and in float64."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import World, built, full, ranked, step_and_zero

import zerokern as zk
from zerokern.examples.model import GPT, Shape

SHAPE = Shape(layers=2, width=64, context=17)  # 17 x 64 is no whole number of blocks
LR, DECAY, NORM = 3e-3, 0.1, 1.3
STEPS = 50


@dataclass(frozen=True)
class Plan:
    """What is compared: with which accumulation, for how long."""

    stages: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = STEPS
    accumulate: int = 1
    no_sync: bool = False
    bf16: bool = False
    exact: bool = False  # whether float64 is wanted as well
    every: bool = False  # whether gradients and parameters of every step are kept
    rows: int = 4
    bucket_bytes: int = 100_000  # several buckets below stage 3
    seed: int = 0
    reduce: str = "mean"

    @property
    def policy(self) -> MixedPrecisionPolicy | None:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if self.bf16 else None


@dataclass
class Run:
    """One rank's losses and norms, and the whole parameters at the end; if asked for, all elements after each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    every_grad: list[Tensor] = field(default_factory=list)
    every_param: list[Tensor] = field(default_factory=list)


def windows(plan: Plan, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Arithmetic sequences of bytes: something that 50 steps learn."""
    generator = torch.Generator().manual_seed(((step + 1000 * plan.seed) * 64 + micro) * 16 + rank)
    first = torch.randint(256, (plan.rows // plan.accumulate, 1), generator=generator)
    stride = torch.randint(1, 4, (plan.rows // plan.accumulate, 1), generator=generator)
    text = (first + stride * torch.arange(SHAPE.context + 1)) % 256
    return text[:, :-1], text[:, 1:]


def groups(params: Iterable[Tensor]) -> list[dict]:
    """Matrices decay, norms do not."""
    params = list(params)
    decayed = [param for param in params if param.ndim >= 2]
    return [
        {"params": decayed, "weight_decay": DECAY},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def train(
    plan: Plan,
    rank: int,
    call: Callable,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    params: Callable[[], dict[str, Tensor]] | None = None,
    holds: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    finish: Callable[[], None] = lambda: None,
    clip: Callable[[], Tensor | None] = lambda: None,
    scale: float = 1.0,
) -> Run:
    """`call`: the forward of `model`; `params`: its parameters, whole; `finish`: what reduces gradients."""
    run = Run()
    params = params or (lambda: {name: param.detach().clone() for name, param in model.named_parameters()})
    for step in range(plan.steps):
        losses = []
        for micro in range(plan.accumulate):
            last = micro == plan.accumulate - 1
            with holds() if plan.no_sync and not last else contextlib.nullcontext():
                loss = call(*windows(plan, step, micro, rank)) / plan.accumulate
                (loss if scale == 1.0 else loss * scale).backward()
            losses.append(loss.item())
        finish()
        if plan.every:
            run.every_grad.append(flat({name: whole(param.grad) for name, param in model.named_parameters()}))
        norm = clip()
        step_and_zero(optimizer)
        run.losses.append(math.fsum(losses))
        run.norms.append(float(getattr(optimizer, "grad_norm", math.nan) if norm is None else norm))
        if plan.every:
            run.every_param.append(flat(params()))
    run.params = params()
    return run


def whole(grad: Any) -> Tensor:
    return grad.gather_full(grad) if getattr(grad, "gather_full", None) else grad


def clipping(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return zk.AdamW(groups(params), lr=LR, max_grad_norm=NORM)


def sharded(world: World, plan: Plan, start: GPT, stage: int) -> Run:
    model = world.shard(
        copy.deepcopy(start), stage=stage, mp_policy=plan.policy, bucket_bytes=plan.bucket_bytes, reduce=plan.reduce
    )
    optimizer, scale = clipping(model.parameters()), 1.0 if plan.reduce == "mean" else 1.0 / world.size
    holds = lambda: zk.no_sync(model)  # noqa: E731
    return train(plan, world.rank, model, model, optimizer, params=lambda: full(model), holds=holds, scale=scale)


def under_ddp(world: World, plan: Plan, start: GPT) -> Run:
    model = copy.deepcopy(start)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return train(plan, world.rank, wrapped, model, clipping(model.parameters()), holds=wrapped.no_sync)


def under_fsdp2(world: World, plan: Plan, start: GPT) -> Run:
    model, mesh = copy.deepcopy(start), init_device_mesh("cpu", (world.size,))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=plan.policy or MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=LR)

    def clip() -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).full_tensor()

    def params() -> dict[str, Tensor]:
        return {name: param.full_tensor().detach() for name, param in model.named_parameters()}

    return train(plan, world.rank, model, model, optimizer, params=params, clip=clip)


class Wide(nn.Module):
    """The GPT in float64: its own forward computes the loss in fp32."""

    def __init__(self, start: GPT) -> None:
        super().__init__()
        self.gpt = copy.deepcopy(start).double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        gpt = self.gpt
        x = gpt.tokens(tokens) + gpt.positions.weight[: tokens.shape[1]]
        for block in gpt.blocks:
            x = block(x)
        logits = nn.functional.linear(gpt.norm(x), gpt.tokens.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_float64(world: World, plan: Plan, start: GPT) -> Run:
    model = Wide(start)
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=LR)
    return train(
        plan,
        world.rank,
        model,
        model.gpt,
        optimizer,
        finish=lambda: world.average_gradients(model.parameters()),
        clip=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), NORM),
    )


@ranked
def compare(world: World, plan: Plan) -> dict[Any, Run]:
    """All runs of a plan on this rank: "peer", "float64" where it is wanted, and one for each stage."""
    start = built(lambda: GPT(SHAPE))
    runs: dict[Any, Run] = {"peer": (under_fsdp2 if plan.bf16 else under_ddp)(world, plan, start)}
    if plan.exact:
        runs["float64"] = in_float64(world, plan, start)
    return {**runs, **{stage: sharded(world, plan, start, stage) for stage in plan.stages}}


def same_bits(ours: Run, peer: Run) -> None:
    """The first verdict: every loss and every parameter; the norm but for the order of its float64 sum."""
    assert ours.losses == peer.losses, f"step {first_difference(ours.losses, peer.losses)} is the first that differs"
    assert torch.allclose(*map(torch.DoubleTensor, (ours.norms, peer.norms)), rtol=1e-12, atol=0.0)
    assert list(ours.params) == list(peer.params)
    differ = [name for name, value in ours.params.items() if not torch.equal(value, peer.params[name])]
    assert not differ, f"{differ} differ at the end"


def first_difference(left: list[float], right: list[float]) -> int:
    return next(step for step, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


def as_close(ours: Run, peer: Run, exact: Run, of_parameters: bool = True) -> None:
    """The second verdict: no further from float64 than twice the peer's own error."""
    mine, theirs = (rms(torch.tensor(run.losses), torch.tensor(exact.losses)) for run in (ours, peer))
    assert mine <= 2 * theirs, f"losses are off by {mine:.3g}, the peer's by {theirs:.3g}"
    if of_parameters:
        mine, theirs = (rms(flat(run.params), flat(exact.params)) for run in (ours, peer))
        assert mine <= 2 * theirs, f"parameters are off by {mine:.3g}, the peer's by {theirs:.3g}"


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for _, value in sorted(values.items())])


def rms(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).square().mean().sqrt())
