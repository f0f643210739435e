"""Runs the cells of one library, in a process that imports no other.

The library is imported once; each cell is then a pair of forked processes over gloo, which share nothing with the
cells before. A line of JSON for each cell says that its files are there, or which ranks did not end.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import linecache
import os
import signal
import sys
import time
import traceback
import types
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .judge import Ended
from .libraries import training_of
from .noise import Noise, noisy
from .programs import PROGRAMS
from .training import Run, Training, Unsupported

ROOTS = ("deepspeed", "torchao", "bitsandbytes", "flashoptim", "dion", "zerokern", f"torch{os.sep}distributed")
OURS = f"bench{os.sep}right{os.sep}"
SPOKEN = (  # what the C++ of DDP and of DTensors says by name; there is no Python line that raises it
    "Expected to have finished reduction in the prior iteration",
    "Expected to mark a variable ready only once",
    "has parameters that were not used in producing loss",
    "Your training graph has changed in this iteration",
    "got mixed torch.Tensor and DTensor",
)
AFTER_ERROR_S = 3.0  # as torchrun does, the other ranks are ended when one has failed
POLL_S = 0.01
PR_SET_PDEATHSIG = 1


def run_rank(library: type[Training], program: str, rank: int, ranks: int, folder: Path, seed: int = 0) -> Ended:
    """What came of the program on this rank; with a seed, under noise of that seed."""
    place = folder / "rank"
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    store = dist.FileStore(str(place), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=10))
    torch.manual_seed(zlib.crc32(program.encode()))
    try:
        if not seed:
            return Ended(followed(library, program, folder))
        with Noise(1000 * seed + rank, PROGRAMS[program].narrow) as noise:
            return Ended(followed(noisy(library, noise), program, folder))
    except Unsupported as error:
        return Ended(error=f"documented: {error}", named=True)
    except Exception as error:
        traceback.print_exc()
        return Ended(error=first_line(error), named=is_named(error))


def followed(library: type[Training], program: str, folder: Path) -> dict[str, Any]:
    run = Run(library, folder)
    PROGRAMS[program].follow(run)
    return run.result()


def first_line(error: BaseException) -> str:
    says = " ".join(str(error).split())
    return f"{type(error).__name__}: {says[:300]}"


def is_named(error: BaseException) -> bool:
    """Whether the library refused: its own code raised this, in a statement with a message, and not by accident."""
    says = str(error)
    if any(words in says for words in SPOKEN):
        return True
    while error.__cause__ is not None and not says:
        error = error.__cause__
    frames = list(traceback.extract_tb(error.__traceback__))
    if not frames or not says.strip():
        return False
    last = frames[-1]
    place = last.filename.replace(OURS, "")
    in_library = OURS not in last.filename and any(f"{os.sep}{root}{os.sep}" in place for root in ROOTS)
    return in_library and (raises(last) or written_by(error))


def raises(frame: traceback.FrameSummary) -> bool:
    """Whether the statement that ends here is one that raises or asserts."""
    first = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return first.startswith(("raise ", "assert "))


def written_by(error: BaseException) -> bool:
    """Errors of zerokern have a base class of their own; functions that raise them for others count as statements."""
    return any(kind.__name__ == "ZerokernError" for kind in type(error).__mro__)


def run_cell(
    library: type[Training], program: str, ranks: int, seconds: float, folder: Path, seed: int = 0
) -> dict[str, Any]:
    """Forks the ranks, waits for them, and ends those that do not end."""
    folder.mkdir(parents=True)
    began, pids = time.monotonic(), {}
    died: dict[int, str] = {}
    limit = began + seconds
    try:
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                live(library, program, rank, ranks, folder, seed)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # both set it, whoever comes first
                os.setpgid(pid, pid)
            pids[pid] = rank
        while pids and time.monotonic() < limit:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid not in pids:
                time.sleep(POLL_S)
                continue
            rank = pids.pop(pid)
            if status:
                code = os.waitstatus_to_exitcode(status)
                died[rank] = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            if status or (folder / f"{rank}.failed").exists():
                limit = min(limit, time.monotonic() + AFTER_ERROR_S)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with whatever it has started itself
        for pid in pids:
            os.waitpid(pid, 0)
    return {"program": program, "died": died, "late": sorted(pids.values()), "seconds": time.monotonic() - began}


def live(library: type[Training], program: str, rank: int, ranks: int, folder: Path, seed: int) -> None:
    """One rank, from fork to end. What libraries print is kept beside its result."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the worker, however that ends
    with open(folder / f"{rank}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    ended = run_rank(library, program, rank, ranks, folder, seed)
    unfinished = folder / f"{rank}.part"
    torch.save(vars(ended), unfinished)
    unfinished.rename(folder / f"{rank}.pt")
    if ended.result is None:
        (folder / f"{rank}.failed").touch()
    else:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without waiting for the threads of libraries, nor for their order at exit


def ends_of(folder: Path, ranks: int, died: dict[str, str]) -> list[Ended]:
    """How each rank of a cell ended, from its files."""
    found = []
    for rank in range(ranks):
        file = folder / f"{rank}.pt"
        if file.exists():
            found.append(Ended(**torch.load(file, weights_only=True)))
        else:
            found.append(Ended(died=died.get(str(rank), "")))
    return found


def serve(name: str, place: str, ranks: str, seconds: str, *programs: str) -> None:
    """All cells of the library `name`, one after the other; `name~seed` runs them under noise."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(1), "w") as parent:
        os.dup2(nowhere.fileno(), 1)
        name, _, seed = name.partition("~")
        library = training_of(name)
        warm_up()
        for program in programs:
            told = run_cell(library, program, int(ranks), float(seconds), Path(place) / program, int(seed or 0))
            print(json.dumps(told), file=parent, flush=True)


def warm_up() -> None:
    """Imports what torch imports at first use, so that each cell need not."""
    import torch._dynamo
    import torch.utils.checkpoint

    assert isinstance(torch._dynamo, types.ModuleType)
