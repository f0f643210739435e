"""What the kernel has sent along each dimension of a mesh, beside `zk.plan(mesh=).sent`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import sockets
import torch
import torch.distributed as dist
from mesh_cases import LARGE, ROWS, Trained, loss_of, mesh_of, model_on
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

from zerokern.comm.group import Group

WARM = 2
TOLERANCE = 0.01
BESIDE = 10_000  # bytes of a step to one other rank that no model knows
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

FOUR = [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"replicate": 2, "dp": 2}]
MORE = [{"dp": 4}, {"replicate": 4, "dp": 1}, {"replicate": 1, "dp": 4}]
EIGHT = [{"pp": 2, "dp": 2, "tp": 2}, {"replicate": 2, "dp": 4}, {"replicate": 2, "dp": 2, "tp": 2}]


def sent(rank: int, meshes: list[dict[str, int]], stages: tuple[int, ...]) -> tuple[dict[Any, Any], Any]:
    """By mesh, stage and dimension: bytes of a step as planned and as sent; and what went to no rank of a dimension.

    Then those of the last mesh with a gather that nobody knows of.
    """
    found = {}
    for sizes in meshes:
        mesh = mesh_of(sizes)
        for stage in stages:
            found[tuple(sizes.items()), stage] = in_a_step(mesh, stage)
    gathers_twice()
    return found, in_a_step(mesh, 3)


def in_a_step(mesh: DeviceMesh, stage: int) -> tuple[dict[str, int | None], dict[str, float]]:
    tensors = "tp" in (mesh.mesh_dim_names or ())
    run = Trained(mesh, stage, LARGE, BF16 if stage == 2 and not tensors else None)
    for _ in range(WARM):
        run.step()
    dist.barrier()
    before = sockets.sent()
    run.step()
    dist.barrier()  # what others wait for is sent
    return run.plan.sent, sockets.by_dimension(mesh, before, sockets.sent())


def gathers_twice() -> None:
    """One hidden collective: what a witness must see."""
    gather = Group.all_gather

    def again(self: Group, full: torch.Tensor, shard: torch.Tensor | None = None) -> object:
        gather(self, full, shard).wait()
        return gather(self, full)

    Group.all_gather = again  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    "size, meshes, stages",
    [
        (4, FOUR[::2], (3,)),
        pytest.param(4, MORE + FOUR, (0, 2, 3), marks=pytest.mark.slow),
        pytest.param(8, EIGHT, (3,), marks=pytest.mark.slow),
    ],
)
def test_bytes_along_each_dimension_are_planned(
    size: int, meshes: list[dict[str, int]], stages: tuple[int, ...]
) -> None:
    """Padding is in the plan. What is not: a message's header, the norm's number, which gradients there are; so many
    bytes of a step whatever the model and its dtype."""
    for found, (planned, seen) in run_ranks(size, sent, meshes, stages, timeout=240.0):
        assert seen["dp"] > 1.5 * planned["dp"] and seen["replicate"] < 1.01 * planned["replicate"], "a hidden gather"
        for (mesh, stage), (planned, seen) in found.items():
            for name, nbytes in planned.items():
                if nbytes is not None:
                    said = f"{dict(mesh)}, stage {stage}, along {name}: {seen[name]:,.0f} of {nbytes:,}"
                    assert abs(seen[name] - nbytes) <= TOLERANCE * nbytes, said
                    if dict(mesh)[name] == 2:  # of more, small spans go to all of them whole
                        assert 0 <= seen[name] - nbytes <= BESIDE, said
            assert seen[""] <= 1000, "what all are asked goes along one dimension after the other"


CALLS = (
    "all_reduce reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather all_gather_into_tensor "
    "all_gather_single all_to_all_single broadcast send recv isend irecv batch_isend_irecv barrier"
)


def beside_tensor_parallelism(rank: int) -> dict[Any, Any]:
    """tp 2 x dp 1: by stage and tier, torch's collectives beside those of the model alone; and who was called."""
    mesh = mesh_of({"dp": 1, "tp": 2})
    called: set[int] = set()
    for name in (one for one in CALLS.split() if hasattr(dist, one)):
        setattr(dist, name, listening(getattr(dist, name), called))

    def watched(step: Callable[[], None]) -> tuple[dict[str, int], list[int], int]:
        for _ in range(WARM):
            step()
        dist.barrier()
        called.clear()
        before = sockets.sent()
        with CommDebugMode() as seen:
            step()
        counts = {str(op): count for op, count in seen.get_comm_counts().items() if count}
        groups = sorted(called)
        dist.barrier()
        return counts, groups, sockets.by_dimension(mesh, before, sockets.sent())["tp"]

    model = model_on(mesh, LARGE)
    opt = torch.optim.AdamW(model.parameters(), foreach=False)

    def plain() -> None:
        loss_of(model(torch.randn(ROWS, LARGE[0])), torch.randint(17, (ROWS,))).backward()
        opt.step()
        opt.zero_grad()

    found: dict[Any, Any] = {"torch": watched(plain)}
    for stage, tier in ((1, {}), (3, {}), (2, {"tier": "cpu", "schedule": "overlap"})):
        run = Trained(mesh, stage, LARGE, **tier)
        assert "dp" not in run.plan.sent
        found[(stage, *tier)] = watched(run.step)
    return found


def listening(function: Callable, called: set[int]) -> Callable:
    """Which group is asked for anything: by the number of its ranks."""

    @functools.wraps(function)
    def heard(*args: Any, **kwargs: Any) -> Any:
        groups = [one for one in (*args, *kwargs.values()) if isinstance(one, dist.ProcessGroup)]
        called.add(groups[0].size() if groups else 0)
        return function(*args, **kwargs)

    return heard


def test_one_rank_of_data_parallelism_talks_to_nobody() -> None:
    """Beside tensor parallelism nothing is gathered or reduced: there are its collectives, and the norm's number."""
    for found in run_ranks(2, beside_tensor_parallelism):
        counts, _, nbytes = found.pop("torch")
        assert counts and not any("gather" in op or "scatter" in op for op in counts)
        for where, (mine, groups, all_nbytes) in found.items():
            more = {op: count - counts.get(op, 0) for op, count in mine.items() if count != counts.get(op, 0)}
            assert mine.keys() >= counts.keys() and sum(more.values()) == 1, f"{where}: the norm's alone, not {more}"
            assert groups in ([], [2]), f"{where}: somebody asked a group of {groups} ranks"
            assert all_nbytes - nbytes <= 1000, f"{where}: {all_nbytes:,} bytes, {nbytes:,} of the model"
