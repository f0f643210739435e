"""A plugin of axolotl: `plugins: [zerokern.integrations.axolotl.ZerokernPlugin]` trains with `zk.AdamW`."""

from __future__ import annotations

from typing import Any

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("axolotl is not installed; pip install axolotl brings it", name="axolotl") from error

from zerokern.integrations.transformers import use

__all__ = ["ZerokernArgs", "ZerokernPlugin"]


class ZerokernArgs(BaseModel):
    """The key that the plugin adds to axolotl's configuration: options of `zk.AdamW`.

    >>> ZerokernArgs(zerokern={"tier": "cpu"}).zerokern
    {'tier': 'cpu'}
    """

    zerokern: dict[str, Any] | None = None


class ZerokernPlugin(BasePlugin):
    """Trains with `zk.AdamW` and the options of the key `zerokern` where axolotl would with torch's AdamW.

    >>> ZerokernPlugin().get_input_args()
    'zerokern.integrations.axolotl.ZerokernArgs'
    """

    def get_input_args(self) -> str:
        """Names the model of the configuration's additional key."""
        return f"{__name__}.{ZerokernArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Makes the Trainer build `zk.AdamW`. Not by `create_optimizer`: axolotl 0.19 declares and never calls it."""
        use(trainer, **(cfg.zerokern or {}))
