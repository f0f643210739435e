"""The optimizers that train the small GPT: one row per optimizer and format, with what it costs in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerokern.core.units import MasterFormat, StateFormat, Tier
from zerokern.io import Nvme
from zerokern.optim import AdamW
from zerokern.optim.disk import on_disk_of

from .mastered import Mastered

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0

STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 128}
REMAINDER_BYTES = {"fp32": 0, "split16": 2, "split8": 1}


@dataclass(frozen=True)
class Contender:
    """An optimizer in one format. `lossy` says in words what it rounds away; empty is nothing."""

    label: str
    dtype: torch.dtype
    state_format: StateFormat
    master_format: MasterFormat
    lossy: str = ""
    is_torch: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether fp32 masters lie beside the parameters: torch has no other way for narrow ones."""
        return self.is_torch and self.dtype != torch.float32

    @property
    def precision(self) -> str:
        """Of the model."""
        return "fp32" if self.dtype == torch.float32 else "bf16"

    def optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float, tier: Tier | Nvme = "device"
    ) -> torch.optim.Optimizer:
        if self.has_masters:
            return Mastered(parameters, MAX_GRAD_NORM, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        if self.is_torch:
            return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        return AdamW(
            parameters,
            lr=lr,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            state_format=self.state_format,
            master_format=self.master_format,
            max_grad_norm=MAX_GRAD_NORM,
            tier=tier,
        )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Global norm, clip and update. torch clips in a pass of its own, zerokern inside the update."""
        if self.is_torch and not self.has_masters:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()

    def bytes_by_role(self, numel: int) -> dict[str, int]:
        """What training holds at once besides activations, in memory or on disk.

        >>> sum(CONTENDERS["torch"].bytes_by_role(1000).values())
        16000
        """
        element = self.dtype.itemsize
        each = {
            "parameters": element,
            "remainder": REMAINDER_BYTES[self.master_format],
            "master": 4 * self.has_masters,
            "gradients": element,
            "widened": 4 * self.has_masters,
            "exp_avg": STATE_BYTES[self.state_format],
            "exp_avg_sq": STATE_BYTES[self.state_format],
        }
        return {role: round(numel * nbytes) for role, nbytes in each.items()}


CONTENDERS = {
    "torch": Contender("torch fused AdamW", torch.float32, "fp32", "fp32", is_torch=True),
    "torch-bf16": Contender("torch fused + masters", torch.bfloat16, "fp32", "fp32", is_torch=True),
    "exact-fp32": Contender("zk.AdamW exact", torch.float32, "fp32", "fp32"),
    "int8-fp32": Contender("zk.AdamW int8", torch.float32, "int8", "fp32", "8-bit states"),
    "exact": Contender("zk.AdamW exact", torch.bfloat16, "fp32", "split16"),
    "bf16-split16": Contender("zk.AdamW bf16", torch.bfloat16, "bf16", "split16", "bf16 states"),
    "int8-split16": Contender("zk.AdamW int8", torch.bfloat16, "int8", "split16", "8-bit states"),
    "int8-split8": Contender("zk.AdamW int8", torch.bfloat16, "int8", "split8", "8-bit states, 24-bit masters"),
}


ON_DISK = frozenset({"remainder", "exp_avg", "exp_avg_sq"})  # the roles that `tier=zk.Nvme(path)` keeps there


def state_nbytes(optimizer: torch.optim.Optimizer, *, on_disk: bool = False) -> dict[str, int]:
    """Bytes that an optimizer holds now, in memory or on disk, by name of the state (scales with what they scale)."""
    held: dict[str, int] = {}
    for state in optimizer.state.values():
        owner = on_disk_of(state)
        stored = {} if owner is None else owner.described()
        for name, value in (stored if on_disk else state).items():
            if isinstance(value, Tensor) and value.ndim:
                role = name.removesuffix("_scale")
                held[role] = held.get(role, 0) + value.numel() * value.dtype.itemsize
    return held
