"""The port through which somebody watches a process group: what begins, what is waited for, what fails.

A plug (zerokern/debug, port "group observer") finds out why an operation does not end, and ends it. Without a plug a
failed operation is an error of its own rank, which closes its connections; other ranks wait until the group's timeout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from zerokern.comm.operations import Ledger, Operation
from zerokern.core.errors import CommError
from zerokern.core.ports import plugs

__all__ = ["Observer", "observer_of"]


class Observer:
    """Is told of every operation of one process group, and turns failures into CommErrors.

    `abort_transfers` ends all transfers of the group; `closed` names the ranks that have closed their connection;
    `store` is seen by this rank alone until all have met; `polls`: a device's streams wait, which the host cannot see.

    >>> ended = []
    >>> observer = Observer(Ledger(0, 2), None, 60.0, lambda: ended.append("severed"), list)
    >>> observer.fail("no space left")
    >>> with observer.waiting(observer.ledger.begin("all_gather", "4 elements")):
    ...     pass
    Traceback (most recent call last):
    ...
    zerokern.core.errors.CommError: all_gather number 0 (4 elements) was not begun: rank 0: no space left
    """

    def __init__(
        self,
        ledger: Ledger,
        store: Any,
        timeout_s: float,
        abort_transfers: Callable[[], None],
        closed: Callable[[], list[int]],
        *,
        polls: bool = False,
    ) -> None:
        self.ledger, self._abort_transfers, self._closed = ledger, abort_transfers, closed
        self.failure: Any = None  # why the group has failed
        self._tied: weakref.WeakSet[Observer] = weakref.WeakSet()

    def meeting(self, group: Any, store: Any, name: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Context manager around what the ranks do together when they meet for the first time; they enter together.

        `store`: one that all ranks of the world see; `name`: of the group, for people; `ranks`: of the world.
        """
        group.barrier()
        return nullcontext()

    def check(self, operation: Operation) -> None:
        """Raises CommError if the group has failed before: its ranks no longer agree on what comes next."""
        if self.failure is not None:
            raise self._error(operation, f"was not begun: {self.failure}")

    def waiting(self, operation: Operation) -> AbstractContextManager[None]:
        """Context manager around a wait for an operation; errors of the transport become CommErrors."""
        return self._waiting(operation)

    @contextmanager
    def _waiting(self, operation: Operation) -> Iterator[None]:
        self.check(operation)
        try:
            yield
        except RuntimeError as error:
            raise self.failed(operation, error) from error

    def awaiting_update(self) -> AbstractContextManager[None]:
        """Context manager around a wait for another thread of this process that is about to publish an update."""
        return nullcontext()

    def launched(self, operation: Operation) -> None:
        """Records that an operation was given to a device's stream, where nobody is seen to wait for it."""

    def failed(self, operation: Operation, error: RuntimeError) -> CommError:
        """Ends the group after an operation has failed; returns the error to raise."""
        self.fail(str(error))
        return self._error(operation, f"did not end: {self.failure}")

    def unlike(self, operation: Operation) -> CommError:
        """Ends the group after ranks have met with different operations; returns the error to raise."""
        return self.failed(operation, RuntimeError("ranks asked for different things at the same time"))

    def follow(self, key: str) -> None:
        """Counts the next step of the recorded order."""
        self.ledger.step()

    def agree(self, key: str, group: Any) -> None:
        """Returns once all ranks want `key` as the next step; raises CommError on all of them if they do not."""
        step = Operation("agree", self.ledger.step(), repr(key))
        wanted = group.exchange(key)
        if any(theirs != key for theirs in wanted):
            raise self.failed(step, RuntimeError(f"ranks want different steps: {wanted}"))

    def fail(self, reason: str) -> None:
        """Ends the group because this rank cannot continue."""
        if self.failure is None:
            self.failure = f"rank {self.ledger.rank}: {reason}"
            self._abort_transfers()
            for other in list(self._tied):
                other.fail(reason)

    def link_failures(self, other: Observer) -> None:
        """Links two groups: if one of them fails, the other ends too."""
        self._tied.add(other)
        other._tied.add(self)

    def _error(self, operation: Operation, says: str) -> CommError:
        ranks = tuple(range(self.ledger.size))
        return CommError(f"{operation} {says}", operation=operation.kind, ranks=ranks)


def observer_of(*args: Any, **kwargs: Any) -> Observer:
    """Returns a new observer of the class that is plugged in, made with the arguments of `Observer`.

    >>> isinstance(observer_of(Ledger(0, 2), None, 60.0, list, list), Observer)
    True
    """
    made: Observer = next(iter(plugs("group observer")), Observer)(*args, **kwargs)
    return made
