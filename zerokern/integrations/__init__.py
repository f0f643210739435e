"""zerokern inside of the frameworks that people train with; each module imports its framework, nothing else does."""

from __future__ import annotations

__all__: list[str] = []


def without(framework: str, error: ImportError) -> ImportError:
    """What a module raises whose framework is not installed; another error of the framework's import stays as it is.

    >>> str(without("lightning", ModuleNotFoundError("No module named 'lightning'", name="lightning")))
    "lightning is not installed; pip install 'zerokern[integrations]' brings it"
    """
    if error.name is None or error.name.partition(".")[0] != framework:
        return error
    return ImportError(f"{framework} is not installed; pip install 'zerokern[integrations]' brings it", name=framework)
