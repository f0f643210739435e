"""A checkpoint that zk.save published, to be loaded: from slots straight into tensors, each block checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerokern.core.errors import IoError, got
from zerokern.io.ticket import again
from zerokern.saving.published import Published
from zerokern.saving.reading import FileReader, Retained
from zerokern.saving.source import Landing, Source, Told, landings, untold
from zerokern.saving.staging import Staging

__all__ = ["Saved"]


class Saved(Source):
    """What `Published` has found."""

    kind = "zerokern"

    def __init__(self, published: Published) -> None:
        self.published, self.path, self.index = published, published.folder, published.index
        self.tensors, self.values = self.index.tensors, self.index.values
        self._kept: Retained | None = None
        self._slots: Staging | None = None

    @property
    def _staging(self) -> Staging:
        """The slots that it all passes through, until `close`."""
        self._slots = self._slots or Staging(self.path)
        return self._slots

    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        of_file: dict[int, list[Landing]] = {}
        for landing in landings(items, self.tensors):
            of_file.setdefault(landing.box.file, []).append(landing)
        if not of_file:
            return
        try:
            for number, some in sorted(of_file.items()):
                try:
                    with self._reader(number) as reader:
                        reader.read(span for landing in some for span in landing.spans(told))
                except IoError as error:
                    raise self._with_keys(error, number) from error
        finally:  # what came from the processor's own copying is unknown to torch
            written = [one.target for some in of_file.values() for one in some if not one.target.is_inference()]
            torch.autograd.graph.increment_version(written)

    def _reader(self, number: int) -> FileReader:
        row, held = self.index.files[number], self.published.held
        return FileReader(self.path, row, staging=self._staging, held=held, kept=self._kept)

    def verify(self, rank: int = 0, world: int = 1, told: Told = untold) -> None:
        """Keeps what one rank alone has read, where memory allows; several read the most part of it once each."""
        self._kept = Retained(self.nbytes) if world == 1 else None
        super().verify(rank, world, told)

    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        """All that is wrong with this rank's share of the blocks; each error names file, offset and keys."""
        if not 0 <= rank < world:
            raise ValueError(got("rank", rank, f"0 to {world - 1}"))
        files = self.index.files
        total = sum(file.blocks for file in files)
        begin, end = total * rank // world, total * (rank + 1) // world
        before = 0
        for number, file in enumerate(files):
            first, behind = max(begin - before, 0), min(end - before, file.blocks)
            before += file.blocks
            if first >= behind:
                continue
            try:
                with self._reader(number) as reader:
                    for error in reader.damage(first, behind, told):
                        yield self._with_keys(error, number)
            except IoError as error:
                yield self._with_keys(error, number)

    def _with_keys(self, error: IoError, number: int) -> IoError:
        """The same error with the keys that it concerns."""
        end = error.offset + max(error.nbytes, 1)
        keys = [
            key
            for key, row in self.index.tensors.items()
            if any(box.file == number and box.item[0] < end and sum(box.item) > error.offset for box in row.boxes)
        ]
        if not keys:
            return error
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        error.key = keys[0]
        return again(f"{error}. There lie {', '.join(keys[:3])}{more}", error)

    def likeness(self) -> str:
        return f"the save {self.index.save_id} (its files end in {sum(file.crc for file in self.index.files):x})"

    def close(self) -> None:
        self._kept, slots, self._slots = None, self._slots, None
        if slots is not None:
            slots.close()
        self.published.close()

    def __del__(self) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return sum(file.table for file in self.index.files)
