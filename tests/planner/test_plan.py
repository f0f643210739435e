"""`zk.plan`: bytes by role at every stage, for numbers, shapes and modules, and what of it fits."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.core.units import BUFFERS
from zerokern.examples.model import GPT, Shape
from zerokern.kernels.rules import RULES
from zerokern.optim.formats import layout_of
from zerokern.optim.muon import Muon
from zerokern.optim.optimizers import SGD, Adagrad, Adam, AdamW, Lion
from zerokern.planner.recipe import Recipe
from zerokern.zero.partition import partition
from zerokern.zero.units import members, units_of

STAGES = (0, 1, 2, 3)


class Uneven(nn.Module):
    """Tied, frozen and odd-sized parameters, in units and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 17)
        self.blocks = nn.ModuleList(nn.Linear(17, 17) for _ in range(5))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(17, 31)
        self.head.weight = self.embed.weight


def gpt() -> nn.Module:
    with torch.device("meta"):
        return GPT(Shape(4, 256, 64))


class TestBytes:
    @pytest.mark.parametrize("world", [1, 3, 8])
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("build", [gpt, Uneven])
    def test_a_module_is_counted_as_it_is_partitioned(self, build, stage: int, world: int) -> None:
        """Against the partition itself, added up here in the plainest way."""
        model = build()
        listed = members(units_of(model), stage)
        buckets = partition(listed, world, (1 << 16) // 4)
        plan = zk.plan(model, stage=stage, world=world, bucket_bytes=1 << 16, state_format="int8")
        trained = [bucket for bucket in buckets if bucket.trainable]
        spans = [piece.numel for bucket in trained for piece in (bucket.pieces(0) if stage >= 1 else bucket.places)]
        moments = sum(spans) + 4 * sum(-(-numel // 128) for numel in spans)
        parameters = sum(b.shard_numel if stage == 3 else b.padded_numel for b in buckets) * 4
        gradients = sum(b.shard_numel if stage >= 2 else b.padded_numel for b in trained) * 4
        roles = plan.roles
        assert [roles[name] for name in ("parameters", "gradients", "exp_avg", "exp_avg_sq")] == [
            parameters,
            gradients,
            moments,
            moments,
        ]
        assert plan.numel == sum(param.numel() for param in model.parameters())
        assert plan.states == parameters + gradients + 2 * moments
        assert "remainder" not in roles, "an fp32 parameter is its own master"

    def test_mixed_precision_keeps_a_remainder(self) -> None:
        model = Uneven()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        by_policy = zk.plan(model, stage=2, world=2, mp_policy=policy)
        assert by_policy.roles == zk.plan(model, stage=2, world=2, param_dtype="bf16", reduce_dtype="fp32").roles
        formats = {one.role: one.format for one in by_policy.held}
        assert formats["parameters"] == "bf16" and formats["gradients"] == "fp32" and formats["remainder"] == "int16"

    @pytest.mark.parametrize("world", [2, 4])
    def test_stage_3_gathers_the_root_and_two_neighbours(self, world: int) -> None:
        model = nn.ModuleDict({"root": nn.Linear(128, 2, bias=False)})
        model["blocks"] = nn.ModuleList(nn.Linear(128, n, bias=False) for n in (8, 64, 16, 48, 32, 40))
        gathered = zk.plan(model, stage=3, world=world).roles["gathered"]
        assert gathered == 4 * (128 * 64 + 128 * 16) + 4 * max(256, 128 * world)
        named = zk.plan(model, stage=3, world=world, units=[model["blocks"]])
        assert named.roles["gathered"] == 4 * 128 * 208 + 4 * max(256, 128 * world)

    def test_one_rank_gathers_and_sends_nothing(self) -> None:
        for stage in STAGES:
            plan = zk.plan(Uneven(), stage=stage, device="cpu")
            assert set(plan.roles) == {"parameters", "gradients", "exp_avg", "exp_avg_sq"}
            assert plan.traffic.nbytes == plan.traffic.sent_nbytes == 0

    def test_buffers_and_scratch(self) -> None:
        """Two buffers of the largest bucket from stage 2 on; on a CPU what the other ranks' spans are received into."""
        shares = [zk.plan(gpt(), stage=stage, world=4, device="cpu", bucket_bytes=1 << 20).roles for stage in STAGES]
        largest = 4 * 256 * 4 * 256
        assert [share.get("buffers", 0) for share in shares] == [0, 0, BUFFERS * largest, BUFFERS * largest]
        assert [share.get("scratch", 0) for share in shares] == [largest * 3 // 4] * 4
        assert "scratch" not in zk.plan(gpt(), stage=3, world=4, device="cuda").roles
        assert zk.plan(nn.Linear(128, 128), stage=2, world=2).roles["buffers"] == 4 * (128 * 128 + 256)

    def test_accumulation(self) -> None:
        """Each reduced: the volume grows. Under no_sync it does not, and from stage 2 on whole gradients wait."""
        model, numel = nn.Linear(1024, 128, bias=False), 1024 * 128
        plain, reduced, waiting = (
            [zk.plan(model, stage=stage, world=2, accumulate=many, no_sync=waits) for stage in STAGES]
            for many, waits in ((1, False), (4, False), (4, True))
        )
        assert [plan.traffic.reduced_numel // numel for plan in plain] == [1, 1, 1, 1]
        assert [plan.traffic.reduced_numel // numel for plan in reduced] == [4, 4, 4, 4]
        assert [plan.traffic.reduced_numel // numel for plan in waiting] == [1, 1, 1, 1]
        assert [plan.roles.get("buffers", 0) for plan in waiting] == [0, 0, 4 * numel, 4 * numel]
        assert [plan.roles["gradients"] // numel for plan in reduced] == [4, 6, 2, 2]
        assert [plan.roles["gradients"] for plan in waiting] == [plan.roles["gradients"] for plan in plain]

    def test_state_on_disk_leaves_the_device(self) -> None:
        plan = zk.plan("1B", world=4, tier=zk.Nvme("swap", ring_nbytes=32 << 20))
        twins = (2 + 2) * 250_000_000
        assert plan.tiers["nvme"] == 10 * 250_000_000 and plan.tiers["cpu"] == twins + (32 << 20)
        assert plan.total == plan.roles["parameters"] + plan.roles["gradients"] + plan.roles["buffers"]
        on_host = zk.plan("1B", world=4, tier="cpu", device="cpu")
        assert on_host.tiers["cpu"] == 10 * 250_000_000, "parameters on the host are updated where they are"

    @pytest.mark.parametrize(
        "name, made",
        [("adamw", AdamW), ("adam", Adam), ("lion", Lion), ("adagrad", Adagrad), ("sgd", SGD), ("muon", Muon)],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_state_is_what_the_optimizers_keep(self, name: str, made, dtype: torch.dtype) -> None:
        """Keys and bytes of every format against the table that the optimizers allocate by."""
        for has_moments in (True, False) if name == "sgd" else (True,):
            face = "sgd-momentum" if name == "sgd" and has_moments else name
            for recipe in Recipe(optimizer=face).alternatives(str(dtype).removeprefix("torch.")):
                layout = layout_of(
                    made._algorithm, dtype, has_moments, recipe.state_format, recipe.master_format, False
                )
                theirs: dict[str, int] = {}
                for slot in layout.columns:
                    key = slot.key.removesuffix("_scale")
                    numel = 3 if slot.extent == "blocks" else 300
                    theirs[key] = theirs.get(key, 0) + numel * slot.dtype.itemsize
                ours = Counter[str]()
                for one in recipe.state_of(str(dtype).removeprefix("torch."), matrix=name == "muon"):
                    ours[one.role] += one.nbytes_of(300)
                assert ours == theirs and recipe.rule.state_formats == RULES[made._algorithm.name].state_formats

    def test_without_an_optimizer_there_is_no_state(self) -> None:
        frozen = Uneven().requires_grad_(False)
        assert set(zk.plan(frozen, stage=3, world=2, optimizer=None).roles) == {"parameters", "gathered"}


class TestTraffic:
    @pytest.mark.parametrize("stage, psi", [(0, 2), (1, 2), (2, 2), (3, 3)])
    def test_volume_of_a_module(self, stage: int, psi: int) -> None:
        """At stage 3 the root's and the last unit are gathered once."""
        model, world = gpt(), 4
        plan = zk.plan(model, stage=stage, world=world)
        numel = plan.numel
        once = 0
        if stage == 3:
            units = units_of(model)
            once = sum(param.numel() for unit in (units[0], units[-1]) for _, param in unit.params)
        padding = plan.buckets.padding
        assert abs(plan.traffic.numel - (psi * numel - once)) <= psi * padding
        assert plan.traffic.nbytes == 4 * plan.traffic.numel
        assert plan.traffic.sent_nbytes == plan.traffic.nbytes * 3 // 4
        moved = [op for op in plan.program.ops if op.verb in ("Gather", "Reduce", "Publish")]
        assert sum(op.nbytes for op in moved) == plan.traffic.nbytes

    def test_what_is_frozen_is_neither_reduced_nor_published(self) -> None:
        model = nn.ModuleList([nn.Linear(128, 128, bias=False), nn.Linear(128, 256, bias=False)])
        model[0].requires_grad_(False)
        reduced = [zk.plan(model, stage=stage, world=2).traffic.reduced_numel for stage in STAGES]
        assert reduced == [128 * 256] * 4
        assert zk.plan(model, stage=1, world=2).traffic.gathered_numel == 128 * 256
        assert zk.plan(model, stage=3, world=2).traffic.gathered_numel == 2 * 128 * 128 + 128 * 256

    def test_dtypes_of_the_wire(self) -> None:
        plan = zk.plan("1B", stage=1, world=2, param_dtype="bf16", reduce_dtype="fp32")
        assert (plan.traffic.reduced_nbytes, plan.traffic.gathered_nbytes) == (4 * 10**9, 2 * 10**9)
        assert zk.plan("1B", stage=0, world=2, reduce_dtype="fp32").traffic.gathered_nbytes == 4 * 10**9

    def test_a_step_at_stage_3_in_order(self) -> None:
        model = nn.ModuleList(nn.Linear(128, 1, bias=False) for _ in range(3))
        steps = [f"{op.verb} {op.what}" for op in zk.plan(model, stage=3, world=2).program.ops]
        assert steps == [
            "Gather 0", "Gather 1", "Forward 0", "Release 0", "Gather 2", "Forward 1", "Release 1", "Forward 2",
            "Forward root", "Backward root",
            "Gather 1", "Backward 2", "Reduce 2", "Release 2", "Gather 0", "Backward 1", "Reduce 1", "Release 1",
            "Backward 0", "Reduce 0", "Release 0", "Step own shard",
        ]  # fmt: skip

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_program_never_holds_more_than_planned(self, stage: int) -> None:
        model = nn.ModuleDict({"root": nn.Linear(64, 7)})
        model["blocks"] = nn.ModuleList(nn.Linear(64, n) for n in (8, 64, 16, 48, 32, 40))
        plan = zk.plan(model, stage=stage, world=4)
        held: dict[str, int] = {}
        most = 0
        for op in plan.program.ops:
            if op.verb == "Gather" and stage == 3:
                assert op.what not in held, "gathered twice"
                held[op.what] = op.nbytes
            elif op.verb == "Release":
                del held[op.what]
            elif op.verb in ("Forward", "Backward") and stage == 3:
                assert op.what in held and "root" in held, "computes with what is not there"
            most = max(most, sum(held.values()))
        assert not held
        assert most == plan.roles.get("gathered", 0)


def test_planning_a_number_needs_no_torch() -> None:
    """The planner's own arithmetic; the package of the stage table is entered without its __init__."""
    program = (
        "import sys, types, pathlib, zerokern\n"
        "zero = sys.modules['zerokern.zero'] = types.ModuleType('zerokern.zero')\n"
        "zero.__path__ = [str(pathlib.Path(zerokern.__file__).parent / 'zero')]\n"
        "from zerokern.planner import Transformer, plan\n"
        "str(plan('7.5B', world=64)), str(plan(Transformer(4, 512), stage=3, world=8))\n"
        "print('torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")
