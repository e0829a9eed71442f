"""Whether the losses of a batch's pieces add up to the loss of the whole: the captured program is run on both, with real weights.

A loss that compares samples with one another (contrastive losses, a balance of experts over the batch) does not add up however it is
divided, and would train differently under every plan, without a word. Dropout is left out, and batch normalisation takes the statistics it
has gathered, which are known to differ between pieces (docs/job.md).
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from atoll.errors import DividedLossError
from atoll.graph.loss_weight import IGNORED, LossForm, PieceWeight, call_of, given_values, loss_of
from atoll.job import read_loss

__all__ = ["check_eagerly", "check_pieces"]


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


def check_pieces(job: CheckedJob, program: ExportedProgram, model: nn.Module, batch: Any, growing: Growing) -> str:
    """CaptureError where the loss of a batch is not that of its pieces; "" or a sentence that says why this could not be found out."""
    calm = _Calm(program, model)
    if calm.draws:
        return f"{_UNCHECKED}: the model draws random numbers ({calm.draws})"
    return _compare(job, calm.loss, batch, growing, _operator_of(program))


def check_eagerly(job: CheckedJob, program: ExportedProgram, model: nn.Module, batch: Any, growing: Growing, form: LossForm) -> str:
    """The same by the user's own code, for programs that run at one size or draw numbers; the model is as in an evaluation."""
    tree = pytree.tree_structure(batch)
    count = PieceWeight(program, model) if form.kind == "counted" else None
    model.eval()

    @torch.no_grad()
    def found(leaves: list[Any]) -> tuple[float, float | None]:
        piece = pytree.tree_unflatten(leaves, tree)
        value, weight = read_loss(job.loss(model, piece))
        if weight is not None:
            return float(value), float(weight)
        if count is not None:
            return float(value * count(piece)), float(count(piece))
        return float(value), None

    return _compare(job, found, batch, growing, "the loss itself")


def _compare(job: CheckedJob, loss: Callable[[list[Any]], tuple[float, float | None]], batch: Any, growing: Growing, operator: str) -> str:
    """A batch at once against its first sample and the others."""
    leaves = pytree.tree_flatten_with_path(batch)[0]
    divided = [isinstance(leaf, Tensor) and 0 in growing.get(pytree.keystr(path), ()) for path, leaf in leaves]
    sizes = {leaf.shape[0] for (_, leaf), grows in zip(leaves, divided, strict=True) if grows}
    if len(sizes) != 1 or min(sizes) < 2:
        return f"{_UNCHECKED}: it is not known which dimension is that of the samples"
    (count,) = sizes
    totals, weights = [], []
    try:
        for start, stop in ((0, count), (0, 1), (1, count)):
            value, weight = loss([leaf[start:stop] if grows else leaf for (_, leaf), grows in zip(leaves, divided, strict=True)])
            totals.append(value if weight is not None else value * (stop - start))
            weights.append(weight if weight is not None else float(stop - start))
    except Exception as error:
        if IGNORED in str(error):
            raise DividedLossError(f"job {job.name!r}: {IGNORED}") from error
        return f"{_UNCHECKED}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not weights[0] or not sum(weights[1:]):
        return f"{_UNCHECKED}: nothing of the first samples counts"
    whole, together = totals[0] / weights[0], sum(totals[1:]) / sum(weights[1:])
    if math.isfinite(whole) and not abs(together - whole) <= _TOLERANCES[job.precision] * max(1.0, abs(whole)):
        raise DividedLossError(
            f"job {job.name!r}: the loss of a batch is not that of its pieces: {whole:.6g} for {count} samples at once, {together:.6g} for "
            f"1 and {count - 1} of them put together, so every plan that divides the batch would train differently. It ends in {operator}. "
            "Return (total, weight) from the loss, each a sum over the samples, leave out what compares samples with one another (a "
            "contrastive loss, an auxiliary loss of experts), or train with --alone and without micro_batch_size"
        )
    return ""


def _operator_of(program: ExportedProgram) -> str:
    loss = cast(fx.Node, loss_of(program))
    trace = [line.strip() for line in (loss.meta.get("stack_trace") or "").splitlines() if line.strip()]
    trace = trace if trace and "self._loss(self.model, batch)" not in trace[-1] else []  # our own line, which calls the user's loss
    return f"`{call_of(loss)[0]}`" + (f" ({trace[-1]})" if trace else "")


class _Calm(fx.Interpreter):
    """Runs the program with real values, without dropout."""

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        super().__init__(program.graph_module)
        self._values: dict[str, Any] = dict(given_values(program, model))
        kinds = [spec.kind for spec in program.graph_signature.output_specs]
        self._places = [place for place, kind in enumerate(kinds) if kind is OutputKind.USER_OUTPUT]
        self.draws = next((call_of(node)[0] for node in program.graph.nodes if call_of(node)[0] in _DRAWS), "")

    @torch.no_grad()
    def loss(self, leaves: list[Any]) -> tuple[float, float | None]:
        """The loss, or the total and its weight."""
        names = [node.name for node in self.graph.nodes if node.op == "placeholder" and node.name not in self._values]
        given = self._values | dict(zip(names, leaves, strict=True))
        results = self.run(*[given[node.name] for node in self.graph.nodes if node.op == "placeholder"])
        found = [float(results[place]) for place in self._places]
        return found[0], found[1] if len(found) > 1 else None

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
