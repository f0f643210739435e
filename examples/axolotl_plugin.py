"""axolotl trains with `zk.AdamW`: a plugin. Put these lines into config.yaml, then `axolotl train config.yaml`:

    optimizer: adamw_torch
    plugins:
      - zerokern.examples.axolotl_plugin.ZerokernPlugin
    zerokern:  # options of zk.AdamW; rates, groups and clipping are axolotl's
      tier: cpu

The file is not called axolotl.py: programs started in this folder would import it in the place of the framework.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from zerokern.integrations.transformers import use


class ZerokernArgs(BaseModel):
    """The key that the plugin adds to axolotl's configuration."""

    zerokern: dict[str, Any] | None = None


class ZerokernPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.ZerokernArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Makes the Trainer build `zk.AdamW`. Not by `create_optimizer`: axolotl 0.19 declares and never calls it."""
        use(trainer, **(cfg.zerokern or {}))
