"""The state of random number generators: one row of bytes for each rank, which any other process can read."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError

__all__ = ["derive_state", "get_state", "parse_state", "set_state", "to_row"]


def get_state() -> bytes:
    """Returns the states of the generators of Python, torch, NumPy (if imported) and this rank's GPU.

    >>> kept = get_state()
    >>> first = torch.rand(1), random.random()
    >>> set_state(kept)
    >>> (torch.rand(1), random.random()) == first
    True
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _hex(torch.get_rng_state()),
    }
    if numpy := _imported_numpy():
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.astype("<u4").tobytes().hex(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = _hex(torch.cuda.get_rng_state())
    return json.dumps(states).encode()


def parse_state(kept: bytes) -> dict[str, Any]:
    """Parses and validates the state of each generator, by setting it on a new generator of the same kind.

    >>> list(parse_state(get_state()))[:2]
    ['python', 'torch']
    """
    try:
        states = json.loads(kept)
        version, words, gauss = states["python"]
        if not isinstance(gauss, (float, type(None))):
            raise TypeError(f"{gauss!r} is no number that was drawn")
        parsed: dict[str, Any] = {"python": (version, tuple(words), gauss), "torch": _tensor(states["torch"])}
        random.Random().setstate(parsed["python"])
        torch.Generator().set_state(parsed["torch"])
        numpy = _numpy() if "numpy" in states else None
        if numpy is not None:
            name, keys, *rest = states["numpy"]
            parsed["numpy"] = name, numpy.frombuffer(bytes.fromhex(keys), dtype="<u4").astype("u4"), *rest
            numpy.random.RandomState().set_state(parsed["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            parsed["cuda"] = _tensor(states["cuda"])
            if torch.cuda.is_initialized():  # a load begins no context
                torch.Generator(torch.device("cuda", torch.cuda.current_device())).set_state(parsed["cuda"])
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise StateError(f"the random state of the checkpoint cannot be read ({error}); load with rng=False") from error
    return parsed


def set_state(kept: bytes) -> None:
    """Sets the state of each generator; generators that were not saved are left alone."""
    states = parse_state(kept)
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        _numpy().random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _imported_numpy() -> Any:
    """Returns NumPy if the program has imported it, and its generators, else None."""
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "random") else None


def _numpy() -> Any:
    """Returns NumPy, or None if it is not installed."""
    try:
        import numpy
    except ModuleNotFoundError:
        return None
    return numpy


def derive_state(kept: bytes, rank: int) -> bytes:
    """Derives a state for a rank that did not exist when `kept` was saved: deterministic, and different on every rank.

    >>> ranks = [json.loads(derive_state(get_state(), rank))["torch"] for rank in (4, 5)]
    >>> ranks[0] == ranks[1]
    False
    """
    before = get_state()
    try:
        set_state(kept)
        seed = int(torch.randint(1 << 62, (rank + 1,))[rank])
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy := _imported_numpy():
            numpy.random.seed(seed % (1 << 32))
        return get_state()
    finally:
        set_state(before)


def to_row(kept: bytes, width: int) -> Tensor:
    """Pads the bytes to the width of the table with blanks, which JSON allows at the end.

    >>> bytes(to_row(b"[1]", 5).tolist())
    b'[1]  '
    """
    return torch.frombuffer(bytearray(kept.ljust(width)), dtype=torch.uint8)


def _hex(state: Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
