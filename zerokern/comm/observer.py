"""The port through which somebody watches a process group: what begins, what is waited for, what fails.

What is plugged in (zerokern/debug, port "group observer") finds out why an operation does not end, and ends it. Without
a plug a failed operation is an error of its own rank, which closes its connections; a rank that does not come is waited
for until the group's timeout.
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
    """Is told of every operation of one process group, and turns what goes wrong into a CommError.

    `sever` ends all transfers of the group; `closed` names the ranks that have closed their connection; `store` is
    seen by this rank alone until all have met; `polls`: waits are those of a device's streams, which nobody sees.

    >>> ended = []
    >>> observer = Observer(Ledger(0, 2), None, 60.0, lambda: ended.append("severed"), list)
    >>> observer.give_up("no space left")
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
        sever: Callable[[], None],
        closed: Callable[[], list[int]],
        *,
        polls: bool = False,
    ) -> None:
        self.ledger, self._sever, self._closed = ledger, sever, closed
        self.failure: Any = None  # why the group has failed
        self._tied: weakref.WeakSet[Observer] = weakref.WeakSet()

    def meeting(self, group: Any, store: Any, name: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Around what the ranks of a group do together when they meet for the first time; they begin together.

        `store`: one that all ranks of the world see; `name`: of the group, for people; `ranks`: of the world.
        """
        group.barrier()
        return nullcontext()

    def check(self, operation: Operation) -> None:
        """Raises CommError where the group has failed before: its ranks no longer agree on what comes next."""
        if self.failure is not None:
            raise self._error(operation, f"was not begun: {self.failure}")

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Around a wait for an operation; what the transport raises becomes a CommError."""
        self.check(operation)
        try:
            yield
        except RuntimeError as error:
            raise self.failed(operation, error) from error

    def awaiting_update(self) -> AbstractContextManager[None]:
        """Around a wait for another thread of this process, which is about to publish an update."""
        return nullcontext()

    def launched(self, operation: Operation) -> None:
        """On a device: an operation was given to a stream, and nobody is seen to wait for it."""

    def failed(self, operation: Operation, error: RuntimeError) -> CommError:
        """Ends the group after an operation has failed; returns the error to raise."""
        self.give_up(str(error))
        return self._error(operation, f"did not end: {self.failure}")

    def unlike(self, operation: Operation) -> CommError:
        """Ends the group after ranks have met with different operations; returns the error to raise."""
        return self.failed(operation, RuntimeError("ranks asked for different things at the same time"))

    def follow(self, key: str) -> None:
        """This rank takes the next step of the recorded order."""
        self.ledger.step()

    def agree(self, key: str, group: Any) -> None:
        """Returns when all ranks want `key` as the next step; raises CommError on all of them where they do not."""
        step = Operation("agree", self.ledger.step(), repr(key))
        wanted = group.exchange(key)
        if any(one != key for one in wanted):
            raise self.failed(step, RuntimeError(f"ranks want different steps: {wanted}"))

    def give_up(self, reason: str) -> None:
        """Ends the group, because this rank cannot do what the others wait for."""
        if self.failure is None:
            self.failure = f"rank {self.ledger.rank}: {reason}"
            self._sever()
            for other in list(self._tied):
                other.give_up(reason)

    def tie(self, other: Observer) -> None:
        """Where one of two groups fails, the other ends too."""
        self._tied.add(other)
        other._tied.add(self)

    def _error(self, operation: Operation, says: str) -> CommError:
        ranks = tuple(range(self.ledger.size))
        return CommError(f"{operation} {says}", operation=operation.kind, ranks=ranks)


def observer_of(*args: Any, **kwargs: Any) -> Observer:
    """What is plugged in as the observer of groups, made with the arguments of `Observer`.

    >>> isinstance(observer_of(Ledger(0, 2), None, 60.0, list, list), Observer)
    True
    """
    made: Observer = next(iter(plugs("group observer")), Observer)(*args, **kwargs)
    return made
