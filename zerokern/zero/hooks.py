"""The only file that hooks into modules, autograd and optimizers; what happens then is up to what it is handed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from zerokern.core.errors import StateError

__all__ = [
    "NO_PASS",
    "Arrivals",
    "UserHooks",
    "accumulates_here",
    "accumulator",
    "after_loading",
    "around_forward",
    "at_end_of_backward",
    "before_accumulation",
    "current_pass",
    "graph_task",
    "graph_tensors",
    "hooks_after_accumulation",
    "import_compiler",
    "in_backward",
    "in_compiled_backward",
    "is_accumulated",
    "is_within_pass",
    "keep_hook",
    "keep_user_hooks",
    "made_anew",
    "next_node",
    "on_accumulation",
    "on_gradient",
    "on_optimizer_steps",
    "on_registration",
    "outside_of_transforms",
    "received",
    "refuse_gradients",
    "share_hooks",
    "untraced",
    "weakly",
    "when_backward_begins",
    "when_gradient_is_there",
    "within_pass",
    "wrap_forward",
]

NOT_WHOLE = (
    "zk.shard gathers parameters, or waits for them, before each of its units: no graph goes across one; allowed: "
    "torch.compile(model) without fullgraph=True, or unit.compile(fullgraph=True) for each"
)
Args = tuple[Any, ...]
Function = TypeVar("Function", bound=Callable[..., Any])
Kwargs = dict[str, Any]
Before = Callable[[Args, Kwargs], tuple[Args, Kwargs] | None]
After = Callable[[Any], Any]


NO_PASS = -2  # the number of none


class Arrivals:
    """Which gradients of a bucket have arrived in `.grad`, by place, in the backward pass with the number `task`.

    `expected`: how many complete the bucket. `receive`: called for each that is not only noted. The hooks of leaves
    keep it: it must refer to no leaf.
    """

    __slots__ = ("arrived", "expected", "receive", "task")

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.task, self.expected = NO_PASS, 0
        self.receive: Callable[[int], None] = _nothing


def before_accumulation(param: Tensor, receive: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None]]) -> object:
    """Ask `receive`, given each complete gradient of a leaf, what to add to its `.grad`, while the result is held.

    The node that would accumulate asks its pre-hooks first, after the hooks of the tensor itself; None in place of the
    gradient leaves it with nothing to do. The node lives as long as somebody holds it.
    """
    node: Any = accumulator(param)
    node.register_prehook(_Own(receive))
    return node


class UserHooks(OrderedDict):
    """What torch keeps of hooks that run after accumulation: it calls `note`, and those of users are kept apart.

    torch registers and removes them here, by handle, and sees none of them; `kept` has them.

    >>> leaf, kept = nn.Parameter(torch.ones(1)), {}
    >>> keep_user_hooks(leaf, kept, note=lambda param: None)
    >>> handle = leaf.register_post_accumulate_grad_hook(print)
    >>> leaf.sum().backward(); len(kept)
    1
    >>> handle.remove(); len(kept)
    0
    """

    kept: dict[int, Callable[[Tensor], None]]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.kept[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self.kept[key]

    def __contains__(self, key: object) -> bool:
        return key in self.kept


def keep_user_hooks(
    leaf: Tensor, kept: dict[int, Callable[[Tensor], None]], note: Callable[[Tensor], None] | None = None
) -> None:
    """From now on hooks that run after accumulation into the leaf are kept by handle, and `note` runs instead."""
    found = UserHooks()
    found.kept = kept
    if note is not None:
        OrderedDict.__setitem__(found, "zerokern", note)
    with torch._C.DisableTorchFunctionSubclass():
        leaf._post_accumulate_grad_hooks = found


def on_accumulation(
    arrivals: Arrivals, place: int, receive: Callable[[int], None], *, waits: bool
) -> Callable[[Tensor], None]:
    """A hook that notes among `arrivals` that autograd has put a gradient into a leaf's `.grad`.

    `receive` is that of all these leaves, and called with the place of a gradient that is not to wait, or not noted.
    It runs for each parameter in each pass. It must not refer to the leaf: no collector sees that.
    """
    if arrivals.receive is _nothing:
        arrivals.receive = _Own(receive)
    if not waits:
        return lambda _: arrivals.receive(place)
    _skip(_note.__code__)
    return functools.partial(_note, arrivals, place)


def _note(arrivals: Arrivals, place: int, _: Tensor) -> None:
    arrived = arrivals.arrived
    if arrivals.task == graph_task() and place not in arrived and len(arrived) + 1 < arrivals.expected:
        arrived.add(place)
    else:
        arrivals.receive(place)


@functools.cache
def _skip(code: types.CodeType) -> None:
    """Torch's compiler traces no frame of this code. What is called from there is `_Own`, or no Python."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def untraced(function: Function) -> Function:
    """Torch's compiler traces neither the function nor what it calls, and a call costs no more than before.

    `torch.compiler.disable` wraps a function, which takes microseconds a call: this is for what runs for each tensor.

    >>> untraced(abs_of := lambda x: abs(x)) is abs_of
    True
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(cast(Any, function).__code__, frames._FrameExecStrategy(skip, skip))
    return function


def accumulator(leaf: Tensor) -> Any:
    """The node that accumulates the gradient of a leaf, which lives as long as somebody holds it."""
    with torch._C.DisableTorchFunctionSubclass():  # of the leaf itself, whatever it stands for
        return torch.autograd.graph.get_gradient_edge(leaf).node


def weakly(method: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A call of the method that does not keep its object; once that is gone, of `otherwise`, or of nothing.

    Modules, parameters and units are referred to by what they call back. Strong references both ways would leave a
    dropped model to the garbage collector, which training loops switch off.

    >>> class Listener:
    ...     def hear(self, word): return word
    >>> listener = Listener(); hear = weakly(listener.hear)
    >>> hear("one"); del listener; hear("two")
    'one'
    """
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any, **kwargs: Any) -> Any:
        there = reference()
        if there is not None:
            return function(there, *args, **kwargs)
        return None if otherwise is None else otherwise(*args, **kwargs)

    return call


def refuse_gradients(*_: Any) -> NoReturn:
    """Raise: a graph outlived the model that its gradients are of."""
    raise StateError("these are gradients of a sharded model that is gone; keep the model until its backward")


class _Own:
    """What torch calls back: no compiler traces it, wherever it is called from.

    A module's hook stays with it: a copy of the module, or what is pickled of it, has one that does nothing.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        _trace_none()
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    @property
    def __name__(self) -> str:
        """There is none, as of other objects that are called; torch.jit.script asks for it first of all."""
        raise AttributeError(
            "torch.jit.script cannot compile a model of zk.shard or zk.build, whose hooks run in Python; allowed: "
            "torch.compile(model), or torch.jit.script of a plain model that zk.load has filled"
        )

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _of_a_copy, ()


@functools.cache
def import_compiler() -> None:
    """Imports torch's compiler, which takes seconds, where it is needed anyway.

    On a stack of its own: torch.fx keeps the frames that it is imported from (a frame refers to itself in `fx.wrap`),
    and with them the model or optimizer that is being made.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="import torch._dynamo")
    thread.start()
    thread.join()


@functools.cache
def _trace_none() -> None:
    """Once, with the first of them: what `torch.compiler.disable` marks, without its wrapper, which each call pays."""
    import_compiler()
    call: Any = untraced(_Own.__call__)
    call._torchdynamo_disable = call._torchdynamo_disable_recursive = True
    call._torchdynamo_disable_msg = NOT_WHOLE


def _of_a_copy() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


#: what is to be called after accumulation into a tensor, if anything
hooks_after_accumulation = attrgetter("_post_accumulate_grad_hooks")


def on_gradient(leaf: Tensor, call: Callable[[Tensor], Tensor | None]) -> Any:
    """Call with the leaf's gradient, before it is handed over; what it returns takes the gradient's place."""
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.register_hook(call)


def keep_hook(kept: dict[int, Callable[[Tensor], None]], call: Callable[[Tensor], None]) -> Any:
    """Beside hooks that are kept; the result's `remove()` takes it out again."""
    handle = RemovableHandle(kept)
    kept[handle.id] = call
    return handle


def share_hooks(param: Tensor, leaf: Tensor) -> None:
    """Another leaf is what autograd meets: hooks on the gradient of one are called for it, until they are removed."""
    with torch._C.DisableTorchFunctionSubclass():
        if param._backward_hooks is not None:
            leaf._backward_hooks = param._backward_hooks


def after_loading(module: nn.Module, call: Callable[[], None]) -> None:
    """Call after a state_dict has been loaded into the module, or into one around it."""
    module.register_load_state_dict_post_hook(_Own(lambda *_: call()))


#: the number of the pass that autograd itself is running in this thread; -1: none. No Python runs when it is called
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is running a pass in this thread."""
    return graph_task() != -1


def accumulates_here() -> bool:
    """Within an operator: whether autograd itself has called it, and no code of Python's."""
    return in_backward() and torch._C._is_torch_function_enabled()


def in_compiled_backward() -> bool:
    """Whether torch's compiled autograd runs a pass in this thread: it has traced the nodes that accumulate gradients,
    and does their part itself, without what is asked of these nodes here. Its own mark is of all threads."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    frame: types.FrameType | None = sys._getframe()
    while module is not None and frame is not None:
        if frame.f_globals is vars(module):
            return True
        frame = frame.f_back
    return False


def current_pass() -> int:
    """The number of the pass that autograd is running in this thread; -1: none. Those `within_pass` count as that."""
    number = graph_task()
    return number if number == -1 or _pass.number == -1 else _pass.number


class _Pass(threading.local):
    number = -1


_pass = _Pass()


@contextmanager
def within_pass() -> Iterator[None]:
    """Passes that are begun within, by functions of the graph, are parts of the one that is running."""
    before, _pass.number = _pass.number, current_pass()
    try:
        yield
    finally:
        _pass.number = before


def is_within_pass() -> bool:
    """Whether this is such a part."""
    return _pass.number != -1


def is_accumulated(node: Any) -> bool | None:
    """Whether the pass that is running adds to the leaf of this node; None: it hands the gradient to its caller."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad
        return None


@contextmanager
def received(leaves: Iterable[tuple[Tensor, Callable[[Tensor], None], bool]]) -> Iterator[None]:
    """Gradients of these leaves, of passes within, go to these calls at once; what such a pass returns is a stand-in.

    Other hooks on a leaf come first, or, where it says True, hear nothing.
    """
    silenced: list[tuple[dict, dict]] = []
    handles: list[Any] = []
    try:
        with torch._C.DisableTorchFunctionSubclass():
            for leaf, call, alone in leaves:
                heard = leaf._backward_hooks
                if alone and heard:
                    silenced.append((heard, dict(heard)))
                    heard.clear()
                handles.append(leaf.register_hook(functools.partial(_receive, call)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for heard, before in silenced:
            heard.update(before)


def _receive(call: Callable[[Tensor], None], grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    call(grad)
    plain = type(grad) is Tensor and grad.layout is torch.strided
    return grad.new_zeros(()).expand(grad.shape) if plain else None


def when_gradient_is_there(tensor: Tensor, call: Callable[[Tensor], None]) -> None:
    """Call with the gradient of a tensor of the graph when it is complete, before it goes further back."""
    tensor.register_hook(_Own(call))


def when_backward_begins(result: Any, call: Callable[[], None]) -> None:
    """Calls when the gradient of any tensor that a forward returned is there, for each of them."""
    for output in graph_tensors(result):
        when_gradient_is_there(output, lambda _: call())


def at_end_of_backward(call: Callable[[], None], broken: Callable[[], None] | None = None) -> object:
    """Calls `call` when the pass that is running is over, or `broken` as soon as an error has ended it.

    `broken` is called as long as the result is held: who drops it in `call` has no code run when the pass is gone. What
    Python raises there, Ctrl-C too, it prints and forgets.
    """
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    watch = None
    if broken is not None:
        token = functools.partial(bool)  # autograd alone keeps it: no frame does, of which a traceback could be kept
        watch = weakref.ref(token, lambda _: broken())
        queue(token)
    queue(_Own(call))
    return watch


#: context manager: what is done within is none of what torch.func differentiates or maps over
outside_of_transforms: Callable[[], AbstractContextManager] = torch._C._DisableFuncTorch


def wrap_forward(module: nn.Module, before: Before = _nothing, after: After = _nothing) -> None:
    """Call `before(args, kwargs)` first of all and `after(result)` last, also when the forward raised (then of None).

    A module that was compiled in place (`module.compile()`) traces its own hooks: there the call around it is wrapped.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is not None:
        module._compiled_call_impl = _around(compiled, before, after)
        return

    def pre(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        return before(args, kwargs)

    def post(_: nn.Module, args: Args, kwargs: Kwargs, result: Any) -> Any:
        return after(result)

    module.register_forward_pre_hook(_Own(pre), prepend=True, with_kwargs=True)
    module.register_forward_hook(_Own(post), with_kwargs=True, always_call=True)


def _around(call: Callable[..., Any], before: Before, after: After) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = None
        args, kwargs = before(args, kwargs) or (args, kwargs)
        try:
            result = call(*args, **kwargs)
        finally:
            changed = after(result)
        return result if changed is None else changed

    return wrapped


class _Around:
    """What a module has in the place of its forward; a copy of it, or what is pickled of it, has its forward itself."""

    def __init__(self, forward: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        del self.__wrapped__
        self._call = call
        self._kept: Any = forward
        if isinstance(forward, types.MethodType):  # of the module that this is an attribute of: it must not keep that
            self._kept = weakref.WeakMethod(forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        found: Any = self._kept() if type(self._kept) is weakref.WeakMethod else self._kept
        return cast("Callable[..., Any]", found)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            return self._forward
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._forward, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self._forward,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def around_forward(module: nn.Module, call: Callable[[Callable[..., Any], Args, Kwargs], Any]) -> None:
    """Have `call(forward, args, kwargs)` compute, within what hooks do before and after; of a compiled one, all of it.

    >>> layer = nn.Identity()
    >>> around_forward(layer, lambda forward, args, kwargs: forward(*args, **kwargs) + 1)
    >>> layer(torch.ones(1))
    tensor([2.])
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        module.forward = _Around(module.forward, call)
    else:
        module._compiled_call_impl = lambda *args, **kwargs: call(compiled, args, kwargs)


def next_node() -> int:
    """The number that the next node of this thread's graph will have."""
    return torch._C._autograd._get_sequence_nr()


def graph_tensors(value: Any, first: int = 0) -> Iterator[Tensor]:
    """The tensors in a forward's result that a gradient can come through, and that no node before `first` made.

    >>> x = torch.ones(1, requires_grad=True)
    >>> y, first, z = 2 * x, next_node(), 3 * x
    >>> len(list(graph_tensors({"a": [x, y], "b": (torch.ones(1), z, "text")})))
    2
    >>> [one is z for one in graph_tensors([y, z], first)]
    [True]
    """
    if isinstance(value, Tensor):
        if value.grad_fn is not None and value.grad_fn._sequence_nr() >= first:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from graph_tensors(item, first)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from graph_tensors(item, first)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from graph_tensors(getattr(value, one.name, None), first)


def made_anew(module: nn.Module) -> list[str]:
    """The attributes that hooks of torch's own set before each forward.

    >>> made_anew(nn.utils.weight_norm(nn.Linear(2, 2)))
    ['weight']
    """
    found = module._forward_pre_hooks.values()
    pruned = [hook._tensor_name for hook in found if isinstance(hook, BasePruningMethod)]
    return pruned + [hook.name for hook in found if isinstance(hook, WeightNorm | SpectralNorm)]


def on_registration(exchange: Callable[[Tensor], Tensor | None]) -> None:
    """Ask, whenever any module is given a parameter, what it is to be given instead; None: nothing else."""
    ask: Any = lambda module, name, param: exchange(param)  # noqa: E731  torch's types say that it answers nothing
    register_module_parameter_registration_hook(ask)


def on_optimizer_steps(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Call around every step of every torch optimizer of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: before(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: after(optimizer))
