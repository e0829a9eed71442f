"""Whether the losses of a batch's pieces add up to the loss of the whole: the captured program is run on both, with real weights.

The first batch of the run is compared with its pieces, each collated on its own, as a run has them: so padding that counts and differs is
seen too. A loss that compares samples with one another (contrastive losses, a balance of experts over the batch) does not add up however
it is divided, and would train differently under every plan, without a word. Dropout is left out, and batch normalisation takes the
statistics it has gathered, which are known to differ between pieces (docs/job.md).
"""

import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from atoll.errors import DividedLossError
from atoll.graph.fake import plain_batch
from atoll.graph.loss_terms import call_of, loss_of, place_of
from atoll.graph.loss_weight import LossForm
from atoll.graph.piece_weight import BY_SAMPLES, IGNORED, PieceWeight, possible_weights
from atoll.graph.regions import is_initialisation
from atoll.job import LossValue, read_loss
from atoll.randomness import generator_states, own_randomness
from atoll.units import plural

__all__ = [
    "OWN_STATISTICS",
    "UNCHECKED",
    "CheckedJob",
    "CheckedLoss",
    "check_eagerly",
    "check_loss",
    "given_values",
    "notes_on_buffers",
    "notes_on_pieces",
]


class CheckedJob(Protocol):
    """What is asked of a job."""

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def loss(self) -> Callable[[nn.Module, Any], Any]: ...
    @property
    def collates_randomly(self) -> bool: ...
    def example_batch(self, samples: int, first: int = 0) -> Any:
        """As many of the samples that training will see, from `first` on, collated."""
        ...


OWN_STATISTICS = "batch normalisation takes the statistics of its own piece of the batch, so plans differ a little (docs/job.md)"
_CHANGES = "the forward changes the buffer"
COLLATES_RANDOMLY = (
    "`collate_fn` draws random numbers, and each piece of a batch is collated by itself: other divisions of the batch draw others, as with "
    "dropout; whether padding counts in the loss was not checked"
)
UNCHECKED = "whether the losses of a batch's pieces add up was not checked"
_TOLERANCES = {"fp32": 5e-5, "fp16": 3e-3, "bf16": 2e-2, "bf16-true": 2e-2}  # of the loss: products are as exact as that
_NOTHING, _NOTHING_COUNTS = 1e-9, f"{UNCHECKED}: nothing of the first samples counts"
_DRAWS = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "bernoulli", "multinomial", "normal", "uniform", "randperm"})
_BATCH_NORM = signature(functional.batch_norm)
_FEW = 4  # samples that are always compared
_SEEN = 16  # samples whose lengths are looked at: as many as capture looks at
_ZERO = 1e-3  # a parameter whose numbers are all smaller begins at zero, as it were
_OTHERWISE = ((0.3, 1.0), (0.3, 4.0))  # numbers and weights are scaled by these too: what may not be above one is not in the first
_SECONDS = 0.3  # of processor time for the whole batch: of a larger one, as many samples as take so long


class _Found(NamedTuple):
    """The loss, or a total with its weight, and the gradient of all parameters in a row."""

    value: float
    weight: float | None
    gradient: Tensor


class CheckedLoss(NamedTuple):
    """What was found of a loss that is not captured."""

    note: str = ""  # what could not be found out
    weight: PieceWeight = BY_SAMPLES


class _RandomLossError(Exception):
    """Two runs of the user's code would differ by chance alone."""


_Run: TypeAlias = Callable[[list[Any]], _Found]


@dataclass(frozen=True)
class _Runs:
    """What computes the loss of a whole batch as the user wrote it, and of pieces as a run has them."""

    whole: _Run
    pieces: Callable[[Sequence[list[Any]], int], list[_Found]]  # of a batch of so many samples
    parameters: Sequence[Tensor]  # that both compute with
    plain: Callable[[Any], Any] = plain_batch  # what becomes of a batch first


def check_loss(
    job: CheckedJob, program: ExportedProgram, before: fx.GraphModule, form: LossForm, model: nn.Module, *, any_size: bool
) -> str:
    """DividedLossError where the first batch's loss or gradient is not that of its pieces; else "", or why this could not be found out.

    `before` is the program as the user's code has it, for the whole batch; with `any_size` it runs on any number of samples.
    """
    calm = _Calm(program, program.graph_module, model)
    rewritten = form.kind in ("counted", "terms")
    sentence = f"{UNCHECKED}: the model draws random numbers ({calm.draws})"
    if any_size and not calm.draws:
        sentence = _Check(job, _by_program(program, before, form, model, calm), form, program).run()
    return sentence if rewritten or sentence in ("", COLLATES_RANDOMLY) else _Check(job, _eagerly(job, model), form, program).run()


def notes_on_pieces(notes: Sequence[str]) -> tuple[str, ...]:
    """Of what is said of a captured job, what concerns batches that are divided."""
    return tuple(note for note in notes if note in (OWN_STATISTICS, COLLATES_RANDOMLY) or note.startswith((UNCHECKED, _CHANGES)))


def notes_on_buffers(changed: Sequence[str], norms: Container[str], *, normalises: bool) -> list[str]:
    """On what a forward takes from, or changes for, the batch before it: `norms` names the modules of batch normalisation."""
    others = [name for name in changed if name.rpartition(".")[0] not in norms]
    notes = [OWN_STATISTICS] if normalises else []
    if others:
        more = f" and {plural(len(others) - 1, 'other')}" if others[1:] else ""
        notes.append(f"{_CHANGES} {others[0]!r}{more} once for each piece of the batch, so plans differ a little (docs/job.md)")
    return notes


def check_eagerly(job: CheckedJob, model: nn.Module, *, by_samples: bool = False) -> CheckedLoss:
    """The same of a job that cannot be captured, by its own code; the model is in evaluation mode afterwards.

    A loss that is no mean over samples is tried as a sum and as a mean over labels, unless it has to be the first (`by_samples`).
    """
    runs, unknown = _eagerly(job, model), LossForm("unknown")
    try:
        return CheckedLoss(_Check(job, runs, unknown, None).run())
    except DividedLossError as error:
        few = min(_FEW, job.batch_size)
        leaves = pytree.tree_leaves(job.example_batch(few))
        for weight in [] if by_samples else possible_weights(leaves, few):
            if _adds_up(_Check(job, runs, unknown, None, weight)):
                return CheckedLoss(weight=weight)
        raise error


def _adds_up(check: "_Check") -> bool:
    try:
        return check.run() in ("", COLLATES_RANDOMLY)
    except DividedLossError:
        return False


def _by_program(program: ExportedProgram, before: fx.GraphModule, form: LossForm, model: nn.Module, calm: "_Calm") -> _Runs:
    def pieces(batches: Sequence[list[Any]], samples: int) -> list[_Found]:
        calm.begin()  # then every piece finds buffers as the one before it left them, as in a run
        if form.weights is None:
            return [calm.loss(leaves) for leaves in batches]
        counted = [form.weights.of(dict(zip(calm.names, leaves, strict=False))) for leaves in batches]
        weights = form.weights.per_sample(counted, samples)
        return [calm.loss([*leaves, weights]) for leaves in batches]

    as_written = _Calm(program, before, model)

    def whole(leaves: list[Any]) -> _Found:
        as_written.begin()
        return as_written.loss(leaves)

    return _Runs(whole, pieces, [*as_written.parameters, *calm.parameters])


def _eagerly(job: CheckedJob, model: nn.Module) -> _Runs:
    """By the user's own code, for programs that run at one size or draw numbers; the model is as in an evaluation."""
    parameters = [parameter for parameter in model.eval().parameters() if parameter.requires_grad]
    tree = pytree.tree_structure(job.example_batch(1))

    def loss(leaves: list[Any]) -> tuple[LossValue, bool]:
        before = generator_states()
        with _WithoutBatchStatistics():
            value = read_loss(job.loss(model, pytree.tree_unflatten(leaves, tree)))
        return value, generator_states() != before

    def found(leaves: list[Any]) -> _Found:
        """What is drawn and decides nothing (layer drop in an evaluation) does not matter: other numbers give the same loss."""
        with own_randomness(0):
            (value, weight), draws = loss(leaves)
            gradient = _gradient(value, parameters)
        if draws:
            with own_randomness(1), torch.no_grad():
                if not torch.allclose(loss(leaves)[0].value, value.detach(), rtol=0.0, atol=0.0, equal_nan=True):
                    raise _RandomLossError
        return _Found(float(value.detach()), None if weight is None else float(weight), gradient)

    return _Runs(found, lambda batches, samples: [found(leaves) for leaves in batches], parameters, lambda batch: batch)


class _WithoutBatchStatistics(TorchFunctionMode):
    """Batch normalisation does not look at the batch, though it keeps no statistics of others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is functional.batch_norm:
            call = _BATCH_NORM.bind(*args, **given)
            call.apply_defaults()
            if call.arguments["training"]:
                channels = call.arguments["input"].shape[1]
                zeros = call.arguments["input"].new_zeros(channels)
                call.arguments.update(running_mean=zeros, running_var=zeros + 1, training=False)
            return func(*call.args, **call.kwargs)
        return func(*args, **given)


def _gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    rows = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([row.flatten().double() for row in rows])


class _Check:
    """The comparison, on few samples and on many."""

    def __init__(
        self, job: CheckedJob, runs: _Runs, form: LossForm, program: ExportedProgram | None, weight: PieceWeight = BY_SAMPLES
    ) -> None:
        """`weight` is what is assumed of a loss that returns one number."""
        self._job, self._runs, self._form, self._program, self._weight = job, runs, form, program, weight

    def run(self) -> str:
        """Few samples first, which tell how long it takes, then as many of the first batch as there is time for."""
        job, few = self._job, min(_FEW, self._job.batch_size)
        if few < 2:
            return ""
        try:
            began = time.process_time()
            with _nothing_zero(self._runs.parameters):
                found = self._compare_samples(0, few, None)
            seconds = (time.process_time() - began) / 2  # once whole, once in pieces
            count = min(job.batch_size, int(few * _SECONDS / max(seconds, 1e-6)))
            if found in ("", _NOTHING_COUNTS) and count > few:
                found = self._compare_samples(0, count, job.micro_batch_size)
            uneven = 0 if job.collates_randomly else self._find_uneven(few)
            if not found and uneven:
                found = self._compare_samples(uneven, few, None)
            if not found and self._form.kind == "unknown":
                self._compare_ignoring(few)
            if not found and seconds < _SECONDS:
                self._compare_otherwise(few)
        except DividedLossError:
            self._check_repeatable(few)
            raise
        except _RandomLossError:
            return f"{UNCHECKED}: the loss draws random numbers"
        except Exception as error:
            self._compare_halves()
            return f"{UNCHECKED}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return found or (COLLATES_RANDOMLY if job.collates_randomly else "")

    def _check_repeatable(self, count: int) -> None:
        """A batch that is another one whenever it is loaded is not the loss's doing."""
        once, again = self._collated([(0, count)] * 2)
        pairs = [pair for pair in zip(once, again, strict=False) if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)]
        if len(once) != len(again) or not all(torch.equal(*pair) for pair in pairs):
            raise DividedLossError(
                f"job {self._job.name!r}: the first samples are another batch when they are loaded again, so no two runs would train on "
                "the same data. Random numbers in the data and in `collate_fn` must come from the global generators of torch, numpy.random "
                "or random, which are seeded for every sample, and not from a generator of your own"
            )

    def _compare_halves(self) -> None:
        """Few samples may be too few for the code (the largest so many of a batch), which pieces of a plan need not be."""
        count = min(_SEEN, self._job.batch_size)
        try:
            self._compare_samples(0, count, count // 2)
        except DividedLossError:
            raise
        except Exception:
            return  # what is said of the few samples is enough

    def _compare_samples(self, first: int, count: int, size: int | None) -> str:
        division = _division(count, size)
        (whole,) = self._collated([(first, first + count)])
        if not self._job.collates_randomly:
            return self._compare(whole, self._collated([(first + start, first + stop) for start, stop in division]), division)
        if any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] != count for leaf in whole):
            return f"{UNCHECKED}: `collate_fn` draws random numbers"
        return self._compare(whole, [[_taken(leaf, start, stop, count) for leaf in whole] for start, stop in division], division)

    def _find_uneven(self, few: int) -> int:
        """Where the first samples of more than one length are, of which a piece would be padded otherwise than the batch; 0: nowhere."""
        shapes = [_shapes(self._runs.plain(self._job.example_batch(1, place))) for place in range(_SEEN)]
        changes = [place for place in range(1, _SEEN) if shapes[place] != shapes[place - 1]]
        return max(0, changes[0] - few // 2) if changes else 0

    def _collated(self, ranges: Sequence[tuple[int, int]]) -> list[list[Any]]:
        """The leaves of so many batches of the first samples."""
        return [pytree.tree_leaves(self._runs.plain(self._job.example_batch(stop - start, start))) for start, stop in ranges]

    def _compare_ignoring(self, count: int) -> None:
        """The first samples may all count where later ones do not: of a loss that could not be read, other numbers are ignored too."""
        (leaves,), division = self._collated([(0, count)]), _division(count, None)
        for place, leaf in enumerate(leaves):
            for changed in _fewer_that_count(leaf, count):
                whole = [changed if index == place else other for index, other in enumerate(leaves)]
                pieces = [[_taken(leaf, start, stop, count) for leaf in whole] for start, stop in division]
                try:
                    self._compare(whole, pieces, division)
                except DividedLossError:
                    raise
                except Exception:  # no number that may be changed: an index, for one
                    continue

    def _compare_otherwise(self, count: int) -> None:
        """What is alike in the first samples, or passes every threshold, hides that samples are compared: other numbers, other weights."""
        (leaves,), division = self._collated([(0, count)]), _division(count, None)
        for least, most in _OTHERWISE:
            whole = [_scaled_rows(leaf, count, least, most) for leaf in leaves]
            pieces = [[_taken(leaf, start, stop, count) for leaf in whole] for start, stop in division]
            try:
                with _scaled(self._runs.parameters, least, most):
                    self._compare(whole, pieces, division)
            except (DividedLossError, _RandomLossError):
                raise
            except Exception:  # numbers that the model does not take
                continue

    def _compare(self, whole: list[Any], pieces: list[list[Any]], division: Sequence[tuple[int, int]]) -> str:
        count, sizes = division[-1][1], [stop - start for start, stop in division]
        total, weight, gradient = _total(self._runs.whole(whole), *self._weight.of(whole, count, count))
        weighed = [self._weight.of(leaves, size, count) for leaves, size in zip(pieces, sizes, strict=True)]
        parts = [_total(found, *by) for found, by in zip(self._runs.pieces(pieces, count), weighed, strict=True)]
        weights = sum(part[1] for part in parts)
        if min(weight, weights) <= _NOTHING:
            return _NOTHING_COUNTS
        expected, together = total / weight, sum(part[0] for part in parts) / weights
        gradient, summed = gradient / weight, torch.stack([part[2] for part in parts]).sum(0) / weights
        tolerance = _TOLERANCES[self._job.precision]
        same = abs(together - expected) <= tolerance * max(1.0, abs(expected))
        apart = float((summed - gradient).norm() / gradient.norm().clamp(min=1e-6))
        if math.isfinite(expected) and not (same and not apart > 20 * tolerance):
            raise self._different(expected, together, apart, sizes)
        return ""

    def _different(self, expected: float, together: float, apart: float, sizes: Sequence[int]) -> DividedLossError:
        divided = ", ".join(str(size) for size in sizes[:3]) + (", …" if len(sizes) > 3 else "")
        figures = f"{expected:.6g} for {sum(sizes)} samples at once, {together:.6g} for {divided} of them put together"
        node = self._form.node or (None if self._program is None else loss_of(self._program))
        operator = f"`{call_of(node)[0]}`" if isinstance(node, fx.Node) and node.op == "call_function" else "the loss"
        place = place_of(node)
        return DividedLossError(
            f"job {self._job.name!r}: the loss of a batch is not that of its pieces: {figures} (gradients are {apart:.2g} apart), so every "
            f"plan that divides the batch would train differently. It comes from {operator}{f' at {place}' if place else ''}. "
            + _advice(node)
        )


def _advice(node: object) -> str:
    trace = (node.meta.get("stack_trace") or "") if isinstance(node, fx.Node) else ""
    alone = "or train with --alone and without micro_batch_size"
    if "load_balancing" in trace or "router" in trace or "aux_loss" in trace:
        return (
            "It balances experts over all tokens of a batch: a product of two means, which no pieces have. Leave it out of the loss "
            f"(output_router_logits=False, or router_aux_loss_coef=0), {alone}"
        )
    return (
        "Return (total, weight) from the loss, each a sum over the samples, leave out what compares samples with one another (a "
        f"contrastive loss), pad to one length in `collate_fn` where padding counts, {alone}"
    )


def _division(count: int, size: int | None) -> list[tuple[int, int]]:
    """Micro-batches of a size, or unequal parts."""
    bounds = [*range(0, count, size), count] if size and size < count else sorted({0, 1, 1 + (count - 1) // 3, count})
    return list(pairwise(bounds))


def _total(found: _Found, factor: float, weight: float) -> tuple[float, float, Tensor]:
    """A total, its weight and the total's gradient; where nothing counts there is no number, and nothing to add."""
    if found.weight is not None:
        return found.value, found.weight, found.gradient
    return (found.value * factor, weight, found.gradient * factor) if factor else (0.0, 0.0, torch.zeros_like(found.gradient))


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape[1:]) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


@contextmanager
def _nothing_zero(parameters: Sequence[Tensor]) -> Iterator[None]:
    """What a model begins with at zero hides what it multiplies (a gate, a last layer): inside, such weights are small random numbers."""
    zero = [p for p in parameters if p.is_floating_point() and p.numel() and float(p.detach().abs().max()) <= _ZERO]
    kept = [p.detach().clone() for p in zero]
    with torch.no_grad():
        for p in zero:
            generator = torch.Generator().manual_seed(p.numel())  # by its size, so that copies of a parameter stay equal
            p += (torch.randn(p.shape, generator=generator) * (0.5 / math.sqrt(max(1, p[:1].numel()) if p.dim() > 1 else 1))).to(p)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(zero, kept, strict=True):
                p.copy_(before)


def _scaled_rows(leaf: Any, count: int, least: float, most: float) -> Any:
    """Numbers of a batch, each sample's by a factor of its own."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0 or leaf.shape[0] != count:
        return leaf
    factors = torch.linspace(least, most, count).reshape(-1, *[1] * (leaf.dim() - 1))
    return leaf * factors.to(leaf)


@contextmanager
def _scaled(parameters: Sequence[Tensor], least: float, most: float) -> Iterator[None]:
    """Other weights of a like size, inside; copies of a parameter stay equal."""
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p *= least + (most - least) * torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(parameters, kept, strict=True):
                p.copy_(before)


def _taken(leaf: Any, start: int, stop: int, count: int) -> Any:
    """Some samples' part, as a copy: a forward may change its inputs in place."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf[start:stop].clone() if leaf.dim() and leaf.shape[0] == count else leaf.clone()


def _fewer_that_count(leaf: Any, count: int) -> Iterator[Tensor]:
    """Labels, or a mask, of which another number counts in every sample."""
    if not isinstance(leaf, Tensor) or leaf.is_complex() or leaf.dim() == 0 or leaf.shape[0] != count:
        return
    rows = leaf.reshape(count, -1)
    away = torch.arange(rows.shape[1]) >= rows.shape[1] - torch.arange(count)[:, None] * max(1, rows.shape[1] // (count + 1))
    if leaf.dim() == 1:
        away = torch.arange(count)[:, None] == 1
    if leaf.dtype is not torch.bool and not leaf.is_floating_point():
        yield rows.masked_fill(away, IGNORED).reshape(leaf.shape)
    if bool(((leaf == 0) | (leaf == 1)).all()):
        yield rows.masked_fill(away, 0).reshape(leaf.shape)


def spec_is_parameter(program: ExportedProgram, name: str) -> bool:
    """Whether a node of this name is a parameter of the model."""
    return any(spec.arg.name == name and spec.kind is InputKind.PARAMETER for spec in program.graph_signature.input_specs)


def given_values(program: ExportedProgram, model: nn.Module) -> dict[str, Tensor]:
    """What the program reads beside a batch, by the names of its nodes: the model's parameters and buffers, and constants."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = {}
    for spec in program.graph_signature.input_specs:
        target = str(spec.target)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            values[spec.arg.name] = named[target.removeprefix("model.")].detach()
        elif spec.kind is not InputKind.USER_INPUT:
            values[spec.arg.name] = cast(Tensor, program.constants[target])
    return values


class _Calm(fx.Interpreter):
    """Runs a program, or what it was before it was rewritten, with real values and without dropout."""

    def __init__(self, program: ExportedProgram, module: fx.GraphModule, model: nn.Module) -> None:
        super().__init__(module)
        self._values: dict[str, Any] = {}
        for name, value in given_values(program, model).items():
            trained = value.is_floating_point() and spec_is_parameter(program, name)
            self._values[name] = value.clone().requires_grad_() if trained else value
        self.parameters = [value for value in self._values.values() if value.requires_grad]
        self._buffers = {name: value for name, value in self._values.items() if not value.requires_grad}
        buffers = [spec.kind is OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs].index(True)
        results = next(node for node in module.graph.nodes if node.op == "output").args[0]
        self._places = range(buffers, len(results))  # what is written to buffers comes first
        nodes = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER}
        mutations = [(place, spec) for place, spec in enumerate(program.graph_signature.output_specs[:buffers])]
        self._assigned = {nodes[str(spec.target)]: place for place, spec in mutations if str(spec.target) in nodes}
        self.begin()
        self.names = [node.name for node in module.graph.nodes if node.op == "placeholder" and node.name not in self._values]
        drawn = (call_of(node)[0] for node in module.graph.nodes if not is_initialisation(node))
        self.draws = next((name for name in drawn if name in _DRAWS), "")

    def begin(self) -> None:
        """Buffers are as the model has them; what the program changes is a copy."""
        self._changed = {name: value.clone() for name, value in self._buffers.items()}

    def loss(self, leaves: list[Any]) -> _Found:
        """The loss, or the total and its weight, with the gradient."""
        given = self._values | self._changed | dict(zip(self.names, leaves, strict=True))
        results = self.run(*[given[node.name] for node in self.graph.nodes if node.op == "placeholder"])
        found = tuple(results[place] for place in self._places)
        self._changed |= {name: results[place].detach() for name, place in self._assigned.items()}
        value, weight = read_loss(found if len(found) > 1 else found[0])
        return _Found(float(value.detach()), None if weight is None else float(weight), _gradient(value, self.parameters))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Dropout does nothing; batch normalisation does not look at the batch."""
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.rpartition("::")[2].rstrip("_")
            names = [argument.name for argument in target._schema.arguments]
            if name in ("dropout", "alpha_dropout", "feature_dropout", "native_dropout"):
                return args[0] if name != "native_dropout" else (args[0], torch.ones_like(args[0], dtype=torch.bool))
            if name == "spec_augment_mask":
                return torch.zeros(args[names.index("batch_size")], args[names.index("length")], dtype=torch.bool)
            if "dropout_p" in names and len(args) > names.index("dropout_p"):
                args = (*args[: names.index("dropout_p")], 0.0, *args[names.index("dropout_p") + 1 :])
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
            if name == "batch_norm":
                args = tuple(False if names[place] == "training" else value for place, value in enumerate(args))
        return super().call_function(target, args, kwargs)
