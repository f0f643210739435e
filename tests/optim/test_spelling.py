"""An argument that is not there is told with the one that may be meant, whatever version Python is of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tables import each

import zerokern as zk


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4))]


@each(
    "wrong, meant",
    [
        ("state", "state_format"),
        ("state_fmt", "state_format"),
        ("weight_deacy", "weight_decay"),
        ("max_norm", "max_grad_norm"),
        ("beta", "betas"),
    ],
)
def test_the_nearest_name_is_told(wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"^AdamW\(\) has no argument '{wrong}'; did you mean '{meant}'\?$"):
        zk.AdamW(params(), **{wrong: 1})


def test_where_none_is_near_none_is_told() -> None:
    with pytest.raises(TypeError, match=r"^SGD\(\) has no argument 'betas'$"):
        zk.SGD(params(), betas=(0.9, 0.99))


def test_a_subclass_may_take_what_it_likes() -> None:
    class Mine(zk.AdamW):
        def __init__(self, params: Any, **more: Any) -> None:
            self.more = more
            super().__init__(params)

    class Strict(zk.AdamW):
        def __init__(self, params: Any, *, warmup: int) -> None:
            self.warmup = warmup
            super().__init__(params)

    assert Mine(params(), anything=1).more == {"anything": 1}
    assert Strict(params(), warmup=3).warmup == 3
    with pytest.raises(TypeError, match=r"Strict.*'warmpu'; did you mean 'warmup'"):
        Strict(params(), warmpu=3)


def test_copies_are_made_without_arguments() -> None:
    opt = zk.AdamW(params(), lr=0.5)
    assert copy.deepcopy(opt).param_groups[0]["lr"] == pickle.loads(pickle.dumps(opt)).param_groups[0]["lr"] == 0.5
