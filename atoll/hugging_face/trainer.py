"""`atoll.from_trainer`: a `transformers.Trainer` becomes a Job that makes the same steps; what a Job cannot carry is refused by name."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from atoll.blame import SentenceIfUncaught, users_code
from atoll.built_optimizer import built_anew
from atoll.errors import JobError
from atoll.hugging_face.callbacks import TrainerObserver, carried_callbacks, stop_before_training
from atoll.job import Job, LossFunction

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["from_trainer"]

_IGNORED_LABEL = -100


def from_trainer(trainer: "Trainer") -> Job:
    """The Job that trains as `trainer.train()` does in one process: losses and weights are equal to float tolerance, without dropout.

    Model, data, order of the data, collator, loss, optimizer, schedule, clipping, accumulation, precision, evaluation and callbacks are the
    Trainer's. Checkpoints are Atoll's: `job.run(out=…)`. A script that goes on to `trainer.train()` is left to the Trainer by
    `python script.py`; under `atoll run script.py` it goes no further than there.
    """
    with SentenceIfUncaught():
        _refuse_what_cannot_be_carried(trainer)
        args = trainer.args
        with users_code("from_trainer: making the Trainer's data loader, optimizer and schedule"):
            loader = trainer.get_train_dataloader()
            steps = trainer.set_initial_training_values(args, loader)
            optimizer = trainer.create_optimizer(trainer.model)
        max_steps, epoch = steps[-1], _Epochs(loader, args)
        observers = carried_callbacks(trainer)
        job = Job(
            name=trainer.model.__class__.__name__,
            model=trainer.model,
            loss=_training_loss(trainer),
            data=loader.dataset,
            collate_fn=partial(_collated, loader.collate_fn),
            sampler=epoch,
            num_workers=args.dataloader_num_workers,
            **built_anew(optimizer, trainer.model).arguments(),
            scheduler=_schedule(trainer, max_steps),
            batch_size=epoch.batch_size,
            micro_batch_size=args.per_device_train_batch_size if args.gradient_accumulation_steps > 1 else None,
            steps=max_steps,
            seed=args.seed,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            max_grad_norm=args.max_grad_norm or None,
            callbacks=[TrainerObserver(trainer, observers, max_steps, epoch.steps)],
            **_evaluation(trainer, max_steps, epoch.steps),
        )
        stop_before_training(trainer, job)
        return job


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """As the Trainer's collator makes it, as a plain dict."""
    return dict(collate(samples))


class _Epochs:
    """The samples of each epoch, in the order in which the Trainer's own sampler draws them, as many as make whole batches."""

    def __init__(self, loader: Any, args: Any) -> None:
        self.batch_size: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._batches, self._set_epoch = loader.batch_sampler, getattr(loader, "set_epoch", None)
        samples = len(self(0))
        self.steps = samples // self.batch_size if args.dataloader_drop_last else -(-samples // self.batch_size)
        if samples % self.batch_size:
            self._tell(samples)

    def __call__(self, epoch: int) -> list[int]:
        """The indices of an epoch, counted from 0."""
        if self._set_epoch is not None:
            self._set_epoch(epoch)
        return [index for batch in self._batches for index in batch]

    def _tell(self, samples: int) -> None:
        warnings.warn(
            f"from_trainer: an epoch has {samples} samples, which is no multiple of {self.batch_size}, the samples of a step: the Trainer "
            "makes the last step of each epoch with fewer, Atoll fills it up from the next epoch, so that losses differ from there on",
            stacklevel=5,
        )


def _counts_items(trainer: "Trainer") -> bool:
    """Whether the Trainer divides by the labels of all batches it accumulates, rather than averaging what batches return."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None) and trainer.loss_is_scaled_for_ga is not False


def _items(trainer: "Trainer", batch: Mapping[str, Any]) -> Tensor | None:
    """How many labels the Trainer would count in the batch; None where it counts none."""
    labels = batch.get("shift_labels", batch.get("labels")) if _counts_items(trainer) else None
    if not isinstance(labels, Tensor):
        return None
    if "shift_labels" not in batch and trainer._loss_shifts_labels:
        labels = labels[..., 1:]
    return labels.ne(_IGNORED_LABEL).sum()


def _training_loss(trainer: "Trainer") -> LossFunction:
    """`compute_loss` as a function of model and batch: a mean, or a sum over labels with their number."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        items = _items(trainer, batch)
        value: Tensor = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
        return value if items is None else (value * items, items)

    return loss


def _schedule(trainer: "Trainer", steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """The schedule of `lr_scheduler_type` with its warm-up, or what a subclass makes instead."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        before, trainer.lr_scheduler = trainer.lr_scheduler, None
        try:
            return trainer.create_scheduler(steps, optimizer)
        finally:
            trainer.lr_scheduler = before

    return schedule


def _evaluation(trainer: "Trainer", steps: int, steps_of_epoch: int) -> dict[str, Any]:
    """`eval_dataset` and how often; by the Trainer's own loss of each batch, as it evaluates."""
    args = trainer.args
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if trainer.eval_dataset is None or strategy == "no":
        return {}
    every = steps_of_epoch if strategy == "epoch" else _steps_of(args.eval_steps, steps)

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        value: Tensor = trainer.compute_loss(model, dict(batch), num_items_in_batch=_items(trainer, batch))
        return value

    return {"eval_data": trainer.eval_dataset, "eval_every": every, "eval_loss": loss}


def _steps_of(value: float, steps: int) -> int:
    """A number of steps; below 1, a share of all of them."""
    return int(value) if value >= 1 else max(1, -int(-steps * value // 1))


def _refuse_what_cannot_be_carried(trainer: "Trainer") -> None:
    for name, why in _problems(trainer):
        raise JobError(f"from_trainer: {name}: {why}")


def _problems(trainer: "Trainer") -> Iterator[tuple[str, str]]:
    """What a Job cannot carry, by its name in the Trainer or its arguments, and what to do instead."""
    args = trainer.args
    if trainer.train_dataset is None:
        yield "train_dataset", "there is none; give the Trainer one"
    if isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__len__"):
        yield "train_dataset", "data without a length is not carried; make an atoll.Job of it"
    if args.world_size > 1 or torch.distributed.is_initialized():
        yield "TrainingArguments", "they have joined a process group of their own; start the script with `atoll run`, not torchrun"
    planned = "what runs where is the plan's to say (`atoll plan`); leave it out"
    for name in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config"):
        value = getattr(args, name, None)
        if value and value != {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}:
            yield name, planned
    unknown = {
        "neftune_noise_alpha": "noise in embeddings is added by a hook, which is lost when the model is divided",
        "auto_find_batch_size": "the batch size decides what is computed; give one",
        "torch_compile": "compiling the model is not carried",
        "load_best_model_at_end": "checkpoints are Atoll's; evaluations in its report say which one was best",
        "eval_on_start": "evaluations follow steps",
        "eval_delay": "evaluations follow every eval_steps",
        "use_liger_kernel": "kernels that take the place of modules are not captured",
        "jit_mode_eval": "it is not carried",
        "push_to_hub": "upload what `atoll export` writes",
        "bf16_full_eval": "evaluation has the precision of training",
        "fp16_full_eval": "evaluation has the precision of training",
        "prediction_loss_only": "only losses are evaluated anyway; leave it out",
    }
    yield from ((name, f"{why}; leave it out") for name, why in unknown.items() if getattr(args, name, None))
    if str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)) == "batch_rebalance":
        yield "train_sampling_strategy", "batch_rebalance moves samples between devices, which is the plan's; leave it out"
    if trainer.compute_metrics is not None:
        yield (
            "compute_metrics",
            "it wants all predictions in one place; give dataclasses.replace(job, metrics={name: metric(model, batch)})",
        )
    if type(trainer.data_collator).__name__ == "DataCollatorWithFlattening":
        yield "data_collator", "packing makes one row of a batch, which cannot be divided; pad instead"
    if isinstance(trainer.eval_dataset, dict):
        yield "eval_dataset", "several data sets are not carried; give one"
    yield from _overridden(trainer)


def _overridden(trainer: "Trainer") -> Iterator[tuple[str, str]]:
    """Methods of a subclass that nobody would call."""
    from transformers import Trainer

    for name in (
        "training_step",
        "prediction_step",
        "evaluation_loop",
        "evaluate",
        "get_batch_samples",
        "_inner_training_loop",
        "_prepare_inputs",
    ):
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            yield name, f"{type(trainer).__name__} has its own, which a Job would not call; override compute_loss, or write an atoll.Job"
    own_loss = type(trainer).compute_loss is not Trainer.compute_loss
    if own_loss and trainer.args.gradient_accumulation_steps > 1 and trainer.loss_is_scaled_for_ga is None:
        yield (
            "compute_loss",
            f"{type(trainer).__name__} has its own, and batches are accumulated: say with loss_is_scaled_for_ga whether it returns a mean "
            "over its batch (False) or divides by num_items_in_batch (True)",
        )
