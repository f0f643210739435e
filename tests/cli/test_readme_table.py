"""The README's numbers come from a committed result file, through bench/readme.py."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from tables import each

readme = import_module("zerokern.bench.readme")
ROOT = Path(__file__).resolve().parents[2]
PAGE = f"# x\nbefore\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
CONTENT = {
    "machine": {"cpu": "CPU", "isa": "avx512"},
    "versions": {"torch": "2.13.0"},
    "date": "2026-11-20T10:00:00+00:00",
    "commit": "0123456789ab",
    "command": "zerokern bench adam",
    "threads": 2,
    "shape": {"name": "flat", "numel": 1 << 20, "tensors": 1},
    "contests": [{"name": "AdamW full step", "peers": {"compile": {}}}],
    "rows": [
        {
            "contest": "AdamW full step",
            "name": "int8 states, split8",
            "ns_per_param": 0.2804,
            "bytes": 14.125 * 2**20,
            "roof_share": 0.912,
            "lossy": "int8 states",
            "peer": False,
            "ratio": {"compile": 2.104},
            "ratio_interval": {"compile": [2.0, 2.2]},
        },
        {"contest": "AdamW full step", "name": "compile", "ns_per_param": 0.59, "peer": True},
    ],
}


def test_table_of_a_result() -> None:
    lines = readme.table(CONTENT, "bench/results/a.json").splitlines()
    assert lines[0] == "<!-- from bench/results/a.json -->"
    assert lines[2] == "| AdamW full step | ns/param | bytes/param | of the roof | vs torch.compile (0.59 ns) |"
    assert lines[4] == "| int8 states, split8 *(lossy)* | 0.280 | 14.1 | 91 % | **2.10x** (2.00 to 2.20) |"
    assert len(lines) == 7


def test_table_replaces_what_is_between_the_markers() -> None:
    page = readme.written(PAGE, {"bench/results/a.json": CONTENT})
    assert page.startswith(f"# x\nbefore\n{readme.BEGIN}\n<!-- from bench/results/a.json -->\n")
    assert page.endswith(f"\n{readme.END}\nafter\n")
    assert readme.between_markers(page) == readme.table(CONTENT, "bench/results/a.json")
    assert readme.written(page, {"bench/results/a.json": CONTENT}) == page


@each("page", ["no markers", f"{readme.BEGIN}", PAGE + PAGE])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        readme.between_markers(page)


ZERO_PAGE = f"# x\n{readme.ZERO_BEGIN}\n{readme.ZERO_END}\nafter\n"
STEPS = {
    "op": "zero",
    "label": "CPU, gloo: no claim for GPUs",
    "machine": {"cpu": "CPU", "isa": "avx512"},
    "versions": {"torch": "2.13.0"},
    "date": "2026-11-21T10:00:00+00:00",
    "command": "zerokern bench zero",
    "contests": [
        {
            "name": "GPT 25M",
            "sequences_per_rank": 2,
            "context": 32,
            "ddp_communication_share": 0.27,
            "peers": {"ddp": {}},
        }
    ],
    "rows": [
        {
            "contest": "GPT 25M",
            "name": "zk.shard stage 2",
            "ns": 250_000_000,
            "peer": False,
            "ratio": {"ddp": 1.04},
            "ratio_interval": {"ddp": [1.0, 1.1]},
        },
        {"contest": "GPT 25M", "name": "ddp", "ns": 260_000_000, "peer": True, "ratio": {}, "ratio_interval": {}},
    ],
}


def test_table_of_whole_steps() -> None:
    page = readme.written(ZERO_PAGE, {"bench/results/z.json": STEPS})
    assert readme.between_markers(page, readme.ZERO_BEGIN, readme.ZERO_END) == readme.steps_table(
        STEPS, "bench/results/z.json"
    )
    lines = page.splitlines()
    assert "| GPT 25M | a step | vs ddp (260 ms) |" in lines
    assert "| zk.shard stage 2 | 250 ms | **1.04x** (1.00 to 1.10) |" in lines
    assert any(line.startswith("CPU, gloo: no claim for GPUs. CPU (avx512)") for line in lines)


def test_a_part_of_a_run_is_not_published() -> None:
    with pytest.raises(ValueError, match=r"a\.json: the run was interrupted"):
        readme.written(PAGE, {"bench/results/a.json": {**CONTENT, "interrupted": "after 2 of 60 rounds"}})


def test_a_row_for_each_machine() -> None:
    """On a GPU the contest and torch.compile have other names; what was not measured is a dash."""
    ours = {"contest": "AdamW full step", "name": "zk.AdamW, exact, split16", "ns_per_param": 0.509, "peer": False,
            "ratio": {"torch": 2.13, "compile": 1.16, "deepspeed": 2.129}}  # fmt: skip
    gpu = {"contest": "mixed step, flat, 9 parameters", "name": "zk.AdamW, split16", "ns_per_param": 0.00682,
           "peer": False, "ratio": {"torch": 2.05, "torch compile": 1.05}}  # fmt: skip
    results = {
        "bench/results/adam_epyc-2_1.json": {**CONTENT, "rows": [*CONTENT["rows"], ours]},
        "bench/results/gpu_h200_1.json": {"contests": [{"name": gpu["contest"]}], "rows": [gpu]},
    }
    lines = readme.shown_of(results, readme.KINDS).splitlines()
    assert lines[:2] == [f"{readme.SOURCE}{source} -->" for source in results]
    assert lines[5:] == [
        "| AMD EPYC, Zen 4, 2 cores | 0.51 | 2.13x | 1.16x | 2.13x | 0.28 | 2.10x |",
        "| NVIDIA H200 | 0.0068 | 2.05x | 1.05x | - | - | - |",
    ]


@each("op", [*sorted(readme.MARKERS), ""])
def test_a_page_shows_what_was_measured(op: str) -> None:
    """Numbers are those of the files that the page names; `python -m bench.readme <file> ...` writes them."""
    page = ROOT / readme.PAGES.get(op, readme.OTHERS)
    markers = readme.MARKERS.get(op, (readme.BEGIN, readme.END))
    shown = readme.between_markers(page.read_text(encoding="utf-8"), *markers)
    sources = readme.sources_of(shown)
    assert all(source.startswith("bench/results/") for source in sources)
    results = {source: json.loads((ROOT / source).read_text(encoding="utf-8")) for source in sources}
    assert shown == readme.shown_of(results, op)
