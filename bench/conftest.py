"""pytest-benchmark runs the providers of `zerokern bench`: a test that takes `provider` runs once for each of them.

These are for profiling and for watching one provider; ratios come from `zerokern bench`, which pairs its runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from zerokern.core import env

from .contest import Missing, Provider, Request
from .ops import KERNELS
from .shapes import shape

NUMEL = 1 << 20
PEERS = ("torch",)


def providers(op: str) -> Iterator[tuple[str, Provider]]:
    """Ours and the wirings of the peers, by a name that tells them apart."""
    module = importlib.import_module(f"{__package__}.ops.{op}")
    for contest in module.contests(Request(op, shape("flat", NUMEL), PEERS)):
        for provider in contest.ours:
            yield f"{contest.name}: {provider.name}", provider
        for make in contest.peers.values():
            try:
                candidates = make()
            except Missing:
                continue
            for provider in candidates:
                yield f"{contest.name}: {provider.name}, {provider.wiring}", provider


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "provider" in metafunc.fixturenames:
        named = [(f"{op}, {name}", provider) for op in KERNELS for name, provider in providers(op)]
        names, found = zip(*named, strict=True)
        metafunc.parametrize("provider", found, ids=names)


@pytest.fixture
def ready(provider: Provider) -> Provider:
    """The provider on all CPUs, its result checked."""
    provider.use_threads(env.default_threads())
    provider.check()
    return provider
