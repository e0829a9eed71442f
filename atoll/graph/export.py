"""Job → exported program: `loss(model, batch)` in training mode on fake tensors, with the batch dimension symbolic where it can be.

A user's `torch.autograd.Function` is kept through export, which would trace its forward and forget its backward.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import fx, nn
from torch._export.wrappers import allow_in_pre_dispatch_graph
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from atoll.errors import AtollError, CaptureError, JobError
from atoll.graph.fake import (
    Answers,
    Assumption,
    Replayer,
    ValueRecorder,
    build_model,
    fake_model,
    find_random_assumption,
    first_line,
    is_symbolic,
    new_fake_mode,
    plain_batch,
    quiet_torch,
    real_model,
)
from atoll.graph.graph import Precision
from atoll.graph.host_randomness import DrawingLine, GeneratorWatch, extreme_draws, only_global, same_program
from atoll.graph.loss_check import CheckedJob, check_loss, notes_on_buffers
from atoll.graph.loss_terms import call_of, is_one_number, loss_of
from atoll.graph.loss_weight import LossForm, weigh_loss
from atoll.graph.program_check import check_program
from atoll.graph.regions import shared_memory, write_early, written
from atoll.graph.spec_augment import SpecAugmentCapture

__all__ = ["ADVICE", "ExportedJob", "TrainingJob", "ambient_precision", "export_job"]


@contextlib.contextmanager
def keep_custom_functions() -> Iterator[None]:
    """While it is on, `apply` of a custom function becomes one node of the program that calls it by name.

    Export offers this only as a decorator on each class's own `apply`; users' classes are not ours to edit, so the shared base's is
    replaced for the duration of one capture and put back.
    """
    base: Any = torch.autograd.Function
    keep: Any = allow_in_pre_dispatch_graph
    original = base.__dict__["apply"]
    kept = keep(original.__func__)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.compiler.is_exporting():
            raise CaptureError(
                "the model calls torch.utils.checkpoint with use_reentrant=True, through which gradients cannot be followed; pass "
                "use_reentrant=False, or leave it out: plans say themselves what is recomputed"
            )
        if cls.__module__.startswith("torch.") or not torch.compiler.is_exporting():
            return original.__func__(cls, *args, **kwargs)
        if "<locals>" in cls.__qualname__ or (cls.__module__ == "__main__" and "." in cls.__qualname__):
            raise CaptureError(f"autograd function {cls.__qualname__!r} is defined inside a function; move it to the top of its module")
        with _NoDraws(cls.__qualname__):
            return kept(cls, *args, **kwargs)

    apply.__name__ = "apply"
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original


class _NoDraws(TorchFunctionMode):
    """Around a custom function, which is one node of the program: numbers drawn inside of it would be seeded by nobody."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") in _DRAWING:
            raise CaptureError(
                f"autograd function {self._function!r} draws random numbers (`{func.__name__}`), which capture does not see; draw them "
                "before it is called and pass them to it"
            )
        return func(*args, **(kwargs or {}))


_DRAWING = {"bernoulli", "dropout", "exponential", "multinomial", "normal", "poisson", "rand", "rand_like", "randint"}
_DRAWING |= {"randn", "randn_like", "random", "uniform"}
SAMPLES = 4  # in the captured batch: not 0 or 1, which torch specialises, and large enough that what is shared by the batch weighs little
OTHER_SAMPLES = (3, 2, 8)  # in other batches, to see which dimensions grow with the samples, or with the longest of them


class TrainingJob(Protocol):
    """What capture needs of a job."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> nn.Module | Callable[[], nn.Module]: ...
    @property
    def loss(self) -> Callable[[nn.Module, Any], Any]: ...
    @property
    def precision(self) -> Precision: ...
    def example_batch(self, samples: int) -> Any:
        """A collated batch of that many samples. With a method `more_examples`, batches of other samples are looked at as well, and with
        `dynamic`, dimensions that are declared to vary."""
        ...


@dataclass(frozen=True)
class ExportedJob:
    """The program and what was found out on the way."""

    program: ExportedProgram
    model: nn.Module  # the fake copy that was captured
    samples: int  # in the captured batch
    varying: dict[str, tuple[int, ...]]  # batch tensor → its dimensions that may have another size when the program runs
    fixed: dict[str, tuple[int, ...]]  # batch tensor → its dimensions that grow with the batch but were captured at one size
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]
    loss_form: LossForm


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


_GRAD_FN = torch._C.TensorBase.__dict__["grad_fn"].__get__
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, _GRAD_FN)


class _WhatExportForgets(TorchFunctionMode):
    """Refuses what leaves no trace in a program: hooks on gradients, and a `no_grad` that stands inside an `autocast`."""

    def __init__(self) -> None:
        super().__init__()
        self._ambient = _autocast_depth()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS and not (func == _GRAD_FN and isinstance(args[0], nn.Parameter)):  # modules ask that of what they register
            what = "grad_fn" if func == _GRAD_FN else func.__name__
            raise CaptureError(
                f"the forward asks for `{what}` of a tensor: hooks on gradients are no part of the captured program. Write what the hook "
                "does as a torch.autograd.Function"
            )
        if func is torch._C._set_grad_enabled and not args[0] and torch.is_grad_enabled() and _autocast_depth() > self._ambient:
            raise CaptureError(
                "the model uses `no_grad` inside of `autocast`, where capture does not see it; put `autocast` inside of `no_grad`, "
                "call `.detach()` instead, or leave `autocast` to the job's precision"
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _lines_of(loss: Callable[..., Any]) -> Iterator[None]:
    """Operators remember the line of the user's loss they come from, not only those of modules' `forward`: errors name it."""
    code = getattr(getattr(loss, "func", loss), "__code__", None)
    anchors = torch.fx.proxy._STACK_TRACE_ANCHORS
    place = (code.co_filename, code.co_name) if code is not None else None
    added = {place} - anchors if place is not None else set()
    anchors |= added
    try:
        yield
    finally:
        anchors -= added


class _LossOf(nn.Module):
    """`loss(model, batch)` as a module, which is what export takes. The model's own paths get the prefix `model.`."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Any], mode: "Callable[[], contextlib.AbstractContextManager[Any]]"
    ):
        super().__init__()
        self.model = model
        self._loss = loss
        self._mode = mode

    def forward(self, batch: Any) -> Any:
        with SpecAugmentCapture(self.model), _WhatExportForgets(), self._mode():  # answers are asked for first: they are found by who asks
            before = dict(self.model.named_buffers())
            result = self._loss(self.model, batch)
            for name, buffer in before.items():
                self._write_back(name, buffer)
            return result

    def _write_back(self, name: str, buffer: torch.Tensor) -> None:
        """`self.buffer = …` would be lost: the program knows buffers, not attributes. So it is made a change of the buffer itself."""
        path, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(path)
        new = owner._buffers.get(attribute)
        if new is buffer:
            return
        if new is None or new.shape != buffer.shape or new.dtype != buffer.dtype:
            raise CaptureError(f"the model replaces its buffer {name!r} by one of another shape or type; write `self.{attribute}.copy_(…)`")
        buffer.copy_(new.detach() if new.requires_grad else new)
        owner._buffers[attribute] = buffer


@contextlib.contextmanager
def ambient_precision(precision: Precision) -> Iterator[None]:
    """Autocast as the runtime will have it around the program; nothing where all is in one precision."""
    if precision in ("fp32", "bf16-true"):
        yield
        return
    with torch.autocast("cpu", dtype=torch.bfloat16 if precision == "bf16" else torch.float16, cache_enabled=False):
        yield


def _growing(batch: Any, other: Any) -> dict[str, tuple[int, ...]]:
    """Dimensions that differ between two batches of different size, by the tensor's path in the batch."""
    leaves = pytree.tree_flatten_with_path(batch)[0]
    others = pytree.tree_flatten_with_path(other)[0]
    text = [pytree.keystr(path[:-1]) for path, leaf in leaves if isinstance(leaf, str)]
    if text:
        raise CaptureError(f"batch{text[0]} holds text, a piece for every sample; only tensors are captured: leave it out in `collate_fn`")
    if [path for path, _ in leaves] != [path for path, _ in others]:
        raise CaptureError("batches of different sizes have different structure; collate_fn must always return the same keys")
    growing = {}
    for (path, leaf), (_, second) in zip(leaves, others, strict=True):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() != second.dim():
                raise CaptureError(f"batch{pytree.keystr(path)} has {leaf.dim()} dimensions in one batch and {second.dim()} in another")
            growing[pytree.keystr(path)] = tuple(d for d in range(leaf.dim()) if leaf.shape[d] != second.shape[d])
    return growing


def _with_declared(
    growing: dict[str, tuple[int, ...]], batch: Any, declared: Mapping[str, int | Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Beside the dimensions that were seen to differ, those that the job says may (`Job.dynamic`), by name or path of the tensor."""
    shapes = {pytree.keystr(path): leaf.shape for path, leaf in pytree.tree_flatten_with_path(batch)[0] if isinstance(leaf, torch.Tensor)}
    found = dict(growing)
    for name, dims in declared.items():
        paths = [path for path in shapes if path in (name, f"[{name!r}]", f".{name}") or path.endswith((f"[{name!r}]", f".{name}"))]
        if not paths:
            raise CaptureError(f"Job: dynamic: the batch has no tensor {name!r}; it has {', '.join(f'batch{path}' for path in shapes)}")
        for path in paths:
            wanted = (dims,) if isinstance(dims, int) else tuple(dims)
            wrong = [dim for dim in wanted if not 0 <= dim < len(shapes[path])]
            if wrong:
                raise CaptureError(f"Job: dynamic: batch{path} has {len(shapes[path])} dimensions; there is no dimension {wrong[0]}")
            found[path] = tuple(sorted({*found.get(path, ()), *wanted}))
    return found


def _dynamic_shapes(batch: Any, growing: dict[str, tuple[int, ...]]) -> Any:
    def shapes(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        return dict.fromkeys(growing[pytree.keystr(path)], Dim.AUTO)

    return {"batch": pytree.tree_map_with_path(shapes, batch)}


def module_of_error(error: BaseException, model: nn.Module) -> str:
    """Path of the innermost module that was running when the error was raised; "" for code outside modules."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    return found


def _capture_error(job: TrainingJob, error: BaseException, model: nn.Module, advice: str) -> CaptureError:
    path = module_of_error(error, model)
    where = (
        f"module {path!r} ({type(model.get_submodule(path)).__name__})" if path else f"the loss or top-level code of {type(model).__name__}"
    )
    return CaptureError(f"job {job.name!r} cannot be captured: {where}: {type(error).__name__}: {first_line(error)}. {advice}")


_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException", "UserError")


def _is_data_dependent(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}"
    return any(name in text for name in _DATA_DEPENDENT) or "data-dependent" in text or "item()" in text or "Expected bool" in text


def _record_answers(job: TrainingJob, model: nn.Module, batch: Any, training: bool) -> Answers | None:
    """What an eager run answers to the model's questions; None when the model is too large to be run here."""
    real = real_model(model, job.model)
    if real is None:
        return None
    use_batched_experts(real)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), ambient_precision(job.precision), ValueRecorder() as recorder:
            torch.manual_seed(0)
            job.loss(real.train(training), batch)
    except Exception as error:
        raise _capture_error(job, error, real, "The model fails in an ordinary run too; mend that first.") from error
    return dict(recorder.answers)


def use_batched_experts(model: nn.Module) -> bool:
    """Let Hugging Face mixture-of-experts models compute experts by `bmm`; whether there was anything to set.

    Their default (`grouped_mm`) refuses fp32 and hides which expert works on which row.
    """
    changed = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation") and "expert" in type(module).__name__.lower():
            config._experts_implementation = "batched_mm"
            changed = True
    return changed


_ADVICE_ON_FAILURE = "See whether the job runs alone; if it does, write the model down with Graph.from_layers to plan it."
_ADVICE_ON_VALUES = "Rewrite that code without reading values of tensors, or write the model down with Graph.from_layers to plan it."
_ADVICE_ON_DRAWS = "Switch that off in the model's configuration (layerdrop, stochastic depth: 0)."
_ADVICE_ON_HOST_DRAWS = (
    "Draw it as a tensor (torch.rand), multiply or select by it instead of branching on it, or switch it off in the model's configuration "
    "(layerdrop, stochastic depth, augmentation: 0)."
)
ADVICE = (_ADVICE_ON_FAILURE, _ADVICE_ON_VALUES, _ADVICE_ON_DRAWS, _ADVICE_ON_HOST_DRAWS)  # what a refusal ends with, where it does


class _Attempts:
    """The ladder: plain export with symbolic sizes; with recorded answers; at fixed sizes."""

    def __init__(self, job: TrainingJob, model: nn.Module, batch: Any, growing: dict[str, tuple[int, ...]], training: bool):
        self.job, self.original, self.batch, self.growing, self.training = job, model, batch, growing, training
        self.assumptions: tuple[Assumption, ...] = ()
        self.notes: list[str] = []

    def run(self) -> tuple[ExportedProgram, nn.Module]:
        """The program and the fake model it was captured from; CaptureError where a random number of Python's or NumPy's is part of it."""
        with extreme_draws(high=True):
            program, model = self._run()
        if any(isinstance(value, torch.Generator) for value in program.constants.values()):
            raise CaptureError(
                f"job {self.job.name!r} cannot be captured: it draws from a torch.Generator of its own, whose state the captured program "
                "would neither set nor save. Draw from PyTorch's global generator, which is seeded for every step, or make the numbers "
                "when the model is built"
            )
        moved = self._moved
        if moved and not (only_global(moved) and self._is_same_with_other_draws(program)):
            line = DrawingLine(lambda: GeneratorWatch(self._last, self.job.loss))
            with extreme_draws(high=True), contextlib.suppress(Exception):
                self._export(self.growing, lambda: line)
            raise CaptureError(
                f"job {self.job.name!r} cannot be captured: {line} draws a random number of Python's or NumPy's, which the captured "
                f"program would not draw again. {_ADVICE_ON_HOST_DRAWS}"
            )
        return program, model

    def _is_same_with_other_draws(self, program: ExportedProgram) -> bool:
        again = _Attempts(self.job, self.original, self.batch, self.growing, self.training)
        try:
            with extreme_draws(high=False):
                return same_program(program, again._run()[0])
        except Exception:  # it cannot even be run with other numbers
            return False

    def _run(self) -> tuple[ExportedProgram, nn.Module]:
        try:
            return self._export(self.growing, contextlib.nullcontext)
        except AtollError:
            raise
        except Exception as error:
            if not _is_data_dependent(error):
                return self._at_fixed_size(error, contextlib.nullcontext)
        answers = _record_answers(self.job, self.original, self.batch, self.training)
        if answers is None:
            self.notes.append("the model asks tensors for values and is too large to be run here: yes-or-no questions were answered no")
        replayers: list[Replayer] = []

        def replay() -> Replayer:
            replayers.append(Replayer(answers))
            return replayers[-1]

        try:
            program = self._export(self.growing, replay)
        except Exception as error:
            program = self._at_fixed_size(error, replay)
        self.assumptions = tuple(replayers[-1].assumptions)
        drawn = find_random_assumption(program[0])
        if drawn:
            why = f"its code branches on a random number, so {drawn}. {_ADVICE_ON_DRAWS}"
            raise CaptureError(f"job {self.job.name!r} cannot be captured: {why}")
        return program

    def _at_fixed_size(self, first: Exception, mode: Callable[[], Any]) -> tuple[ExportedProgram, nn.Module]:
        try:
            result = self._export(dict.fromkeys(self.growing, ()), mode)
        except Exception as error:
            if isinstance(error, AtollError):
                raise
            advice = _ADVICE_ON_VALUES if _is_data_dependent(error) else _ADVICE_ON_FAILURE
            raise _capture_error(self.job, error, self._last, advice) from error
        self.notes.append(f"captured at one batch size, because: {first_line(first)}")
        return result

    def _export(self, growing: dict[str, tuple[int, ...]], mode: Callable[[], Any]) -> tuple[ExportedProgram, nn.Module]:
        self._last = model = fake_model(self.original, new_fake_mode())
        use_batched_experts(model)
        wrapped = _LossOf(model, self.job.loss, mode).train(self.training)
        shapes = _dynamic_shapes(self.batch, growing)
        with quiet_torch(), keep_custom_functions(), ambient_precision(self.job.precision), _lines_of(self.job.loss):
            watch = GeneratorWatch(model, self.job.loss)
            program = torch.export.export(wrapped, (self.batch,), strict=False, dynamic_shapes=shapes)
            self._moved = watch.moved()
        return program, model


def _drop_metadata_checks(program: ExportedProgram) -> None:
    """Export litters the program with checks of dtype and device that the eager model does not make."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    module.graph.erase_node(node)
            module.recompile()


def _varying(program: ExportedProgram, batch: Any, growing: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of the growing dimensions, those that stayed symbolic."""
    names = list(program.graph_signature.user_inputs)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    varying = {}
    for path, name in zip(paths, names, strict=True):
        value = values.get(name) if isinstance(name, str) else None
        if isinstance(value, torch.Tensor):
            varying[path] = tuple(d for d in growing.get(path, ()) if is_symbolic(value.shape[d]))
    return varying


@contextlib.contextmanager
def _running_the_users_code(job: TrainingJob, doing: str) -> Iterator[None]:
    """Whatever the model's, the data's or the loss's own code raises is a CaptureError that says so."""
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        raise CaptureError(f"job {job.name!r} cannot be captured: {doing} failed: {type(error).__name__}: {first_line(error)}") from error


def _check_parameters(job: TrainingJob, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            advice = "Give the layer its input size, or run a batch through the model before it is given to the Job."
            raise CaptureError(f"job {job.name!r} cannot be captured: the size of the lazy parameter {name!r} is not known yet. {advice}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("Job: model: it has no trainable parameter; set requires_grad on what is to be trained")


def _check_hooks(job: TrainingJob, model: nn.Module) -> None:
    """What is hooked to gradients is no operator of the forward, so no program would have it."""
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    hooked += [name or "the model" for name, module in model.named_modules() if module._backward_hooks or module._backward_pre_hooks]
    if hooked:
        raise CaptureError(
            f"job {job.name!r} cannot be captured: {hooked[0]!r} has a hook on its gradient, which the captured program would not call. "
            "Write it as a torch.autograd.Function in the forward; the norm of all gradients is clipped by max_grad_norm"
        )


def _with_values(job: TrainingJob, model: nn.Module) -> nn.Module | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return real_model(model, job.model)


def _check(
    job: TrainingJob, program: ExportedProgram, real: nn.Module | None, before: fx.GraphModule, form: LossForm, any_size: bool
) -> str:
    if real is None:
        return "whether the losses of a batch's pieces add up was not checked: the model is too large to be run here"
    return check_loss(cast(CheckedJob, job), program, before, form, real, any_size=any_size)


def _piecewise(program: ExportedProgram) -> list[str]:
    """On what is computed from a piece of the batch alone, though one process computes it from the whole."""
    nodes, root, buffers = list(program.graph.nodes), program.graph_module, program.graph_signature.inputs_to_buffers
    names = {node: buffers[node.name].removeprefix("model.") for node in nodes if node.name in buffers}
    memory = shared_memory(nodes, root)
    starts = [start for node in nodes for value in written(node, root) for start in memory.get(value, ())]
    changed = dict.fromkeys(names[start] for start in starts if start in names)
    calls = [arguments for name, arguments in map(call_of, nodes) if name == "batch_norm" and arguments.get("training")]
    norms = {names[mean].rpartition(".")[0] for arguments in calls if (mean := arguments["running_mean"]) in names}
    return notes_on_buffers(list(changed), norms, normalises=bool(calls))


def export_job(job: TrainingJob, *, training: bool = True, divided: bool = False, check: bool = False) -> ExportedJob:
    """Capture `job.loss(job.model, batch)` without allocating the model; raises `CaptureError` with the module and the reason.

    With `divided` the program is for pieces of a batch, whose results add up to the batch's loss (`loss_weight.py`). With `check` a model
    that is not too large for it is built, and its loss on the first batch compared with that on the batch's pieces.
    """
    with _running_the_users_code(job, "building the model"):
        model, building = build_model(job.model)
    _check_parameters(job, model)
    _check_hooks(job, model)
    with _running_the_users_code(job, "loading a batch"):
        batch = plain_batch(job.example_batch(SAMPLES))
        others = [plain_batch(job.example_batch(samples)) for samples in OTHER_SAMPLES]
        if hasattr(job, "more_examples"):
            others += map(plain_batch, job.more_examples(SAMPLES))
    growing = _growing(batch, others[0])
    for other in others[1:]:
        growing = {path: tuple(sorted({*dims, *growing[path]})) for path, dims in _growing(batch, other).items()}
    growing = _with_declared(growing, batch, getattr(job, "dynamic", {}))
    if not any(growing.values()):
        raise CaptureError(f"job {job.name!r}: no tensor of the batch grows with the number of samples; check collate_fn")
    attempts = _Attempts(job, model, batch, growing, training)
    with _running_the_users_code(job, "running the model and its loss"):
        program, fake = attempts.run()
    _drop_metadata_checks(program)
    write_early(program.graph_module)
    before = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph)) if check else program.graph_module
    varying = _varying(program, batch, growing)
    real = _with_values(job, model) if check else None
    if real is not None:
        fits = {path: dims for path, dims in varying.items() if dims} == {path: dims for path, dims in growing.items() if dims}
        count = OTHER_SAMPLES[0] if fits else SAMPLES
        more = plain_batch(cast(CheckedJob, job).example_batch(count, count))
        check_program(cast(CheckedJob, job), program, real, others[0] if fits else batch, more, partial(ambient_precision, job.precision))
    one_number = is_one_number(loss_of(program))
    batch_size = None if training or not divided else cast(CheckedJob, job).batch_size
    scaled = training and job.precision == "fp16"
    form = weigh_loss(program, samples=SAMPLES, batch_size=batch_size, scaled=scaled) if divided else LossForm()
    fixed = {name: rest for name, dims in growing.items() if (rest := tuple(d for d in dims if d not in varying.get(name, ())))}
    checked = _check(job, program, real, before, form, any(varying.values()) and not fixed) if check and one_number else ""
    return ExportedJob(
        program=program,
        model=fake,
        samples=SAMPLES,
        varying={name: dims for name, dims in varying.items() if dims},
        fixed=fixed,
        assumptions=attempts.assumptions,
        notes=tuple(filter(None, (building, *attempts.notes, checked, *(_piecewise(program) if divided and training else ())))),
        loss_form=form,
    )
