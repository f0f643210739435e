"""Tables in the README and in docs/ come from committed result files: numbers are generated, never typed.

`python -m bench.readme bench/results/<file>.json ...` writes that op's tables between its markers, one for each file: a
run for each kind of machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plot import count, peer_name, plain_command

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
ZERO_BEGIN, ZERO_END = "<!-- zero:begin -->", "<!-- zero:end -->"
OFFLOAD_BEGIN, OFFLOAD_END = "<!-- offload:begin -->", "<!-- offload:end -->"
MARKERS = {"zero": (ZERO_BEGIN, ZERO_END), "offload": (OFFLOAD_BEGIN, OFFLOAD_END)}
PAGES = {"zero": "docs/zero.md", "offload": "docs/offload.md"}  # others: README.md
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


def steps_table(content: Mapping[str, Any], source: str) -> str:
    """A Markdown table of the contests of whole steps: our rows, time, and the ratio to each peer."""
    lines = [f"{SOURCE}{source} -->"]
    for contest in content["contests"]:
        rows = [row for row in content["rows"] if row["contest"] == contest["name"]]
        raced = {peer for row in rows if not row["peer"] for peer in row["ratio"]}
        peers = [row["name"] for row in rows if row["name"] in raced]
        times = {row["name"]: f"{row['ns'] / 1e6:.0f} ms" for row in rows}
        held = {row["name"]: row["host_bytes_per_param"] for row in rows if row.get("host_bytes_per_param")}
        header = [contest["name"], "a step", *(["bytes/param"] if held else [])]
        header += [f"vs {peer} ({times[peer]}{_held(held, peer)})" for peer in peers]
        lines += ["", _line(header), _line(["---"] + ["---:"] * (len(header) - 1))]
        for row in rows:
            if not row["peer"]:
                ratios = [_ratio(row, peer) if peer in row["ratio"] else "" for peer in peers]
                memory = [f"{held[row['name']]:.1f}"] if held else []
                lines.append(_line([row["name"], times[row["name"]], *memory, *ratios]))
        lines += [
            "",
            f"{contest['sequences_per_rank']} sequences of {contest['context']} tokens per rank, AdamW with clipping"
            f"{_share(contest)}{_roof(contest, times)}. Each peer at its best of the settings that were tried.",
            "",
        ]
    lines.append(
        f"{content['label']}. {content['machine']['cpu']} ({content['machine']['isa']}), torch "
        f"{content['versions']['torch']}, {content['date'][:10]}, `{content['command']}`; medians of paired turns with "
        "95 % intervals."
    )
    return "\n".join(lines)


def _held(held: Mapping[str, float], peer: str) -> str:
    return f", {held[peer]:.1f} B" if peer in held else ""


def _share(contest: Mapping[str, Any]) -> str:
    share = contest.get("ddp_communication_share")
    return "" if share is None else f"; DDP communicates {100 * share:.0f} % of its step"


def _roof(contest: Mapping[str, Any], times: Mapping[str, str]) -> str:
    roof = contest.get("roof")
    return f", a step without other ranks takes {times[roof]}" if roof in times else ""


def conditions(content: Mapping[str, Any]) -> str:
    """Where and how, in one sentence."""
    machine, shape = content["machine"], content["shape"]
    return (
        f"{count(shape['numel'])} parameters, {content['threads']} threads, {machine['cpu']} ({machine['isa']}), "
        f"torch {content['versions']['torch']}, {content['date'][:10]}, `{plain_command(content)}`; "
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


def between_markers(readme: str, begin: str = BEGIN, end: str = END) -> str:
    """What the page shows now."""
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"the page has no place for a table; it must have {begin} and {end}, once each")
    return readme.split(begin)[1].split(end)[0].strip("\n")


def sources_of(shown: str) -> list[str]:
    """The result files that the shown tables name."""
    found = re.findall(f"^{SOURCE}(.+) -->$", shown, re.MULTILINE)
    if not shown.startswith(SOURCE):
        raise ValueError(f"the table begins with {shown[:80]!r}; it must be {SOURCE}bench/results/<file>.json -->")
    return found


def shown_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands between the markers for these results, by their files: a table for each."""
    if partial := [source for source, content in results.items() if content.get("interrupted")]:
        raise ValueError(f"{', '.join(partial)}: the run was interrupted, and a part of one is not published")
    steps = any(content.get("op") in MARKERS for content in results.values())
    return "\n\n".join((steps_table if steps else table)(content, source) for source, content in results.items())


def written(readme: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the tables of these results, which are of one op, between its markers."""
    begin, end = MARKERS.get(next(iter(results.values())).get("op", ""), (BEGIN, END))
    between_markers(readme, begin, end)
    before, _, rest = readme.partition(begin)
    return f"{before}{begin}\n{shown_of(results)}\n{end}{rest.partition(end)[2]}"


def main(argv: Sequence[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    sources = [Path(one).resolve().relative_to(root) for one in argv]
    results = {source.as_posix(): json.loads((root / source).read_text()) for source in sources}
    page = root / PAGES.get(next(iter(results.values())).get("op", ""), "README.md")
    page.write_text(written(page.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
