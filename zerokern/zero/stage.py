"""What a stage shards: one number against the stage at which a thing begins to be divided."""

from __future__ import annotations

from zerokern.core.errors import got

__all__ = ["STAGES", "check_stage", "shards_gradients", "shards_parameters", "shards_state"]

STAGES = (0, 1, 2, 3)


def check_stage(stage: object) -> int:
    """
    >>> check_stage(3)
    3
    """
    if isinstance(stage, bool) or stage not in STAGES:
        allowed = "0 (all is replicated), 1 (optimizer state is sharded), 2 (gradients too) or 3 (parameters too)"
        raise ValueError(got("stage", stage, allowed))
    return int(stage)


def shards_state(stage: int) -> bool:
    """
    >>> [shards_state(stage) for stage in STAGES]
    [False, True, True, True]
    """
    return stage >= 1


def shards_gradients(stage: int) -> bool:
    """
    >>> [shards_gradients(stage) for stage in STAGES]
    [False, False, True, True]
    """
    return stage >= 2


def shards_parameters(stage: int) -> bool:
    """
    >>> [shards_parameters(stage) for stage in STAGES]
    [False, False, False, True]
    """
    return stage >= 3
