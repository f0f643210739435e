"""Models, optimizers and torch's own file writer and reader, for what is saved and loaded and how it goes on."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

TESTS = Path(__file__).resolve().parents[1]
for folder in ("zero", "optim", "comm"):
    sys.path.insert(0, str(TESTS / folder))

from worlds import built  # noqa: E402

from zerokern.checkpoint.filling import Restore  # noqa: E402
from zerokern.checkpoint.index import Box, TensorRow  # noqa: E402
from zerokern.checkpoint.source import dtype_name  # noqa: E402
from zerokern.checkpoint.storage import SavePlanner  # noqa: E402
from zerokern.checkpoint.training_state import TrainingState  # noqa: E402
from zerokern.interop.foreign import Foreign  # noqa: E402


class Net(nn.Module):
    """Parameters of one, two and three dimensions, none a multiple of anything; a buffer that is saved."""

    def __init__(self, width: int = 37, gain: float | list[float] = 1.5) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.scale = nn.Parameter(torch.randn(3, 5, 50))
        self.gain = nn.Parameter(torch.tensor(gain))
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        return self.last(inner) * (1 + 0.01 * self.scale.mean()) * self.gain


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0, **shape: Any) -> nn.Module:
    return built(lambda: Net(**shape), seed).to(dtype)


def step(model: nn.Module, opt: Any, number: int, batch: int = 12) -> float:
    """One step of the whole batch, of which each rank takes its share where ranks are many."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(batch, 16, generator=torch.Generator().manual_seed(number))
    mine = x[rank * batch // size : (rank + 1) * batch // size]
    model.eval()  # running statistics would depend on how the batch is divided
    loss = model(mine).float().pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss.detach())


def steps(model: nn.Module, opt: Any, numbers: Any) -> None:
    for number in numbers:
        step(model, opt, number)


class Source(Foreign):
    """A checkpoint as `zk.load` sees it, over torch's own reader."""

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.values = json.loads((path / "values.json").read_text())
        for key, row in FileSystemReader(path).read_metadata().state_dict_metadata.items():
            whole = Box(0, 0, (0,) * len(row.size), tuple(row.size), (0, 0))
            self.tensors[key] = TensorRow(dtype_name(row.properties.dtype), tuple(row.size), [whole])

    def _load(self, key: str, box: Box) -> Tensor:
        room = {key: torch.empty(box.sizes, dtype=getattr(torch, self.tensors[key].dtype))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(room, storage_reader=FileSystemReader(self.path), no_dist=True)
        return room[key]

    def fingerprint(self) -> str:
        return str(self.path)


def put(path: Path, model: nn.Module, opts: Any = None) -> None:
    """Save, as zk.save does."""
    path.mkdir(parents=True, exist_ok=True)
    subject = TrainingState(model, opts)
    items, values = subject.described()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(items, storage_writer=FileSystemWriter(path), planner=SavePlanner())
    if not dist.is_initialized() or dist.get_rank() == 0:
        (path / "values.json").write_text(json.dumps(values, allow_nan=False))
    if dist.is_initialized():
        dist.barrier()


def take(path: Path, model: nn.Module, opts: Any = None, *, lossy: bool = False, stop: int = -1) -> TrainingState:
    """Load, as zk.load does; `stop`: break off after that many batches."""
    subject, source = TrainingState(model, opts), Source(path)
    restore = Restore(subject, source, lossy)
    for number, batch in enumerate(restore.batches()):
        if number == stop:
            raise InterruptedError
        source.read(batch.items)
        batch.after()
    restore.finish()
    return subject


def two(tied: bool, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


def stepped(model: nn.Module, opt: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype).contiguous()
    opt.step()
    return opt
