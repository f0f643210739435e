"""The C ABI, called as a program that is not ours may call it: what cannot be done is refused, and nothing is read."""

from __future__ import annotations

import pytest
import torch
from tables import each

from zerokern.core import native
from zerokern.core.errors import KernelError
from zerokern.kernels.cpu import UpdateTable

MOST = 2**63 - 1


def test_null_pointers() -> None:
    library = native.library()
    assert library.zk_sumsq_partials(None, 3) < 0 == library.zk_sumsq_partials(None, 0)
    assert library.zk_crc32c(7, None, 1 << 40) == 7


@each("first", [MOST, MOST - 128 - 2])
def test_a_first_element_beyond_what_can_be_counted(first: int) -> None:
    param, grad = torch.ones(3), torch.ones(3)
    table = UpdateTable(1, 1)
    formats = {"grad_dtype": torch.float32, "param_dtype": torch.float32, "master_format": "fp32"}
    table.set_group(0, algorithm="sgd", state_format="none", lr=0.5, **formats)
    table.set_row(0, group=0, numel=3, master=param.data_ptr(), grad=grad.data_ptr(), first=first)
    with pytest.raises(KernelError, match="0"):
        table.run()
    assert param.eq(1.0).all()
