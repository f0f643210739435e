"""Which group a mesh, a world or nothing gives, and what is asked of a group that it cannot do."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from comm_cases import values
from fake_world import FakeWorld
from ranks import run_ranks
from tables import each

from zerokern.comm import Group, Handle, group_on


def of_meshes(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh

    world = group_on()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    rows = group_on(grid["shards"])
    columns = group_on(grid["replicas"])
    x = torch.full((2,), float(rank))
    rows.all_gather(x).wait()
    y = torch.full((2,), float(rank))
    columns.all_gather(y).wait()
    try:
        group_on(grid)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    try:
        group_on(None, "cuda:0")
        no_gpu = ""
    except ValueError as error:
        no_gpu = str(error)
    return {
        "no_gpu": no_gpu,
        "same": group_on() is world and group_on(mesh) is group_on(mesh) and group_on(world) is world,
        "world": (world.rank, world.size),
        "rows": x.tolist(),
        "columns": y.tolist(),
        "exchanged": rows.exchange(rank),
        "refusal": refusal,
    }


def test_groups_of_meshes() -> None:
    for rank, found in enumerate(run_ranks(4, of_meshes)):
        row, column = rank // 2 * 2, rank % 2
        assert found["same"] and found["world"] == (rank, 4)
        assert found["rows"] == found["exchanged"] == [row, row + 1]
        assert found["columns"] == [column, column + 2]
        assert "mesh['replicas']" in found["refusal"]
        assert "has no backend for cuda tensors; allowed" in found["no_gpu"]


def two_models(rank: int) -> list[float]:
    """Groups made again and again on one process group, of which one dies: their messages are never mistaken."""
    seen = []
    for turn in range(3):
        group = group_on()
        x = torch.full((group.size,), float(rank + turn))
        group.all_gather(x).wait()
        seen += x.tolist()
        if rank == turn % 2:
            keep = group  # noqa: F841  (one rank holds its group, the other lets it go)
        else:
            del group
            gc.collect()
    return seen


def lives_twice(rank: int) -> list:
    """A process group that is destroyed and made again, on the same store: nothing that was said before counts."""
    store = dist.distributed_c10d._get_default_store()
    seen = []
    for life in range(2):
        if life:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(str(life), store), rank=rank, world_size=len(seen[0])
            )
        group = group_on()
        group.agree("first")
        group.agree("second")
        seen.append(group.exchange(rank))
        found = weakref.ref(dist.group.WORLD)
        del group
        dist.destroy_process_group()
        gc.collect()
        seen.append(found() is None)
    return seen


def quiet(rank: int) -> list[str]:
    """Warnings that a user would see, and version counters that moved."""
    group = group_on()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        weight = torch.nn.Parameter(torch.zeros(group.size * 4))
        group.all_gather(weight, values(rank, 4, torch.float32)).wait()
        group.broadcast(weight).wait()
        out = torch.empty(4)
        group.reduce_scatter(weight, out).wait()
    return [str(one.message) for one in heard] + (["version"] if weight._version else [])


def of_two(rank: int) -> tuple[list[float], list[str], list]:
    return two_models(rank), quiet(rank), lives_twice(rank)


def test_groups_come_and_go_silently_and_process_groups_are_made_again() -> None:
    assert run_ranks(2, of_two) == [([0, 1, 1, 2, 2, 3], [], [[0, 1], True, [0, 1], True])] * 2


def test_without_a_process_group_everything_is_local() -> None:
    group = group_on()
    assert (group.rank, group.size, group.device, group.name) == (0, 1, torch.device("cpu"), "alone")
    full = torch.zeros(3)
    handle = group.all_gather(full, torch.arange(3.0))
    assert handle.done()
    handle.wait()
    assert full.tolist() == [0, 1, 2]
    group.barrier()
    group.follow("a")
    group.agree("b")
    assert group.traffic.total() == 0


@each("value", [None, 3, "ö", [1, {"a": None}], {"x": 1.5}])
def test_values_are_exchanged(value: object) -> None:
    def act(group: Group) -> list:
        return group.exchange([group.rank, value] if group.rank else value)

    assert FakeWorld(3).run(act) == [[value, [1, value], [2, value]]] * 3
    assert json.loads(json.dumps(group_on().exchange(value))) == [value]


def test_a_value_that_json_cannot_carry_is_refused() -> None:
    with pytest.raises(TypeError, match="JSON"):
        group_on().exchange(torch.ones(2))


@each(
    "call, says",
    [
        ("g.reduce_scatter(z(7), z(3))", "bucket has 7 elements; allowed: a multiple of the 2 ranks"),
        ("g.reduce_scatter(z(8), z(3))", "out has 3 elements; allowed: 4"),
        ("g.reduce_scatter(z(8, dtype=torch.int64), z(4))", "bucket has dtype torch.int64"),
        ("g.reduce_scatter(x, x[1:5])", "out shares memory with bucket"),
        ("g.reduce_scatter(x, x[g.rank * 4:][:4], add=True)", "count the own span twice"),
        ("g.reduce_scatter(x, z(4), scratch=z(3))", "scratch has 3 elements; allowed: 4 or more"),
        ("g.reduce_scatter(x, z(4), scratch=z(9, dtype=torch.bfloat16))", "scratch has dtype torch.bfloat16"),
        ("g.reduce_scatter(x, z(4), scratch=x)", "scratch shares memory"),
        ("g.all_reduce(x, scratch=x)", "scratch shares memory"),
        ("g.reduce_scatter([1.0], z(4))", "bucket is a list; allowed: a tensor"),
        ("g.all_gather(z(7))", "full has 7 elements"),
        ("g.all_gather(x, z(3))", "shard has 3 elements; allowed: 4"),
        ("g.all_gather(x, z(4, dtype=torch.bfloat16))", "shard has dtype torch.bfloat16; allowed: torch.float32"),
        ("g.all_gather(x, x[1:5])", "shard shares memory with full"),
        ("g.all_gather(z(4, 4).t())", "has strides"),
        ("g.all_gather(z(4, device='meta'))", "full is on device meta; this group moves tensors on cpu"),
        ("g.all_reduce(x, 'min')", "op='min': must be 'sum', 'mean' or 'max'"),
        ("g.all_reduce(z(4, dtype=torch.int32))", "tensor has dtype torch.int32"),
        ("g.broadcast(x, src=2)", "src=2: must be a rank of this group: 0 to 1"),
        ("g.broadcast(x, src=True)", "src=True: must be"),
        ("g.all_to_all([x, x], [x])", "sends has 1 tensors; allowed: 2, one for each rank"),
        ("g.all_to_all([x, z(3)], [x, x])", "receives[1] has 3 elements; allowed: 8, what this rank sends itself"),
        ("g.all_to_all([x, z(8, dtype=torch.bfloat16)], [x, x])", "receives has dtype torch.bfloat16"),
    ],
)
def test_bad_input_is_refused_before_anything_moves(call: str, says: str) -> None:
    group = Group(1, 2, torch.device("cpu"), "rank 1 of 2")
    x = torch.zeros(8)
    with pytest.raises((ValueError, TypeError)) as caught:
        eval(call, {"g": group, "z": torch.zeros, "x": x, "torch": torch})
    assert says in str(caught.value)
    assert group.traffic.total() == 0


@each("mesh", ["cpu", 3, object()])
def test_what_is_no_mesh_is_refused(mesh: object) -> None:
    with pytest.raises(TypeError, match=r"a 1-D DeviceMesh, a zerokern\.comm\.Group or None for the world"):
        group_on(mesh)


def test_a_wait_that_is_interrupted_is_waited_for_again_and_one_that_failed_fails_again() -> None:
    for error, ends in ((KeyboardInterrupt(), ["ended"]), (OSError("gone"), [])):
        outcomes, said = [error], []
        handle = Handle(lambda: (_ for _ in ()).throw(outcomes.pop()) if outcomes else said.append("ended"))  # noqa: B023
        with pytest.raises(type(error)):
            handle.wait()
        with contextlib.nullcontext() if ends else pytest.raises(OSError, match="gone"):
            handle.wait()
        assert said == ends


def test_of_many_waiters_one_ends_it_and_each_is_held_back() -> None:
    """Each may be on a stream of its own."""
    ended, held = [], []
    handle = Handle(lambda: (time.sleep(0.05), ended.append(1)), again=lambda: held.append(len(ended)))
    threads = [threading.Thread(target=handle.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [1] and held == [1] * 3
