"""Rows and groups of one optimizer step in device memory: the twin of `kernels.cpu.UpdateTable`.

A step is two launches and at most one copy: `prepare` computes every scalar on the device, `update` does all rows that
share formats. What the host sends each time is an order: numbers, and where the gradients are; it is sent again only
when it differs from the last one. Nothing waits for the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels import checks
from zerokern.kernels.formats import BLOCK, POINTERS
from zerokern.kernels.reference_codecs import splitmix64
from zerokern.kernels.rules import NUMBERS, RULES, words_of
from zerokern.kernels.triton import muon as directions
from zerokern.kernels.triton import prepare as preparing
from zerokern.kernels.triton import sumsq as squares
from zerokern.kernels.triton import update as updating
from zerokern.kernels.triton.backend import capturing, check_device, launching
from zerokern.kernels.triton.upload import refresh, tile_map, upload
from zerokern.kernels.triton.variants import Config, Formats

__all__ = ["Control", "DeviceTable"]

_HEADER_WORDS, _GROUP_WORDS = preparing.HEADER_WORDS.value, preparing.GROUP_WORDS.value
_ROW_WORDS = updating.ROW_WORDS.value
_VECTORS = tuple(name for name in POINTERS if not name.endswith("_scale"))  # what rows are read in vectors of
_NUMBERS, _NUMBERS_BITS = (struct.Struct(f"<{len(NUMBERS)}{kind}") for kind in "dQ")  # doubles, as words
_NO_WITNESS = 2**64 - 1
_MOST_STEPS = 2**31 - 1  # `prepare` looks at as many bits of the exponent


@dataclass
class Control:
    """An optimizer's truth on the device: what `prepare` reads and writes beside the table.

    steps, increments: fp32, by parameter: updates made, and what a step that is not skipped adds to them.
    witnesses: for each group of the table a parameter whose count is the group's.
    max_norm, sums: clip to this norm, given sums of squares (float64, added in order); None does not clip.
    grad_scale, found_inf: what torch.amp.GradScaler hands over, fp32 of one element.
    outcome: float64 [4]: the norm before clipping, steps skipped so far, 1 if the last one was, 0.
    """

    steps: Tensor
    increments: Tensor
    witnesses: Sequence[int]
    outcome: Tensor
    max_norm: float | None = None
    sums: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def _bits(number: float) -> int:
    """A double as the word that the device reads it from."""
    return int(struct.unpack("<Q", struct.pack("<d", number))[0])


class _Launches(NamedTuple):
    """The launches that update some rows: for each its formats, its map, how many programs and how many tiles of each;
    and where directions are measured, for each such launch the dtype and the chunks."""

    updates: list[tuple[Formats, Tensor, int, int]]
    measured: list[tuple[torch.dtype, Tensor, int]]


class _Sent(NamedTuple):
    """What the device has: the order, the rows, and by rows [begin, end) their launches."""

    order: Tensor
    rows: Tensor
    launches: dict[tuple[int, int], _Launches]


class DeviceTable:
    """Rows and groups of one optimizer step on one device; `run` launches it.

    >>> from zerokern.kernels.triton.backend import interpreted
    >>> p, g = torch.ones(3), torch.ones(3)
    >>> if interpreted():
    ...     table = DeviceTable(p.device, 1, 1)
    ...     table.set_group(0, {"lr": 0.5}, algorithm="sgd", grad_dtype=torch.float32, param_dtype=torch.float32,
    ...                     master_format="fp32", state_format="none")
    ...     table.set_row(0, group=0, numel=3, master=p.data_ptr(), grad=g.data_ptr())
    ...     table.run()
    """

    def __init__(
        self, device: torch.device, nseg: int, ngroups: int, config: Config | Mapping[Formats, Config] | None = None
    ) -> None:
        check_device(device)
        self.device = device
        self._config = config
        self.nseg = nseg
        self.ngroups = ngroups
        self._rows = array("Q", bytes(8 * nseg * _ROW_WORDS))
        self._order = array("Q", bytes(8 * (_HEADER_WORDS + ngroups * _GROUP_WORDS + nseg)))
        words = memoryview(self._rows)
        self.columns = {name: words[i::_ROW_WORDS] for name, i in updating.WORDS.items()}
        self.columns["grad"] = memoryview(self._order)[_HEADER_WORDS + ngroups * _GROUP_WORDS :]
        self._formats: list[Formats | None] = [None] * ngroups
        self._rates: list[Tensor | None] = [None] * ngroups
        self._sent: _Sent | None = None
        self._known = array("Q")
        self._captured: list[Any] = []
        self.begun = False
        self._constants = torch.empty(ngroups * preparing.CONSTANTS.value, dtype=torch.float32, device=device)
        self._wides = torch.empty(ngroups * preparing.WIDE.value, dtype=torch.float64, device=device)
        self._marks = torch.empty(2 * ngroups, dtype=torch.int64, device=device)
        self._outcome = torch.zeros(4, dtype=torch.float64, device=device)

    def set_group(
        self,
        index: int,
        hyper: Mapping[str, Any],
        *,
        algorithm: str,
        grad_dtype: torch.dtype,
        param_dtype: torch.dtype,
        master_format: str,
        state_format: str,
        out_dtype: torch.dtype | None = None,
        stochastic_seed: int | None = None,
    ) -> None:
        """Fills one group: formats by name, hyperparameters as in ops; `lr` may be a 0-dim tensor on the device."""
        if not RULES[algorithm].number:
            do = "tier='cpu' updates in host memory"
            raise ValueError(got("algorithm", algorithm, "a rule that has kernels, for tensors on a GPU", do))
        random = stochastic_seed is not None
        made = Formats(algorithm, grad_dtype, param_dtype, master_format, state_format, out_dtype, random)
        if made != self._formats[index]:
            self._formats[index] = made
            self._sent = None
        rate = hyper["lr"] if isinstance(hyper.get("lr"), Tensor) else None
        if rate is not None:
            hyper = {**hyper, "lr": 0.0}
            checks.tensor("lr", rate, (torch.float32, torch.float64), 1)
            checks.one_device([("the table", self._constants), ("lr", rate)])
        self._rates[index] = rate
        numbers, flags, step = words_of(hyper, random=random)
        checks.count("step", step, 0)
        if step > _MOST_STEPS:
            raise ValueError(got("step", step, f"whole numbers up to {_MOST_STEPS}"))
        values = {
            **dict(zip(NUMBERS, _NUMBERS_BITS.unpack(_NUMBERS.pack(*numbers)), strict=True)),
            "lr_address": 0 if rate is None else rate.data_ptr(),
            "lr_is_wide": int(rate is not None and rate.dtype == torch.float64),
            "flags": flags,
            "algorithm": RULES[algorithm].number,
            "step": step,
            "witness": _NO_WITNESS,
            "seed": splitmix64((stochastic_seed or 0) & 0xFFFFFFFFFFFFFFFF),
        }
        start = _HEADER_WORDS + index * _GROUP_WORDS
        for name, value in values.items():
            self._order[start + preparing.GROUP[name]] = value

    def set_row(self, index: int, *, group: int, numel: int, **pointers: int) -> None:
        """Fills one row: pointers by the names of the columns, 0 where a format needs none.

        Of what is written into `columns` directly, a run after the first looks at the gradients' addresses alone.
        """
        self.columns["group"][index] = group
        self.columns["numel"][index] = numel
        self._sent = None
        for name, value in pointers.items():
            self.columns[name][index] = value

    def run(
        self,
        scale: float = 1.0,
        control: Control | None = None,
        begin: int = 0,
        end: int | None = None,
        *,
        prepared: bool = False,
    ) -> None:
        """The launches for rows `begin` to `end`, on the current stream. `scale` multiplies gradients. `prepared`: the
        run before, of other rows, was of the same update, and what it has sent and prepared holds for these.

        What a captured run reads is its own, and stays as it is for as long as the table lives. `begun` says of a run
        that raised whether anything had been launched.
        """
        self.begun = False
        outcome = self._outcome if control is None else control.outcome
        if not prepared:
            self._address(scale, control)
        with launching(self.device):
            sent = self._sent if prepared and self._sent is not None else self._send(control)
            mine = begin, self.nseg if end is None else end
            if mine not in sent.launches:
                sent.launches[mine] = self._plan(range(*mine))
            updates, measured = sent.launches[mine]
            self.begun = True
            if not prepared:
                preparing.prepare[(1,)](
                    outcome, self._constants, self._wides, self._marks, sent.order, self.ngroups,
                    num_warps=1, enable_fp_fusion=False,
                )  # fmt: skip
            grads = sent.order[_HEADER_WORDS + self.ngroups * _GROUP_WORDS :]
            for made, tiles, nprograms, each in updates:
                config = self.config_of(made)
                updating.update[(nprograms,)](
                    outcome, self._constants, self._wides, self._marks, sent.rows, grads, tiles, each,
                    **made.constants(config), **made.options(config),
                )  # fmt: skip
            for dtype, chunks, nchunks in measured:
                shape = squares.shape_there(self.device, nchunks, dtype)
                directions.direction_sums[(-(-nchunks // shape.chunks),)](
                    outcome, sent.rows, chunks, nchunks,
                    **directions.constants(shape, dtype), num_warps=shape.num_warps, enable_fp_fusion=False,
                )  # fmt: skip

    def _address(self, scale: float, control: Control | None) -> None:
        """The header of the order, and each group's witness."""
        header = dict.fromkeys(preparing.HEADER, 0)
        header["scale"] = _bits(scale)
        witnesses: Sequence[int] = [_NO_WITNESS] * self.ngroups
        if control is not None:
            witnesses = control.witnesses
            if len(witnesses) != self.ngroups:
                raise ValueError(got("witnesses", len(witnesses), f"one for each of {self.ngroups} groups"))
            header["steps"], header["increments"] = control.steps.data_ptr(), control.increments.data_ptr()
            header["nparams"] = control.steps.numel()
            if control.max_norm is not None and control.sums is not None:
                header["max_norm"], header["nsums"] = _bits(control.max_norm), control.sums.numel()
                header["sums"] = control.sums.data_ptr()
            for name, tensor in (("grad_scale", control.grad_scale), ("found_inf", control.found_inf)):
                header[name] = 0 if tensor is None else tensor.data_ptr()
        for index, witness in enumerate(witnesses):
            self._order[_HEADER_WORDS + index * _GROUP_WORDS + preparing.GROUP["witness"]] = witness
        for name, value in header.items():
            self._order[preparing.HEADER[name]] = value

    def _send(self, control: Control | None) -> _Sent:
        """Uploads what the device does not have yet."""
        captures = capturing(self.device)
        if self._sent is None or captures:
            for row, group in enumerate(self.columns["group"]):
                self.columns["aligned"][row] = self._is_aligned(row, self._formats_of(group).vector)
            sent = _Sent(upload(self._order, self.device), upload(self._rows, self.device), {})
            if captures:  # what a capture sends arrives at a replay, so no other run may count on it
                self._captured.append((sent, self._rates[:], control))
                return sent
            self._sent = sent
        elif self._order != self._known:
            refresh(self._sent.order, self._order)
        else:
            return self._sent
        self._known = self._order[:]
        return self._sent

    def config_of(self, made: Formats) -> Config:
        """Returns how much a program of these formats does: what the table was given for all, or for them, or its own.

        >>> from zerokern.kernels.triton.backend import interpreted
        >>> made = Formats("adam", torch.bfloat16, torch.bfloat16, "split8", "int8", None, False)
        >>> if interpreted():
        ...     given = (None, Config(4, 2), {made: Config(8, 8)})
        ...     tables = [DeviceTable(torch.device("cpu"), 1, 1, one) for one in given]
        ...     assert [table.config_of(made).num_warps for table in tables] == [4, 2, 8]
        """
        if isinstance(self._config, Config):
            return self._config
        found = None if self._config is None else self._config.get(made)
        return made.config(short=squares.is_short(self.device)) if found is None else found

    def _formats_of(self, group: int) -> Formats:
        made = self._formats[group]
        assert made is not None, f"group {group} has no formats"
        return made

    def _plan(self, rows: range) -> _Launches:
        """Cuts the rows of each combination of formats into tiles."""
        members: dict[Formats, list[int]] = {}
        for row in rows:
            made = self._formats_of(self.columns["group"][row])
            if self.columns["changed"][row] and made.algorithm != "muon":
                made = replace(made, changed=True)
            members.setdefault(made, []).append(row)
        updates, measured = [], []
        for made, some in members.items():
            config = self.config_of(made)
            numel = sum(self.columns["numel"][row] for row in some)
            # what was given, a sweep measures as it is
            own = not isinstance(self._config, Config)
            each = config.tiles_for(numel, squares.multiprocessors(self.device)) if own else config.tiles
            tiles = self._map(some, each * config.rows * BLOCK)
            if len(tiles):
                updates.append((made, upload(tiles, self.device), len(tiles), each))
                if made.algorithm == "muon" and made.out is not None:
                    chunks = self._map(some, squares.CHUNK.value)
                    measured.append((made.out, upload(chunks, self.device), len(chunks)))
        return _Launches(updates, measured)

    def _map(self, rows: Sequence[int], tile: int) -> Tensor:
        """(row, tile within the row) of each program, for some of the rows."""
        numels = self.columns["numel"]
        tiles = tile_map([numels[row] for row in rows], tile)
        if len(tiles) and len(rows) < self.nseg:
            numbers = torch.tensor(rows, dtype=torch.int32, device="cpu")[tiles[:, 0].long()]
            tiles = torch.stack((numbers, tiles[:, 1]), 1)
        return tiles

    def _is_aligned(self, row: int, vector: int) -> bool:
        """Whether vectors fit the row's length and, whatever the widths, its addresses."""
        if self.columns["numel"][row] % vector:
            return False
        return not any(self.columns[name][row] % 16 for name in _VECTORS)
