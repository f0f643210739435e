"""Torch's stack of hooks on what autograd saves: who is on top of it, and how to leave it while others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "AroundCheckpoint",
    "allows_saved_hooks",
    "push_saved_hooks",
    "remove_saved_hooks",
    "top_saved_hooks",
]


def allows_saved_hooks() -> bool:
    """Whether hooks may be told now of what autograd saves: functional transforms do not allow it."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


class AroundCheckpoint:
    """Whose hooks are in force around torch's checkpoint alone, which covers them with its own for all that it calls.

    Whoever finds them on top finds what a call has left that Ctrl-C broke off.
    """


def top_saved_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks that are told at present of what autograd saves, in this thread."""
    while (top := _top(True)) is not None and isinstance(getattr(top[0], "__self__", None), AroundCheckpoint):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return top


#: of `True`: the hooks that are in force, also where hooks are refused
_top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def push_saved_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Autograd keeps `pack(tensor)` for what it saves, until `remove_saved_hooks`, and reads `unpack(packed)`."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def remove_saved_hooks(unpack: Callable[[Any], Tensor]) -> None:
    """Ends the last `push_saved_hooks` with this `unpack` in this thread; later ones of others stay in force.

    Module hooks of a program may push theirs before a forward and pop them after it, and after ours.
    """
    others, pop = [], torch._C._autograd._pop_saved_tensors_default_hooks
    while (top := _top(True)) is not None:
        pop()
        if top[1] == unpack:
            break
        others.append(top)
    for pack, of_others in reversed(others):
        push_saved_hooks(pack, of_others)
