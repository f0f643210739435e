"""What the pictures of results say: order, one roof, and for whom a lossy format is worse."""

from __future__ import annotations

from typing import Any

from zerokern.bench import plot, quality_plot
from zerokern.bench.disk import plot as disk_plot

ROWS: list[dict[str, Any]] = [
    {"name": "exact, split16", "ns": 5.0, "bytes": 280.0, "lossy": "", "peer": False},
    {"name": "compile", "ns": 6.0, "bytes": 300.0, "lossy": "", "peer": True},
    {"name": "int8 states, split8", "ns": 3.0, "bytes": 140.0, "lossy": "int8 states", "peer": False},
]


def test_the_fastest_is_on_top_whoever_it_is() -> None:
    assert [row["ns"] for row in plot.ordered(ROWS)] == [3.0, 5.0, 6.0]


def test_the_roof_is_that_of_the_exact_row_with_the_fewest_bytes() -> None:
    assert plot.roof_of(ROWS, gb_s=56.0, numel=10) == (0.5, 28.0)


def test_a_ratio_on_a_disk_says_that_it_is_paired() -> None:
    row = {"gb_s": 2.0, "cpu_s_per_gib": 0.01, "ratio": {"fio": 0.94}, "ratio_interval": {"fio": (0.91, 1.09)}}
    assert disk_plot._annotation(row).endswith("0.94× fio, paired (0.91 to 1.09)")
    assert "formed within each round" in disk_plot.PAIRED


def test_losses_are_shown_as_differences_to_the_exact_run_of_the_seed() -> None:
    exact = [{"format": "exact", "seed": seed, "loss": float(seed)} for seed in range(3)]
    lossy = [{"format": "int8", "seed": seed, "loss": seed + gap} for seed, gap in enumerate((0.5, 0.25, -0.5))]
    gaps = quality_plot.differences([*exact, *lossy], ["exact", "int8"], "loss")
    assert gaps == {"int8": {0: 0.5, 1: 0.25, 2: -0.5}}
    assert quality_plot.finding(gaps["int8"], "int8") == "int8 is worse on 2 of 3 seeds"
    assert quality_plot.deviation(exact, "exact", "loss") == 1.0
