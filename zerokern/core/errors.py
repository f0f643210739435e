"""Errors that say what was asked, what was found, what is allowed and what to do."""

from __future__ import annotations

__all__ = ["BackendError", "KernelError", "StateError", "ZerokernError", "got"]


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


class StateError(ZerokernError):
    """Optimizer state that does not fit what it is used for, or that is torn.

    >>> str(StateError("no state"))
    'no state'
    """


def got(argument: str, value: object, allowed: str, advice: str = "") -> str:
    """The one form of a message about an argument.

    >>> got("state_format", "int4", "'fp32', 'bf16' or 'int8'")
    "state_format='int4' is not possible; allowed: 'fp32', 'bf16' or 'int8'"
    """
    message = f"{argument}={value!r} is not possible; allowed: {allowed}"
    return f"{message}. {advice}" if advice else message
