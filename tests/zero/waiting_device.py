"""A played device for a torch that computes at once, whatever it is told to follow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerokern.examples.played_device import PlayedDevice, PlayedMark, PlayedStream

__all__ = ["HostComputes", "played"]

OURS = ("update", "measure")  # streams that the driver alone launches on: of the others, torch's launches follow


class HostComputes(PlayedDevice):
    """Autograd trains on the host, which therefore waits wherever the device's stream would.

    So it does for what the program's stream is to follow, for what the streams of collectives are, and for what is
    launched on the program's.
    """

    def follow(self, stream: PlayedStream | None, mark: PlayedMark) -> None:
        super().follow(stream, mark)
        if stream is None and self._this_or_current(None).name not in OURS:
            mark.wait()

    def launch(self, *work: Any, **settings: Any) -> PlayedMark:
        mark = super().launch(*work, **settings)
        if self._this_or_current(None) is self.compute:
            mark.wait()
        return mark


@contextmanager
def played(**settings: Any) -> Iterator[HostComputes]:
    """A device that ends with what is within, and tells of its failure."""
    device = HostComputes(**settings)
    try:
        yield device
        device.synchronize()
    finally:
        gc.collect()
        device.close()
