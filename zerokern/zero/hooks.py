"""The only file that hooks into modules, autograd and optimizers; what happens then is up to what it is handed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "after_accumulation",
    "around_state_dicts",
    "at_end_of_backward",
    "before_accumulation",
    "graph_tensors",
    "has_tensors",
    "in_backward",
    "on_optimizer_steps",
    "when_gradient_is_there",
    "wrap_forward",
]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Before = Callable[[Args, Kwargs], tuple[Args, Kwargs] | None]
After = Callable[[Any], Any]


def before_accumulation(param: Tensor, receive: Callable[[Tensor], None]) -> object:
    """Hand each complete gradient of a leaf to `receive`, not to its `.grad`, for as long as the result is held.

    The node that would accumulate asks its pre-hooks first, after the hooks of the tensor itself; None in place of the
    gradient leaves it with nothing to do. The node lives as long as somebody holds it.
    """
    with torch.enable_grad():
        view = param.expand_as(param)
    assert view.grad_fn is not None
    node: Any = view.grad_fn.next_functions[0][0]

    def intercept(grads: tuple[Tensor | None, ...]) -> tuple[None]:
        if grads[0] is not None:
            receive(grads[0])
        return (None,)

    node.register_prehook(intercept)
    return node


def after_accumulation(param: Tensor, call: Callable[[Tensor], None]) -> Any:
    """Call with the parameter whenever its `.grad` has been accumulated into; the result's `remove()` ends that."""
    return param.register_post_accumulate_grad_hook(call)


def around_state_dicts(module: nn.Module, call: Callable[[], None]) -> None:
    """Call before the module's state_dict is made, and before one is loaded."""
    module.register_state_dict_pre_hook(lambda *_: call())
    module.register_load_state_dict_pre_hook(lambda *_: call())


def in_backward() -> bool:
    """Whether autograd is running a pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_gradient_is_there(tensor: Tensor, call: Callable[[], None]) -> None:
    """Call when the gradient of a tensor of the graph is complete, before it goes further back."""

    def told(_: Tensor) -> None:
        call()

    tensor.register_hook(told)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the pass that is running is over, unless it breaks off."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def wrap_forward(module: nn.Module, before: Before, after: After) -> None:
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

    module.register_forward_pre_hook(torch._dynamo.disable(pre), prepend=True, with_kwargs=True)
    module.register_forward_hook(torch._dynamo.disable(post), with_kwargs=True, always_call=True)


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


def has_tensors(value: Any) -> bool:
    """Whether a forward's result is of a form in which tensors are found."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(has_tensors, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(has_tensors(getattr(value, one.name, None)) for one in dataclasses.fields(value))
    return False


def graph_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a forward's result that a gradient can come through.

    >>> x = torch.ones(1, requires_grad=True)
    >>> len(list(graph_tensors({"a": [x, 2 * x], "b": (torch.ones(1), "text")})))
    2
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from graph_tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from graph_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from graph_tensors(getattr(value, one.name, None))


def on_optimizer_steps(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Call around every step of every torch optimizer of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: before(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: after(optimizer))
