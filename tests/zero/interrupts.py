"""Ctrl-C at any line of the library."""

from __future__ import annotations

import dis
import linecache
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import zerokern as zk


def leaves_a_with_block(frame: Any) -> bool:
    """Whether `__exit__` comes next: Python handles no signal there, or a lock would stay locked."""
    code = frame.f_code.co_code[frame.f_lasti]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    return line.startswith("with ") and dis.opname[code] in ("LOAD_CONST", "PUSH_EXC_INFO")


class Interrupt:
    """Ctrl-C before the line with this number, of those of the library that this thread comes to.

    `within`: a function of the library; others' lines count while it runs, and no more.
    """

    FOLDER = str(Path(zk.__file__).parent)

    def __init__(self, number: int, within: str = "") -> None:
        self.number = self.left = number
        self.where, self._within = "", within

    @property
    def lines(self) -> int:
        """How many it came to."""
        return self.number - self.left

    def __enter__(self) -> Interrupt:
        sys.settrace(lambda frame, event, arg: self._line if self._counts(frame) else None)
        return self

    def _counts(self, frame: Any) -> bool:
        ours = frame.f_code.co_filename.startswith(self.FOLDER)
        while ours and self._within and frame.f_code.co_name != self._within:
            frame = frame.f_back
            ours = frame is not None
        return ours

    def __exit__(self, *of: object) -> None:
        sys.settrace(None)

    def _line(self, frame: Any, event: str, arg: object) -> Any:
        self.left -= event == "line" and not leaves_a_with_block(frame)
        if not self.left:
            sys.settrace(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if threading.current_thread() is not threading.main_thread():
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return self._line
