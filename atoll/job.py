"""Job: what the user writes — a model, a loss, data and an optimizer. The same Job trains here alone or is planned onto a cluster.

A training script defines one Job at module level and ends with `if __name__ == "__main__": job.run()`.
"""

import copy
import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler, default_collate

from atoll.blame import SentenceIfUncaught, showing_lines, users_code
from atoll.built_optimizer import UntouchedOptimizer, built_anew
from atoll.callbacks import BestCheckpoint, Callback, EarlyStopping, takes_run
from atoll.data import Batch, Dataset, Samples, StreamSamples
from atoll.data.loaders import evaluation_parts, training_parts
from atoll.data.order import SampleOrder
from atoll.data.samples import EVALUATION
from atoll.data.stream import FromCallable, is_stream
from atoll.errors import JobError
from atoll.events import Evaluated
from atoll.randomness import mix, own_randomness
from atoll.weights import InitialWeights, MatchedWeights, without_memory

if TYPE_CHECKING:
    from atoll.loop import ClusterSource, PlanSource

__all__ = ["Job", "LossFunction", "LossValue", "ParameterGroup", "RunResult", "local_device", "read_loss"]

LossFunction: TypeAlias = Callable[[Any, Batch], Tensor | tuple[Tensor, Tensor | float]]
OptimizerBuilder: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerBuilder: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]
_SEEDS = 2**64  # what the mixing of seeds tells apart
_COMPILE_OPTIONS = ("backend", "mode", "options", "dynamic")  # fullgraph would forbid what is interrupted to stay exact
_PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-true": torch.bfloat16,
}


class LossValue(NamedTuple):
    """What a loss function returned: a mean over samples (`weight` is None), or a total and the weight it is to be divided by.

    Of an evaluation's program these may be rows: the totals and weights of terms that are added up.
    """

    value: Tensor
    weight: Tensor | float | None


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    reason: Literal["done", "stopped", "interrupted"]
    losses: tuple[float, ...]  # per step
    evaluations: tuple[Evaluated, ...]
    seconds: float
    trained: Callable[[], tuple[nn.Module | None, torch.optim.Optimizer | None]] = field(repr=False)

    @cached_property
    def _trained(self) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        return self.trained()

    @property
    def model(self) -> nn.Module | None:
        """With the trained weights. Where several processes trained it, in one piece on the CPU: read from the run's checkpoint when it
        is first asked for; without a directory, on rank 0 only (None on the others)."""
        return self._trained[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Of that model; None where several processes trained it without a directory."""
        return self._trained[1]


class ParameterGroup(NamedTuple):
    """Parameters with the same options of the optimizer, by their names."""

    options: dict[str, Any]
    names: list[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A training job. All arguments are keywords; a wrong one is a `JobError` that names it.

    The global batch of a step is `batch_size` samples, however many devices share it. Data is visited in a seeded order that any worker can
    compute (`atoll.data`), and the same seed gives the same losses, bit for bit on the same CPU.
    """

    evaluates_other_data: ClassVar[bool] = False
    """Whether whoever runs it gives data to evaluate on, so that metrics do not need `eval_data`."""

    model: nn.Module | Callable[[], nn.Module]
    """A callable that builds the module: it is called with the seed set, so that all hosts agree, and planning costs no memory.
    Or a built module, which is trained in place."""
    loss: LossFunction | Any  # or Mapping[str, LossFunction]
    """`loss(model, batch)`: the mean over the samples, or `(total, weight)` when the mean is over something else, such as tokens.
    Or several, by names of the model's submodules: in every step each is computed in turn and trains that submodule alone (a GAN)."""
    data: "Dataset | Iterable[Any] | DataLoader[Any] | Callable[[], Dataset | Iterable[Any]]"
    """Anything with a length and indexing, or that is read in order (an `IterableDataset`), or a callable that builds it when it is first
    needed. Or a `torch.utils.data.DataLoader`, which stands for its dataset, batch_size, collate_fn, num_workers, sampler, drop_last."""
    optimizer: OptimizerBuilder | torch.optim.Optimizer | Mapping[str, OptimizerBuilder]
    """From the trainable parameters to an optimizer: `functools.partial(torch.optim.AdamW, lr=3e-4)`, or a class; of a built module also a
    built optimizer over its parameters, which is built anew wherever parts of the model are. One for each loss,
    by the same names, where there are several."""
    batch_size: int = cast(int, None)
    """Samples in a step, over all devices. Left out only where `data` is a DataLoader, which has it."""
    steps: int | None = None
    """How many steps to train: this, or `epochs`."""
    epochs: float | None = None
    """How many times to visit the data; the last batch is filled up from the next epoch."""
    micro_batch_size: int | None = None
    """Samples in one forward pass here; gradients are accumulated up to `batch_size`. None: all at once."""
    collate_fn: Callable[[list[Any]], Batch] = default_collate
    """From a list of samples to a batch."""
    num_workers: int = 0
    """Processes that load data ahead of time, for every process that trains; 0: it loads for itself."""
    sampler: SampleOrder | None = None
    """The order of the data: a `torch.utils.data.Sampler`, or a callable from the epoch (counted from 0) to its indices. None: shuffled."""
    drop_last: bool = False
    """Leave out what an epoch has beyond whole batches; else the next epoch fills its last batch up."""
    dynamic: Mapping[str, int | Sequence[int]] = field(default_factory=dict)
    """Dimensions of a batch's tensors whose size varies, beside the number of samples: `{"input_ids": 1}`. Those that differ between the
    first batches are found without."""
    seed: int = 0
    """Decides the starting weights, the order of the data and dropout: a whole number from 0 to 2⁶⁴ - 1."""
    weights: str | Path | None = None
    """Where the weights begin: a Hugging Face directory, or a safetensors file, that every host sees. Each process reads its own part."""
    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = "fp32"
    """What matrix products are computed in (autocast); the weights stay fp32. fp16 scales the loss as it needs. `"bf16-true"`: weights,
    gradients, optimizer and inputs are bfloat16 too, as after `model.to(torch.bfloat16)`."""
    max_grad_norm: float | None = None
    """Clip the norm of the whole gradient to this."""
    scheduler: SchedulerBuilder | Mapping[str, SchedulerBuilder] | None = None
    """From the optimizer to a learning-rate schedule, stepped after every step; `ReduceLROnPlateau`, at every evaluation with its loss.
    With several losses: one for all, or by their names."""
    parameter_groups: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None
    """From a parameter's name and itself (whole, maybe without values) to options of its group, such as `{"weight_decay": 0.0}`."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the trained weights, such as 0.999: `atoll export --ema`, `run.snapshot().ema`."""
    eval_ema: bool = False
    """Evaluate the averaged weights instead of the weights."""
    eval_data: "Dataset | Iterable[Any] | DataLoader[Any] | Callable[[], Dataset | Iterable[Any]] | None" = None
    """Data to evaluate on, all of it, in its own order."""
    eval_every: int | None = None
    """Evaluate after every so many steps; always at the end when there is `eval_data`."""
    eval_loss: LossFunction | None = None
    """The loss for evaluation; None: `loss`."""
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)
    """More to evaluate: names, and functions like `loss`, which may also return plain numbers."""
    callbacks: Sequence[Callback] = ()
    """Called with every Event (`atoll.events`), and with the run if they take two arguments (`atoll.callbacks`); raise
    `atoll.StopTraining` in one to stop after the step."""
    name: str = "job"
    """What the run is called."""
    capture: bool = True
    """Whether the model may be captured, so that plans can cut it. False: every device runs it whole, as it is written."""
    store_frozen: bool = False
    """Store parameters that are not trained in checkpoints too. Else they are made again on resuming, by `model` or from `weights`, and
    compared with a digest; those of a module that was given built are always stored."""
    compile: bool | Mapping[str, Any] = False
    """Run forward and backward through `torch.compile`: True, or its arguments, such as `{"mode": "max-autotune", "dynamic": True}`."""

    def __new__(cls, *positional: object, **arguments: object) -> Self:
        """Refuse wrong names before Python does, with the nearest right ones."""
        with SentenceIfUncaught():
            _check_names(cls, positional, arguments)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        with SentenceIfUncaught():
            self._take_loaders_apart()
            self._take_optimizer_apart()
            _check_functions(self)
            _check_figures(self)
        if self.precision == "bf16-true":
            object.__setattr__(self, "model", _in_bf16(self.model))
            object.__setattr__(self, "collate_fn", _in_bf16(self.collate_fn))

    def _take_loaders_apart(self) -> None:
        """A DataLoader is its dataset and arguments of the job from here on."""
        if isinstance(self.data, DataLoader):
            for name, value in training_parts(self.data, vars(self)).items():
                object.__setattr__(self, name, value)
        if isinstance(self.eval_data, DataLoader):
            object.__setattr__(self, "eval_data", evaluation_parts(self.eval_data, self.collate_fn))

    def _take_optimizer_apart(self) -> None:
        """A built optimizer is a callable that builds its like from here on, and the options of its groups."""
        given = self.optimizer
        if not isinstance(given, torch.optim.Optimizer):
            return
        if self.parameter_groups is not None:
            _wrong("parameter_groups", "this optimizer is built and has groups already; leave out one of them")
        untouched, arguments = UntouchedOptimizer(given), built_anew(given, self.model).arguments()
        build = arguments["optimizer"]

        def build_unchanged(parameters: list[Any]) -> torch.optim.Optimizer:
            untouched.check("Job")
            return cast(torch.optim.Optimizer, build(parameters))

        for name, value in {**arguments, "optimizer": build_unchanged}.items():
            object.__setattr__(self, name, value)

    @cached_property
    def turns(self) -> "dict[str, Job]":
        """What a step does, one after another: each a job with one loss and one optimizer. This very job, with an empty name, if it is."""
        if not isinstance(self.loss, Mapping):
            return {"": self}
        assert isinstance(self.optimizer, Mapping)
        schedulers = self.scheduler if isinstance(self.scheduler, Mapping) else dict.fromkeys(self.loss, self.scheduler)
        return {
            name: replace(self, loss=loss, optimizer=self.optimizer[name], scheduler=schedulers.get(name), data=lambda: self.dataset)
            for name, loss in self.loss.items()
        }

    def trained_in(self, model: nn.Module) -> dict[str, list[str]]:
        """The names of the parameters that each turn trains; a JobError where that is not clear for one of them."""
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if "" in self.turns:
            return {"": list(named)}
        owner: dict[str, str] = {}
        for turn in self.turns:
            try:
                own = {id(parameter) for parameter in model.get_submodule(turn).parameters()}
            except AttributeError:
                _wrong(
                    "loss", f"{turn!r}: the model has no submodule of this name; it has {', '.join(n for n, _ in model.named_children())}"
                )
            for name in [name for name, parameter in named.items() if id(parameter) in own]:
                if name in owner:
                    _wrong("loss", f"{turn!r} and {owner[name]!r} both have the parameter {name!r}; every parameter has one optimizer")
                owner[name] = turn
        left = [name for name in named if name not in owner]
        if left:
            _wrong("optimizer", f"none trains the parameter {left[0]!r}; name its submodule, or set requires_grad=False on it")
        return {turn: [name for name in named if owner[name] == turn] for turn in self.turns}

    def share(self, start: int, stop: int, *, evaluates: bool) -> "Job":
        """The job of who trains on samples `start` up to `stop` of every batch alone, for as many steps; `evaluates`: as this job does."""
        size = stop - start
        without: dict[str, Any] = {"eval_data": None, "eval_every": None, "eval_loss": None, "metrics": {}, "eval_ema": False}
        evaluation: dict[str, Any] = {"eval_data": lambda: self.eval_dataset} if evaluates and self.eval_data is not None else without
        part = replace(
            self,
            data=lambda: self.dataset,
            batch_size=size,
            micro_batch_size=None if self.micro_batch_size is None else min(self.micro_batch_size, size),
            steps=self.total_steps,
            epochs=None,
            drop_last=False,
            callbacks=(),
            **evaluation,
        )
        vars(part)["samples"] = self.samples.share(start, stop)  # in the place where it is kept once it was asked for
        return part

    @cached_property
    def dataset(self) -> Any:
        """The training data, built on first use: with a length and indexing, or to be read in order."""
        return _built_dataset("data", self.data)

    @cached_property
    def eval_dataset(self) -> Any:
        """The evaluation data, built on first use."""
        return None if self.eval_data is None else _built_dataset("eval_data", self.eval_data)

    @cached_property
    def samples(self) -> Samples:
        """The training data in the order it is visited."""
        if is_stream(self.dataset):
            self._check_stream()
            return StreamSamples(self.dataset, self.collate_fn, self.seed, self.batch_size)
        return Samples(self.dataset, self.collate_fn, self.seed, self.batch_size, sampler=self.sampler, drop_last=self.drop_last)

    @cached_property
    def eval_samples(self) -> Samples | None:
        """The evaluation data in its own order."""
        return None if self.eval_dataset is None else self._in_sequence(self.eval_dataset)

    def evaluation_samples(self, dataset: Any) -> Samples:
        """Data to evaluate on, the job's or other, in its own order and in batches of the job's size."""
        return self.eval_samples if dataset is self.eval_dataset and self.eval_samples is not None else self._in_sequence(dataset)

    def _in_sequence(self, dataset: Any) -> Samples:
        size = self.micro_batch_size or self.batch_size
        if is_stream(dataset):
            stream = StreamSamples(dataset, self.collate_fn, self.seed, size, purpose=EVALUATION)
            with users_code("Job: eval_data: counting its samples"):
                stream.count()
            return stream
        return Samples(dataset, self.collate_fn, self.seed, size, sampler=SequentialSampler(dataset), purpose=EVALUATION)

    def _check_stream(self) -> None:
        """What needs to know how much data there is, or to choose from it, cannot be done with a stream."""
        if self.epochs is not None:
            _wrong("epochs", "data that is read in order has no length; give steps")
        if self.sampler is not None:
            _wrong("sampler", "data that is read in order comes in its own; leave the sampler out")
        if self.drop_last:
            _wrong("drop_last", "the last batch of a stream's epoch is filled up from the next; leave drop_last out")

    @property
    def total_steps(self) -> int:
        """Steps to train, also when the job counts in epochs."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return math.ceil(self.epochs * self.samples.length / self.batch_size)

    def remarks(self, steps_done: int = 0) -> list[str]:
        """What is worth knowing of the data before training goes on after so many steps."""
        samples, found = self.samples, []
        if 0 < samples.length < self.batch_size:
            sizes = f"the data has {samples.length} samples, fewer than a batch of {self.batch_size}"
            found.append(f"{sizes}: every step sees some of them more than once")
        if samples.most_workers is not None and self.num_workers > samples.most_workers:
            found.append(f"the data is read in order by one process: of num_workers={self.num_workers}, one is used")
        skipped = samples.reads_before(steps_done * self.batch_size)
        if skipped:
            found.append(
                f"{skipped:,} samples are read and left out, to go on where the run was: the data has no state_dict, or none was saved"
            )
        return found

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of `precision`."""
        return _PRECISIONS[self.precision]

    @property
    def micro_batches(self) -> tuple[tuple[int, int], ...]:
        """Where each local micro-batch starts and stops within the global batch."""
        size = self.micro_batch_size or self.batch_size
        return tuple((start, min(start + size, self.batch_size)) for start in range(0, self.batch_size, size))

    def example_batch(self, samples: int, first: int = 0) -> Batch:
        """The first samples that training will see, or those from `first` on, collated: the same on every host."""
        if samples < 1:
            raise JobError(f"example_batch: samples must be at least 1, got {samples}")
        return self.samples.at(range(first, first + samples))

    @property
    def collates_randomly(self) -> bool:
        """Whether `collate_fn` draws random numbers of its own, such as masks."""
        return self.samples.collates_randomly

    def more_examples(self, samples: int) -> list[Batch]:
        """Batches of that many of the samples that follow those of `example_batch`, so that lengths that vary are seen."""
        return [self.samples.at(range(start, start + samples)) for start in range(samples, 4 * samples, samples)]

    def build_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """The model with the weights it starts from, in training mode: the same weights on every host and device.

        On `"meta"` nothing is allocated. A job that was given a built module gets that very module back (on `"meta"`, a copy).
        """
        if isinstance(self.model, nn.Module):
            return _meta_copy(self.model).train() if torch.device(device).type == "meta" else self.model.to(device).train()
        if torch.device(device).type == "meta":
            with torch.device("meta"):
                return self._made()
        model = self._made()
        if self.weights is not None:
            self.initial_weights.match(model).fill_model(model)
        return model.to(device)

    def rebuilt(self, model: nn.Module) -> frozenset[str]:
        """Names of the parameters of a model of this job that are not trained and that the job makes again: checkpoints leave them out."""
        if self.store_frozen:
            return frozenset()
        return frozenset(name for name, value in model.named_parameters() if not value.requires_grad and name in self.made_anew)

    @cached_property
    def made_anew(self) -> frozenset[str]:
        """Names of the parameters that the model's callable makes whenever it is called, not finds ready: asked on the meta device."""
        if isinstance(self.model, nn.Module):
            return frozenset()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch says that loading into parameters without memory does nothing
                model = self.build_model("meta")
        except JobError:  # it cannot be made there, so nothing is known of it
            return frozenset()
        return frozenset(name for name, parameter in model.named_parameters() if parameter.is_meta)

    def _made(self, build: Callable[..., object] | None = None) -> nn.Module:
        """What the callable builds with the job's seed, in training mode."""
        with users_code("Job: model: building it"), own_randomness(mix(self.seed, 0)):
            model = (build or cast(Callable[[], object], self.model))()
        if not isinstance(model, nn.Module):
            raise JobError(f"Job: model: the callable must return a torch.nn.Module, it returned {_kind_of(model)}")
        return model.train()

    @property
    def initial_weights(self) -> InitialWeights:
        """The files that `weights` names."""
        assert self.weights is not None
        return InitialWeights(Path(self.weights))

    def weights_note(self, model: nn.Module) -> str | None:
        """What of the model is not in `weights`, and of them not in the model: a sentence, if there is something to say."""
        return None if self.weights is None else self.initial_weights.match(model).note()

    def build_to_take_parts_from(self) -> tuple[nn.Module, MatchedWeights | None]:
        """The model on the CPU for who needs only parts of it, and where its `weights` are to be read from.

        Without `weights` it is what `build_model` gives. With them, what is to be read has no memory of its own and no values.
        """
        if self.weights is None:
            return self.build_model("cpu"), None
        made = self.model.make if isinstance(self.model, _InBf16) else self.model
        dtype = torch.bfloat16 if isinstance(self.model, _InBf16) else None
        return without_memory(lambda: self._made(made), self.initial_weights.match, dtype)

    def group_names(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[ParameterGroup]:
        """The groups of a whole model's trained parameters, by name: one without options where the job makes none."""
        found: list[ParameterGroup] = []
        for name, parameter in named:
            if not parameter.requires_grad:
                continue
            options: dict[str, Any] = {}
            if self.parameter_groups is not None:
                with users_code(f"Job: parameter_groups: of {name}"):
                    options = dict(self.parameter_groups(name, parameter))
            known = next((group for group in found if group.options == options), None)
            if known is None:
                found.append(known := ParameterGroup(options, []))
            known.names.append(name)
        return found

    def build_optimizer(
        self, parameters: Iterable[nn.Parameter], groups: Sequence[tuple[Mapping[str, Any], Sequence[nn.Parameter]]] = ()
    ) -> torch.optim.Optimizer:
        """The job's optimizer for those of the parameters that are trained; in `groups`, if they are given: options, and parameters."""
        trainable: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            raise JobError("Job: model: it has no trainable parameter; set requires_grad on what is to be trained")
        assert not isinstance(self.optimizer, (Mapping, torch.optim.Optimizer)), "each turn has its own, and built ones are taken apart"
        if groups:
            trainable = [{"params": list(own), **options} for options, own in groups]
        with users_code("Job: optimizer: making it"):
            optimizer = cast(object, self.optimizer(trainable))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"Job: optimizer: the callable must return a torch.optim.Optimizer, it returned {_kind_of(optimizer)}")
        if not _steps_without_arguments(optimizer):
            raise JobError(
                f"Job: optimizer: {type(optimizer).__name__} computes the loss itself, as often as it likes in a step, "
                "which cannot be divided among devices; take one that steps once a gradient, such as torch.optim.AdamW"
            )
        return optimizer

    def build_model_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The job's optimizer for a whole model, in the job's groups of parameters."""
        return self.build_part_optimizer(dict(model.named_parameters()), self.group_names(model.named_parameters()))

    def build_optimizers(self, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        """Of all turns of a step, by their names: one without a name, unless the job has several losses."""
        if "" in self.turns:
            return {"": self.build_model_optimizer(model)}
        named, names = dict(model.named_parameters()), self.trained_in(model)
        return {turn: part.build_optimizer([named[name] for name in names[turn]]) for turn, part in self.turns.items()}

    def build_part_optimizer(self, parameters: Mapping[str, nn.Parameter], groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """The job's optimizer for some parameters of a model, in the groups of the whole: each is there, in the same order, if empty."""
        if self.parameter_groups is None:
            return self.build_optimizer(parameters.values())
        own = [(group.options, [parameters[name] for name in group.names if name in parameters]) for group in groups]
        return self.build_optimizer(parameters.values(), own)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """The job's learning-rate schedule, if it has one, long enough for all its steps."""
        if self.scheduler is None:
            return None
        assert not isinstance(self.scheduler, Mapping), "each turn has its own"
        with users_code("Job: scheduler: making it"):
            scheduler = cast(Any, self.scheduler(optimizer))
        if not hasattr(scheduler, "step"):
            raise JobError(f"Job: scheduler: the callable must return a learning-rate scheduler, it returned {_kind_of(scheduler)}")
        name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            if self.eval_data is None:
                raise JobError(f"Job: scheduler: {name} is told the loss of evaluations; give eval_data, and how often with eval_every")
            return scheduler
        if not _steps_without_arguments(scheduler):
            raise JobError(f"Job: scheduler: {name} must be told a metric at every step; take a schedule that depends on the step alone")
        length = getattr(scheduler, "total_steps", None)
        if isinstance(length, int) and length < self.total_steps:
            raise JobError(f"Job: scheduler: {name} ends after {length} steps and the job has {self.total_steps}; make them equal")
        return cast(LRScheduler, scheduler)

    def autocast(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """The context forward passes run in, so that matrix products are computed in the job's precision."""
        if self.precision in ("fp32", "bf16-true"):
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=self.compute_dtype)

    def run(
        self,
        *,
        out: str | Path | None = None,
        device: torch.device | str | None = None,
        progress: bool = True,
        plan: "PlanSource | None" = None,
        cluster: "ClusterSource | None" = None,
        resume: str | Path | None = None,
        checkpoint_every: int | None = None,
    ) -> RunResult:
        """Train: alone on this machine's accelerator or CPU; or, under torchrun, Slurm or Kubernetes, together with the other processes.

        With `out`, a new directory gets everything about the run: `events.jsonl`, and checkpoints at the end, on Ctrl-C and after every
        `checkpoint_every` steps (None: as often as it costs little). `resume` goes on with the run in that directory from its last
        checkpoint, whichever mode and plan wrote it. `plan` or `cluster` (objects or files) say what runs where when there are several
        processes; without them each takes an equal share of the batch.

        Ctrl-C ends the run after the current step; whatever ends it, the weights are those after a whole step. What goes wrong is a
        `JobError`, a `JobFailedError` once the run is under way; if the main script lets it pass, the script ends with its sentence and
        its exit code rather than with a traceback.
        """
        from atoll.loop import RunArguments, run_job  # later on the road than this file, and not needed to plan

        with SentenceIfUncaught(), showing_lines():
            arguments = RunArguments(
                out=out, device=device, progress=progress, plan=plan, cluster=cluster, resume=resume, checkpoint_every=checkpoint_every
            )
            return run_job(self, arguments)

    def load_model(self, run: str | Path, step: int | None = None) -> nn.Module:
        """The model with the weights of a run's last checkpoint, or that of a step, on the CPU; whichever mode and plan wrote it."""
        from atoll.loop import load_trained_model

        return load_trained_model(self, Path(run), step)


class _InBf16:
    """A callable whose result, a module or a batch, is in bfloat16 wherever it has floating numbers."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        return _in_bf16(self.make(*arguments))


def _in_bf16(value: Any) -> Any:
    """A module or what a batch holds, converted; a callable that makes one, such that it will be."""
    if isinstance(value, nn.Module):
        return value.to(torch.bfloat16)
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, _InBf16):
        return value
    if callable(value):
        return _InBf16(value)
    return tree_map_only(Tensor, _in_bf16, value)


def read_loss(result: object, name: str = "loss") -> LossValue:
    """Check what a loss function, or another of that `name`, returned and say what it is."""
    value, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(value, Tensor):
        _wrong(name, f"it must return a tensor or (total, weight), it returned {_kind_of(result)}")
    if value.numel() != 1:
        _wrong(name, f"it must return one number, it returned shape {list(value.shape)}; take the mean over the batch")
    if value.is_complex():
        _wrong(name, f"it must return a floating-point number, it returned {value.dtype}")
    if weight is not None and not isinstance(weight, (Tensor, int, float)):
        _wrong(name, f"the weight in (total, weight) must be a number, it is {_kind_of(weight)}")
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            _wrong(name, f"the weight in (total, weight) must be one number, its shape is {list(weight.shape)}")
        weight = weight.detach()
    return LossValue(value, weight)


def _check_names(cls: type[Job], positional: Sequence[object], arguments: Mapping[str, object]) -> None:
    """All arguments are there, by names that exist."""
    if positional:
        raise JobError("Job takes its arguments by name: Job(model=…, loss=…, data=…, optimizer=…, batch_size=…, steps=…)")
    known = {name: parameter for name, parameter in inspect.signature(cls.__init__).parameters.items() if name != "self"}
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(known)}"
            raise JobError(f"Job has no argument '{name}'; {hint}")
    needed = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    if not isinstance(arguments.get("data"), DataLoader):
        needed.append("batch_size")
    missing = [name for name in needed if name not in arguments or (name == "batch_size" and arguments[name] is None)]
    if missing:
        raise JobError(f"Job needs {' and '.join(missing)}: Job({', '.join(f'{name}=…' for name in missing)})")


def _check_figures(job: Job) -> None:
    """Numbers and words are what they should be, and agree."""
    for name in ("batch_size", "steps", "micro_batch_size", "eval_every"):
        _check_number(name, getattr(job, name), whole=True)
    if not isinstance(job.num_workers, int) or isinstance(job.num_workers, bool) or job.num_workers < 0:
        _wrong("num_workers", f"must be a whole number, 0 or more, got {job.num_workers!r}")
    for name in ("epochs", "max_grad_norm"):
        _check_number(name, getattr(job, name), whole=False)
    if (job.steps is None) == (job.epochs is None):
        _wrong("steps", "give either steps or epochs" + (", not both" if job.steps is not None else ""))
    if job.micro_batch_size is not None and job.micro_batch_size > job.batch_size:
        _wrong("micro_batch_size", f"must not exceed batch_size ({job.batch_size}), got {job.micro_batch_size}")
    if not isinstance(job.seed, int) or isinstance(job.seed, bool) or not 0 <= job.seed < _SEEDS:
        _wrong("seed", f"must be a whole number from 0 to 2**64 - 1, got {job.seed!r}")
    if job.ema_decay is not None and not (isinstance(job.ema_decay, (int, float)) and 0 <= job.ema_decay < 1):
        _wrong("ema_decay", f"must be from 0 to 1, such as 0.999, got {job.ema_decay!r}")
    evaluated = job.eval_data is not None or job.evaluates_other_data
    if job.eval_ema and (job.ema_decay is None or not evaluated):
        _wrong("eval_ema", "needs ema_decay and eval_data")
    if job.precision not in _PRECISIONS:
        _wrong("precision", f"must be 'fp32', 'bf16', 'fp16' or 'bf16-true', got {job.precision!r}")
    if not isinstance(job.name, str) or not job.name:
        _wrong("name", f"must be a word or two, got {job.name!r}")
    _check_compile(job.compile)
    for name, needed in (("eval_every", job.eval_data is None), ("eval_loss", not evaluated), ("metrics", not evaluated)):
        if getattr(job, name) and needed:
            _wrong(name, "needs eval_data to evaluate on")


def _check_compile(given: object) -> None:
    """True, False, or arguments of `torch.compile` that leave the numbers as they are."""
    if isinstance(given, bool):
        return
    if not isinstance(given, Mapping):
        _wrong("compile", f"must be True, False or a mapping of torch.compile's arguments, got {_kind_of(given)}")
    for name in given:
        if name not in _COMPILE_OPTIONS:
            _wrong("compile", f"takes {', '.join(_COMPILE_OPTIONS)} of torch.compile's arguments, got {name!r}")


def _check_functions(job: Job) -> None:
    """Everything callable is callable, with as many arguments as it will be given."""
    if not isinstance(job.model, nn.Module):
        _check_callable("model", job.model, 0, "a torch.nn.Module or a callable without arguments that builds one")
    if job.weights is not None and not isinstance(job.weights, (str, Path)):
        _wrong("weights", f"must be a path, got {_kind_of(job.weights)}")
    if job.weights is not None and isinstance(job.model, nn.Module):
        _wrong("weights", "a built module has weights already; give a callable that builds the model")
    _check_turns(job)
    for name, loss in _named("loss", job.loss).items():
        _check_callable(name, loss, 2, "a function loss(model, batch)")
    for name, optimizer in _named("optimizer", job.optimizer).items():
        if isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            _wrong(name, f"this {kind} is built already; give a callable, such as functools.partial(torch.optim.{kind}, lr=…)")
        _check_callable(name, optimizer, 1, "a callable from parameters to an optimizer, such as torch.optim.AdamW")
    if job.parameter_groups is not None:
        _check_callable("parameter_groups", job.parameter_groups, 2, "a function of a parameter's name and the parameter")
    _check_callable("collate_fn", job.collate_fn, 1, "a callable from a list of samples to a batch")
    if not isinstance(job.dynamic, Mapping) or not all(isinstance(name, str) for name in job.dynamic):
        _wrong("dynamic", f"must be a mapping from names of a batch's tensors to dimensions, got {_kind_of(job.dynamic)}")
    if job.sampler is not None and not isinstance(job.sampler, Sampler):
        _check_callable("sampler", job.sampler, 1, "a torch.utils.data.Sampler or a callable from the epoch to its indices")
    for name, scheduler in _named("scheduler", job.scheduler).items() if job.scheduler is not None else ():
        if isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            _wrong(name, f"this {kind} is built already; give a callable, such as functools.partial({kind}, …) with its other arguments")
        _check_callable(name, scheduler, 1, "a callable from an optimizer to a learning-rate scheduler")
    if job.eval_loss is not None:
        _check_callable("eval_loss", job.eval_loss, 2, "a function eval_loss(model, batch)")
    if not isinstance(job.metrics, Mapping):
        _wrong("metrics", f"must be a mapping from names to functions, got {_kind_of(job.metrics)}")
    for name, metric in job.metrics.items():
        if not isinstance(name, str) or not name:
            _wrong("metrics", f"names must be words, got {name!r}")
        if name == "loss":
            _wrong("metrics", "'loss' is what the evaluation loss is called; give this metric another name, or give it as eval_loss")
        _check_callable(f"metrics[{name!r}]", metric, 2, "a function metric(model, batch)")
    if not isinstance(job.callbacks, Sequence):
        _wrong("callbacks", f"must be a list of callables, got {_kind_of(job.callbacks)}")
    for i, callback in enumerate(job.callbacks):
        if isinstance(callback, (BestCheckpoint, EarlyStopping)) and job.eval_data is None:
            _wrong(f"callbacks[{i}]", f"{type(callback).__name__} needs eval_data to evaluate on")
        if not callable(callback) or not takes_run(callback):
            _check_callable(f"callbacks[{i}]", callback, 1, "a callable that takes an event, or an event and the run")
    for name in ("data", "eval_data"):
        data = getattr(job, name)
        if data is not None and not _is_dataset(data) and not is_stream(data):
            wanted = "data with __len__ and __getitem__, an IterableDataset, a DataLoader, or a callable without arguments that builds data"
            _check_callable(name, data, 0, wanted)
    if is_stream(job.data):
        job._check_stream()


def _named(argument: str, value: object) -> dict[str, object]:
    """What is given for an argument, by the words that name it."""
    return {f"{argument}[{name!r}]": one for name, one in value.items()} if isinstance(value, Mapping) else {argument: value}


def _check_turns(job: Job) -> None:
    """Several losses go with as many optimizers of the same names."""
    if not isinstance(job.loss, Mapping):
        for name in ("optimizer", "scheduler"):
            if isinstance(getattr(job, name), Mapping):
                _wrong(name, "several need as many losses, by the same names: loss={…}")
        return
    if not job.loss or not all(isinstance(name, str) and name for name in job.loss):
        _wrong("loss", f"several losses go by names of the model's submodules, got {list(job.loss)}")
    for name, given in (("optimizer", job.optimizer), ("scheduler", job.scheduler)):
        names = set(given) if isinstance(given, Mapping) else set(job.loss) if name == "scheduler" else set()
        if names != set(job.loss) and not (name == "scheduler" and names < set(job.loss)):
            _wrong(name, f"give one for each loss, by the same names ({', '.join(job.loss)}), got {', '.join(map(str, names)) or 'one'}")
    if job.precision == "fp16":
        _wrong("precision", "fp16 scales one loss, and there are several; take bf16")
    for name in ("ema_decay", "parameter_groups"):
        if getattr(job, name) is not None:
            _wrong(name, "is not made for several losses yet; leave it out")
    if job.eval_data is not None and job.eval_loss is None:
        _wrong("eval_loss", "there are several losses: say which to evaluate")


def _check_callable(name: str, value: object, arguments: int, wanted: str) -> None:
    if not callable(value):
        _wrong(name, f"must be {wanted}, got {_kind_of(value)}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return  # some built-in callables do not tell
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        hint = "; give it its arguments with functools.partial" if "missing" in str(error) else ""
        _wrong(name, f"must be {wanted}, but {getattr(value, '__name__', value)}{signature} cannot be called so: {error}{hint}")


def _check_number(name: str, value: object, *, whole: bool) -> None:
    if value is None:
        return
    right_kind = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right_kind or not (math.isfinite(cast(float, value)) and cast(float, value) > 0):
        _wrong(name, f"must be a positive {'whole number' if whole else 'number'}, got {value!r}")


def _steps_without_arguments(steps: object) -> bool:
    """Whether `.step()` can be called so; schedules patch it on the instance, so the class is asked."""
    try:
        inspect.signature(cast(Any, type(steps)).step).bind(steps)
    except TypeError:
        return False
    return True


def _is_dataset(value: object) -> bool:
    return (
        not isinstance(value, IterableDataset)
        and not isinstance(value, type)
        and hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
    )


def _built_dataset(name: str, data: object) -> Any:
    if _is_dataset(data) or is_stream(data):
        built = data
    else:
        with users_code(f"Job: {name}: building it"):
            built = cast(Callable[[], object], data)()
        if isinstance(built, Iterator):
            built = FromCallable(cast(Callable[[], Iterator[Any]], data))
    if isinstance(built, DataLoader):
        _wrong(name, "the callable returned a DataLoader; give the DataLoader itself, or a callable that returns its dataset")
    if is_stream(built):
        return built
    if not _is_dataset(built):
        _wrong(name, f"the callable must return data with __len__ and __getitem__ or with __iter__, it returned {_kind_of(built)}")
    with users_code(f"Job: {name}: its length"):
        length = len(cast(Dataset, built))
    if length == 0:
        _wrong(name, "it is empty")
    return cast(Dataset, built)


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the module whose tensors are on the meta device; the originals are never duplicated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


def local_device(device: torch.device | str | None = None) -> torch.device:
    """The device named, or this machine's accelerator, or its CPU."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise JobError(f"run: device {device!r} is not one PyTorch knows; try 'cpu' or 'cuda'") from error


def _kind_of(value: object) -> str:
    return value.__name__ + " (the class itself)" if isinstance(value, type) else f"{type(value).__name__} {value!r}"[:80]


def _wrong(argument: str, what: str) -> NoReturn:
    raise JobError(f"Job: {argument}: {what}")
