"""State from one format to another, by name and never on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerokern.core.errors import got
from zerokern.kernels import ops
from zerokern.kernels.formats import BLOCK, STATE_FORMATS, blocks
from zerokern.optim.cuts import Cut
from zerokern.zero.sharded import Sharded

_MOMENTS = ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer")
_CODED = ("exp_avg", "exp_avg_sq")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def convert_state(state_dict: dict[str, Any], *, state_format: str) -> dict[str, Any]:
    """A copy of an optimizer's state_dict with its moments in another format; masters and steps stay as they are.

    Takes state_dicts of these optimizers and of torch.optim's. fp32 to "bf16" or "int8" rounds.

    >>> from zerokern.optim import AdamW
    >>> weight = torch.nn.Parameter(torch.ones(4)); weight.grad = torch.ones(4)
    >>> exact, small = AdamW([weight]), AdamW([weight], state_format="int8")
    >>> exact.step()
    >>> small.load_state_dict(convert_state(exact.state_dict(), state_format="int8"))
    >>> small.state[weight]["exp_avg"]
    tensor([127, 127, 127, 127], dtype=torch.int8)
    """
    if state_format not in STATE_FORMATS:
        raise ValueError(got("state_format", state_format, " | ".join(map(repr, STATE_FORMATS))))
    state = {key: _converted(entry, state_format) for key, entry in state_dict["state"].items()}
    groups = [{**group, "state_format": state_format} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _converted(entry: dict[str, Any], state_format: str) -> dict[str, Any]:
    divided = {key: value for key, value in entry.items() if isinstance(value, (DTensor, Sharded))}
    cut = next((Cut(v) for key, v in divided.items() if isinstance(v, DTensor) and not key.endswith("_scale")), None)
    if cut is not None:
        if state_format == "int8" and not cut.aligned:
            raise ValueError(got("state_format", state_format, "'fp32' or 'bf16'", cut.misaligned))
        local = {**entry, **{key: cut.take("state", key, value) for key, value in divided.items()}}
        converted = _converted(local, state_format)
        return {k: cut.show(k, v) if k in divided or k.endswith("_scale") else v for k, v in converted.items()}
    if any(isinstance(value, Sharded) for value in entry.values()):
        local = {key: value.local if isinstance(value, Sharded) else value for key, value in entry.items()}
        return _shown_whole(entry, _converted(local, state_format))
    made: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in _MOMENTS or not isinstance(value, Tensor):
            if not key.endswith("_scale"):
                made[key] = value
        elif state_format != "int8":
            made[key] = _widened(key, entry).to(_DTYPES[state_format])
        elif key in _CODED:
            made[key], made[f"{key}_scale"] = ops.encode_int8(_widened(key, entry).contiguous(), key)
        else:
            raise ValueError(got("state_format", state_format, f"'fp32' or 'bf16' for {key!r}"))
    return made


def _shown_whole(entry: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """This rank's converted spans under the shapes of whole parameters; blocks are counted from their element 0."""
    for key, value in made.items():
        moment = entry[key.removesuffix("_scale")]
        if isinstance(moment, Sharded) and key.endswith("_scale") and key not in entry:
            shape = torch.Size([blocks(moment.shape.numel())])
            name = f"{moment.name}_scale"
            made[key] = Sharded(value, shape, moment.start // BLOCK, name=name, kind="state", group=moment.group)
        elif isinstance(entry.get(key), Sharded):
            made[key] = entry[key].like(value)
    return made


def _widened(key: str, entry: dict[str, Any]) -> Tensor:
    value = entry[key].detach().to("cpu")
    if value.dtype in (torch.int8, torch.uint8):
        return ops.decode_int8(value, entry[f"{key}_scale"].detach().to("cpu"), key)
    return value.to(torch.float32)
