"""What cannot be captured: the job as one layer that is neither cut nor split, measured by running the user's own code once.

Nothing is assumed of such code but that it runs: a real copy of the model is run forward and backward on a few samples, which tells what a
Graph must know (FLOPs, traffic, what autograd keeps) and what the runtime must (whether the loss is `(total, weight)`, whether it draws).
"""

import linecache
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from atoll.errors import CaptureError, DividedLossError, JobError
from atoll.graph.annotations import annotations_of
from atoll.graph.capture import Captured, capture_program
from atoll.graph.constraints import resolve
from atoll.graph.export import ADVICE, ambient_precision
from atoll.graph.fake import Answers, ValueRecorder, build_model, real_model
from atoll.graph.flops import Kernel, KernelCounter, saved_tensors
from atoll.graph.graph import Graph, Layer, Work
from atoll.graph.loss_check import check_eagerly, notes_on_buffers
from atoll.graph.piece_weight import PieceWeight
from atoll.graph.spec_augment import SpecAugmentCapture
from atoll.job import Job, read_loss
from atoll.randomness import generator_states, mix, own_randomness

__all__ = ["Uncaptured", "capture_for_pieces", "capture_or_run", "run_once"]

_SAMPLES = 4  # of the batch that is run
_BATCHES = 5  # that the code's questions must have the same answers for


class Uncaptured(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is trained as it is written, whole on every device. It travels between processes."""

    graph: Graph  # of one layer
    reason: str  # why it could not be captured, and where
    weighted: tuple[bool, ...]  # by turn (`Job.turns`), mostly one: the loss returns (total, weight)
    weights: tuple[PieceWeight, ...]  # by turn: what pieces weigh, where it does not
    draws: bool  # the forward pass draws random numbers
    late: bool = False  # a backward gives some parameters their gradient in several portions
    notes: tuple[str, ...] = ()  # for people: what is lost, what could not be found out


def capture_or_run(job: Job, *, check: bool = False, most_bytes: float) -> "Captured | Uncaptured":
    """The job for pieces of a batch, captured; or run once as it is, where it cannot be. What fails in an ordinary run too is refused.

    `most_bytes` is how large a model may be to be run here.
    """
    try:
        return capture_for_pieces(job, check=check)
    except DividedLossError:
        raise
    except CaptureError as error:
        return run_once(job, error, most_bytes=most_bytes)


def capture_for_pieces(job: Job, *, check: bool = False) -> Captured:
    """The job captured for pieces of a batch. With `check`, which is enough for one process to do, it is run on some batches.

    CaptureError where its code decides by values of the data, so that a captured program would soon have to stop; DividedLossError where
    the losses of pieces do not add up.
    """
    if len(job.turns) > 1:
        raise CaptureError(f"job {job.name!r} cannot be captured: it has several losses, with an optimizer each ({', '.join(job.turns)})")
    if not job.capture:
        raise CaptureError(f"job {job.name!r} is not to be captured: it says capture=False")
    captured = capture_program(job, divided=True, check=check)
    if check and any(assumption.seen for assumption in captured.assumptions):
        _check_answers(job)
    return captured


def _check_answers(job: Job) -> None:
    """What the code asks of tensors has the same answers for other samples."""
    with own_randomness(mix(job.seed, 0)):
        model = real_model(build_model(job.model)[0], job.model)
        if model is None:
            return
        first: Answers | None = None
        for start in range(0, _BATCHES * _SAMPLES, _SAMPLES):
            with torch.no_grad(), ambient_precision(job.precision), SpecAugmentCapture(model), ValueRecorder() as recorder:
                torch.manual_seed(0)
                job.loss(model, job.samples.at(range(start, start + _SAMPLES)))
            first = first or recorder.answers
            for site in [site for site in {**first, **recorder.answers} if first.get(site) != recorder.answers.get(site)]:
                code = linecache.getline(*site).strip()
                raise CaptureError(
                    f"job {job.name!r} cannot be captured: {Path(site[0]).name}:{site[1]} asks a tensor for its value, which differs "
                    f"between batches: `{code}`"
                )


def run_once(job: Job, refused: CaptureError, *, most_bytes: float) -> Uncaptured:
    """Measures a job that capture refused; the refusal itself is raised where the job does not run as it is either."""
    with own_randomness(mix(job.seed, 0)):
        model, run = None, None
        with _quietly():
            model = _real(job, refused, most_bytes)
            whole = job.example_batch(_SAMPLES)
            run = _together([_run(turn, model, whole) for turn in job.turns.values()])
        if model is None or run is None or run.changed:
            raise refused
        checked = [check_eagerly(turn, model) for turn in job.turns.values()]
    reason = _reason(refused)
    lost = (
        "every device runs the whole model as it is written: data parallelism, sharded or not, but no pipeline and no tensor "
        f"parallelism, because {reason}"
    )
    return Uncaptured(
        graph=_graph(job, model, whole, run),
        reason=reason,
        weighted=run.weighted,
        weights=tuple(found.weight for found in checked),
        draws=run.draws,
        late=run.late,
        notes=tuple(filter(None, (lost, run.note, *dict.fromkeys(found.note or found.weight.note for found in checked), *run.notes))),
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """What the user's code raises has been told by capture; what is wrong with the job otherwise is worth telling."""
    try:
        yield
    except CaptureError:
        return
    except JobError:
        raise
    except Exception:
        return


def _real(job: Job, refused: CaptureError, most_bytes: float) -> nn.Module:
    built, _ = build_model(job.model)
    model = real_model(built, job.model, most_bytes)
    if model is None:
        raise JobError(f"{refused} It can be trained as it is where it can be run once, but it is too large for that here") from refused
    return model


class _Run(NamedTuple):
    """What a forward and a backward pass showed."""

    weighted: tuple[bool, ...]
    draws: bool
    late: bool
    changed: bool  # the forward changes parameters in place
    kernels: Sequence[Kernel]
    bytes: float
    backward_flops: float
    backward_bytes: float
    saved_bytes: float
    note: str
    notes: Sequence[str]  # on buffers that the forward changes


def _run(job: Job, model: nn.Module, batch: Any) -> _Run:
    """Counted; where the counters themselves stumble over an operator, run without them."""
    try:
        return _counted(job, model, batch)
    except JobError:
        raise
    except Exception as error:
        model.zero_grad()
        plain = _plain(job, model, batch)
        return plain._replace(note=f"the work of the model is estimated from its parameters: {type(error).__name__}: {error}"[:200])


def _together(runs: Sequence[_Run]) -> _Run:
    """All turns of a step; memory is that of the turn that needs most."""
    return _Run(
        weighted=tuple(flag for run in runs for flag in run.weighted),
        draws=any(run.draws for run in runs),
        late=any(run.late for run in runs),
        changed=any(run.changed for run in runs),
        kernels=[kernel for run in runs for kernel in run.kernels],
        bytes=sum(run.bytes for run in runs),
        backward_flops=sum(run.backward_flops for run in runs),
        backward_bytes=sum(run.backward_bytes for run in runs),
        saved_bytes=max(run.saved_bytes for run in runs),
        note=next((run.note for run in runs if run.note), ""),
        notes=list(dict.fromkeys(note for run in runs for note in run.notes)),
    )


def _counted(job: Job, model: nn.Module, batch: Any) -> _Run:
    saved: list[Tensor] = []
    with _watched(model) as watched, ambient_precision(job.precision), saved_tensors(saved), KernelCounter() as forward:
        value, weight = read_loss(job.loss(model, batch))
        watched.forward_ended()
    _check_gradient(value)
    with KernelCounter() as backward:
        value.backward()  # type: ignore[no-untyped-call]
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *_tensors(batch))}
    kept = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
    return _Run(
        (weight is not None,),
        watched.draws,
        watched.late,
        watched.changed,
        forward.count.kernels,
        forward.count.bytes,
        backward.count.flops,
        backward.count.bytes,
        float(sum(size for memory, size in kept.items() if memory not in own)),
        "",
        watched.notes,
    )


def _plain(job: Job, model: nn.Module, batch: Any) -> _Run:
    saved: list[Tensor] = []
    with _watched(model) as watched, ambient_precision(job.precision), saved_tensors(saved):
        value, weight = read_loss(job.loss(model, batch))
        watched.forward_ended()
    _check_gradient(value)
    value.backward()  # type: ignore[no-untyped-call]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = 2.0 * parameters * _SAMPLES * _tokens(batch)
    kept = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
    kernels = [Kernel(flops, _SAMPLES * _tokens(batch), 1, parameters, parameters)]
    found = (weight is not None,), watched.draws, watched.late, watched.changed
    return _Run(*found, kernels, 0.0, 2 * flops, 0.0, float(sum(kept.values())), "", watched.notes)


def _check_gradient(value: Tensor) -> None:
    if not value.requires_grad:
        raise JobError("Job: loss: no gradient flows from it to the model; is it computed under no_grad, or detached?")


class _Watched:
    """What happens to a model's parameters and to the generators meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters, self._buffers = list(model.parameters()), [(name, b, b._version) for name, b in model.named_buffers()]
        self._norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
        self.notes: list[str] = []
        self._versions = [parameter._version for parameter in self._parameters]
        self._states = generator_states()
        self.arrived: Counter[int] = Counter()
        self.draws = self.changed = False

    def forward_ended(self) -> None:
        self.draws = generator_states() != self._states
        changed = [name for name, buffer, before in self._buffers if buffer._version != before]
        self.notes = notes_on_buffers(changed, self._norms, normalises=bool(self._norms))
        self.changed = [parameter._version for parameter in self._parameters] != self._versions

    @property
    def late(self) -> bool:
        return any(times > 1 for times in self.arrived.values())


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Watched]:
    model.train()
    watched = _Watched(model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # the copy is dropped afterwards, and the hooks with it
            parameter.register_post_accumulate_grad_hook(lambda one: watched.arrived.update([id(one)]))  # type: ignore[no-untyped-call]
    yield watched


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _tokens(batch: Any) -> int:
    """Length of the longest sequence of token numbers in the batch; 1 when there is none."""
    rows = [leaf for leaf in _tensors(batch) if leaf.dim() == 2 and not leaf.is_floating_point()]
    return max([1, *(leaf.numel() // _SAMPLES for leaf in rows)])


def _graph(job: Job, model: nn.Module, batch: Any, run: _Run) -> Graph:
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    input_bytes = sum(leaf.numel() * leaf.element_size() for leaf in _tensors(batch)) / _SAMPLES
    layer = Layer(
        name=type(model).__name__,
        work=_work(run, job.compute_dtype.itemsize),
        parameters=sum(trained),
        frozen_parameters=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        frozen_bytes=float(sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)),
        saved_bytes=run.saved_bytes / _SAMPLES,
        input_bytes=input_bytes,
        cut=False,
        tensors=tuple(trained),
    )
    return Graph(
        name=job.name,
        layers=(layer,),
        precision=job.precision,
        tokens_per_sample=_tokens(batch),
        constraints=resolve(annotations_of(model), [frozenset(name for name, _ in model.named_modules())]),
        input_bytes=input_bytes,
        eager=True,
    )


def _work(run: _Run, element: int) -> tuple[Work, ...]:
    """Products kernel by kernel, and all other traffic in one."""
    forward = sum(kernel.flops * kernel.count for kernel in run.kernels)
    backward = round(run.backward_flops / forward, 4) if forward else 0.0
    kinds: Counter[Work] = Counter()
    for kernel in run.kernels:
        kinds[_product(kernel, element, backward)] += kernel.count
    works = [msgspec.structs.replace(work, count=count) for work, count in kinds.items()]
    if run.bytes:
        works.append(Work(kind="memory", bytes=run.bytes / _SAMPLES, backward=round(run.backward_bytes / run.bytes, 4)))
    return tuple(works)


def _product(kernel: Kernel, element: int, backward: float) -> Work:
    rows, shaped = kernel.rows / _SAMPLES, kernel.rows and kernel.columns and kernel.depth
    flops = kernel.flops / _SAMPLES
    if not shaped:
        return Work(kind="attention", flops=flops, backward=backward)
    moved, weights = rows * (kernel.columns + kernel.depth) * element, float(kernel.right_numel * element)
    kind = "conv" if kernel.convolution else "matmul"
    common = {"flops": flops, "bytes": moved, "weight_bytes": weights, "rows": rows, "columns": kernel.columns, "depth": kernel.depth}
    return Work(kind=kind, backward=backward, **common)  # type: ignore[arg-type]


def _reason(refused: CaptureError) -> str:
    """What capture said, without its advice, and the line of the model's own code that it stopped at."""
    said = str(refused)
    for advice in ADVICE:
        said = said.removesuffix(advice).rstrip()
    place = _line_of(refused)
    return f"{said.rstrip('.')}{f' ({place})' if place else ''}"


def _line_of(error: BaseException) -> str:
    """`model.py:12: if x.sum() > 0:`: the innermost line that is neither PyTorch's nor Atoll's."""
    packages = [Path(package.__file__ or "").resolve().parent for package in (torch, msgspec)] + [Path(__file__).resolve().parents[1]]
    reason: BaseException | None = error
    while reason is not None:
        frames = [f for f in traceback.extract_tb(reason.__traceback__) if not _is_inside(f.filename, packages)]
        if frames:
            code = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" + (f": `{code}`" if code else "")
        reason = reason.__cause__
    return ""


def _is_inside(file: str, packages: Sequence[Path]) -> bool:
    path = Path(file)
    return not path.is_file() or any(package in path.resolve().parents for package in packages)
