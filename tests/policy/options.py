"""Lists what users can say: the arguments of every public callable, the command line's options, the environment.

`python tests/policy/options.py` prints the list that tests/policy/options.txt freezes.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


class Captured(Exception):
    """Carries the parser out of the command that was about to use it."""


def public_modules() -> list[ModuleType]:
    import zerokern
    import zerokern.io
    import zerokern.kernels

    return [zerokern, zerokern.io, zerokern.kernels]


def public_callables() -> Iterator[tuple[str, Any]]:
    for module in public_modules():
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if callable(value):
                yield f"{module.__name__}.{name}", value


def argument_names(function: Any) -> str:
    """The names of a callable's arguments, as a call writes them: "params, lr, betas"."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a class that is made of C, such as an exception
        return "..."
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(marks.get(p.kind, "") + p.name for p in parameters if p.name != "self")


def of_callable(name: str, value: Any) -> Iterator[str]:
    yield f"{name}({argument_names(value)})"
    if not inspect.isclass(value):
        return
    own = [base for base in value.__mro__ if base.__module__.split(".")[0] == "zerokern"]
    methods = {key: method for base in reversed(own) for key, method in vars(base).items()}
    for key, method in sorted(methods.items()):
        if key.startswith("_"):
            continue
        if isinstance(method, property):
            yield f"{name}.{key}"
        elif inspect.isfunction(method):
            yield f"{name}.{key}({argument_names(method)})"


def command_line() -> argparse.ArgumentParser:
    """The parser of the `zerokern` command, taken at the moment it would read its arguments."""
    from zerokern.cli.main import main

    def capture(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise Captured(parser)

    original = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = capture
    try:
        main(["info"])
    except Captured as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = original
    raise AssertionError("zerokern.cli.main.main(argv) no longer calls ArgumentParser.parse_known_args")


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def of_parser(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        yield f"{command} {' '.join(action.option_strings) or action.dest}"
    for name, below in sorted(subcommands(parser).items()):
        yield f"{command} {name}"
        yield from of_parser(f"{command} {name}", below)


def environment() -> list[str]:
    from zerokern.core.env import ENV

    return sorted(variable.name for variable in (ENV.values() if isinstance(ENV, Mapping) else ENV))


def collect() -> list[str]:
    """Every option, one per line."""
    lines = [line for name, value in public_callables() for line in of_callable(name, value)]
    lines += of_parser("zerokern", command_line())
    return lines + [f"${name}" for name in environment()]


if __name__ == "__main__":
    print("\n".join(collect()))
