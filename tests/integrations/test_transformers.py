"""Trainer itself, on one rank and on two: the losses of the same loop by hand, and its own buttons."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_cases import (
    BF16,
    CLIP,
    FP16,
    FP32,
    HOST,
    PLAIN,
    SCALE,
    Run,
    arguments,
    chained,
    expected,
    fp16_on_a_cpu,
    fresh,
    fsdp2_on_a_cpu,
    language_model,
    on_ranks,
    rows,
    seen_by,
    sharded,
    values,
)

import zerokern as zk
from zerokern.core.errors import StateError


def trainer(model: Any, args: Any, kind: Any = None, **settings: Any) -> Any:
    from zerokern.integrations.transformers import Trainer, optimizer_cls_and_kwargs

    data = {"train_dataset": rows(), "eval_dataset": rows(8)}
    if settings.pop("muon", False):
        return (kind or Trainer)(model, args, **data, optimizers=(chained(model, **settings), None))
    chosen = optimizer_cls_and_kwargs(args, **settings)
    return (kind or Trainer)(model, args, **data, optimizer_cls_and_kwargs=chosen)


def under_fsdp2(model: Any, args: Any, **settings: Any) -> Any:
    from transformers import Trainer

    class Forced(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            fsdp2_on_a_cpu()
            self.is_fsdp_enabled = True

    return trainer(model, args, Forced, **settings)


def as_by_hand(folder: Path | str, kind: Any, amp: Any, dtype: torch.dtype, **settings: Any) -> Run:
    with fresh(), fp16_on_a_cpu(SCALE):
        args = arguments(folder, bf16=amp is BF16, fp16=amp is FP16)
        model = language_model(dtype=dtype)
        run = trainer(sharded(model.to(args.device), kind, settings.get("muon", False)), args, **settings)
        run.train()
        found = seen_by(run)
    found.same(expected(kind, amp, dtype, means=False, **settings))
    assert found.losses[-1] != found.losses[0]
    return found


@pytest.mark.parametrize("amp, dtype, settings", PLAIN[::2])  # the others are resumed below
def test_the_losses_of_the_loop_by_hand(tmp_path: Path, amp: Any, dtype: torch.dtype, settings: dict) -> None:
    as_by_hand(tmp_path, None, amp, dtype, **settings)


@pytest.mark.parametrize("kind, amp, dtype", [(None, None, FP32), (2, None, BF16), (1, FP16, FP32)])
def test_muon_beside_adamw(tmp_path: Path, kind: Any, amp: Any, dtype: torch.dtype) -> None:
    """The rates of both fall; Trainer clips both by one norm."""
    found = as_by_hand(tmp_path, kind, amp, dtype, muon=True, **HOST)
    assert min(norm for norm in found.norms if norm == norm) > CLIP


def whole_on_the_main_process(folder: str, stage: int) -> None:
    """What `save_model` writes is read by `from_pretrained`, tied weights included."""
    from transformers import GPT2LMHeadModel

    with fresh():
        args = arguments(folder, max_steps=1)
        run = trainer(zk.shard(language_model().to(args.device), stage=stage), args)
        run.train()
        run.save_model(f"{folder}/whole")
        expected = values(run.model)
        if dist.is_initialized():
            dist.barrier()
        found = GPT2LMHeadModel.from_pretrained(f"{folder}/whole")
    for name, param in found.named_parameters():
        assert torch.equal(param, expected[name]), name
    assert found.lm_head.weight is found.transformer.wte.weight


def test_a_divided_model_is_saved_as_trainer_saves_models(tmp_path: Path) -> None:
    whole_on_the_main_process(str(tmp_path), 3)


def test_the_best_model_is_what_is_left(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    with fresh():
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        best = {"load_best_model_at_end": True, "save_only_model": True, "learning_rate": 0.3}
        args = arguments(tmp_path, **evaluated, **best, lr_scheduler_type="constant", warmup_steps=0)
        run = trainer(zk.shard(language_model().to(args.device), stage=3), args)
        run.train()
        found = values(run.model)
        assert run.state.best_global_step < run.state.global_step, "the last one would be no test"
        expected = GPT2LMHeadModel.from_pretrained(run.state.best_model_checkpoint)
        scores = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        assert run.evaluate()["eval_loss"] == min(scores)
    for name, param in expected.named_parameters():
        assert torch.equal(param, found[name]), name


def refuses(words: str, kind: type[Exception], begin: Any, **settings: Any) -> None:
    with fresh(), tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, **settings)
        model = zk.shard(language_model(), stage=3)
        with pytest.raises(kind, match=words):
            begin(model, args).train()


def test_what_a_divided_model_cannot_have_is_refused_before_training() -> None:
    from zerokern.integrations.transformers import Trainer

    for name in ("bf16_full_eval", "fp16_full_eval", "auto_find_batch_size", "torch_compile"):
        refuses(name, ValueError, trainer, **{name: True})
    refuses("GradScaler", ValueError, trainer, fp16=True)

    def with_torchs(model: Any, args: Any) -> Any:
        return Trainer(model, args, train_dataset=rows(), optimizers=(torch.optim.SGD(model.parameters()), None))

    def with_muon(model: Any, args: Any) -> Any:
        return Trainer(model, args, train_dataset=rows(), optimizer_cls_and_kwargs=(zk.Muon, {}))

    refuses("muon_groups", ValueError, with_muon)  # of all parameters
    refuses("ChainedOptimizer", ValueError, lambda model, args: Trainer(model, args, train_dataset=rows()), optim="sgd")
    refuses("adafactor", ValueError, lambda model, args: Trainer(model, args, train_dataset=rows()), optim="adafactor")
    refuses("which zk.shard has sharded", StateError, with_torchs)


def test_a_checkpoint_of_an_unsharded_optimizer_is_refused(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    with fresh():
        trainer(language_model(), arguments(tmp_path, **saving)).train()
    with fresh():
        run = trainer(zk.shard(language_model(), stage=2), arguments(tmp_path, **saving))
        before = values(run.model)
        with pytest.raises(StateError, match="not sharded"):
            run.train(resume_from_checkpoint=True)
        assert all(torch.equal(value, before[name]) for name, value in values(run.model).items())


def test_adamw_is_what_a_divided_model_gets(tmp_path: Path) -> None:
    from zerokern.integrations.transformers import Trainer, unwrapped

    with fresh():
        args = arguments(tmp_path, max_steps=1, adam_beta2=0.95)
        run = Trainer(zk.shard(language_model(), stage=2), args, train_dataset=rows())
        run.train()
        made = unwrapped(run.optimizer)
    assert type(made) is zk.AdamW
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert made.param_groups[0]["betas"] == (0.9, 0.95)


def saved_and_resumed(folder: str, settings: dict[str, Any], dtype: torch.dtype, stages: tuple[Any, Any]) -> None:
    """With dropout, and evaluations between: a run, and one that goes on from its third step in other objects."""
    runs = []
    for number, stage in enumerate(stages):
        with fresh():
            amount = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
            args = arguments(folder, **amount, seed=number)
            model = language_model(0.2, dtype)
            if number:
                for param in model.parameters():
                    param.data.zero_()
            sharded(model, stage, settings.get("muon", False))
            run = (trainer if stage != "fsdp2" else under_fsdp2)(model, args, **settings)
            run.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if number else None)
            runs.append((seen_by(run), [one["eval_loss"] for one in run.state.log_history if "eval_loss" in one]))
            assert run.state.global_step == 6
    (whole, scores), (resumed, others) = runs
    if stages[0] == stages[1]:
        resumed.same(whole)
        assert scores == others and len(scores) == 3
    else:
        torch.testing.assert_close(resumed.losses, whole.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(others, scores, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype, settings", [(FP32, {"tier": "cpu"}), (BF16, {"schedule": zk.Delayed(after=1)})])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype, settings: dict) -> None:
    saved_and_resumed(str(tmp_path), settings, dtype, (None, None))


@pytest.mark.parametrize("stages", [(None, None), (2, 2), (1, 3)])
def test_a_resumed_run_of_muon_beside_adamw(tmp_path: Path, stages: tuple[Any, Any]) -> None:
    saved_and_resumed(str(tmp_path), {"muon": True, **HOST, "schedule": "overlap"}, BF16, stages)


@pytest.mark.parametrize("stages", [(2, 3), (3, None)])
def test_a_resumed_run_of_a_divided_model(tmp_path: Path, stages: tuple[Any, Any]) -> None:
    """At another stage, or without zk.shard."""
    saved_and_resumed(str(tmp_path), {"tier": "cpu"}, FP32, stages)


def two_at_length(rank: int, folder: str) -> None:
    plain = as_by_hand(folder, None, None, FP32, **HOST)
    for stage in (2, 3):
        found = as_by_hand(folder, stage, None, FP32)
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
    as_by_hand(folder, 2, None, BF16, **HOST, schedule="overlap")
    as_by_hand(folder, 3, FP16, FP32)
    as_by_hand(folder, 2, FP16, FP32, muon=True)
    saved_and_resumed(f"{folder}/muon", {"muon": True, **HOST, "schedule": "overlap"}, BF16, (2, 2))
    saved_and_resumed(f"{folder}/ddp", {"schedule": zk.Delayed(after=1)}, BF16, (None, None))
    saved_and_resumed(f"{folder}/3", {**HOST, "schedule": "overlap"}, BF16, (3, 3))
    saved_and_resumed(f"{folder}/fsdp2", HOST, FP32, ("fsdp2", "fsdp2"))
    whole_on_the_main_process(f"{folder}/whole", 3)


@pytest.mark.slow
def test_two_ranks_at_length(tmp_path: Path) -> None:
    on_ranks(2, two_at_length, str(tmp_path))
