"""Errors, whose messages say what was asked, found and allowed, and what to do; and warnings that are logged once."""

from __future__ import annotations

import functools
import logging

__all__ = [
    "BackendError", "BudgetError", "CommError", "IoError", "KernelError", "ShardError", "StateError", "ZerokernError",
    "got", "say_once",
]  # fmt: skip


class ZerokernError(Exception):
    """Base of all errors of this library that are not about one argument (those are ``ValueError`` and ``TypeError``).

    >>> issubclass(KernelError, ZerokernError)
    True
    """


class BackendError(ZerokernError):
    """An implementation that was asked for is missing, or the native library does not fit this package.

    >>> import zerokern as zk
    >>> zk.kernels.sumsq([], impl="cpu.neon9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: impl='cpu.neon9' was asked for; this machine has reference, cpu.scalar...
    """


class KernelError(ZerokernError):
    """A native call refused its descriptors; nothing was written.

    >>> from zerokern.kernels.cpu import UpdateTable
    >>> UpdateTable(1, 1).run()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.KernelError: zk_update refused group 0 of 1 rows and 1 groups: an unknown dtype...
    """


class ShardError(ZerokernError):
    """A model that cannot be sharded as it is, or that is no longer as it was when it was sharded.

    >>> issubclass(ShardError, ZerokernError)
    True
    """


class StateError(ZerokernError):
    """Optimizer state that does not fit what it is used for, or that is torn.

    >>> str(StateError("no state"))
    'no state'
    """


class BudgetError(ZerokernError):
    """Memory or disk that was asked for and is not there; nothing was taken. The message shows who holds what.

    >>> issubclass(BudgetError, ZerokernError)
    True
    """


class IoError(ZerokernError):
    """A transfer that failed: which span of which file, for which key, and why. No other transfer is affected.

    >>> error = IoError("no space", path="swap", offset=4096, nbytes=512, errno=28, key="layer.0")
    >>> error.path, error.offset, error.nbytes, error.errno, error.key
    ('swap', 4096, 512, 28, 'layer.0')
    """

    def __init__(
        self, message: str, *, path: str = "", offset: int = 0, nbytes: int = 0, errno: int = 0, key: str | None = None
    ) -> None:
        super().__init__(message)
        self.path, self.offset, self.nbytes, self.errno, self.key = path, offset, nbytes, errno, key


class CommError(ZerokernError):
    """A collective that did not come to its end: which operation, between which ranks, and which of them are gone.

    >>> error = CommError("rank 1 is gone", operation="all_gather", ranks=(0, 1), gone=(1,))
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
    message = f"{argument}={value!r}: must be {allowed}"
    return f"{message}. {advice}" if advice else message


@functools.cache
def say_once(logger: str, text: str) -> None:
    """Logs, once per process, that a slower path is taken because something is missing.

    >>> say_once("zerokern.example", "a slower path is taken")
    """
    logging.getLogger(logger).warning(text)
