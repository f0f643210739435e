"""Reads the addresses of many tensors and their gradients in one native call.

Reading `p.grad`, its address, dtype and layout from Python takes a microsecond per parameter, nearly all of it in cache
misses, which the native loop overlaps. It calls torch through its C interface (`aoti_torch_*`) and
`c10::TensorImpl::grad`, looked up by name in the libraries that torch has loaded. It assumes that an `at::Tensor` is
the address of its `TensorImpl`, which a trial verifies.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zerokern.core import native

__all__ = ["AddressRecord", "GradientReader", "TensorBodies", "gradient_reader"]

_IMPORTS = {
    "grad": ("libc10.so", "_ZNK3c1010TensorImpl4gradEv"),
    "is_defined": ("libtorch_cpu.so", "aoti_torch_is_defined"),
    "address": ("libtorch_cpu.so", "aoti_torch_get_data_ptr"),
    "layout": ("libtorch_cpu.so", "aoti_torch_get_layout"),
    "dtype": ("libtorch_cpu.so", "aoti_torch_get_dtype"),
    "numel": ("libtorch_cpu.so", "aoti_torch_get_numel"),
    "is_contiguous": ("libtorch_cpu.so", "aoti_torch_is_contiguous"),
    "is_negated": ("libtorch_cpu.so", "_ZN2at6native6is_negERKNS_6TensorE"),
}
_COUNTS_A_WRITE = (  # `torch::autograd::impl::bump_version`, of whichever class torch declares it
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    "_ZN5torch8autograd4impl12bump_versionERKN2at10TensorBaseE",
)
_WORDS = torch._C.TensorBase.__basicsize__ // 8  # of a tensor's Python object, one of which points to its TensorImpl
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_tensor_of = operator.attrgetter("_cdata")
_pointer_of = torch.Tensor.data_ptr
Calls = tuple[native.TensorCalls, dict[torch.dtype, int], int]


@functools.cache
def torch_calls() -> Calls | None:
    """Returns torch's functions, its numbers for dtypes and for the strided layout; None if this torch lacks one."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        functions = {
            name: ctypes.cast(getattr(ctypes.CDLL(str(folder / file)), symbol), ctypes.c_void_p).value
            for name, (file, symbol) in _IMPORTS.items()
        }
        interface = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        numbers = {dtype: int(getattr(interface, f"aoti_torch_dtype_{name}")()) for dtype, name in _DTYPES.items()}
        calls = native.TensorCalls(**functions), numbers, int(interface.aoti_torch_layout_strided())
        why = "" if _works(calls) else "a trial found another address than torch's own"
    except (AttributeError, OSError) as error:
        why = str(error)
    if why:
        logging.getLogger("zerokern").warning("gradients are read one by one from Python, which is slower: %s", why)
        return None
    return calls


def _works(calls: Calls) -> bool:
    """Returns whether a trial finds a gradient at its address."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))
    weight.grad = torch.ones_like(weight)
    addresses = GradientReader(calls, [weight], [weight.data_ptr()], [3], [weight.dtype], [weight.dtype]).read()
    return addresses is not None and addresses.tolist() == [weight.grad.data_ptr()]


def gradient_reader(
    params: Sequence[Tensor],
    addresses: Sequence[int] | None,
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    grad_dtypes: Sequence[torch.dtype],
) -> GradientReader | None:
    """Returns a reader for these parameters; None if torch does not offer what it needs.

    >>> weight = torch.nn.Parameter(torch.ones(3)); weight.grad = torch.ones(3)
    >>> reader = gradient_reader([weight], [weight.data_ptr()], [3], [torch.float32], [torch.float32])
    >>> reader is None or reader.read().tolist() == [weight.grad.data_ptr()]
    True
    """
    calls = torch_calls()
    return None if calls is None else GradientReader(calls, params, addresses, numels, dtypes, grad_dtypes)


class GradientReader:
    """Compares parameters and their gradients with what was recorded, and reads the gradients' addresses."""

    def __init__(
        self,
        calls: Calls,
        params: Sequence[Tensor],
        addresses: Sequence[int] | None,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        grad_dtypes: Sequence[torch.dtype],
    ) -> None:
        """`addresses`: None where the parameters themselves may be anywhere."""
        self._calls, numbers, strided = calls
        self.cells = TensorBodies(params)
        self._columns = (
            self.cells.bodies,
            array("Q", addresses or ()),
            array("Q"),
            array("q", numels),
            array("i", [numbers[dtype] for dtype in dtypes]),
            array("i", [numbers[dtype] for dtype in grad_dtypes]),
        )
        columns = [column.buffer_info()[0] if len(column) else None for column in self._columns]
        self._list = native.TensorList(*columns, len(params), strided)
        self._read = native.library().zk_gradients

    def read(self, grads: Sequence[Tensor] | None = None) -> array[int] | None:
        """Returns the addresses of the parameters' gradients, or of `grads`.

        None if one is missing, or a gradient or parameter is not as recorded.

        `torch.utils.swap_tensors` may have exchanged TensorImpls, so these are compared first.
        """
        if not self.cells.unchanged():
            return None
        bodies = None if grads is None else array("Q", map(_tensor_of, grads))
        self._list.gradients = None if bodies is None else bodies.buffer_info()[0]
        addresses = array("Q", bytes(8 * len(self.cells.bodies)))
        count = self._read(ctypes.byref(self._calls), ctypes.byref(self._list), addresses.buffer_info()[0])
        return addresses if count == len(addresses) else None


@functools.cache
def _body_offset() -> int | None:
    """Returns the offset in a tensor's Python object of the pointer to its TensorImpl; None if that is not known."""
    trials = [torch.nn.Parameter(torch.ones(1, device="cpu")), torch.ones(2, device="cpu")]
    words = [(ctypes.c_uint64 * _WORDS).from_address(id(trial)) for trial in trials]
    places = [place for place in range(_WORDS) if all(w[place] == t._cdata for w, t in zip(words, trials, strict=True))]
    return 8 * places[0] if len(places) == 1 else None


@functools.cache
def _bump_version_function() -> int | None:
    """Returns torch's function that bumps a version counter; None if this torch has none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    functions = [getattr(library, name) for name in _COUNTS_A_WRITE if hasattr(library, name)]
    return ctypes.cast(functions[0], ctypes.c_void_p).value if functions else None


class TensorBodies:
    """The TensorImpls of tensors whose Python objects we keep; `torch.utils.swap_tensors` exchanges them.

    >>> weight = torch.nn.Parameter(torch.ones(3)); cells = TensorBodies([weight])
    >>> cells.bump_versions(); weight._version, cells.unchanged()
    (1, True)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, place = tensors, _body_offset()
        self._known = place is not None
        self.bodies = array("Q", map(_tensor_of, tensors))
        self._cells = array("Q", [id(tensor) + (place or 0) for tensor in tensors])

    def unchanged(self) -> bool:
        """Returns whether every tensor still has the TensorImpl that it had."""
        if not self._known:
            return array("Q", map(_tensor_of, self._tensors)) == self.bodies
        (cells, count), (bodies, _) = self._cells.buffer_info(), self.bodies.buffer_info()
        return bool(native.library().zk_in_cells(cells, bodies, count) == count)

    def bump_versions(self) -> None:
        """Bumps the version counter of each tensor, for autograd, after kernels that torch does not know of wrote to
        it."""
        raising = _bump_version_function() if self._known else None
        if raising is None:
            torch.autograd.graph.increment_version(self._tensors)
        else:
            native.library().zk_raise_versions(raising, *self._cells.buffer_info())


class AddressRecord:
    """Tensors and their first addresses. Memory that is exchanged (`.data =`) leaves no other trace.

    >>> moment = torch.zeros(3); known = AddressRecord([moment]); known.unchanged()
    True
    >>> moment.data = torch.ones(3); known.unchanged()
    False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = array("Q", map(_pointer_of, tensors))
        calls = torch_calls()
        self._calls = None if calls is None else ctypes.byref(calls[0])
        if calls is not None:
            self._bodies = array("Q", map(_tensor_of, tensors))
            # torch.utils.swap_tensors, which would let another tensor free a body, refuses what has a weak reference
            self._kept = list(map(weakref.ref, tensors))
            self._look = native.library().zk_in_place

    def unchanged(self) -> bool:
        """Returns whether every tensor is still at its first address."""
        count = len(self._tensors)
        if self._calls is None:
            return array("Q", map(_pointer_of, self._tensors)) == self._addresses
        bodies, addresses = self._bodies.buffer_info()[0], self._addresses.buffer_info()[0]
        return bool(self._look(self._calls, bodies, addresses, count) == count)
