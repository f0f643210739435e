"""An Accelerator that prepares, clips, saves and loads models that `zk.shard` has sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.integrations import without

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise without("accelerate", error) from error

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.checkpoint.loader import load
from zerokern.checkpoint.saver import save
from zerokern.integrations.sharded_model import check_model, check_optimizer, is_ours, is_sharded, trains
from zerokern.zero.shard import shard_of

__all__ = ["FOLDER", "Accelerator", "unwrapped"]

FOLDER = "zerokern"  # within what Accelerate and Trainer call a checkpoint


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer within Accelerate's.

    >>> opt = zk.SGD([torch.zeros(1)])
    >>> unwrapped(opt) is opt
    True
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class Accelerator(accelerate.Accelerator):
    """Extends `accelerate.Accelerator` to models that zk.shard has sharded; others go the usual way.

    Shard the model when the Accelerator has started the process group, then give it to `prepare`. `accumulate`,
    `clip_grad_norm_`, `save_state`, `load_state` and `get_state_dict` know about shards.

    >>> accelerator = Accelerator(cpu=True)
    >>> model = zk.shard(nn.Linear(2, 1), stage=3)
    >>> model, opt = accelerator.prepare(model, zk.AdamW(model.parameters(), lr=1e-2))
    >>> accelerator.backward(model(torch.ones(1, 2)).sum()); opt.step(); opt.zero_grad()
    """

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as Accelerate does; refuses what cannot work with a sharded model before anything is wrapped."""
        for arg in args:
            if isinstance(arg, nn.Module) and is_sharded(arg):
                check_model(arg, self)
            elif isinstance(arg, torch.optim.Optimizer):
                check_optimizer(unwrapped(arg), self.scaler is not None)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares as Accelerate does; a sharded model gets its autocast, and no DDP."""
        if not is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        check_model(model, self)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepares as Accelerate does; our state stays in its tier, and LR schedulers are told of skipped steps."""
        check_optimizer(unwrapped(optimizer), self.scaler is not None)
        ours = is_ours(optimizer)
        prepared = super().prepare_optimizer(optimizer, False if ours else device_placement)
        if self.scaler is not None and ours:
            prepared.__class__ = _Scaled  # Accelerate constructs its own class by name
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Returns Accelerate's context manager, or `zk.no_sync` for a sharded model."""
        return zk.no_sync(model) if is_sharded(model) else super().no_sync(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips as Accelerate does; the norm of sharded gradients is that of all ranks."""
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if all(shard_of(param) is None for param in listed):
            return super().clip_grad_norm_(listed, max_norm, norm_type)
        self.unscale_gradients()
        return zk.clip_grad_norm_(listed, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns all of a sharded model in host memory on the main process, and nothing on the others, which help."""
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        whole: dict[int, Tensor] = {}
        for memory in sharding_of(model).memories:  # one bucket at a time is whole on the devices
            params = [entry.param for entry in memory.entries]
            with zk.gathered(params):
                whole |= {id(param): param.detach().to("cpu", copy=True) for param in params if self.is_main_process}
        shown = model.state_dict(keep_vars=True) if self.is_main_process else {}
        return {
            key: whole[id(tensor)] if id(tensor) in whole else tensor.detach().cpu() for key, tensor in shown.items()
        }

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **settings: Any) -> Any:
        """Saves as Accelerate does; each sharded model with its optimizers by `zk.save`, into a folder within."""
        with self._withheld() as held:
            folder = super().save_state(output_dir, safe_serialization, **settings)
        for number, (model, optimizers) in enumerate(held):
            save(Path(folder) / f"{FOLDER}_{number}", model, optimizers, rng=False)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **settings: Any) -> None:
        """Loads what `save_state` saved, on any number of ranks and at any stage."""
        folders: list[str] = []
        handle = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            with self._withheld() as held:
                super().load_state(input_dir, load_kwargs, **settings)
        finally:
            handle.remove()
        for number, (model, optimizers) in enumerate(held):
            load(Path(folders[0]) / f"{FOLDER}_{number}", model, optimizers, rng=False)

    @contextmanager
    def _withheld(self) -> Iterator[list[tuple[nn.Module, list[torch.optim.Optimizer]]]]:
        """Context manager that hides sharded models and their optimizers from Accelerate; yields them, paired."""
        models, optimizers = self._models, self._optimizers
        divided = [model for model in models if is_sharded(model)]
        pairs = [(model, [optimizer for optimizer in optimizers if trains(optimizer, model)]) for model in divided]
        taken = {id(optimizer) for _, mine in pairs for optimizer in mine}
        self._models = [model for model in models if not is_sharded(model)]
        self._optimizers = [optimizer for optimizer in optimizers if id(optimizer) not in taken]
        try:
            yield [(model, [unwrapped(optimizer) for optimizer in mine]) for model, mine in pairs]
        finally:
            self._models, self._optimizers = models, optimizers


class _Scaled(AcceleratedOptimizer):
    """Tells Accelerate of steps that our optimizers skip; it looks only at whether they were called."""

    def step(self, closure: Any = None) -> None:
        skipped = self.optimizer.skipped_steps
        super().step(closure)
        self._is_overflow = self.optimizer.skipped_steps > skipped
