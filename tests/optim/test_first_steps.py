"""A first step that fails while state begins may be tried again: nothing passes for state that has no values yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerokern as zk
from zerokern.optim import state


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (zk.AdamW, {"master_format": "fp32"}),
        (zk.AdamW, {"master_format": "split16"}),
        (zk.Adagrad, {"initial_accumulator_value": 0.5, "master_format": "fp32"}),
    ],
)
@pytest.mark.parametrize("stage", [None, 1, 3])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_state_that_did_not_begin_is_begun_by_the_next_step(
    kind: Any, settings: dict[str, Any], stage: int | None, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        if stage is None:
            model = model.bfloat16()
        else:
            policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            zk.shard(model, stage=stage, mp_policy=policy)
        opt = kind(model.parameters(), lr=1e-2, **settings)
        for step in range(3):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
            if fails and step == 0:
                calls = [0]

                def begin(*given: Any, calls: list[int] = calls, begin: Any = state.begin_master) -> None:
                    calls[0] += 1
                    if calls[0] == 2:
                        raise error("on the way")
                    begin(*given)

                with monkeypatch.context() as patched:
                    patched.setattr(state, "begin_master", begin)
                    with pytest.raises(error):
                        opt.step()
            opt.step()
            opt.zero_grad()
        with zk.gathered(model):
            ends.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *ends))
