"""`zerokern plan`: what each rank holds and sends at every ZeRO stage, before anything of it is allocated, and how long
a step takes on a described machine."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

from zerokern import arguments, pages
from zerokern.core.errors import ZerokernError, got
from zerokern.core.units import BINARY, BUCKET_BYTES, NS_FORMS
from zerokern.pages import text_page, width_here
from zerokern.planner.amounts import parse_numel
from zerokern.planner.transformer import ATTENTIONS, PRESETS, from_config, preset
from zerokern.schedule import Delayed, shipped

if TYPE_CHECKING:
    from zerokern.planner import Plan
    from zerokern.planner.forecast import Forecast

SHAPE = ("layers", "hidden", "heads", "batch", "seq", "ci", "attention")
SETTINGS = (  # options that are keywords of `zk.plan`
    "stage", "mesh", "optimizer", "ns_dtype", "ns_steps", "ns_form", "param_dtype", "reduce_dtype",
    "state_format",
    "master_format", "tier", "update", "param_tier", "keep", "micro", "bucket_bytes", "accumulate", "no_sync",
    "device", "device_memory", "host_memory", "disk", "ranks_per_host",
)  # fmt: skip
CHOICES = {  # options that choose what advice would: the defaults of those that were not given
    "stage": None, "tier": "device", "update": None, "param_tier": "device", "keep": None, "micro": 1,
    "schedule": "sync", "state_format": "fp32", "master_format": None,
}  # fmt: skip
STAGE = 2
EXAMPLES = (
    "zerokern plan --numel 7.5B --world 1,8,64",
    "zerokern plan --model llama-3-8b --world 8 \\",
    "    --device-memory 80GB --batch 1 --seq 4096",
    "zerokern plan --config config.json --tier cpu",
)
_META = "It is called without arguments under torch.device('meta'), so that no memory is needed"


class ModelError(ZerokernError):
    """Raised where `--model` names a model that cannot be built."""


parse_worlds = arguments.numbers("world", "numbers of ranks from 1 on, such as 8 or 1,4,16,64")
parse_tokens = arguments.numbers("tokens", "numbers from 1 on, such as 8192 or 4k,16k,32k (k is 1024)", units=BINARY)


def parse_mesh(text: str) -> dict[str, int]:
    """
    >>> parse_mesh("pp=2,dp=8")
    {'pp': 2, 'dp': 8}
    """
    pairs = [word.strip().partition("=") for word in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in pairs) or len({name for name, *_ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(got("mesh", text, "sizes by name, such as pp=2,dp=8,tp=4"))
    return {name: int(size) for name, _, size in pairs}


def parse_tiers(text: str) -> str | list[str]:
    """
    >>> parse_tiers("cpu"), parse_tiers("cpu:64GiB,nvme")
    ('cpu', ['cpu:64GiB', 'nvme'])
    """
    words = [word.strip() for word in text.split(",")]
    return words if len(words) > 1 else text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern plan`."""
    count: dict[str, Any] = {"type": arguments.count, "metavar": "N"}
    add = parser.add_argument_group("what to plan: one of").add_argument
    add("--numel", metavar="N", help="a number of parameters: 350M, 7.5B, 1T (powers of 1000)")
    add("--model", metavar="NAME", help=f"{', '.join(PRESETS)}, or MODULE:FUNCTION, which returns a module")
    add("--config", metavar="FILE", help="config.json of a Hugging Face model")
    add("--layers", **count, help="a transformer's layers; needs --hidden")
    add("--hidden", **count, help="its hidden size: 12 hidden² parameters a layer, no embeddings")
    add = parser.add_argument_group("activations of a transformer").add_argument
    for name, text in (("heads", "attention heads"), ("batch", "sequences on each rank"), ("seq", "tokens in each")):
        add(f"--{name}", **count, help=text)
    add("--ci", **count, help="layers between two activation checkpoints (1)")
    add("--attention", choices=ATTENTIONS, help="sdpa, as flash attention, stores no scores; eager stores all (sdpa)")
    add = parser.add_argument_group("the run").add_argument
    add("--world", type=parse_worlds, default=(1,), metavar="N,...", help="numbers of ranks (1)")
    add("--mesh", type=parse_mesh, metavar="NAME=N,...", help="in place of --world: pp=2,dp=8,tp=4")
    add("--stage", type=int, help=f"whose step and notes are shown ({STAGE})")
    add("--optimizer", default="adamw", help="adamw, adam, lion, adagrad, sgd, sgd-momentum, muon, none")
    add("--ns-dtype", choices=("bf16", "fp32"), help="of Muon's iteration (bf16; on a CPU fp32, unless it has tiles)")
    add("--ns-steps", type=int, default=5, metavar="N", help="of it (5)")
    add("--ns-form", choices=NS_FORMS, default="standard", help="of it (standard)")
    add("--param-dtype", metavar="DTYPE", help="bf16, fp16, fp32 (a number: bf16; a model: its own)")
    add("--reduce-dtype", metavar="DTYPE", help="of gradients (the parameters')")
    add("--state-format", default="fp32", metavar="FORMAT", help="fp32, bf16, int8")
    add("--master-format", metavar="FORMAT", help="split16, fp32, split8, none")
    add(
        "--tier",
        default="device",
        type=parse_tiers,
        help="where optimizer state lies: device, cpu, nvme; cpu:64GiB,nvme",
    )
    add("--update", choices=("host", "device", "auto"), help="where it runs with --tier cpu (host; muon: device)")
    where = "where parameters rest at stage 3 (device); several as for --tier"
    add("--param-tier", default="device", type=parse_tiers, metavar="TIER", help=where)
    kept = "recompute units; their inputs are kept here: device, cpu, nvme; several as for --tier, the latest first"
    add("--keep", type=parse_tiers, metavar="TIER", help=kept)
    add("--micro", **count, default=1, help="slices of each batch (1)")
    add("--schedule", choices=("sync", "overlap", "delayed"), default="sync", help="of the update (sync)")
    add("--bucket-bytes", **count, default=BUCKET_BYTES, help="as in zk.shard")
    add("--accumulate", **count, default=1, help="micro-batches in a step (1)")
    add("--no-sync", action="store_true", help="all micro-batches but the last under zk.no_sync")
    add("--device", help="cuda or cpu: where collectives run")
    add("--device-memory", metavar="SIZE,...", help="what is to fit: 80GB, 40GiB, h100, v100, ...")
    add("--host-memory", metavar="SIZE", help="what a host has for its ranks: 128GiB, 2TB, ...")
    add("--disk", metavar="SIZE", help="what the disks of a host have for its ranks: 4TB, ...")
    add("--ranks-per-host", **count, help="(all ranks, at most 8)")
    timed = "without offload, and with the update on the host"
    add = parser.add_argument_group("how long a step takes", timed).add_argument
    add("--hardware", metavar="NAME", help=f"{', '.join(shipped())}, or a JSON file that describes one")
    add("--tokens", type=parse_tokens, metavar="N,...", help="in a step of one rank (4k,16k,32k,64k)")
    add = parser.add_argument_group("output").add_argument
    add("--all", action="store_true", help="also what was asked for, at every stage and in every format")
    add("--program", action="store_true", help="the step at --stage, operation by operation")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=arguments.picture("plot"), metavar="FILE.png", help="draw it")


def run(args: argparse.Namespace) -> int:
    try:
        plans = _plans(args)
        forecast = _forecast(plans[-1], args)
    except (ValueError, TypeError) as error:
        print(f"zerokern plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        numbers = [plan.to_dict() for plan in plans]
        if forecast is not None:
            numbers[-1]["forecast"] = forecast.to_dict()
        print(json.dumps(numbers, indent=1))
    else:
        page = shown(plans, args)
        if forecast is not None:
            page += f"\n\n{forecast}"
        if args.markdown:
            print(page)
        else:
            pages.show(text_page(page, width_here()))
    if args.plot:
        from zerokern.cli import plan_plot

        plan_plot.draw(plans, args.plot)
    return 0


def shown(plans: list[Plan], args: argparse.Namespace) -> str:
    """Returns what was asked for, if anything was, and advice for each plan, and one table of all numbers of ranks; of
    the last plan also the tables of what was asked for and of what is advised. Its own page stands where nothing is
    advised, or with --all."""
    from zerokern.planner import table
    from zerokern.planner.planning import as_asked
    from zerokern.planner.program import line_of

    last, everything = plans[-1], args.all
    where = args.hardware, args.tokens and min(args.tokens)
    asks = bool(last.device_memory) and any(getattr(args, name) != default for name, default in CHOICES.items())
    parts = []
    for plan in plans if last.device_memory else ():
        parts += [*([as_asked(plan)] if asks else []), plan.advice(*where)]
    if len(plans) > 1:
        parts.append(table.worlds_page(plans))
    advised = [table.stage_page(plan) for plan in last.advised(*where)]
    parts += dict.fromkeys([table.stage_page(last), *advised] if asks and advised else advised)
    if everything or not advised:
        parts.append(last.page(formats=everything))
    if not everything:
        parts.append("--all adds what was asked for, at every stage and in other formats.")
    if args.program:
        parts.append(f"A step at stage {last.stage}:")
        parts.append("\n".join(f"    {line_of(op)}" for op in last.program.ops))
    return "\n\n".join(parts)


def _forecast(plan: Plan, args: argparse.Namespace) -> Forecast | None:
    if args.hardware is None:
        if args.tokens is not None:
            raise ValueError(
                f"--tokens says how much a step computes on --hardware, which is missing: {', '.join(shipped())}"
            )
        return None
    return plan.predict(args.hardware, args.tokens and sorted(args.tokens))


def _plans(args: argparse.Namespace) -> list[Plan]:
    from zerokern.planner import plan

    what = _model(args)
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings["stage"] = STAGE if args.stage is None else args.stage
    settings["schedule"] = Delayed() if args.schedule == "delayed" else args.schedule
    updates, worlds = [args.update], sorted(args.world)
    if args.update == "auto":
        if args.hardware is None:
            raise ValueError(
                f"--update auto asks for what is faster on --hardware, which is missing: {', '.join(shipped())}"
            )
        updates = ["host"] if args.schedule == "delayed" or "nvme" in str(args.tier) else ["host", "device"]
        updates = [None] if args.optimizer == "muon" else updates
    made = [{one: plan(what, world=world, **{**settings, "update": one}) for one in updates} for world in worlds]
    return [_faster(plans, args) for plans in made]


def _faster(plans: dict[str, Plan], args: argparse.Namespace) -> Plan:
    """Returns the plan whose step takes less time on the hardware, if there are several."""
    if len(plans) == 1:
        return next(iter(plans.values()))

    def seconds(plan: Plan) -> float:
        rows = plan.predict(args.hardware, args.tokens and sorted(args.tokens)).rows
        return sum(row.step_seconds for row in rows if row.schedule == args.schedule)

    return min(plans.values(), key=seconds)


def _model(args: argparse.Namespace) -> Any:
    """Returns what is to be planned, in a form that `zk.plan` takes."""
    shape = {name: value for name in SHAPE if (value := getattr(args, name)) is not None}
    published = args.config or (args.model and ":" not in args.model)
    seen = {name: shape.pop(name) for name in ("batch", "seq", "ci", "attention") if published and name in shape}
    asked = {"numel": args.numel, "model": args.model, "config": args.config, "layers": shape}
    given = [name for name, value in asked.items() if value]
    if len(given) != 1:
        given_text = f"{' and '.join(f'--{name}' for name in given)} were given" if given else "none was given"
        raise ValueError(f"one of --numel, --model, --config or --layers with --hidden says what to plan; {given_text}")
    if args.config:
        return from_config(args.config, **seen)
    if published:
        return preset(args.model, **seen)
    if args.model:
        return load_model(args.model)
    if args.numel:
        return parse_numel(args.numel)
    missing = [f"--{name}" for name in ("layers", "hidden") if name not in shape]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing: a transformer has --layers and --hidden")
    from zerokern.planner import Transformer

    return Transformer(**shape)


def load_model(path: str) -> Any:
    """Returns the module that `package.module:function` builds, on the meta device."""
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ValueError(got("model", path, "MODULE:FUNCTION, such as my_package.models:build"))
    import torch

    sys.path.insert(0, "")  # as `python -m` has it: what lies in this folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ModelError(f"--model {path}: there is no module {error.name!r} in this folder or installed") from error
    finally:
        sys.path.remove("")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"--model {path}: {module_name} has no function {function_name!r}")
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise ModelError(f"--model {path} raised {type(error).__name__}: {error}. {_META}") from error
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"--model {path} returned a {type(model).__name__}; allowed: an nn.Module")
    return model
