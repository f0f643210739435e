"""What is saved, and what is loaded into: a model and its optimizers, as items by name."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zerokern.core.errors import got
from zerokern.optim.exchange import Column
from zerokern.saving.optimizers import Steps, plain, steps_of
from zerokern.saving.parameters import (
    aliases,
    extra_states,
    named_tensors,
    refuse_meta,
    settle,
)
from zerokern.saving.storage import OnDiskPart
from zerokern.zero.homes import here_of_state, home_of

__all__ = ["Subject"]

_NOT_OURS = (
    "the optimizer steps {count} parameters that are not in the model ({places}); pass the model that they are of: "
    "they have no name otherwise that another run could find them by"
)


class Subject:
    """A model and the optimizers that step it.

    >>> model = nn.Linear(2, 2); subject = Subject(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> items, values = subject.described()
    >>> list(items), values["groups"][0][0]["params"]
    (['model.weight', 'model.bias'], ['weight', 'bias'])
    """

    def __init__(self, model: nn.Module, opts: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(got("model", model, "a torch.nn.Module"))
        some = [] if opts is None else list(opts) if isinstance(opts, Sequence) else [opts]
        self.model = model
        self.steps: list[Steps] = [steps_of(opt) for opt in some]
        self.tensors = named_tensors(model)
        self._names = {id(tensor): name for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            home = home_of(tensor)
            if home is not None:
                self._names.setdefault(id(home.piece), name)
        self.params = [self._named(steps) for steps in self.steps]
        every = Counter(name for names in self.params for name in names)
        twice = sorted(name for name, count in every.items() if count > 1) if len(self.steps) > 1 else []
        if twice:
            found = f"two optimizers that step {twice[0]}"
            raise ValueError(got("opt", found, "optimizers of different parameters"))

    def _named(self, steps: Steps) -> list[str]:
        """The names of an optimizer's parameters, in the order of its groups."""
        names: list[str] = []
        unknown: list[str] = []
        for number, group in enumerate(steps.opt.param_groups):
            for place, param in enumerate(group["params"]):
                name = self._names.get(id(param))
                if name is None:
                    unknown.append(f'param_groups[{number}]["params"][{place}]')
                else:
                    names.append(name)
        if unknown:
            places = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
            raise ValueError(_NOT_OURS.format(count=len(unknown), places=places))
        return names

    def described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is saved: by key tensors, whole or of this rank, and parts that are read from disk when their turn is;
        and all else, as JSON has it.

        Waits for updates under way. An optimizer that a step or a load left torn is refused, and what has no memory.
        """
        for name, tensor in self.tensors.items():
            refuse_meta(name, tensor)
        settle(self.model)
        for steps in self.steps:
            steps.settle()
        made: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            made[f"model.{name}"] = tensor.detach()
            home = home_of(tensor)
            initial = None if home is None else home.initial(tensor)
            if home is not None and initial is not None:
                made[f"initial.{name}"] = home.here.show(initial, name=home.name)
        groups, optimizers = [], []
        for steps, names in zip(self.steps, self.params, strict=True):
            beside: dict[str, dict[str, Any]] = {}
            for name, param, entry in zip(names, steps.params, steps.entries(), strict=True):
                for key, value in (entry or {}).items():
                    if isinstance(value, Column):
                        value = OnDiskPart(here_of_state(param), key, value).or_empty()
                    if isinstance(value, (Tensor, OnDiskPart)):
                        made[f"optim.state.{name}.{key}"] = value
                    else:
                        said = plain(value, f"the optimizer's state {key!r} of {name}")
                        beside.setdefault(name, {})[key] = said
            groups.append(_groups(steps, names))
            optimizers.append({**steps.values(), "beside": beside})
        extra_state = {}
        for name, module in extra_states(self.model).items():
            kept = module.get_extra_state()
            extra_state[name] = _extra(name, module, kept)
            if isinstance(kept, Tensor):
                made[f"model.{name}"] = kept.detach()
        return made, {
            "groups": groups,
            "optimizers": optimizers,
            "aliases": aliases(self.model),
            "extra_state": extra_state,
        }


_OUTSIDE = ("params", "param_names")


def _groups(steps: Steps, names: Sequence[str]) -> list[dict[str, Any]]:
    left = iter(names)
    made = []
    for number, group in enumerate(steps.opt.param_groups):
        where = f"param_groups[{number}]"
        own = {key: plain(one, f"{where}[{key!r}]") for key, one in group.items() if key not in _OUTSIDE}
        made.append({**own, "params": [next(left) for _ in group["params"]]})
    return made


def _extra(name: str, module: nn.Module, kept: Any) -> Any:
    """What a module keeps beside tensors."""
    if isinstance(kept, Tensor):
        return None
    if isinstance(kept, (bytes, bytearray)):
        return {"bytes": base64.b64encode(kept).decode()}
    return {"value": plain(kept, f"what {type(module).__name__}.get_extra_state() returns for {name}")}
