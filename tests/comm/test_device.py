"""The path of devices, over a stand-in for torch.distributed: which calls, on which communicator, and where."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_cases import REDUCTIONS, gather, refused, values
from fake_world import FakeWorld
from library_double import LibraryDouble
from ranks import run_ranks
from tables import each

from zerokern.comm import Group, collectives, common, device, group_on, joining
from zerokern.comm.device import DeviceGroup
from zerokern.comm.operations import Ledger, Operation
from zerokern.debug import watch
from zerokern.debug.agreement import Agreement, Failure

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    """run(double, act): act(group) on every rank, a thread each."""

    def run(double: LibraryDouble, act: Callable[[Group], Any]) -> list:
        module = double.module()
        monkeypatch.setattr(collectives, "dist", module)
        for one in (joining, common):
            monkeypatch.setattr(one, "dist", module)
        results: list = [None] * double.size

        def live(rank: int) -> None:
            pg = double.groups[rank]
            # its tensors lie on the CPU, all else is as on a device
            group = DeviceGroup(pg, joining._common(pg, CUDA), CPU, "double")
            try:
                results[rank] = act(group)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=live, args=(r,), name=f"double {r}") for r in range(double.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run


def everything(group: Group) -> list[torch.Tensor]:
    results = [gather(group, span, torch.bfloat16, place) for span in (0, 300) for place in ("own", "apart")]
    x = torch.arange(100) + group.rank
    group.all_reduce(x, "max").wait()
    y = torch.full((3,), float(group.rank))
    group.broadcast(y, 1).wait()
    group.barrier()
    return [*results, x, y, torch.tensor(group.exchange([group.rank, "x" * group.rank])[-1][0])]


@each("names", ["old", "both", "new"])
def test_torch_of_every_version_gives_the_same_and_warns_nobody(run, names: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        real = run(LibraryDouble(3, names), everything)
    for ours, theirs in zip(real, FakeWorld(3).run(everything), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@each("case", REDUCTIONS)
def test_sums_differ_from_the_slow_twins_by_the_librarys_rounding(run, case) -> None:
    """The library rounds to the bucket's dtype after each of two additions, fp16 also before them."""
    for rank, (ours, twin) in enumerate(
        zip(run(LibraryDouble(3, "new"), case.run), FakeWorld(3).run(case.run), strict=True)
    ):
        parts = [values(r, 3 * case.span, case.source)[rank * case.span : (rank + 1) * case.span] for r in range(3)]
        size = sum(case.scale * part.double().abs() for part in parts)
        bound = 4 * torch.finfo(case.source).eps * size + torch.finfo(case.target).eps * twin.double().abs()
        # fp16's scaled parts may be subnormal
        assert ((ours.double() - twin.double()).abs() <= bound + 4 * torch.finfo(torch.float16).smallest_normal).all()


def exchanged(group: Group) -> tuple[list[list[float]], int]:
    """What each rank has received, where rank r sends `r * s` elements to rank s, and what it has sent to others."""
    sends = [torch.arange(group.rank * rank, dtype=torch.bfloat16) + group.rank for rank in range(group.size)]
    receives = [torch.empty(rank * group.rank, dtype=torch.bfloat16) for rank in range(group.size)]
    before = group.traffic.total("other")
    group.all_to_all(receives, sends).wait()
    group.all_to_all(sends, [one + 1 for one in receives]).wait()
    return [one.tolist() for one in (*receives, *sends)], group.traffic.total("other") - before


def on_group(rank: int) -> tuple[list[list[float]], int]:
    return exchanged(group_on())


def straight(group: Group) -> tuple[int, int]:
    bucket = torch.ones(group.size * 8)
    mine = bucket[group.rank * 8 : (group.rank + 1) * 8]
    group.reduce_scatter(bucket, mine).wait()
    full = torch.ones(group.size * 8)
    group.all_gather(full).wait()
    return mine.data_ptr(), full.data_ptr()


def test_what_can_be_in_place_is_one_launch_in_place(run) -> None:
    double = LibraryDouble(2, "new")
    places = run(double, straight)
    assert sorted(double.calls) == sorted(
        [("scatter", 1, mine) for mine, _ in places] + [("gather", 0, full) for _, full in places]
    )


def test_reductions_have_a_communicator_of_their_own(run) -> None:
    """So gathers and reductions may come in different orders on different ranks."""

    def act(group: Group) -> list[float]:
        bucket, out, full = torch.ones(4), torch.empty(2), torch.ones(2) * group.rank
        acts = [lambda: group.reduce_scatter(bucket, out), lambda: group.all_gather(full)]
        handles = [act() for act in (acts if group.rank else reversed(acts))]
        for handle in handles:
            handle.wait()
        return [*out.tolist(), *full.tolist()]

    double = LibraryDouble(2, "new")
    assert run(double, act) == [[2, 2, 0, 1]] * 2
    assert double.lanes_made == 2, "one for each rank"


def test_tensors_of_any_size_go_from_each_to_each(run) -> None:
    double = LibraryDouble(3, "new")
    assert run(double, exchanged) == run_ranks(3, on_group) == FakeWorld(3).run(exchanged)
    assert {(name, lane) for name, lane, _ in double.calls} == {("all_to_all", 1)}, "not where gathers are"


@each("size, dtype, calls", [(2, "bfloat16", 1), (3, "bfloat16", 0), (3, "float32", 1)])
def test_the_library_takes_means_where_its_factor_is_exact_enough(run, size: int, dtype: str, calls: int) -> None:
    """One pass less. A third rounded to bf16 would bend every gradient the same way."""
    kind = getattr(torch, dtype)

    def act(group: Group) -> list[float]:
        bucket, out = torch.full((group.size * 4,), 3.0, dtype=kind), torch.empty(4, dtype=kind)
        group.reduce_scatter(bucket, out, scale=1 / group.size).wait()
        whole = torch.full((8,), 3.0, dtype=kind)
        group.all_reduce(whole, "mean").wait()
        return [*out.tolist(), *whole.tolist()]

    double = LibraryDouble(size, "new")
    for found in run(double, act):
        assert found == pytest.approx([3.0] * 12, rel=2 * torch.finfo(kind).eps)
    assert [name for name, _, _ in double.calls].count("mean") == calls * size


def test_fp16_is_scaled_before_it_is_summed(run) -> None:
    def act(group: Group) -> torch.Tensor:
        bucket, out = torch.full((group.size * 4,), 60000.0, dtype=torch.float16), torch.empty(4)
        group.reduce_scatter(bucket, out, scale=1 / group.size).wait()
        return out

    for size in (4, 3):
        for out in run(LibraryDouble(size, "new"), act):
            assert out.tolist() == pytest.approx([60000.0] * 4, rel=1e-3)


def test_scratch_takes_the_sum_of_another_dtype(run) -> None:
    def act(group: Group) -> tuple[int, list[float]]:
        bucket, out = torch.full((group.size * 4,), 2.0, dtype=torch.bfloat16), torch.ones(4)
        scratch = torch.empty(4 * group.size, dtype=torch.bfloat16)
        group.reduce_scatter(bucket, out, scale=0.5, add=True, scratch=scratch).wait()
        return scratch.data_ptr(), out.tolist()

    double = LibraryDouble(2, "new")
    results = run(double, act)
    assert {place for _, _, place in double.calls} == {place for place, _ in results}
    assert [out for _, out in results] == [[3.0] * 4] * 2


def test_both_communicators_are_made_when_ranks_meet(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward would make the second one, while a gather is under way on the first."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)

    def act(group: Group) -> None:
        joining._meet(group._pg, group, group._common)

    double = LibraryDouble(2, "new")
    run(double, act)
    assert {lane for _, lane, _ in double.calls} == {0, 1}


def test_one_queue_for_all_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    double = LibraryDouble(2, "new")
    monkeypatch.setattr(joining, "dist", double.module())
    monkeypatch.setattr(joining, "_process_group", lambda mesh, device: double.groups[0])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="2 or more, best 32"):
        group_on(None, CUDA)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What joining says, as if for the first time."""
    heard: list[str] = []
    monkeypatch.setattr(joining, "say_once", lambda logger, text: heard.append(text))
    return heard


@each("queues", [None, "2", "8", "31", "many", "32"])
def test_few_queues_are_warned_of(queues: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said.clear()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    joining._check_queues()
    assert len(said) == (queues != "32")
    now = "is not set, and CUDA makes 8 queues" if queues is None else f"is {queues}"
    for text in said:
        assert now in text and "CUDA_DEVICE_MAX_CONNECTIONS=32" in text


@each("implicit", [None, "0", "1"])
def test_nccls_implicit_order_is_warned_of_and_never_set(
    implicit: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_queues.py: with orders that differ between ranks it makes them wait for each other for ever."""
    said.clear()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if implicit is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", implicit)
    joining._check_queues()
    assert len(said) == (implicit == "1") and os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == implicit
    assert all("one order of all launches" in text and "Unset it" in text for text in said)


def test_ranks_on_gpus_are_warned_when_they_join_and_others_are_not(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    double = LibraryDouble(2, "new")
    monkeypatch.setattr(joining, "dist", double.module())
    monkeypatch.setattr(joining, "_process_group", lambda mesh, device: double.groups[0])
    monkeypatch.setattr(joining, "_meet", lambda pg, group, common: None)
    monkeypatch.setattr(joining, "_common", lambda pg, device: SimpleNamespace(groups={}))
    monkeypatch.setattr(joining, "_group", lambda pg, device, common: f"a group on {device}")
    assert group_on(None, CPU) == "a group on cpu" and not said
    assert group_on(None, CUDA) == "a group on cuda:0" and len(said) == 1
    monkeypatch.setattr(double, "size", 1)
    said.clear()
    assert group_on(None, CUDA).size == 1 and not said, "one rank has nobody to wait for"


class HighOptions:
    """`ProcessGroupNCCL.Options`, of a build of torch that has NCCL."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False


@each("offers, backend", [(True, "nccl"), (True, "custom"), (False, "nccl")])
def test_reductions_run_on_a_stream_of_high_priority_where_torch_has_one(run, offers: bool, backend: str) -> None:
    double = LibraryDouble(2, "new")
    double.options, double.backend = HighOptions if offers else None, backend
    found = run(double, lambda group: group._common.lane.options)
    if offers and backend == "nccl":
        assert all(isinstance(one, HighOptions) and one.is_high_priority_stream for one in found)
        assert found[0] is not found[1], "one for each communicator: torch writes its name and ranks into them"
    else:
        assert found == [None, None]


def test_each_waiter_is_gated_and_the_sum_is_taken_once(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits second must not read what another stream's kernel has yet to write."""
    marks: list[str] = []
    monkeypatch.setattr(device, "stream_gate", lambda place: marks.append("made") or (lambda: marks.append("followed")))

    def act(group: Group) -> list[float]:
        out = torch.zeros(2)
        handle = group.reduce_scatter(torch.ones(4), out, scale=0.5, add=True)
        handle.wait()
        handle.wait()
        full = torch.ones(4)
        gathered = group.all_gather(full)
        gathered.wait()
        full.zero_()
        gathered.wait()  # the work itself gates again, which for the double is a second copy
        return [*out.tolist(), *full.tolist()]

    assert run(LibraryDouble(2, "new"), act) == [[1.0] * 6] * 2
    assert sorted(marks) == ["followed"] * 2 + ["made"] * 2


@each("name", ["scatter", "gather", "all_reduce", "all_to_all", "broadcast"])
def test_a_launch_that_fails_is_a_comm_error(run, name: str) -> None:
    double = LibraryDouble(2, "new")
    double.fails = name

    def act(group: Group) -> tuple[str, str]:
        x = torch.ones(4)
        acts = {
            "scatter": lambda g: g.reduce_scatter(x, torch.empty(2)),
            "gather": lambda g: g.all_gather(x),
            "all_reduce": lambda g: g.all_reduce(x),
            "all_to_all": lambda g: g.all_to_all([x, x.clone()], [x, x]),
            "broadcast": lambda g: g.broadcast(x),
        }
        return refused(group, acts[name])[0], refused(group, lambda g: g.all_reduce(x))[0]

    for first, second in run(double, act):
        assert "did not end" in first and f"NCCL error in {name}" in first
        assert "has failed before" in second
    assert all(pg.aborted for pg in double.groups)


def test_ranks_that_leave_the_order_raise_on_devices_too(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is seen to wait on a device: the rank that follows the record hears of it from the store, and aborts."""
    monkeypatch.setattr(watch, "POLL_S", 0.1)

    def act(group: Group) -> tuple[str, str]:
        group.agree("a")
        if group.rank:
            return refused(group, lambda g: g.agree("c"))[0], ""
        group.follow("b")
        group.all_gather(torch.ones(2))
        for _ in range(2000):
            if group._pg.aborted:
                break
            threading.Event().wait(0.05)
        return refused(group, lambda g: g.all_gather(torch.ones(2)))[0], ""

    for words, _ in run(LibraryDouble(2, "new"), act):
        assert "ranks differ in step 1 of their order: rank 0: 'b', rank 1: 'c'" in words


def test_a_rank_that_has_failed_makes_those_look_who_wait_for_streams() -> None:
    store = torch.distributed.HashStore()
    one, other = Agreement(store, Ledger(0, 2)), Agreement(store, Ledger(1, 2))
    assert not other.troubled()
    one.fail(Failure("rank 0: it broke"))
    assert other.troubled() and other.look(Operation("all_reduce", 0, "a number")) == Failure("rank 0: it broke")
