"""The README's table comes from a committed result file: numbers are generated, never typed.

`python -m bench.readme bench/results/<file>.json` writes the table between the README's markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plot import count, peer_name

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
SOURCE = "<!-- from "


def table(content: Mapping[str, Any], source: str) -> str:
    """A Markdown table of the first contest: our rows, time, bytes, share of the roof, and the ratio to each peer."""
    contest = content["contests"][0]
    rows = [row for row in content["rows"] if row["contest"] == contest["name"]]
    peers = list(contest["peers"])
    times = {row["name"]: row["ns_per_param"] for row in rows if row["peer"]}
    header = [contest["name"], "ns/param", "bytes/param", "of the roof"]
    header += [f"vs {peer_name(peer, contest['name'])} ({times[peer]:.2f} ns)" for peer in peers]
    lines = [f"{SOURCE}{source} -->", "", _line(header), _line(["---"] + ["---:"] * (len(header) - 1))]
    lines += [_line(_cells(row, peers, content["shape"]["numel"])) for row in rows if not row["peer"]]
    return "\n".join([*lines, "", conditions(content)])


def conditions(content: Mapping[str, Any]) -> str:
    """Where and how, in one sentence."""
    machine, shape = content["machine"], content["shape"]
    return (
        f"{count(shape['numel'])} parameters, {content['threads']} threads, {machine['cpu']} ({machine['isa']}), "
        f"torch {content['versions']['torch']}, {content['date'][:10]}, `{content['command']}`; "
        "medians of paired runs with 95 % intervals; *lossy* rows do different work than the exact peers."
    )


def _cells(row: Mapping[str, Any], peers: Sequence[str], numel: int) -> list[str]:
    name = f"{row['name']} *(lossy)*" if row["lossy"] else row["name"]
    own = [name, f"{row['ns_per_param']:.3f}", f"{row['bytes'] / numel:.1f}", f"{100 * row['roof_share']:.0f} %"]
    return own + [_ratio(row, peer) for peer in peers]


def _ratio(row: Mapping[str, Any], peer: str) -> str:
    low, high = row["ratio_interval"][peer]
    return f"**{row['ratio'][peer]:.2f}x** ({low:.2f} to {high:.2f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def between_markers(readme: str) -> str:
    """What the README shows now."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md; allowed: {BEGIN} and {END}, once each")
    return readme.split(BEGIN)[1].split(END)[0].strip("\n")


def source_of(shown: str) -> str:
    """The result file that the shown table names."""
    first = shown.splitlines()[0] if shown else ""
    if not first.startswith(SOURCE):
        raise ValueError(f"the README's table begins with {first!r}; allowed: {SOURCE}bench/results/<file>.json -->")
    return first.removeprefix(SOURCE).removesuffix(" -->")


def written(readme: str, content: Mapping[str, Any], source: str) -> str:
    """The README with the table of `content` between its markers."""
    before, _, rest = readme.partition(BEGIN)
    between_markers(readme)
    return f"{before}{BEGIN}\n{table(content, source)}\n{END}{rest.partition(END)[2]}"


def main(argv: Sequence[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    source, readme = Path(argv[0]).resolve().relative_to(root), root / "README.md"
    readme.write_text(written(readme.read_text(), json.loads((root / source).read_text()), source.as_posix()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
