"""What every test stands on: poisoned memory, seeds, the full matrix on request, turns, and skips accounted for."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib.util
import logging
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

# Before torch is loaded: OpenMP's idle threads sleep. They wait busily else, on the cores of the other worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).with_name("comm")))  # ranks and forked children are for the tests of all folders
sys.path.insert(0, str(Path(__file__).with_name("lane")))

import machines
from cpu_time import cpu_seconds
from lane import Lane
from products import covering, settings

SKIPS = Path(__file__).with_name("skips.txt")
FRESH = ("empty", "empty_like", "empty_strided", "empty_permuted")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests marked slow as well, and every case of the kernels")
    parser.addoption("--lane", action="store_true", help="the tests that tests/lane.json has chosen, and no others")
    parser.addoption("--rest", action="store_true", help="the tests that --lane leaves out, and no others")
    parser.addoption(
        "--minutes", type=float, default=0, help="stop after so many, in an order drawn from --seed; 0: all"
    )
    parser.addoption(
        "--seed",
        default="0",
        help="draws the order of a run that --minutes limits, and which rows of long products run; every: all of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    # thousands of rows are not made where they would be left out
    config.slow_rows = config.getoption("--all") or config.getoption("--rest")  # type: ignore[attr-defined]
    interpret_triton_without_a_gpu()
    hear_interrupts()
    config.lane = Lane.load() if config.getoption("--lane") or config.getoption("--rest") else None  # type: ignore[attr-defined]
    config.pluginmanager.register(SkipAccount(read_skips(SKIPS)), "skip-account")
    config.pluginmanager.register(Times(config), "times")
    if config.getoption("--minutes"):
        config.pluginmanager.register(Budget(config), "budget")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(config.workerinput["testrunuid"]), "turns")


def hear_interrupts() -> None:
    """A shell that starts a run in the background has interrupts ignored, and tests that send themselves one hang."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interpret_triton_without_a_gpu() -> None:
    """Triton decides when a kernel is defined whether it is compiled or interpreted: before anything imports one."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from zerokern.kernels.triton.backend import interpreted, rounds_fma_once

        if interpreted() and not rounds_fma_once():
            round_fma_once()


def round_fma_once() -> None:
    """Replaces the fma of the interpreter of Triton 3.6, which torch 2.11 for GPUs asks for, by that of a GPU."""
    import torch
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from zerokern.kernels.reference_int8 import fma

    twice = InterpreterBuilder.create_fma

    def once(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != "float32":
            return twice(self, x, y, z)
        return TensorHandle(fma(*(torch.from_numpy(one.data.copy()) for one in (x, y, z))).numpy(), z.dtype.scalar)

    InterpreterBuilder.create_fma = once


def pytest_report_header(config: pytest.Config) -> str:
    """Names what the run can reach, since an instruction set that the machine lacks is a hole in the run."""
    try:
        from zerokern.core import native

        usable, compiled = native.isa_usable(), native.isa_names()
    except Exception as error:  # a header never hides the failure that the tests are about to show
        return f"zerokern: not usable here: {error}"
    absent = [name for name in compiled if name not in usable]
    return (
        f"zerokern: instruction sets {', '.join(usable)}; not on this machine: {', '.join(absent) or 'none'}\n"
        f"kinds of CPU: {machines.described()}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_beyond_pairs(items)
    if config.lane:  # type: ignore[attr-defined]
        slow_beyond_the_lane(config.lane, items)  # type: ignore[attr-defined]
    if config.getoption("--all"):
        return
    rest = config.getoption("--rest")
    others = [item for item in items if bool(item.get_closest_marker("slow")) != rest]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if bool(item.get_closest_marker("slow")) == rest]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_collection_finish() -> None:
    keep_what_is_there()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        keep_what_is_there()


def keep_what_is_there() -> None:
    """Modules imported so far stay: no search for garbage looks at them again. Without this one takes up to 0.5 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what is written in C++ complains at the end of what was never freed


def slow_beyond_pairs(items: list[pytest.Item]) -> None:
    """Of a product so many rows stay quick that any two values which meet in a row meet in a quick one."""
    families: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        quick = covering([settings(item.callspec.params.values()) for item in family])
        for number, item in enumerate(family):
            if number not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that have no test in the lane are not imported for it."""
    if config.getoption("--lane") and collection_path.name.startswith("test_"):
        file = str(collection_path.relative_to(config.rootpath))
        return None if config.lane.needs(file) else True  # type: ignore[attr-defined]
    return None


def slow_beyond_the_lane(lane: Lane, items: list[pytest.Item]) -> None:
    """What tests/lane.json has no place for is left to the tests marked slow; a test that it does not know runs."""
    quick = {item.nodeid: item for item in items if not item.get_closest_marker("slow")}
    for name in lane.left_out(quick):
        quick[name].add_marker(pytest.mark.slow)


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """Frameworks change what a process has one of: the environment, logging, the process group. It is put back."""
    import torch.distributed as dist

    root, environment, started = logging.getLogger(), dict(os.environ), dist.is_initialized()
    before = root.level, list(root.handlers), logging.root.manager.disable
    ours = {name: (one.level, one.disabled, one.propagate) for name, one in _our_loggers()}
    yield
    if dist.is_initialized() and not started:
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    root.level, root.handlers[:], logging.root.manager.disable = before
    for name, one in _our_loggers():
        one.level, one.disabled, one.propagate = ours.get(name, (logging.NOTSET, False, True))
        one._cache.clear()
    root._cache.clear()


@pytest.fixture(autouse=True)
def no_hooks_of_before() -> Iterator[None]:
    """Hooks on what autograd saves that a test leaves in force would be asked in all tests after it."""
    import torch

    yield
    left: list[object] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        left.append(top[0])
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert left == [], "the test leaves hooks on saved tensors in force"


def _our_loggers() -> list[tuple[str, logging.Logger]]:
    known = logging.root.manager.loggerDict.items()
    return [(name, one) for name, one in known if name.startswith("zerokern") and isinstance(one, logging.Logger)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Random numbers depend on the test's name alone: not on the order of the tests, not on the day."""
    import torch

    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@pytest.fixture(autouse=True, scope="session")
def away_from_the_sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Children look for modules in the working folder first: they must find what is tested, as a mutant's copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("away"))
        yield


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Memory that the library is about to write is full of NaN: an element that nobody wrote cannot pass for a result.

    This is fresh memory, and, in each pass, the buffer that gradients are collected in, which held others before.
    """
    spec = importlib.util.find_spec("zerokern")
    assert spec is not None, "zerokern is not installed; do: make setup"
    with pytest.MonkeyPatch.context() as patch:
        poison_memory(spec.submodule_search_locations[0], patch.setattr)
        yield


def poison_memory(folder: str, replace: Callable[[Any, str, Any], None]) -> None:
    """Poisons what the package in `folder` is about to write; `replace` is setattr."""
    import torch

    for name in FRESH:
        replace(torch, name, poisoning(getattr(torch, name), folder))
    replace(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty, folder))

    from zerokern.zero.gradients import GradientBucket

    replace(GradientBucket, "open", poisoning_buffer(GradientBucket.open))


def poisoning(fresh: Callable, folder: str) -> Callable:
    """`fresh`, but what it returns to a file below `folder` is poisoned."""
    import torch

    def poisoned(*args, **kwargs):
        tensor = fresh(*args, **kwargs)
        if torch.compiler.is_compiling() or not sys._getframe(1).f_code.co_filename.startswith(folder):
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
        return tensor

    return poisoned


def poisoning_buffer(open_bucket: Callable) -> Callable:
    """`GradientBucket.open`, but the buffer is poisoned, except where it holds gradients that a pass adds to."""
    import torch

    def opened(bucket, buffer):
        open_bucket(bucket, buffer)
        memory = bucket.buffer
        if memory.untyped_storage().device.type != "cpu" or bucket.memory.device.type != "cpu":
            return  # a played device reads it later
        kept = [(place, memory.as_strided(*bucket._spots[place]).clone()) for place in bucket._kept]
        ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes)  # NaN in every format, and no write that versions count
        with torch.no_grad():
            for place, values in kept:
                span = memory.as_strided(*bucket._spots[place]).view(-1)
                ctypes.memmove(span.data_ptr(), values.data_ptr(), values.nbytes)

    return opened


def read_rows(path: Path) -> list[str]:
    """The lines of a list, without comments."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def read_skips(path: Path) -> list[tuple[str, str]]:
    """The (test, reason) patterns of a list of skips: one `test | reason` per line."""
    rows = [line.partition(" | ") for line in read_rows(path)]
    return [(node.strip(), reason.strip()) for node, _, reason in rows]


class Turns:
    """Tests marked serial measure time: while one runs, the other workers of the run wait.

    A file holds both locks: its first byte is the door, its second the room. Who waits for the whole room keeps the
    door, so that nobody else goes in before. A worker that dies lets go of both.
    """

    DOOR, ROOM = 0, 1

    def __init__(self, run: str) -> None:
        self.path = Path(tempfile.gettempdir()) / f"{run}.turns"
        self.file = self.path.open("ab+")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, self.DOOR)
        fcntl.lockf(self.file, fcntl.LOCK_EX if item.get_closest_marker("serial") else fcntl.LOCK_SH, 1, self.ROOM)
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, self.DOOR)
        try:
            return (yield)
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, self.ROOM)

    def pytest_unconfigure(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)  # by the first worker that ends: all of them have opened it


class Budget:
    """Stops a run when its minutes are over, and says how many tests it left out.

    The files are shuffled by the seed, so runs with other seeds leave out others. Tests of one file stay together,
    since they share what their module sets up: ranks, a model that was trained.
    """

    BEGAN = "TESTS_BEGAN"

    def __init__(self, config: pytest.Config) -> None:
        if not hasattr(config, "workerinput"):
            os.environ[self.BEGAN] = str(time.time())  # its workers inherit it
        self.config = config
        self.minutes, self.seed = config.getoption("--minutes"), config.getoption("--seed")
        self.ends = float(os.environ[self.BEGAN]) + 60 * self.minutes
        self.ran = self.left_out = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: zlib.crc32(f"{self.seed} {file_of(item.nodeid)}".encode()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.time() < self.ends:
            self.ran += 1
            return None
        self.left_out += 1
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["budget"] = self.ran, self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        ran, left_out = getattr(node, "workeroutput", {}).get("budget", (0, 0))
        self.ran += ran
        self.left_out += left_out

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        of = f"{self.ran} of {self.ran + self.left_out} tests"
        terminalreporter.line(f"budget: {of} ran in {self.minutes:g} minutes, in the order of seed {self.seed}")


class Times:
    """Names the files that took longest, and the CPU seconds of all processes of the run."""

    SHOWN = 10

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.cpu_s = config, 0.0
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cpu_s"] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.cpu_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slowest files")
        for file, seconds in self.seconds.most_common(self.SHOWN):
            terminalreporter.line(f"{seconds:6.1f} s  {file}")
        own = time.process_time() if self.cpu_s else cpu_seconds()
        terminalreporter.line(f"{self.cpu_s + own:6.0f} CPU seconds of all processes together")


class SkipAccount:
    """Counts skips by reason; one that the list does not allow fails the run."""

    def __init__(self, allowed: list[tuple[str, str]]) -> None:
        self.allowed = allowed
        self.counts: Counter[str] = Counter()
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.add(report.nodeid, getattr(report, "wasxfail", None) or report.longrepr[2])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.add(report.nodeid, report.longrepr[2])

    def add(self, node: str, reason: str) -> None:
        reason = reason.removeprefix("Skipped: ")
        self.counts[reason] += 1
        if not any(fnmatchcase(node, tests) and fnmatchcase(reason, why) for tests, why in self.allowed):
            self.unlisted.append(f"{node}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.counts:
            return
        terminalreporter.section("skips")
        for reason, count in sorted(self.counts.items()):
            terminalreporter.line(f"{count:5d}  {reason}")
        for one in self.unlisted:
            terminalreporter.line(f"NOT LISTED in tests/skips.txt, so this run fails: {one}", red=True)
