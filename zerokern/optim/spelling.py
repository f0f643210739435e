"""Arguments that an optimizer has not are told with the one that may be meant, as Python does from 3.13 on."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from zerokern.optim import checks

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Spelling"]


class Spelling:
    """What an optimizer is called with is looked at before Python does.

    >>> import torch, zerokern as zk
    >>> zk.AdamW([torch.nn.Parameter(torch.ones(2))], state="int8")
    Traceback (most recent call last):
    ...
    TypeError: AdamW() has no argument 'state'; did you mean 'state_format'?
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for name in () if open_ended else [name for name in named if name not in known]:
            longer = [one for one in known if one.startswith(f"{name}_")]
            meant = longer[0] if len(longer) == 1 else checks.misspelt(name, known)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise TypeError(f"{cls.__name__}() has no argument {name!r}{hint}")
        return super().__new__(cls)
