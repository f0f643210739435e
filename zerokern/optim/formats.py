"""Says which tensors a parameter's state consists of, for each algorithm, state format and master format.

Nothing converts state implicitly: `convert_state` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import got, one_of
from zerokern.core.units import BLOCK, NS_FORMS, master_of, state_tensors
from zerokern.io.pieces import Width
from zerokern.kernels import decode_int8, encode_int8, join, split
from zerokern.kernels.formats import CODES as CODED
from zerokern.kernels.formats import MASTER_FORMATS, STATE_DTYPES, STATE_FORMATS, blocks
from zerokern.kernels.rules import RULES
from zerokern.memory import Wanted
from zerokern.optim import checks
from zerokern.zero.kinds import here_of, is_divided, take
from zerokern.zero.units import check_split

# bytes per bf16 parameter: values, split8, int8 moments, gradient, scales
_SMALLEST = 2 + 1 + 1 + 1 + 2 + 2 * 4 / 128
TAKES_LESS = (
    f'state_format="int8" with master_format="split8" takes {_SMALLEST:.1f} bytes per bf16 parameter; zk.shard '
    'shards it from stage=1 on; tier=zk.Nvme(path) keeps state on disk; zk.plan(..., tier="cpu") '
    "says beforehand what fits"
)
ON_DISK = "on_disk"  # the key in an entry of what stands for the tensors that lie on disk
CODES = ".codes"  # in a state_dict: after the name of a moment that is codes, which need their scales
ADJUSTMENTS = (None, "original", "match_rms_adamw")  # of a learning rate to the shape of a matrix
NS_DTYPES = (None, "bf16", "fp32")  # that matrices are orthogonalized in
_OF_MUON = "ns_steps"  # in the groups of an optimizer whose momentum_buffer may be codes
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "lr": checks.rate,
    "betas": checks.pair,
    **dict.fromkeys(("nesterov", "maximize", "decoupled_weight_decay"), checks.flag),
    "ns_coefficients": checks.coefficients,
    "ns_steps": checks.ns_steps,
    "adjust_lr_fn": partial(one_of, allowed=ADJUSTMENTS),
    "ns_dtype": partial(one_of, allowed=NS_DTYPES),
    "ns_form": partial(one_of, allowed=NS_FORMS),
}
_OF_TORCH = {"beta1": "betas", "beta2": "betas", "decoupled": "decoupled_weight_decay"}  # settings by torch's names
_OF_STEPS = ("step", "first_step")  # hyperparameters of an update that no group says
Group = dict[str, Any]
FormatKey = tuple[bool, str, str | None, int | None, int]


@dataclass(frozen=True)
class Slot:
    """One tensor of a parameter's state."""

    key: str
    dtype: torch.dtype
    extent: str  # "scalar", "param" or "blocks"
    column: str  # of the update table; "" for the step counter

    def shape(self, param: Tensor) -> torch.Size:
        if self.extent == "param":
            return param.shape
        return torch.Size([] if self.extent == "scalar" else [blocks(param.numel())])

    def wanted(self, param: Tensor) -> Wanted:
        """Returns what a tier is asked for."""
        return Wanted(self.key, self.shape(param), self.dtype)


def formats_of(group: Group) -> dict[str, Any]:
    """Returns the formats of a group by name, and of how many matrices its parameters consist, if it says so."""
    names = ("state_format", "master_format", "stochastic_seed", "split")
    return {name: group[name] for name in names if name != "split" or name in group}


@dataclass(frozen=True)
class Algorithm:
    """Describes an update rule by what differs between them."""

    name: str  # of its rule, whose hyperparameters and moments it has
    counts_steps: bool
    others: tuple[str, ...] = ()  # settings of a group, that the update reads beside the rule's hyperparameters
    refuse: Callable[[Group], None] | None = None  # settings that do not go together
    starts_from_gradient: bool = False  # the moment of the first step is the gradient itself
    begins_by: str = ""  # the setting that moments begin with; else they begin with zero
    fixed: tuple[tuple[str, Any], ...] = ()  # of each group, whatever a checkpoint says
    whole: bool = False  # parameters are updated as whole matrices

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Settings of a group, by torch's names, that the update reads."""
        named = [_OF_TORCH.get(name, name) for name in RULES[self.name].hyper if name not in _OF_STEPS]
        return tuple(dict.fromkeys([*named, *self.others]))

    @cached_property
    def moments(self) -> tuple[tuple[str, str], ...]:
        """The keys of state that are moments, and the columns of the update table that point at them."""
        found = tuple(zip(RULES[self.name].moments.values(), CODED, strict=False))
        for key, column in found:
            if _columns()[key] != column:  # a state_dict says keys alone, by which codes of 8 bits are read
                do = f"The {key!r} of other rules is kept otherwise"
                raise ValueError(got(f"moments of the rule {self.name!r}", key, "another name", do))
        return found

    @property
    def optional(self) -> frozenset[str]:
        """The keys of state that need not be there before the first step that uses them."""
        return frozenset(key for key, _ in self.moments if self.starts_from_gradient)

    def checked(self, group: Group) -> Group:
        """Returns a group's hyperparameters as `UpdateTable.set_group` names them, after checking them."""
        checks.hints(group)
        check_formats(self, group)
        self.first_moment(group)
        found = {name: _CHECKS.get(name, checks.number)(name, group[name]) for name in self.settings}
        if self.refuse is not None:
            self.refuse({**found, "params": group["params"]})
        if "betas" in found:
            found["beta1"], found["beta2"] = found.pop("betas")
        if "decoupled_weight_decay" in found:
            found["decoupled"] = found.pop("decoupled_weight_decay")
        return found

    def options(self, group: Group, checked: Group, names: Iterable[str]) -> Group:
        """Returns all options of a group, hyperparameters as they were checked."""
        found = {name: group.get(name) for name in names if name not in self.settings}
        return found | ({self.begins_by: self.first_moment(group)} if self.begins_by else {}) | checked

    def first_moment(self, group: Group) -> float:
        """Returns the first value of the group's moments."""
        return checks.number(self.begins_by, group[self.begins_by]) if self.begins_by else 0.0

    def key(self, group: Group) -> FormatKey:
        """Returns the settings of a group that decide the layouts of its parameters, and what their matrices are."""
        by = RULES[self.name].moments_by
        has_moments = not by or float(group[by]) != 0.0
        state_format, master_format, seed, *split = formats_of(group).values()
        matrices = check_split(split[0]) if self.whole else 0
        return has_moments, state_format, master_format, seed, matrices

    def layout(self, group: Group, dtype: torch.dtype, holds_moments: bool = False) -> Layout:
        """Returns the layout of a parameter of this group."""
        needs_moments, state_format, master_format, seed, matrices = self.key(group)
        has_moments = needs_moments or holds_moments
        return layout_of(self, dtype, has_moments, state_format, master_format, seed is not None, matrices)


@dataclass(frozen=True)
class Layout:
    """Lists the tensors of one parameter's state. `matrices`: of so many it is made, each of which is updated whole; 0:
    elements are updated by themselves."""

    algorithm: str
    param_dtype: torch.dtype
    state_format: str
    master_format: str  # "own": an fp32 parameter is its own master
    slots: tuple[Slot, ...]
    matrices: int = 0

    def table_formats(self, stochastic_seed: int | None) -> dict[str, Any]:
        """Returns the formats as `UpdateTable.set_group` names them. Only parameters without a master are rounded
        stochastically."""
        publishes = self.master_format == "fp32"
        return {
            "stochastic_seed": stochastic_seed if self.master_format == "none" else None,
            "algorithm": self.algorithm,
            "param_dtype": self.param_dtype,
            "master_format": "fp32" if self.master_format == "own" else self.master_format,
            "state_format": self.state_format,
            "out_dtype": self.param_dtype if publishes else None,
        }

    @cached_property
    def columns(self) -> tuple[Slot, ...]:
        """The tensors that the update reads and writes."""
        return tuple(slot for slot in self.slots if slot.column)

    @cached_property
    def widths(self) -> tuple[Width, ...]:
        """How wide these tensors are, where state is moved in pieces."""
        return widths_of(self.columns)

    @cached_property
    def counter(self) -> tuple[Slot, ...]:
        """The step counter, if there is one."""
        return tuple(slot for slot in self.slots if not slot.column)

    def nbytes_of(self, param: Tensor) -> int:
        """Returns the bytes of what the update reads and writes of a parameter's state."""
        return sum(slot.wanted(param).nbytes for slot in self.columns)

    @property
    def param_column(self) -> str:
        """The column that points at the parameter itself."""
        return {"own": "master", "fp32": "out"}.get(self.master_format, "param")


def widths_of(slots: Sequence[Slot]) -> tuple[Width, ...]:
    """Returns how wide tensors of state are, where they are moved in pieces."""
    return tuple(Width(slot.dtype.itemsize, BLOCK if slot.extent == "blocks" else 1) for slot in slots)


def check_formats(algorithm: Algorithm, group: dict[str, Any]) -> None:
    """Raises if a format does not exist, before any parameter is read."""
    state_format, master_format = group["state_format"], group["master_format"]
    rule = RULES[algorithm.name]
    one_of("state_format", state_format, rule.state_formats, advice=rule.no_int8 if state_format == "int8" else "")
    one_of("master_format", master_format, (None, *MASTER_FORMATS))
    seed = group["stochastic_seed"]
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(got("stochastic_seed", seed, "None or an integer in [0, 2**64)"))
    if master_format != "none":
        do = 'pass master_format="none", the only one that rounds'
        raise ValueError(got("stochastic_seed", seed, f"None with master_format={master_format!r}", do))


@lru_cache(maxsize=256)
def layout_of(
    algorithm: Algorithm,
    dtype: torch.dtype,
    has_moments: bool,
    state_format: str,
    master_format: str | None,
    counted: bool,
    matrices: int = 0,
) -> Layout:
    """Returns the layout of a parameter of this dtype. An fp32 parameter is its own master in any `master_format`.

    >>> from zerokern.optim.optimizers import Adam
    >>> [slot.key for slot in layout_of(Adam._algorithm, torch.bfloat16, True, "fp32", None, False).slots]
    ['step', 'exp_avg', 'exp_avg_sq', 'remainder']
    """
    name = str(dtype).removeprefix("torch.")
    slots = [Slot("step", torch.float32, "scalar", "")] if algorithm.counts_steps or counted else []
    columns = dict(algorithm.moments) if has_moments else {}
    for one in state_tensors(columns, name, state_format, master_format):
        column = columns.get(one.role, one.role)
        if one.is_scale:
            slots.append(Slot(one.key, torch.float32, "blocks", f"{column}_scale"))
        else:
            dtypes = {**STATE_DTYPES, "int8": CODED.get(column, torch.int8), "int16": torch.int16}
            slots.append(Slot(one.key, dtypes[one.format], "param", column))
    formats = state_format if has_moments else "none", master_of(name, master_format)
    return Layout(algorithm.name, dtype, *formats, tuple(slots), matrices)


def exact_of(param: Tensor, kept: Tensor) -> Tensor:
    """Returns the fp32 values that a span began with, from the remainders or values that are kept of them.

    >>> exact_of(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 1], dtype=torch.int16))
    tensor([1.0000, 1.0000])
    """
    return kept if kept.dtype is torch.float32 else join(param.detach(), kept)


def begin_master(param: Tensor, slot: Slot, kept: Tensor, exact: Tensor | None) -> None:
    """Writes first values to a new master, or to a remainder that is zero.

    `exact`: the fp32 values that the parameter was rounded from. They are used where they still round to it. New values
    may lie in host memory while the parameter is on a device.
    """
    if exact is None:
        if slot.key == "master":
            kept.copy_(param)
        return
    if kept.device != param.device:
        near = param.detach().to(kept.device)
        begin_master(near, slot, kept, exact.to(kept.device))
        param.detach().copy_(near)
        return
    param, exact = param.detach(), exact.view_as(param)
    if slot.key == "master":
        kept.copy_(torch.where(_rounds_to(param, exact), exact, param.float()))
    elif slot.dtype is torch.int16:
        kept.copy_(torch.where(_rounds_to(param, exact), split(exact, "split16")[1], 0))
    else:  # rounded to 24 bits first, a value may lie in the upper half of the next bf16
        high, remainder = split(exact, "split8")
        same = _rounds_to(param, exact) | (high.view(torch.int16) == param.view(torch.int16))
        kept.copy_(torch.where(same, remainder, 0))
        param.copy_(torch.where(same, high, param))


def _rounds_to(param: Tensor, exact: Tensor) -> Tensor:
    """Returns where a parameter holds what zk.shard rounds a value to."""
    rounded = split(exact, "split16")[0] if param.dtype is torch.bfloat16 else exact.to(param.dtype)
    return rounded.view(torch.int16) == param.view(torch.int16)


def as_saved(entry: Any) -> Any:
    """Renames int8 codes for a state_dict: torch's optimizers, which would take them for averages, refuse it then.

    >>> list(as_saved({"step": 1, "exp_avg": 2, "exp_avg_scale": 3}))
    ['step', 'exp_avg.codes', 'exp_avg_scale']
    """
    if not isinstance(entry, dict):
        return entry
    return {f"{key}{CODES}" if f"{key}_scale" in entry else key: value for key, value in entry.items()}


def as_kept(entry: Any) -> Any:
    """Reverses `as_saved`. State_dicts of earlier versions have the names that are kept.

    >>> list(as_kept({"step": 1, "exp_avg.codes": 2, "exp_avg_scale": 3}))
    ['step', 'exp_avg', 'exp_avg_scale']
    """
    if not isinstance(entry, dict):
        return entry
    plain = {key: _from_nested(value) for key, value in entry.items()}
    return {key.removesuffix(CODES) if isinstance(key, str) else key: value for key, value in plain.items()}


def _from_nested(value: Any) -> Any:
    """Returns a tensor from a dict of one: unflattening torch's state_dicts splits names at dots."""
    return value[CODES[1:]] if isinstance(value, dict) and value.keys() == {CODES[1:]} else value


def format_name(dtype: torch.dtype) -> str:
    """Returns the state format that keeps moments in this dtype, for messages."""
    names = {kept: name for name, kept in STATE_DTYPES.items()} | dict.fromkeys(CODED.values(), "int8")
    return names.get(dtype, str(dtype))


def convert_state(state_dict: dict[str, Any], *, state_format: str) -> dict[str, Any]:
    """Copies an optimizer's state_dict with its averages in another format. Masters and step counts are kept.

    It takes state_dicts of zerokern's optimizers and of torch.optim's. Going from fp32 to "bf16" or "int8" rounds.

    >>> from zerokern.optim import AdamW
    >>> weight = torch.nn.Parameter(torch.ones(4)); weight.grad = torch.ones(4)
    >>> exact, small = zk.AdamW([weight]), zk.AdamW([weight], state_format="int8")
    >>> exact.step()
    >>> small.load_state_dict(zk.convert_state(exact.state_dict(), state_format="int8"))
    >>> small.state[weight]["exp_avg"]
    tensor([127, 127, 127, 127], dtype=torch.int8)
    """
    one_of("state_format", state_format, STATE_FORMATS)
    named = {key for entry in state_dict["state"].values() for key in as_kept(entry)}
    of_muon = all(_OF_MUON in group for group in state_dict["param_groups"])
    if state_format == "int8" and "momentum_buffer" in named and not of_muon:
        raise ValueError(got("state_format", state_format, "'fp32' or 'bf16' for 'momentum_buffer' of SGD"))
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
        if key in _columns() and isinstance(value, Tensor):
            dtype = _codes_of(key) if state_format == "int8" else STATE_DTYPES[state_format]
            if dtype is None:
                raise ValueError(got("state_format", state_format, f"'fp32' or 'bf16' for {key!r}"))
            mine = [(name, entry.get(name)) for name in (key, f"{key}_scale")]
            values = {name: one.detach().to("cpu") for name, one in mine if one is not None}
            made.update(convert_moment(key, values, dtype))
        elif not key.endswith("_scale"):
            made[key] = value
    return made


def is_coded(key: str, dtype: torch.dtype) -> bool:
    """Returns whether a moment of this dtype is int8 codes, which need their scales.

    >>> is_coded("exp_avg", torch.int8), is_coded("exp_avg", torch.float32)
    (True, False)
    """
    return _codes_of(key) is dtype


def _columns() -> dict[str, str]:
    """Returns by the keys of moments the columns that point at them, of all rules that there are; the first counts."""
    rules = reversed(RULES.values())
    return {key: name for rule in rules for key, name in zip(rule.moments.values(), CODED, strict=False)}


def _codes_of(key: str) -> torch.dtype | None:
    """Returns the dtype of a moment's codes, if it may have some."""
    coded = any(key in rule.moments.values() for rule in RULES.values() if not rule.no_int8)
    return CODED[_columns()[key]] if coded else None


def convert_moment(key: str, values: Mapping[str, Tensor], target: torch.dtype) -> dict[str, Tensor]:
    """Returns a moment in another dtype, together with its scales if it becomes int8 codes.

    >>> made = convert_moment("exp_avg", {"exp_avg": torch.ones(3)}, torch.int8)
    >>> made["exp_avg"].tolist(), convert_moment("exp_avg", made, torch.float32)["exp_avg"].tolist()
    ([127, 127, 127], [1.0, 1.0, 1.0])
    """
    value = values[key]
    if is_coded(key, value.dtype):
        value = decode_int8(value, values[f"{key}_scale"], _columns()[key])
    if not is_coded(key, target):
        return {key: value.to(target)}
    codes, scale = encode_int8(value.float().contiguous(), _columns()[key])
    return {key: codes, f"{key}_scale": scale}
