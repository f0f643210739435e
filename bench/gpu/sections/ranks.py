"""Two ranks on two GPUs, started by torchrun: stages 0 to 3 against DDP and FSDP2."""

from __future__ import annotations

import os
import sys

from ..report import Desk
from .commands import run_logged

RANKS = 2


def run(desk: Desk) -> None:
    rehearse = desk.settings.rehearse
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone", "--no-python"]
    rank = [sys.executable, "-m", f"{__package__.rpartition('.')[0]}.ranks"]
    told = [str(desk.file), f"{desk.budget.left:.0f}", *(["--rehearse"] if rehearse else [])]
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    code, lines = run_logged([*torchrun, *rank, *told], desk.log, 1.4 * desk.budget.left, environment=environment)
    if code is None:
        desk.could_not("ranks", f"stopped, late; {(lines or ['they said nothing'])[-1]}"[:300])
    elif code:
        error = next((line for line in reversed(lines) if "Error" in line), (lines or [""])[-1])
        desk.could_not("ranks", f"ended with {code}: {error.strip()}"[:300])
