"""One line into frameworks that build the optimizer themselves: theirs where installed, else what they publish.

docs/frameworks.md has each line, and says which were run with the framework itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
import torch.distributed as dist
from hf_cases import HOST, arguments, fresh, language_model, rows, seen_by
from torch import nn
from torch.distributed.fsdp import fully_shard

import zerokern as zk

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {"tier": "cpu", "state_format": "int8"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(model: nn.Module, step: Any, zero_grad: Any) -> list[torch.Tensor]:
    data = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    for batch in data:
        model(batch).square().mean().backward()
        step()
        zero_grad()
    return [getattr(one, "full_tensor", one.detach)().detach().clone() for one in model.parameters()]


def by_hand(groups: Any = None, **settings: Any) -> list[torch.Tensor]:
    model = net()
    opt = zk.AdamW(model.parameters() if groups is None else groups(model), **settings)
    return trained(model, opt.step, opt.zero_grad)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in in the place of a module; the examples are imported anew, and go again."""
    for name in ("axolotl_plugin", "torchtitan_override"):
        monkeypatch.delitem(sys.modules, f"zerokern.examples.{name}", raising=False)
    yield lambda name, module: monkeypatch.setitem(sys.modules, name, module)
    for name in ("axolotl_plugin", "torchtitan_override"):
        sys.modules.pop(f"zerokern.examples.{name}", None)


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_verl(alone: None) -> None:
    """`optim.optimizer_impl: zerokern`, of the FSDP2 engine."""
    model = net()
    fully_shard(model)
    config = {"optimizer": "AdamW", "optimizer_impl": "zerokern", "lr": 1e-2, "override_optimizer_config": SETTINGS}
    opt = stand_ins.verl_builds(model.parameters(), **config)
    assert type(opt) is zk.AdamW
    same(trained(model, opt.step, opt.zero_grad), by_hand(lr=1e-2, **SETTINGS))
    with pytest.raises(ValueError, match="muon_groups"):
        stand_ins.verl_builds(net().parameters(), **{**config, "optimizer": "Muon"})
    with pytest.raises(ValueError, match=r"zk\.Nvme"):
        stand_ins.verl_builds(net().parameters(), **{**config, "override_optimizer_config": {"tier": "/fast"}})


def test_verls_engine_steps_and_moves_state(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own step, with its clipping and its rate, and its own moves of the optimizer's state."""
    if stand_ins.real("verl") is None:
        pytest.skip("needs verl")
    from verl.utils import fsdp_utils
    from verl.workers.config.optimizer import FSDPOptimizerConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    monkeypatch.setattr(fsdp_utils, "get_device_id", lambda: "cpu")  # it knows GPUs and NPUs only
    runs = []
    for moved in (False, True):
        engine = object.__new__(FSDPEngine)
        engine.rank, engine.scaler, engine._qat_enabled = 0, None, False
        engine.module = fully_shard(net())
        engine.optimizer_config = FSDPOptimizerConfig(
            optimizer_impl="zerokern", lr=1e-2, lr_warmup_steps=2, override_optimizer_config=SETTINGS
        )
        engine.optimizer = engine._build_optimizer(engine.module)
        engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)

        def step(engine: Any = engine, moved: bool = moved) -> None:
            if moved:
                fsdp_utils.load_fsdp_optimizer(engine.optimizer, "cpu")
            engine.optimizer_step()
            engine.lr_scheduler_step()
            if moved:
                fsdp_utils.offload_fsdp_optimizer(engine.optimizer)

        runs.append(trained(engine.module, step, engine.optimizer_zero_grad))
    assert not torch.equal(runs[0][0], next(net().parameters()))
    same(*runs)


def test_nemo_automodel() -> None:
    """`optimizer: {_target_: zerokern.AdamW, ...}`."""
    model = net()
    [opt] = stand_ins.nemo_builds(model, "zerokern.AdamW", {"lr": 1e-2, "weight_decay": 0.1, **SETTINGS})
    assert type(opt) is zk.AdamW
    same(trained(model, opt.step, opt.zero_grad), by_hand(lr=1e-2, weight_decay=0.1, **SETTINGS))
    with pytest.raises((ValueError, RuntimeError), match=r"muon_groups|Dion"):  # itself, it takes the name for dion's
        stand_ins.nemo_builds(net(), "zerokern.Muon", {"lr": 1e-2})


def test_axolotl(put: Any, tmp_path: Path) -> None:
    """`plugins: [zerokern.examples.axolotl_plugin.ZerokernPlugin]` and `zerokern: {...}`."""
    from types import SimpleNamespace

    from transformers import Trainer

    manager = stand_ins.with_axolotl(put)
    manager.register("zerokern.examples.axolotl_plugin.ZerokernPlugin")
    assert "zerokern.examples.axolotl_plugin.ZerokernArgs" in manager.get_input_args()

    def run(settings: dict[str, Any], **changed: Any) -> Any:
        with fresh():
            trainer = Trainer(language_model(), arguments(tmp_path, **changed), train_dataset=rows())
            manager.post_trainer_create(SimpleNamespace(zerokern=settings), trainer)
            trainer.train()
        assert type(trainer.optimizer.optimizer) is zk.AdamW
        return seen_by(trainer)

    with fresh():
        trainer = Trainer(language_model(), arguments(tmp_path), train_dataset=rows())
        trainer.train()
    torch.testing.assert_close(run(HOST).losses, seen_by(trainer).losses, rtol=1e-5, atol=0)
    assert run(SETTINGS).losses != run(HOST).losses
    with pytest.raises(ValueError, match="adamw_torch"):
        run(HOST, optim="adafactor")
    with pytest.raises(TypeError, match="learning_rate"):
        run({"lr": 1e-3})


def test_axolotl_train(tmp_path: Path) -> None:
    """Its command: torch's losses, and a resumed run goes on as one that was not broken off."""
    if stand_ins.real("axolotl") is None:
        pytest.skip("needs axolotl")
    stand_ins.small_llama(tmp_path)

    def run(name: str, steps: int, **keys: Any) -> list[dict[str, float]]:
        config = {**stand_ins.AXOLOTL, "output_dir": name, "max_steps": steps, **keys}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "axolotl.cli.main", "train", f"{name}.yaml", "--launcher", "python"]
        offline = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
        state = json.loads((tmp_path / name / f"checkpoint-{steps}" / "trainer_state.json").read_text())
        return [{key: entry[key] for key in ("loss", "grad_norm")} for entry in state["log_history"] if "loss" in entry]

    ours = {"plugins": ["zerokern.examples.axolotl_plugin.ZerokernPlugin"], "zerokern": {"tier": "cpu"}}
    whole = run("whole", 6, **ours)
    broken = run("broken", 3, **ours)
    saved = torch.load(tmp_path / "broken" / "checkpoint-3" / "optimizer.pt")
    assert "state_format" in saved["param_groups"][0]  # which torch's AdamW has not
    resumed = run("broken", 6, resume_from_checkpoint="broken/checkpoint-3", **ours)
    assert broken == whole[:3] and resumed[-3:] == whole[3:]
    for found, expected in zip(whole, run("torchs", 6), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_llamafactory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`use(...)` before `run_exp(...)`: its Trainer, whose arguments are those of the configuration."""
    import transformers

    from zerokern.integrations.transformers import use

    def run(**changed: Any) -> Any:
        with fresh():
            tuner = stand_ins.llamafactory_trainer()
            args = transformers.Seq2SeqTrainingArguments(**{**arguments(tmp_path).to_dict(), **changed})
            made = tuner(language_model(), args, train_dataset=rows())
            made.train()
        return made

    torchs = run()
    before = transformers.Trainer.__dict__["get_optimizer_cls_and_kwargs"]
    monkeypatch.setattr(transformers.Trainer, "get_optimizer_cls_and_kwargs", before)
    use(**HOST)
    ours = run()
    assert type(ours.optimizer.optimizer) is zk.AdamW and ours.optimizer.optimizer.tier == "cpu"
    torch.testing.assert_close(seen_by(ours).losses, seen_by(torchs).losses, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="adamw_torch"):
        run(optim="sgd")
    _, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(ours.args)
    with pytest.raises(TypeError, match="tier"):
        torch.optim.AdamW(ours.model.parameters(), **settings)  # what GaLore's would be given
    with pytest.raises(TypeError, match="max_grad_norm"):
        use(max_grad_norm=1.0)


def test_torchtitan_of_today(put: Any) -> None:
    """`--override.imports zerokern.examples.torchtitan_override.optimizers={...}`, of 0.3."""
    itself = stand_ins.real("titan") is not None
    container, group, applied = stand_ins.with_titan(put)
    name = "zerokern.examples.torchtitan_override.optimizers"

    def config(kind: str = "AdamW", **changed: Any) -> Any:
        small = group(pattern="bias$", optimizer_name=kind, optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.0})
        rest = group(pattern=".*", optimizer_name=kind, optimizer_kwargs={"lr": 1e-2, "betas": (0.9, 0.95)})
        return container.Config(param_groups=[small, rest], **changed)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        biases, others = (
            [p for n, p in model.named_parameters() if n.endswith("bias") == is_bias] for is_bias in (1, 0)
        )
        return [
            {"params": biases, "lr": 1e-3, "weight_decay": 0.0}, {"params": others, "lr": 1e-2, "betas": (0.9, 0.95)},
        ]  # fmt: skip

    model = net()
    made = applied(name, config(), **SETTINGS).build(model_parts=[model])
    [opt] = made.optimizers
    assert type(opt) is zk.AdamW and opt.tier == "cpu"
    same(trained(model, made.step, made.zero_grad), by_hand(groups, **SETTINGS))
    if itself:
        again = net()
        other = applied(name, config(), **SETTINGS).build(model_parts=[again])
        other.load_state_dict(made.state_dict())
        again.load_state_dict(model.state_dict())
        runs = [trained(one, both.step, both.zero_grad) for one, both in ((model, made), (again, other))]
        same(*runs)
    with pytest.raises(ValueError, match="AdamW"):
        applied(name, config("DistMuon")).build(model_parts=[net()])
    with pytest.raises(ValueError, match="state_format"):
        applied(name, config(implementation="fused_opt_states_bf16"))
    with pytest.raises(TypeError, match="groups"):
        applied(name, config(), lr=1e-3)


def test_ray_train(tmp_path: Path) -> None:
    stand_ins.ray_trains(stand_ins.ray_loop, 2, {"stage": 3, "folder": str(tmp_path / "last")})
    expected = by_hand(lr=1e-2, max_grad_norm=1.0)
    model = zk.shard(net(), stage=2)
    zk.load(tmp_path / "last", model, zk.AdamW(model.parameters()))
    for found, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach().clone(), other, rtol=1e-5, atol=1e-7)
