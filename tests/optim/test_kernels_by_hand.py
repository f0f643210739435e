"""`zk.kernels` as somebody else's step calls it: errors name the arguments, autograd hears of what is written."""

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


def written() -> dict[str, torch.Tensor]:
    return {name: torch.ones(300) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}


def test_a_backward_through_what_an_update_has_changed_raises() -> None:
    given = written()
    given["param"].requires_grad_()
    loss = given["param"].square().sum()
    zk.kernels.adam(**given, lr=0.1, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_tensor_that_is_written_has_another_version_and_no_other() -> None:
    given = written()
    zk.kernels.adam(**given, lr=0.1, step=1)
    assert {name: one._version > 0 for name, one in given.items()} == {name: name != "grad" for name in given}
    src, dst, bucket, stats = torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(2, dtype=torch.float64)
    zk.kernels.cast(src, dst)
    zk.kernels.accumulate(dst, [src])
    zk.kernels.flatten([src], bucket, stats=stats)
    assert [src._version, bucket._version] == [0, 1]
    zk.kernels.unflatten(bucket, [dst], stats=stats)
    assert dst._version == 3 and bucket._version == 1 and stats._version >= 2


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        given = written()
    zk.kernels.adam(**given, lr=0.1, step=1)
    assert not torch.equal(given["param"], torch.ones(300))
