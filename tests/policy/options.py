"""Lists what users can say: the arguments of every public callable, the command line's options, the environment.

Of the packages that docs/building-blocks.md shows to authors of frameworks, it lists what that page calls stable.

`python tests/policy/options.py` prints the list that tests/policy/options.txt freezes.
"""

from __future__ import annotations

import argparse
import dis
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCKS = Path(__file__).resolve().parents[2] / "docs/building-blocks.md"
STABLE = re.compile(r"`(zerokern(?:\.[a-z]\w*(?=\.))+)\.([\w.]+)(?:\((.*?)\))?`")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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


def stable_names(page: str) -> Iterator[tuple[str, str, list[str] | None]]:
    """The names in the first columns of the tables: a module, a name in it, and its arguments if it is called."""
    for cell in re.findall(r"^\| (`zerokern\..*?) \|", page, re.MULTILINE):
        for module, name, arguments in STABLE.findall(cell):
            called = f"{name}({arguments})`" in cell
            yield module, name, re.findall(r"\w+", arguments) if called else None


def set_when_made(owner: type) -> set[str]:
    """The attributes that a class's own `__init__` assigns."""
    made = owner.__init__  # type: ignore[misc]
    steps = dis.get_instructions(made) if inspect.isfunction(made) else ()
    return {step.argval for step in steps if step.opname == "STORE_ATTR"}


def resolved(module: str, name: str) -> Any:
    """What a name of a module is; None where it is an attribute that instances have."""
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        if inspect.isclass(owner) and not hasattr(owner, part):
            if part not in inspect.get_annotations(owner) and part not in set_when_made(owner):
                raise AttributeError(f"{module}.{name} is on {BLOCKS.name} and not in the library")
            return None
        owner = getattr(owner, part)
    return owner


def of_blocks(page: str) -> Iterator[str]:
    """One line for each, with the arguments that the page shows and those that a call must have."""
    for module, name, shown in stable_names(page):
        value = resolved(module, name)
        if shown is None:
            yield f"{module}.{name}"
            continue
        parameters = [one for one in inspect.signature(value).parameters.values() if one.name != "self"]
        needed = [one.name for one in parameters if one.kind in NAMED and one.default is one.empty]
        yield f"{module}.{name}({', '.join(one.name for one in parameters if one.name in (*shown, *needed))})"


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
    lines += of_blocks(BLOCKS.read_text(encoding="utf-8"))
    lines += of_parser("zerokern", command_line())
    return lines + [f"${name}" for name in environment()]


if __name__ == "__main__":
    print("\n".join(collect()))
