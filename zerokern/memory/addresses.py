"""Reads the addresses, gradients and versions of many tensors in one native call.

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
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.core import native

__all__ = ["GradientReader", "TensorBodies", "body_offset", "storage_references", "torch_function"]

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
_VERSION = ("libtorch_cpu.so", "_ZNK2at10TensorBase8_versionEv")
_REQUIRES_GRAD = ("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv")
_COUNTS_A_WRITE = (  # `torch::autograd::impl::bump_version`, of whichever class torch declares it
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    "_ZN5torch8autograd4impl12bump_versionERKN2at10TensorBaseE",
)
_FEW = 8  # tensors whose versions Python reads as fast as the native library
_WORDS = torch._C.TensorBase.__basicsize__ // 8  # of a tensor's Python object, one of which points to its TensorImpl
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_tensor_of = operator.attrgetter("_cdata")
_pointer_of = torch.Tensor.data_ptr
_grad_of, _version_of = operator.attrgetter("grad"), operator.attrgetter("_version")
_is_trained, _dtype_of = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")
_numel_of, _is_contiguous, _is_neg = torch.Tensor.numel, torch.Tensor.is_contiguous, torch.Tensor.is_neg
_is_inference = torch.Tensor.is_inference


class Calls(NamedTuple):
    """Holds torch's functions on its tensors, and its numbers for dtypes and for the strided layout."""

    functions: native.TensorCalls
    version: int | None
    requires_grad: int | None
    dtypes: dict[torch.dtype, int]
    strided: int


@functools.cache
def torch_calls() -> Calls | None:
    """Returns what is asked of torch; None if this torch lacks any of it, or answers otherwise than Python does."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        functions = {name: torch_function(*where) for name, where in _IMPORTS.items()}
        interface = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        dtypes = {dtype: int(getattr(interface, f"aoti_torch_dtype_{name}")()) for dtype, name in _DTYPES.items()}
        questions = torch_function(*_VERSION), torch_function(*_REQUIRES_GRAD)
        strided = int(interface.aoti_torch_layout_strided())
        calls = Calls(native.TensorCalls(**functions), *questions, dtypes, strided)
        why = "" if _works(calls) else "a trial found other answers than torch's own"
    except (AttributeError, OSError) as error:
        why = str(error)
    if why:
        logging.getLogger("zerokern").warning("gradients are read one by one from Python, which is slower: %s", why)
        return None
    return calls


def torch_function(file: str, symbol: str) -> int | None:
    """Returns the address of a function of one of torch's libraries.

    >>> torch_function("libtorch_cpu.so", "aoti_torch_get_numel") is None
    False
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file))
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value


def _works(calls: Calls) -> bool:
    """Returns whether a trial finds a gradient at its address, and what Python says of a parameter and a tensor."""
    with torch.inference_mode(False):  # tensors of that have no version, and the native call would not survive it
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))
        weight.grad = torch.ones_like(weight)
        trials = [weight, torch.zeros(2, device="cpu").add_(1).mul_(2)]
    reader = GradientReader([weight], [weight.data_ptr()], [3], [weight.dtype], [weight.dtype], calls)
    library, bodies, count = native.library(), array("Q", map(_tensor_of, trials)), len(trials)
    versions, trained = array("q", bytes(8 * count)), array("B", bytes(count))
    library.zk_versions(calls.version, bodies.buffer_info()[0], versions.buffer_info()[0], count)
    library.zk_trained(calls.requires_grad, bodies.buffer_info()[0], trained.buffer_info()[0], count)
    right = versions.tolist() == list(map(_version_of, trials)) and trained.tolist() == list(map(_is_trained, trials))
    return right and reader.read() == array("Q", [weight.grad.data_ptr()])


class GradientReader:
    """Compares parameters and their gradients with what was recorded, and reads the gradients' addresses.

    >>> weight = torch.nn.Parameter(torch.ones(3)); weight.grad = torch.ones(3)
    >>> reader = GradientReader([weight], [weight.data_ptr()], [3], [torch.float32], [torch.float32])
    >>> reader.read().tolist() == [weight.grad.data_ptr()]
    True
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        addresses: Sequence[int] | None,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        grad_dtypes: Sequence[torch.dtype],
        calls: Calls | None = None,
    ) -> None:
        """`addresses`: None where the parameters themselves may be anywhere. `calls`: torch's, if they are given."""
        self.cells = TensorBodies(params)
        self._recorded = addresses, list(numels), list(dtypes), list(grad_dtypes)
        self._calls = torch_calls() if calls is None else calls
        if self._calls is None:
            return
        numbers = self._calls.dtypes
        self._columns = (
            self.cells.bodies,
            array("Q", addresses or ()),
            array("Q"),
            array("q", numels),
            array("i", [numbers[dtype] for dtype in dtypes]),
            array("i", [numbers[dtype] for dtype in grad_dtypes]),
        )
        columns = [column.buffer_info()[0] if len(column) else None for column in self._columns]
        self._list = native.TensorList(*columns, len(params), self._calls.strided)
        self._read = native.library().zk_gradients

    def read(self, grads: Sequence[Tensor] | None = None) -> array[int] | None:
        """Returns the addresses of the parameters' gradients, or of `grads`.

        None if one is missing, or a gradient or parameter is not as recorded.

        `torch.utils.swap_tensors` may have exchanged TensorImpls, so these are compared first.
        """
        if self._calls is None:
            return self._read_one_by_one(grads)
        if not self.cells.unchanged():
            return None
        bodies = None if grads is None else array("Q", map(_tensor_of, grads))
        self._list.gradients = None if bodies is None else bodies.buffer_info()[0]
        addresses = array("Q", bytes(8 * len(self.cells.bodies)))
        count = self._read(ctypes.byref(self._calls.functions), ctypes.byref(self._list), addresses.buffer_info()[0])
        return addresses if count == len(addresses) else None

    def _read_one_by_one(self, given: Sequence[Tensor] | None) -> array[int] | None:
        """Does what the native call does, where torch does not offer what that needs."""
        params, (places, numels, dtypes, grad_dtypes) = self.cells.tensors, self._recorded
        try:
            grads = list(map(_grad_of, params)) if given is None else given
            pointers = array("Q", map(_pointer_of, grads))
        except (TypeError, RuntimeError):  # a gradient that went away, or one without memory
            return None
        unchanged = (
            list(map(_dtype_of, grads)) == grad_dtypes
            and list(map(_numel_of, grads)) == numels
            and all(map(_is_contiguous, grads))
            and not any(map(_is_neg, grads))
            and places in (None, list(map(_pointer_of, params)))
            and list(map(_dtype_of, params)) == dtypes
            and list(map(_numel_of, params)) == numels
            and all(map(_is_contiguous, params))
        )
        return pointers if unchanged else None


@functools.cache
def body_offset() -> int | None:
    """Returns the offset in a tensor's Python object of the pointer to its TensorImpl; None if that is not known.

    >>> body_offset() % 8
    0
    """
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
        self.tensors, place = tensors, body_offset()
        self._known = place is not None
        self.bodies = array("Q", map(_tensor_of, tensors))
        self._cells = array("Q", [id(tensor) + (place or 0) for tensor in tensors])
        # where these two lie, and how many they are: asked for in each of many calls
        self._at = self._cells.buffer_info()[0], self.bodies.buffer_info()[0], len(self.bodies)
        # tensors of inference mode have no versions, of which torch raises an error, and the native call would crash
        self._counts_natively = len(tensors) > _FEW and not any(map(_is_inference, tensors))

    def unchanged(self) -> bool:
        """Returns whether every tensor still has the TensorImpl that it had."""
        if not self._known:
            return array("Q", map(_tensor_of, self.tensors)) == self.bodies
        return bool(native.library().zk_in_cells(*self._at) == self._at[2])

    def have_gradients(self, gradients: array[int] | None = None) -> bool:
        """Returns whether the gradient of every tensor is the one with this TensorImpl; None: whether none has one.

        >>> weight, grad = torch.nn.Parameter(torch.ones(3)), torch.ones(3); bodies = TensorBodies([weight])
        >>> weight.grad = grad; bodies.have_gradients(), bodies.have_gradients(TensorBodies([grad]).bodies)
        (False, True)
        """
        calls = torch_calls()
        if calls is None or not self.unchanged():
            grads = list(map(_grad_of, self.tensors))
            if gradients is None or None in grads:
                return gradients is None and grads.count(None) == len(grads)
            return array("Q", map(_tensor_of, grads)) == gradients
        _, bodies, count = self._at
        wanted = None if gradients is None else gradients.buffer_info()[0]
        asked = native.library().zk_have_gradients
        return bool(asked(ctypes.byref(calls.functions), bodies, wanted or 0, count) == count)

    def are_at(self, addresses: array[int]) -> bool:
        """Returns whether the memory of every tensor begins at its address.

        >>> weight = torch.ones(3); TensorBodies([weight]).are_at(array("Q", [weight.data_ptr()]))
        True
        """
        calls = torch_calls()
        if calls is None or not self.unchanged():
            return array("Q", map(_pointer_of, self.tensors)) == addresses
        _, bodies, count = self._at
        asked = native.library().zk_in_place
        return bool(asked(ctypes.byref(calls.functions), bodies, addresses.buffer_info()[0], count) == count)

    def versions(self) -> array[int]:
        """Returns the versions of the tensors; raises as torch does for one of inference mode.

        >>> TensorBodies([torch.ones(3).add_(1), torch.ones(3)]).versions().tolist()
        [1, 0]
        >>> with torch.inference_mode():
        ...     bodies = TensorBodies([torch.ones(3) for _ in range(100)])
        >>> bodies.versions()
        Traceback (most recent call last):
        ...
        RuntimeError: Inference tensors do not track version counter.
        """
        calls = torch_calls() if self._counts_natively else None
        if calls is None or not self.unchanged():
            return array("q", map(_version_of, self.tensors))
        (_, bodies, count), found = self._at, array("q", bytes(8 * self._at[2]))
        native.library().zk_versions(calls.version, bodies, found.buffer_info()[0], count)
        return found

    def trained(self) -> bytes:
        """Returns for each tensor whether it requires a gradient, as 1 or 0.

        >>> TensorBodies([torch.ones(3), torch.nn.Parameter(torch.ones(3))]).trained()
        b'\\x00\\x01'
        """
        calls = torch_calls()
        if calls is None or not self.unchanged():
            return bytes(map(_is_trained, self.tensors))
        (_, bodies, count), found = self._at, array("B", bytes(self._at[2]))
        native.library().zk_trained(calls.requires_grad, bodies, found.buffer_info()[0], count)
        return found.tobytes()

    def bump_versions(self) -> None:
        """Bumps the version counter of each tensor, for autograd, after kernels that torch does not know of wrote to
        it."""
        raising = _bump_version_function() if self._known else None
        if raising is None:
            torch.autograd.graph.increment_version(self.tensors)
        else:
            native.library().zk_raise_versions(raising, *self._cells.buffer_info())


def storage_references(tensor: Tensor) -> int:
    """Returns how many tensors there are over a tensor's memory.

    >>> one = torch.zeros(2); before = storage_references(one); view = one[1:]; storage_references(one) - before
    1
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
