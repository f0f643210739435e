"""Where a test runs: alone, on threads that play ranks, or on real ranks that gloo joins over the loopback.

A function that is `@ranked` gets a World as its first argument in all three; what the library allocates is poisoned.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "comm"))

import ranks  # noqa: E402
from ranks import RanksFailed, run_ranks  # noqa: E402

import zerokern as zk  # noqa: E402

ranks.PRELOAD += " torch._dynamo torch.distributed.fsdp"  # two seconds in each rank, if they import it themselves

__all__ = [
    "SHARDED",
    "STAGES",
    "RanksFailed",
    "World",
    "alone",
    "anywhere",
    "built",
    "everywhere",
    "for_each",
    "full",
    "on_hybrid_threads",
    "on_ranks",
    "on_threads",
    "ranked",
    "refusal",
    "says",
    "step_and_zero",
]

BUILDING = threading.Lock()

STAGES, SHARDED = (0, 1, 2, 3), (1, 2, 3)


@dataclass(frozen=True)
class World:
    """One rank's view of who takes part. `mesh` is what zk.shard is given: None is the process group, or nobody.

    `layout`: a DeviceMesh of these ranks for zk.shard, where they are real ones.
    """

    rank: int
    size: int
    mesh: Any = None
    layout: Any = None

    @classmethod
    def of(cls, where: World | int) -> World:
        if isinstance(where, World):
            return where
        poison()
        return cls(where, dist.get_world_size())

    def shard(self, model: nn.Module, **settings: Any) -> nn.Module:
        return zk.shard(model, mesh=self.mesh if self.layout is None else self.layout, **settings)

    def exchange(self, value: Any) -> list:
        """The values of all ranks; none of them may be a tensor."""
        if self.size == 1:
            return [value]
        if self.mesh is not None:
            return self.mesh.everyone.exchange(value)
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def total(self, tensor: Tensor) -> Tensor:
        if self.size > 1 and self.mesh is not None:
            self.mesh.everyone.all_reduce(tensor).wait()
        elif self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, value: float | Tensor) -> float:
        number = value.item() if isinstance(value, Tensor) else value
        return float(self.total(torch.tensor(number, dtype=torch.float64)) / self.size)

    def average_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """What data parallelism means: the mean over ranks, nothing where no rank has a gradient."""
        params = list(params)
        present = torch.tensor(self.exchange([p.grad is not None for p in params])).reshape(self.size, -1).any(0)
        for param, somewhere in zip(params, present.tolist(), strict=True):
            if somewhere:
                mine = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad = self.total(mine.detach().clone()) / self.size


def ranked(function: Callable) -> Callable:
    @functools.wraps(function)
    def inside(where: World | int, *arguments: Any) -> Any:
        return function(World.of(where), *arguments)

    return inside


@functools.cache
def poison() -> None:
    """What tests/conftest.py does to the memory that the library asks for, in a rank's own process."""
    spec = importlib.util.spec_from_file_location("harness", TESTS / "conftest.py")
    assert spec and spec.loader
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    harness.poison_memory(str(Path(zk.__file__).parent), setattr)


def alone(function: Callable, *arguments: Any) -> list:
    return [function(World(0, 1), *arguments)]


def on_threads(size: int, function: Callable, *arguments: Any, timeout: float = 120.0) -> list:
    from fake_world import FakeWorld

    def one(group: Any) -> Any:
        return function(World(group.rank, size, group), *arguments)

    return FakeWorld(size, timeout=timeout).run(one)


def on_hybrid_threads(replicas: int, shards: int, function: Callable, *arguments: Any, timeout: float = 120.0) -> list:
    """As `on_threads`, in two dimensions: rank `shards * r + s` is the s-th of replica r."""
    from fake_world import FakeWorld

    from zerokern.comm.hybrid import HybridGroup

    everyone = FakeWorld(replicas * shards, timeout=timeout)
    rows = [FakeWorld(shards, timeout=timeout) for _ in range(replicas)]
    columns = [FakeWorld(replicas, timeout=timeout) for _ in range(shards)]
    for world in (*rows, *columns):
        world.tied.append(everyone)
        everyone.tied.append(world)

    def one(group: Any) -> Any:
        replica, shard = divmod(group.rank, shards)
        hybrid = HybridGroup(rows[replica].groups[shard], columns[shard].groups[replica])
        return function(World(group.rank, group.size, hybrid), *arguments)

    return everyone.run(one)


def on_ranks(size: int, function: Callable, *arguments: Any, **settings: Any) -> list:
    return run_ranks(size, function, *arguments, **settings)


def for_each(rank: int, function: Callable, rows: Iterable[Any]) -> list:
    """`function` with each of the rows, in one launch of ranks; an error names its row."""
    found = []
    for row in rows:
        try:
            found.append(function(rank, row))
        except Exception as error:
            raise AssertionError(f"with {row}") from error
    return found


def anywhere(size: int, function: Callable, *arguments: Any) -> list:
    """Alone where one is enough, on threads otherwise: what a wide matrix can afford."""
    return alone(function, *arguments) if size == 1 else on_threads(size, function, *arguments)


def everywhere(*sizes: int, **axes: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Makes `work(world, *row)` a test: on as many ranks as `sizes` says, with every combination of values of `axes`.

    An error names its row. Called with a World, as by what runs on real ranks, the test is the work itself.
    """

    def decorate(work: Callable) -> Callable:
        def test(*given: Any) -> None:
            if given:
                return work(*given)
            for size, *row in itertools.product(sizes, *axes.values()):
                torch.manual_seed(0)
                try:
                    anywhere(size, work, *row)
                except BaseException as error:
                    error.add_note(f"on {size} ranks, {dict(zip(axes, row, strict=True))}")
                    raise
            return None

        test.__name__, test.__qualname__, test.__doc__ = work.__name__, work.__qualname__, work.__doc__
        test.__module__ = work.__module__
        return test

    return decorate


def built(build: Callable[[], Any], seed: int = 0) -> Any:
    """The same values on every rank and thread."""
    with BUILDING:
        kept = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            return build()
        finally:
            torch.set_rng_state(kept)


def step_and_zero(*optimizers: Any) -> None:
    for one in optimizers:
        one.step()
        one.zero_grad()


def full(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters by name, copied."""
    with zk.gathered(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def refusal(work: Callable[[], Any], kinds: type | tuple[type, ...] = Exception) -> str:
    """What the error says that `work` must raise."""
    try:
        work()
    except kinds as error:
        return str(error)
    raise AssertionError(f"nothing was refused; one of {kinds} was expected")


def says(message: str, words: Sequence[str]) -> None:
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
