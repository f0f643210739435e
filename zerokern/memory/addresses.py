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
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerokern.core import native

__all__ = ["AddressRecord", "GradientReader", "MemoryRecord", "TensorBodies", "gradient_reader"]

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
_QUESTIONS = {  # asked of tensors that nothing is expected of
    "version": ("libtorch_cpu.so", "_ZNK2at10TensorBase8_versionEv"),
    "requires_grad": ("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv"),
}
_COUNTS_A_WRITE = (  # `torch::autograd::impl::bump_version`, of whichever class torch declares it
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    "_ZN5torch8autograd4impl12bump_versionERKN2at10TensorBaseE",
)
_FEW = 50  # tensors whose versions Python reads as fast as the native library: those of one unit are often so few
_WORDS = torch._C.TensorBase.__basicsize__ // 8  # of a tensor's Python object, one of which points to its TensorImpl
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_tensor_of = operator.attrgetter("_cdata")
_pointer_of = torch.Tensor.data_ptr
_is_freed = torch.UntypedStorage._expired  # of a storage that is referred to weakly
_grad_of, _version_of = operator.attrgetter("grad"), operator.attrgetter("_version")
_is_trained = operator.attrgetter("requires_grad")
Calls = tuple[native.TensorCalls, dict[torch.dtype, int], int]


@functools.cache
def torch_calls() -> Calls | None:
    """Returns torch's functions, its numbers for dtypes and for the strided layout; None if this torch lacks one."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        functions = {name: _function(*where) for name, where in _IMPORTS.items()}
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


def _function(file: str, symbol: str) -> int | None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file))
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value


@functools.cache
def _questions() -> dict[str, int | None]:
    """Returns torch's functions that answer by tensor; none if this torch lacks one, or answers otherwise than Python
    does."""
    try:
        found = {name: _function(*where) for name, where in _QUESTIONS.items()}
    except (AttributeError, OSError):
        return {}
    trials = [torch.nn.Parameter(torch.ones(1, device="cpu")), torch.zeros(2, device="cpu").add_(1).mul_(2)]
    library, bodies, count = native.library(), array("Q", map(_tensor_of, trials)), len(trials)
    versions, trained = array("q", bytes(8 * count)), array("B", bytes(count))
    library.zk_versions(found["version"], bodies.buffer_info()[0], versions.buffer_info()[0], count)
    library.zk_trained(found["requires_grad"], bodies.buffer_info()[0], trained.buffer_info()[0], count)
    right = versions.tolist() == list(map(_version_of, trials)) and trained.tolist() == list(map(_is_trained, trials))
    return found if right else {}


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

    def have_gradients(self, gradients: array[int] | None = None) -> bool:
        """Returns whether the gradient of every tensor is the one with this TensorImpl; None: whether none has one.

        >>> weight, grad = torch.nn.Parameter(torch.ones(3)), torch.ones(3); bodies = TensorBodies([weight])
        >>> weight.grad = grad; bodies.have_gradients(), bodies.have_gradients(TensorBodies([grad]).bodies)
        (False, True)
        """
        calls = torch_calls()
        if calls is None or not self.unchanged():
            grads = list(map(_grad_of, self._tensors))
            if gradients is None or None in grads:
                return gradients is None and grads.count(None) == len(grads)
            return array("Q", map(_tensor_of, grads)) == gradients
        bodies, count = self.bodies.buffer_info()
        wanted = None if gradients is None else gradients.buffer_info()[0]
        return bool(native.library().zk_have_gradients(ctypes.byref(calls[0]), bodies, wanted or 0, count) == count)

    def are_at(self, addresses: array[int]) -> bool:
        """Returns whether the memory of every tensor begins at its address.

        >>> weight = torch.ones(3); TensorBodies([weight]).are_at(array("Q", [weight.data_ptr()]))
        True
        """
        calls = torch_calls()
        if calls is None or not self.unchanged():
            return array("Q", map(_pointer_of, self._tensors)) == addresses
        bodies, count = self.bodies.buffer_info()
        asked = native.library().zk_in_place
        return bool(asked(ctypes.byref(calls[0]), bodies, addresses.buffer_info()[0], count) == count)

    def versions(self) -> array[int]:
        """Returns the versions of the tensors, of which none may be an inference tensor.

        >>> TensorBodies([torch.ones(3).add_(1), torch.ones(3)]).versions().tolist()
        [1, 0]
        """
        version = _questions().get("version") if len(self.bodies) > _FEW else None
        if version is None or not self.unchanged():
            return array("q", map(_version_of, self._tensors))
        (bodies, count), found = self.bodies.buffer_info(), array("q", bytes(8 * len(self.bodies)))
        native.library().zk_versions(version, bodies, found.buffer_info()[0], count)
        return found

    def trained(self) -> bytes:
        """Returns for each tensor whether it requires a gradient, as 1 or 0.

        >>> TensorBodies([torch.ones(3), torch.nn.Parameter(torch.ones(3))]).trained()
        b'\\x00\\x01'
        """
        requires_grad = _questions().get("requires_grad")
        if requires_grad is None or not self.unchanged():
            return bytes(map(_is_trained, self._tensors))
        (bodies, count), found = self.bodies.buffer_info(), array("B", bytes(len(self.bodies)))
        native.library().zk_trained(requires_grad, bodies, found.buffer_info()[0], count)
        return found.tobytes()

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


class MemoryRecord:
    """The memory of tensors, for whoever keeps something made of their values: whether it was exchanged since.

    Allocators give memory that was freed out again at the same address. So a tensor has what it had only where its
    address is the same and the storage that was there lives; that is referred to weakly, and freed as if unknown here.
    The same memory under another storage, while the first one lives, counts as the same.

    >>> weight = torch.ones(3); known = MemoryRecord([weight]); known.exchanged()
    [False]
    >>> weight.data = torch.ones(3); known.exchanged()
    [True]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.look()

    def look(self) -> None:
        """Records the memory that the tensors have now."""
        self._addresses = list(map(_pointer_of, self._tensors))
        self._storages = [StorageWeakRef(one.untyped_storage()) for one in self._tensors]
        self._numbers = [storage.cdata for storage in self._storages]

    def look_again(self) -> None:
        """Does what `look` does, in less time where most of them have what was recorded."""
        if [one.untyped_storage()._cdata for one in self._tensors] != self._numbers:
            self.look()
        else:
            self._addresses = list(map(_pointer_of, self._tensors))

    def any_freed(self) -> bool:
        """Returns whether a storage has been freed: all that is left to ask about tensors that are at their address."""
        return any(map(_is_freed, self._numbers))

    def exchanged(self) -> list[bool]:
        """Returns for each tensor whether it has other memory."""
        moved = map(operator.ne, map(_pointer_of, self._tensors), self._addresses)
        return list(map(operator.or_, moved, map(_is_freed, self._numbers)))
