"""What each rank does with torchtitan; run by `ranks.run_ranks`, all of it in one start."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from light_titan import LENGTH, ROWS, STEPS, Data, options, started, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerokern as zk

ROWS_OF_CASES: dict[str, tuple[dict[str, Any], int]] = {  # settings of zerokern, batches that are accumulated
    "cpu": ({"tier": "cpu"}, 1),
    "accumulated": ({"tier": "cpu"}, 2),
    "overlap": ({"tier": "cpu", "schedule": "overlap"}, 1),
    "int8": ({"state_format": "int8"}, 1),
}
RESUMED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cpu": ({"tier": "cpu"}, ()),
    "async": ({"tier": "cpu"}, ("--checkpoint.async_mode=async",)),
    "int8": ({"tier": "cpu", "state_format": "int8"}, ()),
    "delayed": ({"tier": "cpu", "schedule": zk.Delayed(after=1)}, ()),
}
Found = tuple[list[float], dict[str, Tensor]]


def local(value: Any) -> Any:
    return value.to_local().detach().clone() if isinstance(value, DTensor) else value.detach().clone()


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def params(trainer: Any) -> dict[str, Tensor]:
    return {name: local(param) for name, param in trainer.model_parts[0].named_parameters()}


def trained(settings: dict[str, Any], folder: Path, *more: str, accumulated: int = 1, steps: int = STEPS) -> Any:
    trainer = started(tiny(**settings), folder, *more, accumulated=accumulated, steps=steps)
    trainer.train()
    trainer.close()
    return trainer


def by_hand(settings: dict[str, Any], folder: Path, rates: list[float], accumulated: int) -> Found:
    """The model that torchtitan builds, in a loop of four lines."""
    model = started(tiny(), folder).model_parts[0]
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [{"params": [param], **options(name, param)} for name, param in model.named_parameters()]
    opt = zk.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **settings)
    data, losses = iter(Data(world, rank)), []
    for rate in rates:
        for group in opt.param_groups:
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
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, {name: local(param) for name, param in model.named_parameters()}


QUICK = ("accumulated", "cpu")


def everything(rank: int, folder: str, full: bool) -> dict[str, Any]:
    """All of it, or what represents it."""
    found: dict[str, Any] = {"fits": {}, "resumed": {}}
    for name, (settings, accumulated) in ROWS_OF_CASES.items():
        if not full and name not in QUICK[:1]:
            continue
        trainer = trained(settings, Path(folder) / name, accumulated=accumulated)
        metrics = trainer.metrics_processor
        other = by_hand(settings, Path(folder) / name, metrics.rates, accumulated)
        found["fits"][name] = (metrics.losses, params(trainer)), other, metrics.norms
    for name, (settings, more) in RESUMED.items():
        if not full and name not in QUICK[1:]:
            continue
        found["resumed"][name] = resumed(settings, Path(folder) / f"resumed {name}", *more)
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
    from zerokern.integrations.torchtitan import exchanged, train_spec
    from zerokern.integrations.torchtitan_shard import check, parallelized, pipelined

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


KEPT = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only")


def optimizer_state(trainer: Any) -> dict[str, Tensor]:
    state = trainer.optimizers.state_dict()
    return {name: full(value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim}


def saved(rank: int, folder: str) -> dict[str, Tensor]:
    return optimizer_state(trained({"tier": "cpu"}, Path(folder), *KEPT, steps=2))


def loaded(rank: int, folder: str) -> dict[str, Tensor]:
    trainer = started(tiny(tier="cpu"), Path(folder), *KEPT, steps=4)
    trainer.checkpointer.load(step=2)
    assert trainer.step == 2
    return optimizer_state(trainer)


def resumed(settings: dict[str, Any], folder: Path, *more: str) -> tuple[Found, Found]:
    """Four steps, and the last two of them again from the checkpoint of the second, by torchtitan's own options."""
    keeps = ("--checkpoint.enable", "--checkpoint.interval=2", *more)
    whole = trained(settings, folder, *keeps)
    rest = trained(settings, folder, *keeps, "--checkpoint.load_step=2")
    return (whole.metrics_processor.losses[2:], params(whole)), (rest.metrics_processor.losses, params(rest))
