"""What a program asks of a library, and plain torch with averaged gradients, which is the reference."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

IN, OUT = 6, 3  # numbers in and out of a sample


class Unsupported(Exception):
    """The library's documentation says that it cannot do this; the text is what it says."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a program wants its model trained; each library is told so in its own words.

    `eps` is large so that updates are smooth in the gradients and see their scale: with Adam's own, a gradient that is
    wrong by a factor would go unnoticed, and a rounding could turn a sign.
    """

    rule: str = "adamw"
    lr: float = 1e-2
    eps: float = 1e-2
    weight_decay: float = 0.1
    clip: float | None = None
    accumulate: int = 1
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    narrow: bool = False  # compute in bf16, keep exact values and states
    unused: bool = False  # in some pass some parameter gets no gradient: DDP wants to know
    ranks_differ: bool = False  # ranks give gradients to other parameters than their peers: FSDP2 wants to know
    same_graph: bool = False  # the graph of each step is the same: DDP wants to know beside checkpoints
    fused: bool = False  # torch's AdamW in its fused form

    def params_of(self, model: nn.Module) -> list[Any]:
        return self.groups(model) if self.groups else [p for p in model.parameters() if p.requires_grad]

    def torch_optimizer(self, model: nn.Module) -> Any:
        """torch's own; None for a model that does not train."""
        params = self.params_of(model)
        if not params:
            return None
        if self.rule == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)
        told = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        return torch.optim.AdamW(params, **told, fused=self.fused or None)


class Training:
    """One model and its optimizer, as plain torch trains them; a library overrides what it does otherwise.

    A program calls it as it calls a model, and `step(loss)` after each batch: the loss is that of the batch alone, and
    every `accumulate`th call updates.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.module, self.recipe = model, recipe
        self.batches = 0
        self.begin()

    def begin(self) -> None:
        """Wraps the model and makes the optimizer."""
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        self.model = self.module
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        return self.recipe.torch_optimizer(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recipe.narrow:
            return self.model(*args, **kwargs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(*args, **kwargs).float()

    @property
    def is_last(self) -> bool:
        """Whether the batch at work is the last one before an update."""
        return (self.batches + 1) % self.recipe.accumulate == 0

    def step(self, loss: Tensor, backward: Callable[[Tensor], None] | None = None) -> None:
        self.backward(loss, backward or Tensor.backward)
        self.update()

    def backward(self, loss: Tensor, by: Callable[[Tensor], None] = Tensor.backward) -> None:
        by(loss / self.recipe.accumulate)
        if self.is_last:
            self.average()

    def average(self) -> None:
        params = [param for param in self.module.parameters() if param.requires_grad]
        present = torch.tensor([float(param.grad is not None) for param in params])
        dist.all_reduce(present)
        for param, ranks in zip(params, present.tolist(), strict=True):
            if ranks:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    def update(self) -> None:
        """Clips, steps and clears the gradients after the last batch; before that it does nothing."""
        last, self.batches = self.is_last, self.batches + 1
        if last:
            self.apply()

    def apply(self) -> None:
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(list(self.module.parameters()), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        """Drops the gradients that a pass of another model has left here."""
        self.optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def edit_gradients(self, edit: Callable[[Tensor], Tensor]) -> None:
        """Replaces each gradient between backward and update by an element-wise function of it."""
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad.copy_(edit(param.grad))

    def weight(self, param: nn.Parameter) -> Tensor:
        """A parameter read outside its module, whole and with a graph, the way the library documents it."""
        return param

    def full(self) -> dict[str, Tensor]:
        """The whole parameters, on every rank."""
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Whole values into parameters, by name, the same on every rank."""
        with torch.no_grad():
            for name, value in values.items():
                self.module.get_parameter(name).copy_(value)

    def save(self, folder: Path) -> None:
        """Model and optimizer, with what the library brings for it."""
        torch.save([self.module.state_dict(), self.optimizer.state_dict()], folder / f"{dist.get_rank()}.pt")

    def save_beside(self, folder: Path) -> Callable[[], Any]:
        """Begins a save that goes on beside training, where the library has one; the result waits for its end."""
        self.save(folder)
        return lambda: None

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()


class Run:
    """What a program is given: the library's way to train, this rank's data, and `see` for what must be compared."""

    def __init__(self, library: type[Training], folder: Path) -> None:
        self.library, self.folder = library, folder
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.seen: list[tuple[str, Any]] = []
        self.begun: list[tuple[dict[str, Tensor], Training]] = []

    def make(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A plain model, of the same values on every rank: ranks have one seed."""
        return build()

    def train(self, model: nn.Module | Callable[[], nn.Module], **recipe: Any) -> Training:
        """`model`, or what it makes, as the library trains it; keywords are those of `Recipe`."""
        model = model if isinstance(model, nn.Module) else self.make(model)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        training = self.library(model, Recipe(**recipe))
        self.begun.append((before, training))
        return training

    def loop(
        self,
        model: nn.Module | Training | Callable[[], nn.Module],
        steps: int = 3,
        loss: Callable[..., Tensor] | None = None,
        **recipe: Any,
    ) -> Training:
        """The ordinary loop: batches through the model, a loss of (training, step), a step of the optimizer."""
        training = model if isinstance(model, Training) else self.train(model, **recipe)
        for step in range(steps * training.recipe.accumulate):
            self.follow(training, (loss or self.mse)(training, step))
        return training

    def follow(self, training: Training, loss: Tensor) -> None:
        self.see("loss", loss)
        training.step(loss)

    def data(self, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
        """This rank's batch."""
        made = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(rows, IN, generator=made), torch.randn(rows, OUT, generator=made)

    def mse(self, training: Callable[..., Tensor], step: int) -> Tensor:
        x, y = self.data(step)
        return F.mse_loss(training(x), y)

    def see(self, what: str, *values: Any) -> None:
        """Tensors or numbers that every library must have seen alike."""
        self.seen += [(what, v.detach().float().clone() if isinstance(v, Tensor) else v) for v in values]

    def result(self) -> dict[str, Any]:
        """All that is compared: what was seen, and each model's parameters before and after."""
        return {"seen": self.seen, "models": [(before, training.full()) for before, training in self.begun]}
