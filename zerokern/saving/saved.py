"""A checkpoint that zk.save published, to be loaded: from slots straight into tensors, each block checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerokern.core.errors import IoError, got
from zerokern.io.ticket import again
from zerokern.saving.published import Published
from zerokern.saving.reading import FileReader
from zerokern.saving.source import Landing, Source, Told, landings, untold
from zerokern.saving.staging import Staging

__all__ = ["Saved"]


class Saved(Source):
    """What `Published` has found."""

    kind = "zerokern"

    def __init__(self, published: Published) -> None:
        self.published, self.path, self.index = published, published.folder, published.index
        self.tensors, self.values = self.index.tensors, self.index.values

    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        of_file: dict[int, list[Landing]] = {}
        for landing in landings(items, self.tensors):
            of_file.setdefault(landing.box.file, []).append(landing)
        if not of_file:
            return
        try:
            with Staging(self.path) as staging:
                for number, some in sorted(of_file.items()):
                    try:
                        with self._reader(number, staging) as reader:
                            reader.read(span for landing in some for span in landing.spans(told))
                    except IoError as error:
                        raise self._with_keys(error, number) from error
        finally:  # what came from the processor's own copying is unknown to torch
            written = [one.target for some in of_file.values() for one in some if not one.target.is_inference()]
            torch.autograd.graph.increment_version(written)

    def _reader(self, number: int, staging: Staging) -> FileReader:
        return FileReader(self.path, self.index.files[number], staging=staging, held=self.published.held)

    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        """All that is wrong with this rank's share of the blocks; each error names file, offset and keys."""
        if not 0 <= rank < world:
            raise ValueError(got("rank", rank, f"0 to {world - 1}"))
        files = self.index.files
        total = sum(file.blocks for file in files)
        begin, end = total * rank // world, total * (rank + 1) // world
        with Staging(self.path) as staging:
            before = 0
            for number, file in enumerate(files):
                first, behind = max(begin - before, 0), min(end - before, file.blocks)
                before += file.blocks
                if first >= behind:
                    continue
                try:
                    with self._reader(number, staging) as reader:
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
        self.published.close()

    @property
    def nbytes(self) -> int:
        return sum(file.table for file in self.index.files)
