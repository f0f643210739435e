"""A played device for a torch that computes at once, whatever it is told to follow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerokern.examples.played_device import PlayedDevice, PlayedMark, PlayedStream

__all__ = ["Waiting", "played"]


class Waiting(PlayedDevice):
    """torch computes at once where a device would follow its stream: what is to be followed is waited for."""

    def follow(self, stream: PlayedStream | None, mark: PlayedMark) -> None:
        super().follow(stream, mark)
        if stream is None:
            mark.wait()


@contextmanager
def played(**settings: Any) -> Iterator[Waiting]:
    """A device that ends with what is within, and tells of its failure."""
    device = Waiting(**settings)
    try:
        yield device
        device.synchronize()
    finally:
        gc.collect()
        device.close()
