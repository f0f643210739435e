"""`docs/gpu-figures.md`, written from the kept results: `python -m zerokern.bench.gpu.pages` in the source tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..report import duration
from . import minutes
from .turns import LEAST_ROUNDS

PAGE, RESULTS = "docs/gpu-figures.md", "bench/results"
HEADER = ("what", "rounds", "time", "of a copy", "faster than others by")
BEGIN = """# GPU figures

All that the kept results of GPUs say of our own rows, slow ones included. A run on your GPU, and this page from the
files in `bench/results/`, which a test compares with it:

```bash
bash bench/gpu.sh OUT
python -m zerokern.bench.gpu.pages
```

A ratio below 1 says that the other one is faster. *of
a copy* is the share of the bandwidth that a copy reached in the same rounds. Brackets are 95 % intervals; figures of
fewer than 7 rounds have none, and may be off by much.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, for results by the names of their files."""
    return "\n".join([BEGIN, *(line for name, content in results.items() for line in _of_file(name, content))])


def kept(tree: Path) -> dict[str, dict[str, Any]]:
    """The results of GPUs in a tree, by the names of their files."""
    return minutes.kept(tree)


def _of_file(name: str, content: Mapping[str, Any]) -> Iterator[str]:
    machine, versions = content["machine"], content["versions"]
    yield f"## {machine['gpu']['name']}, {content['date'][:10]}, {', '.join(content['took'])}"
    yield ""
    yield f"[{name}](../{RESULTS}/{name}): `{content['command']}`, commit {content['commit'] or 'not recorded'}, driver"
    yield f"{machine['gpu']['driver_version']}, torch {versions['torch']}, Triton {versions['triton']}, host"
    yield f"{machine['cpu']} with {machine['memory_gib']:.0f} GiB; bandwidth of the host's memory {_host(content)}."
    yield ""
    yield from (f"* Could not run {entry['key']}: {entry['why']}." for entry in content["could_not"])
    yield ""
    yield _line(HEADER)
    yield _line(["---", *["---:"] * 3, "---"])
    for contest in content["contests"]:
        yield from _of_contest(contest, [row for row in content["rows"] if row["contest"] == contest["name"]])
    yield ""


def _host(content: Mapping[str, Any]) -> str:
    rates = [fact["found"] for fact in content["facts"] if fact["name"].startswith("host memory")]
    return f"{rates[0]['stream 1r 4u']:.0f} GB/s" if rates else "not recorded"


def _of_contest(contest: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Iterator[str]:
    times = {row["name"]: row["ns"] for row in rows}
    few = contest["rounds"] < LEAST_ROUNDS
    for row in rows:
        if row["peer"]:
            continue
        others = []
        for peer, ratio in row["ratio"].items():
            interval = row["ratio_interval"][peer]
            between = "" if few or not interval else f" [{interval[0]:.2f} {interval[1]:.2f}]"
            taken = times.get(f"{peer}, {contest['peers'][peer]['wiring']}")
            others.append(f"{peer} {ratio:.3g}x{between}" + (f", {duration(taken)}" if taken else ""))
        share = "" if row["roof_share"] is None else f"{row['roof_share']:.3f}"
        what = f"{contest['name']}: {row['name']}" + (" *(lossy)*" if row["lossy"] else "")
        yield _line([what, str(contest["rounds"]), duration(row["ns"]), share, "; ".join(others)])


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    tree = Path.cwd()
    (tree / PAGE).write_text(page(kept(tree)), encoding="utf-8")
