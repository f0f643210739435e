"""What each of two ranks does with Lightning; run by `ranks.run_ranks`, all of it in one start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from light_cases import Case, fitted, keeper, looped, resumed
from torch.nn.parallel import DistributedDataParallel

FITS = {
    "ddp": Case(),
    "0": Case(stage=0),
    "1": Case(stage=1),
    "2 bf16": Case(stage=2, precision="bf16-mixed"),
    "3": Case(stage=3, inside="self"),
    "3 fp16": Case(stage=3, precision="16-mixed", accumulated=1),
}
RESUMED = {
    "ddp": Case(),
    "2": Case(stage=2, dropout=0.2, shuffle=True, settings={"tier": "cpu"}),
    "3 int8": Case(stage=3, dropout=0.2, state_format="int8", precision="bf16-mixed"),
}
SMALLER = Case(stage=3, epochs=1)


QUICK = ("ddp", "2 bf16", "3", "3 int8")


def everything(rank: int, folder: str, full: bool) -> dict[str, Any]:
    """All of it, or what represents it."""
    found: dict[str, Any] = {"fits": {}, "resumed": {}}
    for name, case in FITS.items():
        if not full and name not in QUICK:
            continue
        wrap = DistributedDataParallel if case.stage is None else None
        found["fits"][name] = fitted(case, 2, Path(folder) / "fits"), looped(case, rank, 2, wrap)
    for name, case in RESUMED.items():
        if not full and name not in QUICK[1:]:
            continue
        found["resumed"][name] = resumed(case, 2, Path(folder) / name)
    if full:
        found["restaged"] = resumed(Case(stage=3), 2, Path(folder) / "restaged", again=Case(stage=1))
    kept = {"enable_checkpointing": True, "callbacks": [keeper(Path(folder) / "smaller")]}
    found["smaller"] = fitted(SMALLER, 2, folder, **kept)
    return found


def one_of_two(rank: int, folder: str) -> Any:
    """What two ranks have saved, on one, at another stage: there is nothing left to train."""
    return fitted(replace(SMALLER, stage=2), 1, folder, ckpt_path=str(Path(folder) / "smaller" / "epoch=0.ckpt"))
