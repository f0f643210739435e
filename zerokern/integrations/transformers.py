"""A Trainer of Hugging Face for models that `zk.shard` has sharded, and an optimizer for any Trainer's public hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zerokern.integrations import without

try:
    import transformers
    from transformers import TrainingArguments
except ImportError as error:
    raise without("transformers", error) from error
try:
    import accelerate
except ImportError as error:
    raise without("accelerate", error) from error

import zerokern as zk
from zerokern.checkpoint.loader import load
from zerokern.checkpoint.saver import save
from zerokern.core.errors import StateError, got, say_once
from zerokern.integrations.accelerate import FOLDER, Accelerator, unwrapped
from zerokern.integrations.sharded_model import check_model, check_settings, is_ours, is_sharded
from zerokern.interop.pretrained import load_pretrained

__all__ = ["Trainer", "TrainerMixin", "optimizer_cls_and_kwargs", "use"]

ADAMW = ("adamw_torch", "adamw_torch_fused")

_NOTHING = (
    "the model of this Trainer is not sharded and its optimizer is torch's {}, so that zerokern does nothing here: "
    "call zk.shard(model) before, or pass optimizer_cls_and_kwargs=zerokern.integrations.transformers."
    "optimizer_cls_and_kwargs(args)"
)
_Any: Any = object  # whichever Trainer comes behind the mixin


def optimizer_cls_and_kwargs(args: TrainingArguments, **settings: Any) -> tuple[type[zk.AdamW], dict[str, Any]]:
    """Returns `zk.AdamW` with the arguments' rate, betas, eps and `settings`, for any Trainer's argument of this name.

    Trainer clips (`max_grad_norm` of the arguments), and gives `weight_decay` to the parameters that it is for.

    >>> kind, settings = optimizer_cls_and_kwargs(TrainingArguments(learning_rate=3e-4), tier="cpu")
    >>> kind.__name__, settings["lr"], settings["tier"]
    ('AdamW', 0.0003, 'cpu')
    """
    betas = (args.adam_beta1, args.adam_beta2)
    return zk.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, **settings}


def use(trainer: Any = transformers.Trainer, **settings: Any) -> None:
    """Makes all Trainers of this process train with `zk.AdamW(**settings)` in the place of torch's AdamW.

    For what constructs a Trainer out of a configuration, such as LLaMA-Factory: call it before that. The rate, betas,
    eps, weight decay, its groups and clipping are the configuration's; `optim` must be "adamw_torch" or
    "adamw_torch_fused". `trainer`: a Trainer, or a class of them, for which alone it is.

    >>> class Own(transformers.Trainer): ...
    >>> use(Own, tier="cpu", state_format="int8")
    >>> kind, settings = Own.get_optimizer_cls_and_kwargs(TrainingArguments(learning_rate=3e-4))
    >>> kind.__name__, settings["lr"], settings["tier"]
    ('AdamW', 0.0003, 'cpu')
    """
    check_settings(settings, "The rest is the configuration's: learning_rate, adam_beta1, weight_decay, max_grad_norm")
    if isinstance(trainer, transformers.Trainer):
        _check_optim(trainer.args)

    def chosen(args: TrainingArguments, model: Any = None) -> tuple[type[zk.AdamW], dict[str, Any]]:
        _check_optim(args)
        # a class of somebody else's that is given these keywords, as GaLore's is, fails on `tier`
        return optimizer_cls_and_kwargs(args, **{"tier": "device", **settings})

    trainer.get_optimizer_cls_and_kwargs = staticmethod(chosen)


def _check_optim(args: TrainingArguments) -> None:
    asked = getattr(args.optim, "value", args.optim)
    if asked not in ADAMW:
        do = "Leave zerokern.integrations.transformers.use out, and it is another's optimizer"
        raise ValueError(got("optim", asked, f"{' or '.join(ADAMW)}, in whose place zk.AdamW is used", do))


class TrainerMixin(_Any):
    """Makes any Trainer, such as one of TRL, take a model that zk.shard has sharded: `class Tuner(TrainerMixin,
    SFTTrainer)`. With other models the Trainer works as ever, and reads checkpoints of `zk.save` too.

    >>> issubclass(Trainer, TrainerMixin)
    True
    """

    optimizer_cls_and_kwargs: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if type(self.accelerator) is accelerate.Accelerator:
            self.accelerator.__class__ = Accelerator  # Trainer constructs its own by name
        if isinstance(self.model, nn.Module) and is_sharded(self.model):
            self._check_arguments()

    def _check_arguments(self) -> None:
        """Raises where an argument would make Trainer move, convert or copy a sharded model."""
        refused = {
            "auto_find_batch_size": "it would begin anew with a model that has been trained",
            "bf16_full_eval": "it would convert a sharded model; evaluate in the dtype that it is trained in",
            "fp16_full_eval": "it would convert a sharded model; evaluate in the dtype that it is trained in",
            "torch_compile": "compile the units in place before zk.shard: for one in model.model.layers: one.compile()",
        }
        for name, do in refused.items():
            if getattr(self.args, name, False):
                raise ValueError(got(name, True, "False with a model that zk.shard has sharded", do))
        if self.args.n_gpu > 1:
            raise ValueError(got("n_gpu", self.args.n_gpu, "one for each process", "torchrun --nproc-per-node=..."))
        check_model(self.model, self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if not is_sharded(model):  # else it is there; a move to "cpu:0", as Accelerate calls rank 0's, would be a copy
            super()._move_model_to_device(model, device)

    def create_optimizer(self, *arguments: Any, **settings: Any) -> Any:
        """Creates Trainer's optimizer; a sharded model gets `zk.AdamW` for AdamW, and nothing else by name."""
        asked = getattr(self.args.optim, "value", self.args.optim)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and is_sharded(self.model):
            if asked not in ADAMW:
                do = (
                    "Others: Trainer(optimizer_cls_and_kwargs=(zk.Lion, {...})), with zk.Adam, Lion, Adagrad or SGD; "
                    "zk.Muon: Trainer(optimizers=(zk.ChainedOptimizer([zk.Muon(matrices), zk.AdamW(rest)]), None))"
                )
                raise ValueError(got("optim", asked, "adamw_torch, which zk.AdamW is with a sharded model", do))
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(self.args)
        made = super().create_optimizer(*arguments, **settings)
        if not is_sharded(self.model) and not is_ours(self.optimizer):
            say_once(__name__, _NOTHING.format(type(unwrapped(self.optimizer)).__name__))
        return made

    def _maybe_log_save_evaluate(self, *arguments: Any, **settings: Any) -> None:
        if self.control.should_training_stop and hasattr(unwrapped(self.optimizer), "flush"):
            unwrapped(self.optimizer).flush()  # the last update counts in what is evaluated and saved at the end
        super()._maybe_log_save_evaluate(*arguments, **settings)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves for `from_pretrained`; a sharded model comes to the main process one bucket at a time."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        whole = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=whole)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        extra = {"scheduler": self.lr_scheduler}
        save(Path(output_dir) / FOLDER, self.model, unwrapped(self.optimizer), extra, rng=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).is_dir():
            return  # loaded together with the optimizer, once that has been made
        if is_sharded(self.model) and (folder / "optimizer.pt").is_file():
            raise StateError(
                f"{folder} holds the optimizer of a model that was not sharded; resume without zk.shard, or begin a "
                "new run with its weights: from_pretrained(checkpoint), then zk.shard"
            )
        self._load_weights(resume_from_checkpoint, model)

    def _load_weights(self, folder: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if is_sharded(model):
            load_pretrained(model, folder)
        else:
            super()._load_from_checkpoint(folder, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        saved = None if checkpoint is None else Path(checkpoint) / FOLDER
        if saved is not None and saved.is_dir():
            extra = {"scheduler": self.lr_scheduler}
            load(saved, self.model, unwrapped(self.optimizer), extra=extra, rng=False)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        if (best / FOLDER).is_dir():
            load(best / FOLDER, self.model, rng=False)
        elif is_sharded(self.model):
            self._load_weights(str(best))
        else:
            super()._load_best_model()


class Trainer(TrainerMixin, transformers.Trainer):
    """Extends `transformers.Trainer` to models that zk.shard has sharded.

    Shard the model when the arguments have started the process group: `args.device` does that.

    >>> Trainer.__mro__[2] is transformers.Trainer
    True
    """
