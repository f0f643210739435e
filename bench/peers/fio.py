"""fio, as a process of its own: the flexible I/O tester by Jens Axboe, who wrote io_uring.

Its time is the run time that it reports, without the start of the process; its CPU time is that of its jobs. Wired for
least work: no verification, no scrambling of buffers at each write, no map of random blocks, few looks at the clock,
one file that is there already. Its buffers are filled with random data once, before its clock starts, and lie in huge
pages as ours do, which its C library is asked for (glibc from 2.35 on); small pages are 2 to 3 times slower. Tried are
libaio and io_uring, with and without registered buffers and files, requests sent and reaped one by one and in batches.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..contest import Missing, WrongResult
from ..disk import usage
from ..disk.contest import Mover, Pass, Task
from ..disk.pattern import KIB, MIB, Pattern, size_text
from ..disk.search import ranked

PROGRAM = "fio"
HUGE_PAGES, HUGE_PAGE_NBYTES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1", 2 * MIB
ENGINES = {
    "libaio": ("--ioengine=libaio",),
    "io_uring": ("--ioengine=io_uring",),
    "io_uring, registered": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
}
REGISTERED = "io_uring, registered"
BLOCKS = tuple(256 * KIB << power for power in range(6))
DEPTHS = tuple(8 << power for power in range(5))
JOBS, BATCHES = (1, 2), (1, 8, 16)
# more memory than this in flight is no faster, and every trial would fill it with random data first
INFLIGHT_NBYTES = 256 * MIB
UNTUNED_DEPTH = 32
CHECKED_NBYTES, TOUCHED_NBYTES = 32 * MIB, MIB
TIMEOUT_S = 600


@dataclass(frozen=True)
class Setting:
    """What is tuned."""

    engine: str
    block: int
    depth: int
    jobs: int = 1
    batch: int = 1

    def __str__(self) -> str:
        jobs = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        batch = f", batches of {self.batch}" if self.batch > 1 else ""
        return f"{self.engine}, {size_text(self.block)}, depth {self.depth}, {jobs}{batch}"


def coarse(pattern: Pattern) -> list[Setting]:
    if pattern.block:
        return [Setting(engine, pattern.block, pattern.depth, 1, batch) for engine in ENGINES for batch in BATCHES]
    grid = (Setting(e, b, d) for e in ("libaio", REGISTERED) for b in BLOCKS[::2] for d in DEPTHS[::2])
    return [setting for setting in grid if fits(setting)]


def fits(setting: Setting) -> bool:
    return setting.block * setting.depth * setting.jobs <= INFLIGHT_NBYTES


def neighbours(setting: Setting) -> Iterator[Setting]:
    """One step in each direction; the request size and depth of a random pattern are given."""
    changes: list[tuple[str, tuple[object, ...]]] = [
        ("block", BLOCKS),
        ("depth", DEPTHS),
        ("jobs", JOBS),
        ("engine", tuple(ENGINES)),
    ]
    for name, values in changes:
        at = values.index(getattr(setting, name))
        for near in values[max(0, at - 1) : at + 2]:
            other = dataclasses.replace(setting, **{name: near})
            if other != setting and fits(other):
                yield other


def command(task: Task, setting: Setting, nbytes: int, *more: str) -> list[str]:
    pattern = task.pattern
    order = "rand" if pattern.block else ""
    kind = {"read": "read", "write": "write", "mixed": "rw"}[pattern.kind]
    share = nbytes // setting.jobs
    span = task.file.nbytes // setting.jobs if pattern.block else share
    return [
        "env", HUGE_PAGES, PROGRAM, "--name=pass", f"--iomem_align={HUGE_PAGE_NBYTES}",
        f"--filename={task.file.path}", *ENGINES[setting.engine],
        f"--rw={order}{kind}", f"--bs={setting.block}", f"--iodepth={setting.depth}", f"--numjobs={setting.jobs}",
        f"--size={span}", f"--io_size={share}", f"--offset_increment={span}",
        f"--iodepth_batch_submit={setting.batch}", f"--iodepth_batch_complete_max={setting.batch}",
        f"--direct={int(task.file.direct)}", "--allow_file_create=0", "--overwrite=1", "--fallocate=none",
        "--invalidate=0", "--scramble_buffers=0", "--norandommap=1", "--randrepeat=0", "--gtod_reduce=1",
        "--output-format=json", *more,
    ]  # fmt: skip


def execute(arguments: list[str]) -> dict[str, object]:
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S)
    begin = ran.stdout.find("{")  # behind warnings, if there are any
    if ran.returncode != 0 or begin < 0:
        raise WrongResult(f"fio ended with {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}")
    return json.loads(ran.stdout[begin:])


def reported(told: dict, disk_nbytes: int) -> Pass:
    """The slowest job's time, and the sum of what the jobs moved and used."""
    nbytes, longest_ms, cpu_s = 0, 0, 0.0
    for job in told["jobs"]:
        if job["error"]:
            raise WrongResult(f"fio's job ended with error {job['error']}")
        nbytes += job["read"]["io_bytes"] + job["write"]["io_bytes"]
        longest_ms = max(longest_ms, job["read"]["runtime"], job["write"]["runtime"])
        cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Pass(max(longest_ms, 1) * 1e6, nbytes, cpu_s, disk_nbytes)


def one_pass(task: Task, setting: Setting, nbytes: int) -> Pass:
    before = usage.of_children()
    told = execute(command(task, setting, nbytes))
    return reported(told, (usage.of_children() - before).disk_nbytes)


def check(task: Task, setting: Setting) -> None:
    """fio's own verification: it writes checksummed blocks, reads them back and compares."""
    nbytes = min(CHECKED_NBYTES, task.pattern.nbytes)
    sequential = dataclasses.replace(task, pattern=dataclasses.replace(task.pattern, kind="write", block=0))
    block = min(setting.block, nbytes // setting.jobs)
    verifying = dataclasses.replace(setting, block=block)
    told = execute(
        command(
            sequential,
            verifying,
            nbytes,
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
        )
    )
    reported(told, 0)


def mover(name: str, task: Task, setting: Setting) -> Mover:
    return Mover(
        name=name,
        wiring=str(setting),
        run=lambda: one_pass(task, setting, task.pattern.nbytes),
        check=lambda: check(task, setting),
        note="" if task.file.direct else "no O_DIRECT here",
        settings=dataclasses.asdict(setting),
    )


@functools.cache
def refusal(file: Path, direct: bool, engine: str) -> str:
    """Why an engine cannot run here, or nothing: containers forbid io_uring."""
    try:
        execute([
            PROGRAM, "--name=touch", f"--filename={file}", *ENGINES[engine], "--rw=read", "--bs=64k",
            f"--size={TOUCHED_NBYTES}", f"--direct={int(direct)}", "--output-format=json",
        ])  # fmt: skip
    except WrongResult as error:
        return str(error)
    return ""


def io(task: Task) -> list[Mover]:
    """The fastest setting, and the fastest with registered buffers where that is another one: the measure for CPU."""
    if shutil.which(PROGRAM) is None:
        raise Missing("fio is not installed (apt-get install fio)")
    refusals = {engine: refusal(task.file.path, task.file.direct, engine) for engine in ENGINES}
    if all(refusals.values()):
        raise Missing("; ".join(filter(None, refusals.values())))
    settings = [setting for setting in coarse(task.pattern) if not refusals[setting.engine]]

    def near(setting: Setting) -> list[Setting]:
        return [] if task.pattern.block else [one for one in neighbours(setting) if not refusals[one.engine]]

    def rate(setting: Setting) -> float:
        return one_pass(task, setting, task.trial_nbytes).gb_s

    if task.tune:
        order = ranked(settings, near, rate)
    else:
        order = [dataclasses.replace(settings[-1], block=task.pattern.block or MIB, depth=UNTUNED_DEPTH)]
    movers = [mover("fio", task, order[0])]
    registered = [setting for setting in order if setting.engine == REGISTERED]
    if registered and order[0].engine != REGISTERED:
        movers.append(mover("fio-registered", task, registered[0]))
    return movers


CANDIDATES = {"io": io}
