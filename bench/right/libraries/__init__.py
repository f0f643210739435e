"""The libraries that take part: how each is called, where its adapter is, and which versions of what it needs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..training import Training


@dataclasses.dataclass(frozen=True)
class Library:
    """`module` and `name` of its adapter; `pinned` is what has to be installed, `lossy` the bits of its states."""

    module: str
    name: str
    pinned: str = ""
    lossy: bool = False
    needs: str = ""  # what it needs that a machine without a GPU has not

    def training(self) -> type[Training]:
        return getattr(importlib.import_module(self.module, __name__), self.name)

    @property
    def installed(self) -> str:
        """The version that is here; "" where there is none."""
        try:
            return importlib.metadata.version(self.pinned.partition("==")[0] or "torch")
        except importlib.metadata.PackageNotFoundError:
            return ""

    @property
    def absent(self) -> str:
        """Why it takes no part here, or "": with the command that installs what it was tried with."""
        if self.needs:
            return self.needs
        return "" if self.installed else f"not installed: pip install {self.pinned}"


DEEPSPEED, AO, BNB = "deepspeed==0.19.8", "torchao==0.18.0", "bitsandbytes==0.50.2"
ON_GPUS = "not run: its kernels are Triton's, and need a GPU"

PLAIN = "plain"
LIBRARIES = {
    "ddp": Library(".torch_ddp", "DdpTraining"),
    "fsdp2": Library(".fsdp2", "Fsdp2Training"),
    "deepspeed-1": Library(".deep_speed", "DeepSpeedTraining", DEEPSPEED),
    "deepspeed-2": Library(".deep_speed", "DeepSpeed2", DEEPSPEED),
    "deepspeed-3": Library(".deep_speed", "DeepSpeed3", DEEPSPEED),
    "torchao": Library(".eight_bit", "TorchaoTraining", AO, lossy=True),
    "bitsandbytes": Library(".eight_bit", "BitsandbytesTraining", BNB, lossy=True),
    "flashoptim": Library("", "", "flashoptim==0.1.4", needs=ON_GPUS),
    "dion": Library("", "", "dion", needs=ON_GPUS),
    "zerokern-0": Library(".zerokern", "ZerokernTraining"),
    "zerokern-1": Library(".zerokern", "Stage1"),
    "zerokern-2": Library(".zerokern", "Stage2"),
    "zerokern-3": Library(".zerokern", "Stage3"),
    "zerokern-2-cpu": Library(".zerokern", "StateInMemory"),
    "zerokern-3-nvme": Library(".zerokern", "EverythingOnDisk"),
}


def training_of(name: str) -> type[Training]:
    """The adapter of a library; of `plain`, the reference; `module:name` is any other one, for tests."""
    if name == PLAIN:
        from ..training import Training

        return Training
    if ":" in name:
        module, _, what = name.partition(":")
        return getattr(importlib.import_module(module), what)
    return LIBRARIES[name].training()
