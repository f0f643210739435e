"""A small LightningModule, its Trainer, and the same training written as a plain loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerokern as zk
from zerokern.zero.shard import shard_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))
from ranks import run_ranks  # noqa: F401

BATCHES, ROWS, CLIP, ACCUMULATED = 4, 2, 0.05, 2
FIRST_SCALE = 2.0**20  # overflows in fp16: GradScaler has to skip steps, and to go down
Found = tuple[list[float], dict[str, Tensor]]  # losses, and parameters at the end


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 3)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.drop(block(torch.tanh(x)))
        return self.last(x)


@dataclass(frozen=True)
class Case:
    """What one training is like. `stage` None: nothing is sharded. `inside`: configure_model shards."""

    stage: int | None = None
    precision: str = "32-true"
    epochs: int = 2
    dropout: float = 0.0
    shuffle: bool = False
    schedule: Any = "sync"
    state_format: str = "fp32"
    clip: float | None = CLIP
    accumulated: int = ACCUMULATED
    inside: str = ""
    muon: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def made(dropout: float = 0.0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(dropout)


def data() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(7)
    return torch.randn(BATCHES * ROWS * 2, 6, generator=rng), torch.randint(3, (BATCHES * ROWS * 2,), generator=rng)


def batches(case: Case, world: int) -> DataLoader:
    """BATCHES of them for each of `world` ranks: in order, or as Lightning's own sampler shuffles them."""
    x, y = data()
    count = BATCHES * ROWS * world
    rows = TensorDataset(x[:count], y[:count])
    if case.shuffle:
        return DataLoader(rows, ROWS, shuffle=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return DataLoader(rows, ROWS, sampler=DistributedSampler(rows, world, rank, shuffle=False))


def optimizer(case: Case, module: nn.Module, **more: Any) -> Any:
    tier = {} if case.stage is not None else {"tier": "cpu"}
    settings = {"lr": 3e-2, "weight_decay": 0.1, "state_format": case.state_format, "schedule": case.schedule}
    settings |= {**tier, **case.settings}
    if not case.muon:
        return zk.AdamW(module.parameters(), **settings, **more)
    matrices, rest = zk.muon_groups(module)
    return zk.ChainedOptimizer([zk.Muon(matrices, **settings), zk.AdamW(rest, **settings)], **more)


def sharding(case: Case) -> dict[str, Any]:
    """The keywords of zk.shard."""
    return {"whole": ["*blocks.*.weight"]} if case.muon and case.stage in (1, 2) else {}


def scheduler(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))


class Task(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.losses = case, []
        self.net: Any = None if case.inside else made(case.dropout)

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if self.case.inside == "build":
            self.net = zk.build(lambda: made(self.case.dropout), stage=self.case.stage)
        else:
            self.net = made(self.case.dropout)
            zk.shard(self if self.case.inside == "self" else self.net, stage=self.case.stage, **sharding(self.case))

    def configure_optimizers(self) -> dict[str, Any]:
        own = {} if self.case.clip else {"max_grad_norm": CLIP}
        opt = optimizer(self.case, self, **own)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler(opt), "interval": "step"}}

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("seen", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self.net(batch[0])


class ByHand(Task):
    """Lightning's manual optimization: backward, clipping and step are within the step."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        opt = self.optimizers()
        self.manual_backward(super().training_step(batch, number))
        self.clip_gradients(opt, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        opt.step()
        opt.zero_grad()
        self.lr_schedulers().step()


def strategy(case: Case, world: int) -> Any:
    from zerokern.integrations.lightning import ZerokernStrategy

    if case.stage is None:
        return "auto" if world == 1 else "ddp"
    return "zerokern" if case.inside else ZerokernStrategy(stage=case.stage, shard_settings=sharding(case))


def trainer(case: Case, world: int, folder: Path | str, **more: Any) -> pl.Trainer:
    plugins = []
    if case.precision == "16-mixed":  # Trainer(accelerator="cpu", precision="16-mixed") would take bf16 in its place
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE))]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": world, "strategy": strategy(case, world), "plugins": plugins,
        "precision": None if plugins else case.precision, "max_epochs": case.epochs, "gradient_clip_val": case.clip,
        "accumulate_grad_batches": case.accumulated, "num_sanity_val_steps": 0,
        "default_root_dir": str(folder), **quiet,
    }  # fmt: skip
    return pl.Trainer(**{**settings, **more})


def whole(module: nn.Module) -> dict[str, Tensor]:
    if not any(shard_of(param) is not None for param in module.parameters()):
        return {name: param.detach().clone() for name, param in module.named_parameters()}
    with zk.gathered(module):
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def fitted(
    case: Case,
    world: int,
    folder: Path | str,
    ckpt_path: str | None = None,
    kind: Callable[[Case], Task] = Task,
    **more: Any,
) -> Found:
    """Through Lightning."""
    task = kind(case)
    trainer(case, world, folder, **more).fit(task, batches(case, world), ckpt_path=ckpt_path)
    return task.losses, {name.removeprefix("net."): value for name, value in whole(task).items()}


def looped(case: Case, rank: int = 0, world: int = 1, wrap: Callable[[nn.Module], nn.Module] | None = None) -> Found:
    """The same, by hand."""
    net: Any = made()
    model = net if wrap is None else wrap(net)
    if case.stage is not None:
        zk.shard(net, stage=case.stage, **sharding(case))
    folded = case.stage is not None or case.clip is None
    opt = optimizer(case, net, **({"max_grad_norm": CLIP} if folded else {}))
    decay = scheduler(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, enabled=case.precision == "16-mixed")
    dtype = torch.float16 if case.precision == "16-mixed" else torch.bfloat16
    x, y = data()
    losses: list[float] = []
    for _ in range(case.epochs):
        for number in range(BATCHES):
            rows = [(number * ROWS + row) * world + rank for row in range(ROWS)]
            updates = number % case.accumulated == case.accumulated - 1
            apart = zk.no_sync(net) if case.stage in (0, 1) else model.no_sync() if wrap else nullcontext()
            with nullcontext() if updates else apart:
                mixed = torch.autocast("cpu", dtype, enabled="mixed" in case.precision, cache_enabled=False)
                with mixed:
                    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                losses.append(loss.item())
                scaler.scale(loss / case.accumulated).backward()
            if updates:
                if not folded:
                    params = [param for group in opt.param_groups for param in group["params"]]
                    torch.nn.utils.clip_grad_norm_(params, CLIP)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                decay.step()
    if case.schedule != "sync":
        opt.flush()
    return losses, whole(net)


def same(one: Found, other: Found) -> None:
    """Bit for bit."""
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@contextmanager
def left_clean() -> Iterator[None]:
    """A Trainer leaves a process group and variables behind."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def keeper(folder: Path | str) -> ModelCheckpoint:
    """Keeps a checkpoint of every epoch."""
    return ModelCheckpoint(dirpath=str(folder), filename="{epoch}", save_top_k=-1)


def resumed(case: Case, world: int, folder: Path | str, again: Case | None = None) -> tuple[Found, Found]:
    """All epochs at once, with a checkpoint after each; and the rest of them anew, from the first checkpoint."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(11 + rank)
    saves = {"enable_checkpointing": True, "callbacks": [keeper(folder)]}
    uninterrupted = fitted(case, world, folder, **saves)
    torch.manual_seed(99 + rank)  # what is random goes on from the checkpoint
    rest = fitted(again or case, world, folder, ckpt_path=str(Path(folder) / "epoch=0.ckpt"))
    return (uninterrupted[0][BATCHES:], uninterrupted[1]), rest


# what each of two ranks does, all of it in one start

ON_TWO = {
    "ddp": Case(),
    "1": Case(stage=1),
    "2 bf16": Case(stage=2, precision="bf16-mixed"),
    "3": Case(stage=3, inside="self"),
    "3 fp16": Case(stage=3, precision="16-mixed", accumulated=1),
    "2 muon fp16": Case(stage=2, precision="16-mixed", accumulated=1, muon=True),
}
RESUMED_ON_TWO = {
    "2": Case(stage=2, dropout=0.2, shuffle=True, settings={"tier": "cpu"}),
    "3 int8": Case(stage=3, dropout=0.2, state_format="int8", precision="bf16-mixed"),
    "1 muon": Case(stage=1, dropout=0.2, muon=True),
}
SMALLER = Case(stage=3, epochs=1)


def everything(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"fits": {}, "resumed": {}}
    for name, case in ON_TWO.items():
        wrap = DistributedDataParallel if case.stage is None else None
        found["fits"][name] = fitted(case, 2, Path(folder) / "fits"), looped(case, rank, 2, wrap)
    for name, case in RESUMED_ON_TWO.items():
        found["resumed"][name] = resumed(case, 2, Path(folder) / name)
    found["restaged"] = resumed(Case(stage=3), 2, Path(folder) / "restaged", again=Case(stage=1))
    kept = {"enable_checkpointing": True, "callbacks": [keeper(Path(folder) / "smaller")]}
    found["smaller"] = fitted(SMALLER, 2, folder, **kept)
    return found


def one_of_two(rank: int, folder: str) -> Any:
    """What two ranks have saved, on one, at another stage: there is nothing left to train."""
    return fitted(replace(SMALLER, stage=2), 1, folder, ckpt_path=str(Path(folder) / "smaller" / "epoch=0.ckpt"))
