"""Hooks, copies, averages and everything that writes parameters beside the optimizer."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from of_modules import bags
from small_programs import Run, program
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zero_cases import Block, Net

import zerokern as zk

REFUSED = (zk.ZerokernError, RuntimeError, TypeError, ValueError)


@program()
def a_hook_on_a_parameter_from_after(run: Run) -> None:
    model = run.shard(Net)
    model.blocks[1].up.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    run.train(model)


@program()
def hooks_on_modules_from_before_and_after(run: Run) -> None:
    model = run.make(Net)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[1].register_forward_hook(lambda module, args, out: out + 1)
    model = run.shard(model)
    model.blocks[2].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    model.blocks[2].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
    model.leave.register_full_backward_pre_hook(lambda module, after: (after[0] * 2,))
    run.train(model)
    run.see(*seen)


@program()
def a_copy_of_the_whole_evaluated(run: Run) -> None:
    model = run.shard(Net)
    run.train(model)
    run.optimizers[-1].flush()
    with run.gathered(model):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        run.see(twin(run.data(7)[0]))
    run.train(model)
    with torch.no_grad():
        run.see(twin(run.data(7)[0]))


def ema(run: Run, model: nn.Module, kept: dict[str, Tensor]) -> None:
    with run.gathered(model), torch.no_grad():
        for name, param in model.named_parameters():
            kept[name] = 0.9 * kept[name] + 0.1 * param.detach() if name in kept else param.detach().clone()


@program()
def an_averaged_model_beside_it(run: Run) -> None:
    """torch's AveragedModel of the plain twin, fed with whole parameters."""
    model = run.make(Net)
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.8))
    model = run.shard(model)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        with run.gathered(model):
            average.update_parameters(model)
    with torch.no_grad():
        run.see(average(run.data(9)[0]), *average.parameters())


def with_values(run: Run, model: nn.Module, values: dict[str, Tensor]) -> None:
    with run.gathered(model, write=True), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])


@program()
def average_weights_swapped_in_for_evaluation(run: Run) -> None:
    model, kept = run.shard(Net), {}
    optimizer = run.optimizer(model.parameters())
    for step in range(3):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        optimizer.flush()
        ema(run, model, kept)
        own: dict[str, Tensor] = {}
        ema(run, model, own)
        with_values(run, model, kept)
        with torch.no_grad():
            run.see(model(run.data(9)[0]))
        with_values(run, model, own)


@program()
def evaluation_with_other_weights_by_functional_call(run: Run) -> None:
    model = run.shard(Net)
    run.train(model)
    run.optimizers[-1].flush()
    with run.gathered(model):
        halves = {name: param.detach() * 0.5 for name, param in model.named_parameters()}
    with torch.no_grad():
        run.see(torch.func.functional_call(model, halves, (run.data(9)[0],)))
        run.see(model(run.data(9)[0]))
    run.train(model)


@program()
def lookahead(run: Run) -> None:
    """Slow weights that the fast ones are pulled back to."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    slow: dict[str, Tensor] = {}
    ema(run, model, slow)
    for step in range(4):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        if step % 2:
            optimizer.flush()
            ema(run, model, slow)
            with_values(run, model, slow)


@program()
def sharpness_aware_steps(run: Run) -> None:
    """Up the gradient, there a second one, back, and the step with that."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters(), zk.SGD)
    for step in range(3):
        run.backward(run.mse(model, step))
        optimizer.flush()
        with torch.no_grad():
            moved = [(p, p.grad * 0.1) for p in model.parameters() if p.grad is not None]
            for param, by in moved:
                param.add_(by)
        optimizer.zero_grad()
        run.backward(run.mse(model, step))
        with torch.no_grad():
            for param, by in moved:
                param.sub_(by)
        optimizer.step()
        optimizer.zero_grad()


def pull(run: Run, target: nn.Module, model: nn.Module, rate: float = 0.9) -> None:
    with run.gathered(model), run.gathered(target, write=True), torch.no_grad():
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.mul_(rate).add_(fast, alpha=1 - rate)


@program()
def a_momentum_encoder_that_is_sharded_as_well(run: Run) -> None:
    """BYOL, MoCo: a target that follows, sharded like the model that it follows."""
    model, target = run.shard(Net), run.shard(lambda: Net().requires_grad_(False))
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        x, _ = run.data(step)
        with torch.no_grad():
            aim = target(x + 0.1)
        run.step(optimizer, 2 - 2 * F.cosine_similarity(model(x), aim).mean())
        pull(run, target, model)


class Clamping(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@program(late=False)
def weights_clamped_within_the_forward(run: Run) -> None:
    def make() -> nn.Module:
        net = Net()
        net.blocks = nn.ModuleList(Clamping(20 + number) for number in range(3))
        return net

    run.train(run.shard(make), optimizer=None)


@program(late=False, refused=(REFUSED, ("max_norm",), "stage [123], *"))
def an_embedding_with_a_largest_norm(run: Run) -> None:
    run.train(run.shard(lambda: bags(max_norm=1.0)))


@program()
def a_parametrization_from_before_taken_off_at_the_end(run: Run) -> None:
    def make() -> nn.Module:
        net = Net()
        parametrizations.weight_norm(net.leave)
        return net

    model = run.shard(make)
    run.train(model)
    run.optimizers[-1].flush()
    with run.gathered(model), torch.no_grad():
        whole = copy.deepcopy(model.leave)
        parametrize.remove_parametrizations(whole, "weight")
        run.see(whole.weight)


@program(refused=(REFUSED, ("shard",)))
def a_parametrization_after_it_was_sharded(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 1)
    parametrizations.weight_norm(model.leave)
    run.train(model, 2)


@program(refused=(REFUSED, ("shard",)))
def a_parameter_replaced_after_it_was_sharded(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 1)
    model.leave.weight = nn.Parameter(torch.ones(3, 10))
    run.train(model, 2)


@program(late=False)
def a_state_assigned_after_it_was_sharded(run: Run) -> None:
    model = run.shard(Net)
    run.train(model, 1)
    state = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        run.see(model(run.data(3)[0]))


@program()
def a_penalty_right_after_a_step(run: Run) -> None:
    """What is read between two steps is what the last one has made."""
    model = run.shard(Net)
    optimizer = run.optimizer(model.parameters())
    for step in range(4):
        run.train(model, 1, lambda model, _, step=step: run.mse(model, step), optimizer)
        with run.gathered(model):
            run.see(sum(float(param.detach().double().square().sum()) for param in model.parameters()))
