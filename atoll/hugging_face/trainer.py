"""`atoll.from_trainer`: a `transformers.Trainer` becomes a Job that makes the same steps; what a Job cannot carry is refused by name."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from atoll.blame import SentenceIfUncaught, users_code
from atoll.built_optimizer import BuiltAnew, built_anew
from atoll.data.stream import is_stream
from atoll.errors import JobError
from atoll.hugging_face.arguments import refused_arguments, word
from atoll.hugging_face.callbacks import observer_of, refused_callbacks
from atoll.hugging_face.data import Collator, Epochs, WithBlanks, tell_of_randomness
from atoll.hugging_face.loss import ItemCount, counts_items, own_compute_loss, probe_items, training_loss
from atoll.job import Job
from atoll.script import run_opener

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["from_trainer"]

_NEVER_CALLED = ("training_step", "get_batch_samples", "_inner_training_loop", "_prepare_inputs", "_prepare_input", "_clip_grad_norm")
_NEVER_CALLED_TO_EVALUATE = ("evaluate", "evaluation_loop", "prediction_step")


def from_trainer(trainer: "Trainer") -> Job:
    """The Job that trains as `trainer.train()` does on one device: losses and weights are equal to float tolerance, without dropout.

    Model, data, order of the data, collator, loss, optimizer, schedule, clipping, accumulation, precision, evaluation, metrics and
    callbacks are the Trainer's. A step has `per_device_train_batch_size · gradient_accumulation_steps` samples over all devices.
    Checkpoints are Atoll's: `job.run(out=…)`. What a Job cannot carry is refused by its name (docs/hugging_face.md).

    `python script.py` leaves a `trainer.train()` that follows to the Trainer; under `atoll run script.py` it is this Job that trains.
    """
    with SentenceIfUncaught():
        for name, why in _problems(trainer):
            raise JobError(f"from_trainer: {name}: {why}")
        with users_code("from_trainer: making the Trainer's data loaders, optimizer and schedule"):
            job = _job(trainer)
        _have_train_ask_for(trainer, job)
        return job


def _job(trainer: "Trainer") -> Job:
    args, model = trainer.args, trainer.model
    assert isinstance(model, nn.Module)
    _align_special_tokens(trainer)
    loader = trainer.get_train_dataloader()
    collator = Collator(loader.collate_fn)
    epochs = None if is_stream(loader.dataset) else Epochs(trainer, loader)
    found = None
    if epochs is not None:
        found = _probed(trainer, epochs, collator, loader.dataset)
        tell_of_randomness(epochs, collator, [loader.dataset[0]] * 2)
    steps = _total_steps(trainer, epochs)
    steps_of_epoch = steps if epochs is None else epochs.steps
    eval_every = _eval_every(trainer, steps, steps_of_epoch)
    accumulation = args.gradient_accumulation_steps
    return Job(
        name=type(model).__name__,
        model=model,
        loss=training_loss(trainer, found),
        data=cast(Any, loader.dataset) if epochs is None else WithBlanks(loader.dataset),
        collate_fn=collator,
        sampler=epochs,
        num_workers=args.dataloader_num_workers,
        **_optimizer(trainer, model).arguments(),
        scheduler=_schedule(trainer, steps),
        batch_size=args.per_device_train_batch_size * accumulation,
        micro_batch_size=args.per_device_train_batch_size if accumulation > 1 else None,
        steps=steps,
        seed=args.seed,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        compile=_compiled(trainer),
        max_grad_norm=args.max_grad_norm or None,
        eval_data=None if eval_every is None else cast(Any, trainer.get_eval_dataloader().dataset),
        eval_every=eval_every,
        callbacks=[observer_of(trainer, steps, steps_of_epoch, eval_every)],
    )


def _compiled(trainer: "Trainer") -> bool | dict[str, Any]:
    """Arguments of `torch.compile`, if there are some."""
    args = trainer.args
    given = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in given.items() if value is not None} if args.torch_compile else False


def _align_special_tokens(trainer: "Trainer") -> None:
    """As `train()` does first: the model's configuration takes over the tokenizer's special tokens."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.trainer_utils import align_special_tokens

    if isinstance(trainer.processing_class, (PreTrainedTokenizerBase, ProcessorMixin)) and hasattr(trainer.model, "config"):
        align_special_tokens(trainer.model, trainer.processing_class)  # type: ignore[no-untyped-call]


def _total_steps(trainer: "Trainer", epochs: Epochs | None) -> int:
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    assert epochs is not None, "the Trainer has refused data without a length and without max_steps"
    return max(1, math.ceil(args.num_train_epochs * epochs.steps))


def _eval_every(trainer: "Trainer", steps: int, steps_of_epoch: int) -> int | None:
    """How often is evaluated; None: never."""
    strategy, every = word(trainer.args.eval_strategy), trainer.args.eval_steps
    if trainer.eval_dataset is None or strategy == "no":
        return None
    if strategy == "epoch" or every is None:
        return steps_of_epoch
    return int(every) if every >= 1 else max(1, math.ceil(steps * every))


def _probed(trainer: "Trainer", epochs: Epochs, collator: Collator, dataset: Any) -> ItemCount | None:
    """What the loss does with labels and their number, where that matters: it decides what the Trainer makes of several batches, whether
    a step may have blanks, and what the loss of a subclass is divided by."""
    several = trainer.args.gradient_accumulation_steps > 1
    if epochs.fills and not several and not own_compute_loss(trainer):
        return None
    found = probe_items(trainer, collator, [dataset[index] for index in range(min(4, len(dataset)))])
    averages = trainer.loss_is_scaled_for_ga is False or not counts_items(trainer)
    if several and not averages and found is not None and not found.divides:
        raise JobError(
            "from_trainer: gradient_accumulation_steps: the loss is not divided by num_items_in_batch, and the Trainer adds up the losses "
            "of its batches; set loss_is_scaled_for_ga = False in a subclass, or make per_device_train_batch_size larger instead"
        )
    weighted = found is not None and found.leaves_out and (found.divides or not own_compute_loss(trainer))
    epochs.fill_with_blanks = weighted and not epochs.fills
    epochs.tell_if_uneven()
    if several and averages:
        warnings.warn(
            "from_trainer: gradient_accumulation_steps: the Trainer averages the losses of its batches, Atoll takes the loss of all the "
            "samples of the step, which is another where batches have different numbers of labels",
            stacklevel=5,
        )
    return found


def _optimizer(trainer: "Trainer", model: nn.Module) -> BuiltAnew:
    """How to build the like of the Trainer's optimizer, with its groups of parameters; the Trainer keeps what it had."""
    before = trainer.optimizer
    try:
        optimizer = trainer.create_optimizer()
    finally:
        trainer.optimizer = before
    if callable(getattr(optimizer, "train", None)):
        raise JobError(f"from_trainer: optim: {type(optimizer).__name__} must be told of training and evaluation, which is not carried")
    with _before_its_schedule(optimizer):
        return built_anew(optimizer, model)


@contextmanager
def _before_its_schedule(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, learning rates are those that the optimizer was made with; a schedule that was made for it has changed them."""
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")
    try:
        yield
    finally:
        for group, was in zip(optimizer.param_groups, before, strict=True):
            group.update(was)


def _schedule(trainer: "Trainer", steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """The schedule of `lr_scheduler_type` with its warm-up, what a subclass makes instead, or the like of the one the Trainer was given."""
    given = trainer.lr_scheduler
    if given is not None:
        if type(given) is not LambdaLR or given.last_epoch != 0 or any(each != given.lr_lambdas[0] for each in given.lr_lambdas):
            raise JobError(
                f"from_trainer: optimizers: the {type(given).__name__} was made for an optimizer that is not the one that steps; give "
                "lr_scheduler_type, or dataclasses.replace(job, scheduler=…) with a callable from the optimizer to a schedule"
            )
        multiplier = given.lr_lambdas[0]
        return lambda optimizer: LambdaLR(optimizer, multiplier)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        try:
            return trainer.create_scheduler(steps, optimizer)
        finally:
            trainer.lr_scheduler = None

    return schedule


def _problems(trainer: "Trainer") -> Iterator[tuple[str, str]]:
    """What a Job cannot carry, by its name in the Trainer or its arguments, and what to do instead."""
    args = trainer.args
    if trainer.train_dataset is None:
        yield "train_dataset", "there is none; give the Trainer one"
    if args.world_size > 1 or torch.distributed.is_initialized():
        yield "TrainingArguments", "they have joined a process group of their own; start the script with `atoll run`, not torchrun"
    yield from refused_arguments(args)
    yield from refused_callbacks(trainer)
    if word(args.train_sampling_strategy) == "batch_rebalance":
        yield "train_sampling_strategy", "batch_rebalance moves samples between devices, which is the plan's; leave it out"
    if type(trainer.data_collator).__name__ == "DataCollatorWithFlattening":
        yield "data_collator", "packing makes one row of a batch, which cannot be divided; pad instead"
    if isinstance(trainer.eval_dataset, dict):
        yield "eval_dataset", "several data sets are not carried; give one"
    if word(args.lr_scheduler_type) == "greedy":
        yield "lr_scheduler_type", "greedy must be told a loss at every step; take reduce_lr_on_plateau"
    if word(args.lr_scheduler_type) == "reduce_lr_on_plateau" and args.metric_for_best_model not in ("loss", "eval_loss"):
        yield "metric_for_best_model", "reduce_lr_on_plateau is told the evaluation's loss; make it 'loss'"
    yield from _overridden(trainer)


def _overridden(trainer: "Trainer") -> Iterator[tuple[str, str]]:
    """Methods of a subclass that nobody would call."""
    from transformers import Trainer

    names = _NEVER_CALLED + (() if trainer.compute_metrics is not None else _NEVER_CALLED_TO_EVALUATE)
    for name in (*names, "evaluate"):
        if getattr(type(trainer), name, None) is not getattr(Trainer, name, None):
            yield name, f"{type(trainer).__name__} has its own, which a Job would not call; override compute_loss, or write an atoll.Job"


def _have_train_ask_for(trainer: "Trainer", job: Job) -> None:
    """Under a command that looks for the script's Job, `trainer.train()` is as far as the script goes; otherwise it trains."""
    opener = run_opener()
    if opener is None:
        return

    def train(resume_from_checkpoint: str | bool | None = None, **more: Any) -> Any:
        """Ask for a run of the Job."""
        if resume_from_checkpoint:
            raise JobError(
                "trainer.train(resume_from_checkpoint=…): a Trainer's checkpoint is not gone on with, only Atoll's own: `--resume RUN`"
            )
        return opener(job, False)

    trainer.train = train  # type: ignore[method-assign, assignment]
