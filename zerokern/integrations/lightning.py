"""`Trainer(strategy="zerokern")`: a Lightning strategy for models that `zk.shard` shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zerokern.integrations import without

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise without("lightning", error) from error

import zerokern as zk
from zerokern.checkpoint.extra import EachRank
from zerokern.core.errors import ShardError, got
from zerokern.core.units import Stage
from zerokern.integrations.sharded_model import check_optimizer, is_ours
from zerokern.zero.kinds import shardings_of
from zerokern.zero.shard import shard_of
from zerokern.zero.sharding import Sharding

__all__ = ["ZerokernStrategy"]


class ZerokernStrategy(DDPStrategy):
    """Trains a LightningModule under zk.shard; clips within the update; checkpoints are folders of zk.save.

    What `configure_model()` has sharded (or zk.build) stays; else all is sharded at `stage` (2), with the keywords
    `shard_settings` of zk.shard. Accumulated batches are reduced together at stages 0 and 1, else one by one.

    >>> from lightning.pytorch import Trainer
    >>> Trainer(strategy=ZerokernStrategy(stage=3), accelerator="cpu", devices=1, logger=False).strategy.stage
    3
    """

    restore_checkpoint_after_setup, lightning_restore_optimizer = True, False  # load_checkpoint restores it

    def __init__(self, stage: Stage | None = None, shard_settings: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        if self._ddp_kwargs:  # what is left is for DistributedDataParallel, and nothing here wraps a model in that
            raise TypeError(got("keyword", min(self._ddp_kwargs), "stage, shard_settings, timeout and the like"))
        self.stage, self.shard_settings = stage, dict(shard_settings or {})
        self._module: Any = None
        self._own_norms: dict[Any, float | None] = {}

    def _shardings(self) -> list[Sharding]:
        return shardings_of(map(shard_of, self._module.parameters()))

    def setup(self, trainer: Any) -> None:
        trainer.accelerator.setup(trainer)
        self._module = self.lightning_module
        if self._shardings():
            self._check_sharded()
        else:
            self.precision_plugin.convert_module(self._module)
            self.model_to_device()
            zk.shard(self._module, stage=2 if self.stage is None else self.stage, **self.shard_settings)
        if self._module.automatic_optimization and self._shardings()[0].module is self._module:
            self.model = _Root(self._module)  # by hand, backward and step are within a step, and cannot be in a forward
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()  # and the state of optimizers stays on its tier

    def _check_sharded(self) -> None:
        for name, param in self._module.named_parameters():
            if param.requires_grad and shard_of(param) is None:
                raise ShardError(got("parameter", name, "those of what configure_model() shards: one module for all"))
        for sharding in self._shardings():
            if self.stage not in (None, sharding.stage):
                raise ValueError(
                    got("stage", self.stage, f"{sharding.stage}, which configure_model() has chosen, or None")
                )
            if (sharding.group.size, sharding.group.device.type) != (self.world_size, self.root_device.type):
                raise ShardError(
                    got("mesh", str(sharding.group), f"none: {self.world_size} ranks on {self.root_device}")
                )

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        for optimizer in self.optimizers:
            check_optimizer(optimizer, scaled=getattr(plugin, "scaler", None) is not None)
        plugin.clip_gradients = partial(self._clip_gradients, type(plugin).clip_gradients.__get__(plugin))

    def _clip_gradients(self, usual: Callable, optimizer: Any, clip_val: float, gradient_clip_algorithm: str) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if clip_val <= 0 or gradient_clip_algorithm != "norm":
            usual(optimizer, clip_val, gradient_clip_algorithm)
        elif is_ours(optimizer):  # in the step that follows, and in no other
            own = self._own_norms.setdefault(optimizer, optimizer.max_grad_norm)
            optimizer.max_grad_norm = clip_val if own is None else min(own, clip_val)
        else:
            zk.clip_grad_norm_(self._module, clip_val)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **settings: Any) -> Any:
        try:
            return super().optimizer_step(optimizer, closure, model, **settings)
        finally:
            if optimizer in self._own_norms:
                optimizer.max_grad_norm = self._own_norms.pop(optimizer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            _ = [stack.enter_context(sharding.no_sync()) for sharding in self._shardings() if sharding.stage < 2]
            yield

    def on_train_end(self) -> None:
        mine: list[Any] = list(filter(is_ours, self.optimizers))
        for optimizer in mine:
            optimizer.flush()  # a delayed update counts in what is left behind

    def teardown(self) -> None:
        self.model = self.lightning_module
        for plugin in (self.cluster_environment, self.precision_plugin, self.accelerator):
            plugin.teardown()  # type: ignore[union-attr]  # the model and the optimizers stay where they are

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # save_checkpoint takes model and optimizers as they are

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has loaded it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(got("storage_options", storage_options, "None: zk.save writes a folder on a file system"))
        optimizers = self.optimizers if checkpoint.get("optimizer_states") else None
        zk.save(self.broadcast(filepath), self._module, optimizers, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path, trains = self.broadcast(checkpoint_path), self._module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if trains else []  # those of a fit before are of no use to a test
        if not Path(path).is_file():  # where nothing is trained, random numbers go on as they were
            loaded = zk.load(path, self._module, optimizers or None, rng=bool(optimizers))
            return {
                key: value[0] if isinstance(value, EachRank) else value for key, value in loaded.items()
            }  # the first rank's
        checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only is not False)
        self._module.load_state_dict(checkpoint["state_dict"], strict=self._module.strict_loading)
        states = checkpoint.get("optimizer_states", [])  # of a run that did not divide the model
        _ = [
            optimizer.load_state_dict(mine)
            for optimizer, mine in zip(optimizers, states, strict=bool(optimizers and states))
        ]
        return checkpoint


class _Root(nn.Sequential):  # not the module itself: Lightning runs steps within the forward of whatever else
    def forward(self, *arguments: Any, **settings: Any) -> Any:
        return self[0](*arguments, **settings)


StrategyRegistry.register("zerokern", ZerokernStrategy, "ZeRO by zk.shard at stage 2", override=True)
for _stage in range(4):
    StrategyRegistry.register(f"zerokern_stage_{_stage}", ZerokernStrategy, override=True, stage=_stage)
