"""A played device for a torch that computes at once, whatever it is told to follow."""

from __future__ import annotations

from zerokern.examples.played_device import PlayedDevice, PlayedMark, PlayedStream

__all__ = ["Waiting"]


class Waiting(PlayedDevice):
    """torch computes at once where a device would follow its stream: what is to be followed is waited for."""

    def follow(self, stream: PlayedStream | None, mark: PlayedMark) -> None:
        super().follow(stream, mark)
        if stream is None:
            mark.wait()
