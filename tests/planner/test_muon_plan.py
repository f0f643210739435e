"""`zk.plan(optimizer="muon")` on real ranks: bytes held to the byte, bytes sent as the kernel counts them, and the
memory of a step."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sockets
import torch
import torch.distributed as dist
from mesh_cases import mesh_of
from pages import MIB, SLACK, large_things_apart, pages, peak, restart_peak
from ranks import run_ranks
from tables import each
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from waiting_device import played
from worlds import World, built, on_threads

import zerokern as zk
from zerokern.optim import transit
from zerokern.optim.rounds import Round
from zerokern.planner.forecast import NO_OFFLOAD, step_program
from zerokern.planner.matrices import MatrixShape
from zerokern.schedule import Machine
from zerokern.zero.partition import work_of
from zerokern.zero.shard import shard_of

STAGES = (0, 1, 2, 3)
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"state_format": "int8", "master_format": "split8"},
    {"state_format": "bf16", "master_format": "fp32"},
)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HELD = ("parameters", "gradients", "remainder", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "buffers")
TOLERANCE = 0.01


class Uneven(nn.Module):
    """Matrices of which two or three ranks cannot have equally many; of three it is the last that has most."""

    def __init__(self, width: int = 128, blocks: int = 5, wide: int = 2) -> None:
        super().__init__()
        self.enter = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)) for _ in range(blocks)
        )
        self.wide = nn.ModuleList(nn.Linear(width, 8 * width) for _ in range(wide))
        self.leave = nn.Linear(width, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = x + block(x)
        for wide in self.wide:
            x = x + wide(x).unflatten(-1, (8, -1)).sum(-2)
        return self.leave(x)


def backward(model: nn.Module) -> None:
    model(torch.arange(7)).float().square().mean().backward()


def optimizers(groups: Any, **formats: Any) -> tuple[zk.Muon, zk.AdamW]:
    return zk.Muon(groups[0], lr=0.02, **formats), zk.AdamW(groups[1], lr=1e-3, **formats)


def step(model: nn.Module, opts: tuple[torch.optim.Optimizer, ...]) -> None:
    backward(model)
    for opt in opts:
        opt.step()
        opt.zero_grad()


def trained(stage: int, policy: MixedPrecisionPolicy | None, formats: dict[str, Any]) -> tuple[zk.Plan, dict, int]:
    torch.manual_seed(0)
    model = Uneven()
    groups = zk.muon_groups(model, split={"blocks.0.0.weight": 3})
    shard: dict[str, Any] = {"stage": stage, "mp_policy": policy, "bucket_bytes": 1 << 18}
    plan = zk.plan(model, world=dist.get_world_size(), optimizer="muon", whole=groups[0], **shard, **formats)
    zk.shard(model, whole=groups[0] if stage < 3 else None, **shard)
    opts = optimizers(groups, **formats)
    for _ in range(2):
        step(model, opts)
    backward(model)
    measured = zk.measure(model, opts)
    for opt in opts:
        opt.flush()
    return plan, measured.roles, measured.pinned


def all_trained(rank: int) -> dict[tuple[int, int], tuple[dict, int, int, dict, int]]:
    found = {}
    for number, formats in enumerate(FORMATS):
        for stage in [one for one in STAGES if (one + number) % 3]:
            tier = {"tier": "cpu"} if stage == 2 else {}
            plan, roles, pinned = trained(stage, BF16 if number else None, {**formats, **tier})
            found[stage, number] = plan.roles, plan.pinned, plan.buckets.rank, roles, pinned
    return found


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_every_byte_is_planned(size: int) -> None:
    """Of the rank that has most; no other has more."""
    ranks = run_ranks(size, all_trained, timeout=240.0)
    fullest = set()
    for key, (planned, pinned, rank, _, _) in ranks[0].items():
        *_, found, locked = ranks[rank][key]
        fullest.add(rank)
        assert {role: found.get(role, 0) for role in HELD} == {role: planned.get(role, 0) for role in HELD}, key
        assert locked == pinned, key
        assert all(one[key][3][role] <= planned[role] for one in ranks for role in ("momentum_buffer",)), key
    assert fullest == ({0, 2} if size == 3 else {0})


def test_one_process_without_sharding() -> None:
    model = Uneven().to(torch.bfloat16)
    groups = zk.muon_groups(model)
    opts = optimizers(groups)
    planned = zk.plan(model, stage=0, optimizer="muon").roles
    step(model, opts)
    roles = zk.measure(model, opts).roles
    states = {role: roles.get(role) for role in ("remainder", "exp_avg", "exp_avg_sq", "momentum_buffer")}
    assert states == {role: planned.get(role) for role in states}
    assert states["momentum_buffer"] == 4 * (5 * 2 * 3 + 2 * 8) * 128 * 128


def sent(rank: int, mesh_sizes: dict[str, int]) -> dict[tuple[int, str], tuple[dict, dict, float]]:
    """By stage: what a step sends along each dimension, as planned and as sent, and the padding of whole matrices."""
    mesh, found = mesh_of(mesh_sizes), {}
    for stage, schedule in ((1, "sync"), (2, "overlap"), (3, "sync")):
        torch.manual_seed(0)
        model = Uneven(256, 5, 1)
        groups = zk.muon_groups(model)
        shard: dict[str, Any] = {"stage": stage, "bucket_bytes": 1 << 18}
        plan = zk.plan(model, mesh=mesh, optimizer="muon", whole=groups[0], **shard)
        shard["whole"] = groups[0] if stage < 3 else None
        zk.shard(model, mesh=mesh if len(mesh_sizes) > 1 else mesh["dp"], **shard)
        opts = optimizers(groups, schedule=schedule)
        for _ in range(2):
            step(model, opts)
        for opt in opts:
            opt.flush()
        dist.barrier()
        before = sockets.sent()
        step(model, opts)
        for opt in opts:
            opt.flush()
        dist.barrier()
        assert plan.muon is not None
        seen = sockets.by_dimension(mesh, before, sockets.sent())
        found[stage, schedule] = plan.sent, seen, plan.muon.padding / plan.muon.numel
    return found


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"dp": 3}, {"replicate": 2, "dp": 2}))]
)
def test_bytes_sent_are_planned(mesh: dict[str, int]) -> None:
    """A reduction and a gather of all elements and of the padding, as the kernel counts what its sockets sent."""
    size = 1
    for ranks in mesh.values():
        size *= ranks
    ranks = run_ranks(size, sent, mesh, timeout=240.0)
    for where, (planned, _, padding) in ranks[0].items():
        assert padding > 0.05 or where[0] == 3, "matrices that ranks cannot share evenly"
        for name, nbytes in planned.items():
            each = [found[where][1][name] for found in ranks]
            said = f"{where}, along {name}: {each} of {nbytes:,}"
            assert abs(max(each) - nbytes) <= TOLERANCE * nbytes, said
            assert where[0] == 3 or abs(min(each) - nbytes) <= TOLERANCE * nbytes, said


@each("schedule", ["sync", "overlap"])
def test_the_rank_that_multiplies_and_sends_most_at_stage_3_is_planned(schedule: str) -> None:
    """Where units are updated one by one, the rounds of each begin with rank 0 again."""
    works, sent = [0] * 3, [0] * 3
    exchange = Round.exchange

    def exchanged(self: Round, receives: list[torch.Tensor], sends: list[torch.Tensor], what: str) -> Any:
        rank, own = self.group.rank, self.own
        works[rank] += work_of((own.height, own.width)) if own.full_numel and what == "orthogonal factors" else 0
        sent[rank] += sum(one.nbytes for to, one in enumerate(sends) if to != rank)
        return exchange(self, receives, sends, what)

    def work(world: World) -> None:
        model = world.shard(built(Uneven), stage=3)
        opt = zk.Muon(zk.muon_groups(model)[0], tier="cpu", ns_dtype="fp32", schedule=schedule)
        backward(model)
        opt.step()
        opt.flush()

    with mock.patch.object(Round, "exchange", exchanged):
        on_threads(3, work)
    formats = {"tier": "cpu", "schedule": schedule, "ns_dtype": "fp32"}
    muon = zk.plan(Uneven(), stage=3, world=3, optimizer="muon", **formats).muon
    assert muon is not None
    assert muon.rank_flops == 2 * 5 * max(works), works
    assert (muon.exchanged, muon.rank_exchanged) == (sum(sent), max(sent)), sent


def peaks(rank: int, ns_dtype: str, ns_form: str) -> tuple[int, int, int]:
    """Bytes above what is held: of a step, as the kernel counts pages; as planned; and what is left behind."""
    large_things_apart()
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(3))})
    groups = zk.muon_groups(model)
    plan = zk.plan(model, stage=0, optimizer="muon", ns_dtype=ns_dtype, ns_form=ns_form)
    opt = zk.Muon(groups[0], ns_dtype=ns_dtype, ns_form=ns_form, ns_steps=2)  # more need no more memory
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    for _ in range(2):
        opt.step()
    before = pages()
    restart_peak()
    lowest = peak()
    opt.step()
    assert plan.muon is not None
    return peak() - lowest, plan.muon.workspace, pages() - before


@pytest.mark.slow
@each("ns_dtype, ns_form", [("fp32", "standard"), ("bf16", "standard"), ("fp32", "gram")])
def test_a_step_holds_one_matrix_in_flight(ns_dtype: str, ns_form: str) -> None:
    """Of three, beside what the library of products takes: its tiles, and, on a CPU without products of bf16, the sums
    of one in fp32."""
    ((found, planned, left),) = run_ranks(1, peaks, ns_dtype, ns_form)
    multiplies = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
    sums = 0 if ns_dtype == "fp32" or multiplies else 4 * 2048 * 1024
    size = 4 if ns_dtype == "fp32" else 2
    room = 2048 * 1024 + 2 * 1024 * 1024 if ns_form == "standard" else 4 * 1024 * 1024 + 256 * 1024
    assert planned == size * (2048 * 1024 + room) + 8 * (2048 * 1024 >> 16)
    assert planned - SLACK <= found <= planned + sums + 3 * MIB, (found / MIB, planned / MIB)
    assert abs(left) <= SLACK


class TestPlanned:
    def test_six_bytes_beside_a_matrix_and_ten_beside_the_rest(self) -> None:
        plan = zk.plan("llama-3-8b", optimizer="muon", world=8)
        muon = plan.muon
        assert muon is not None and (muon.matrices, muon.rest) == (7 * 32, 2 * 32 + 3)
        assert muon.numel + muon.rest_numel == plan.numel and muon.rest_numel == 2 * 128256 * 4096 + 65 * 4096
        state = 6 * muon.numel + 10 * muon.rest_numel
        assert plan.states == 2 * plan.numel + (2 * plan.numel + state) // 8
        assert zk.plan("llama-3-8b", optimizer="muon").at(0).states == 4 * plan.numel + state
        assert "| 6.52 " in str(plan.at(2)).replace("|               6.52 ", "| 6.52 "), "the mean of both"

    def test_operations_are_those_of_the_products(self) -> None:
        """Counted while they run, of three shapes."""
        from torch.utils.flop_counter import FlopCounterMode

        from zerokern.kernels.orthogonal import iterate_

        model = nn.ModuleList(
            [nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False), nn.Linear(32, 32, bias=False)]
        )
        counted = 0
        for layer in model:
            with FlopCounterMode(display=False) as counter:
                iterate_(layer.weight.detach().clone(), torch.ones(1, dtype=torch.float64), steps=3)
            counted += counter.get_total_flops()
        plan = zk.plan(model, optimizer="muon", ns_steps=3, units=list(model))
        assert plan.muon is not None and plan.muon.flops == counted

    @pytest.mark.parametrize("each", [None, ((4.0, -6.0, 3.0), (3.0, -4.0, 2.0), (2.0, -1.5, 0.5))])
    def test_the_gram_form_is_counted_for_the_matrices_that_it_multiplies(self, each: Any) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        from zerokern.kernels.orthogonal import COEFFICIENTS, iterate_, workspace_numel

        model = nn.ModuleList([nn.Linear(*shape, bias=False) for shape in ((1100, 260), (260, 1100), (64, 32))])
        with FlopCounterMode(display=False) as counter:
            for layer in model:
                one = torch.ones(1, dtype=torch.float64)
                iterate_(layer.weight.detach().clone(), one, each or COEFFICIENTS, 3, form="gram")
        found = {"optimizer": "muon", "ns_steps": 3, "units": list(model), "device": "cpu"}
        plan, standard = (zk.plan(model, ns_form=form, ns_coefficients=each, **found) for form in ("gram", "standard"))
        assert plan.muon is not None and standard.muon is not None
        assert plan.muon.flops == counter.get_total_flops() < standard.muon.flops
        room = workspace_numel(torch.empty(260, 1100), "gram")
        assert plan.muon.workspace == 4 * (260 * 1100 + room) + 8 * 5 < standard.muon.workspace

    def test_the_rank_with_most_to_do_may_have_none_by_the_gram_form(self) -> None:
        """Each of two ranks has one matrix at stages 2 and 3; the square one takes longer in any form."""
        model = nn.Sequential(nn.Linear(4096, 512, bias=False), nn.Linear(1448, 1448, bias=False))
        asked = {"optimizer": "muon", "world": 2, "ns_form": "gram", "device": "cpu", "whole": ["0.weight", "1.weight"]}
        for stage in (2, 3):
            found = zk.plan(model, stage=stage, **asked).muon
            assert found is not None
            assert found.rank_flops == 2 * 5 * MatrixShape(1448, 1448).work < found.flops
            assert found.imbalance == pytest.approx(2 * found.rank_flops / found.flops - 1)

    @pytest.mark.parametrize("world, padding, uneven", [(8, 0, 0), (64, 0.0769, 0.0568), (256, 1.1538, 1.1135)])
    def test_ranks_share_what_they_can(self, world: int, padding: float, uneven: float) -> None:
        """The rows of docs/muon.md; stage 0 shares nothing, and stage 3 goes round by round."""
        plan = zk.plan("llama-3-8b", optimizer="muon", world=world)
        muon, at_0, at_3 = plan.muon, plan.at(0).muon, plan.at(3).muon
        assert muon is not None and at_0 is not None and at_3 is not None
        assert muon.padding / muon.numel == pytest.approx(padding, abs=1e-4)
        assert muon.imbalance == pytest.approx(uneven, abs=1e-4)
        assert muon.rank_flops == pytest.approx((1 + muon.imbalance) * muon.flops / world)
        plain = zk.plan("llama-3-8b", world=world).traffic
        more = plan.traffic.numel - plain.numel
        assert more == pytest.approx(2 * muon.padding, abs=1e-3 * plan.numel), "in a reduction and a gather"
        assert (at_0.rank_flops, at_0.padding) == (at_0.flops, 0)
        most = 2 * 2 * at_3.numel  # bytes in bf16, each way
        assert at_3.padding == 0 and 0.8 * (world - 1) / world * most <= at_3.exchanged <= most
        assert at_3.flops / world <= at_3.rank_flops <= at_3.flops / world * 2.2
        share, plain_share = plan.at(3).sent["dp"], zk.plan("llama-3-8b", world=world, stage=3).sent["dp"]
        assert share == plan.at(3).traffic.sent_nbytes == plain_share + at_3.rank_exchanged
        assert at_3.exchanged / world <= at_3.rank_exchanged <= 2.5 * at_3.exchanged / world

    def test_the_rank_with_most_is_planned(self) -> None:
        with torch.device("meta"):
            model = Uneven()
        plan = zk.plan(model, stage=2, world=3, optimizer="muon", bucket_bytes=1 << 18)
        assert plan.buckets.rank == 2
        plain = zk.plan(model, stage=2, world=3, bucket_bytes=1 << 18, whole=zk.muon_groups(model)[0])
        assert plain.muon is None and plain.buckets == plan.buckets and plain.roles["exp_avg"] > plan.roles["exp_avg"]

    @pytest.mark.usefixtures("steps_alone")
    def test_products_take_their_time(self) -> None:
        """At the rate of forward and backward, on the device; state that streams comes and goes beside."""
        plan = zk.plan("llama-3-8b", optimizer="muon", tier="cpu")
        found = plan.predict("h200-pcie", tokens=[4096])
        adamw = zk.plan("llama-3-8b", tier="cpu", update="device").predict("h200-pcie", tokens=[4096])
        assert plan.muon is not None and found.muon_seconds == plan.muon.rank_flops / found.machine.flops_s
        assert {row.schedule for row in found.rows} == {"no offload", "sync", "overlap", "overlap, plain"}
        more = found.at("no offload", 4096).step_seconds - adamw.at("no offload", 4096).step_seconds
        assert 0.97 * found.muon_seconds <= more <= found.muon_seconds, "and fewer bytes of state"
        assert found.at("overlap", 4096).step_seconds > found.at("no offload", 4096).step_seconds
        assert "Newton-Schulz takes 1.11 s of each step" in " ".join(found._notes())

    def test_a_plan_of_a_cpu_is_that_of_every_cpu(self) -> None:
        """Also where the one that plans multiplies bf16 well: `tests/core/test_machines.py` plays it."""
        resting = {"device": "cuda", "tier": "cpu", "param_tier": "cpu", "stage": 3}  # matrices too: on the host
        for settings in ({"device": "cpu", "world": 2, "stage": 3}, resting):
            by_default, by_name = (
                zk.plan("gpt2", optimizer="muon", **settings, **dtype) for dtype in ({}, {"ns_dtype": "fp32"})
            )
            assert by_default.to_dict() == by_name.to_dict()

    def test_slots_hold_a_matrix(self) -> None:
        plan = zk.plan("gpt2", optimizer="muon", tier="cpu")
        largest, rest = (
            6 * 3072 * 768,
            zk.plan(torch.nn.Embedding(50257, 768), tier="cpu", update="device", device="cuda"),
        )
        assert plan.slots_nbytes > 4 * largest + 0.9 * rest.slots_nbytes * 38 / 39

    @each("formats", FORMATS)
    def test_slots_of_small_matrices_are_those_of_a_run(
        self, formats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To the byte: some share pieces, beside one that is too large for that."""
        monkeypatch.setattr(transit, "_LEAST_OF_MATRICES", 1 << 20)
        widths = (300, 350, 300, 3000, 320, 350, 200)
        model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(width, 256, bias=False) for width in widths)})
        model = model.to(torch.bfloat16)
        plan = zk.plan(model, stage=0, optimizer="muon", tier="cpu", device="cuda", **formats)
        with played() as device:
            for param in model.parameters():
                device.own(param)
                param.grad = torch.ones_like(param)
            opt = zk.Muon(model.parameters(), ns_steps=1, tier="cpu", **formats)
            opt.step()
            beside = opt.holdings.binding.beside
            assert len(beside._ends) < len(widths)
            assert zk.measure(model, opt).roles["ring"] == plan.slots_nbytes == beside.pieces.nbytes > 0
            opt.close()

    @each("size, tier, schedule, formats", [
        (2, "cpu", "sync", {}), (3, "cpu", "overlap", {}), (3, ["device:150KB", "cpu"], "sync", {}),
        (2, ["device:200KB", "cpu"], "overlap", {"state_format": "int8", "master_format": "split8"}),
    ])  # fmt: skip
    def test_slots_of_rounds_are_those_of_a_run(
        self, size: int, tier: Any, schedule: str, formats: dict[str, Any]
    ) -> None:
        """To the byte, on the rank that is planned: what it has of the matrices of a round passes together."""
        shard = {"stage": 3, "bucket_bytes": 1 << 17}
        settings = {"tier": tier, "schedule": schedule, **formats}
        on_device = {"update": "device", **settings}  # as Muon's is by default

        def work(world: World) -> tuple[int, int, int]:
            torch.manual_seed(0)
            widths = (128, 250, 384, 250, 512, 60)
            model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(128, width) for width in widths)})
            model = model.to(torch.bfloat16)
            matrices, rest = zk.muon_groups(model)
            with played() as device:
                plan = zk.plan(model, world=size, optimizer="muon", device="cuda", **shard, **settings)
                world.shard(model, **shard)
                for param in model.parameters():
                    for one in (param, shard_of(param).piece):
                        device.own(one)
                opts = zk.Muon(matrices, ns_steps=1, ns_dtype="fp32", **settings), zk.AdamW(rest, **on_device)
                sum(block(torch.ones(2, 128, dtype=torch.bfloat16)).sum() for block in model["blocks"]).backward()
                for opt in opts:
                    opt.step()
                    opt.flush()
                device.synchronize()
                found = zk.measure(model, opts).roles["ring"]
                for opt in opts:
                    opt.close()
            return plan.slots_nbytes, found, plan.buckets.rank

        ranks = on_threads(size, work)
        planned, found, _ = ranks[ranks[0][2]]
        assert planned == found > 0

    def test_the_code_of_the_advice_runs_both(self) -> None:
        told = zk.plan("llama-3-8b", optimizer="muon", world=8, device_memory="40GB").advice()
        code = "zk.shard(model, stage=2, whole=matrices); opts = zk.Muon(matrices), zk.AdamW(rest)"
        assert f"Code: matrices, rest = zk.muon_groups(model); {code}" in told

    @pytest.mark.parametrize(
        "model, asked, says",
        [
            ("7.5B", {}, "a number alone does not say which there are"),
            ("gpt2", {"mesh": {"dp": 2, "tp": 2}}, "zk.Muon refuses DTensors"),
            ("gpt2", {"tier": "cpu", "schedule": zk.Delayed()}, "'sync' or 'overlap'"),
            ("gpt2", {"whole": ["*"]}, "unless a module is planned"),
            ("gpt2", {"ns_dtype": "fp16"}, "None | 'bf16' | 'fp32'"),
            ("gpt2", {"ns_steps": 100}, "from 0 to 99"),
            ("gpt2", {"optimizer": "adamw", "ns_steps": 3}, "'muon' where ns_dtype, ns_steps, ns_form or"),
            ("gpt2", {"ns_form": "gramm", "device": "cpu"}, "'standard' | 'gram'"),
            ("gpt2", {"ns_form": "gram"}, "measured on CPUs alone"),
            ("gpt2", {"ns_form": "gram", "ns_dtype": "bf16", "device": "cpu"}, "'standard' with ns_dtype='bf16'"),
            ("gpt2", {"ns_coefficients": ((1.5, -0.5, 0.0),)}, "1, as many as ns_coefficients has triples"),
            (nn.Linear(4, 4), {}, "one with matrices in repeated blocks"),
            (nn.Linear(4, 4), {"whole": ["bias"]}, "allowed: matrices"),
        ],
    )
    def test_what_cannot_be_known_is_refused(self, model: Any, asked: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=re.escape(says)):
            zk.plan(model, **{"optimizer": "muon", **asked})


@pytest.mark.slow
def test_a_step_takes_what_its_products_take() -> None:
    """On this CPU, at rates that are measured beside it."""
    torch.manual_seed(0)
    width = 512
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(8))})
    groups = zk.muon_groups(model)
    opts = optimizers(groups)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    plan = zk.plan(model, stage=0, optimizer="muon", ns_dtype="fp32")
    left, right, out = torch.randn(width, width), torch.randn(width, 4 * width), torch.empty(width, 4 * width)
    source = torch.randn(1 << 25)
    copy = source.clone()

    def seconds(act: Any) -> float:
        begin = time.perf_counter()
        act()
        return time.perf_counter() - begin

    def once() -> float:
        flops_s = 20 * 8 * width**3 / seconds(lambda: [torch.mm(left, right, out=out) for _ in range(20)])
        gb_s = 2 * source.nbytes / seconds(lambda: copy.copy_(source)) / 1e9
        machine = Machine("here", flops_s=flops_s, device_gb_s=gb_s, down_gb_s=1, up_gb_s=1, host_gb_s=gb_s)
        ops = [op for op in step_program(plan, NO_OFFLOAD, 1).ops if op.verb == "Step"]
        return seconds(lambda: [opt.step() for opt in opts]) / sum(map(machine.seconds, ops))

    once()
    ratios = sorted(once() for _ in range(7))
    assert 0.6 <= ratios[3] <= 2.0, ratios
