"""What the contract names and no other program does: things that are common alone, where two of them meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from module_cases import EndsInNone, GivesNone, Reordered
from small_programs import Run, loss_program, program
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from zero_cases import IN, OUT, WIDTH, Block, Net


@loss_program(Net)
def a_penalty_of_the_input_through_checkpoints(run: Run, model: nn.Module, step: int) -> Tensor:
    """Double backward, whose first one recomputes."""
    x, y = run.data(step)
    x.requires_grad_()
    hidden = model.enter(x)
    for block in model.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    out = model.leave(hidden)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.1 * grad.square().mean()


class WritesItsGradient(torch.autograd.Function):
    """Adds to the weight's `.grad` itself, as kernels do that accumulate within the matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x, values), weight = ctx.saved_tensors, ctx.weight
        own = grad.t() @ x
        if weight.grad is None:
            weight.grad = own
        else:
            weight.grad.add_(own)
        return grad @ values, None


class WrittenBeside(Net):
    """A use of a weight beside the one of its module: of a block's, or of the last layer's."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number == self.number:
                hidden = hidden + WritesItsGradient.apply(hidden, block.up.weight)[:, :WIDTH]
        out = self.leave(hidden)
        return out if self.number is not None else out + WritesItsGradient.apply(hidden, self.leave.weight)


for number in (None, 0, 1):

    def loop(run: Run, number: int | None = number) -> None:
        run.train(run.shard(partial(WrittenBeside, number)), 3)

    loop.__name__ = f"a_gradient_written_by_a_function_in_{'the_last_layer' if number is None else f'block_{number}'}"
    program(exact=False)(loop)


def gradients_that_are_none(run: Run, gives: Callable[[int], str]) -> None:
    model = run.shard(EndsInNone)
    optimizer = run.optimizer(model.parameters())
    for step in range(5):
        model.gives = gives(step)
        run.backward(run.mse(model, step))
        run.see([name for name, param in model.named_parameters() if param.grad is None])
        optimizer.step()
        optimizer.zero_grad()


@program()
def a_function_gives_its_input_no_gradient(run: Run) -> None:
    gradients_that_are_none(run, lambda step: "w")


@program()
def a_function_gives_no_gradient_in_some_steps(run: Run) -> None:
    gradients_that_are_none(run, lambda step: ("xw", "w", "x", "", "xw")[step])


@program()
def a_function_gives_no_gradient_on_one_rank(run: Run) -> None:
    gradients_that_are_none(run, lambda step: ("xw", "w", "x")[(step + run.rank) % 3])


@program(exact=False)
def gradients_that_are_none_added_to_those_that_were_kept(run: Run) -> None:
    """In the second pass the first that autograd calls a hook for is None, and no forward of the model has begun it."""
    model = run.shard(EndsInNone)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        run.backward(run.mse(model, step))
        for weight in (model.leave.weight, model.blocks[1].up.weight):
            run.backward(GivesNone.apply(torch.ones(1, weight.shape[1]), weight, "").sum())
        run.backward(run.mse(model, step + 1))
        optimizer.step()
        optimizer.zero_grad()


@program(late=False)
def gradients_of_inputs_by_torch_func(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(2):
        x, _ = run.data(step)

        def of(x: Tensor) -> Tensor:
            return model(x[None]).square().sum()

        run.see(torch.func.vmap(torch.func.grad(of))(x).detach())
        of_bias = partial(lambda x, bias: functional_call(model, {"leave.bias": bias}, (x,)), x)
        run.see(torch.func.vmap(of_bias)(torch.eye(OUT)).detach())
        run.step(optimizer, run.mse(model, step))


@loss_program(Net)
def a_weight_read_in_backward_by_a_hook(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    hidden = model.enter(x)
    for block in model.blocks:
        hidden = block(hidden)
        hidden.register_hook(lambda grad, block=block: grad * (1 + block.down.weight.detach().mean()))
    return F.mse_loss(model.leave(hidden), y)


@loss_program(Net)
def weights_masked_outside_of_their_modules(run: Run, model: nn.Module, step: int) -> Tensor:
    """DropConnect: one weight with a mask before its module runs, another one afterwards."""
    x, y = run.data(step)
    block, last = model.blocks[0], model.blocks[2]
    before = F.linear(model.enter(x), block.up.weight * (block.up.weight.detach().abs() > 0.1)).mean()
    out = model(x)
    after = F.linear(out.new_ones(1, last.down.in_features), last.down.weight * 0.5).mean()
    return F.mse_loss(out, y) + 0.1 * before + 0.1 * after


@loss_program(Net)
def one_module_without_a_graph_with_one_and_recomputed(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    with torch.no_grad():
        target = model(x)
    again = checkpoint(model, x + 0.1, use_reentrant=False)
    return F.mse_loss(model(x), y) + F.mse_loss(again, target)


@program()
def a_unit_left_out_for_steps_and_by_one_of_several_passes(run: Run) -> None:
    model = run.shard(Reordered)
    optimizer = run.optimizer(model.parameters())
    for step, (first, last) in enumerate((((0, 2), (0, 2)), ((0, 1, 2), (0, 2)), ((0, 2), (1,)), ((1,), (1, 0, 2)))):
        model.order = first
        with run.no_sync(model):
            run.backward(run.mse(model, 2 * step) / 2)
        model.order = last
        run.step(optimizer, run.mse(model, 2 * step + 1) / 2)


@program()
def evaluation_and_whole_parameters_between_two_passes(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        with run.no_sync(model):
            run.backward(run.mse(model, 2 * step) / 2)
        with torch.no_grad():
            run.see(run.mse(model, 50))
        with run.gathered(model), torch.inference_mode():
            run.see(run.mse(model, 51), model.blocks[1].up.weight.sum())
        run.step(optimizer, run.mse(model, 2 * step + 1) / 2)


class Adapter(nn.Module):
    """LoRA around a frozen weight; `merge` adds it to the weight, `unmerge` takes it away."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features)
        self.base.requires_grad_(False)
        self.is_merged = False

    def change(self, sign: int) -> None:
        with torch.no_grad():
            self.base.weight.add_(sign * self.up.weight @ self.down.weight)
        self.is_merged = sign > 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.is_merged else y + self.up(self.down(x))


def adapted() -> nn.Module:
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.up = Adapter(block.up)
    return net


@program(late=False)
def adapters_merged_for_evaluation_and_taken_apart(run: Run) -> None:
    model = run.shard(adapted)
    optimizer = run.optimizer([param for param in model.parameters() if param.requires_grad])
    adapters = [block.up for block in model.blocks]
    for step in range(3):
        run.step(optimizer, checkpoint(run.mse, model, step, use_reentrant=False))
        with run.gathered(model, write=True):
            for adapter in adapters:
                adapter.change(1)
        with torch.no_grad():
            run.see(run.mse(model, 50))
        with run.gathered(model, write=True):
            for adapter in adapters:
                adapter.change(-1)


@program(late=False)
def loss_scaling_over_accumulated_passes(run: Run) -> None:
    """One rank's overflow skips the step of all; what is accumulated is unscaled once."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(5):
        with run.no_sync(model):
            run.backward(scaler.scale(run.mse(model, 2 * step) / 2))
        loss = run.mse(model, 2 * step + 1) / 2
        run.backward(scaler.scale(loss * float("inf") if step == 2 and run.rank == 1 else loss))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(scaler.get_scale())


@program()
def interrupted_in_a_backward_and_in_a_forward(run: Run) -> None:
    """Ctrl-C, as a hook raises it; the step is given up, and the next one is as ever."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())

    def strike(*arguments: object) -> None:
        raise KeyboardInterrupt

    for step in range(5):
        handle = None
        if step == 1:
            handle = model.blocks[1].register_full_backward_hook(strike)
        elif step == 3:
            handle = model.blocks[1].up.register_forward_hook(strike)
        try:
            loss = run.mse(model, step)
            if step == 1:
                loss.backward()
            else:
                run.backward(loss)
            optimizer.step()
        except KeyboardInterrupt:
            run.see(step)
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()


@program()
def hooks_on_several_gradients_at_once(run: Run) -> None:
    """They hear each gradient of this rank once in a pass, as under DDP."""
    model = run.shard(Net)
    heard: list[Tensor] = []
    params = [*model.blocks[1].parameters(), model.leave.weight]
    torch.autograd.graph.register_multi_grad_hook(
        params, lambda grads: heard.extend(grad.detach().clone() for grad in grads if grad is not None)
    )
    run.train(model, 2)
    run.see(len(heard), *heard)


@loss_program(Net)
def some_values_exchanged_for_one_call(run: Run, model: nn.Module, step: int) -> Tensor:
    """functional_call with detached tensors for one unit; the others train."""
    x, y = run.data(step)
    other = {name: torch.full(param.shape, 0.01) for name, param in model.named_parameters() if "blocks.1." in name}
    return F.mse_loss(functional_call(model, other, (x,)), y)


class Deep(nn.Module):
    """Units in units in units; the innermost is used twice, and its weight is the outermost one's too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, WIDTH)
        self.blocks = nn.ModuleList(Outer() for _ in range(2))
        self.leave = nn.Linear(WIDTH, OUT)
        self.blocks[1].own.weight = self.blocks[0].inner[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, 21)
        self.inner = nn.ModuleList(Block(21) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.inner
        return first(last(first(x))) + self.own(x).mean()


@program()
def units_three_deep_with_a_weight_across_them(run: Run) -> None:
    units = lambda module: isinstance(module, Outer | Block | nn.LayerNorm)  # noqa: E731
    run.train(run.shard(Deep, **({} if type(run).__name__ == "Plain" else {"units": units})))
