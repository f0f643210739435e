"""Parameters on a device: the bits of the same optimizer on the CPU, and a host that launches and does not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_double import DeviceTwins, Double
from optim_cases import BF16, FP16, FP32, make_params, python_calls, set_grads
from tables import each
from torch.utils._python_dispatch import TorchDispatchMode

from zerokern.optim import AdamW, device

PLACE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels run: compiled, or interpreted


def kernels_on() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if PLACE == "cuda" else Double().on(interpreted=True)


@each(
    "name, dtype, settings",
    [
        ("adamw", FP32, {"max_grad_norm": 1.0}),
        ("adamw", BF16, {"state_format": "bf16", "master_format": "split8"}),
        ("adam", BF16, {"master_format": "none", "stochastic_seed": 3}),
        ("lion", FP16, {"max_grad_norm": 1.0}),
        ("adagrad", BF16, {"master_format": "fp32"}),
        ("sgd", BF16, {"nesterov": True}),
        ("sgd", FP32, {"momentum": 0.0}),
        ("adamw", (FP32, BF16, FP16), {"max_grad_norm": 0.5}),
    ],
)
def test_the_bits_of_the_cpu_through_the_kernels(name: str, dtype: Any, settings: dict[str, Any]) -> None:
    twins = DeviceTwins(kernels_on, name, (1, 0, 300), dtype, PLACE, **settings)
    twins.train(2)
    twins.train(2, start=2, idle=[0])
    assert twins.agree()
    if "max_grad_norm" in settings:
        assert twins.ours.grad_norm == pytest.approx(twins.reference.grad_norm, rel=1e-15)


@each("name", ["adamw", "lion"])
def test_int8_states_through_the_kernels(name: str) -> None:
    """Their codec is that of the CPU; the arithmetic between may differ in its last bits."""
    twins = DeviceTwins(kernels_on, name, (1, 300), BF16, PLACE, state_format="int8", max_grad_norm=1.0)
    twins.train(3)
    for mine, theirs in zip(twins.params, twins.straight, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=2**-7, atol=1e-4)
        entry, expected = twins.ours.state[mine], twins.reference.state[theirs]
        assert (entry["exp_avg"].cpu().short() - expected["exp_avg"].short()).abs().max() <= 1


@each("dtype", [FP32, torch.float64])
@each("shape", [(), (1,)])
def test_a_learning_rate_on_the_device_is_read_by_the_update(
    shape: tuple[int, ...], dtype: torch.dtype, double: Double
) -> None:
    lr = torch.full(shape, 0.1, dtype=dtype)
    with double.on():
        params = make_params()
        optimizer = AdamW(params, lr=lr, betas=(0.8, 0.9))
    straight = make_params()
    reference = AdamW(straight, lr=float(lr), betas=(0.8, 0.9))
    for step in range(3):
        set_grads(params, straight, seed=step)
        with double.on():
            lr.fill_(0.1 / (step + 1))
            optimizer.step()
        reference.param_groups[0]["lr"] = float(lr)
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(params, straight, strict=True))


class Waits(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    REFUSED = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in self.REFUSED, f"{func} waits"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """On CPU tensors some conversions read memory without any op."""
    with pytest.MonkeyPatch.context() as patch, Waits():
        for name in ("tolist", "item", "__bool__", "__float__", "__int__", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, lambda self, *arguments, name=name: pytest.fail(f"{name} waits"))
        yield


class Nothing:
    """A table that launches nothing, so that only the host's own work is seen."""

    def __init__(self, place: torch.device, nrows: Any, ngroups: Any) -> None:
        nrows = nrows if isinstance(nrows, int) else 0  # a list of numels: a table of sums
        words = ("group", "numel", "key", "first", "grad")
        pointers = ("param", "remainder", "master", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "out")
        self.columns = {name: memoryview(bytearray(8 * nrows)).cast("Q") for name in (*words, *pointers)}

    def set_group(self, index: int, hyper: Any, **formats: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def launching_nothing(double: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with double.on():
        made = device.Kernels(Nothing, lambda **control: None, Nothing)
        monkeypatch.setattr(device, "kernels", lambda: made)
        yield


@pytest.mark.usefixtures("launching_nothing")
@each("name", ["adamw", "sgd"])
def test_a_step_does_not_wait(name: str) -> None:
    """Nor one with other gradients, nor one after a write from outside. The first takes over counters of the host."""
    from optim_cases import MAKERS

    params = make_params(dtype=BF16)
    optimizer = MAKERS[name](params, lr=torch.tensor(0.1), max_grad_norm=1.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(6):
        set_grads(params, seed=step)
        if step == 3:
            params[2].grad = None
        if step == 4:
            with torch.no_grad():
                params[0].add_(1.0)
        with no_waiting() if step else contextlib.nullcontext():
            optimizer.step()


@pytest.mark.usefixtures("launching_nothing")
def test_thousands_of_parameters_take_few_python_calls() -> None:
    calls = {}
    for count in (300, 3_000):
        params = make_params((10,) * count)
        optimizer = AdamW(params, max_grad_norm=1.0)
        set_grads(params)
        optimizer.step()
        set_grads(params)
        calls[count] = python_calls(optimizer.step)
    assert (calls[3_000] - calls[300]) / 2_700 < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "lion", "adagrad", "sgd"])
def test_a_step_does_not_wait_for_a_gpu(name: str) -> None:
    from optim_cases import MAKERS

    params = [torch.nn.Parameter(param.detach().cuda()) for param in make_params((1000, 7), BF16)]
    scaler = torch.amp.GradScaler("cuda")
    optimizer = MAKERS[name](params, lr=torch.tensor(0.1, device="cuda"), max_grad_norm=1.0)
    for step in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.grad_scale = scaler.scale(torch.ones((), device="cuda"))
        optimizer.found_inf = torch.zeros((), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 0
