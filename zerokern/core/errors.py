"""Errors, whose messages say what was asked, found and allowed, and what to do; and warnings that are logged once."""

from __future__ import annotations

import difflib
import functools
import logging
import math
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

__all__ = [
    "BackendError", "BudgetError", "CommError", "IoError", "KernelError", "ShardError", "StateError", "ZerokernError",
    "adapter_of_caller", "did_you_mean", "got", "nearest", "one_of", "say_once", "warn", "whole_number",
]  # fmt: skip

OURS = "zerokern.integrations."
ADAPTERS = {  # by the module that called; the first that matches is the one that the user has written
    "transformers.trainer": "transformers.Trainer takes models of zk.shard as zerokern.integrations.transformers."
    "Trainer, and Trainers made from it behind TrainerMixin of the same module",
    "lightning.pytorch": 'Lightning takes models of zk.shard with Trainer(strategy="zerokern"), which '
    "zerokern.integrations.lightning registers",
    "accelerate": "Accelerate takes models of zk.shard as zerokern.integrations.accelerate.Accelerator",
}
BETWEEN = ("zerokern", "torch", "contextlib")  # between a program and what warns
THE_USERS = ("zerokern.bench", "zerokern.examples")  # programs
MOST_SHOWN = 300  # characters of a value in a message
FRAMEWORKS = {module.partition(".")[0] for module in ADAPTERS}


class ZerokernError(Exception):
    """Base of all errors of this library that are not about one argument (those are ``ValueError`` and ``TypeError``).

    >>> issubclass(zk.KernelError, zk.ZerokernError)
    True
    """


class BackendError(ZerokernError):
    """Raised if an implementation that was asked for is missing, or the native library does not fit this package.

    >>> zk.kernels.sumsq([], impl="cpu.neon9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: impl='cpu.neon9' was asked for; this machine has reference, cpu.scalar...
    """


class KernelError(ZerokernError):
    """Raised if a native call refuses its descriptors; nothing was written.

    >>> from zerokern.kernels.cpu import UpdateTable
    >>> UpdateTable(1, 1).run()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.KernelError: zk_update refused group 0 of 1 rows and 1 groups: an unknown dtype...
    """


class ShardError(ZerokernError):
    """Raised if a model cannot be sharded as it is, or is no longer as it was when it was sharded.

    >>> issubclass(zk.ShardError, zk.ZerokernError)
    True
    """


class StateError(ZerokernError):
    """Raised if optimizer state does not fit what it is used for, or is torn by a failed step.

    >>> str(zk.StateError("no state"))
    'no state'
    """


class BudgetError(ZerokernError):
    """Raised if memory or disk that was asked for is not there; nothing was taken. The message shows who holds what.

    >>> issubclass(zk.BudgetError, zk.ZerokernError)
    True
    """


class IoError(ZerokernError):
    """Raised if a transfer failed: which span of which file, for which key, and why. No other transfer is affected.

    >>> error = zk.IoError("no space", path="swap", offset=4096, nbytes=512, errno=28, key="layer.0")
    >>> error.path, error.offset, error.nbytes, error.errno, error.key
    ('swap', 4096, 512, 28, 'layer.0')
    """

    def __init__(
        self, message: str, *, path: str = "", offset: int = 0, nbytes: int = 0, errno: int = 0, key: str | None = None
    ) -> None:
        super().__init__(message)
        self.path, self.offset, self.nbytes, self.errno, self.key = path, offset, nbytes, errno, key


class CommError(ZerokernError):
    """Raised if a collective did not end: which operation, between which ranks, and which of them are gone.

    >>> error = zk.CommError("rank 1 is gone", operation="all_gather", ranks=(0, 1), gone=(1,))
    >>> error.operation, error.ranks, error.gone
    ('all_gather', (0, 1), (1,))
    """

    def __init__(
        self, message: str, *, operation: str = "", ranks: tuple[int, ...] = (), gone: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.operation, self.ranks, self.gone = operation, ranks, gone


def got(argument: str, value: object, allowed: str, advice: str = "") -> str:
    """Formats a message about an argument: what was given, what it must be, what to do.

    >>> got("state_format", "int4", "'fp32', 'bf16' or 'int8'")
    "state_format='int4': must be 'fp32', 'bf16' or 'int8'"
    """
    shown = repr(value)
    if "\n" in shown or len(shown) > MOST_SHOWN:
        shown = f"<{type(value).__name__}>"
    message = f"{argument}={shown}: must be {allowed}"
    return f"{message}. {advice}" if advice else message


def nearest(word: object, names: Iterable[object], cutoff: float = 0.6) -> str:
    """Returns the known name that a word is most like, by `cutoff` at least; "" without one, and for what is no text.

    >>> nearest("blcoks", ["blocks", "head"]), nearest("xyz", ["blocks", "head"]), nearest(3, ["3"])
    ('blocks', '', '')
    """
    known = {str(name).lower(): str(name) for name in names}
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff) if isinstance(word, str) else ()
    return "".join(known[name] for name in found)


def did_you_mean(word: object, names: Iterable[object], cutoff: float = 0.6) -> str:
    """Returns the question that a message about an unknown name ends with; "" where no known name is like it.

    >>> got("optimizer", "adamv", "'adamw' | 'lion'", did_you_mean("adamv", ["adamw", "lion"]))
    "optimizer='adamv': must be 'adamw' | 'lion'. Did you mean 'adamw'?"
    """
    found = nearest(word, names, cutoff)
    return f"Did you mean {found!r}?" if found else ""


def warn(text: str) -> None:
    """Warns at the line of the program that called this library, however deep in it the reason is found."""
    level, frame = 1, sys._getframe()
    while frame is not None and _is_between(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, stacklevel=level)


def _is_between(module: str) -> bool:
    """Returns whether a frame of this module is ours, or one of torch's through which we are called."""
    if any(f"{module}.".startswith(f"{name}.") for name in THE_USERS):
        return False
    return module.partition(".")[0] in BETWEEN


def whole_number(argument: str, value: object, allowed: str = "", *, least: int = 1, most: float = math.inf) -> int:
    """Returns a whole number from `least` to `most`, or raises ValueError; `allowed`: these in the words of the error.

    >>> whole_number("micro", 4)
    4
    >>> whole_number("micro", True)
    Traceback (most recent call last):
    ...
    ValueError: micro=True: must be a whole number from 1 on
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(got(argument, value, allowed or f"a whole number from {least} on"))
    return value


def one_of(argument: str, value: Any, allowed: Iterable[Any], *, where: str = "", advice: str = "") -> Any:
    """Returns a value that is among those that are `allowed`, or raises ValueError that lists them.

    `where`: what follows the list. `advice`: instead of the one that was perhaps meant.

    >>> one_of("engine", "uring", ("uring", "threads"))
    'uring'
    >>> one_of("engine", "urng", ("uring", "threads"))
    Traceback (most recent call last):
    ...
    ValueError: engine='urng': must be 'uring' | 'threads'. Did you mean 'uring'?
    """
    known = list(allowed)
    if value not in known:
        listed = " | ".join(map(repr, known))
        raise ValueError(got(argument, value, f"{listed}{where}", advice or did_you_mean(value, known)))
    return value


@functools.cache
def say_once(logger: str, text: str) -> None:
    """Logs, once per process, that a slower path is taken because something is missing.

    >>> say_once("zerokern.example", "a slower path is taken")
    """
    logging.getLogger(logger).warning(text)


def adapter_of_caller() -> str:
    """Returns what to say of a training framework that is calling, whose adapter is not in use; empty without one.

    >>> adapter_of_caller()
    ''
    """
    modules: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        # the adapter is in use where it is calling, or what is calling is an object of it
        classes = type(frame.f_locals.get("self")).__mro__ if name.partition(".")[0] in FRAMEWORKS else ()
        if name.startswith(OURS) or any(one.__module__.startswith(OURS) for one in classes):
            return ""
        modules.add(name)
        frame = frame.f_back
    called = (says for module, says in ADAPTERS.items() if any(f"{one}.".startswith(f"{module}.") for one in modules))
    return next(called, "")
