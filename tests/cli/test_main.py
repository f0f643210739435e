"""The command line as a stranger meets it: typos, pipes, terminals."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import each

from zerokern.cli.main import main
from zerokern.cli.main import parser as main_parser


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


@each("command", ["bench", "checkpoint"])
def test_a_command_without_what_it_needs_helps(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`zerokern bench` said that "op" was required, and not which there are."""
    status, out, err = said(capsys, command)
    assert status == 0 and not err
    assert out == said(capsys, command, "--help")[1] and "examples:" in out


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
    from zerokern.pages import folded

    text = str(zk.info())
    for width in (40, 80):
        lines = folded(text, width).splitlines()
        indent = max(len(line) - len(line.lstrip()) for line in lines)
        assert all(len(line) <= max(width, indent + max(map(len, text.split()))) for line in lines)
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())


def parsers(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of all commands below it."""
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@each("width", [60, 80, 120])
def test_help_is_no_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = {one.prog: one.format_help() for one in parsers(main_parser())}
    assert len(shown) > 20
    assert {name: text for name, text in shown.items() if max(map(len, text.splitlines())) > width} == {}
    for name, text in shown.items():  # nothing is broken within a name
        assert "torch-tiled" in text or not re.search(r"torch-\s", text), name


def test_a_benchmark_has_its_own_options_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = {one.prog: one.format_help() for one in parsers(main_parser())}
    assert "--ranks" not in shown["zerokern bench adam"] and "--ranks" in shown["zerokern bench zero"]
    assert "--micro" in shown["zerokern bench infinity"] and "--micro" not in shown["zerokern bench offload"]
    assert "--page" in shown["zerokern bench right"] and "--plot" not in shown["zerokern bench right"]
    assert "--numel" not in shown["zerokern bench"] and "adam " in shown["zerokern bench"]


def test_examples_in_help_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    top = main_parser()
    examples = {one.prog: one.epilog.replace(" \\\n", " ").splitlines()[1:] for one in parsers(top)}
    assert len(examples) > 20 and all(examples.values())
    for name, lines in examples.items():
        for line in lines:
            program, *words = shlex.split(line)
            assert program == "zerokern" and line.strip().startswith(name), line
            if words[-1] not in ("--help", "--list"):
                args = top.parse_args(words)
                assert args.mismatch is None or args.mismatch(args) == "", line


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
