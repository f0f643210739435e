"""The table of an update rule that is written in Python, for rules without a kernel: the twin of `cpu.UpdateTable`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.cpu import UpdateTable
from zerokern.kernels.formats import CODES, COLUMNS, REMAINDERS, STATE_DTYPES, blocks
from zerokern.kernels.reference import load_grad, load_master, publish, random_of
from zerokern.kernels.reference_codecs import decode_int8, encode_int8
from zerokern.kernels.rules import RULES, Rule

__all__ = ["ReferenceTable", "host_table"]


def host_table(algorithm: str) -> Callable[[int, int], Any]:
    """Returns what makes the tables of a rule in host memory.

    >>> host_table("adam")
    <class 'zerokern.kernels.cpu.UpdateTable'>
    """
    return UpdateTable if RULES[algorithm].step is None else ReferenceTable


class ReferenceTable:
    """Rows and groups of one step of a rule that has a `step`: it is called row by row, with fp32 tensors.

    What rows keep in other formats is decoded before and encoded after it, as kernels do it.
    """

    def __init__(self, nseg: int, ngroups: int) -> None:
        self.nseg, self.ngroups = nseg, ngroups
        self.columns = {name: memoryview(bytearray(8 * max(nseg, 1))).cast("Q")[:nseg] for name in COLUMNS}
        self._groups: list[tuple[Rule, dict[str, Any], int, dict[str, Any]]] = []
        self.begun = self.carried_out = False

    def set_group(self, index: int, hyper: Mapping[str, Any], *, algorithm: str, **formats: Any) -> None:
        """Fills one group, as `UpdateTable.set_group` does."""
        rule = RULES[algorithm]
        mine, step = {name: hyper[name] for name in rule.hyper}, hyper.get("step", 1)  # random bits need it in any case
        self._groups[index : index + 1] = [(rule, mine, step, formats)]

    def run(self, scale: float = 1.0, begin: int = 0, end: int | None = None) -> None:
        """Updates rows `begin` to `end`. `begun` says of a run that raised whether anything may have been written."""
        self.begun = self.carried_out = False
        for row in range(begin, self.nseg if end is None else end):
            self.begun = True
            self._update(row, scale)
        self.carried_out = True

    def _update(self, row: int, scale: float) -> None:
        words = {name: column[row] for name, column in self.columns.items()}
        rule, hyper, step, formats = self._groups[words["group"]]
        numel, master_format, coded = words["numel"], formats["master_format"], formats["state_format"] == "int8"
        own = master_format == "fp32"
        param = _at(words["master" if own else "param"], torch.float32 if own else formats["param_dtype"], numel)
        keeps = master_format in REMAINDERS
        remainder = _at(words["remainder"], REMAINDERS[master_format], numel) if keeps else None
        out = _at(words["out"], formats["out_dtype"], numel) if formats["out_dtype"] else None
        p = load_master(param, remainder, None).clone()
        g = load_grad(_at(words["grad"], formats["grad_dtype"], numel), scale, hyper.get("maximize", False)).clone()
        random = random_of(p, formats["stochastic_seed"], words["key"], step, words["first"])
        moments, kept = [], []
        for column, codes in list(CODES.items())[: len(rule.moments) if formats["state_format"] != "none" else 0]:
            stored = _at(words[column], codes if coded else STATE_DTYPES[formats["state_format"]], numel)
            scales = _at(words[f"{column}_scale"], torch.float32, blocks(numel)) if coded else None
            moments.append(stored.float().clone() if scales is None else decode_int8(stored, scales, column))
            kept.append((column, stored, scales))
        assert rule.step is not None, f"{rule} has kernels"
        rule.step(p, g, *moments, **{name: value for name, value in hyper.items() if name != "maximize"})
        for moment, (column, stored, scales) in zip(moments, kept, strict=True):
            if scales is None:
                stored.copy_(moment)
                continue
            for old, new in zip((stored, scales), encode_int8(moment, column), strict=True):
                old.copy_(new)
        changed = _at(words["changed"], torch.uint8, -(-numel // 8)) if words["changed"] else None
        publish(p, param, remainder, None, out, random, changed)


def _at(address: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Returns the elements at an address."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
