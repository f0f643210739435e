"""The tier on disk, whose parts are keys of a Store, and `Nvme`, which names one for `tier=` and `keep=`."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zerokern.core.errors import StateError, ZerokernError, got, one_of, warn
from zerokern.core.units import RING_NBYTES, parse_nbytes
from zerokern.io.engine import KINDS
from zerokern.io.files import refuse_unusable
from zerokern.io.store import Store
from zerokern.io.ticket import Ticket
from zerokern.memory import Arena, Wanted

__all__ = ["Nvme", "NvmeTier", "below"]

LEAST_RING = 1 << 20
_open: weakref.WeakValueDictionary[str, NvmeTier] = weakref.WeakValueDictionary()  # by folder, those of this process
_moments = itertools.count()  # tells which of two things came first


@dataclass(frozen=True)
class Nvme:
    """A folder on disk as a tier: state is kept in files there and streams through host memory when it is needed.

    Each optimizer needs a folder of its own. Several ranks may be given the same `path`; each makes a folder below it.

    Args:
        path: a folder on a fast local disk. It is made when it is first needed; the folder above it must exist.
        budget: bytes of disk, or text such as "8G" (GiB). They are reserved at once; without it files grow.
        ring_nbytes: host memory that the state streams through, as bytes or text.
        engine: "uring", "threads", or "auto" for the better one that this kernel allows.
        checksum: whether each record has a CRC32C, checked when it is read.

    >>> zk.Nvme("swap", budget="8G").budget == 8 * 2**30
    True
    """

    path: str
    budget: int | None = None
    ring_nbytes: int = RING_NBYTES
    engine: str = "auto"
    checksum: bool = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget: int | str | None = None,
        ring_nbytes: int | str = RING_NBYTES,
        engine: str = "auto",
        checksum: bool = False,
    ) -> None:
        one_of("engine", engine, KINDS)
        ring = parse_nbytes("ring_nbytes", ring_nbytes)
        if ring < LEAST_RING:
            raise ValueError(got("ring_nbytes", ring_nbytes, f"at least {LEAST_RING} bytes"))
        room = None if budget is None else parse_nbytes("budget", budget)
        fields = {"path": os.fspath(path), "budget": room, "ring_nbytes": ring, "engine": engine, "checksum": checksum}
        refuse_unusable(Path(os.path.abspath(path)), room)
        for name, value in fields.items():  # frozen from here on
            object.__setattr__(self, name, value)

    def open(self, name: str, owner: str) -> NvmeTier:
        """Returns the tier in a folder `name` below the path, or in the path itself; it is opened when first used."""
        return NvmeTier(below(self, name) if name else self, owner)


def below(tier: Nvme, *names: str) -> Nvme:
    """Returns the same tier in a folder below its own, which need not exist.

    >>> below(Nvme("swap"), "state-0").path
    'swap/state-0'
    """
    made = copy.copy(tier)
    object.__setattr__(made, "path", os.path.join(tier.path, *names))
    return made


class StoredPart(NamedTuple):
    """A part on disk, by its key in the store."""

    key: str
    wanted: Wanted


class NvmeTier:
    """A tier in a Store, which is opened when room is first needed.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tier = Nvme(folder).open("", "example")
    ...     (part,) = tier.lay_out([Wanted("cargo", torch.Size([1000]), torch.float32)])
    ...     tier.store(part, torch.ones(1000)).wait()
    ...     tier.held()
    {'cargo': 4000}
    """

    def __init__(self, config: Nvme, owner: str) -> None:
        """`owner`: whose parts these are, for messages."""
        self.config, self._owner = config, owner
        self._parts: dict[str, StoredPart] = {}
        self._numbers = itertools.count()
        self._made, self._opened = next(_moments), -1
        self._closed, self._pid = "", os.getpid()  # why nothing can be done with it any more
        self.gives_way: Callable[[], str] | None = None

    @property
    def is_open(self) -> bool:
        return hasattr(self, "swap") and not self._closed

    def open(self, arena: Arena | None = None) -> None:
        """Opens and locks the folder; raises if another job has it.

        A tier of this process that had opened the folder before this one was made is closed, so that a notebook's cell
        that runs again is not locked out by its first run. If both were made before either was opened, both are wanted.
        """
        self._refuse_if_closed()
        if not self.is_open:
            folder, config = os.path.realpath(self.config.path), self.config
            self._replace_earlier(folder)
            self.swap = Store(
                config.path, budget=config.budget, engine=config.engine, checksum=config.checksum, arena=arena
            )
            self._opened = next(_moments)
            _open[folder] = self

    def _replace_earlier(self, folder: str) -> None:
        for _ in range(3):  # what autograd's nodes hold is found one by one
            if folder not in _open:
                return
            gc.collect()  # perhaps nobody refers to it any more
        earlier = _open.get(folder)
        if earlier is None or not earlier.is_open or earlier._pid != os.getpid() or earlier.gives_way is None:
            return
        if earlier._opened > self._made:
            return
        because = earlier.gives_way()
        if because:
            earlier.close(because)
            warn(
                f"{self.config.path!r} had the {self._owner} of what was built earlier in this process and is still "
                "referred to, in a notebook perhaps by _ or Out. What is built now has the folder from here on: the "
                "earlier one is closed, and using it raises. To keep both give each a folder of its own; "
                "opt.close() closes an optimizer without this warning"
            )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StateError(self._closed)

    def close(self, because: str) -> None:
        """Closes the folder; nothing is kept. Later uses raise the reason."""
        if self._closed:
            return
        opened, self._closed = self.is_open, because
        if opened:
            with contextlib.suppress(ZerokernError):  # of a transfer whose bytes nobody wants any more
                self.swap.close()

    def lay_out(self, wanted: Sequence[Wanted]) -> list[StoredPart]:
        """Reserves room for all of these, or raises, so that a disk that is too small shows before anything changes."""
        self.open()
        made: list[StoredPart] = []
        try:
            for one in wanted:
                part = StoredPart(f"{one.role}/{next(self._numbers):06}", one)
                self.swap.reserve(part.key, one.dtype, one.shape)
                made.append(part)
        except BaseException as error:
            for part in made:
                self.swap.delete(part.key)
            if isinstance(error, ZerokernError):
                roles = " and ".join(dict.fromkeys(one.role for one in wanted))
                needed = sum(one.nbytes for one in wanted)
                error.args = (f"{error}\n{needed:,} bytes are needed on disk for {roles}",)
            raise
        self._parts.update((part.key, part) for part in made)
        return made

    def evict(self, parts: Iterable[StoredPart]) -> None:
        """Frees their room once the last transfer in it has ended."""
        for part in list(parts) if not self._closed else ():
            self.swap.delete(part.key)
            del self._parts[part.key]

    def __repr__(self) -> str:
        return f"the folder {self.config.path!r}"

    def held(self) -> dict[str, int]:
        """Returns the bytes of all parts, by role."""
        held: Counter[str] = Counter()
        for part in self._parts.values():
            held[part.wanted.role] += part.wanted.nbytes
        return dict(held)

    def fetch(self, part: StoredPart, out: Tensor, after: Any = None) -> Ticket:
        """Starts to read a part into host memory."""
        self._refuse_if_closed()
        return self.swap.get(part.key, out, after=after)

    def store(self, part: StoredPart, value: Tensor, after: Any = None) -> Ticket:
        """Starts to write a part from host memory."""
        self._refuse_if_closed()
        return self.swap.put(part.key, value, after)
