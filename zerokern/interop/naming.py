"""Sorts the entries of foreign checkpoints into model and optimizer state, and translates their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerokern.checkpoint.training_state import WRAPPERS
from zerokern.optim.formats import CODES

__all__ = ["Named", "bare", "groups", "named", "parameter"]

Path = tuple[Any, ...]

MODELS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net")
OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_states", "opt")


@dataclass
class Named:
    """Tensors by our keys, options of the optimizers, and `rest`: what is neither model nor optimizer."""

    keys: dict[Path, str] = field(default_factory=dict)
    options: dict[Path, tuple[Path, Any, str]] = field(default_factory=dict)  # optimizer, group or parameter, name
    rest: list[Path] = field(default_factory=list)
    numbered: bool = False  # state by number of the parameter, as torch.optim's own state_dict has it


def parameter(name: str) -> str:
    """Returns the name of a parameter without the names of wrapper modules.

    >>> parameter("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def bare(names: Iterable[str]) -> dict[str, str]:
    """Maps every name to itself without wrappers; DDP's `module.` is removed if all of them have it.

    >>> bare(["module.a.weight", "module.b"])
    {'module.a.weight': 'a.weight', 'module.b': 'b'}
    """
    clean = {name: parameter(name) for name in names}
    while clean and all(name.startswith("module.") for name in clean.values()):
        clean = {name: short.removeprefix("module.") for name, short in clean.items()}
    return clean


def named(tensors: Sequence[Path], others: Sequence[Path]) -> Named:
    """Sorts the paths of tensors and of other values.

    >>> tensors = [("model", "w"), ("optim", "state", "w", "exp_avg")]
    >>> found = named(tensors, [("optim", "param_groups", 0, "lr"), ("epoch",)])
    >>> list(found.keys.values()), list(found.options.values()), found.rest
    (['model.w', 'optim.state.w.exp_avg'], [(('optim',), 0, 'lr')], [('epoch',)])
    """
    result = Named()
    dense = set(tensors)
    states: dict[Path, tuple[Path, str, str]] = {}
    left: list[Path] = []
    for path in (*tensors, *others):
        at = _optimizer(path)
        root, inside = path[: at or 0], ".".join(map(str, path[at or 0 :]))
        if at is not None and inside.startswith("state."):
            states[path] = (root, *inside.removeprefix("state.").rpartition(".")[::2])
        elif at is not None and inside.startswith("param_groups."):
            name, _, option = inside.removeprefix("param_groups.").rpartition(".")
            result.options[path] = (root, int(name) if name.isdigit() else parameter(name), option)
        else:
            left.append(path)
    model = _root([path for path in left if path in dense])
    names = {
        path: ".".join(map(str, path[len(model) :]))
        for path in left
        if model is not None and path in dense and path[: len(model)] == model and (model or len(path) == 1)
    }
    result.rest = [path for path in left if path not in names]
    unknown = next((path for path in result.rest if path in dense and _optimizer(path) is not None), None)
    if unknown is not None and not states:
        raise ValueError(f"{'.'.join(map(str, unknown))} is of an optimizer, and is no state of it that can be told")
    short = bare(names.values())
    result.keys = {path: f"model.{short[name]}" for path, name in names.items()}
    roots = sorted({root for root, _, _ in states.values()}, key=str)
    result.numbered = bool(states) and all(name.isdigit() for _, name, _ in states.values())
    owner = bare(name for _, name, _ in states.values())
    for path, (root, name, key) in states.items():
        # Two optimizers may both have a parameter number 0.
        place = f"{roots.index(root)}." if result.numbered and len(roots) > 1 else ""
        result.keys[path] = f"optim.state.{place}{owner[name]}.{key.removesuffix(CODES)}"
    return result


def _optimizer(path: Path) -> int | None:
    """Returns where in the path the optimizer's own state_dict begins."""
    for at, part in enumerate(path[:-1], 1):
        if part in OPTIMIZERS:
            return at + 1 if len(path) > at + 1 and str(path[at]).isdigit() else at
    return None


def _root(tensors: Sequence[Path]) -> Path | None:
    """Returns the common prefix of the model's tensors: a part named as models are, or nothing."""
    for depth in range(max(map(len, tensors), default=0)):
        for name in MODELS:
            roots = {path[: depth + 1] for path in tensors if len(path) > depth + 1 and path[depth] == name}
            if roots:
                return min(roots, key=str)
    return () if any(len(path) == 1 for path in tensors) else None


def groups(options: Mapping[tuple[Path, Any, str], Any]) -> list[list[dict[str, Any]]]:
    """Returns the param_groups of each optimizer, from options by group or, as torch flattens them, by parameter.

    >>> groups({((), "w", "lr"): 0.1, ((), "b", "lr"): 0.1, ((), "e", "lr"): 0.2})
    [[{'lr': 0.1, 'params': ['w', 'b']}, {'lr': 0.2, 'params': ['e']}]]
    """
    whole: dict[Path, dict[Any, dict[str, Any]]] = {}
    for (root, of, name), value in options.items():
        whole.setdefault(root, {}).setdefault(of, {})[name] = value
    return [_merged(whole[root]) for root in sorted(whole, key=str)]


def _merged(options: Mapping[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    if all(isinstance(of, int) for of in options):
        return [options[number] for number in sorted(options)]
    made: list[dict[str, Any]] = []
    for name, option in options.items():
        same = next((group for group in made if {**group, "params": 0} == {**option, "params": 0}), None)
        if same is None:
            made.append({**option, "params": [name]})
        else:
            same["params"].append(name)
    return made
