"""Saves in the background: copies what this rank writes, then writes it in a thread with a process group of its own."""

from __future__ import annotations

import logging
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.storage import Column, SavePlanner
from zerokern.core.errors import BudgetError
from zerokern.memory import HostTier, Wanted
from zerokern.memory.layout import nbytes_of, offsets_of
from zerokern.memory.room import amount, memory_left

__all__ = ["PendingSaves", "Saving", "StagedPlanner", "wait_for_devices"]

PATIENCE = timedelta(hours=4)  # ranks write at different speeds; a lost connection shows at once
MARGIN = 0.1  # of the free memory, left for training

log = logging.getLogger("zerokern.checkpoint")


class Saving:
    """A handle to a save that runs in the background.

    Training may continue: what is saved has been copied, or written already.

    `path`: the folder. An error is raised by `wait()`, else by the next save, and is always logged. Python does not
    exit while a save runs, and `torch.distributed.destroy_process_group` waits for its end.

    >>> import tempfile, torch, zerokern as zk
    >>> from zerokern import load, save
    >>> model = torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zk.save(f"{folder}/step1", model, wait=False)
    ...     saving.wait(); saving.done(), saving.exception()
    (True, None)
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._run, name=f"zk.save {path.name}", daemon=False)

    def _start(self) -> None:
        if threading.main_thread().is_alive():
            self._thread.start()
            return
        self._run()  # Python is exiting and has joined its threads: a new one would be lost
        self._report()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            self._error = error
            log.error("zk.save(%r, wait=False) failed: %s: %s", str(self.path), type(error).__name__, error)
        finally:
            self._work = None  # drops references to the model and to the copy
            _allow_shutdown(self)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is published; raises the save's error, or TimeoutError after `timeout` seconds."""
        self._join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the save to {self.path} still runs after {timeout:g} s; it goes on")
        self._report()

    def done(self) -> bool:
        """Returns whether the save has ended, successfully or not."""
        return not self._thread.is_alive()

    def exception(self) -> BaseException | None:
        """Returns the save's error; None while it runs and if it succeeded."""
        if not self.done():
            return None
        self._reported = True
        return self._error

    def _report(self) -> None:
        self._reported = True
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        """Waits for the end and raises its error, unless that was reported before."""
        self._join()
        if not self._reported:
            self._report()

    def _join(self, timeout: float | None = None) -> None:
        """Waits for the thread; returns at once in that thread itself, and if the save ran without one."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error is not None else "published"
        return f"Saving({str(self.path)!r}, {state})"


class PendingSaves:
    """The saves of a group of ranks: the last one, and a process group for their threads."""

    def __init__(self) -> None:
        self.last: Saving | None = None
        self._own: Any = None

    @classmethod
    def of(cls, ranks: Ranks, model: torch.nn.Module) -> PendingSaves:
        """Returns those of a process group, or of a model in a process without one."""
        return _SAVES.setdefault(model if ranks.pg is None else ranks.pg, cls())

    def finish(self) -> None:
        """Waits until no save runs; raises the error of the last one, unless that was reported before."""
        last = self.last
        if last is not None:
            try:
                last._finish()
            finally:
                if last.done():  # not where Ctrl-C ended the waiting
                    self.last = None

    def wait(self) -> None:
        """Waits until no save runs. An error of the last one is left for the next save to raise."""
        if self.last is not None:
            self.last._join()

    def start(self, saving: Saving, *, shared: bool) -> None:
        """Starts a save, which becomes the last one. `shared`: other ranks take part, through a process group."""
        self.last = saving
        try:
            if shared:
                _delay_shutdown(saving)
            saving._start()
        except BaseException:
            if saving._thread.ident is None:
                self.last = None
                _allow_shutdown(saving)
            raise

    def separate_ranks(self, ranks: Ranks) -> Ranks:
        """Returns the same ranks with a process group of their own."""
        if ranks.pg is None:
            return ranks
        if self._own is None:
            members = dist.get_process_group_ranks(ranks.pg)
            whole = len(members) == dist.get_world_size()
            self._own = dist.new_group(
                members,
                backend="gloo",
                timeout=PATIENCE,
                use_local_synchronization=not whole,
                group_desc="zerokern saving",
            )
        return Ranks(self._own, f"{ranks.call} beside training")


# Keyed weakly by process group or model: two saves of the same ranks must know of each other.
_SAVES: weakref.WeakKeyDictionary[Any, PendingSaves] = weakref.WeakKeyDictionary()


# Saves that run over a process group. While there are any, ProcessGroup.shutdown is ours: through it all
# process groups go, whichever way a program has imported torch.distributed.destroy_process_group.
_RUNNING: set[Saving] = set()
_CHANGING = threading.Lock()
_CLOSING, _BEFORE = "shutdown", "_zerokern_before"


def _delay_shutdown(saving: Saving) -> None:
    """Keeps process groups from being destroyed before this save ends."""
    with _CHANGING:
        if not _RUNNING:
            setattr(dist.ProcessGroup, _CLOSING, _wait_then_shutdown(vars(dist.ProcessGroup)[_CLOSING]))
        _RUNNING.add(saving)


def _allow_shutdown(saving: Saving) -> None:
    with _CHANGING:
        if saving not in _RUNNING:
            return
        _RUNNING.discard(saving)
        before = getattr(vars(dist.ProcessGroup)[_CLOSING], _BEFORE, None)
        if not _RUNNING and before is not None:  # what somebody has put over ours stays, and ours then waits for none
            setattr(dist.ProcessGroup, _CLOSING, before)


def _wait_then_shutdown(before: Any) -> Callable[..., None]:
    """Wraps the method `before` so that it first waits for running saves, which use process groups."""

    def shutdown(self: Any, *given: Any, **settings: Any) -> None:
        with _CHANGING:
            running = list(_RUNNING)
        for saving in running:
            saving._join()
        before.__get__(self, type(self))(*given, **settings)

    setattr(shutdown, _BEFORE, before)  # as the class has it: what getattr gives would not bind
    return shutdown


class StagedPlanner(SavePlanner):
    """A planner that copies everything this rank will write as soon as the plan is known.

    Nothing is copied that another rank writes. State on disk is not copied: it is written first, and the program
    continues after that.
    """

    def __init__(self, ranks: Ranks, budget: int | None) -> None:
        super().__init__()
        self._ranks, self._budget = ranks, budget
        self._free = threading.Event()
        self._staged = False
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._streams = False  # whether items on disk are written first
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan after every rank has copied what it names."""
        plan = super().finish_plan(new_plan)
        self._ranks.all_gather("the copy", lambda: self._copy(plan.items))
        self._staged = True
        if not self._streams:
            self._free.set()
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the copy of an item; an item on disk, all of which come first, is read now."""
        copy = self._copies.get(write_item.index)
        if copy is None:
            return super().resolve_data(write_item)
        self._free.set()
        return copy

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` in this thread; at its end at the latest, the program may change parameters again."""
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            work()
        finally:
            self._copies = {}
            self._free.set()

    def wait_until_free(self, saving: Saving) -> None:
        """Waits until the program may change parameters again; raises errors that came before that, on every rank."""
        interrupt: BaseException | None = None
        while not self._free.is_set():
            try:
                self._free.wait()
            except BaseException as error:  # Ctrl-C: whoever catches it must not change tensors that are being read
                interrupt = error
        if not self._staged:
            saving.wait()
        if interrupt is not None:
            raise interrupt

    def _copy(self, items: Sequence[WriteItem]) -> None:
        near = [item for item in items if not isinstance(self.state_dict[item.index.fqn], Column)]
        self._streams = len(near) < len(items)
        live = [self.lookup_object(item.index).detach() for item in near]
        copies = self._room(
            [(tuple(tensor.shape), tensor.dtype) for tensor in live], pinned=any(tensor.is_cuda for tensor in live)
        )
        with torch.no_grad():
            for copy, tensor in zip(copies, live, strict=True):
                copy.copy_(tensor, non_blocking=True)
        wait_for_devices(live)
        self._copies = {item.index: copy for item, copy in zip(near, copies, strict=True)}

    def _room(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], *, pinned: bool) -> list[Tensor]:
        """Allocates tensors of these shapes and dtypes in one block. Raises first if they do not fit.

        Without copies from a device it maps small pages: an arena's huge pages took ten times as long as the copy
        itself. A mapping, and not the heap, which would keep freed memory.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        nbytes = nbytes_of(sizes)
        self._refuse(nbytes)
        if pinned or not nbytes:
            room = HostTier("zk.save(wait=False)")
            return room.lay_out([Wanted("copies", torch.Size(shape), dtype) for shape, dtype in wanted])
        offsets, _ = offsets_of(sizes)
        whole = torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        return [
            whole[at : at + size].view(dtype).view(shape)
            for at, size, (shape, dtype) in zip(offsets, sizes, wanted, strict=True)
        ]

    def _refuse(self, nbytes: int) -> None:
        """Raises BudgetError if the copy does not fit."""
        most, limit = nbytes, ""
        if self._budget is not None:
            most, limit = self._budget, f"staging_budget={self._budget:,}"
        elif left := memory_left():
            name, least = min(left.items(), key=lambda limit_and_left: limit_and_left[1])
            most = int(least * (1 - MARGIN))
            limit = f"{name}: {amount(least)}, less {MARGIN:.0%} for what trains meanwhile"
        if nbytes > most:
            raise BudgetError(
                f"the copy that zk.save(wait=False) takes has {nbytes:,} bytes ({amount(nbytes)}) on this rank and "
                f"does not fit ({limit}). Nothing was saved. Save with wait=True, which needs no copy, raise "
                "staging_budget, or divide the state among more ranks"
            )


def wait_for_devices(tensors: Iterable[Any]) -> None:
    """Waits for all work queued on the current streams of these tensors' devices."""
    for device in {tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda}:
        torch.zeros(1, device=device).item()
