"""What every test stands on: poisoned memory, seeds, the full matrix on request, and skips that are accounted for."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SKIPS = Path(__file__).with_name("skips.txt")
FRESH = ("empty", "empty_like", "empty_strided", "empty_permuted")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests marked slow as well, and every case of the kernels")
    parser.addoption("--rest", action="store_true", help="the tests marked slow, and no others")
    parser.addoption(
        "--minutes",
        type=float,
        help="begin no test after so many; each commit begins with another file, what is left is counted",
    )


def pytest_configure(config: pytest.Config) -> None:
    interpret_triton_without_a_gpu()
    config.pluginmanager.register(SkipAccount(read_skips(SKIPS)), "skip-account")
    if config.getoption("--minutes") is not None:
        config.pluginmanager.register(TimeAccount(config.getoption("--minutes")), "time-account")


def interpret_triton_without_a_gpu() -> None:
    """Triton decides when a kernel is defined whether it is compiled or interpreted: before anything imports one."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_report_header(config: pytest.Config) -> str:
    """Names what the run can reach, since an instruction set that the machine lacks is a hole in the run."""
    try:
        from zerokern.core import native

        usable, compiled = native.isa_usable(), native.isa_names()
    except Exception as error:  # a header never hides the failure that the tests are about to show
        return f"zerokern: not usable here: {error}"
    absent = [name for name in compiled if name not in usable]
    return f"zerokern: instruction sets {', '.join(usable)}; not on this machine: {', '.join(absent) or 'none'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    rest = config.getoption("--rest")
    others = [item for item in items if bool(item.get_closest_marker("slow")) != rest]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if bool(item.get_closest_marker("slow")) == rest]


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
    """Children look for modules in the working folder first: they must find what is installed, not the sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("away"))
        yield


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Fresh memory that the library asks for is full of NaN: an element that nobody wrote cannot pass for a result."""
    import torch

    spec = importlib.util.find_spec("zerokern")
    assert spec is not None, "zerokern is not installed; do: make setup"
    folder = spec.submodule_search_locations[0]
    with pytest.MonkeyPatch.context() as patch:
        for name in FRESH:
            patch.setattr(torch, name, poisoning(getattr(torch, name), folder))
        patch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty, folder))
        yield


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


def read_skips(path: Path) -> list[tuple[str, str]]:
    """The (test, reason) patterns of a list of skips: one `test | reason` per line."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    rows = [line.partition(" | ") for line in lines if line and not line.startswith("#")]
    return [(node.strip(), reason.strip()) for node, _, reason in rows]


class TimeAccount:
    """Begins no test after so many minutes, and says of which files how many are left."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.until = time.monotonic() + 60 * minutes
        self.left: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """The commits of a branch take turns, so that no file is always the last."""
        count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=config.rootpath, capture_output=True)
        paths = list(dict.fromkeys(item.path for item in items))
        first = paths[int(count.stdout or 0) * 17 % len(paths)] if paths else None
        begin = next((at for at, item in enumerate(items) if item.path == first), 0)
        items[:] = items[begin:] + items[:begin]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() < self.until:
            return None
        self.left[item.nodeid.partition("::")[0]] += 1
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section(f"not begun after {self.minutes:g} minutes: {self.left.total()} tests")
            for path, count in self.left.items():
                terminalreporter.line(f"{count:5d}  {path}")


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
