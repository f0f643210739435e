"""The ranks that save or load one checkpoint: what fails on one of them is raised on all, once and as it was."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from zerokern.core.errors import ZerokernError, got

__all__ = ["Ranks"]

T = TypeVar("T")

_TEACH = (ZerokernError, ValueError, TypeError, OSError, KeyboardInterrupt)  # what says by itself what to do


class Ranks:
    """A process group as torch.distributed.checkpoint sees it; one process without any group is a group of one.

    >>> alone = Ranks.of(None)
    >>> alone.rank, alone.size, alone.each("example", lambda: "done")
    (0, 1, ['done'])
    """

    def __init__(self, pg: Any) -> None:
        self.pg = pg
        self._wrapper = _DistWrapper(pg, pg is not None, 0)
        self.rank, self.size = self._wrapper.get_rank(), self._wrapper.get_world_size()

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """The ranks of a ProcessGroup, of a 1-D DeviceMesh, or of the world where there is one."""
        there = dist.is_available() and dist.is_initialized()
        if group is None:
            return cls(dist.group.WORLD if there else None)
        if not there:
            advice = "Call torch.distributed.init_process_group first"
            raise ValueError(got("group", group, "None while torch.distributed is not initialised", advice))
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                advice = "Choose one dimension, or flatten the mesh: its ranks together hold what is saved"
                raise ValueError(got("group", group, "a mesh of one dimension", advice))
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(got("group", group, "a ProcessGroup, a 1-D DeviceMesh or None for the world"))
        if dist.get_rank(group) < 0:
            raise ValueError(got("group", group, f"a group that this rank, {dist.get_rank()}, is part of"))
        return cls(group)

    def each(self, what: str, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, to all of them; raises on all where it raises on one."""
        return self.run(lambda own: self._wrapper.all_gather(what, own(work)))

    def same(self, call: str, given: Callable[[], dict[str, Any]]) -> None:
        """Raises on all ranks where one has been given something else than the first, or refuses what it was given.

        >>> Ranks.of(None).same("zk.save", lambda: {"rng": True})
        """
        each = self.each("arguments", lambda: {"call": call, **given()})
        for rank, mine in enumerate(each):
            for name in each[0]:
                if name not in mine or mine[name] != each[0][name]:
                    found = f"{name}={each[0][name]!r} on rank 0 and {mine.get(name)!r} on rank {rank}"
                    raise ValueError(
                        f"{each[0]['call']} was given {found}; allowed: the same on all ranks, which call it together. "
                        "Decide on one rank and tell the others, or leave the argument out"
                    )

    def lead(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone calls it."""
        return self.run(lambda own: self._wrapper.broadcast(what, own(work)))

    def run(self, work: Callable[[Callable[[Callable[[], Any]], Callable[[], Any]]], T]) -> T:
        """What `work` returns; what torch wraps into errors of its own leaves as what was raised.

        `work` is given a function that makes a step's errors such that every rank can be told of them.
        """
        kept: list[BaseException] = []

        def own(step: Callable[[], Any]) -> Callable[[], Any]:
            def stepping() -> Any:
                try:
                    return step()
                except BaseException as error:
                    kept.append(error)
                    raise _portable(error) from None

            return stepping

        try:
            return work(own)
        except CheckpointException as wrapped:
            error = kept[0] if kept else _plainly(wrapped, self.rank, self.size)
        raise error from None


def _plainly(wrapped: CheckpointException, rank: int, size: int) -> BaseException:
    """What was raised inside of torch.distributed.checkpoint: on this rank, or else on the first that failed.

    >>> _plainly(CheckpointException("read", {1: (ValueError("shape"), None)}), rank=0, size=2)
    ValueError('shape')
    """
    failures = wrapped.failures
    failed = rank if rank in failures else min(failures)
    error, frames = failures[failed]
    notes = [f"raised on rank {failed} of {size}"] if size > 1 else []
    others = sorted({str(failures[other][0]) for other in failures if other != failed} - {str(error)})
    notes += [f"other ranks failed too: {'; '.join(others)}"] if others else []
    if frames is not None and not isinstance(error, _TEACH):
        notes.append("".join(traceback.format_list(frames)))
    for note in notes if hasattr(error, "add_note") else ():  # from Python 3.11 on
        error.add_note(note)
    return error


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same and that another process can be sent.

    >>> class Local(Exception): ...
    >>> _portable(Local("three")), _portable(ValueError("four"))
    (RuntimeError('Local: three'), ValueError('four'))
    """
    if isinstance(error, _TEACH) and type(error).__module__.partition(".")[0] in ("builtins", "zerokern"):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
