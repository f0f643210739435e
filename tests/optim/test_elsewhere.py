"""State on disk, on the host or on a device: the bits, and the ways, of an optimizer that has all of it in memory.

Where it is the host's, the parameters are a played device's, and updates overlap with what comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_double import DeviceTwins, Double
from optim_cases import (
    BF16,
    FORMATS,
    FP32,
    MAKERS,
    Twins,
    copies,
    make_params,
    same_bits,
    same_state,
    set_grads,
    train,
    write_from_outside,
)
from tables import each

from zerokern.examples.played_device import PlayedDevice

Make = Callable[..., Any]
WHERE = each("where", ["disk", "device", "host"])


class HostTwins(Twins):
    """Updates of the first overlap within `train` and `both`; it is looked at when they are done."""

    def __init__(self, device: PlayedDevice, name: str, **settings: Any) -> None:
        super().__init__(name, "cpu", schedule="overlap", **settings)
        self.device = device
        for param in self.params:
            device.own(param)

    def train(self, *arguments: Any, **settings: Any) -> None:
        super().train(*arguments, **settings)
        self.finish()

    def both(self, work: Callable[[Any, list[torch.nn.Parameter]], Any]) -> None:
        super().both(work)
        self.finish()
        for param in self.params:
            self.device.own(param)

    def finish(self) -> None:
        self.ours.flush()
        self.device.synchronize()


@pytest.fixture
def make(tier: Callable, double: Double, device: PlayedDevice) -> Make:
    def twins(where: str, name: str, **settings: Any) -> Any:
        if where == "host":
            return HostTwins(device, name, **settings)
        return Twins(name, tier(), **settings) if where == "disk" else DeviceTwins(double.on, name, **settings)

    return twins


@WHERE
@each("name, state_format, dtype, master_format", FORMATS)
def test_the_bits_of_every_format(
    where: str, name: str, state_format: str, dtype: torch.dtype, master_format: str | None, make: Make
) -> None:
    formats = {"state_format": state_format, "master_format": master_format}
    if master_format == "none":
        formats["stochastic_seed"] = 5  # elements are counted in the whole parameter
    twins = make(where, name, sizes=(20_000, 1, 300), dtype=dtype, max_grad_norm=1.0, **formats)
    twins.train(2)
    assert twins.agree()
    assert twins.ours.grad_norm == pytest.approx(twins.reference.grad_norm, rel=1e-15)


@WHERE
def test_gradients_come_and_go(where: str, make: Make) -> None:
    """Pieces of idle parameters are not touched, half idle ones keep the idle half, step counts differ."""
    twins = make(where, "adamw", dtype=BF16, max_grad_norm=1.0)
    for start, idle in enumerate([(0, 2), (1, 2, 4), (), (0, 1, 3), range(7), (2,), ()]):
        twins.train(1, start, idle=[number for number in idle if number < len(twins.params)])
        assert twins.agree()


@WHERE
def test_groups_that_come_later_with_formats_of_their_own(where: str, make: Make) -> None:
    twins = make(where, "adamw", sizes=(20_000, 5))
    twins.train(2)

    def grow(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
        later = make_params((30_000, 7, 0), BF16, seed=3)
        params += later
        optimizer.add_param_group({"params": later, "lr": 0.1, "state_format": "int8", "master_format": "split8"})

    twins.both(grow)
    twins.train(2, 2)
    assert twins.agree()


@WHERE
@each("name", ["adamw", "sgd"])
def test_schedulers_closures_clipping_and_skipped_steps(where: str, name: str, make: Make) -> None:
    twins = make(where, name, dtype=BF16, max_grad_norm=0.5)
    schedules: list[Any] = []
    twins.both(
        lambda one, params: schedules.append(torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=20))
    )
    for step in range(5):

        def work(optimizer: Any, params: list[torch.nn.Parameter], step: int = step) -> None:
            def closure() -> float:
                set_grads(params, seed=step)
                if step == 3:
                    params[4].grad[17] = float("inf")
                return 0.25

            assert optimizer.step(closure) == 0.25
            schedules[optimizer is twins.reference].step()
            optimizer.zero_grad(set_to_none=bool(step % 2))

        twins.both(work)
    assert twins.agree()
    assert twins.ours.skipped_steps == twins.reference.skipped_steps == 1


@WHERE
@each("dtype, master_format", [(FP32, None), (BF16, "split16"), (BF16, "none")])
def test_momentum_switched_on_and_off(where: str, dtype: torch.dtype, master_format: str | None, make: Make) -> None:
    twins = make(where, "sgd", dtype=dtype, master_format=master_format, momentum=0.0)
    for start, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.5]):
        twins.both(lambda optimizer, _, momentum=momentum: optimizer.param_groups[0].update(momentum=momentum))
        twins.train(1, start)
    assert twins.agree()


@WHERE
def test_adagrad_begins_with_its_initial_value_and_parameters_may_be_empty(where: str, make: Make) -> None:
    twins = make(where, "adagrad", sizes=(300, 0), initial_accumulator_value=0.5)
    twins.train(1, idle=[0])
    twins.train(2, 1)
    assert twins.agree()


@WHERE
def test_moments_of_an_empty_parameter_begin_after_those_of_others(where: str, make: Make) -> None:
    """Nothing of it is in a record on a disk: its momentum was never there to be saved, while its remainder was."""
    twins = make(where, "sgd", sizes=(300, 0), dtype=BF16, momentum=0.9)
    twins.train(1, idle=[1])
    twins.train(1, 1)
    assert twins.agree()
    assert "momentum_buffer" in twins.ours.state_dict()["state"][1]


@WHERE
def test_a_changed_step_counter_counts(where: str, make: Make) -> None:
    def write(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
        optimizer.state[params[0]]["step"].fill_(10.0)
        optimizer.state[params[1]]["step"] = torch.tensor(7.0)

    twins = make(where, "adam", max_grad_norm=1.0)
    twins.train(2)
    twins.both(write)
    twins.train(2, 2)
    assert twins.agree()
    assert [twins.ours.state[param]["step"].item() for param in twins.params[:3]] == [12, 9, 4]


@WHERE
@each("name", ["adamw", "lion", "adagrad", "sgd"])
def test_placeholders_stand_in_the_groups_before_the_first_step(where: str, name: str, make: Make) -> None:
    """As Accelerate has it: it puts them there, then the parameters."""
    twins = make(where, name, dtype=BF16, max_grad_norm=1.0)

    def swap(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
        if optimizer is twins.ours:
            optimizer.param_groups[0]["params"] = [torch.empty(1) for _ in params]
            optimizer.zero_grad()
            optimizer.param_groups[0]["params"] = list(params)

    twins.both(swap)
    twins.train(3)
    assert twins.agree()


@WHERE
def test_state_reset_and_parameters_exchanged(where: str, make: Make) -> None:
    def exchange(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
        del optimizer.state[params[1]]
        new = torch.nn.Parameter(params[4].detach().clone())
        optimizer.state[new] = optimizer.state.pop(params[4])
        optimizer.param_groups[0]["params"][4] = params[4] = new
        params[0].data = params[0].data.clone()

    twins = make(where, "adamw", dtype=BF16, max_grad_norm=1.0)
    twins.train(2)
    twins.both(exchange)
    twins.train(2, 2)
    assert twins.agree()


@WHERE
@each("how", ["copy_", "data", "new data"])
@each("master_format", ["split16", "split8", "fp32"])
def test_a_write_from_outside_is_followed(where: str, how: str, master_format: str, make: Make) -> None:
    twins = make(where, "adamw", dtype=BF16, master_format=master_format)
    twins.train(2)
    value = (torch.randn(twins.params[4].numel()) + 100).to(BF16)
    twins.both(lambda optimizer, params: write_from_outside(how, optimizer, params, value))
    twins.train(2, 2)
    assert twins.agree()


@each("where, there_and_back", [("disk", True), ("disk", False), ("device", True), ("device", False), ("host", False)])
@each("name, state_format, dtype, master_format", FORMATS)
def test_state_moves_between_memory_and_elsewhere(
    where: str,
    there_and_back: bool,
    name: str,
    state_format: str,
    dtype: torch.dtype,
    master_format: str | None,
    make: Make,
) -> None:
    formats = {"state_format": state_format, "master_format": master_format}
    twins = make(where, name, sizes=(9_000, 300), dtype=dtype, **formats)
    twins.train(2)
    saved: list[Any] = []
    twins.both(lambda optimizer, _: saved.append(optimizer.state_dict()))
    if there_and_back:
        params = copies(twins.straight)
        here = MAKERS[name](params, lr=0.5, **formats)
        here.load_state_dict(saved[0])
        twins.train(1, 2)
        train(here, params, 1, start=2)
        assert same_bits(params, twins.straight)
        assert same_state(here.state_dict(), twins.reference.state_dict())
    else:
        twins.train(1, 2)
        for param, value in zip((*twins.params, *twins.straight), saved_values(twins), strict=True):
            param.detach().copy_(value)
        twins.both(lambda optimizer, _: optimizer.load_state_dict(saved[1]))
        twins.train(1, 5)
        assert twins.agree()


def saved_values(twins: Any) -> list[torch.Tensor]:
    """The same for both."""
    values = make_params([param.numel() for param in twins.straight], twins.straight[0].dtype, seed=9)
    return [*values, *values]


@WHERE
def test_versions_count_our_writes_and_nothing_counts_without_gradients(where: str, make: Make) -> None:
    twins = make(where, "adamw")
    before = [param._version for param in twins.params]
    twins.train(1, idle=[2])
    expected = [version + (number != 2) for number, version in enumerate(before)]
    assert [param._version for param in twins.params] == expected


@WHERE
def test_keys_shapes_and_dtypes_are_those_of_memory(where: str, make: Make) -> None:
    twins = make(where, "adamw", dtype=BF16, state_format="int8")
    twins.train(1)
    saved: list[Any] = []
    twins.both(lambda optimizer, _: saved.append(optimizer.state_dict()["state"]))
    in_order = sorted if where == "host" else list  # where `step` comes last
    mine, theirs = (
        [
            (number, in_order((key, str(value.dtype), value.shape) for key, value in entry.items()))
            for number, entry in one.items()
        ]
        for one in saved
    )
    assert mine == theirs
    for entry in saved[0].values():  # saving one tensor saves its storage: it must not drag the others along
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in entry.values())
