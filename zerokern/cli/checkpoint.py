"""`zerokern checkpoint`: what a checkpoint holds, whether its bytes are what was written, and its model as one file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokern import pages
from zerokern.arguments import Parser
from zerokern.core.errors import IoError
from zerokern.pages import columns, width_here

if TYPE_CHECKING:
    from zerokern.checkpoint.source import Source

MOST_SHOWN = 40
KINDS = {
    "zerokern": "a checkpoint of zk.save",
    "dcp": "a checkpoint of torch.distributed.checkpoint",
    "universal": "a universal checkpoint of DeepSpeed",
    "torch": "a file of torch.save",
}

EXAMPLES = (
    "zerokern checkpoint show run",
    "zerokern checkpoint verify run/step-1000",
    "zerokern checkpoint export run/step-1000 m.safetensors",
)


def add_arguments(parser: Parser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    show = verbs.add_parser("show", help="step, ranks, formats, tensors by role; or the checkpoints in a folder")
    show.add_argument("path", metavar="PATH", help="a checkpoint, or a folder with checkpoints in it")
    show.add_examples("zerokern checkpoint show run", "zerokern checkpoint show run/step-1000 --json")
    show.add_argument("--json", action="store_true", help="print JSON, with every tensor and value")
    verify = verbs.add_parser("verify", help="read every block and compare its checksum; 1 where one is broken")
    verify.add_examples("zerokern checkpoint verify run/step-1000")
    verify.add_argument("path", metavar="PATH", help="a checkpoint")
    export = verbs.add_parser("export", help="write the model's tensors into one new safetensors file")
    export.add_examples("zerokern checkpoint export run/step-1000 m.safetensors")
    export.add_argument("path", metavar="PATH", help="a checkpoint, of any number of ranks")
    export.add_argument("out", metavar="OUT", help="a file that does not exist, such as model.safetensors")


def run(args: argparse.Namespace) -> int:
    if args.verb == "export":
        return _export(args.path, args.out)
    return _verify(args.path) if args.verb == "verify" else _show(Path(args.path), args.json)


def _export(path: str, out: str) -> int:
    from zerokern.interop.from_checkpoint import export_checkpoint

    done = export_checkpoint(path, out)
    print(f"{out}: {done.tensors:,} tensors, {_amount(done.nbytes)}")
    if done.left_out:
        print(f"not in it, for it is no tensor: the extra state of {', '.join(done.left_out)}", file=sys.stderr)
    return 0


def _show(path: Path, as_json: bool) -> int:
    from zerokern.checkpoint.folder import describe_unfinished
    from zerokern.checkpoint.source import open_checkpoint

    try:
        source = open_checkpoint(path)
    except IoError:
        children = [] if describe_unfinished(path) else _children(path)
        if not children:
            raise
        print(json.dumps(children, indent=1)) if as_json else pages.show(_listing(path, children))
        return 0
    facts = _facts(source)
    if as_json:
        print(json.dumps({**facts, "values": source.values}, indent=1, default=str))
    else:
        pages.show(_page(facts))
    return 0


def _verify(path: str) -> int:
    from zerokern.checkpoint.progress import Progress
    from zerokern.checkpoint.source import open_checkpoint

    source = open_checkpoint(path)
    broken = 0
    began = time.monotonic()
    with Progress("verifying", source.nbytes) as progress:
        for error in source.find_damage(report=progress):
            broken += 1
            pages.show(f"broken: {error}", sys.stderr)
    took = max(time.monotonic() - began, 1e-9)
    if broken:
        print(f"{path}: {broken} broken part{'s' if broken > 1 else ''} in {_amount(source.nbytes)}", file=sys.stderr)
        return 1
    said = (
        "are as they were written"
        if source.has_checksums
        else "can be read; not all have checksums to compare them with"
    )
    pages.show(f"{path}: {_amount(source.nbytes)} {said} ({source.nbytes / took / 1e9:.2f} GB/s)")
    return 0


def _facts(source: Source) -> dict[str, Any]:
    """Returns what `show` says of a checkpoint, as JSON has it."""
    roles: dict[str, dict[str, Any]] = {}
    for key, row in source.tensors.items():
        counts = roles.setdefault(_role(key), {"tensors": 0, "numel": 0, "nbytes": 0, "dtypes": []})
        counts["tensors"] += 1
        counts["numel"] += row.numel
        counts["nbytes"] += row.nbytes
        counts["dtypes"] = sorted({*counts["dtypes"], row.dtype})
    facts: dict[str, Any] = {"path": str(source.path), "kind": source.kind}
    index = getattr(source, "index", None)
    if index is not None:
        from zerokern.checkpoint.folder import saved_at

        saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(saved_at(index.save_id)))
        facts |= {"save_id": index.save_id, "saved": saved, "world": index.world}
        facts |= {"files": len(index.files), "versions": index.versions}
    return facts | {
        "step": _step(source),
        "nbytes": sum(row.nbytes for row in source.tensors.values()),
        "roles": roles,
        "groups": source.values.get("groups") or [],
        "extra": sorted(source.values.get("extra") or {}),
        "tensors": {key: [row.dtype, list(row.shape), len(row.boxes)] for key, row in source.tensors.items()},
    }


def _role(key: str) -> str:
    """
    >>> _role("model.layers.0.weight"), _role("optim.state.layers.0.weight.exp_avg"), _role("extra.0.1")
    ('model', 'exp_avg', 'extra')
    """
    return key.rpartition(".")[2] if key.startswith("optim.state.") else key.partition(".")[0]


def _step(source: Source) -> int | None:
    """Returns the optimizer's steps: the largest count of any parameter, or what the user kept as "step"."""
    kept = (source.values.get("extra") or {}).get("step", {})
    if isinstance(kept, dict) and isinstance(kept.get("all"), int):
        return int(kept["all"])
    rows = [(key, row) for key, row in source.tensors.items() if key.startswith("optim.") and _role(key) == "step"]
    few = {key: row for key, row in rows[:MOST_SHOWN] if row.numel == 1}
    if not few:
        return None
    import torch

    counts: dict[str, Any] = {key: torch.zeros(row.shape, dtype=getattr(torch, row.dtype)) for key, row in few.items()}
    source.read(counts)
    return int(max(count.item() for count in counts.values()))


def _page(facts: dict[str, Any]) -> str:
    lines = [f"{facts['path']}: {KINDS[facts['kind']]}"]
    if "saved" in facts:
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        ranks = f"{facts['world']} rank{'s' if facts['world'] > 1 else ''}"
        lines.append(f"  saved {facts['saved']} by {ranks} ({versions})")
    lines.append(f"  step {facts['step'] if facts['step'] is not None else 'unknown'}, {_amount(facts['nbytes'])}")
    rows = [
        [role, f"{of['tensors']:,}", f"{of['numel']:,}", _amount(of["nbytes"]), ", ".join(of["dtypes"])]
        for role, of in facts["roles"].items()
    ]
    lines += [
        "",
        *_indented(["role", "tensors", "elements", "bytes", "dtypes"], rows, [False, True, True, True, False]),
    ]
    groups = [group for entry in facts["groups"] for group in (entry if isinstance(entry, list) else [entry])]
    for number, group in enumerate(groups):  # of all optimizers
        options = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        lines.append(f"  group {number}: {len(group.get('params', ()))} parameters, {options}")
    if facts["extra"]:
        lines.append(f"  extra: {', '.join(facts['extra'])}")
    rows = [[key, row[0], str(row[1])] for key, row in facts["tensors"].items() if key.startswith("model.")]
    if rows:
        lines += ["", *_indented(["tensor", "dtype", "shape"], rows[:MOST_SHOWN], [False, False, False])]
    if len(rows) > MOST_SHOWN:
        lines.append(f"  and {len(rows) - MOST_SHOWN} more; --json shows all")
    return "\n".join(lines)


def _children(parent: Path) -> list[dict[str, Any]]:
    """Returns the checkpoints within a folder, newest first, and what is there of saves that did not end."""
    from zerokern.checkpoint.folder import describe_unfinished, list_files, read_published
    from zerokern.checkpoint.index import NAME

    rows = []
    for child in filter(Path.is_dir, list_files(parent)):
        is_published = (child / NAME).exists()
        partial = "" if is_published else describe_unfinished(child)
        if not is_published and not partial:
            continue
        row: dict[str, Any] = {
            "name": child.name,
            "seconds": time.time() - (child / NAME if is_published else child).stat().st_mtime,
            "nbytes": sum(path.stat().st_size for path in child.iterdir() if path.is_file()),
        }
        try:
            row |= {"state": "partial", "why": partial} if partial else {
                "state": "published", "world": read_published(child).world
            }  # fmt: skip
        except IoError as error:
            row |= {"state": "broken", "why": str(error)}
        rows.append(row)
    return sorted(rows, key=lambda row: row["seconds"])


def _listing(parent: Path, children: list[dict[str, Any]]) -> str:
    lines = [f"{parent}: {len(children)} checkpoint{'s' if len(children) > 1 else ''}"]
    rows = [
        [
            row["name"],
            _age(row["seconds"]),
            _amount(row["nbytes"]),
            row["state"] + (f": {row['why']}" if "why" in row else ""),
        ]
        for row in children
    ]
    lines += _indented(["name", "age", "size", "state"], rows, [False, True, True, False])
    return "\n".join(lines)


def _indented(header: list[str], rows: list[list[str]], right: list[bool]) -> list[str]:
    width = width_here()
    return [f"  {line}" if line else "" for line in columns(header, rows, right=right, width=width and width - 2)]


def _amount(nbytes: int) -> str:
    from zerokern.memory.room import amount  # imports torch, which the help does without

    return amount(nbytes)


def _age(seconds: float) -> str:
    """
    >>> _age(59), _age(7200), _age(300000)
    ('59 s', '2 h', '3 days')
    """
    for most, each, unit in ((60, 1, "s"), (3600, 60, "min"), (172800, 3600, "h")):
        if seconds < most:
            return f"{int(seconds // each)} {unit}"
    return f"{int(seconds // 86400)} days"
