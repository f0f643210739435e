"""Where the gradients of many parameters lie, in one native call.

Reading `p.grad`, its address, dtype and layout from Python takes a microsecond per parameter, nearly all of it in cache
misses that wait for each other. The native loop lets them overlap. It asks torch itself, through its C interface
(`aoti_torch_*`) and `c10::TensorImpl::grad`, found by name in the libraries that torch has loaded: nothing is linked.
One thing is assumed of an object, that an `at::Tensor` is the address of its `TensorImpl`; a trial shows it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zerokern.core import native

__all__ = ["GradientReader", "reader_of"]

_IMPORTS = {
    "grad": ("libc10.so", "_ZNK3c1010TensorImpl4gradEv"),
    "is_defined": ("libtorch_cpu.so", "aoti_torch_is_defined"),
    "address": ("libtorch_cpu.so", "aoti_torch_get_data_ptr"),
    "layout": ("libtorch_cpu.so", "aoti_torch_get_layout"),
    "dtype": ("libtorch_cpu.so", "aoti_torch_get_dtype"),
    "numel": ("libtorch_cpu.so", "aoti_torch_get_numel"),
    "is_contiguous": ("libtorch_cpu.so", "aoti_torch_is_contiguous"),
}
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_tensor_of = operator.attrgetter("_cdata")
Calls = tuple[native.TensorCalls, dict[torch.dtype, int], int]


@functools.cache
def _torch_calls() -> Calls | None:
    """torch's functions, its numbers for dtypes and for the strided layout; None where this torch lacks one of them."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        found = {
            name: ctypes.cast(getattr(ctypes.CDLL(str(folder / file)), symbol), ctypes.c_void_p).value
            for name, (file, symbol) in _IMPORTS.items()
        }
        interface = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        numbers = {dtype: int(getattr(interface, f"aoti_torch_dtype_{name}")()) for dtype, name in _DTYPES.items()}
        calls = native.TensorCalls(**found), numbers, int(interface.aoti_torch_layout_strided())
        why = "" if _works(calls) else "a trial found another address than torch's own"
    except (AttributeError, OSError) as error:
        why = str(error)
    if why:
        logging.getLogger("zerokern").warning("gradients are read one by one from Python, which is slower: %s", why)
        return None
    return calls


def _works(calls: Calls) -> bool:
    """Whether a gradient is found where it is."""
    weight = torch.nn.Parameter(torch.ones(3, device="cpu"))
    weight.grad = torch.ones(3, device="cpu")
    found = GradientReader(calls, [weight], [weight.data_ptr()], [3], [weight.dtype], [weight.dtype]).read()
    return found is not None and found.tolist() == [weight.grad.data_ptr()]


def reader_of(
    params: Sequence[Tensor],
    addresses: Sequence[int],
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    grad_dtypes: Sequence[torch.dtype],
) -> GradientReader | None:
    """A reader for these parameters, or None where torch does not offer what it needs.

    >>> weight = torch.nn.Parameter(torch.ones(3)); weight.grad = torch.ones(3)
    >>> reader = reader_of([weight], [weight.data_ptr()], [3], [torch.float32], [torch.float32])
    >>> reader is None or reader.read().tolist() == [weight.grad.data_ptr()]
    True
    """
    calls = _torch_calls()
    return None if calls is None else GradientReader(calls, params, addresses, numels, dtypes, grad_dtypes)


class GradientReader:
    """Parameters and what was found of them and their gradients, which `read` compares with what is there now."""

    def __init__(
        self,
        calls: Calls,
        params: Sequence[Tensor],
        addresses: Sequence[int],
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        grad_dtypes: Sequence[torch.dtype],
    ) -> None:
        self._calls, numbers, strided = calls
        self._tensors = list(map(_tensor_of, params))
        self._columns = (
            array("Q", self._tensors),
            array("Q", addresses),
            array("q", numels),
            array("i", [numbers[dtype] for dtype in dtypes]),
            array("i", [numbers[dtype] for dtype in grad_dtypes]),
        )
        self._list = native.TensorList(*(column.buffer_info()[0] for column in self._columns), len(params), strided)
        self._params = params
        self._read = native.library().zk_gradients

    def read(self) -> array[int] | None:
        """The gradients' addresses; None where one is missing or not as it was, or where a parameter is not.

        A parameter may have been given another tensor's body (`torch.utils.swap_tensors`), so these are read first.
        """
        if list(map(_tensor_of, self._params)) != self._tensors:
            return None
        found = array("Q", bytes(8 * len(self._tensors)))
        count = self._read(ctypes.byref(self._calls), ctypes.byref(self._list), found.buffer_info()[0])
        return found if count == len(self._tensors) else None
