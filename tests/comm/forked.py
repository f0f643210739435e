"""Programs in processes of their own that start at once: forked from the server of `ranks`, with torch imported.

What such a process cannot be is one that has not imported torch yet: for that there is a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ranks import server_context

OF_THE_SERVER = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind")  # of what it has imported


def run_forked(
    program: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    ends: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `python -c program arguments...` does and says, without the seconds that its imports take.

    `ends`: it ends as Python ends, with its exit handlers, its threads and all modules; else at once.
    """
    words = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("out", "err")]
        process = server_context().Process(
            target=_live, args=(program, words, dict(os.environ if env is None else env), list(map(str, said)), ends)
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(one.read_bytes() for one in said))
        out, err = (one.read_text() for one in said)
        err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith(OF_THE_SERVER))
        return subprocess.CompletedProcess(words, process.exitcode, out, err)


def _live(program: str, words: list[str], env: dict[str, str], said: list[str], ends: bool) -> None:
    for path, number in zip(said, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    as_main(program, ends=ends)


def as_main(program: str, *, ends: bool, given: Mapping[str, Any] | None = None) -> NoReturn:
    """Runs the program in this process, with what it is given, and ends the process as `run_forked` says."""
    main, code = types.ModuleType("__main__"), 0
    vars(main).update(given or {})
    if ends:  # what the program has made lives until the end; what the server has is no part of it, and large
        sys.modules["__main__"] = main
        gc.freeze()
    try:
        exec(compile(program, "<string>", "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if ends:
        del main  # or the frame here would keep it longer than others
        ctypes.pythonapi.Py_Exit(code)
    os._exit(code)
