"""Every field of `transformers.TrainingArguments`: carried into the Job, without effect on a number, or refused when it is set."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["CARRIED", "REFUSED", "WITHOUT_EFFECT", "refused_arguments", "word"]

CARRIED = frozenset(
    {
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
        *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("label_smoothing_factor", "label_names", "bf16", "fp16", "seed", "data_seed"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        *("dataloader_drop_last", "dataloader_num_workers", "remove_unused_columns", "train_sampling_strategy", "length_column_name"),
        *("logging_strategy", "logging_steps", "logging_first_step", "report_to", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("eval_strategy", "eval_steps", "metric_for_best_model", "greater_is_better", "load_best_model_at_end"),
        *("per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
        *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
    }
)
"""What the Job does as the Trainer would."""

WITHOUT_EFFECT = frozenset(
    {
        # what scripts read themselves, and what was done when the arguments or the Trainer were made
        *("output_dir", "do_train", "do_eval", "do_predict", "use_cache", "full_determinism", "tf32", "log_level", "log_level_replica"),
        # where and with how many devices: the plan's to say
        *("use_cpu", "local_rank", "average_tokens_across_devices", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
        *("ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout"),
        # memory and speed, which are the plan's too
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps", "skip_memory_metrics"),
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        # Atoll's own progress line, and a run that ends where a loss is not finite
        *("disable_tqdm", "log_on_each_node", "logging_nan_inf_filter"),
        # Atoll's own checkpoints: at the end, on Ctrl-C, and as often as costs little
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
        *("ignore_data_skip", "restore_callback_states_from_checkpoint"),
        # of push_to_hub, which is refused
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    }
)
"""What changes no number, or what Atoll has its own way for."""

_PLANNED = "what runs where is the plan's to say (`atoll plan`)"
_KERNELS = "kernels that take the place of modules are not carried"

REFUSED = {
    "deepspeed": _PLANNED,
    "fsdp": _PLANNED,
    "fsdp_config": _PLANNED,
    "parallelism_config": _PLANNED,
    "accelerator_config": "settings of Accelerate are not carried",
    "neftune_noise_alpha": "its noise is added by a hook, which is lost when the model is divided",
    "auto_find_batch_size": "the batch size decides what is computed; give per_device_train_batch_size",
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    "eval_on_start": "evaluations follow steps",
    "eval_delay": "evaluations are made after every eval_steps, from the first on",
    "bf16_full_eval": "evaluation has the precision of training",
    "fp16_full_eval": "evaluation has the precision of training",
    "include_num_input_tokens_seen": "tokens are not counted",
    "enable_jit_checkpoint": "a run that is told to end saves a checkpoint anyway",
    "push_to_hub": "upload what `atoll export` writes",
    "resume_from_checkpoint": "a Trainer's checkpoint is not gone on with, only Atoll's own: `atoll run … --resume RUN`",
    "dataloader_in_order": "batches are always in order",
    "debug": "its hooks are lost when the model is divided",
}
"""What a Job cannot carry, and why; each may stay at its default."""


def refused_arguments(args: "TrainingArguments") -> Iterator[tuple[str, str]]:
    """The arguments that are set and cannot be carried, and why: also those that nobody here knows."""
    for field in dataclasses.fields(args):
        if field.name in CARRIED or field.name in WITHOUT_EFFECT or not _is_set(field, getattr(args, field.name)):
            continue
        yield (
            field.name,
            f"{REFUSED.get(field.name, 'Atoll does not know this argument, so it might change what is computed')}; leave it out",
        )


def _is_set(field: "dataclasses.Field[Any]", value: Any) -> bool:
    """Whether it is anything but its default, as it was given or as the arguments write it out."""
    if field.name == "accelerator_config":
        from transformers.trainer_pt_utils import AcceleratorConfig

        return bool(value != AcceleratorConfig())
    if value is None or value is False or value in ("", [], {}):
        return field.default not in (None, False, "", dataclasses.MISSING)
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return bool(word(value) != word(default))


def word(value: Any) -> Any:
    """What an enumeration stands for; anything else as it is."""
    return getattr(value, "value", value)
