"""Starts the ranks, hears them, and ends them: one that dies takes the others with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import zerokern
from zerokern.core.errors import ZerokernError

from .job import Job
from .turns import Effort

LOG_LINES = 12
POLL_S = 0.5


class RankFailed(ZerokernError):
    """A rank ended before its time; the text holds the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(job: Job, rank: int, port: int) -> dict[str, str]:
    threads = str(job.threads)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "ZEROKERN_THREADS": threads,
    }


@contextlib.contextmanager
def _ranks(
    program: str, task: str, job: Job, effort: Effort, folder: Path, to_us: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    port = free_port()
    home = Path(zerokern.__file__).resolve().parents[1]  # -m puts the working folder first on the path
    command = [sys.executable, "-m", program, task, job.to_json(), json.dumps(dataclasses.asdict(effort))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.ranks):
            with log_of(folder, rank).open("wb") as log:
                running.append(
                    subprocess.Popen(
                        [*command, str(to_us)], env=environment(job, rank, port), pass_fds=(to_us,),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=home,
                    )
                )  # fmt: skip
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def run_ranks(
    task: str,
    job: Job,
    effort: Effort,
    say: Callable[[str], None],
    advance: Callable[[int, int], None],
    program: str = f"{__package__}.rank",
) -> dict[str, Any]:
    """The result of rank 0 of `program`."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as place, open(reading, "rb", buffering=0) as heard:
        folder = Path(place)
        try:
            started = _ranks(program, task, job, effort, folder, writing)
            with started as running:
                for line in lines_of(heard, lambda: _check(running, folder)):
                    message = json.loads(line)
                    if "say" in message:
                        say(message["say"])
                    elif "round" in message:
                        advance(*message["round"])
                    else:
                        return message["result"]
        finally:
            os.close(writing)
    raise AssertionError("unreachable: this process itself holds the pipe open")


def lines_of(heard: IO[bytes], while_waiting: Callable[[], None]) -> Iterator[bytes]:
    """Lines as they come; `while_waiting` is called when none has come for a while, and may raise."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(heard, selectors.EVENT_READ)
        while True:
            if not selector.select(POLL_S):
                while_waiting()
                continue
            *lines, rest = (rest + heard.read(1 << 16)).split(b"\n")
            yield from lines


def _check(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """All must be alive until the result is there."""
    for rank, process in enumerate(running):
        if process.poll():
            lines = log_of(folder, rank).read_text(errors="replace").splitlines()
            what = f"rank {rank} ended with status {process.returncode}:"
            raise RankFailed("\n  ".join([what, *lines[-LOG_LINES:]]))
