"""What ranks launch on a device's two communicators in real steps, and that it ends in any hardware queues."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library_double import DoubleGroup, LibraryDouble
from module_cases import Mixture, routed
from queue_machine import Call, apart, one_queue, stuck
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, built, on_threads, step_and_zero
from zero_cases import OUT, WIDTH, Case, Net, follow, mse

import zerokern as zk
from zerokern.comm import collectives, common, joining
from zerokern.comm.device import DeviceGroup
from zerokern.comm.hybrid import HybridGroup

CUDA = torch.device("cuda", 0)
Rows = dict[str, list[list[int]]]  # by the name of a dimension, the ranks that form a group each


class Wires:
    """Ranks that are threads, over the stand-in of a device's library; what each of them launched and waited for."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.size = sum(map(len, next(iter(rows.values()))))
        self.logs: list[list[tuple]] = [[] for _ in range(self.size)]
        self._doubles = {
            (name, tuple(row)): LibraryDouble(len(row), "new", name) for name in rows for row in rows[name]
        }
        self._making = threading.local()

    def module(self) -> SimpleNamespace:
        """What `torch.distributed` is to the code under test: each call goes to the double of its group."""

        def sent(name: str) -> Callable[..., Any]:
            return lambda *args, group, **how: getattr(group.world, name)(*args, group=group, **how)

        there = {name: sent(name) for name in ("all_reduce", "all_to_all", "broadcast")}
        there |= {"all_gather_single": sent("gather"), "reduce_scatter_single": sent("scatter")}
        there |= {"get_rank": lambda pg: pg.rank, "get_world_size": lambda pg: pg.size}
        there |= {"ReduceOp": dist.ReduceOp, "distributed_c10d": dist.distributed_c10d, "PrefixStore": dist.PrefixStore}
        return SimpleNamespace(**there, HashStore=lambda: self._making.store)

    def group(self, rank: int, name: str, current: Callable[[], str]) -> DeviceGroup:
        row = next(row for row in self.rows[name] if rank in row)
        double = self._doubles[name, tuple(row)]
        pg, lane = (DoubleGroup(double, row.index(rank), number) for number in (0, 1))
        for one in (pg, lane):
            one.log, one.current, one.size = self.logs[rank], current, len(row)
        double.groups[pg.rank] = pg
        self._making.store = double.store
        shared = joining._common(pg, CUDA)
        shared.lane = lane
        return DeviceGroup(pg, shared, torch.device("cpu"), name)

    def _mesh_of(self, groups: Sequence[DeviceGroup], device: Any) -> Any:
        """What zk.shard is given: the only group, one of two dimensions, or any by name."""
        if len(groups) == 1:
            return groups[0]
        if {*self.rows} != {"shard", "replicas"}:
            return dict(zip(self.rows, groups, strict=True))
        hybrid = HybridGroup(*groups)
        hybrid._driver = device  # as on a GPU
        return hybrid

    def run(self, fn: Callable[[World, Any], None], *, played: bool = False) -> list[list[Call]]:
        """fn(world, device) on all ranks, a thread each; returns what each rank called."""
        errors: list[BaseException] = []

        def live(rank: int) -> None:
            device = HostComputes() if played else None
            current = (lambda: "compute") if device is None else lambda: device._this_or_current(None).name
            try:
                groups = [self.group(rank, name, current) for name in self.rows]
                fn(World(rank, self.size, self._mesh_of(groups, device)), device)
            except BaseException as error:
                errors.append(error)
            finally:
                if device is not None:
                    gc.collect()
                    device.close()

        threads = [threading.Thread(target=live, args=(rank,), name=f"double {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error
        return [[Call(*row) for row in log] for log in self.logs]


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Rows], Wires]]:
    def make(rows: Rows) -> Wires:
        made = Wires(rows)
        for module in (collectives, common, joining):
            monkeypatch.setattr(module, "dist", made.module())
        return made

    return make


PAIR: Rows = {"shard": [[0, 1]]}
GRID: Rows = {"shard": [[0, 1], [2, 3]], "replicas": [[0, 2], [1, 3]]}


def steps(
    world: World, device: Any, stage: int, *, accumulate: bool = False, clips: bool = False, **given: Any
) -> None:
    """Two steps, of passes under no_sync and reduced ones."""
    model = built(Net)
    for param in model.parameters() if device is not None else ():
        device.own(param)
    rests = {"tier": "cpu"} if device is not None and stage == 3 else {}
    world.shard(model, stage=stage, bucket_bytes=700, **rests)
    opt = zk.AdamW(model.parameters(), lr=1e-2, **given)
    for step in range(3):
        for last in (False, True) if accumulate else (True,):
            with nullcontext() if last or step == 1 else zk.no_sync(model):
                mse(model, step, world).backward()
        if clips:
            zk.clip_grad_norm_(model, 0.1)
        step_and_zero(opt)
    opt.flush()
    del model, opt


def launches(program: Sequence[Call], *, worker: bool) -> list[tuple[Any, int]]:
    found = [call for call in program if call.verb == "launch" and (call.stream == "publish") == worker]
    return [(call.communicator, call.count) for call in found]


def ends_in_one_order(programs: Sequence[Sequence[Call]], rows: Rows) -> None:
    """One order of launches on all ranks, on both communicators together; so it ends in the worst queues."""
    first = launches(programs[0], worker=False)
    assert {lane for (_, lane), _ in first} == {0, 1} and len(first) > 20, "both communicators"
    assert all(launches(program, worker=False) == first for program in programs)
    for ordered in (False, True):
        assert not stuck(programs, one_queue, ranks=rows, ordered=ordered)


PLAIN: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (2, {"max_grad_norm": 0.1}), (3, {"max_grad_norm": 0.1}),
    (2, {"accumulate": True}), (3, {"accumulate": True, "clips": True}),
]  # fmt: skip


@each("stage, given", PLAIN)
def test_one_thread_launches_in_one_order(stage: int, given: dict[str, Any], wires: Any) -> None:
    programs = wires(PAIR).run(lambda world, device: steps(world, device, stage, **given))
    ends_in_one_order(programs, PAIR)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_dimensions_too(stage: int, wires: Any) -> None:
    programs = wires(GRID).run(lambda world, device: steps(world, device, stage, max_grad_norm=0.1))
    ends_in_one_order(programs, GRID)


@each("rows", [PAIR, GRID])
def test_gathers_and_reductions_from_side_streams(rows: Rows, wires: Any) -> None:
    """Parameters and state in host memory: each from a stream of its own, and launched by one thread all the same."""
    programs = wires(rows).run(
        lambda world, device: steps(world, device, 3, accumulate=True, tier="cpu", schedule="overlap"), played=True
    )
    ends_in_one_order(programs, rows)
    streams = {call.stream for program in programs for call in program if call.verb == "launch"}
    assert {"gather", "reduce"} <= streams <= {"compute", "gather", "reduce"}


@each("schedule", ["sync", zk.Delayed(after=1)])
def test_other_schedules_publish_from_the_programs_thread(schedule: Any, wires: Any) -> None:
    programs = wires(PAIR).run(
        lambda world, device: steps(world, device, 2, tier="cpu", schedule=schedule), played=True
    )
    ends_in_one_order(programs, PAIR)


def test_a_worker_launches_what_it_publishes_in_one_order_of_its_own(wires: Any) -> None:
    """When, relative to the program's thread, no rank knows of another: that wants a queue for each stream."""
    programs = wires(PAIR).run(
        lambda world, device: steps(world, device, 2, tier="cpu", schedule="overlap", max_grad_norm=0.1), played=True
    )
    for worker in (False, True):
        first, second = (launches(program, worker=worker) for program in programs)
        if worker:
            assert first and {lane for (_, lane), _ in first} == {1}
            first, second = ([count for _, count in one] for one in (first, second))
        assert first == second
    assert not stuck(programs, apart)


def test_experts_that_some_ranks_choose(wires: Any) -> None:
    """Ranks compute different graphs; a unit's bucket is reduced before the next unit is gathered, full or not."""

    def chosen(world: World, device: Any) -> None:
        model = world.shard(built(Mixture), stage=3, bucket_bytes=700)
        opt = zk.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            routed(model, step, world).backward()
            step_and_zero(opt)

    ends_in_one_order(wires(PAIR).run(chosen), PAIR)


SPARSE: Rows = {"dense": [[0, 1, 2, 3]], "experts": [[0, 2], [1, 3]], "copies": [[0, 1], [2, 3]]}


@pytest.mark.parametrize("stage", [2, 3])
def test_experts_with_ranks_of_their_own(stage: int, wires: Any) -> None:
    """Six communicators: the model is divided among all ranks, experts among two, beside two with copies of them."""

    def trained(world: World, device: Any) -> None:
        model, groups = built(Mixture), world.mesh
        sparse = HybridGroup(groups["experts"], groups["copies"])
        zk.shard(model, stage=stage, mesh={model: groups["dense"], **{gate.experts: sparse for gate in model.layers}})
        opt = zk.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.1)
        for step in range(3):
            routed(model, step, world).backward()
            step_and_zero(opt)

    programs = wires(SPARSE).run(trained)
    names = {name for (name, _), _ in launches(programs[0], worker=False)}
    assert names == {*SPARSE}
    ends_in_one_order(programs, SPARSE)


FINE = 200  # bytes of a bucket, so that what the root ends with is apart from what it begins with


class Aided(Net):
    """Parameters of no unit that only some passes of some ranks use, where the backward begins."""

    def __init__(self) -> None:
        super().__init__(blocks=6)
        self.aid = nn.Linear(WIDTH, OUT)
        self.aids = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.enter(x))
        return self.leave(x) + self.aid(x) if self.aids else self.leave(x)


def aided(model: Any, step: int, world: World) -> Tensor:
    """All ranks in the first pass, from which the order of buckets was learned; then one of them, none, the other."""
    model.aids = (True, world.rank == 0, False, world.rank == 1)[step]
    return mse(model, step, world)


@each("stage", [1, 2, 3])
def test_a_parameter_of_no_unit_that_some_ranks_leave_out(stage: int) -> None:
    """Its bucket kept all others of that rank back to the end of the pass, and at stage 3 ranks waited for each other's
    reductions and gathers for ever: CPUs refused it, GPUs would have hung."""
    case = Case("aided", Aided, aided, steps=4)
    on_threads(2, lambda world: follow(world, case, stage=stage, bucket_bytes=FINE), timeout=30)


def test_a_parameter_of_no_unit_that_some_ranks_leave_out_on_devices(wires: Any) -> None:
    def trained(world: World, device: Any) -> None:
        model = world.shard(built(Aided), stage=3, bucket_bytes=FINE)
        opt = zk.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            aided(model, step, world).backward()
            step_and_zero(opt)

    ends_in_one_order(wires(PAIR).run(trained), PAIR)


def test_the_log_is_of_what_ran(wires: Any) -> None:
    """Or the tests above would prove nothing: a rank that launches the other way round is found."""

    def turned(world: World, device: Any) -> None:
        group, bucket, full = world.mesh, torch.ones(4), torch.ones(4)
        acts = [lambda: group.reduce_scatter(bucket, torch.empty(2)), lambda: group.all_gather(full)]
        handles = [act() for act in (acts if world.rank else reversed(acts))]
        for handle in handles:
            handle.wait()

    programs = wires(PAIR).run(turned)
    assert stuck(programs, one_queue) and not stuck(programs, apart)
    with pytest.raises(AssertionError):
        ends_in_one_order(programs, PAIR)
