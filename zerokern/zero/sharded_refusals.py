"""What a sharded tensor cannot do, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__all__ = ["BELOW_DISPATCH", "ShardedUseError", "advice_for", "refuse"]


class ShardedUseError(TypeError):
    """A sharded tensor was used for what needs the elements of other ranks; nothing was computed or written.

    >>> issubclass(ShardedUseError, TypeError)
    True
    """


def refuse(op: str, tensor: Any, topic: str, detail: str = "") -> NoReturn:
    """Raises: which op, which tensor, what it has here, and what to do.

    >>> from zerokern.zero.sharded import Sharded
    >>> refuse("aten.sum", Sharded(torch.ones(2), torch.Size([4]), 0, name="bias"), "whole")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.zero.sharded_refusals.ShardedUseError: aten.sum needs elements of other ranks: Sharded(parameter 'bias'...
    """
    says, advice = TOPICS[topic]
    whole = WHOLE[tensor.kind]
    raise ShardedUseError(f"{op} {says}: {tensor!r}{detail}. {advice.format(whole=whole)}")


def advice_for(name: str, random: bool) -> str:
    """The topic of an op that has no rule, by its name.

    >>> advice_for("_foreach_norm", False), advice_for("normal_", True), advice_for("mm", False)
    ('norm', 'random', 'whole')
    """
    if "norm" in name.split("_") or name in ("linalg_vector_norm", "_foreach_powsum"):
        return "norm"
    if name.startswith("_fused_"):
        return "optimizer"
    return "random" if random else "whole"


WHOLE = {
    "parameter": "`with zk.gathered(model):` holds full parameters for a while (write=True keeps what is written)",
    "gradient": "`.local` is this rank's part, and zk.clip_grad_norm_ knows the norm of all parts",
    "state": "`.local` is this rank's part",
}

NEEDS = "needs elements of other ranks"

TOPICS = {
    "whole": (NEEDS, "{whole}; element-wise ops with numbers and tensors sharded alike need no other rank."),
    "alike": (
        "got a tensor that is not sharded alike",
        "Allowed beside it: numbers, 0-dim tensors, full tensors of its shape, tensors with the same elements here. "
        "{whole}.",
    ),
    "norm": (NEEDS, "zk.clip_grad_norm_(model, max_norm) clips and returns the norm over all ranks. {whole}."),
    "random": ("would draw other numbers on each rank", "Draw before zk.shard, or: {whole}."),
    "optimizer": (
        "is a torch optimizer's kernel for whole tensors",
        "Build zk.AdamW on these parameters, or a torch optimizer on zk.shards(model).",
    ),
    "device": ("would move one rank's part", "Move the model before zk.shard; .local can be copied anywhere."),
    "values": (NEEDS, "{whole}."),
    "memory": ("needs all elements in memory here", "{whole}."),
    "copy": ("would copy one rank's part", "Copy the model before zk.shard, or: {whole}."),
    "save": (
        "would hold one rank's part",
        "zk.save(path, model, opt) saves all parts, and model.state_dict() within `with zk.gathered(model):` is whole; "
        "`.local`, `.start`, `.shape` describe this part.",
    ),
    "owner": ("would hold one rank's part", "Copy opt.state_dict(); zk.save(path, model, opt) saves all parts."),
    "rebind": (
        "would give it other memory",
        "Write in place, with `p.data.copy_(tensor)`; change device or dtype before zk.shard.",
    ),
    "swap": (
        "would swap one rank's part away",
        "Load with torch.__future__.set_swap_module_params_on_conversion(False).",
    ),
    "hook": (
        "would never run",
        "At stage 3 autograd meets gathered parameters only: use stage 2 or less, or a module's full backward hook.",
    ),
    "autograd": (
        "meets gathered parameters only",
        "Call loss.backward() and read p.grad, or use stage 2 or less.",
    ),
}


def below_dispatch() -> dict[Callable, tuple[str, str]]:
    """Functions that reach for memory, or for autograd's graph, without an op that could be refused.

    Those of topic "values" take nothing with them, so that a gathered tensor can answer; what the others take would
    outlive it.
    """
    topics = dict.fromkeys(MEMORY_METHODS.split(), "memory") | dict.fromkeys(VALUE_METHODS.split(), "values")
    topics |= {"register_hook": "hook", "register_post_accumulate_grad_hook": "hook", "backward": "autograd"}
    topics |= {"module_load": "swap"}
    methods = {name: getattr(torch.Tensor, name, None) for name in topics}
    table = {method: (f"Tensor.{name}", topics[name]) for name, method in methods.items() if method is not None}
    array_interface: Any = torch.Tensor.__cuda_array_interface__
    table[array_interface.__get__] = ("Tensor.__cuda_array_interface__", "memory")
    return table | {torch.autograd.grad: ("torch.autograd.grad", "autograd")}


MEMORY_METHODS = (
    "data_ptr const_data_ptr storage untyped_storage _typed_storage share_memory_ numpy __array__ __dlpack__ "
    "apply_ map_ map2_"
)
VALUE_METHODS = "item tolist __bool__ __float__ __int__ __index__ __complex__ __iter__ __reversed__ __contains__"
BELOW_DISPATCH = below_dispatch()
