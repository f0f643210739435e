"""Lists every key that DeepSpeed 0.19 reads from a training configuration, with what becomes of it.

A key is *mapped* to a keyword; *ignored*, for the reason that stands beside it; left as *yours* because it belongs into
the training loop; or *refused*, because something else would be trained than was asked for, or it would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["AUTO", "DEFAULTS", "KEYS", "Key"]


@dataclass(frozen=True)
class Key:
    """Says what becomes of one key. `says`: the keyword, the reason, or what to do.

    `off`: values of a refused key that ask for nothing. `switch`: the entry that switches a section on, which then is
    judged as a whole.
    """

    kind: str
    says: str
    off: tuple[Any, ...] = (None, False)
    switch: str | None = None

    def asks(self, value: Any) -> bool:
        """Returns whether a value asks for anything.

        >>> Key("refused", "", switch="enabled").asks({"enabled": False})
        False
        """
        if self.switch is not None and isinstance(value, dict):
            value = value.get(self.switch, bool(value))
        return all(value != nothing for nothing in self.off)


def _rows(kind: str, section: str, text: str) -> dict[str, Key]:
    """Reads a key per line, `name: says`; names that share a line are divided by spaces."""
    rows: dict[str, Key] = {}
    for line in text.strip().splitlines():
        names, _, says = line.strip().partition(": ")
        rows |= {f"{section}{name}": Key(kind, says) for name in names.split()}
    return rows


def _sections(kind: str, text: str) -> dict[str, Key]:
    return {name: Key(kind, key.says, switch="enabled") for name, key in _rows(kind, "", text).items()}


ZERO = "zero_optimization."
OFFLOAD = f"{ZERO}offload_optimizer."
PARAMS = "optimizer.params."
CHECKPOINT = "checkpoint."

MAPPED = {
    **_rows("mapped", "", """
        train_batch_size: accumulation, with the two below and the number of ranks
        train_micro_batch_size_per_gpu: micro_batch, for your DataLoader
        gradient_accumulation_steps: accumulation
        gradient_clipping: max_grad_norm=
        communication_data_type: mp_policy.reduce_dtype
        fp16.enabled: mp_policy.param_dtype=torch.float16, and a GradScaler
        fp16.loss_scale: 0, dynamic: a GradScaler; a fixed scale is refused
        fp16.initial_scale_power: GradScaler(init_scale=2**n)
        fp16.loss_scale_window: GradScaler(growth_interval=)
        fp16.fp16_master_weights_and_grads: master_format="none" (lossy)
        bf16.enabled: mp_policy.param_dtype=torch.bfloat16
        bf16.bf16_master_weights_and_grads: master_format="none" (lossy)
        bf16.bf16_optimizer_states: state_format="bf16" (lossy)
        torch_autocast.enabled torch_autocast.dtype: autocast, for torch.autocast
        data_types.param_dtype: mp_policy.param_dtype
        data_types.grad_accum_dtype: mp_policy.reduce_dtype, in which gradients are added up, too
        checkpoint.writer.decoupled: zk.save(wait=False)
        optimizer.type: the optimizer's class
    """),
    **_rows("mapped", PARAMS, """
        lr: lr=
        betas: betas=
        eps: eps=
        weight_decay: weight_decay= (0 where it is left out, as in DeepSpeed)
        adam_w_mode: zk.AdamW, or zk.Adam where "type" is Adam and this is false
        torch_adam: torch's defaults for what is left out
        fp32_optimizer_states: state_format="bf16" (lossy) where false
        lr_decay initial_accumulator_value momentum dampening nesterov maximize: the same keyword
    """),
    **_rows("mapped", ZERO, """
        stage: stage=
        reduce_bucket_size: bucket_bytes=, where that is less than its default
        cpu_offload: tier="cpu" (deprecated: offload_optimizer)
        offload_optimizer.device: tier=
        offload_optimizer.nvme_path: zk.Nvme(path), a folder in it for each rank
        cpu_offload_param: zk.shard(tier="cpu") (deprecated: offload_param)
        offload_param.device: zk.shard(tier=)
        offload_param.nvme_path: zk.Nvme(path), in which each rank has a folder
        gather_16bit_weights_on_model_save: zk.export(path, model) always streams whole weights
        stage3_gather_fp16_weights_on_model_save: the same (deprecated: stage3_gather_16bit_weights_on_model_save)
    """),
}  # fmt: skip

IGNORED = {
    **_rows("ignored", "", """
        allgather_size: deprecated, a bucket size for gathering; parameters are gathered in the buckets they lie in
        managed_gradient_accumulation: the loop is yours either way
        prescale_gradients gradient_predivide_factor: the mean over ranks is the same; sums are fp32 on CPUs
        disable_allgather: how parameters come back is the stage's matter
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.legacy_fusion: there is one implementation
        steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level: printing; zk.measure, zerokern trace
        disable_python_gc vocabulary_size use_data_before_expert_parallelism: no part of the training state
        seq_parallel_communication_data_type data_parallel_size: speaks of other kinds of parallelism
        fp16.hysteresis fp16.consecutive_hysteresis: a GradScaler halves its scale at every overflow
        fp16.min_loss_scale: a GradScaler has no floor
        fp16.auto_cast: inputs are cast (mp_policy.cast_forward_inputs)
        bf16.immediate_grad_update: gradients are reduced as they arrive
        bf16.check_grad_overflow bf16.check_overflow: always on; a step that is not finite is skipped on all ranks
        torch_autocast.lower_precision_safe_modules: torch.autocast decides by operation; gradients are fp32
        data_types.keep_in_fp32_modules: buffers keep the dtype that they have
        activation_checkpointing.number_checkpoints activation_checkpointing.profile: for DeepSpeed's own buffers
        activation_checkpointing.synchronize_checkpoint_boundary: for DeepSpeed's own buffers
    """),
    **_rows("ignored", CHECKPOINT, """
        tag_validation: a folder is published once, by all ranks together
        load_universal: zk.load reads a universal folder as it reads its own, into any number of ranks
        checkpoint_serialization parallel_write.pipeline_stage: every rank writes its own file
        writer.type writer.io_buffer_size writer.io_buffer_double writer.io_multiplier: zk.io probes the disk
        writer.show_statistics writer.data_parallel: every rank writes what it owns
    """),
    **_rows("ignored", PARAMS, """
        set_grad_none foreach fused: there is one implementation; zero_grad sets None
    """),
    **_rows("ignored", ZERO, """
        contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce: always contiguous, \
scattered and gathered in buckets
        allgather_bucket_size overlap_comm round_robin_gradients parameter_alignment: reduced and gathered beside \
compute, bucket by bucket; see bucket_bytes=
        sub_group_size: the update takes any number of elements in bounded memory
        prefetch_bucket_size max_live_parameters max_reuse_distance: the unit in use and the next one are whole; units=
        param_persistence_threshold model_persistence_threshold: small parameters travel in the bucket of their unit
        module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential: a unit is gathered at once
        leaf_module.classes leaf_module.names leaf_module.name_suffixes: a unit is gathered whole, experts included
        compute_grad_norm: the norm is computed where max_grad_norm= asks for it
        load_from_fp32_weights: masters are always restored exactly
        elastic_checkpoint: any number of ranks loads any checkpoint
        ignore_unused_parameters: unused parameters are allowed
        memory_efficient_linear override_module_apply pipeline_loading_checkpoint: parameters are gathered by hooks \
of modules, nothing is patched
        log_trace_cache_warnings enable_sanity_checks: ranks that differ always raise
        save_muon_momentum_buffer_in_memory: only with Muon
        cpu_offload_use_pin_memory: pinned wherever there is a GPU
        offload_optimizer.pin_memory: pinned wherever there is a GPU
        offload_optimizer.buffer_count offload_optimizer.fast_init: zk.Nvme(ring_nbytes=) is all the memory it takes
        offload_optimizer.pipeline_read offload_optimizer.pipeline_write: reads, updates and writes always overlap
        offload_optimizer.cpuadam_cores_perc: usable CPUs over local ranks; ZEROKERN_THREADS
        offload_param.pin_memory: pinned wherever there is a GPU
        offload_param.buffer_count offload_param.buffer_size: zk.Nvme(ring_nbytes=) is all the memory it takes
        offload_param.max_in_cpu: units are fetched in order, one ahead
    """),
    **_rows("ignored", "aio.", """
        block_size queue_depth intra_op_parallelism single_submit overlap_events: zk.io probes the disk
        thread_count: not read by DeepSpeed either, which calls it intra_op_parallelism
    """),
    **_sections("ignored", """
        comms_logger tensorboard wandb comet csv_monitor flops_profiler timers: logging; it stays with your loop
        autotuning: a search by the launcher; zerokern plan says what fits
    """),
}  # fmt: skip

YOURS = {
    **_sections("yours", """
        scheduler: any scheduler of torch, on the optimizer; deepspeed.runtime.lr_schedules takes it as well
    """),
    **_rows("yours", "", """
        dataloader_drop_last: DataLoader(drop_last=) in your loop
        data_types.buffer_dtype: cast the model's buffers before zk.shard
    """),
}  # fmt: skip

REFUSED = {
    **_rows("refused", "", """
        gradient_allreduce_op: remove it and write zk.shard(reduce="sum") for a sum; the mean is the default
        sequence_parallel_size: flatten it into the dimension that is sharded, mesh=mesh["dp", "cp"]._flatten(); \
docs/composition.md
        activation_checkpointing.partition_activations: write zk.shard(replicated=mesh["tp"]); keep= is then "device"
        activation_checkpointing.cpu_checkpointing: write zk.shard(keep="cpu")
        activation_checkpointing.contiguous_memory_optimization: remove it; kept inputs lie in memory of their own
        checkpoint.use_node_local_storage: a checkpoint is one folder that all ranks reach
        aio.use_gds: the disk is read into host memory
        optimizer.params.max_grad_norm: write gradient_clipping instead, as DeepSpeed demands
        optimizer.params.amsgrad: the running maximum of exp_avg_sq is not kept
        optimizer.params.bias_correction: averages are always corrected
    """),
    **_rows("refused", ZERO, """
        offload_optimizer.ratio: state is on one tier as a whole
        offload_optimizer.super_offload: write schedule="overlap", bitwise identical, beside the backward pass
        zenflow: write schedule=zk.Delayed(after=N), which delays every update by one step and drops none
        zero_hpz_partition_size: write a mesh of two dimensions, zk.shard(mesh=mesh["replicate", "shard"]): divided \
within a node, copied between nodes (HSDP)
        zero_quantized_weights zero_quantized_nontrainable_weights: parameters are gathered in their own dtype
        zero_quantized_gradients: gradients are reduced in mp_policy.reduce_dtype
        legacy_stage1: DeepSpeed has removed it
        mics_shard_size mics_hierarchical_params_gather zeropp_loco_param: DeepSpeed has removed it
    """),
    **_sections("refused", """
        tensor_parallel expert_parallel pipeline: that is done by torch, beside zk.shard(mesh=mesh["dp"]); \
docs/composition.md shows each
        hybrid_engine weight_quantization: for inference; export the model with zk.export
        compile: torch.compile each unit of the model yourself
        data_efficiency: DeepSpeed's data sampling and routing change what is trained on
        datastates_ckpt: use zk.save(wait=False)
        nebula compression_training amp quantize_training sparse_gradients eigenvalue: DeepSpeed has removed it
        sparse_attention elasticity graph_harvesting curriculum_learning: DeepSpeed has removed it
        progressive_layer_drop: DeepSpeed has removed it
    """),
}  # fmt: skip

OFF = {
    "gradient_allreduce_op": ("mean", None),
    "sequence_parallel_size": (1, None),
    "optimizer.params.max_grad_norm": (None,),
    "optimizer.params.bias_correction": (True, None),
    f"{OFFLOAD}ratio": (1, None),
    f"{ZERO}zero_hpz_partition_size": (0, 1, None),
    f"{ZERO}mics_shard_size": (-1, 0, None),
    "tensor_parallel": (None, False, 0, 1),
}
SWITCHES = {"compile": "deepcompile", "tensor_parallel": "autotp_size"}  # of sections without an "enabled"

KEYS: dict[str, Key] = {**MAPPED, **IGNORED, **YOURS, **REFUSED}
for _name, _values in OFF.items():
    KEYS[_name] = replace(KEYS[_name], off=_values)
for _name, _entry in SWITCHES.items():
    KEYS[_name] = replace(KEYS[_name], switch=_entry)
for _short in (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential"
).split():
    KEYS[f"{ZERO}stage3_{_short}"] = KEYS[ZERO + _short]

# What DeepSpeed's own optimizers take for what is left out; torch's may differ.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
}

# What the Trainer of Hugging Face writes for "auto", of its TrainingArguments.
AUTO: dict[str, Callable[[Any], Any]] = {
    "train_micro_batch_size_per_gpu": lambda given: given.per_device_train_batch_size,
    "gradient_accumulation_steps": lambda given: given.gradient_accumulation_steps,
    "gradient_clipping": lambda given: given.max_grad_norm,
    f"{PARAMS}lr": lambda given: given.learning_rate,
    f"{PARAMS}betas": lambda given: (given.adam_beta1, given.adam_beta2),
    f"{PARAMS}eps": lambda given: given.adam_epsilon,
    f"{PARAMS}weight_decay": lambda given: given.weight_decay,
    "fp16.enabled": lambda given: given.fp16 or getattr(given, "fp16_full_eval", False),
    "bf16.enabled": lambda given: given.bf16 or getattr(given, "bf16_full_eval", False),
}
