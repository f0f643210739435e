"""Optimizers, groups, schedules, clipping, and what is done to gradients between backward and step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from module_cases import optimizers
from small_programs import Run, program
from torch import Tensor, nn
from zero_cases import Net

import zerokern as zk

RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (zk.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}),
    "adam_with_l2": (zk.Adam, {"weight_decay": 0.1}),
    "lion": (zk.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "adagrad": (zk.Adagrad, {}),
    "sgd_with_nesterov": (zk.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_without_momentum": (zk.SGD, {"lr": 0.05, "momentum": 0.0}),
    "state_in_bfloat16": (zk.AdamW, {"state_format": "bf16"}),
    "state_in_eight_bits": (zk.AdamW, {"state_format": "int8"}),
    "clipped_within_the_update": (zk.AdamW, {"max_grad_norm": 0.3}),
}


def by_rule(name: str) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model, (kind, settings) = run.shard(Net), RULES[name]
        run.train(model, 4, optimizer=run.optimizer(model.parameters(), kind, **settings))

    loop.__name__ = name
    return loop


for rule in RULES:
    program()(by_rule(rule))


@program()
def a_group_added_later(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer([*model.enter.parameters(), *model.blocks.parameters()])
    run.train(model, 2, optimizer=optimizer)
    optimizer.add_param_group({"params": list(model.leave.parameters()), "lr": 5e-3})
    model.zero_grad()
    run.train(model, 3, optimizer=optimizer)


@program()
def one_cycle(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    for step in range(6):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        schedule.step()
    run.see(schedule.get_last_lr()[0])


@program()
def warmup_and_cosine(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(optimizers.by_dimension(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / 2, 0.5 + 0.5 * math.cos(step / 3)) + 0.01
    )
    for step in range(5):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        schedule.step()


@program()
def a_rate_changed_between_backward_and_step(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        run.backward(run.mse(model, step))
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


@program(exact=False)
def clipped_by_zk_clip_grad_norm(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(4):
        run.backward(run.mse(model, step))
        run.see(round(float(zk.clip_grad_norm_(model, 0.3)), 4))
        optimizer.step()
        optimizer.zero_grad()


@program(exact=False)
def clipped_gradients_that_are_kept_and_added_to(run: Run) -> None:
    """The update clips, and what comes after it is added to what was clipped."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(4):
        run.backward(run.mse(model, step))
        zk.clip_grad_norm_(model, 0.3)
        optimizer.step()


@program(exact=False)
def clipped_gradients_that_are_stepped_twice_and_written(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        run.backward(run.mse(model, step))
        zk.clip_grad_norm_(model, 0.3)
        optimizer.step()
        optimizer.step()
        run.see(round(float(zk.clip_grad_norm_(model, 1e9)), 3))
        for param in model.parameters():
            param.grad.mul_(2.0)
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.grad.fill_(0.01)
        run.backward(run.mse(model, step))
        optimizer.step()
        optimizer.zero_grad()


@program(exact=False)
def gradients_written_and_set_between_the_clip_and_the_step(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        run.backward(run.mse(model, step))
        zk.clip_grad_norm_(model, 0.3)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                if number % 2:
                    param.grad.fill_(0.02)
                else:
                    param.grad = param.grad * 2
        optimizer.step()
        run.see(round(float(zk.clip_grad_norm_(model, 0.2)), 4))
        optimizer.step()
        optimizer.zero_grad()


@program()
def norms_of_gradients_logged(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), max_grad_norm=1e9)
    for step in range(3):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        run.see(round(float(optimizer.grad_norm), 5))


@program()
def gradients_kept_as_zeros(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        run.backward(run.mse(model, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@program()
def gradients_cleared_before_backward(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        model.zero_grad()
        run.backward(run.mse(model, step))
        optimizer.step()


@program()
def some_gradients_thrown_away(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        run.backward(run.mse(model, step))
        for param in model.blocks[step % 3].parameters():
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()


@program()
def gradients_of_two_losses_kept_and_combined(run: Run) -> None:
    """Gradient surgery: each loss has its pass, and the optimizer gets what is made of both."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        both = []
        for way in range(2):
            run.backward(run.mse(model, 2 * step + way))
            both.append([param.grad for param in model.parameters()])
            optimizer.zero_grad()
        for param, one, other in zip(model.parameters(), *both, strict=True):
            param.grad = 0.5 * one + 2 * other
        optimizer.step()
        optimizer.zero_grad()


@program()
def gradients_of_the_last_step_kept_as_views(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    last: list[torch.Tensor] = []
    for step in range(4):
        run.backward(run.mse(model, step))
        now = [param.grad.detach() for param in model.parameters()]
        for one, before in zip(now, last):  # noqa: B905  there are none in the first step
            one.add_(before, alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()
        last = now


@program()
def a_step_that_is_left_out(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(5):
        run.backward(run.mse(model, step))
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()


@program()
def a_batch_that_no_rank_has(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(5):
        if step % 2:
            run.backward(run.mse(model, step))
        optimizer.step()
        optimizer.zero_grad()


@program()
def two_steps_of_one_gradient(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        run.backward(run.mse(model, step))
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@program()
def two_optimizers_for_two_halves(run: Run) -> None:
    model = run.shard(Net)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    optimizers = [run.optimizer(matrices, zk.SGD), run.optimizer(rest)]
    for step in range(4):
        run.backward(run.mse(model, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@program()
def a_new_optimizer_half_way(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 2, optimizer=run.optimizer(model.parameters(), zk.SGD))
    run.optimizers[-1].flush()
    run.train(model, 2)


@program()
def an_optimizer_in_backward(run: Run) -> None:
    """Each parameter steps as soon as its gradient is reduced."""
    model = run.shard(Net)
    own = {id(p): run.optimizer([p], zk.SGD) for p in model.parameters()}

    def step(param: nn.Parameter) -> None:
        own[id(param)].step()
        own[id(param)].zero_grad()

    for param in model.parameters():
        run.when_reduced(param, step)
    for number in range(3):
        run.backward(run.mse(model, number))


@program()
def gradients_changed_when_they_are_reduced(run: Run) -> None:
    model = run.shard(Net)
    seen: dict[str, object] = {}

    def halve(name: str, param: nn.Parameter) -> None:
        seen[name] = tuple(param.grad.shape)
        param.grad.mul_(0.5)

    for name, param in model.named_parameters():
        run.when_reduced(param, functools.partial(halve, name))
    run.train(model)
    run.see(sorted(seen.items()))


@program()
def a_state_that_is_saved_and_loaded(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    run.train(model, 2, optimizer=optimizer)
    optimizer.flush()
    optimizer.load_state_dict(optimizer.state_dict())
    run.train(model, 2, optimizer=optimizer)


@program()
def frozen_between_forward_and_backward(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        loss = run.mse(model, step)
        model.blocks[0].requires_grad_(step % 2 == 1)
        run.step(optimizer, loss)
        model.blocks[0].requires_grad_(True)


@program()
def thawed_between_forward_and_backward(run: Run) -> None:
    """Progressive unfreezing: what is thawed has no gradient yet, and everything may be asked of it."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    block, weight = model.blocks[0], model.blocks[0].up.weight
    for step in range(4):
        block.requires_grad_(False)
        loss = run.mse(model, step)
        block.requires_grad_(True)
        handle = weight.register_hook(lambda grad: grad * 2)
        run.see(*torch.autograd.grad(loss, [weight], allow_unused=True, retain_graph=True))
        run.step(optimizer, loss, **({"inputs": [weight]} if step == 1 else {}))
        run.step(optimizer, run.mse(model, step))
        handle.remove()


class Freezes(Net):
    """Its forward freezes or thaws the last weight before it computes."""

    freezes: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        if self.freezes is not None:
            self.leave.weight.requires_grad_(not self.freezes)
        return self.leave(x)


@program()
def a_forward_freezes_a_parameter(run: Run) -> None:
    model = run.shard(Freezes)
    optimizer = run.optimizer(model.parameters())
    for step, freezes in enumerate((None, True, None, False, None, True)):
        model.freezes = freezes
        run.step(optimizer, run.mse(model, step))
        run.see(model.leave.weight.requires_grad)


@program(refused=(zk.ZerokernError, ("frozen", "requires_grad=True")))
def thawed_after_it_was_sharded_frozen(run: Run) -> None:
    model = run.make(Net)
    model.blocks[0].requires_grad_(False)
    model = run.shard(model)
    run.train(model, 2)
    run.optimizers[-1].flush()
    model.blocks[0].requires_grad_(True)
    run.train(model, 2)
