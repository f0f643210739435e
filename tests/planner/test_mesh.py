"""`zk.plan(mesh=)`: what each rank of several dimensions holds, to the byte, and what cannot be planned."""

from __future__ import annotations

import pytest
from forked import run_forked
from mesh_cases import held
from ranks import run_ranks

import zerokern as zk
from zerokern.planner import Transformer

FOUR = [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"replicate": 2, "dp": 2}, {"replicate": 4, "dp": 1}]
EIGHT = [{"pp": 2, "dp": 2, "tp": 2}, {"replicate": 2, "dp": 2, "tp": 2}]


@pytest.mark.parametrize(
    "size, meshes, stages",
    [
        (4, FOUR, ((3,), (2, 3), (1,), (0,))),
        pytest.param(8, EIGHT, ((2, 3), (1, 3)), marks=pytest.mark.slow),
    ],
)
def test_every_byte_is_planned(size: int, meshes: list[dict[str, int]], stages: tuple[tuple[int, ...], ...]) -> None:
    """To the byte on those that have the first part of a bucket, on the others less by what is padding at the cuts."""
    for rank, found in enumerate(run_ranks(size, held, meshes, stages, timeout=240.0)):
        for (mesh, stage), (planned, measured) in found.items():
            sizes = dict(mesh)
            where = f"rank {rank} of {sizes}, stage {stage}"
            if rank // sizes.get("tp", 1) % sizes["dp"] == 0:
                assert measured == planned, where
            else:
                assert measured.keys() == planned.keys(), where
                assert all(0.95 * nbytes <= measured[role] <= nbytes for role, nbytes in planned.items()), where


def test_dimensions_of_a_number() -> None:
    """tp and pp have parts of it, dp and cp divide these, replicate has them again."""
    plan = zk.plan("64B", stage=3, mesh={"pp": 2, "replicate": 3, "dp": 2, "cp": 2, "tp": 4})
    assert (plan.world, plan.ranks, plan.numel) == (4, 96, 8_000_000_000)
    assert plan.states == zk.plan("8B", stage=3, world=4).states
    assert "64B parameters in tp 4 x pp 2 parts of 8B, on 96 ranks (pp 2 x replicate 3 x dp 4 x tp 4)" in str(plan)
    assert list(plan.sent) == ["pp", "replicate", "dp", "tp"]
    assert plan.sent["pp"] is plan.sent["tp"] is None and "Not counted: what is sent along tp and pp" in str(plan)
    assert plan.sent["replicate"] == 2 * 2 * 2 * 666_666_667, "two bytes, two rounds, to two others"
    assert plan.to_dict()["mesh"] == "pp 2 x replicate 3 x dp 4 x tp 4"


@pytest.mark.parametrize("stage, left", [(0, 8), (1, 2), (2, 2), (3, 2)])
def test_copies_average_what_is_left_of_a_reduction(stage: int, left: int) -> None:
    """In bf16 two bytes for each element, half of which is sent twice where there are two of them."""
    plan = zk.plan("8B", stage=stage, mesh={"replicate": 2, "dp": 4})
    assert plan.sent["replicate"] == left * 10**9 * 2
    assert plan.sent["dp"] == zk.plan("8B", stage=stage, world=4).traffic.sent_nbytes
    several = zk.plan("8B", stage=stage, mesh={"replicate": 2, "dp": 4}, accumulate=4)
    assert several.sent["replicate"] == 4 * left * 10**9 * 2
    once = zk.plan("8B", stage=stage, mesh={"replicate": 2, "dp": 4}, accumulate=4, no_sync=True)
    assert once.sent["replicate"] == left * 10**9 * 2


def test_a_pipeline_gathers_and_reduces_once() -> None:
    shape = Transformer(16, 256)
    alone, stage = (
        zk.plan(one, stage=3, accumulate=8, mesh=mesh)
        for one, mesh in ((Transformer(4, 256), {"dp": 2}), (shape, {"pp": 4, "dp": 2}))
    )
    assert alone.numel == stage.numel
    assert alone.traffic.reduced_numel == 8 * stage.traffic.reduced_numel
    assert stage.traffic.gathered_numel == stage.numel == stage.traffic.reduced_numel
    assert stage.roles["gathered"] == 2 * stage.numel and "stays gathered for a step" in str(stage)
    assert [op.verb for op in stage.program.ops].count("Forward") == 8


def test_a_mesh_without_names_is_one_that_shard_takes() -> None:
    class Mesh:
        mesh_dim_names = None

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    assert zk.plan("1B", mesh=Mesh(4)).settings == zk.plan("1B", world=4).settings
    assert zk.plan("1B", mesh=Mesh(2, 4)).settings == zk.plan("1B", mesh={"replicate": 2, "dp": 4}).settings
    with pytest.raises(ValueError, match="a DeviceMesh whose dimensions have names"):
        zk.plan("1B", mesh=Mesh(2, 2, 2))


@pytest.mark.usefixtures("steps_alone")
def test_copies_are_timed_as_others() -> None:
    (one, _, *_), (two, *_) = (
        zk.plan("1B", mesh=mesh).predict("dgx2-v100", tokens=[4096]).rows
        for mesh in ({"dp": 8}, {"replicate": 2, "dp": 4})
    )
    assert one.schedule == two.schedule and two.tokens_s == pytest.approx(one.tokens_s, rel=0.3)


FAKE = """
import torch, torch.distributed as dist, zerokern as zk
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
mesh = init_device_mesh("cpu", (2, 8, 4), mesh_dim_names=("pp", "dp", "tp"))
with torch.device("meta"):
    model = nn.ModuleDict({"up": nn.Linear(1024, 4096, bias=False), "down": nn.Linear(4096, 1024, bias=False)})
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
plan = zk.plan(model, stage=3, mesh=mesh)
assert (plan.numel, plan.world, plan.ranks) == (2 * 1024 * 1024, 8, 64)
assert plan.roles["parameters"] == 4 * plan.numel // 8
assert zk.plan(model, stage=3, mesh={"dp": 8}).ranks == 32, "the model knows of tp"
try:
    zk.plan(model, mesh={"dp": 8, "tp": 2})
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


def test_a_model_that_is_divided_already() -> None:
    """On ranks that are not there: no memory, and no other process."""
    ran = run_forked(FAKE)
    assert ran.returncode == 0, ran.stderr
    assert "tp=2: must be 4, for a model whose DTensors are on 4 ranks" in ran.stdout
