"""State from one format to another, by name and never on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels import ops
from zerokern.kernels.formats import STATE_FORMATS
from zerokern.optim.formats import as_kept, as_saved
from zerokern.zero.kinds import here_of, is_divided, take

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
    state = {key: as_saved(_converted(as_kept(one), state_format)) for key, one in state_dict["state"].items()}
    groups = [{**group, "state_format": state_format} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _converted(entry: dict[str, Any], state_format: str) -> dict[str, Any]:
    divided = [key for key, value in entry.items() if is_divided(value)]
    if divided:
        first = next((key for key in divided if not key.endswith("_scale")), divided[0])
        here, prefix = here_of(entry[first]), (getattr(entry[first], "name", None) or first).removesuffix(first)
        if state_format == "int8" and here.misaligned:
            raise ValueError(got("state_format", state_format, "'fp32' or 'bf16'", here.misaligned))
        local = {**entry, **{key: take(here.of(key), entry[key], f"state {key!r}") for key in divided}}
        found = _converted(local, state_format)
        shown = [key for key in found if key in divided or key.endswith("_scale")]
        return {**found, **{key: here.of(key).show(found[key], name=prefix + key) for key in shown}}
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


def _widened(key: str, entry: dict[str, Any]) -> Tensor:
    value = entry[key].detach().to("cpu")
    if value.dtype in (torch.int8, torch.uint8):
        return ops.decode_int8(value, entry[f"{key}_scale"].detach().to("cpu"), key)
    return value.to(torch.float32)
