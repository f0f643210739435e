"""The libraries that take part: how each is called, where its adapter is, and which versions of what it needs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..training import Training

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Library:
    """`module` and `name` of its adapter; `pinned` is what has to be installed; `lossy`: states have 8 bits.

    `note` says above the table what is not as its documentation wants it; where that would be unfair, it is `counted`
    nowhere."""

    module: str
    name: str
    pinned: str = ""
    lossy: bool = False
    reference: str = PLAIN  # what it is held against; one with a rule of its own, against itself on one rank
    note: str = ""
    counted: bool = True

    def training(self) -> type[Training]:
        return getattr(importlib.import_module(self.module, __name__), self.name)

    @property
    def installed(self) -> str:
        """The version that is here; "" where there is none."""
        try:
            return importlib.metadata.version(re.split("==| @ ", self.pinned)[0] or "torch")
        except importlib.metadata.PackageNotFoundError:
            return ""

    @property
    def absent(self) -> str:
        """Why it takes no part here, or "": with the command that installs what it was tried with."""
        return "" if self.installed else f"not installed: pip install '{self.pinned}'"


DEEPSPEED, AO, BNB, FLASH = "deepspeed==0.19.8", "torchao==0.18.0", "bitsandbytes==0.50.2", "flashoptim==0.1.4"
DION = "dion @ git+https://github.com/microsoft/dion@0a059a4"  # it is on no index; its version is 0.1.0
DION_ALONE = "dion-alone"
FLASH_NOTE = (
    "its documentation supports NVIDIA GPUs alone. Here are CPUs, so its quantized states, its error correction and "
    "its fused step are off, and those are what it is for: its cells are shown, and not counted"
)
DION_NOTE = (
    "its Muon and AdamW at their defaults, held against itself on one rank. Its documentation has this use, on GPUs in "
    "its examples; here its functions are not compiled. It has no SGD, so programs with SGD are refused"
)

LIBRARIES = {
    "ddp": Library(".torch_ddp", "DdpTraining"),
    "fsdp2": Library(".fsdp2", "Fsdp2Training"),
    "deepspeed-1": Library(".deep_speed", "DeepSpeedTraining", DEEPSPEED),
    "deepspeed-2": Library(".deep_speed", "DeepSpeed2", DEEPSPEED),
    "deepspeed-3": Library(".deep_speed", "DeepSpeed3", DEEPSPEED),
    "torchao": Library(".eight_bit", "TorchaoTraining", AO, lossy=True),
    "bitsandbytes": Library(".eight_bit", "BitsandbytesTraining", BNB, lossy=True),
    "flashoptim": Library(".flash", "FlashTraining", FLASH, note=FLASH_NOTE, counted=False),
    "dion": Library(".orthonormal", "DionTraining", DION, reference=DION_ALONE, note=DION_NOTE),
    "dion-fsdp2": Library(".orthonormal", "DionFsdp2Training", DION, reference=DION_ALONE, note=DION_NOTE),
    "zerokern-0": Library(".zerokern", "ZerokernTraining"),
    "zerokern-1": Library(".zerokern", "Stage1"),
    "zerokern-2": Library(".zerokern", "Stage2"),
    "zerokern-3": Library(".zerokern", "Stage3"),
    "zerokern-2-cpu": Library(".zerokern", "StateInMemory"),
    "zerokern-3-nvme": Library(".zerokern", "EverythingOnDisk"),
}


def training_of(name: str) -> type[Training]:
    """The adapter of a library; of `plain` or `dion-alone`, the reference; `module:name` is any other, for tests."""
    if name == PLAIN:
        from ..training import Training

        return Training
    if name == DION_ALONE:
        from .orthonormal import DionAlone

        return DionAlone
    if ":" in name:
        module, _, what = name.partition(":")
        return getattr(importlib.import_module(module), what)
    return LIBRARIES[name].training()
