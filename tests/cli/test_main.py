"""The command line as a stranger meets it: typos, pipes, terminals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tables import each

from zerokern.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(words)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    found = capsys.readouterr()
    return status, found.out, found.err


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys)
    assert status == 0 and not err
    assert all(name in out for name in ("info", "plan", "bench", "checkpoint", "demo", "trace"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import zerokern as zk

    assert said(capsys, "--version") == (0, f"zerokern {zk.__version__}\n", "")


@each(
    "words, usage, says",
    [
        (("plam",), "usage: zerokern ", "Did you mean plan?"),
        (("bench", "adm"), "usage: zerokern bench ", "Did you mean adam?"),
        (("bench", "adam", "--pears", "3"), "usage: zerokern bench ", "Did you mean --pairs?"),
        (("plan", "7B"), "usage: zerokern plan ", "7B is not an option here"),
        (("plan", "--schedule", "delay"), "usage: zerokern plan ", "Did you mean delayed?"),
    ],
)
def test_a_typo_shows_that_command(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], usage: str, says: str
) -> None:
    status, out, err = said(capsys, *words)
    assert status == 2 and not out
    assert err.startswith(usage) and says in err


def test_each_benchmark_says_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    from zerokern.bench import ops

    status, out, _ = said(capsys, "bench", "--list")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert status == 0 and list(lines) == list(ops.NAMES)
    assert all(what.endswith(".") and "`" not in what for what in lines.values())


PLAN = "from zerokern.cli.main import main; import sys; sys.exit(main(['plan', '--numel', '7B', '--world', '1,2,4,8']))"


def test_a_closed_pipe_is_no_traceback() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", PLAN], stdout=writes, stderr=subprocess.PIPE, timeout=60)
    os.close(writes)
    assert done.returncode == 141 and done.stderr == b""


def test_a_terminal_that_knows_ascii_alone() -> None:
    there = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", PLAN], env=there, capture_output=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.isascii()


def test_info_is_no_wider_than_the_terminal() -> None:
    import zerokern as zk
    from zerokern.cli.info import folded

    text = str(zk.info())
    for width in (40, 80):
        lines = folded(text, width).splitlines()
        indent = max(len(line) - len(line.lstrip()) for line in lines)
        assert all(len(line) <= max(width, indent + max(map(len, text.split()))) for line in lines)
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())


@each("command", ["", "info", "plan", "bench", "checkpoint", "demo", "trace"])
@each("width", [80, 120])
def test_help_is_no_wider_than_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, _ = said(capsys, *command.split(), "--help")
    assert status == 0 and max(map(len, out.splitlines())) <= width


CLEANS_SLOWLY = """
import time
from zerokern.cli import main as cli

def run(argv):
    try:
        print("running", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(60)

cli._run = run
cli.main([])
"""


def test_a_second_sigterm_kills() -> None:
    with subprocess.Popen([sys.executable, "-c", CLEANS_SLOWLY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for word in ("running", "cleaning"):
            assert process.stdout.readline().strip() == word
            process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(20) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_handler_that_python_did_not_set_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []

    def set_handler(number: int, handler: object) -> None:
        assert handler is not None, "signal.signal refuses it"
        handlers.append(handler)

    monkeypatch.setattr(signal, "signal", set_handler)
    assert main([]) == 0
    assert handlers[-1] is signal.SIG_DFL
