"""Kinds of CPU that the tests run under: by switches where this machine has more, played where it has less.

A kind limits which instructions torch multiplies with and which the native kernels use, and answers what a program may
ask about the CPU. What this machine lacks is played: the answers are those of the kind, the instructions the best that
are here. `play` is for processes of its own (`forked.run_forked`), because torch reads its switches once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch

FEATURES = ("avx2", "avx512", "avx512_bf16", "amx_tile")  # that torch.cpu tells of


@dataclass(frozen=True)
class Kind:
    """`isa`: the best set of the native library there; `switches`: what keeps torch to such instructions."""

    isa: str
    features: frozenset[str]
    switches: dict[str, str]
    bf16_is_slow: bool


KINDS = {
    "AVX2 alone": Kind(
        "avx2", frozenset(FEATURES[:1]), {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, True
    ),
    "AVX-512 without bf16": Kind(
        "avx512",
        frozenset(FEATURES[:2]),
        {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        False,
    ),
    "AMX": Kind("avx512vnni", frozenset(FEATURES), {"ATEN_CPU_CAPABILITY": "avx512"}, False),
}


def features_here() -> frozenset[str]:
    """What torch says of this CPU."""
    return frozenset(name for name in FEATURES if getattr(torch.cpu, f"_is_{name}_supported", lambda: False)())


def how(kind: Kind, here: Collection[str]) -> str:
    """How a machine with these features comes to be one of this kind.

    >>> [how(kind, {"avx2", "avx512"}) for kind in KINDS.values()]
    ['by switches', 'real', 'played']
    """
    if kind.features == set(here):
        return "real"
    return "by switches" if kind.features < set(here) else "played"


def best_set(kind: Kind, usable: list[str]) -> str:
    """The best of these sets, worst first, that the kind has.

    >>> best_set(KINDS["AMX"], ["scalar", "avx2"]), best_set(KINDS["AVX2 alone"], ["scalar", "avx2", "avx512"])
    ('avx2', 'avx2')
    """
    order = ("scalar", "avx2", "avx512", "avx512vbmi", "avx512vnni")
    return [name for name in usable if name in order[: order.index(kind.isa) + 1]][-1]


def described() -> str:
    """The line of the header: which kinds are real here, and which are not."""
    here = features_here()
    return ", ".join(f"{name} ({how(kind, here)})" for name, kind in KINDS.items())


def switches(kind: Kind) -> dict[str, str]:
    """What to set before a process of this kind starts; nothing that this machine could not do."""
    from zerokern.core import native

    of_torch = kind.switches if how(kind, features_here()) != "played" else {}
    return {**os.environ, **of_torch, "ZEROKERN_CPU_ISA": best_set(kind, native.isa_usable())}


def play(name: str) -> None:
    """Makes this process, which was started with the kind's switches, see such a CPU. Nothing undoes it."""
    from zerokern.core import native
    from zerokern.examples import widen

    kind, usable = KINDS[name], native.isa_usable()
    best, force = best_set(kind, usable), native.force_isa
    for feature in FEATURES:
        setattr(torch.cpu, f"_is_{feature}_supported", lambda feature=feature: feature in kind.features)
    native.isa_usable = lambda: usable[: usable.index(best) + 1]
    native.force_isa = lambda wanted: force(best if wanted is None else wanted)
    widen.bf16_is_slow = lambda *_, **__: kind.bf16_is_slow
