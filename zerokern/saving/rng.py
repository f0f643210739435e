"""Random numbers that a rank draws from: one row of bytes for each rank, which any other process can read."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError

__all__ = ["put_back", "row", "taken", "unlike"]


def taken() -> bytes:
    """The states of Python's, torch's, NumPy's (where somebody has imported it) and this rank's GPU generator.

    >>> kept = taken()
    >>> first = torch.rand(1), random.random()
    >>> put_back(kept)
    >>> (torch.rand(1), random.random()) == first
    True
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _hex(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.astype("<u4").tobytes().hex(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = _hex(torch.cuda.get_rng_state())
    return json.dumps(states).encode()


def put_back(kept: bytes) -> None:
    """Each generator goes on from where it was; those that did not exist then are left alone."""
    try:
        states = json.loads(kept)
        version, words, gauss = states["python"]
        python, torchs = (version, tuple(words), gauss), _tensor(states["torch"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"the random state of the checkpoint cannot be read ({error}); load with rng=False") from error
    random.setstate(python)
    torch.set_rng_state(torchs)
    if "numpy" in states:
        _numpy_back(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _numpy_back(state: list[Any]) -> None:
    try:
        import numpy
    except ModuleNotFoundError:  # who has no NumPy draws nothing from it
        return
    name, keys, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(bytes.fromhex(keys), dtype="<u4").astype("u4"), *rest))


def unlike(kept: bytes, rank: int) -> bytes:
    """The state of a rank that was not there when `kept` was taken: as definite, and unlike that of every other.

    >>> ranks = [json.loads(unlike(taken(), rank))["torch"] for rank in (4, 5)]
    >>> ranks[0] == ranks[1]
    False
    """
    before = taken()
    try:
        put_back(kept)
        seed = int(torch.randint(1 << 62, (rank + 1,))[rank])
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            numpy.random.seed(seed % (1 << 32))
        return taken()
    finally:
        put_back(before)


def row(kept: bytes, width: int) -> Tensor:
    """The bytes as a row of a table as wide as the widest: JSON may end in blanks.

    >>> bytes(row(b"[1]", 5).tolist())
    b'[1]  '
    """
    return torch.frombuffer(bytearray(kept.ljust(width)), dtype=torch.uint8)


def _hex(state: Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
