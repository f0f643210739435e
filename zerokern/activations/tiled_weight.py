"""Shows the weight of a tiled Linear as one tensor: its shape, over the tiles that hold its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerokern.memory.here import Cuboid, chunk_list, write_items
from zerokern.zero.kinds import here_of
from zerokern.zero.sharded_ops import METADATA, ShardedUseError, methods

__all__ = ["TiledWeight"]

ALIKE = methods("detach clone") | {torch.clone, torch.detach}


class TiledWeight(Tensor):
    """A tensor whose rows are in several others, one after the other.

    It tells shape, dtype and where which elements are, as torch.distributed.checkpoint asks; reads and drops gradients,
    freezes and thaws. What would need it in one piece is refused.

    >>> TiledWeight.of([torch.ones(2, 3), torch.zeros(1, 3)])
    TiledWeight(shape (3, 3) in 2 tiles, torch.float32)
    """

    parts: list[Tensor]

    @staticmethod
    def of(parts: Sequence[Tensor]) -> TiledWeight:
        """Make one of these parts, which it refers to."""
        first = parts[0]
        shape = torch.Size((sum(len(one) for one in parts), *first.shape[1:]))
        trained = any(one.requires_grad for one in parts)
        made = Tensor._make_wrapper_subclass(
            TiledWeight, shape, dtype=first.dtype, device=first.device, requires_grad=trained
        )
        made.parts = list(parts)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TiledWeight(shape {tuple(self.shape)} in {len(self.parts)} tiles, {self.dtype})"

    @property
    def grad(self) -> TiledWeight | None:
        """The gradients of the parts as one; None where they have none."""
        found = [one.grad for one in self.parts]
        there = [one for one in found if one is not None]
        return TiledWeight.of(there) if there and len(there) == len(found) else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self.refuse("`.grad =`")
        for one in self.parts:
            one.grad = None

    @property
    def requires_grad(self) -> bool:
        """Whether any part is trained."""
        return any(one.requires_grad for one in self.parts)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> TiledWeight:
        """Of all parts."""
        for one in self.parts:
            one.requires_grad_(requires_grad)
        return self

    def refuse(self, op: str) -> NoReturn:
        """Says what to do instead."""
        raise ShardedUseError(
            f"{op} needs a weight in one piece, and this one is in tiles: {self!r}. Call the Linear, whose output is "
            "that of all; read whole values from state_dict() within `with zk.gathered(module):`; write by "
            "load_state_dict, or there (write=True) into module.tiles[i].weight"
        )

    def __deepcopy__(self, memo: dict) -> TiledWeight:
        memo[id(self)] = copied = TiledWeight.of([one.detach().clone() for one in self.parts])
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("pickling (torch.save, copy.copy)")

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = next((one for one in args if isinstance(one, TiledWeight)), None)
        if func in ALIKE and found is not None:
            return TiledWeight.of([func(one, *args[1:], **(kwargs or {})) for one in found.parts])
        return _refuse(getattr(func, "__name__", str(func)), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _refuse(str(func), args, kwargs)

    def _boxes(self) -> list[tuple[Tensor, Cuboid, Cuboid]]:
        """Each box that is here: whose it is, as that part has it, and in the whole."""
        found, first = [], 0
        for one in self.parts:
            for at, sizes, begin in here_of(one).boxes():
                found.append((one, (at, sizes, begin), ((first + at[0], *at[1:]), sizes, begin)))
            first += len(one)
        return found

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self.shape, self.dtype, [box for *_, box in self._boxes()])

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list([box for *_, box in self._boxes()])

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """A box, as a view of what is here."""
        for one, (at, *_), (there, *_) in self._boxes():
            if index.offset is None or there == tuple(index.offset):
                if not hasattr(one, "__get_tensor_shard__"):
                    return one.detach()
                return one.__get_tensor_shard__(type(index)(index.fqn, torch.Size(at)))
        raise ShardedUseError(f"{self!r} has no box that begins at {index.offset}: what was planned was another tensor")


def _refuse(op: str, args: tuple, kwargs: Mapping[str, Any] | None) -> NoReturn:
    found = [one for value in (*args, *(kwargs or {}).values()) for one in _within(value)]
    found[0].refuse(op)


def _within(value: Any) -> Iterable[TiledWeight]:
    if isinstance(value, TiledWeight):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _within(one)
