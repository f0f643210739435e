"""Turns errors of the system about files into errors of this library: one table says what to do about each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerokern.core.errors import IoError

__all__ = ["because", "failed", "failing", "file_error", "on_disk", "refused", "refusing"]

ADVICE = {
    errno.EROFS: "The file system is read-only: choose another folder",
    errno.EACCES: "This user may not: choose another folder, or change its mode",
    errno.EPERM: "This user may not: choose another folder, or change its mode",
    errno.ENOSPC: "The file system is full: free space, or choose another folder",
    errno.EDQUOT: "The quota is used up: free space, or choose another folder",
    errno.EFBIG: "Raise the limit on file lengths (`ulimit -f`)",
    errno.ENOTDIR: "A part of the path is a file: choose another folder",
    errno.ENOENT: "Something has removed it, or the system makes no files there: choose another folder",
    errno.ENODATA: "The file ends too early: something has truncated it",
    errno.EIO: "The device failed; the kernel's log says more",
    errno.ECANCELED: "It was interrupted before it began",
}


def because(number: int, advice: str = "") -> str:
    """Returns the reason by its number, and what to do; `advice`: where the table has none.

    >>> because(errno.EFBIG)
    'File too large (EFBIG). Raise the limit on file lengths (`ulimit -f`)'
    """
    advice = ADVICE.get(number, advice)
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})" + (f". {advice}" if advice else "")


def file_error(path: Path, says: str, number: int = errno.EBADMSG, **more: Any) -> IoError:
    """Returns the error for a file or a folder; without a number for one whose content is wrong.

    >>> str(file_error(Path("swap"), "is damaged"))
    'swap is damaged'
    """
    return IoError(f"{path} {says}", path=str(path), errno=number, **more)


def refused(
    error: OSError, folder: Path, what: str, *, path: Path | None = None, offset: int = 0, nbytes: int = 0
) -> IoError:
    """Returns the error for what the system refused about a folder, or about a span of a file in it."""
    number = error.errno or 0
    where = f"{folder}" if path is None else f"{path} at offset {offset}, {nbytes} bytes,"
    says = f"{what} in {where} is not possible: {because(number, 'Choose another folder')}"
    return IoError(says, path=str(path or error.filename or folder), offset=offset, nbytes=nbytes, errno=number)


@contextmanager
def refusing(folder: Path, what: str, *, path: Path | None = None, offset: int = 0, nbytes: int = 0) -> Iterator[None]:
    """Context manager that raises what the system refuses within as `refused` says it."""
    try:
        yield
    except OSError as error:
        raise refused(error, folder, what, path=path, offset=offset, nbytes=nbytes) from error


def failed(what: str, path: Path, error: IoError | OSError, offset: int = 0, nbytes: int = 0) -> IoError:
    """Returns the error for a transfer or a system call that failed, naming the file."""
    number = error.errno or 0
    if isinstance(error, IoError):
        offset, nbytes = error.offset, error.nbytes
    says = f"{what} {path} failed at offset {offset}, {nbytes} bytes: {because(number)}"
    return IoError(says, path=str(path), offset=offset, nbytes=nbytes, errno=number)


@contextmanager
def failing(what: str, path: Path, offset: int = 0, nbytes: int = 0) -> Iterator[None]:
    """Context manager that raises errors of transfers and of the system within as `failed` says them."""
    try:
        yield
    except (IoError, OSError) as error:
        raise failed(what, path, error, offset, nbytes) from error


@contextmanager
def on_disk(path: Path | str, what: str) -> Iterator[None]:
    """Context manager within which errors of the system concern that path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise IoError(
            f"{what} {where}: {because(error.errno or 0)}", path=str(where), errno=error.errno or 0
        ) from error
