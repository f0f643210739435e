"""zk.Muon for parameters on a device: the bits of the CPU, with state there or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from device_double import Double
from muon_cases import SMALL, Tier, on_disk
from offload_cases import SCHEDULES
from optim_cases import BF16, FP32, contents, make_params, same_bits, set_grads
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import refusal, says

from zerokern.core.errors import StateError
from zerokern.optim import Muon, matrices, matrix_table, transit
from zerokern.optim.transit import SLOTS

SHAPES = ((8, 8), (12, 20), (6, 5))
ON_GPU = ((256, 128), (128, 256), (300, 300), (64, 1000), (512, 2048), (256, 128), (300, 300), (256, 128))
EQUAL = ((8, 8), (8, 8), (12, 20), (8, 8), (12, 20))  # updated together
FORMATS = [
    (FP32, {"shapes": EQUAL}), (FP32, {}),
    (BF16, {"state_format": "bf16", "master_format": "split16"}), (BF16, {"master_format": "fp32"}),
    (BF16, {"master_format": "none", "stochastic_seed": 3}), (FP32, {"split": 2, "shapes": ((8, 8), (12, 20))}),
    # all products with this rate are exact, and with the ratio of 16 x 4
    (FP32, {"lr": torch.tensor(0.0625), "weight_decay": 0.5, "shapes": ((16, 4), (8, 8), (12, 20))}),
]  # fmt: skip


def follow(
    on: Callable[[], AbstractContextManager[None]], dtype: torch.dtype, place: str = "cpu", **settings: Any
) -> None:
    """Some steps, one of which is skipped, and one that a parameter takes no part in."""
    shapes = settings.pop("shapes", SHAPES)
    straight = make_params(shapes, dtype)
    params = [torch.nn.Parameter(param.detach().to(place, copy=True)) for param in straight]
    settings = {"lr": 0.05, "ns_dtype": "fp32", "max_grad_norm": 1.0, **settings}
    theirs = Muon(straight, **settings)
    with on():
        ours = Muon(params, **settings)
    for step in range(5):
        set_grads(straight, seed=step)
        if step == 1:
            straight[1].grad[2, 2] = float("inf")
        if step == 3:
            straight[0].grad = None
        for mine, other in zip(params, straight, strict=True):
            mine.grad = None if other.grad is None else other.grad.to(mine.device, copy=True)
        with on():
            ours.step()
        theirs.step()
    with on():
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-12) and ours.skipped_steps == 1
        found = [one.cpu() for one in contents(ours, params)]
    assert same_bits(found, contents(theirs, straight))


@each("dtype, settings", FORMATS)
def test_what_is_launched_has_the_bits_of_the_cpu(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    double = Double()
    follow(double.on, dtype, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; a GPU multiplies in another order")
@pytest.mark.parametrize(
    "dtype, settings", [FORMATS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in FORMATS[1:3])]
)
def test_the_kernels_have_the_bits_of_the_cpu(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    follow(partial(Double().on, interpreted=True), dtype, **settings)


def muons_on_gpu(settings: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], Muon]:
    straight = make_params(ON_GPU, dtype)
    params = [nn.Parameter(param.detach().cuda()) for param in straight]
    optimizer = Muon(params, lr=0.05, **settings)
    for step in range(5):
        set_grads(straight, seed=step)
        for mine, other in zip(params, straight, strict=True):
            mine.grad = other.grad.cuda()
        optimizer.step()
    if settings.get("schedule") == "overlap":
        optimizer.flush()
    return [param.detach().cpu() for param in params], optimizer


@pytest.mark.gpu
@each("state_format", ["fp32", "bf16", "int8"])
@each("more", [{"tier": "cpu"}, {"tier": "cpu", "schedule": "overlap"}, {"tier": ["device:64KiB", "cpu"]}])
@each("bound", [1 << 20, 32 << 20])
def test_every_tier_has_the_bits_of_state_on_the_gpu(
    more: dict[str, Any], state_format: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are the GPU's on both sides. Matrices share pieces of so many bytes, few or all."""
    monkeypatch.setattr(transit, "_LEAST_OF_MATRICES", bound)
    settings = {"state_format": state_format, "max_grad_norm": 1.0}
    left, there = muons_on_gpu(settings, BF16)
    right, here = muons_on_gpu({**settings, **more}, BF16)
    assert same_bits(left + averages(there), right + averages(here))


def averages(optimizer: Muon) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [value.cpu() for state in states for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.gpu
def test_averages_on_a_gpu_have_the_bits_of_the_cpu() -> None:
    """What no product of matrices decides. Gradients do not depend on the parameters here."""
    _, ours = muons_on_gpu({}, FP32)
    params = make_params(ON_GPU, FP32)
    theirs = Muon(params, lr=0.05)
    for step in range(5):
        set_grads(params, seed=step)
        theirs.step()
    assert same_bits(averages(ours), averages(theirs))


@pytest.mark.gpu
def test_on_a_gpu_it_is_as_near_to_float64_as_torch() -> None:
    """One step from the same gradients, in bf16 products, which decide: a mean over all matrices."""
    found = []
    for kind in (Muon, torch.optim.Muon):
        straight = make_params(ON_GPU, FP32)
        set_grads(straight)
        params = [nn.Parameter(param.detach().cuda()) for param in straight]
        before = [param.detach().clone() for param in params]
        grads = [param.grad.cuda() for param in straight]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        kind(params, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        found.append(sum(map(distance, grads, before, params)) / len(params))
    assert found[0] <= found[1] * 1.02, found


def distance(grad: Tensor, before: Tensor, after: Tensor) -> float:
    """Of an update from torch's iteration in float64, as a share of that."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = grad.shape[0] > grad.shape[1]
    x = grad.double().T if tall else grad.double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    update = (x.T if tall else x) * max(1.0, grad.shape[0] / grad.shape[1]) ** 0.5
    return float(((before - after.detach()).double() - update).norm() / update.norm())


@pytest.mark.gpu
def test_equal_matrices_on_a_gpu_have_the_bits_of_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = muons_on_gpu({}, BF16)
    monkeypatch.setattr(matrices, "BATCH_NUMEL_ON_GPU", 0)
    assert same_bits(together, muons_on_gpu({}, BF16)[0])


@pytest.mark.gpu
@each("more", [{}, {"tier": "cpu"}, {"tier": "cpu", "schedule": "overlap"}])
def test_captured_on_a_gpu_it_has_the_bits_of_launches(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_grad_norm": 1.0, **more}
    left, captured = muons_on_gpu(settings, BF16)
    monkeypatch.setattr(matrix_table, "CAPTURED_NUMEL", 0)
    right, launched = muons_on_gpu(settings, BF16)
    assert same_bits(left + averages(captured), right + averages(launched))


def test_a_graph_is_refused_and_changes_nothing() -> None:
    double, params = Double(), make_params(SHAPES)
    with double.on():
        optimizer = Muon(params)
        set_grads(params)
        optimizer.step()
        before = contents(optimizer, params)
        with double.capture():
            says(refusal(optimizer.step, StateError), ["CUDA graph", "capture forward and backward alone"])
        assert same_bits(before, contents(optimizer, params))
        optimizer.step()


class Counts(HostComputes):
    """Counts the batches of copies that it makes by direction."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.batches = {"up": 0, "down": 0}

    def copy(self, stream: Any, pairs: Any) -> None:
        if stream.name in self.batches:
            self.batches[stream.name] += 1
        super().copy(stream, pairs)


@pytest.fixture
def device() -> Iterator[Counts]:
    made = Counts()
    yield made
    made.close()


@each("dtype, kept, bound, pieces", [
    (FP32, {"state_format": "fp32"}, None, 1),  # all that there is
    (BF16, SMALL, 6000, 5),  # a large one by itself, and others on both sides of it together
])  # fmt: skip
def test_small_matrices_stream_together(
    dtype: torch.dtype,
    kept: dict[str, Any],
    bound: int | None,
    pieces: int,
    device: Counts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through few slots, by few copies, in the iterations of state on the device, with the bits of that."""
    if bound is not None:
        monkeypatch.setattr(transit, "_LEAST_OF_MATRICES", bound)
    shapes = ((16, 24), (24, 16), (16, 24)) * 4 + ((80, 96),) + ((16, 24), (16, 16)) * 6
    straight = make_params(shapes, dtype)
    params = [device.own(nn.Parameter(param.detach().clone())) for param in straight]
    settings = {"lr": 0.05, "ns_dtype": "fp32", "max_grad_norm": 1.0, **kept}
    ours, theirs = Muon(params, tier="cpu", **settings), Muon(straight, **settings)
    for step in range(3):
        set_grads(params, straight, seed=step)
        device.batches = dict.fromkeys(device.batches, 0)
        ours.step()
        theirs.step()
    device.synchronize()
    beside = ours.holdings.binding.beside
    assert len(beside._ends) == pieces and beside._ends[-1] == len(shapes)
    assert len(beside.pieces.slots) == min(pieces, SLOTS)
    assert device.batches["up"] == pieces, device.batches
    assert same_bits(contents(ours, params), contents(theirs, straight))
    ours.close()


@each("update, schedule, words", [
    ("host", "sync", ["update='host'", "'device'", "never orthogonalized on the host"]),
    ("device", "delayed", ["'sync' or 'overlap' with update='device'"]),
    ("device", "delayed after 2", ["'sync' or 'overlap' with update='device'"]),
])  # fmt: skip
@each("where", ["cpu", "disk"])
def test_an_update_on_the_host_is_refused(
    where: str, update: str, schedule: str, words: list[str], device: HostComputes, tier: Tier
) -> None:
    params = [device.own(param) for param in make_params(SHAPES)]
    set_grads(params)
    optimizer = Muon(
        params, tier=on_disk(tier) if where == "disk" else where, update=update, schedule=SCHEDULES[schedule]
    )
    before = contents(optimizer, params)
    says(refusal(optimizer.step, ValueError), words)
    assert same_bits(before, contents(optimizer, params))
