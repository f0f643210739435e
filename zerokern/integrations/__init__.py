"""Adapters for training frameworks; each module imports its framework, and nothing else does. See README.md."""

from __future__ import annotations

__all__: list[str] = []


def without(framework: str, error: ImportError) -> ImportError:
    """Returns the error of a module whose framework is not installed; other import errors stay as they are.

    >>> str(without("lightning", ModuleNotFoundError("No module named 'lightning'", name="lightning")))
    "lightning is not installed; pip install 'zerokern[integrations]' brings it"
    """
    if error.name is None or error.name.partition(".")[0] != framework:
        return error
    return ImportError(f"{framework} is not installed; pip install 'zerokern[integrations]' brings it", name=framework)
