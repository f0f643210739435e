"""A model's constructor, without the memory.

The constructor runs as it is. What it computed is remembered, emptied, and computed again when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zerokern.core.errors import ShardError, got
from zerokern.zero.recording import Overhearing, Recording, key_of
from zerokern.zero.units import Unit

__all__ = ["Construction"]


class Construction:
    """Runs a constructor and, unit by unit, gives its parameters the memory and the values that they had in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorder = Recording()

    def run(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The module, with parameters whose memory is empty wherever their values can be computed again."""
        with self._recorder, self.device, Overhearing(self._recorder):
            module = make()
        if not isinstance(module, nn.Module):
            raise TypeError(got("fn", type(module).__name__, "a function without arguments that returns an nn.Module"))
        params = {key_of(param) for param in module.parameters() if not param.is_meta}
        self._recorder.finish(params - {key_of(buffer) for buffer in module.buffers() if not buffer.is_meta})
        return module

    def materialize(self, unit: Unit) -> None:
        """Memory and values for the parameters of a unit, in the objects that the module has."""
        blank = []
        for name, param in unit.params:
            recipe = self._recorder.recipes.get(key_of(param))
            if param.is_meta or (recipe is not None and recipe.blank and param.numel()):
                blank.append(name)
            self._recorder.fill(param)
            if param.is_meta:
                real = nn.Parameter(torch.empty_like(param, device=self.device), param.requires_grad)
                torch.utils.swap_tensors(param, real)
        self._reset(unit, blank)
        for _, param in unit.params:
            if param.device != self.device:
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().to(self.device), param.requires_grad))

    def _reset(self, unit: Unit, blank: list[str]) -> None:
        """What the constructor left without values is for the module's own `reset_parameters`."""
        done: set[int] = set()
        params = dict(unit.params)
        for name in blank:
            param = params[name]
            modules = unit.module.modules()
            homes = [module for module in modules if any(own is param for own in module._parameters.values())]
            reset = getattr(homes[0], "reset_parameters", None) if homes else None
            if reset is None:
                raise ShardError(
                    f"{name!r} has no values: nothing wrote into it, and its module has no reset_parameters(). "
                    "Initialise it in place in the constructor (nn.init), or give the module a reset_parameters method"
                )
            if id(homes[0]) not in done:
                done.add(id(homes[0]))
                empty = {id(params[one]) for one in blank}
                own = [one for one in homes[0]._parameters.values() if one is not None and id(one) not in empty]
                for one in own:
                    self._recorder.fill(one)
                before = [one.detach().clone() for one in own]
                reset()
                for one, value in zip(own, before, strict=True):
                    one.data.copy_(value)
