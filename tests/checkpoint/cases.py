"""What save and load are tried on: a small model in every tier, schedule, stage and format, and its whole state."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))

from raw_cases import raw, same
from worlds import built
from zero_cases import IN, OUT, Block

import zerokern as zk
from zerokern import load, save
from zerokern.optim.base import FusedOptimizer
from zerokern.zero.sharded import Sharded

__all__ = ["BF16", "Case", "Run", "digest", "load", "same", "save"]

BF16 = torch.bfloat16


class Small(nn.Module):
    """Parameters of the root, two units, a buffer, weights of odd sizes, one that two modules share, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, 10)
        self.blocks = nn.ModuleList([Block(7), Block(23)])
        self.drop = nn.Dropout(0.1)
        self.leave = nn.Linear(10, OUT)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.drop(x))


@dataclass(frozen=True)
class Case:
    """A configuration. `stage` None: plain parameters; "ddp", "fsdp2": wrapped so."""

    stage: int | str | None = None
    tier: str = "device"
    schedule: Any = "sync"
    state_format: str = "fp32"
    master_format: str | None = None
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    bucket_bytes: int | None = None

    def begin(self, folder: Path, seed: int = 0) -> Run:
        """The model and its optimizer, as they are before the first step."""
        return Run(self, folder, seed)


class Run:
    """A training run: whatever draws random numbers, counts or adapts is in here."""

    def __init__(self, case: Case, folder: Path, seed: int = 0) -> None:
        self.case = case
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(100 + self.rank)
        model = built(Small, seed).to(case.dtype)
        self.model = _wrapped(model, case)
        settings = {"lr": 1e-2, "weight_decay": 0.1, **case.settings}
        if case.optimizer.startswith("torch."):
            maker = getattr(torch.optim, case.optimizer.removeprefix("torch."))
            self.opt = maker(_groups(self.model), **settings)
        else:
            tier: Any = case.tier
            if tier == "nvme":
                folder.mkdir(exist_ok=True)
                tier = zk.Nvme(folder / f"swap{self.rank}", ring_nbytes=1 << 20)
            ours = {"tier": tier, "schedule": case.schedule, "state_format": case.state_format}
            if case.master_format is not None:
                ours["master_format"] = case.master_format
            settings = settings if case.optimizer.startswith("Adam") else {"lr": 1e-2, **case.settings}
            self.opt = getattr(zk, case.optimizer)(_groups(self.model), **settings, **ours)
        self.lr = torch.optim.lr_scheduler.StepLR(self.opt, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.step = 0

    def train(self, steps: int, rows: int = 1) -> Run:
        """Steps, the data of which follow from their number and the rank; `rows` ranks' data at once."""
        for _ in range(steps):
            ranks = [self.rank * rows + number for number in range(rows)]
            x, y = (torch.cat(parts).to(self.case.dtype) for parts in zip(*map(self._batch, ranks), strict=True))
            loss = nn.functional.mse_loss(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            self.lr.step()
            self.step += 1
        return self

    def _batch(self, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.step + rank)
        return torch.randn(4, IN, generator=generator), torch.randn(4, OUT, generator=generator)

    @property
    def extra(self) -> dict[str, Any]:
        return {"step": self.step, "lr": self.lr, "scaler": self.scaler}

    def save(self, path: Path, **settings: Any) -> Any:
        return save(path, self.model, self.opt, self.extra, **settings)

    def load(self, path: Path, **settings: Any) -> dict[str, Any]:
        targets = {"lr": self.lr, "scaler": self.scaler}
        extra = load(path, self.model, self.opt, **{"extra": targets, **settings})
        self.step = extra["step"]
        return extra

    def whole(self) -> dict[str, Tensor]:
        """Everything that training goes on from, in whole tensors: parameters, buffers, optimizer state."""
        if isinstance(self.opt, FusedOptimizer):
            self.opt.runner.finish(self.opt.param_groups)
        found = {_plain(name): one.detach() for name, one in _tensors(self.model)}
        state, places = self.opt.state_dict(), _names(self.model, self.opt)
        for place, entry in state["state"].items():
            found |= {f"{places[place]}.{key}": one for key, one in entry.items() if isinstance(one, Tensor)}
        return gathered(found)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _wrapped(model: nn.Module, case: Case) -> nn.Module:
    more = {} if case.bucket_bytes is None else {"bucket_bytes": case.bucket_bytes}
    if case.stage is None:
        return model
    if case.stage == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if case.stage == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return zk.shard(model, stage=case.stage, **more)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of which one has no weight decay, as people have it."""
    params = list(model.named_parameters())
    flat = [p for n, p in params if p.ndim < 2]
    return [{"params": [p for n, p in params if p.ndim >= 2]}, {"params": flat, "lr": 5e-3}]


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _names(model: nn.Module, opt: Any) -> dict[int, str]:
    names = {id(p): _plain(n) for n, p in model.named_parameters()}
    params = [p for group in opt.param_groups for p in group["params"]]
    return {place: names[id(p)] for place, p in enumerate(params)}


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with all its elements, of what every rank has; in one exchange."""
    mine = {}
    for name, one in tensors.items():
        if isinstance(one, DTensor | Sharded):
            offsets = [chunk.offsets for chunk in one.__create_chunk_list__()]
            mine[name] = [(at, one.__get_tensor_shard__(MetadataIndex("", at)).detach().clone()) for at in offsets]
    parts: list[Any] = [mine]
    if dist.is_initialized() and mine:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    made = {
        name: torch.zeros(one.shape, dtype=one.dtype) if name in mine else one.clone() for name, one in tensors.items()
    }
    for name, boxes in [item for part in parts for item in part.items()]:
        for offsets, box in boxes:
            made[name][tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))] = box
    return made


def digest(state: dict[str, Tensor]) -> str:
    """Tells two states apart, bit by bit."""
    return hashlib.blake2b(b"".join(name.encode() + raw(state[name]) for name in sorted(state))).hexdigest()[:16]
