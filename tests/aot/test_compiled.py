"""What the compiler made of each kernel: wide accesses, nothing spilled, nothing contracted, nothing approximate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from ahead_of_time import Work, compile_all
from compile import access_widths, facts_of_ptx
from jobs import all_jobs, every_format, of_ferry, of_sumsq, of_updates
from lane import is_drawn
from products import covering
from promises import ARCHITECTURES, IN_FLIGHT, Promises, compile_job, is_for, make_job, programs_of, promised
from tables import run_table

from zerokern.kernels.rules import RULES
from zerokern.kernels.triton import sumsq
from zerokern.kernels.triton.variants import Formats

OTHER = "3.6.0"  # of torch 2.11


def in_turn(every: bool) -> list[Work]:
    """The jobs, each for the next architecture of those that it is for."""
    work = []
    for number, job in enumerate(all_jobs(every)):
        fitting = [one for one in ARCHITECTURES if is_for(job, one)]
        work.append((job, fitting[number % len(fitting)]))
    return work


def one_of_each() -> list[Work]:
    """One for each kernel, and for each algorithm of the update."""
    return list(
        {(job["kernel"], algorithm_of(job["case"])): (job, at) for job, at in reversed(in_turn(False))}.values()
    )


def algorithm_of(case: str) -> str:
    return found[0] if (found := re.match("adam|lion|adagrad|sgd|muon", case)) else ""


def many(meet: int) -> list[Work]:
    """Jobs in which any so many settings of a kernel meet, for an architecture in turn.

    A compiler takes a second for each, and every job would be 535.
    """
    by_kernel: dict[str, list[Work]] = {}
    for work in in_turn(every=True):
        by_kernel.setdefault(work[0]["kernel"], []).append(work)
    return [some[place] for some in by_kernel.values() for place in sorted(covering(settings_of(some), meet))]


def on_all_architectures() -> list[Work]:
    return [(job, at) for job, _ in one_of_each() for at in ARCHITECTURES if is_for(job, at)]


def settings_of(work: list[Work]) -> list[list[str]]:
    """What differs between the jobs of a kernel, as rows."""
    rows = [{**job["signature"], **job["constexprs"]} for job, _ in work]
    names = sorted({name for row in rows for name in row if len({repr(one.get(name)) for one in rows}) > 1})
    return [[repr(row.get(name)) for name in names] for row in rows]


def name_of(work: Work) -> str:
    job, architecture = work
    return f"{job['kernel'].rpartition(':')[2]}-{job['case']}-sm_{architecture}"


def drawn(work: list[Work], config: pytest.Config) -> list[Work]:
    """The half that `--seed` draws: a kernel takes about a second to compile."""
    return [one for one in work if is_drawn(name_of(one), config)]


def compiled(
    work: list[Work], folder: Path, config: pytest.Config, *words: str, triton: Path | None = None
) -> list[Any]:
    """Triton's cache is kept from run to run: it knows a kernel by its source, that of what it calls, its options."""
    if version("triton").startswith("3.6."):  # misreads sm_120, ends at sm_103; compiled by it: the slow test below
        pytest.skip("needs a disassembler as new as the assembler; Triton 3.6 has nvdisasm 12.8 and ptxas 12.9")
    wanted = {name_of(one): one for one in work}
    kept = getattr(config, "cache", None)
    cache = kept.mkdir("triton" if triton is None else triton.name + "-compiled") if kept else folder / "cache"
    facts, besides = compile_all(wanted, folder, cache, *words, other=triton)
    rows = [(name, facts[name], *one) for name, one in wanted.items()]
    run_table(assert_promises, ["kernel", "facts", "job", "architecture"], rows)
    return besides


def other_triton(config: pytest.Config, folder: Path) -> Path:
    """A folder with the older Triton that programs must work with, fetched once; skips where there is no network."""
    kept = getattr(config, "cache", None)
    found = kept.mkdir(f"triton-{OTHER}") if kept else folder / f"triton-{OTHER}"
    if not (found / "triton" / "backends").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            found,
            f"triton=={OTHER}",
        ]
        if subprocess.run(command, capture_output=True, timeout=900).returncode:
            pytest.skip(f"needs triton {OTHER}, which pip cannot fetch here")
    return found


@pytest.mark.slow
def test_each_kernel_keeps_its_promises(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    compiled(drawn(many(2) + on_all_architectures(), pytestconfig), tmp_path, pytestconfig)


@pytest.mark.slow
def test_updates_have_bytes_in_flight(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every format, of which a run takes a fifth: on sm_90, and every third of those on sm_80 and sm_100 each.

    Per program they are counted by its tiles: where it has one, all of it is loaded before anything is stored; a ring
    is filled by copies that the tile before the last one waits for, which are in the PTX. How many programs an SM holds
    follows from registers and shared memory.
    """
    fitting = [job for job in of_updates(every=True) if is_for(job, 90)]
    jobs = [job for job in fitting if is_drawn(name_of((job, 90)), pytestconfig, 0.2)]
    works = [(job, 90) for job in jobs] + [(job, 80) for job in jobs[::3]] + [(job, 100) for job in jobs[1::3]]
    compiled(works, tmp_path, pytestconfig)


def test_no_format_has_fewer_bytes_ahead_than_four_programs_need() -> None:
    for made in every_format():
        assert 4 * made.config(short=False).ahead(made.read_nbytes) >= IN_FLIGHT, made


@pytest.mark.slow
def test_each_kernel_keeps_its_promises_with_the_triton_of_torch_2_11(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Its assembler is another one, which spills elsewhere: each setting of a kernel, once."""
    work = drawn(many(1) + one_of_each(), pytestconfig)
    compiled(work, tmp_path, pytestconfig, triton=other_triton(pytestconfig, tmp_path))


def assert_promises(kernel: str, facts: dict[str, Any], job: dict[str, Any], architecture: int) -> None:
    assert "error" not in facts, facts["error"]
    promises = promised(job, architecture)
    assert facts["registers"] <= promises["registers"]
    assert facts["stack"] <= promises["spilled"]
    assert facts["spills"] == 0 or promises["spilled"]
    assert facts["shared"] <= promises["shared"]
    for way in promises["wide"]:
        assert "128" in facts[f"{way}s"], f"the widest arrays move 128 bits at a time: {way}s: {facts[f'{way}s']}"
    assert facts["contractible"] == {}, "the assembler may fuse what is not marked as rounded"
    if promises["fma"] is not None:
        named = {kind: count for kind, count in promises["fma"].items() if count}
        assert facts["fma"] == named, "every fused multiply-add is one that the source names"
    if promises["exact"]:
        assert facts["approximate"] == {}
    assert {*facts["flushing"]} <= {*facts["approximate"]}
    assert facts["copied"] >= promises["copied"], "what a ring has in flight is copied into it, not loaded"
    if promises["ahead"] is not None:
        programs = programs_of(facts["registers"], facts["shared"], job["num_warps"], architecture)
        assert programs * promises["ahead"] >= IN_FLIGHT, f"{programs} programs of {promises['ahead']} bytes in flight"
    if promises["float64"] is not None:
        found = facts["float64_before_stores" if promises["seldom"] else "float64"]
        assert found <= promises["float64"], f"float64 is scarce there: {facts['opcodes']}"


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


def test_jobs_survive_json_name_every_argument_and_have_names_of_their_own() -> None:
    for every in (False, True):
        jobs = all_jobs(every)
        assert json.loads(json.dumps(jobs)) == jobs
        assert len({(job["kernel"], job["case"]) for job in jobs}) == len(jobs)
        for job in jobs:
            assert {*job["constexprs"]} == {name for name, kind in job["signature"].items() if kind == "constexpr"}


def test_formats_cover_what_the_ops_accept() -> None:
    every = set(every_format())
    assert len(every) == 1536
    assert all(made.vector in (4, 8) and 16 % made.vector == 0 for made in every)
    assert {made.algorithm for made in every} == set(RULES)
    fp32 = Formats("adam", torch.float32, torch.float32, "fp32", "fp32", None, False)
    assert fp32 in every and fp32.vector == 4


def test_spans_of_each_alignment_have_a_job() -> None:
    words = [job["constexprs"]["WORD"] for job in of_ferry(every=True)]
    assert words == ["tl.int64", "tl.int32", "tl.int16", "tl.int8"]


def test_a_job_that_leaves_an_argument_out_is_refused() -> None:
    promises = Promises(registers=64)
    with pytest.raises(ValueError, match=r"sumsq_chunks has arguments .* not given exactly once: .*'VEC'"):
        make_job(sumsq.sumsq_chunks, "bad", {"out": "*fp64"}, {"CHUNKS": 1}, promises, num_warps=1)


def test_an_interpreted_kernel_says_why_it_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    job = of_sumsq(every=False)[0]
    monkeypatch.setattr(sumsq, "sumsq_chunks", sumsq.sumsq_chunks.fn)  # not a JITFunction, as under TRITON_INTERPRET
    with pytest.raises(ValueError, match="sumsq_chunks is interpreted in this process; allowed: a process started"):
        compile_job(job, 90)


def test_one_of_each_keeps_its_promises_and_what_is_launched_is_what_was_compiled(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Argument by argument: types, constants, alignment, warps. A launch that no job covers would compile by itself.

    In one process, whose start takes as long as several kernels.
    """
    (launches,) = compiled(one_of_each(), tmp_path, pytestconfig, "launches")
    covered = [essence(job) for job in all_jobs(every=True)]
    assert len(launches) > 500
    for launch in launches:
        assert essence(launch) in covered, launch
        assert launch["enable_fp_fusion"] is False


def essence(job: dict[str, Any]) -> dict[str, Any]:
    """What tells one compiled kernel from another."""
    taken = {name: job[name] for name in ("kernel", "signature", "constexprs", "num_warps", "maxnreg")}
    return taken | {"aligned": sorted(job["aligned"])}
