"""Exact AdamW for bf16 models in 14 bytes per parameter: on GPU, host memory or NVMe, sharded or not.

>>> import torch, zerokern as zk
>>> model = torch.nn.Linear(4, 4)
>>> opt = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from zerokern.core.env import source_tree
from zerokern.core.errors import did_you_mean
from zerokern.core.ports import PLUGS

OLDEST_TORCH = (2, 10)


def _check_torch() -> None:
    """Refuses a torch that does not fit. It is no dependency, so that no installation ever exchanges the one there is.

    torch itself is not imported: that takes seconds, and a command that shows its help needs none of it.
    """
    oldest, torch = ".".join(map(str, OLDEST_TORCH)), sys.modules.get("torch")
    try:
        found = str(torch.__version__) if torch is not None else version("torch")
    except PackageNotFoundError:
        if importlib.util.find_spec("torch") is not None:
            return  # built in place: it has no metadata, and says what it lacks when it is used
        raise ImportError(
            f"zerokern needs torch {oldest} or newer, and there is none; install the build that fits your machine, "
            "or: pip install 'zerokern[torch]'"
        ) from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TORCH:
        raise ImportError(
            f"zerokern needs torch {oldest} or newer, and torch {found} is installed; it was left as it is. Upgrade it "
            f"yourself, to the build that fits your machine, or: pip install --upgrade 'torch>={oldest}'"
        )


class _Beside:
    """Finds bench and examples in a source tree, where they lie beside the package, as in an installation within it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in ("zerokern.bench", "zerokern.examples"):
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(source_tree())])


_check_torch()
if source_tree() is not None:
    sys.meta_path.append(_Beside)
PLUGS.update(
    {  # what the core reaches through its ports, without importing it
        "disk": ("zerokern.io.tier:Nvme",),
        "checkpoint source": ("zerokern.interop.foreign:open_foreign",),
        "checkpoint model": ("zerokern.parallel.saved_stages:stages_of",),
        "group observer": ("zerokern.debug.watch:GroupWatch",),
        "checkpoint layout": ("zerokern.activations.saved_tiles:tiled_layout",),
    }
)

if TYPE_CHECKING:
    from zerokern import io, kernels
    from zerokern.activations.recompute import recompute
    from zerokern.activations.tiles import tile
    from zerokern.api import build, gathered, no_sync, shard, shards
    from zerokern.checkpoint.background import Saving
    from zerokern.checkpoint.folder import latest
    from zerokern.checkpoint.loader import load
    from zerokern.checkpoint.saver import save
    from zerokern.core.errors import (
        BackendError,
        BudgetError,
        CommError,
        IoError,
        KernelError,
        ShardError,
        StateError,
        ZerokernError,
    )
    from zerokern.debug.tracing import trace
    from zerokern.integrations.deepspeed import from_deepspeed
    from zerokern.interop.exporter import export
    from zerokern.interop.pretrained import load_pretrained
    from zerokern.io import Nvme
    from zerokern.optim import (
        SGD,
        Adagrad,
        Adam,
        AdamW,
        ChainedOptimizer,
        Lion,
        Muon,
        clip_grad_norm_,
        convert_state,
        muon_groups,
    )
    from zerokern.parallel.pipelining import PipelineStage
    from zerokern.planner import Plan, measure, plan
    from zerokern.report import get_include, get_library, info
    from zerokern.schedule import Delayed

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BackendError",
    "BudgetError",
    "ChainedOptimizer",
    "CommError",
    "Delayed",
    "IoError",
    "KernelError",
    "Lion",
    "Muon",
    "Nvme",
    "PipelineStage",
    "Plan",
    "Saving",
    "ShardError",
    "StateError",
    "ZerokernError",
    "__version__",
    "build",
    "clip_grad_norm_",
    "convert_state",
    "export",
    "from_deepspeed",
    "gathered",
    "get_include",
    "get_library",
    "info",
    "io",
    "kernels",
    "latest",
    "load",
    "load_pretrained",
    "measure",
    "muon_groups",
    "no_sync",
    "plan",
    "recompute",
    "save",
    "shard",
    "shards",
    "tile",
    "trace",
]

try:
    __version__ = version("zerokern")
except PackageNotFoundError:  # a source tree on the path: only the installed package knows its number
    __version__ = "0+source"

_NAMES = {
    "zerokern.optim": "SGD Adagrad Adam AdamW ChainedOptimizer Lion Muon clip_grad_norm_ convert_state muon_groups",
    "zerokern.core.errors": (
        "BackendError BudgetError CommError IoError KernelError ShardError StateError ZerokernError"
    ),
    "zerokern.api": "build gathered no_sync shard shards",
    "zerokern.planner": "Plan measure plan",
    "zerokern.checkpoint.background": "Saving",
    "zerokern.checkpoint.folder": "latest",
    "zerokern.checkpoint.loader": "load",
    "zerokern.checkpoint.saver": "save",
    "zerokern.interop.exporter": "export",
    "zerokern.interop.pretrained": "load_pretrained",
    "zerokern.io": "Nvme",
    "zerokern.integrations.deepspeed": "from_deepspeed",
    "zerokern.report": "get_include get_library info",
    "zerokern.schedule": "Delayed",
    "zerokern.parallel.pipelining": "PipelineStage",
    "zerokern.activations.recompute": "recompute",
    "zerokern.activations.tiles": "tile",
    "zerokern.debug.tracing": "trace",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import zerokern` stays light."""
    if name in ("io", "kernels"):
        return importlib.import_module(f"zerokern.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    near = did_you_mean(name, __all__)
    raise AttributeError(f"module 'zerokern' has no attribute {name!r}. {near or 'It has ' + ', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
