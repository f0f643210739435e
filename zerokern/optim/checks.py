"""Checks hyperparameters, parameters and gradients. Errors name the argument, its value, and what is allowed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got, nearest
from zerokern.optim import device
from zerokern.zero.params import sharded_parameter_of
from zerokern.zero.sharded import Sharded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES_TEXT = "torch.float32, torch.bfloat16 or torch.float16"

_REFUSED = {
    "amsgrad": "the running maximum of exp_avg_sq is not kept; torch.optim.AdamW(amsgrad=True) does",
    "foreach": "there is one implementation, and it is fused; leave foreach out",
    "capturable": "a step on CPU tensors is not captured in a CUDA graph; leave capturable out",
    "differentiable": "the update is not recorded by autograd; torch.optim.AdamW(differentiable=True) does",
}


_ELSEWHERE = {  # what other libraries call these options
    "learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas", "wd": "weight_decay",
    "clip_grad_norm": "max_grad_norm", "grad_clip": "max_grad_norm", "offload": "tier",
}  # fmt: skip

_INSTEAD = {"betas": "momentum", "momentum": "betas"}  # what an optimizer has that has not the other


def number(name: str, value: Any, *, below: float = math.inf, positive: bool = False) -> float:
    """Returns `value` as a float in [0, below), or (0, below). A tensor of one element is read now.

    >>> number("lr", torch.tensor(0.5))
    0.5
    """
    if isinstance(value, Tensor) and device.serves(value.device):
        do = "only lr is read where it lies; reading this one would wait for the device"
        raise TypeError(got(name, value, "a number or a tensor on the CPU", do))
    refuse_other_kinds(name, value)
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(got(name, value, "a number or a tensor of one element")) from None
    if not 0.0 <= found < below or (positive and found == 0.0):
        finite = "a finite number > 0" if positive else "a finite number >= 0"
        raise ValueError(got(name, found, finite if below == math.inf else f"a number in [0, {below:g})"))
    return found


def norm_limit(value: Any) -> float | None:
    """Returns a limit of the norm, None for none."""
    refuse_other_kinds("max_grad_norm", value)
    if value is not None and not float(value) > 0.0:
        raise ValueError(got("max_grad_norm", value, "None or a number > 0"))
    return None if value is None else float(value)


def refuse_other_kinds(name: str, value: Any) -> None:
    """Raises for what float() reads and nobody means as a number: text, as a configuration file has it, and booleans.

    >>> refuse_other_kinds("lr", "3e-4")
    Traceback (most recent call last):
    ...
    TypeError: lr='3e-4': must be a number. Pass lr=float('3e-4') if it comes from a file (YAML reads 3e-4 as text)
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # numpy's
    if isinstance(value, str | bytes | bytearray | memoryview) or kind in ("S", "U"):
        do = f"Pass {name}=float({value!r}) if it comes from a file (YAML reads 3e-4 as text)"
        raise TypeError(got(name, value, "a number", do))
    if kind == "c":  # float() would drop a part of it, with a warning
        raise TypeError(got(name, value, "a number", "A complex one has two parts"))
    if isinstance(value, bool) or kind == "b" or getattr(value, "dtype", None) == torch.bool:
        raise TypeError(got(name, value, "a number", "A boolean would count as 0 or 1"))


def rate(name: str, value: Any) -> float | Tensor:
    """Returns what `number` does, but leaves a tensor on a device there: the update reads it without waiting.

    >>> rate("lr", 0.5)
    0.5
    """
    if not isinstance(value, Tensor) or not device.serves(value.device):
        return number(name, value)
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64):
        what = f"{tuple(value.shape)} tensor of {value.dtype}"
        raise TypeError(got(name, what, "a number or a tensor of one element, torch.float32 or torch.float64"))
    return value


def pair(name: str, value: Any) -> tuple[float, float]:
    """Returns two decay rates in [0, 1).

    >>> pair("betas", (0.9, 0.999))
    (0.9, 0.999)
    """
    if isinstance(value, Tensor) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(got(name, value, "two numbers in [0, 1)"))
    return number(f"{name}[0]", value[0], below=1.0), number(f"{name}[1]", value[1], below=1.0)


def flag(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(got(name, value, "False or True"))
    return value


def coefficients(name: str, value: Any) -> tuple[Any, ...]:
    """Returns three finite numbers of any sign, or a tuple of as many triples as were given.

    >>> coefficients("ns_coefficients", (3.4445, -4.775, 2.0315))
    (3.4445, -4.775, 2.0315)
    >>> coefficients("ns_coefficients", [[2, -1.5, 0.5], [1.5, -0.5, 0]])
    ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0))
    """
    if isinstance(value, list | tuple) and value and all(isinstance(one, list | tuple) for one in value):
        return tuple(_triple(f"{name}[{number}]", one) for number, one in enumerate(value))
    return _triple(name, value)


def steps_of_coefficients(group: Mapping[str, Any]) -> None:
    """Raises unless there is one triple of coefficients for each iteration, where each has its own.

    >>> steps_of_coefficients({"ns_coefficients": ((2.0, -1.5, 0.5),), "ns_steps": 5})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ns_steps=5: must be 1, as many as ns_coefficients has triples. ...
    """
    listed, steps = group["ns_coefficients"], group["ns_steps"]
    if isinstance(listed[0], tuple) and len(listed) != steps:
        do = f"Pass ns_steps={len(listed)}, or one triple for all iterations"
        raise ValueError(got("ns_steps", steps, f"{len(listed)}, as many as ns_coefficients has triples", do))


def gram_form(ns_dtype: str | None, *, on_cpu: bool) -> None:
    """Raises what `ns_form="gram"` is refused for.

    >>> gram_form("bf16", on_cpu=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ns_form='gram': must be 'standard' with ns_dtype='bf16': ...
    """
    if not on_cpu:
        what = "'standard' where parameters lie on a device: 'gram' was measured on CPUs alone"
        raise ValueError(got("ns_form", "gram", what))
    if ns_dtype == "bf16":
        what = "'standard' with ns_dtype='bf16': 'gram' needs squares in fp32, and is slower or less exact there"
        raise ValueError(got("ns_form", "gram", what, "Pass ns_dtype='fp32', or leave it out"))


def _triple(name: str, value: Any) -> tuple[float, float, float]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        for each in value:
            refuse_other_kinds(name, each)
        a, b, c = map(float, value)
        if all(map(math.isfinite, (a, b, c))):
            return a, b, c
    raise ValueError(got(name, value, "three finite numbers"))


def ns_steps(name: str, value: Any) -> int:
    """Returns a number of iterations from 0 to 99, which is torch's bound."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 100:
        raise ValueError(got(name, value, "a whole number from 0 to 99"))
    return value


def listed(params: Any) -> list[tuple[str, Any]]:
    """Returns the parameters of a group, a tensor or several, each with the name that it was given, if any.

    >>> listed(torch.ones(1)), listed([("bias", torch.ones(1)), torch.ones(2)])
    ([('', tensor([1.]))], [('bias', tensor([1.])), ('', tensor([1., 1.]))])
    """
    given = [params] if isinstance(params, Tensor) else params
    return [one[:2] if isinstance(one, tuple) else ("", one) for one in given]


def hints(group: dict[str, Any]) -> None:
    """Raises for torch's keywords that would mean something else here; `fused` is what these optimizers are."""
    for name, reason in _REFUSED.items():
        if group.get(name) and not (name == "capturable" and _is_captured(group.get("params", ()))):
            raise ValueError(got(name, group[name], "None or False", reason))


def _is_captured(params: Any) -> bool:
    """Whether steps of these parameters, which lie on one device, can go into a CUDA graph."""
    first = next((one for _, one in listed(params)), None)
    return isinstance(first, Tensor) and device.serves(first.device)


def group(given: Mapping[str, Any], of_the_optimizer: Collection[str], of_groups: Collection[str]) -> None:
    """Raises for options that only the optimizer has, misspelt ones, and parameters that are listed twice."""
    for name in of_the_optimizer:
        if name != "params" and name in given:
            do = f"It is one for all groups: AdamW(groups, {name}=...)"
            raise ValueError(got(f"param_group[{name!r}]", given[name], "left out of groups", do))
    for name in given:
        meant = None if name in of_groups else misspelt(name, of_groups)
        if meant is not None:
            do = "Keys of your own may have any name that is not so close to an option"
            raise ValueError(got(f"param_group[{name!r}]", given[name], f"spelt {meant!r}", do))
    seen: dict[int, int] = {}
    for index, (_, tensor) in enumerate(listed(given["params"])):
        if type(tensor).__module__ == "numpy":  # an array, or the rows or numbers of one
            do = "torch.nn.Parameter(torch.from_numpy(array)) is one over the same memory"
            raise TypeError(got("params", "what numpy made", "torch.nn.Parameters", do))
        if sharded_parameter_of(tensor) is not None:
            do = "A forward was broken off, by Ctrl-C perhaps: run one to its end, and list the parameters then"
            what = f"what stands for a parameter while its module computes, at {index}"
            raise ValueError(got("params", what, "parameters of a model that is not at work", do))
        first = seen.setdefault(id(tensor), index)
        if first != index:
            what = f"the same parameter at {first} and {index}"
            raise ValueError(got("params", what, "each parameter once", "A tied parameter is passed once"))


def real(params: Sequence[Any], group: int) -> None:
    """Raises for trained parameters that are complex, which no later cast makes real.

    >>> real([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0)
    Traceback (most recent call last):
    ...
    TypeError: param_groups[0]['params'][0].dtype=torch.complex64: must be torch.float32, torch.bfloat16 or \
torch.float16. Train torch.view_as_real(...) of it, a real parameter with a last dimension of 2
    """
    for index, (said, tensor) in enumerate(listed(params)):
        if isinstance(tensor, Tensor) and tensor.is_complex() and tensor.requires_grad:
            name = repr(said) if said else f"param_groups[{group}]['params'][{index}]"
            do = "Train torch.view_as_real(...) of it, a real parameter with a last dimension of 2"
            raise TypeError(got(f"{name}.dtype", tensor.dtype, DTYPES_TEXT, do))


def remainders(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises for a master format that no parameter can have: those of 16 bits alone keep a remainder.

    >>> remainders([{"params": [torch.ones(2)], "master_format": "split8"}])
    Traceback (most recent call last):
    ...
    ValueError: master_format='split8': must be None or 'fp32' where all parameters are torch.float32. They are exact \
without a remainder; model.bfloat16(), or mp_policy= of zk.shard, makes parameters that keep one
    """
    asked = [group for group in groups if group["master_format"] in ("split16", "split8") and group["params"]]
    if asked and all(param.dtype is torch.float32 for group in asked for param in group["params"]):
        do = (
            "They are exact without a remainder; model.bfloat16(), or mp_policy= of zk.shard, makes parameters that "
            "keep one"
        )
        allowed = "None or 'fp32' where all parameters are torch.float32"
        raise ValueError(got("master_format", asked[0]["master_format"], allowed, do))


def misspelt(name: str, options: Collection[str]) -> str | None:
    """Returns the option that a name misspells; None for keys of frameworks, such as "initial_lr" and "max_momentum".

    >>> misspelt("state_fmt", ["lr", "state_format"]), misspelt("max_momentum", ["momentum"])
    ('state_format', None)
    >>> misspelt("learning_rate", ["lr", "betas"])
    'lr'
    """
    if _ELSEWHERE.get(name) in options:
        return _ELSEWHERE[name]
    option = nearest(name, options, cutoff=0.75)
    return option if option and f"_{option}_" not in f"_{name}_" else None


def parameter(name: str, param: Tensor, other: str, device_of_other: torch.device) -> None:
    """Raises if kernels cannot update the parameter in place. `other`: the name of another parameter."""
    plain_dispatch = torch.Tensor.__torch_dispatch__
    if type(param).__torch_dispatch__ is not plain_dispatch:
        _refuse_unknown_shard(name, param)
        do = "pass the plain tensor it wraps"
        raise TypeError(got(name, type(param).__name__, "torch.Tensor or torch.nn.Parameter", do))
    if torch.nn.parameter.is_lazy(param):
        raise TypeError(got(name, type(param).__name__, "an initialised parameter", "run a forward pass first"))
    if param.dtype not in DTYPES:
        raise TypeError(got(f"{name}.dtype", param.dtype, DTYPES_TEXT))
    if param.is_meta:
        do = (
            "It has no values yet: construct the model by zk.build(fn, ...), or materialize it before the optimizer "
            'is made, by model.to_empty(device="cpu") and loading its weights'
        )
        raise ValueError(got(f"{name}.device", param.device, "cpu or cuda", do))
    if param.device.type != "cpu" and not device.serves(param.device):
        raise ValueError(got(f"{name}.device", param.device, "cpu or cuda", "move the model there"))
    if param.device != device_of_other:
        do = "one optimizer for the parameters of each device"
        raise ValueError(got(f"{name}.device", param.device, f"{device_of_other}, where {other} is", do))
    if param.layout is not torch.strided:
        raise TypeError(got(f"{name}.layout", param.layout, "torch.strided"))
    if not param.is_contiguous():
        do = f"{name}.data = {name}.data.contiguous()"
        raise ValueError(got(f"{name}.stride()", tuple(param.stride()), "a contiguous parameter", do))
    if param.is_neg():
        do = f"{name}.data = {name}.data.resolve_neg()"
        raise ValueError(got(name, "a lazily negated view", "a parameter whose memory holds its values", do))
    if param.is_inference():
        raise ValueError(got(name, "an inference tensor", "a parameter made outside of torch.inference_mode()"))


def gradient(name: str, param: Tensor, grad: Tensor, *, away: bool = False) -> None:
    """Raises unless a gradient is dense, contiguous and real, and has its parameter's shape and device.

    `away`: its memory was given back, for its values are in host memory.
    """
    name = f"{name}.grad"
    _refuse_unknown_shard(name, grad)
    if grad.layout is not torch.strided:
        raise TypeError(got(f"{name}.layout", grad.layout, "torch.strided", "sparse gradients: use grad.to_dense()"))
    if grad.dtype not in DTYPES:
        raise TypeError(got(f"{name}.dtype", grad.dtype, DTYPES_TEXT))
    if grad.device != param.device:
        raise ValueError(got(f"{name}.device", grad.device, f"{param.device}, the parameter's"))
    if grad.shape != param.shape:
        raise ValueError(got(f"{name}.shape", tuple(grad.shape), f"{tuple(param.shape)}, the parameter's"))
    if not grad.is_contiguous():
        do = f"{name} = {name}.contiguous()"
        raise ValueError(got(f"{name}.stride()", tuple(grad.stride()), "a contiguous gradient", do))
    if not away:
        memory(name, grad)


def _refuse_unknown_shard(name: str, tensor: Tensor) -> None:
    """Raises for what is shown of a sharded parameter: who knows its shard is given what is here of it instead."""
    if isinstance(tensor, Sharded):
        raise StateError(
            f"{name} is {tensor!r}, and the parameter has no shard any more: its attribute _zk_shard was removed, or "
            "the model that zk.shard made is gone. Keep the model, and the attributes of its parameters"
        )


def memory(name: str, tensor: Tensor) -> None:
    """Raises for a tensor that has elements and no memory: its storage was resized to nothing."""
    if tensor.numel() and not tensor.data_ptr():
        do = "its storage is empty; give it back before step(), or leave it to zk.shard(stage=3) or FSDP2"
        raise TypeError(got(name, type(tensor).__name__, "a tensor with memory of its own", do))


def overlap(name: Callable[[int], str], tensors: Sequence[Tensor], pointers: Sequence[int]) -> None:
    """Raises for parameters that share memory: their updates would race. `name`: of the tensor at a place."""
    last, end = -1, 0
    for pointer, nbytes, index in sorted((pointers[i], one.nbytes, i) for i, one in enumerate(tensors)):
        if pointer < end:
            what = f"{name(index)} overlaps {name(last)}"
            raise ValueError(got("params", what, "parameters with memory of their own", "pass a tied parameter once"))
        if nbytes:
            last, end = index, pointer + nbytes


def spelling(kind: type, named: Collection[str]) -> None:
    """Checks the names of an optimizer's arguments before Python does, and suggests the right one.

    >>> import torch, zerokern as zk
    >>> zk.AdamW([torch.nn.Parameter(torch.ones(2))], state="int8")
    Traceback (most recent call last):
    ...
    TypeError: AdamW() has no argument 'state'; did you mean 'state_format'?
    """

    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    open_ended = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for name in () if open_ended else [name for name in named if name not in known]:
        longer = [one for one in known if one.startswith(f"{name}_")]
        meant = longer[0] if len(longer) == 1 else misspelt(name, known)
        hint = f"; did you mean {meant!r}?" if meant else ""
        if not meant and _INSTEAD.get(name) in known:
            hint = f"; it has {_INSTEAD[name]!r}"
        raise TypeError(f"{kind.__name__}() has no argument {name!r}{hint}")
