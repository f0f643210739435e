"""8-bit AdamW of others on bf16 parameters, as their users call them: bitsandbytes and torchao without a master, so
with fewer bits than ours; FlashOptim with its 24-bit master. Nobody clips here. With fp32 masters and the clip around
them, bitsandbytes and torchao compete as in `bench/peers/`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence

import torch

from ...contest import Missing, Provider
from ...step import Output, reader
from ..problem import DeviceProblem

# (module, class, what else it is told, bytes of its remainder, what is lost)
KINDS = {
    "bitsandbytes": ("bitsandbytes.optim", "AdamW8bit", {}, 0, "8-bit states, no master"),
    "torchao": ("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}, 0, "8-bit states, no master"),
    "flashoptim": ("flashoptim", "FlashAdamW", {"master_weight_bits": 24}, 1, "8-bit states, 24-bit master"),
}
STATES_NBYTES = 2


def direct(peer: str, problem: DeviceProblem) -> Callable[[], Sequence[Provider]]:
    """The maker of the peer's optimizer on bf16 parameters."""
    return lambda: [_direct(peer, problem)]


def _direct(peer: str, problem: DeviceProblem) -> Provider:
    module, name, more, remainder_nbytes, lossy = KINDS[peer]
    if importlib.util.find_spec(peer) is None:
        raise Missing(f"{peer} is not installed (pip install {peer})")
    kind = getattr(importlib.import_module(module), name)
    params = [torch.nn.Parameter(view) for view in problem.views("public param", torch.bfloat16)]
    for param, grad in zip(params, problem.views("grad", torch.bfloat16), strict=True):
        param.grad = grad
    optimizer = kind(params, **problem.algorithm.public_hyper, **more)

    def check() -> None:
        problem.fill("public param", torch.bfloat16, problem.base["param"])
        optimizer.state.clear()
        optimizer.step()
        start = {"param": problem.base["param"].bfloat16().float(), **problem.zeros()}
        want = problem.truth(start, step=1)["param"]
        slack = 0.05 * (want - start["param"]).abs()  # of 8-bit states
        output = Output("param", want, reader([p.detach() for p in params]), 2**-7, 1e-6, slack)
        problem.check(f"{peer} on bf16 parameters", [output])

    least = 2 + 2 * (2 + remainder_nbytes + STATES_NBYTES)
    return Provider(
        name=peer,
        run=optimizer.step,
        check=check,
        nbytes=problem.shape.numel * least,
        use_threads=lambda count: None,
        lossy=lossy,
        wiring=f"{name} on bf16 parameters, {lossy}",
    )
