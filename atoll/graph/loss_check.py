"""Whether the losses of a batch's pieces add up to the loss of the whole: the captured program is run on both, with real weights.

A loss that compares samples with one another (contrastive losses, a balance of experts over the batch) does not add up however it is
divided, and would train differently under every plan, without a word. Dropout is left out, and batch normalisation takes the statistics it
has gathered, which are known to differ between pieces (docs/job.md).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from atoll.errors import DividedLossError
from atoll.graph.loss_weight import IGNORED, call_of, given_values, loss_of, spec_is_parameter
from atoll.job import read_loss
from atoll.randomness import generator_states

__all__ = ["check_collated", "check_eagerly", "check_pieces"]


class CheckedJob(Protocol):
    """What is asked of a job."""

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def loss(self) -> Callable[[nn.Module, Any], Any]: ...


Growing: TypeAlias = dict[str, tuple[int, ...]]  # a tensor of the batch → its dimensions that grow with the samples
_UNCHECKED = "whether the losses of a batch's pieces add up was not checked"
_TOLERANCES = {"fp32": 5e-5, "fp16": 3e-3, "bf16": 2e-2}  # of the loss: products are as exact as that
_DRAWS = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "bernoulli", "multinomial", "normal", "uniform", "randperm"})


def check_pieces(job: CheckedJob, program: ExportedProgram, before: fx.GraphModule, model: nn.Module, batch: Any, growing: Growing) -> str:
    """DividedLossError where a batch's loss or gradient is not that of its pieces; else "", or why this could not be found out.

    `before` is the program as the user's code has it, for the whole batch.
    """
    whole, pieces = _Calm(program, before, model), _Calm(program, program.graph_module, model)
    if pieces.draws:
        return f"{_UNCHECKED}: the model draws random numbers ({pieces.draws})"
    return _compare(job, whole.loss, pieces.loss, batch, growing, _operator_of(program))


def check_eagerly(job: CheckedJob, model: nn.Module, batch: Any, growing: Growing) -> str:
    """The same by the user's own code, for programs that run at one size or draw numbers; the model is as in an evaluation."""
    tree = pytree.tree_structure(batch)
    parameters = [parameter for parameter in model.eval().parameters() if parameter.requires_grad]

    def found(leaves: list[Any]) -> "_Found":
        value, weight = read_loss(job.loss(model, pytree.tree_unflatten(leaves, tree)))
        return _Found(float(value.detach()), None if weight is None else float(weight), _gradient(value, parameters))

    return _compare(job, found, found, batch, growing, "the loss itself")


def check_collated(job: CheckedJob, model: nn.Module, whole: tuple[Any, int], pieces: Sequence[tuple[Any, int]]) -> str:
    """The same for a job that could not be captured: each piece is a batch of its own, collated by itself, with its number of samples."""
    parameters = [parameter for parameter in model.eval().parameters() if parameter.requires_grad]

    def found(batch: Any, samples: int) -> _Summed:
        value, weight = read_loss(job.loss(model, batch))
        return _summed(_Found(float(value.detach()), None if weight is None else float(weight), _gradient(value, parameters)), samples)

    try:
        before = generator_states()
        at_once = found(*whole)
        if generator_states() != before:
            return f"{_UNCHECKED}: the loss draws random numbers"
        divided = [found(*piece) for piece in pieces]
    except Exception as error:
        return _not_run(error)
    return _judge(job, whole[1], at_once, divided, "the loss itself")


class _Found(NamedTuple):
    """The loss, or a total with its weight, and the gradient of all parameters in a row."""

    value: float
    weight: float | None
    gradient: Tensor


_Summed: TypeAlias = tuple[float, float, Tensor]  # a total, its weight and the total's gradient


def _summed(found: _Found, samples: int) -> _Summed:
    if found.weight is not None:
        return found.value, found.weight, found.gradient
    return found.value * samples, float(samples), found.gradient * samples


def _gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    rows = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([row.flatten().double() for row in rows])


_Run: TypeAlias = Callable[[list[Any]], _Found]


def _compare(job: CheckedJob, whole: _Run, piece: _Run, batch: Any, growing: Growing, operator: str) -> str:
    """A batch at once against its first sample and the others."""
    leaves = pytree.tree_flatten_with_path(batch)[0]
    divided = [isinstance(leaf, Tensor) and 0 in growing.get(pytree.keystr(path), ()) for path, leaf in leaves]
    sizes = {leaf.shape[0] for (_, leaf), grows in zip(leaves, divided, strict=True) if grows}
    if len(sizes) != 1 or min(sizes) < 2:
        return f"{_UNCHECKED}: it is not known which dimension is that of the samples"
    (count,) = sizes

    def of(run: _Run, start: int, stop: int) -> _Summed:
        found = run([leaf[start:stop] if grows else leaf for (_, leaf), grows in zip(leaves, divided, strict=True)])
        return _summed(found, stop - start)

    try:
        at_once = of(whole, 0, count)
        pieces = [of(piece, 0, 1), of(piece, 1, count)]
    except Exception as error:
        if IGNORED in str(error):
            raise DividedLossError(f"job {job.name!r}: {IGNORED}") from error
        return _not_run(error)
    return _judge(job, count, at_once, pieces, operator)


def _not_run(error: Exception) -> str:
    return f"{_UNCHECKED}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _judge(job: CheckedJob, count: int, at_once: _Summed, pieces: Sequence[_Summed], operator: str) -> str:
    """DividedLossError where the sums of pieces are not those of all their samples at once."""
    total, weight, gradient = at_once
    weights = sum(one[1] for one in pieces)
    if not weight or not weights:
        return f"{_UNCHECKED}: nothing of the first samples counts"
    expected, together = total / weight, sum(one[0] for one in pieces) / weights
    gradients = gradient / weight, (pieces[0][2] + pieces[1][2]) / weights
    tolerance = _TOLERANCES[job.precision]
    same = abs(together - expected) <= tolerance * max(1.0, abs(expected))
    apart = float((gradients[1] - gradients[0]).norm() / gradients[0].norm().clamp(min=1e-6))
    if math.isfinite(expected) and not (same and not apart > 20 * tolerance):
        figures = f"{expected:.6g} for {count} samples at once, {together:.6g} for 1 and {count - 1} of them put together"
        raise DividedLossError(
            f"job {job.name!r}: the loss of a batch is not that of its pieces: {figures} (gradients are {apart:.2g} apart), "
            f"so every plan that divides the batch would train differently. It ends in {operator}. Return (total, weight) from the loss, "
            "each a sum over the samples, leave out what compares samples with one another (a contrastive loss, an auxiliary loss of "
            "experts), or train with --alone and without micro_batch_size"
        )
    return ""


def _operator_of(program: ExportedProgram) -> str:
    loss = cast(fx.Node, loss_of(program))
    trace = [line.strip() for line in (loss.meta.get("stack_trace") or "").splitlines() if line.strip()]
    trace = trace if trace and "self._loss(self.model, batch)" not in trace[-1] else []  # our own line, which calls the user's loss
    return f"`{call_of(loss)[0]}`" + (f" ({trace[-1]})" if trace else "")


class _Calm(fx.Interpreter):
    """Runs a program, or what it was before it was rewritten, with real values and without dropout."""

    def __init__(self, program: ExportedProgram, module: fx.GraphModule, model: nn.Module) -> None:
        super().__init__(module)
        self._values: dict[str, Any] = {}
        for name, value in given_values(program, model).items():
            trained = value.is_floating_point() and spec_is_parameter(program, name)
            self._values[name] = value.clone().requires_grad_() if trained else value
        self._parameters = [value for value in self._values.values() if value.requires_grad]
        buffers = [spec.kind is OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs].index(True)
        results = next(node for node in module.graph.nodes if node.op == "output").args[0]
        self._places = range(buffers, len(results))  # what is written to buffers comes first
        self.draws = next((call_of(node)[0] for node in module.graph.nodes if call_of(node)[0] in _DRAWS), "")

    def loss(self, leaves: list[Any]) -> _Found:
        """The loss, or the total and its weight, with the gradient."""
        names = [node.name for node in self.graph.nodes if node.op == "placeholder" and node.name not in self._values]
        given = self._values | dict(zip(names, leaves, strict=True))
        results = self.run(*[given[node.name] for node in self.graph.nodes if node.op == "placeholder"])
        value, *weight = [results[place] for place in self._places]
        return _Found(float(value.detach()), float(weight[0]) if weight else None, _gradient(value, self._parameters))

    def run_node(self, node: fx.Node) -> Any:
        """Buffers that a forward changes are changed in a copy."""
        value = super().run_node(node)
        return value.clone() if node.op == "placeholder" and isinstance(value, Tensor) and not value.is_floating_point() else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Dropout does nothing; batch normalisation does not look at the batch."""
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.rpartition("::")[2].rstrip("_")
            names = [argument.name for argument in target._schema.arguments]
            if name in ("dropout", "alpha_dropout", "feature_dropout", "native_dropout"):
                return args[0] if name != "native_dropout" else (args[0], torch.ones_like(args[0], dtype=torch.bool))
            if "dropout_p" in names and len(args) > names.index("dropout_p"):
                args = (*args[: names.index("dropout_p")], 0.0, *args[names.index("dropout_p") + 1 :])
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
            if name == "batch_norm":
                args = tuple(False if names[place] == "training" else value for place, value in enumerate(args))
        return super().call_function(target, args, kwargs)
