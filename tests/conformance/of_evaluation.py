"""Evaluation, generation and reading: whole parameters, in the middle of things, on all ranks or on one."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from module_cases import modules, nets, next_word
from small_programs import Run, loss_program, program
from torch import Tensor, nn
from zero_cases import Net


def looked_at(run: Run, model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        run.see(model(run.data(step + 500)[0]))
    model.train()


@program()
def evaluation_before_the_first_step(run: Run) -> None:
    model = run.shard(Net)
    looked_at(run, model, 0)
    run.train(model)


@loss_program(Net)
def evaluation_between_forward_and_backward(run: Run, model: nn.Module, step: int) -> Tensor:
    made = run.mse(model, step)
    looked_at(run, model, step)
    return made


@program()
def evaluation_between_backward_and_step(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        run.backward(run.mse(model, step))
        looked_at(run, model, step)
        optimizer.step()
        optimizer.zero_grad()


@program()
def inference_mode_before_training(run: Run) -> None:
    model = run.shard(Net)
    with torch.inference_mode():
        run.see(model(run.data(9)[0]).clone())
    run.train(model)


@program()
def a_single_block_evaluated(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 2)
    with torch.no_grad():
        run.see(model.blocks[1](torch.ones(2, 10)), model.enter(run.data(3)[0]))
    run.train(model, 2)


@program()
def a_single_block_trained(run: Run) -> None:
    """The root's forward never runs."""
    model = run.shard(Net)
    run.train(model, loss=lambda model, step: F.mse_loss(model.blocks[1](torch.ones(2, 10)), torch.zeros(2, 10)))


@program()
def one_layer_read_whole(run: Run) -> None:
    model = run.shard(Net)
    run.train(model)
    with run.gathered(model.leave):
        run.see(model.leave.weight, model.leave.bias)
    with run.gathered([model.enter.weight]):
        run.see(model.enter.weight.t() @ model.enter.weight)


@program()
def a_forward_of_the_whole(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 2)
    with run.gathered(model), torch.no_grad():
        run.see(model(run.data(9)[0]))
    run.train(model, 2)


@program()
def a_forward_of_the_whole_on_rank_0(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 2)
    with run.gathered(model), torch.no_grad():
        if run.rank == 0:
            run.see(model(run.data(9)[0]), model(run.data(10, rows=3)[0]))
    run.train(model, 2)


@torch.inference_mode()
def generated(model: nn.Module) -> Tensor:
    """Inference tensors must not be left behind for the next step to trip over."""
    words = torch.ones(1, 1, dtype=torch.long)
    for _ in range(4):
        words = torch.cat([words, model(words)[:, -1:].argmax(-1)], dim=1)
    return words.clone()


@program()
def generation_on_rank_0(run: Run) -> None:
    """Another number of forwards on each rank."""
    model = run.shard(nets.Tied)
    run.train(model, 2, lambda model, step: next_word(model, step, run.world))
    with run.gathered(model):
        if run.rank == 0:
            run.see(generated(model))
    run.train(model, 2, lambda model, step: next_word(model, step, run.world))


@program()
def evaluation_of_unequal_amounts_of_data(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 2)
    with run.gathered(model), torch.no_grad():
        run.see(*(model(run.data(number)[0]) for number in range(1 + 2 * run.rank)))
    run.train(model, 1)


@program()
def gradients_of_the_whole(run: Run) -> None:
    """A loss of whole parameters, passed back within."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for _ in range(3):
        with run.gathered(model):
            run.backward(sum(param.square().sum() for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()


@program()
def gradients_of_the_whole_beside_a_forward(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        loss = run.mse(model, step)
        with run.gathered(model.leave):
            loss = loss + model.leave.weight.square().sum()
        run.step(optimizer, loss)


@program()
def a_state_dict_of_the_whole(run: Run) -> None:
    model = run.shard(modules.OddParameters)
    run.train(model, 2)
    with run.gathered(model):
        run.see(*(value.clone() for value in model.state_dict().values()))
    run.train(model, 1)


@program()
def shapes_and_names_looked_at(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 1)
    run.see([(name, tuple(p.shape), p.ndim, p.dtype, p.requires_grad) for name, p in model.named_parameters()])
    run.see(sum(p.numel() for p in model.parameters()), [p.grad is None for p in model.parameters()])
    run.train(model, 1)


@program()
def a_forward_that_fails_within_a_unit(run: Run) -> None:
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        if step == 2:
            handle = model.blocks[1].up.register_forward_pre_hook(struck)
            with contextlib.suppress(ZeroDivisionError):
                run.mse(model, step)
            handle.remove()
        run.step(optimizer, run.mse(model, step))


def struck(*arguments: object) -> None:
    raise ZeroDivisionError


@program()
def a_model_sharded_without_training(run: Run) -> None:
    model = run.shard(lambda: Net().requires_grad_(False))
    for step in range(2):
        looked_at(run, model, step)
