"""Applies a file of zk.Delta.save to NumPy arrays, with NumPy alone. It is imported, or copied."""

import json

import numpy as np


def checksum(words: np.ndarray) -> int:
    return int((np.arange(1, words.size + 1, dtype=np.uint64) * words.astype(np.uint64)).sum(dtype=np.uint64))


def changed(counts: np.ndarray, places: np.ndarray, numel: int) -> np.ndarray:
    found: list[np.ndarray] = [np.zeros(0, np.int64)]
    at = 0
    for block in np.flatnonzero(counts).tolist():  # of 128 elements: a list of places, a mask, or nothing: all changed
        count, length = int(counts[block]), min(128, numel - 128 * block)
        size = 0 if count == length else count if count < 16 else -(-length // 8)
        part, at = places[at : at + size], at + size
        if size == 0 or count >= 16:
            part = np.flatnonzero(np.unpackbits(part, bitorder="little")) if size else np.arange(length)
        found.append(128 * block + part.astype(np.int64))
    return np.concatenate(found)


def read(path: str, arrays: dict[str, np.ndarray]) -> None:
    """`arrays`: by name, flat and of unsigned words as wide as the elements; they are written in place."""
    data = np.fromfile(path, np.uint8)
    begin = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8:begin].tobytes())
    said = header.pop("__metadata__")
    raw = {name: data[begin:][slice(*one["data_offsets"])] for name, one in header.items()}
    for name, (_, shape, before, after) in json.loads(said["tensors"]).items():
        parts = [raw[key] for key in (f"{name}.counts", f"{name}.places", f"{name}.values") if key in raw]
        where = changed(parts[0], parts[1], int(np.prod(shape))) if parts else slice(None)
        if checksum(arrays[name]) != before:
            raise ValueError(f"{name} is not as it was before this delta")
        if parts or name in raw:
            arrays[name][where] = (parts[2] if parts else raw[name]).copy().view(arrays[name].dtype)
        assert checksum(arrays[name]) == after, f"{name} is not as it is in the model that is followed"
