"""Random programs with zk.Muon: the bits of one process on any ranks, and what torch.optim.Muon's statements do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_programs import Layout, Program, Training, drawn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from worlds import World, alone, full, on_hybrid_threads, on_ranks, on_threads, poison

import zerokern as zk
from zerokern.kernels import decode_int8, join

FEW = [3, 5, 8, 13, 21]
MANY = pytest.param(range(100, 250), marks=pytest.mark.slow, id="many")


@contextmanager
def named(program: Program) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {program.seed}: {program}")
        raise


# Against the definition.


def exact(opt: Any, param: Tensor) -> Tensor:
    """What a parameter stands for, with its master or remainder."""
    entry = opt.state.get(param, {})
    if "master" in entry:
        return entry["master"].double()
    return (join(param.detach(), entry["remainder"]) if "remainder" in entry else param.detach()).double()


def average(opt: Any, param: Tensor) -> Tensor:
    entry = opt.state.get(param, {})
    buffer = entry.get("momentum_buffer", torch.zeros(param.shape))
    if "momentum_buffer_scale" in entry:
        buffer = decode_int8(buffer, entry["momentum_buffer_scale"]).view(param.shape)
    return buffer.double()


def iterated(u: Tensor, group: dict[str, Any]) -> Tensor:
    """torch's iteration, in torch's words, but for the dtype."""
    dtype = torch.bfloat16 if group["ns_dtype"] == "bf16" else torch.float32
    a, b, c = group["ns_coefficients"]
    x = u.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / (u.norm().clamp(min=group["eps"])).to(dtype)
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).double()


def adjusted(lr: float, group: dict[str, Any], shape: torch.Size) -> float:
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return lr * 0.2 * max(rows, columns) ** 0.5
    return lr * max(1, rows / columns) ** 0.5


ROUNDING = {
    torch.float32: 2**-22,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
    torch.int16: 2**-22,
    torch.int8: 2**-14,
}
CLOSE = {"fp32": 1e-6, "bf16": 2**-7, "int8": 0.02}
UNCLEAR = 0.02  # singular values below this, of a norm of 1: bf16's roundings are as large


class Definition:
    """Watches an optimizer's steps; each has to do what the definition does to what was there before it."""

    def __init__(self, training: Training) -> None:
        self.training, self.compared = training, 0
        self.written: set[int] = set()  # parameters that were, and that no step has changed since

    @contextmanager
    def watch(self, opt: Any) -> Iterator[None]:
        if not isinstance(opt, zk.Muon):
            yield
            return
        rows = [(group, param) for group in opt.param_groups for param in group["params"]]
        if self.training.written:
            self.written |= {id(param) for _, param in rows}
        grads = [None if param.grad is None else param.grad.double() for _, param in rows]
        stands = [(param.detach().double() if id(param) in self.written else exact(opt, param)) for _, param in rows]
        shown = [(average(opt, param), param.detach().clone()) for _, param in rows]
        present = [grad for grad in grads if grad is not None]
        scale = self.scale(opt, present)
        yield
        finite = all(bool(grad.isfinite().all()) for grad in present)
        for (group, param), grad, value, (mean, before) in zip(rows, grads, stands, shown, strict=True):
            if grad is None or not finite:
                assert torch.equal(before, param) and torch.equal(mean, average(opt, param))
            elif param.numel():
                self.written.discard(id(param))
                self.compare(opt, group, param, grad * scale, value, mean)

    def scale(self, opt: Any, present: Sequence[Tensor]) -> float:
        scaler = self.training.scaler
        scale = 1.0 / scaler.get_scale() if scaler is not None and self.training.program.clips is None else 1.0
        norm = float(sum(grad.square().sum() for grad in present)) ** 0.5 * scale
        return scale if opt.max_grad_norm is None else scale * min(1.0, opt.max_grad_norm / (norm + 1e-6))

    def compare(
        self, opt: Any, group: dict[str, Any], param: Tensor, grad: Tensor, value: Tensor, mean: Tensor
    ) -> None:
        momentum, lr, kept = group["momentum"], float(group["lr"]), opt.state[param]
        mean = mean.lerp(grad, 1 - momentum)
        assert bool(
            ((average(opt, param) - mean).abs() <= CLOSE[group["state_format"]] * mean.abs().max() + 1e-12).all()
        ), "the average"
        u = grad.lerp(mean, momentum) if group["nesterov"] else mean
        parts = [one.reshape(-1, one.size(-1)) for one in u.reshape(-1, param.size(-1)).chunk(group["split"])]
        rate = adjusted(lr, group, parts[0].shape)
        change = torch.cat([iterated(one, group) * rate for one in parts]).view(param.shape)
        after = value * (1 - lr * group["weight_decay"]) - change
        least = min(float(torch.linalg.svdvals(one)[-1] / one.norm().clamp(min=1e-30)) for one in parts)
        coarse = group["ns_dtype"] == "bf16" or group["state_format"] == "int8"
        close = 2e-3 if not coarse else 0.15 if least > UNCLEAR else 2.0
        stored = torch.float32 if "master" in kept else kept["remainder"].dtype if "remainder" in kept else param.dtype
        bound = after.abs() * ROUNDING[stored] + rate * close + (1e-7 if param.dtype is torch.float16 else 1e-9)
        assert bool(((exact(opt, param) - after).abs() <= bound).all()), "the parameter"
        self.compared += 1


def follow(program: Program) -> int:
    training = Training(program, None, Layout())
    definition = Definition(training)
    training.watch = definition.watch
    for step in range(program.steps):
        training.step(step)
    return definition.compared


@pytest.mark.parametrize("seeds", [pytest.param(FEW, id="few"), MANY])
def test_the_definition(seeds: Sequence[int]) -> None:
    compared = 0
    for seed in seeds:
        program = drawn(seed)
        with named(program):
            compared += follow(program)
    assert compared >= 3 * len(seeds)


# Against one process.


ALONE = World(0, 1)


def expected_of(program: Program, layout: Layout, world: World = ALONE) -> list[dict[str, Tensor]]:
    """Parameters and state after each step, in one process.

    A gradient that is clipped is rounded once more where all of it is here, and not where ranks have parts of it.
    """
    stage = 1 if program.clips is not None and layout.stage else None
    found, one = [], Training(program, world, Layout(stage=stage))
    for step in range(program.steps):
        one.step(step)
        found.append(one.values())
    return found


def far(mine: Tensor, theirs: Tensor) -> float:
    return (mine.double() - theirs.double()).abs().max().item() if mine.shape == theirs.shape else math.inf


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    unlike = {name: far(mine[name], one) for name, one in theirs.items() if not torch.equal(mine[name], one)}
    assert not unlike, f"{what}: {unlike}"


def params_of(training: Training, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values[name] for name, _ in training.model.named_parameters()}


def shown(training: Training) -> dict[str, Tensor]:
    if training.layout.stage is None:
        return {name: param.detach() for name, param in training.model.named_parameters()}
    return full(training.model)


def train(training: Training, steps: range, expected: list[dict[str, Tensor]]) -> None:
    for step in steps:
        training.step(step)
        if step % 2 and training.layout.schedule in ("sync", "overlap"):
            same(shown(training), params_of(training, expected[step]), f"after step {step}")


def straight(world: World, program: Program, expected: list[dict[str, Tensor]]) -> None:
    """All of a program where its first layout says."""
    training = Training(program, world, program.layouts[0][1])
    train(training, range(program.steps), expected)
    training.flush()
    same(shown(training), params_of(training, expected[-1]), "at the end")
    same(training.values(), expected[-1], "state at the end")


@pytest.mark.parametrize("seeds", [pytest.param(FEW, id="few"), MANY])
def test_any_ranks_have_the_bits_of_one_process(seeds: Sequence[int]) -> None:
    for seed in seeds:
        program = drawn(seed)
        with named(program):
            layout = program.layouts[0][1]
            expected = expected_of(program, layout)
            shards = layout.size // layout.replicas
            if layout.size == 1:
                alone(straight, program, expected)
            elif layout.replicas > 1:
                on_hybrid_threads(layout.replicas, shards, straight, program, expected, timeout=30)
            else:
                on_threads(layout.size, straight, program, expected, timeout=30)


@pytest.mark.parametrize("seeds", [range(1000, 1001), pytest.param(range(1001, 1020), marks=pytest.mark.slow)])
def test_eight_ranks(seeds: Sequence[int]) -> None:
    for seed in seeds:
        program = drawn(seed, sizes=(8,))
        with named(program):
            layout = replace(program.layouts[0][1], replicas=1)
            on_threads(8, straight, replace(program, layouts=((0, layout),)), expected_of(program, layout), timeout=60)


# Saved and resumed elsewhere.


class Places:
    """Of real ranks, the first so many: alone or side by side, or as two replicas."""

    def __init__(self, rank: int, most: int) -> None:
        self.rank = rank
        self.groups = {size: dist.new_group(list(range(size))) for size in range(1, most + 1)}
        each = [dist.new_group([one]) for one in range(most)]
        self.alone = World(0, 1, None, DeviceMesh.from_group(each[rank], "cpu"))
        made = {(size, 1): [list(range(size))] for size in range(1, most + 1)}
        made |= {(size, 2): torch.arange(size).view(2, -1).tolist() for size in range(2, most + 1, 2)}
        self.meshes = {key: self._mesh(*key, ranks) for key, ranks in made.items()}

    def _mesh(self, size: int, replicas: int, ranks: list[list[int]]) -> Any:
        if replicas == 1:
            return DeviceMesh.from_group(self.groups[size], "cpu") if self.rank < size else None
        return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))

    def world(self, layout: Layout) -> World:
        return World(self.rank, layout.size, None, self.meshes[layout.size, layout.replicas])


def handed_on(places: Places, program: Program, folder: Path) -> None:
    expected = expected_of(program, program.layouts[0][1], places.alone)
    ends = [begin for begin, _ in program.layouts[1:]] + [program.steps]
    following = [layout.schedule for _, layout in program.layouts[1:]] + ["delayed"]
    for (begin, layout), end, schedule in zip(program.layouts, ends, following, strict=True):
        if places.rank < layout.size:
            group = places.groups[layout.size]
            training = Training(program, places.world(layout), layout, begin)
            if begin:
                zk.load(folder / str(begin), training.model, training.opts, extra=training.extra(), group=group)
            train(training, range(begin, end), expected)
            if layout.flush or not schedule.startswith("delayed"):
                training.flush()
            zk.save(folder / str(end), training.model, training.opts, training.extra(), group=group)
            training.flush()
            same(shown(training), params_of(training, expected[end - 1]), f"at step {end}")
        if places.rank == 0:
            plain = Training(program, None, Layout(schedule="delayed 0"), end)
            zk.load(folder / str(end), plain.model, plain.opts, extra=plain.extra(), group=places.groups[1])
            plain.flush()
            found = plain.values()
            assert found.keys() == expected[end - 1].keys(), found.keys() ^ expected[end - 1].keys()
            same(found, expected[end - 1], f"loaded at step {end} from {layout}")
        dist.barrier()


def handed_on_all(rank: int, seeds: Sequence[int], folder: str) -> None:
    poison()
    torch.set_num_threads(1)
    places = Places(rank, 4)
    for seed in seeds:
        program = drawn(seed)
        with named(program):
            handed_on(places, program, Path(folder) / str(seed))


@pytest.mark.parametrize("seeds", [pytest.param(FEW[:1], id="few"), MANY])
def test_saved_and_resumed_on_other_ranks(seeds: Sequence[int], tmp_path: Path) -> None:
    on_ranks(4, handed_on_all, list(seeds), str(tmp_path), timeout=600)
