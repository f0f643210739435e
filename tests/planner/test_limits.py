"""What fits and how fast it goes on two machines, and the tokens that hide a disk: figures that were computed by hand.

One H100 of 80 GB with 128 GiB and one NVMe drive of 6 GB/s that reads and writes at one rate; eight of them with 2 TB.
500 TFLOPS, recomputation (8 flops per token and parameter), no attention, everything fetched twice. Each comes out of
`zk.plan` within the rounding of its last digit, but where a test says what was assumed otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import zerokern as zk
from zerokern.planner.forecast import hiding, step_program
from zerokern.schedule import Machine, simulate

SMALL = {"state_format": "int8", "master_format": "split8"}
EXACT: dict[str, str] = {}
H100 = Machine(
    "h100", flops_s=500e12, device_gb_s=2000, down_gb_s=50, up_gb_s=50, host_gb_s=400, host_all_gb_s=400, read_gb_s=6,
    write_gb_s=6, read_both_gb_s=3, write_both_gb_s=3,
)  # fmt: skip
FULL_DUPLEX = replace(H100, read_both_gb_s=None, write_both_gb_s=None)
TOKENS = 1 << 17


def at_rest(model: object, param_tier: str = "nvme", tier: str = "nvme", **asked: object) -> zk.Plan:
    given = {"schedule": "overlap", "keep": "device"} | asked
    return zk.plan(model, stage=3, param_tier=param_tier, tier=tier, **given)


def io_seconds(plan: zk.Plan) -> float:
    """Of a drive that reads and writes at one rate."""
    return (plan.moved("read") + plan.moved("write")) / 6e9


def step_seconds(plan: zk.Plan, tokens: int, machine: Machine = H100) -> float:
    return simulate(step_program(plan, "overlap", tokens), machine.shared_by(plan.world), steps=1).step_seconds


class TestOneGpu:
    def test_a_step_of_131k_tokens(self) -> None:
        """Perfect overlap, and the simulator's step, which has most of the disk beside a quarter of the compute."""
        rows = (
            (13, EXACT, 56.3, 27, 2330, 1.29),
            (70, EXACT, 303.3, 147, 432, 1.29),
            (32, SMALL, 64.7, 67, 1950, 1.57),
            (120, SMALL, 242.5, 252, 521, 1.57),
        )
        for billions, formats, io, compute, speed, slower in rows:
            plan = at_rest(billions * 10**9, **formats)
            flops = sum(op.flops for op in step_program(plan, "overlap", TOKENS).ops)
            assert io_seconds(plan) == pytest.approx(io, abs=0.5)
            assert flops / 500e12 == pytest.approx(compute, abs=0.5)
            longer = max(io_seconds(plan), flops / 500e12)
            assert TOKENS / longer == pytest.approx(speed, rel=0.02)
            assert step_seconds(plan, TOKENS) == pytest.approx(longer * slower, rel=0.01)


class TestEightGpus:
    @pytest.mark.parametrize("formats, at_rest_tb, io", [(EXACT, 12, 542), (SMALL, 5.06, 252)])
    def test_a_trillion(self, formats: dict, at_rest_tb: float, io: int) -> None:
        """Beside 2,000 s of compute at a million tokens all of it is hidden: 500 tokens per second."""
        plan = at_rest("1T", world=8, **formats)
        on_disk = sum(one.nbytes for one in plan.held if one.tier == "nvme") * 8 / 1e12
        assert on_disk == pytest.approx(at_rest_tb, abs=0.05) and io_seconds(plan) == pytest.approx(io, abs=1)
        seconds = 8 * 1e12 * 1e6 / (8 * 500e12)
        machine = replace(H100, net_gb_s=1e9)
        assert step_seconds(plan, 125_000, machine) == pytest.approx(seconds, rel=0.05)


LAYOUTS: tuple[tuple[dict, dict, bool, tuple, tuple], ...] = (
    (EXACT, {}, False, (14, 12), (271, 146)),
    (EXACT, {}, True, (16, 14), (312, 167)),
    (SMALL, {}, False, (7.0625, 5.0625), (126, 74)),
    (SMALL, {}, True, (9.0625, 7.0625), (168, 94)),
    (SMALL, {"param_tier": "cpu"}, False, (3.0625, 3.0625), (64, 32)),
)  # formats, places, whether gradients spill; bytes read and written; T* in thousands


def test_tokens_that_hide_the_disk() -> None:
    """T* = bytes / 6 GB/s x 500 TFLOPS / 8, in thousands: of a drive with one rate for both, and of two."""
    for formats, asked, spills, moved, thousands in LAYOUTS:
        plan = at_rest("1B", **formats, **asked)
        plan = replace(plan, settings=replace(plan.settings, spills=spills))
        assert (plan.moved("read") / 1e9, plan.moved("write") / 1e9) == moved
        program = step_program(plan, "overlap", TOKENS)
        found = [
            next(one.tokens for one in hiding(program, machine, TOKENS) if one.what == "disk, both at once") / 1000
            for machine in (H100, FULL_DUPLEX)
        ]
        assert found == pytest.approx(thousands, abs=0.6)
