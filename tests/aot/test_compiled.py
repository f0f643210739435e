"""What the compiler made of each kernel: wide accesses, nothing spilled, nothing contracted, nothing approximate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

from ahead_of_time import LAUNCHES, compiling
from compile import access_widths, facts_of_ptx

from zerokern.kernels.triton import ahead, sumsq

Work = tuple[dict[str, Any], int]
FactsOf = Callable[[Work], dict[str, Any]]


def test_registers_stay_under_the_bound_and_nothing_spills(work: Work, facts_of: FactsOf) -> None:
    facts, promises = facts_of(work), work[0]["promises"]
    assert facts["registers"] <= promises["registers"]
    assert facts["stack"] <= promises["spilled"]
    assert facts["spills"] == 0 or promises["spilled"]
    assert facts["shared"] <= promises["shared"]


def test_the_widest_arrays_move_128_bits_at_a_time(work: Work, facts_of: FactsOf) -> None:
    facts = facts_of(work)
    for way in work[0]["promises"]["wide"]:
        assert "128" in facts[f"{way}s"], f"{way}s: {facts[f'{way}s']}"


def test_every_fused_multiply_add_is_one_that_the_source_names(work: Work, facts_of: FactsOf) -> None:
    facts, promises = facts_of(work), work[0]["promises"]
    assert facts["contractible"] == {}, "the assembler may fuse what is not marked as rounded"
    if promises["fma"] is not None:
        assert facts["fma"] == {kind: count for kind, count in promises["fma"].items() if count}


def test_exact_kernels_neither_approximate_nor_flush(work: Work, facts_of: FactsOf) -> None:
    facts = facts_of(work)
    if work[0]["promises"]["exact"]:
        assert facts["approximate"] == {}
    assert {*facts["flushing"]} <= {*facts["approximate"]}


def test_a_contraction_an_approximation_and_a_flush_are_found() -> None:
    ptx = """
        fma.rn.f32 %f1, %f2, %f3, %f4;
        fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;
        @%p1 div.full.f32 %f5, %f1, %f2;
        mul.f32 %f6, %f1, %f2;
        add.rn.ftz.f32 %f7, %f1, %f2;
        sqrt.rn.f32 %f8, %f1;
    """
    facts = facts_of_ptx(ptx)
    assert facts["fma"] == {"f32": 3}
    assert facts["approximate"] == {"div.full.f32": 1}
    assert facts["contractible"] == {"mul.f32": 1}
    assert facts["flushing"] == {"add.rn.ftz.f32": 1}
    assert facts["rounded"] == {"sqrt.rn.f32": 1}


def test_widths_of_accesses_are_told_apart() -> None:
    ptx = "@%p ld.global.v4.b32 {%r}; ld.global.cg.b64 %r; ld.global.L1::evict_first.v8.b16 %r; st.global.v2.b64 [%r];"
    assert access_widths(ptx, "ld") == {"128": 2, "64": 1}
    assert access_widths(ptx, "st") == {"128": 1}


def test_jobs_survive_json_and_name_every_argument() -> None:
    for job in ahead.jobs(every=True):
        assert json.loads(json.dumps(job)) == job
        assert {*job["constexprs"]} == {name for name, kind in job["signature"].items() if kind == "constexpr"}


def test_jobs_have_names_of_their_own() -> None:
    for every in (False, True):
        names = [(job["kernel"], job["case"]) for job in ahead.jobs(every)]
        assert len(set(names)) == len(names)


def test_a_job_that_leaves_an_argument_out_is_refused() -> None:
    promises = ahead.Promises(registers=64)
    with pytest.raises(ValueError, match=r"sumsq_chunks has arguments .* not given exactly once: .*'VEC'"):
        ahead.make_job(sumsq.sumsq_chunks, "bad", {"out": "*fp64"}, {"CHUNKS": 1}, promises, num_warps=1)


def test_an_interpreted_kernel_says_why_it_cannot_be_compiled() -> None:
    code = "from zerokern.kernels.triton import ahead, sumsq; ahead.compile_job(sumsq.aot_jobs(every=False)[0], 90)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "sumsq_chunks is interpreted in this process; allowed: a process started without" in ran.stderr


def test_what_is_launched_is_what_was_compiled() -> None:
    """Argument by argument: types, constants, alignment, warps. A launch that no job covers would compile by itself."""
    ran = subprocess.run([sys.executable, LAUNCHES], capture_output=True, text=True, env=compiling())
    assert ran.returncode == 0, ran.stderr
    covered = [essence(job) for job in ahead.jobs(every=True)]
    launches = json.loads(ran.stdout)
    assert len(launches) > 500
    for launch in launches:
        assert essence(launch) in covered, launch
        assert launch["enable_fp_fusion"] is False


def essence(job: dict[str, Any]) -> dict[str, Any]:
    """What tells one compiled kernel from another."""
    return {name: job[name] for name in ("kernel", "signature", "constexprs", "num_warps")} | {
        "aligned": sorted(job["aligned"])
    }
