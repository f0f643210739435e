"""What each rank does with torchtitan, all in one start: its Trainer with zerokern, beside FSDP2 or a plain loop."""

from __future__ import annotations

import dataclasses
import runpy
import sys
import types
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from light_titan import LENGTH, ROWS, Data, options, started, tiny, with_muon
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import zerokern as zk

Layout = dict[str, int]  # degrees by the names that torchtitan has for them, shorter
Logged = tuple[list[float], list[float]]  # losses and norms

WHOLE = {"stage": 2, "shard": {"whole": ["layers.*.w?.weight", "layers.*.attention.w?.weight"]}}
MUON: dict[str, Any] = {"tier": "cpu", "options": with_muon, **WHOLE}
OF_CASES: dict[str, tuple[dict[str, Any], int]] = {  # settings of zerokern, batches that are accumulated
    "accumulated": ({"tier": "cpu"}, 2), "muon": ({"tier": "cpu", "options": with_muon}, 2),
    "int8": ({"tier": "cpu", "state_format": "int8", "schedule": "overlap"}, 1),
}  # fmt: skip
RESUMED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cpu": ({"tier": "cpu"}, ()), "muon": (MUON, ()),
    "async": ({"tier": "cpu"}, ("--checkpoint.async_mode=async",)),
    "delayed": ({"tier": "cpu", "schedule": zk.Delayed(after=1)}, ()),
}  # fmt: skip
KEPT = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only")
NAMES = {
    "pp": "pipeline_parallel", "replicate": "data_parallel_replicate", "shard": "data_parallel_shard",
    "cp": "context_parallel", "tp": "tensor_parallel",
}  # fmt: skip


def trained(spec: Any, folder: Path, *more: str, layout: Layout | None = None, **keywords: Any) -> Any:
    """torchtitan's Trainer at its end. `layout`: without one all ranks are FSDP2's."""
    if layout is not None:
        degrees = {"shard": 1, **layout}
        more = (*(f"--parallelism.{NAMES[name]}_degree={degree}" for name, degree in degrees.items()), *more)
        keywords["batches"] = layout.get("replicate", 1) * layout.get("shard", 1)
    trainer = started(spec, folder, *more, **keywords)
    trainer.train()
    trainer.close()
    return trainer


def logged(trainer: Any) -> Logged:
    return trainer.metrics_processor.losses, trainer.metrics_processor.norms


def spans(trainer: Any) -> dict[str, Tensor]:
    """What this rank has of the parameters, and of the optimizer's state."""
    parts = trainer.model_parts
    found = {name: local_of(param).detach().clone() for part in parts for name, param in part.named_parameters()}
    for part, opt in zip(parts, trainer.optimizers, strict=True):
        for name, param in part.named_parameters():
            for key, value in opt.state[param].items():
                found[f"{name} {key}"] = local_of(value).clone() if isinstance(value, Tensor) else torch.tensor(value)
    return found


def local_of(tensor: Any) -> Tensor:
    tensor = getattr(tensor, "local", tensor)  # of what is divided at stage 3
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resumed(train: Callable[..., Any], *more: str) -> Any:
    """Four steps, and the last two of them again from the checkpoint of the second, by torchtitan's own options."""
    runs = [train(*KEPT, *more), train(*KEPT, *more, "--checkpoint.load_step=2")]
    return [(logged(trainer), spans(trainer)) for trainer in runs]


def by_hand(
    settings: dict[str, Any], folder: Path, rates: list[float], accumulated: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The model that torchtitan builds, in a loop of four lines."""
    model = started(tiny(), folder).model_parts[0]
    world, rank = dist.get_world_size(), dist.get_rank()
    choose = settings.get("options", options)
    settings = {key: value for key, value in settings.items() if key not in ("options", "stage", "shard")}
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for name, param in model.named_parameters():
        own = dict(choose(name, param))
        groups[own.pop("rule", "adamw")].append({"params": [param], **own})
    opts: list[Any] = [zk.AdamW(groups["adamw"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **settings)]
    if groups["muon"]:
        opts.append(zk.Muon(groups["muon"], weight_decay=0.1, **settings))
    data, losses = iter(Data(world, rank)), []
    for rate in rates:
        for group in (group for opt in opts for group in opt.param_groups):
            group["lr"] = rate
        total = torch.zeros(())
        for _ in range(accumulated):
            inputs, labels = next(data)
            made = model(inputs["input"]).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(made, labels.flatten(), reduction="sum")
            loss = loss / float(ROWS * LENGTH * world * accumulated)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, {name: local_of(param).detach().clone() for name, param in model.named_parameters()}


def everything(rank: int, folder: str, full: bool) -> dict[str, Any]:
    """All of it, or what represents it."""
    found: dict[str, Any] = {"fits": {}, "resumed": {}}
    for name, (settings, accumulated) in OF_CASES.items():
        if full if name == "int8" else name != "muon" or not full:  # FSDP2's, by hand, has no whole matrices
            trainer = trained(tiny(**settings), Path(folder) / name, accumulated=accumulated)
            other = by_hand(settings, Path(folder) / name, trainer.metrics_processor.rates, accumulated)
            losses, norms = logged(trainer)
            found["fits"][name] = (losses, {key: spans(trainer)[key] for key in other[1]}), other, norms
    for name, (settings, more) in RESUMED.items():
        if full or name in ("cpu", "muon"):
            at, spec = Path(folder) / f"resumed {name}", tiny(**settings)
            found["resumed"][name] = resumed(lambda *more, at=at, spec=spec: trained(spec, at, *more), *more)
    found["hooks"], found["refusals"] = hooks(), refusals()
    return found


def container(**settings: Any) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer

    return OptimizersContainer([nn.Linear(2, 1)], settings.pop("kind", torch.optim.AdamW), {"lr": 0.1})


def hooks() -> list[str]:
    from zerokern.integrations.torchtitan import exchanged

    told: list[str] = []
    made = container()
    made.register_step_pre_hook(lambda *_: told.append("before"))
    made = exchanged(made, tier="cpu")
    made.register_step_post_hook(lambda *_: told.append("after"))
    made.model_parts[0](torch.ones(1, 2)).sum().backward()
    made.step()
    assert [type(one) for one in made] == [zk.AdamW]
    return told


def refusals() -> list[tuple[str, str]]:
    from torchtitan.components.optimizer import OptimizersInBackwardContainer
    from torchtitan.config import ConfigManager

    import zerokern.integrations.torchtitan
    from zerokern.integrations.torchtitan import check, exchanged, parallelized, pipelined, train_spec

    def asked(*more: str) -> Any:
        return check(ConfigManager().parse_args(list(more)), 3)

    def divided_already(model: nn.Module, *_: Any) -> nn.Module:
        return torch.distributed.fsdp.fully_shard(model)

    def later_version() -> None:
        before, sys.modules["torchtitan.protocols.train_spec"] = sys.modules["torchtitan.protocols.train_spec"], None
        try:
            runpy.run_path(str(zerokern.integrations.torchtitan.__file__))
        finally:
            sys.modules["torchtitan.protocols.train_spec"] = before

    nobody, dims = ConfigManager().parse_args([]), types.SimpleNamespace()
    stepped = container()
    stepped.model_parts[0](torch.ones(1, 2)).sum().backward()
    stepped.step()
    early = OptimizersInBackwardContainer.__new__(OptimizersInBackwardContainer)
    works = {
        "training.max_norm": lambda: train_spec(tiny(), max_grad_norm=1.0),
        "overlap": lambda: exchanged(early),
        "muon or adamw": lambda: exchanged(container(), lambda name, param: {"rule": "lion"}),
        "must be two dimensions": lambda: exchanged(container(), lambda name, param: {"rule": "muon"}),
        "AdamW or Adam": lambda: exchanged(container(kind=torch.optim.SGD)),
        "has stepped": lambda: exchanged(stepped),
        "stage": lambda: train_spec(tiny(), shard={"tier": "cpu"}),
        "model.converters": lambda: asked("--model.converters=quantize.linear.float8"),
        "enable_async_tensor_parallel": lambda: asked("--parallelism.enable_async_tensor_parallel"),
        "expert_parallel_degree": lambda: asked("--parallelism.expert_parallel_degree=2"),
        "shard={'tier': 'cpu'}": lambda: asked("--training.enable_cpu_offload"),
        "early_step_in_backward": lambda: asked("--optimizer.early_step_in_backward"),
        "stage=2": lambda: asked("--parallelism.fsdp_reshard_after_forward=never"),
        "has called fully_shard": lambda: parallelized(divided_already, 3, {})(nn.Linear(2, 2), dims, nobody),
        "torchtitan>=0.2.2,<0.3": later_version,
        "stages of its own": lambda: pipelined(lambda *_: None)(nn.Linear(2, 2), dims, nobody),
    }
    said = []
    for words, work in works.items():
        try:
            work()
            said.append((words, "nothing was refused"))
        except Exception as error:
            said.append((words, str(error)))
    return said


def optimizer_state(trainer: Any) -> dict[str, Tensor]:
    state = trainer.optimizers.state_dict()
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}
    return {name: value for name, value in whole.items() if isinstance(value, Tensor) and value.ndim}


def saved(rank: int, folder: str) -> dict[str, Tensor]:
    return optimizer_state(trained(tiny(tier="cpu"), Path(folder), *KEPT, steps=2))


def loaded(rank: int, folder: str) -> dict[str, Tensor]:
    trainer = started(tiny(tier="cpu"), Path(folder), *KEPT, steps=4)
    trainer.checkpointer.load(step=2)
    assert trainer.step == 2
    return optimizer_state(trainer)


# layouts of ranks, by torchtitan's own FSDP2 and by zk.shard, from the same values


def value_of(name: str, shape: torch.Size) -> Tensor:
    rng = torch.Generator().manual_seed(zlib.crc32(name.removesuffix("_orig_mod.").encode()))
    return torch.randn(shape, generator=rng) * 0.3 if len(shape) > 1 else torch.ones(shape)


@torch.no_grad()
def by_name(model: Any) -> None:
    """Values that depend on a parameter's name alone: torch draws a DTensor's on each rank by itself, on a CPU."""
    for name, param in model.named_parameters():
        whole = value_of(name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), param.shape)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            param.to_local().copy_(copies.redistribute(placements=param.placements).to_local())
        else:
            param.copy_(whole)


def spec_of(**settings: Any) -> Any:
    spec = tiny()
    from zerokern.integrations.torchtitan import train_spec

    class Model(spec.model_cls):
        def init_weights(self, buffer_device: Any = None) -> None:
            super().init_weights(buffer_device=buffer_device)
            by_name(self)

    spec = dataclasses.replace(spec, model_cls=Model)
    return train_spec(spec, **settings) if settings else spec


def both(folder: Path, layout: Layout, stages: list[int], more: list[str], accumulated: int = 1) -> Any:
    """Losses and norms of FSDP2, and of zk.shard at each stage."""
    settings = [{}, *({"stage": stage, "tier": "cpu"} for stage in stages)]
    runs = (trained(spec_of(**one), folder, *more, layout=layout, accumulated=accumulated) for one in settings)
    theirs, *ours = map(logged, runs)
    return theirs, ours


def laid(rank: int, folder: str, rows: dict[str, tuple[Layout, list[int], list[str], int]]) -> dict[str, Any]:
    """Of each row both, and resumed at the first of its stages; and what is warned of the stage."""
    found = {}
    for name, (layout, stages, more, accumulated) in rows.items():
        here = Path(folder) / name
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compared = both(here / "both", layout, stages, more, accumulated)
        spec = spec_of(stage=stages[0], tier="cpu")

        def train(*more: str, spec: Any = spec, layout: Layout = layout, at: Path = here / "resumed") -> Any:
            return trained(spec, at, *more, layout=layout)

        told = [str(one.message) for one in said if "data_parallel_shard_degree" in str(one.message)]
        mixed = any("mixed_precision" in one for one in more)  # torch has no state of such optimizers before a step
        found[name] = compared, None if mixed else resumed(train, *more), told
    return found
