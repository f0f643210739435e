"""Contents that are to take the place of others that rest: changed beside them, exchanged without a copy."""

from __future__ import annotations

from zerokern.memory.rest import Rest

__all__ = ["NextRest"]


class NextRest(Rest):
    """What is to become the contents of another: it begins as a copy of these when it is first fetched, is changed
    beside them, and takes their place.

    >>> import torch; from zerokern.memory import HostPlace, Rests
    >>> rests = Rests(HostPlace("example"))
    >>> base = rests.make("parameters", 2, torch.float32); following = NextRest(base, "pending")
    >>> with following.used():
    ...     following.change(); _ = following.memory.add_(1.0)
    >>> following.take_place()
    True
    >>> with base.used():
    ...     base.memory
    tensor([1., 1.])
    """

    def __init__(self, base: Rest, role: str) -> None:
        base.rests.evict()
        super().__init__(base.rests, role, base.memory.numel(), base.memory.dtype)
        self.base = base
        self._begun_from: int | None = None  # the edition of the other that it was copied from
        self._is_copying = False  # the other is being fetched, to be copied

    @property
    def is_begun(self) -> bool:
        """Whether it has contents of its own."""
        return self._begun_from is not None

    def fetch(self) -> None:
        with self.rests.lock:
            super().fetch()
            if not self.is_begun and not self._is_copying:
                try:
                    self.base.fetch()
                except BaseException:
                    super().leave()
                    raise
                self._is_copying = True

    def wait(self) -> None:
        super().wait()
        if not self._is_copying:
            return
        self.base.wait()
        going, self._going = self._going, None
        if going is not None:  # of what it held before
            going.wait()
        edition = self.base.edition
        self.memory.copy_(self.base.memory)
        self._begun_from, self._is_copying = edition, False
        self.base.leave()

    def leave(self, *, awaited: bool = False) -> None:
        """As of any; nobody awaits it, for its contents are about to be the other's."""
        with self.rests.lock:
            if self._users == 1 and self._is_copying:  # nobody has waited
                self._is_copying = False
                self.base.leave()
            super().leave()

    def take_place(self) -> bool:
        """Its contents are the other's from here on, and it begins anew. False, and nothing has happened, where that
        needs a copy: the other has been changed meanwhile, or somebody uses either."""
        base = self.base
        with self.rests.lock:
            for one in (base, self):
                one.come_to_rest()
            if base.is_here or self.is_here or not self._has_contents or self._begun_from != base.edition:
                return False
            base._kept, self._kept = self._kept, base._kept
            base._has_contents = True
            base.edition += 1
            self.forget()
            return True

    def forget(self) -> None:
        """What it holds is of no use: it begins anew. Nobody uses it."""
        with self.rests.lock:
            self._has_contents, self._begun_from, self._changed = False, None, False

    def _give_back(self) -> None:
        super()._give_back()
        if not self._has_contents:
            self._begun_from = None
