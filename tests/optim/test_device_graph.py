"""Steps in CUDA graphs: a capture takes all it needs with it, and steps outside go on beside it."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_double import DeviceTwins, Double
from optim_cases import BF16, FP32, MAKERS, make_params, same_bits, set_grads, train
from tables import each

from zerokern import StateError
from zerokern.kernels.triton import upload
from zerokern.kernels.triton.upload import SetAside
from zerokern.optim import SGD, AdamW


def replay(graph: list[Callable[[], None]], times: int = 1) -> None:
    for _ in range(times):
        for launch in graph:
            launch()


@each("name", MAKERS)
def test_a_replay_is_a_step(name: str, double: Double) -> None:
    """With gradients and a learning rate that change in place."""
    lr = torch.tensor(0.1)
    twins = DeviceTwins(double.on, name, dtype=BF16, max_grad_norm=1.0, lr=lr)
    twins.train(2)
    held = [param.grad for param in twins.params]
    launched = double.launched
    with double.on(), double.capture() as graph:
        twins.ours.step()
    assert double.launched == launched
    for step in range(2, 6):
        lr.fill_(0.1 / step)
        twins.set_grads(step, scale=math.inf if step == 4 else 1.0)
        for grad, param in zip(held, twins.params, strict=True):
            grad.copy_(param.grad)
        replay(graph)
        twins.reference.step()
        assert twins.agree()
    assert twins.ours.skipped_steps == twins.reference.skipped_steps == 1
    assert twins.ours.grad_norm == twins.reference.grad_norm


def test_steps_outside_go_on_beside_a_graph(double: Double) -> None:
    """With other gradients at other addresses, with other hyperparameters."""
    twins = DeviceTwins(double.on, "adamw", max_grad_norm=1.0)
    twins.train(1)
    held = [param.grad for param in twins.params]
    with double.on(), double.capture() as graph:
        twins.ours.step()
    twins.step()
    assert twins.agree(), "what a capture sends has not arrived"
    for step in range(4):
        twins.both(lambda optimizer, _, step=step: optimizer.param_groups[0].update(lr=0.1 / (1 + step)))
        twins.train(1 + step % 2, start=10 + step)
        assert twins.agree()
        twins.both(lambda optimizer, _: optimizer.param_groups[0].update(lr=0.01))
        twins.set_grads(20 + step)
        for grad, param in zip(held, twins.params, strict=True):
            grad.copy_(param.grad)
        replay(graph)
        twins.reference.step()
        assert twins.agree()


def test_a_graph_whose_parameters_part_is_told_of(double: Double) -> None:
    """It holds one step count for those that had the same when it was captured."""
    twins = DeviceTwins(double.on, "adamw")
    twins.train(2)
    with double.on(), double.capture():
        twins.ours.step()
    with pytest.warns(UserWarning, match=r"captured before.*without the others; capture it anew"):
        twins.train(1, start=2, idle=[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins.train(2, start=3)
        twins.train(1, start=5, idle=[1])
    assert twins.agree()
    with double.on(), double.capture():
        twins.ours.step()
    twins.ours.state[twins.params[0]]["step"].fill_(2.0)
    twins.reference.state[twins.straight[0]]["step"].fill_(2.0)
    with pytest.warns(UserWarning, match=r"counters were written; capture it anew"):
        twins.train(1, start=6)
    assert twins.agree()
    with double.on(), double.capture():
        twins.ours.step()
    twins.ours.add_param_group({"params": make_params((5,))})
    with pytest.warns(UserWarning, match=r"parameters were added or taken away; capture it anew"):
        twins.train(1, start=7)


@each("cls", [AdamW, SGD])
def test_state_is_not_made_in_a_capture(cls: type, double: Double) -> None:
    params = make_params()
    with double.on():
        optimizer = cls(params, lr=0.1)
        set_grads(params)
        with double.capture() as graph, pytest.raises(StateError, match=r"CUDA graph.*call step\(\) once"):
            optimizer.step()
        assert (graph, len(optimizer.state)) == ([], 0)
        train(optimizer, params, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        with double.capture() as graph, pytest.raises(StateError, match=r"CUDA graph"):
            optimizer.step()
        train(optimizer, params, 1)
        with double.capture() as graph:
            optimizer.step()
        assert graph


def cuda_twins(name: str, **settings: Any) -> DeviceTwins:
    return DeviceTwins(contextlib.nullcontext, name, (1000, 7, 300), (FP32, BF16, BF16), "cuda", **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("name", MAKERS)
def test_a_captured_step_gives_the_bits_of_eager_steps(name: str, limit: float | None) -> None:
    lr = torch.tensor(0.1, device="cuda")
    graphed, eager = cuda_twins(name, max_grad_norm=limit), cuda_twins(name, max_grad_norm=limit)
    graphed.ours.param_groups[0]["lr"] = lr
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graphed.set_grads(0)
        graphed.ours.step()
    torch.cuda.current_stream().wait_stream(side)
    eager.set_grads(0)
    eager.ours.param_groups[0]["lr"] = float(torch.tensor(0.1))
    eager.ours.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.ours.step()
    held = [param.grad for param in graphed.params]
    for step in range(1, 4):
        rate = float(torch.tensor(0.1 / (1 + step)))
        lr.fill_(rate)
        eager.ours.param_groups[0]["lr"] = rate
        eager.set_grads(step)
        for grad, param in zip(held, eager.params, strict=True):
            grad.copy_(param.grad)
        graph.replay()
        eager.ours.step()
        assert same_bits([p.detach() for p in graphed.params], [p.detach() for p in eager.params])
    graphed.set_grads(9)  # gradients somewhere else, outside the graph
    eager.set_grads(9)
    graphed.ours.step()
    eager.ours.step()
    graph.replay()
    for grad, param in zip(held, eager.params, strict=True):
        param.grad.copy_(grad)
    eager.ours.step()
    assert same_bits([p.detach() for p in graphed.params], [p.detach() for p in eager.params])
    for mine, theirs in zip(graphed.params, eager.params, strict=True):
        assert same_bits(list(graphed.ours.state[mine].values()), list(eager.ours.state[theirs].values()))


def played_captures() -> tuple[Any, list[bool]]:
    """Pinned memory that a capture refuses to make, as the driver may."""
    captured = [False]

    def pin(nbytes: int) -> torch.Tensor:
        assert not captured[0], "memory was pinned in a capture"
        return torch.empty(nbytes, dtype=torch.uint8)

    return SetAside(pin), captured


def test_a_capture_finds_the_pinned_memory_that_steps_before_it_set_aside() -> None:
    """As many spans of a size as they sent, and again after it has taken them."""
    spans, captured = played_captures()
    for nbytes in (100, 120, 7, 5000):
        spans.keep(nbytes)
    for _ in range(2):
        captured[0] = True
        assert [spans.take(nbytes).numel() for nbytes in (5000, 128, 1, 65)] == [8192, 128, 64, 128]
        captured[0] = False
        spans.refill()


@pytest.mark.gpu
def test_a_capture_pins_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(nbytes: int) -> torch.Tensor:
        assert not torch.cuda.is_current_stream_capturing()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    monkeypatch.setattr(upload, "_SET_ASIDE", SetAside(pin))
    graphed = cuda_twins("adamw", max_grad_norm=1.0)
    graphed.set_grads(0)
    graphed.ours.step()
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            graphed.ours.step()
        graphed.ours.step()


@pytest.mark.gpu
def test_a_whole_training_step_in_a_graph() -> None:
    """Gradients that the capture itself allocates."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).cuda()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True, max_grad_norm=1.0)
    x = torch.randn(64, 16, device="cuda")

    def work() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            first = work().item()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = work()
    for _ in range(50):
        graph.replay()
    assert loss.item() < 0.5 * first
    assert optimizer.state[next(model.parameters())]["step"].item() == 53
