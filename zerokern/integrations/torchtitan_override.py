"""torchtitan 0.3 trains with zerokern: an override, by name on its command line, of the container of its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

try:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise ModuleNotFoundError(
        "zerokern.integrations.torchtitan_override stands on the overrides of torchtitan 0.3; allowed: pip install "
        "'torchtitan>=0.3'; for 0.2 there is zerokern.integrations.torchtitan",
        name="torchtitan",
    ) from error

import torch

import zerokern as zk
from zerokern.core.errors import got
from zerokern.integrations.sharded_model import check_settings

__all__ = ["ZerokernOptimizers", "ZerokernOptimizersConfig", "optimizers"]

KINDS = {"Adam": zk.Adam, "AdamW": zk.AdamW}


@dataclass(kw_only=True, slots=True)
class ZerokernOptimizersConfig(OptimizersContainer.Config):
    """torchtitan's own; `optimizer_factory_kwargs_by_name` has the options of ours.

    >>> ZerokernOptimizersConfig().optimizer_factory_kwargs_by_name
    {}
    """


class ZerokernOptimizers(OptimizersContainer):
    """A container of torchtitan that builds `zk.AdamW` and `zk.Adam` for groups of torch's of that name.

    >>> ZerokernOptimizers.Config is ZerokernOptimizersConfig
    True
    """

    Config = ZerokernOptimizersConfig

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name not in KINDS:
            raise ValueError(got("optimizer_name", name, " or ".join(KINDS), "Others stay with torchtitan's container"))
        return KINDS[name]

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {}  # foreach and fused are what ours are


@override(target=OptimizersContainer.Config, exact=True, description="zk.AdamW and zk.Adam")
def optimizers(config: OptimizersContainer.Config, **settings: Any) -> ZerokernOptimizersConfig:
    """Returns the container's configuration with optimizers of ours, which take `settings`; groups stay as they are.

    `--override.imports 'zerokern.integrations.torchtitan_override.optimizers={"state_format": "int8"}'` is all that a
    run needs.

    >>> from torchtitan.components.optimizer import default_adamw
    >>> optimizers(default_adamw(lr=1e-3), tier="cpu").optimizer_factory_kwargs_by_name["AdamW"]
    {'tier': 'cpu'}
    """
    check_settings(settings, "The rate, betas, eps and weight decay are those of torchtitan's groups; it clips itself")
    if config.implementation == "fused_opt_states_bf16":
        do = "state_format='bf16' of this override is that"
        raise ValueError(got("optimizer.implementation", config.implementation, "fused, foreach or for-loop", do))
    given = {name: {**config.optimizer_factory_kwargs_by_name.get(name, {}), **settings} for name in KINDS}
    return derive(config, ZerokernOptimizersConfig, optimizer_factory_kwargs_by_name=given)
