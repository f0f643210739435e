"""`zk.kernels` as somebody else's step calls it: errors name the arguments."""

from __future__ import annotations

import pytest
import torch

import zerokern as zk


def test_sizes_that_differ_are_named_by_the_words_of_the_call() -> None:
    with pytest.raises(ValueError, match=r"^src has 6 elements \(shape \(6,\)\); allowed: 5, as dst has$"):
        zk.kernels.cast(torch.ones(6), torch.empty(5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"^srcs\[1\] has 6 elements .*; allowed: 5, as dst has$"):
        zk.kernels.accumulate(torch.ones(5), [torch.ones(5), torch.ones(6)])
    with pytest.raises(ValueError, match=r"^srcs has 6 elements .*; allowed: 5, as dst has$"):
        zk.kernels.accumulate(torch.ones(5), torch.ones(6))
    with pytest.raises(ValueError, match="allowed: 300, as its parameter has"):
        zk.kernels.sgd(torch.ones(300), torch.ones(2), lr=0.1)


def test_other_numbers_of_elements_say_why() -> None:
    codes, _ = zk.kernels.encode_int8(torch.ones(300))
    with pytest.raises(ValueError, match=r"scale has 2 elements .*; allowed: 3, one for each started block of 128"):
        zk.kernels.decode_int8(codes, torch.ones(2))
    hi, remainder = zk.kernels.split(torch.ones(3), "split16")
    with pytest.raises(ValueError, match=r"remainder has 2 elements .*; allowed: 3, as hi has"):
        zk.kernels.join(hi, remainder[:2])
