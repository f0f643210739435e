"""torchtitan 0.3 trains with `zk.AdamW` and `zk.Adam` where its groups name torch's: an override. On its command line:

    --override.imports 'zerokern.examples.torchtitan_override.optimizers={"tier": "cpu", "state_format": "int8"}'

For torchtitan 0.2 there is `zerokern.integrations.torchtitan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override

import zerokern as zk
from zerokern.integrations.sharded_model import check_settings

KINDS = {"Adam": zk.Adam, "AdamW": zk.AdamW}


class ZerokernOptimizers(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's own; `optimizer_factory_kwargs_by_name` has the options of ours."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name not in KINDS:
            raise ValueError(f"optimizer_name={name!r}: must be AdamW or Adam; others stay with torchtitan's container")
        return KINDS[name]

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {}  # foreach and fused are what ours are


@override(target=OptimizersContainer.Config, exact=True, description="zk.AdamW and zk.Adam")
def optimizers(config: OptimizersContainer.Config, **settings: Any) -> ZerokernOptimizers.Config:
    """Returns the container's configuration with optimizers of ours, which take `settings`; groups stay as they are."""
    check_settings(settings, "The rate, betas, eps and weight decay are those of torchtitan's groups; it clips itself")
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError("implementation='fused_opt_states_bf16': say state_format='bf16' to this override instead")
    given = {name: {**config.optimizer_factory_kwargs_by_name.get(name, {}), **settings} for name in KINDS}
    return derive(config, ZerokernOptimizers.Config, optimizer_factory_kwargs_by_name=given)
