"""A Linear that is too large to be whole: at stage 3 its rows are gathered, used and released some at a time.

Until then, and at the stages that keep parameters whole, it has its one weight. At stage 3 each of its pieces is a
parameter and a unit of its own, so that whatever knows units knows tiles; the names of a `state_dict` stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerokern.activations.tiled_weight import TiledWeight
from zerokern.core.errors import ShardError, StateError, got, whole_number
from zerokern.core.units import BLOCK
from zerokern.zero.hooks import hooks_after_accumulation
from zerokern.zero.kinds import is_placed
from zerokern.zero.shard import shard_of
from zerokern.zero.sharded import Sharded
from zerokern.zero.units import UnitModule, UnitSpec

__all__ = ["Cut", "Tile", "Tiled", "cut", "rows_of", "tile", "units_with_tiles"]

KERNEL = 16  # rows: of as many, BLAS computes each as it would among more


def tile(module: nn.Module, *, tiles: int) -> nn.Module:
    """Makes an `nn.Linear`, or every Linear in a module, compute in `tiles` pieces of its output dimension, in place.

    This is for a Linear that is too large to be gathered whole. Under `zk.shard(stage=3)` each piece is fetched, used
    and released by itself, in forward and backward, and its gradient leaves before the next but one is made. So the
    memory for whole weights is divided by `tiles`. Call it before `zk.shard`, or in the function that `zk.build` is
    given. Without stage 3 the module computes in pieces of its one weight, with the same bits.

    What stays: the module, its other attributes, the random numbers drawn for it, and the names and shapes in
    `state_dict` and checkpoints, so tiled and untiled models can load each other. What changes at stage 3:
    `parameters()` lists the pieces (`tiles.0.weight`, ...). `weight` stands for all of them; its shape, dtype and
    gradient can be read, and it can be frozen. Rows are divided as evenly as blocks of 128 elements allow.

    Bits: those of a loop over smaller Linears joined by `torch.cat`, at every stage and tier. Each output and each row
    of the weight's gradient has the bits of the untiled Linear wherever BLAS computes a few rows as it computes all;
    with MKL on a CPU that holds if each piece is a multiple of 16 rows. The gradient of the input is summed piece by
    piece in the dtype of the input, and differs from the untiled one by that rounding.

    Refused by name: other modules, subclasses of Linear (they may use their weight directly, as attention does), a
    Linear whose `forward` was replaced, and at stage 3 a weight that is tied or a DTensor.

    >>> import torch, zerokern as zk
    >>> layer = zk.shard(zk.tile(torch.nn.Linear(64, 256), tiles=4), stage=3)
    >>> [tuple(param.shape) for param in layer.parameters()], tuple(layer.weight.shape)
    ([(256,), (64, 64), (64, 64), (64, 64), (64, 64)], (256, 64))
    >>> list(layer.state_dict())
    ['weight', 'bias']
    """
    whole_number("tiles", tiles)
    if not isinstance(module, nn.Module):
        raise TypeError(got("module", type(module).__name__, "an nn.Linear, or a module with some in it"))
    found = [(name, one) for name, one in module.named_modules() if isinstance(one, nn.Linear)]
    if not found:
        raise TypeError(got("module", type(module).__name__, "an nn.Linear, or a module with some in it"))
    for name, one in found:
        _check(name, one, tiles)
    for _, one in found:
        one.__class__ = nn.Linear if tiles == 1 else Tiled
        one.__dict__.pop("tile_count", None)
        if tiles > 1:
            one.__dict__["tile_count"] = tiles
    return module


def _check(name: str, one: nn.Linear, tiles: int) -> None:
    called = f"{name!r}" if name else "the module"
    if isinstance(one, Cut) or shard_of(one._parameters.get("weight")) is not None:
        raise StateError(f"{called} is sharded already; call zk.tile before zk.shard")
    if type(one) not in (nn.Linear, Tiled) or "forward" in one.__dict__:
        kind = type(one).__name__ if type(one) not in (nn.Linear, Tiled) else "Linear with a forward of its own"
        raise TypeError(
            f"{called} is a {kind}, which may use its weight by itself; allowed: torch.nn.Linear as it is. Tile the "
            "Linears that are too large one by one: zk.tile(model.head, tiles=8)"
        )
    if not isinstance(one._parameters.get("weight"), nn.Parameter):
        raise TypeError(
            f"the weight of {called} is no parameter of it (weight_norm, pruning, a parametrization?); allowed: "
            "torch.nn.Linear as it is"
        )
    if tiles > one.out_features:
        raise ValueError(got("tiles", tiles, f"1 to {one.out_features}, the out_features of {called}"))


def rows_of(out_features: int, in_features: int, tiles: int) -> list[int]:
    """How many rows each piece has: some at least, and where there are enough of them multiples that begin a block.

    >>> rows_of(256, 64, 4), rows_of(10, 3, 4), rows_of(50, 128, 3)
    ([64, 64, 64, 64], [3, 3, 2, 2], [16, 16, 18])
    """
    block = BLOCK // math.gcd(BLOCK, in_features)
    step = next(step for step in (math.lcm(block, KERNEL), block, KERNEL, 1) if out_features // step >= tiles)
    each, more = divmod(out_features // step, tiles)
    rows = [step * (each + (number < more)) for number in range(tiles)]
    rows[-1] += out_features % step
    return rows


class Tiled(nn.Linear):
    """A Linear with one weight that computes as one in pieces does."""

    tile_count: int

    def forward(self, x: Tensor) -> Tensor:
        """The pieces' outputs, side by side."""
        weights = self.weight.split(self.rows)
        return _joined(F.linear(x, weight, bias) for weight, bias in zip(weights, self.biases(), strict=True))

    @property
    def rows(self) -> list[int]:
        """Of each piece."""
        return rows_of(self.out_features, self.in_features, self.tile_count)

    def biases(self) -> Sequence[Tensor | None]:
        """Of each piece."""
        return [None] * self.tile_count if self.bias is None else self.bias.split(self.rows)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tiles={self.tile_count}"


def _joined(outputs: Iterator[Tensor]) -> Tensor:
    return torch.cat(list(outputs), dim=-1)


class Tile(UnitModule):
    """Some rows of a Linear: a unit. Its parameter is saved and loaded by the Linear, under the Linear's name."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def reset_parameters(self) -> None:
        """As a Linear's weight."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        return f"rows={len(self.weight)}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class Cut(Tiled):
    """A Linear whose weight is in pieces, each in a module of its own."""

    tiles: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """The pieces' outputs, side by side."""
        return _joined(one(x, bias) for one, bias in zip(self.tiles, self.biases(), strict=True))

    @property
    def pieces(self) -> list[Tensor]:
        """The weight's, from its first row on."""
        return [cast("Tile", one).weight for one in self.tiles]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Stands for all pieces."""
        return TiledWeight.of(self.pieces)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ShardError(
                f"a Linear whose weight is in {len(self.tiles)} tiles was given another weight; allowed: writing into "
                "it, by load_state_dict or within zk.gathered(module, write=True) into module.tiles[i].weight. Tie or "
                "exchange weights before zk.shard"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """As a Linear's own."""
        for one in self.tiles:
            cast("Tile", one).reset_parameters()
        if self.bias is not None and self.in_features:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pieces = self.pieces if keep_vars else [one.detach() for one in self.pieces]
        divided = any(isinstance(one, Sharded) for one in pieces)
        destination[prefix + "weight"] = TiledWeight.of(pieces) if divided or keep_vars else torch.cat(pieces)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        others = {name: value for name, value in state_dict.items() if name != key}
        told = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(others, prefix, local_metadata, strict, *told)
        whole = state_dict.get(key)
        if whole is None:
            if strict:
                missing_keys.append(key)
            return
        if tuple(whole.shape) != (self.out_features, self.in_features):
            ours = torch.Size((self.out_features, self.in_features))
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {whole.shape} from checkpoint, the shape in "
                f"current model is {ours}."
            )
            return
        parts = whole.parts if isinstance(whole, TiledWeight) else None
        if parts is None or [len(part) for part in parts] != self.rows:
            parts = whole.split(self.rows)
        for number, (one, part) in enumerate(zip(self.tiles, parts, strict=True)):
            at = f"{prefix}tiles.{number}."
            nn.Module._load_from_state_dict(one, {f"{at}weight": part}, at, local_metadata, strict, *told)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or what is pickled, is a plain model: with one weight, where the pieces are whole."""
        pieces = self.pieces
        if any(isinstance(one, Sharded) for one in pieces):
            return super().__reduce_ex__(protocol)  # which they refuse
        state = {**self.__dict__, "_parameters": {**self._parameters}, "_modules": {**self._modules}}
        del state["_modules"]["tiles"]
        weight = nn.Parameter(torch.cat([one.detach() for one in pieces]), pieces[0].requires_grad)
        state["_parameters"] = {"weight": weight, **state["_parameters"]}
        return Tiled.__new__, (Tiled,), state


class Former(nn.Parameter):
    """What was the weight of a Linear that is in tiles: an optimizer that has it would never hear of a gradient."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        raise ShardError(
            f"a weight of shape {tuple(self.shape)} was cut when its model was sharded at stage 3, and its tiles are "
            "the parameters; make the optimizer after zk.shard, of model.parameters()"
        )


def cut(module: nn.Module) -> None:
    """The weights of the tiled Linears in a module become pieces: views of them, until they are sharded."""
    owners: dict[int, list[str]] = {}
    for name, one in module.named_modules():
        for attribute, param in one._parameters.items():
            owners.setdefault(id(param), []).append(f"{name}.{attribute}" if name else attribute)
    found = [(name, one) for name, one in module.named_modules() if type(one) is Tiled]
    for name, one in found:
        _refuse_placed(f"{name}.weight" if name else "weight", one._parameters["weight"])
    found = [(name, one) for name, one in found if type(one._parameters["weight"]) is nn.Parameter]
    for name, one in found:
        weight = cast("nn.Parameter", one.weight)
        _check_weight(f"{name}.weight" if name else "weight", weight, owners[id(weight)])
    for _, one in found:
        rows, popped = one.rows, one._parameters.pop("weight")
        weight = cast("nn.Parameter", popped)
        one.__class__ = Cut
        one.tiles = nn.ModuleList(Tile(piece) for piece in _pieces(weight, rows))
        weight.__class__ = Former


def units_with_tiles(units: Sequence[UnitSpec]) -> tuple[list[UnitSpec], dict[int, list[nn.Parameter]]]:
    """The units that there will be at stage 3, and by the id of each tiled weight stand-ins for its pieces (on meta).

    >>> from zerokern.zero.units import units_of
    >>> units, pieces = units_with_tiles(units_of(tile(nn.Linear(2, 4), tiles=2)))
    >>> [unit.name for unit in units], len(pieces)
    (['', 'tiles.0', 'tiles.1'], 1)
    """
    tiled = {id(one.weight): one for unit in units for one in unit.module.modules() if type(one) is Tiled}
    made: list[UnitSpec] = []
    pieces: dict[int, list[nn.Parameter]] = {}
    for unit in units:
        made.append(UnitSpec(unit.name, unit.module, [pair for pair in unit.params if id(pair[1]) not in tiled]))
        for name, weight in unit.params:
            for number, rows in enumerate(tiled[id(weight)].rows if id(weight) in tiled else ()):
                blank = torch.empty(rows, *weight.shape[1:], dtype=weight.dtype, device="meta")
                piece = nn.Parameter(blank, weight.requires_grad)
                pieces.setdefault(id(weight), []).append(piece)
                at = f"{name.removesuffix('weight')}tiles.{number}"
                made.append(UnitSpec(at, unit.module, [(f"{at}.weight", piece)]))
    return [made[0], *(unit for unit in made[1:] if unit.params)], pieces


def _refuse_placed(name: str, weight: Tensor | None) -> None:
    if is_placed(weight):
        raise ShardError(
            f"{name!r} is tiled, and a DTensor, which stage 3 gathers as one, so that tiles would save no memory; "
            "leave what parallelize_module divides untiled (zk.tile(module, tiles=1)): a higher degree of tensor "
            "parallelism makes each rank's part smaller"
        )


def _check_weight(name: str, weight: nn.Parameter, owners: Sequence[str]) -> None:
    if len(owners) > 1:
        others = ", ".join(repr(one) for one in owners if one != name)
        raise ShardError(
            f"{name!r} is tiled, and tied: it is {others} too, which needs it whole; tile weights that are used in one "
            "place, or leave this one untied, or untiled (zk.tile(module, tiles=1))"
        )
    if weight._backward_hooks or hooks_after_accumulation(weight):
        raise ShardError(
            f"{name!r} is tiled, and has hooks, which would hear of no gradient: register them after zk.shard, on the "
            "tiles (module.tiles[i].weight)"
        )
    if weight.grad is not None:
        raise StateError(f"{name!r} has a gradient; call zero_grad() before zk.shard")


def _pieces(weight: nn.Parameter, rows: Sequence[int]) -> Iterator[nn.Parameter]:
    begin = 0
    for count in rows:
        piece = nn.Parameter(weight.detach()[begin : begin + count], weight.requires_grad)
        piece.__dict__.update(weight.__dict__)
        begin += count
        yield piece
