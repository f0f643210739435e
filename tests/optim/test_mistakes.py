"""Mistakes are told where they are made, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerokern as zk


def model() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"tier": "cpu"}, {"schedule": "overlap"}, {"group": None}], ids=str
)
@pytest.mark.parametrize("kind", [zk.AdamW, zk.Adam, zk.Lion, zk.Adagrad, zk.SGD])
def test_what_is_no_option_of_a_group(kind: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"param_group\['{name}'\].*one for all groups"):
        kind([{"params": list(model().parameters()), **options}], lr=1e-3)


def test_names_that_others_put_into_groups_stay() -> None:
    opt = zk.AdamW([{"params": list(model().parameters()), "name": "all", "initial_lr": 1e-3}])
    assert opt.param_groups[0]["name"] == "all"


def test_a_module_is_not_built() -> None:
    with pytest.raises(TypeError, match=r"zk\.build\(lambda: Model\(\)\).*zk\.shard\(model\)"):
        zk.build(model())  # type: ignore[arg-type]


def test_a_name_of_the_hub() -> None:
    with pytest.raises(zk.IoError, match=r'snapshot_download\("org/name"\)'):
        zk.load_pretrained(model(), "org/name")


def test_an_optimizer_says_what_it_does() -> None:
    said = repr(zk.AdamW(model().parameters(), tier="cpu", max_grad_norm=1.0))
    assert said.startswith("AdamW (tier='cpu', schedule='sync', max_grad_norm=1.0\nParameter Group 0\n")
    assert "state_format: fp32" in said


def test_a_closure_computes_gradients_in_any_mode() -> None:
    weight = nn.Parameter(torch.ones(2))
    opt = zk.SGD([weight], lr=0.5)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(opt.step(closure).detach()) == 2.0
    assert weight.tolist() == [0.0, 0.0]
