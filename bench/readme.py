"""Tables in the README and in docs/ come from committed result files: numbers are generated, never typed.

`python -m bench.readme bench/results/<file>.json ...` writes that op's tables between its markers, one for each file: a
run for each kind of machine. Of full steps, and of runs on GPUs, `--kinds` writes the README's table instead, which has
one row for each file.
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
KINDS_BEGIN, KINDS_END = "<!-- kinds:begin -->", "<!-- kinds:end -->"
KINDS = "kinds"
MARKERS = {
    "zero": (ZERO_BEGIN, ZERO_END),
    "offload": (OFFLOAD_BEGIN, OFFLOAD_END),
    KINDS: (KINDS_BEGIN, KINDS_END),
}
PAGES = {"zero": "docs/zero.md", "offload": "docs/offload.md", KINDS: "README.md"}
OTHERS = "docs/benchmarks.md"
SOURCE = "<!-- from "
# by the name of the machine in the name of a result file; bench/FACTS.md describes each
MACHINES = {"epyc-2": "AMD EPYC, Zen 4", "epyc5-2": "AMD EPYC, Zen 5", "xeon-2": "Intel Xeon", "h200": "NVIDIA H200"}
FULL_STEPS = ("AdamW full step", "mixed step, flat")  # what the contest is called on CPUs, and on GPUs
PEERS = {"torch fused": "torch", "torch.compile": "compile", "DeepSpeed": "deepspeed"}


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


def kinds_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table with a row for each machine: the exact step and the smallest lossy one."""
    header = ["machine", "exact, ns", *(f"faster than {peer}" for peer in PEERS), "int8, ns"]
    header.append("int8 faster than torch.compile")
    lines = [*(f"{SOURCE}{source} -->" for source in results), "", _line(header)]
    lines.append(_line(["---"] + ["---:"] * (len(header) - 1)))
    return "\n".join(lines + [_line(_kind(source, content)) for source, content in results.items()])


def _kind(source: str, content: Mapping[str, Any]) -> list[str]:
    """The cells of one machine."""
    name = MACHINES[Path(source).stem.split("_")[1]]
    cores = f", {content['threads']} cores" if "threads" in content else ""
    contest = next(one["name"] for one in content["contests"] if one["name"].startswith(FULL_STEPS))
    rows = [row for row in content["rows"] if row["contest"] == contest and not row["peer"]]
    exact = next(row for row in rows if row["name"] in ("zk.AdamW, exact, split16", "zk.AdamW, split16"))
    small = next((row for row in rows if row["name"] == "int8 states, split8"), None)
    cells = [f"{name}{cores}", _time(exact), *(_times(exact, peer) for peer in PEERS.values())]
    return cells + ([_time(small), _times(small, "compile")] if small else ["-", "-"])


def _time(row: Mapping[str, Any]) -> str:
    return f"{row['ns_per_param']:.2g}"


def _times(row: Mapping[str, Any], peer: str) -> str:
    """The ratio to a peer of the CPU's or, under its name there, the GPU's contest."""
    found = next((row["ratio"][name] for name in (peer, f"torch {peer}") if name in row["ratio"]), None)
    return "-" if found is None else f"{found:.2f}x"


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
        f"torch {content['versions']['torch']}, {content['date'][:10]}, commit {content['commit'][:8]}, "
        f"`{plain_command(content)}`; medians of paired runs with 95 % intervals; *lossy* rows do different "
        "work than the exact peers."
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


def op_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    op = next(iter(results.values())).get("op", "")
    return str(op) if op in MARKERS else ""


def shown_of(results: Mapping[str, Mapping[str, Any]], op: str | None = None) -> str:
    """What stands between the markers of an op for these results, by their files: a table for each, or one for all."""
    if partial := [source for source, content in results.items() if content.get("interrupted")]:
        raise ValueError(f"{', '.join(partial)}: the run was interrupted, and a part of one is not published")
    op = op_of(results) if op is None else op
    if op == KINDS:
        return kinds_table(results)
    return "\n\n".join((steps_table if op else table)(content, source) for source, content in results.items())


def written(readme: str, results: Mapping[str, Mapping[str, Any]], op: str | None = None) -> str:
    """The page with the tables of these results, which are of one op, between its markers."""
    op = op_of(results) if op is None else op
    begin, end = MARKERS.get(op, (BEGIN, END))
    between_markers(readme, begin, end)
    before, _, rest = readme.partition(begin)
    return f"{before}{begin}\n{shown_of(results, op)}\n{end}{rest.partition(end)[2]}"


def main(argv: Sequence[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    sources = [Path(one).resolve().relative_to(root) for one in argv if one != f"--{KINDS}"]
    results = {source.as_posix(): json.loads((root / source).read_text()) for source in sources}
    op = KINDS if f"--{KINDS}" in argv else op_of(results)
    page = root / PAGES.get(op, OTHERS)
    page.write_text(written(page.read_text(), results, op))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
