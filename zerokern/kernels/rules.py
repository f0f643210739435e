"""The update rules: one record of each one's hyperparameters and moments. Ops, tables and optimizers derive from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_double
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from operator import itemgetter
from typing import Any

import torch

from zerokern.core.errors import got
from zerokern.core.native import NativeGroup
from zerokern.kernels import checks
from zerokern.kernels.formats import BLOCK, CODES, FLAGS, REMAINDERS, STATE_DTYPES, STATE_FORMATS

__all__ = ["NUMBERS", "RULES", "Rule", "bytes_per_parameter", "hyper_of", "words_of"]

NUMBERS = tuple(name for name, kind in NativeGroup._fields_ if kind is c_double)
"""the hyperparameters that are numbers, in the order of the C ABI and of what the host sends to a device"""
_FROM_0 = partial(checks.number, least=0.0)


def _step(name: str, value: Any) -> int:
    if checks.count(name, value, 1) >= 1 << 63:
        raise ValueError(got(name, value, "a whole number from 1 to 2 ** 63 - 1"))
    return int(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "momentum", "lr_decay"), _FROM_0),
    **dict.fromkeys(("beta1", "beta2"), checks.fraction),
    **dict.fromkeys(("decoupled", "maximize", "nesterov", "first_step"), checks.flag),
    "dampening": checks.number,
    "step": _step,
}


def hyper_of(names: str) -> dict[str, Callable[[str, Any], Any]]:
    """Returns these hyperparameters with what checks them.

    >>> list(hyper_of("lr momentum"))
    ['lr', 'momentum']
    """
    return {name: _CHECKS[name] for name in names.split()}


@dataclass(frozen=True)
class Rule:
    """Describes an update rule by all that is not its arithmetic.

    A rule of one's own has a `step`, a function that changes fp32 tensors in place: the parameter, its gradient, the
    moments in their order; hyperparameters come by name. It runs in host memory, in all formats and tiers, and at all
    stages and schedules. `RULES[name] = Rule(...)` makes it known, and an `optim.formats.Algorithm` of that name is the
    rest of its optimizer.

    >>> def signs(p, g, exp_avg, *, lr, momentum):
    ...     p -= lr * exp_avg.mul_(momentum).add_(g).sign()
    >>> Rule(0, hyper_of("lr momentum"), {"exp_avg": "exp_avg"}, step=signs).state_formats
    ('fp32', 'bf16', 'int8')
    """

    number: int  # of zk_algorithm; 0: it has no kernels
    hyper: Mapping[str, Callable[[str, Any], Any]]  # by name, what checks it
    moments: Mapping[str, str]  # the arguments of its op, and how optimizers call them in their state
    moments_by: str = ""  # the hyperparameter without which there are no moments
    no_int8: str = ""  # why moments cannot be codes of 8 bits
    step: Callable[..., None] | None = None  # of a rule without kernels: its arithmetic (`reference_table`)
    updates: str = "param"  # or "out": the matrix that is to be orthogonalized, with sums of its squares

    def __post_init__(self) -> None:
        if len(self.moments) > len(CODES):
            raise ValueError(got("moments", list(self.moments), f"at most {len(CODES)}, as a table has columns"))

    @cached_property
    def columns(self) -> dict[str, str]:
        """By the arguments of the op, those columns of a table that have names of their own."""
        of_sums = {"sums": "exp_avg_sq"} if self.updates == "out" else {}
        return {**dict(zip(self.moments, CODES, strict=False)), **of_sums}

    @cached_property
    def state_formats(self) -> tuple[str, ...]:
        """The formats that its moments may have."""
        return tuple(name for name in STATE_FORMATS if name != "int8" or not self.no_int8)

    @cached_property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that its moments may have."""
        return tuple(STATE_DTYPES[name] for name in self.state_formats)


RULES = {
    "adam": Rule(
        1,
        hyper_of("lr beta1 beta2 eps weight_decay decoupled step maximize"),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    "lion": Rule(2, hyper_of("lr beta1 beta2 weight_decay step maximize"), {"exp_avg": "exp_avg"}),
    "adagrad": Rule(
        3,
        hyper_of("lr lr_decay eps weight_decay step maximize"),
        {"state_sum": "sum"},
        no_int8="its sum only grows, and what is added to it would soon be less than a step of 8 bits; 'bf16' takes "
        "half of fp32's bytes",
    ),
    "sgd": Rule(
        4,
        hyper_of("lr momentum dampening weight_decay nesterov first_step step maximize"),
        {"momentum_buffer": "momentum_buffer"},
        moments_by="momentum",
        no_int8="SGD subtracts momentum_buffer as it is, so that the rounding of 8 bits would go into the parameter; "
        "'bf16' takes half of fp32's bytes",
    ),
    "muon": Rule(
        5,
        hyper_of("momentum nesterov maximize") | {"momentum": checks.fraction},
        {"exp_avg": "momentum_buffer"},
        updates="out",
    ),
}
_ABSENT = {**dict.fromkeys([*NUMBERS, *FLAGS], 0.0), "step": 1}
_numbers_of, _flags_of = itemgetter(*NUMBERS), itemgetter(*FLAGS)


def words_of(hyper: Mapping[str, Any], *, random: bool) -> tuple[tuple[float, ...], int, int]:
    """Returns what a table keeps of hyperparameters: `NUMBERS`, 0 where a rule does not have one, flags and the step.

    >>> words_of({"lr": 0.5, "momentum": 0.9, "nesterov": True}, random=True)
    ((0.5, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0), 20, 1)
    """
    words = {**_ABSENT, **hyper, "stochastic": random}
    if len(words) != len(_ABSENT):
        raise TypeError(got("hyperparameters", sorted(words.keys() - _ABSENT), f"some of {', '.join(_ABSENT)}"))
    return _numbers_of(words), sum(compress(FLAGS.values(), _flags_of(words))), words["step"]


def bytes_per_parameter(
    algorithm: str, grad: torch.dtype, master: str, state: str, param: torch.dtype, out: torch.dtype | None = None
) -> float:
    """Bytes that one update must move per parameter, each counted once when read and once when written.

    >>> bytes_per_parameter("adam", torch.bfloat16, "split16", "fp32", torch.bfloat16)
    26.0
    >>> bytes_per_parameter("adam", torch.bfloat16, "split8", "int8", torch.bfloat16)
    12.125
    """
    kept = param.itemsize + (REMAINDERS[master].itemsize if master in REMAINDERS else 0)
    value = 4 if master == "fp32" else kept
    width = STATE_DTYPES[state].itemsize + (4 / BLOCK if state == "int8" else 0) if state != "none" else 0
    return float(grad.itemsize + 2 * value + 2 * width * len(RULES[algorithm].moments) + (out.itemsize if out else 0))
