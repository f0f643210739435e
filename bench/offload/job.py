"""What every contender trains: the job of `bench/zero` at one ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

from ..zero.job import Job

STAGES = (1, 2, 3)
# sequences per rank where none are asked for; about those at which DDP communicates a quarter of a step in bf16
BATCHES = {"tiny": 4, "25M": 2, "100M": 2}


@dataclass(frozen=True)
class OffloadJob(Job):
    """One contest: everyone who shards shards at `stage`; FSDP2 has none, and decides by what it keeps gathered."""

    stage: int = 2

    @property
    def name(self) -> str:
        """
        >>> OffloadJob("25M", "bf16", 2, 4).name
        'GPT 25M, bf16, 2 ranks, stage 2'
        """
        return f"{super().name}, stage {self.stage}"
