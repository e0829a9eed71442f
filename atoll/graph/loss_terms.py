"""A captured loss as a sum of terms: what each one adds up, and what it is divided by.

A term is a mean over the samples, a sum, or a mean over what the batch's labels or its mask count. Only what is certain is read: where the
loss is anything else, reading stops with the operator at which it is.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import sympy  # type: ignore[import-untyped]  # PyTorch's sizes are made of it
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = [
    "BY_LABEL",
    "CountedWeight",
    "Factors",
    "LossTerm",
    "TermReader",
    "UnknownLossError",
    "call_of",
    "is_one_number",
    "loss_of",
    "place_of",
]

Number: TypeAlias = "int | float | fx.Node"
Factors: TypeAlias = tuple[tuple[str, Number], ...]  # ("mul" or "div", by what)

_MEAN, _SUM = 1, 2  # the numbers PyTorch's losses have for `reduction`
_POINTWISE = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
                        "soft_margin_loss", "hinge_embedding_loss", "kl_div", "poisson_nll_loss"})  # fmt: skip
_BY_SAMPLE = frozenset({"ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "margin_ranking_loss",
                        "triplet_margin_loss"})  # fmt: skip
BY_LABEL = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_VIEWS = frozenset({"contiguous", "view", "reshape", "squeeze", "unsqueeze", "alias", "flatten"})
_SAME = _VIEWS | {"to", "_to_copy", "clone", "type_as"}
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+\n([^\n]*)')
_EPSILON = 1e-6  # what is added to a divisor to keep it from being zero is no larger


@dataclass(frozen=True)
class CountedWeight:
    """A divisor that depends on the batch's values. Two with the same key are the same number."""

    key: object
    node: fx.Node  # labels (of cross entropy), or the divisor itself
    labels: tuple[Any, int] | None = None  # class weights and the label that is ignored; None: `node` is the divisor
    floor: float = 0.0  # the least it may be


@dataclass(frozen=True)
class LossTerm:
    """`factors · total ÷ weight`. `weight` is "samples" for a mean that counts by its samples, "sum" for what is not divided yet."""

    total: fx.Node  # what is reduced
    weight: "CountedWeight | str"
    factors: Factors = ()


class UnknownLossError(Exception):
    """The loss is not a sum of means and sums over the batch, as far as can be told; `node` is where it is something else."""

    def __init__(self) -> None:
        super().__init__()
        self.node: fx.Node | None = None


def loss_of(program: ExportedProgram) -> object:
    """What the program returns as its loss, or as its total: a node, where it is computed."""
    results = cast(Any, next(node for node in program.graph.nodes if node.op == "output").args[0])
    return next(
        value for spec, value in zip(program.graph_signature.output_specs, results, strict=True) if spec.kind is OutputKind.USER_OUTPUT
    )


def is_one_number(value: object) -> bool:
    """Whether a node's value can be a loss; what cannot is refused by whoever reads it."""
    return isinstance(value, fx.Node) and _is_scalar(value) and value.meta["val"].is_floating_point()


class TermReader:
    """Takes a loss apart into terms. `samples` is how many there are in the captured batch."""

    def __init__(self, program: ExportedProgram, samples: int) -> None:
        self._count = samples
        self.loss = cast(fx.Node, loss_of(program))
        inputs = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
        self._inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
        self._placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        self._alike: dict[Any, Any] = {}
        self._symbol = self._find_samples()
        self._from_batch: set[fx.Node] = set(self._inputs)
        self._trained: set[fx.Node] = {node for node in program.graph.nodes if node.op == "placeholder" and node not in self._from_batch}
        for node in program.graph.nodes:
            for known in (self._from_batch, self._trained):
                if any(value in known for value in node.all_input_nodes):
                    known.add(node)

    @property
    def knows_samples(self) -> bool:
        """Whether the number of samples is known in the program."""
        return self._symbol is not None

    def make_size(self) -> fx.Node:
        """The number of samples as a new value, asked of the batch's tensor that is read last: the last stage has it anyway."""
        graph = self.loss.graph
        order = {node: place for place, node in enumerate(graph.nodes)}
        tensors = [node for node in self._inputs if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dim() and node.users]
        latest = max(tensors, key=lambda node: max(order[user] for user in node.users))
        with graph.inserting_after(self._placeholders[-1]):
            made = graph.call_function(torch.ops.aten.sym_size.int, (latest, 0))
        made.meta["val"] = latest.meta["val"].shape[0]
        return made

    def _find_samples(self) -> Any:
        """The number of samples as a symbol; None in programs of one size."""
        values = {node: node.meta.get("val") for node in self._inputs if node.users}
        first = {node: value.shape[0] for node, value in values.items() if isinstance(value, Tensor) and value.dim()}
        grow = {node: size for node, size in first.items() if _expression(size).free_symbols}
        if {cast(Any, size).node.hint for size in grow.values()} != {self._count} or len(grow) != len(first):
            return None  # not every tensor of the batch has the samples first: which size they are is not known
        node = next(iter(grow))
        self._alike = {_expression(size): _expression(grow[node]) for size in grow.values()}  # sizes that are the samples, by any name
        return _expression(grow[node])

    def terms(self, node: fx.Node, factors: Factors = ()) -> list[LossTerm]:
        """The loss as a sum of terms; raises `UnknownLossError`."""
        try:
            return list(self._terms(node, factors))
        except GuardOnDataDependentSymNode as error:
            raise UnknownLossError from error
        except UnknownLossError as error:
            error.node = error.node or node
            raise

    def _terms(self, node: fx.Node, factors: Factors) -> Iterator[LossTerm]:
        if not isinstance(node, fx.Node) or node.op not in ("call_function", "placeholder"):
            raise UnknownLossError
        if node in self._from_batch and (len(node.users) != 1 or (_is_in_place(node) and not _is_fresh(node.args[0]))):
            raise UnknownLossError  # others see or change it on the way
        if node not in self._from_batch:
            yield LossTerm(node, "samples", factors)  # a penalty on weights: every piece has it whole, by its share
            return
        name, arguments = call_of(node)
        if name in _SAME:
            yield from self.terms(node.args[0], factors)  # type: ignore[arg-type]
        elif name in ("add", "sub"):
            yield from self._added(node, name, arguments, factors)
        elif name == "neg":
            yield from self.terms(node.args[0], (*factors, ("mul", -1.0)))  # type: ignore[arg-type]
        elif name in ("mul", "div"):
            yield from self._scaled(node, name, factors)
        elif name in ("sum", "mean"):
            yield from self._reduced(node, name, arguments, factors)
        else:
            yield LossTerm(node, self._weight_of_loss(node, name, arguments), factors)

    def _added(self, node: fx.Node, name: str, arguments: dict[str, Any], factors: Factors) -> Iterator[LossTerm]:
        first, second = node.args[:2]
        alpha = float(arguments["alpha"] if arguments.get("alpha") is not None else 1) * (-1.0 if name == "sub" else 1.0)
        for operand, factor in ((first, 1.0), (second, alpha)):
            if isinstance(operand, (int, float)):
                if operand:
                    raise UnknownLossError
                continue  # sum() begins with 0
            yield from self.terms(operand, factors if factor == 1.0 else (*factors, ("mul", factor)))  # type: ignore[arg-type]

    def _scaled(self, node: fx.Node, name: str, factors: Factors) -> Iterator[LossTerm]:
        first, second = node.args[:2]
        if call_of(node)[1].get("rounding_mode") is not None:
            raise UnknownLossError
        if name == "mul" and self._is_constant(first):
            first, second = second, first
        if not isinstance(first, fx.Node):
            raise UnknownLossError
        if self._is_constant(second):
            yield from self.terms(first, (*factors, (name, second)))  # type: ignore[arg-type]
            return
        inner = list(self.terms(first, factors))
        if name != "div" or any(term.weight != "sum" for term in inner) or not isinstance(second, fx.Node) or second in self._trained:
            raise UnknownLossError
        weight = self._weight_of_divisor(second)
        yield from (replace(term, weight=weight) if weight != "samples" else self._with_samples(term, second) for term in inner)

    def _with_samples(self, term: LossTerm, divisor: fx.Node) -> LossTerm:
        return replace(term, weight="samples", factors=(*term.factors, ("div", divisor)))

    def _is_constant(self, value: object) -> bool:
        """A number, or one element that has nothing to do with the batch."""
        if isinstance(value, (int, float)):
            return True
        return isinstance(value, fx.Node) and value not in self._from_batch and _is_scalar(value)

    def _weight_of_divisor(self, node: fx.Node) -> "CountedWeight | str":
        """What a sum that is divided by this is a mean over."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self._weight_of_size(node, value)
        floor = 0.0
        while True:  # what keeps it from being zero is no part of it
            name, arguments = call_of(node)
            second = node.args[1] if len(node.args) > 1 else arguments.get("min")
            capped = arguments.get("max") is not None
            floored = name in ("clamp", "clamp_min") and not capped and isinstance(second, (int, float))
            if floored and (cast(float, second) > 1 or not _is_count(node.args[0])):
                raise UnknownLossError
            epsilon = name == "add" and isinstance(second, float) and 0 < second <= _EPSILON and arguments.get("alpha") in (None, 1)
            floor = max(floor, float(cast(float, second))) if floored or epsilon else floor
            if not (name in _SAME or floored or epsilon):
                break
            node = node.args[0]  # type: ignore[assignment]
        if not _is_scalar(node) or call_of(node)[0] not in ("sum", "count_nonzero"):
            raise UnknownLossError
        return CountedWeight(_structure(node), node, floor=floor)

    def _weight_of_size(self, node: fx.Node, size: "torch.SymInt | int") -> "CountedWeight | str":
        if self._symbol is None or _is_multiple(self._size(size), self._symbol):
            return "samples"
        raise UnknownLossError

    def _reduced(self, node: fx.Node, name: str, arguments: dict[str, Any], factors: Factors) -> Iterator[LossTerm]:
        """A sum or mean of all elements of something that has the batch's samples in it, or of a few losses in a list."""
        inside = node.args[0]
        if not isinstance(inside, fx.Node) or not _is_scalar(node):
            raise UnknownLossError
        if call_of(inside)[0] in ("stack", "cat"):
            losses = cast(Any, inside.args[0])
            if isinstance(losses, (list, tuple)) and all(isinstance(one, fx.Node) and _is_scalar(one) for one in losses):
                for one in losses:
                    yield from self.terms(one, factors if name == "sum" else (*factors, ("div", len(losses))))
                return
        if _is_scalar(inside):
            yield from self.terms(inside, factors)
            return
        if name == "sum":
            self._has_samples(inside)
            yield LossTerm(node, "sum", factors)
        else:
            yield LossTerm(node, self._weight_of_elements(inside), factors)

    def _size(self, size: Any) -> Any:
        return _expression(size).subs(self._alike)

    def _has_samples(self, node: fx.Node) -> None:
        """Raises `UnknownLossError` where nothing of the value's shape grows with the samples: it was reduced before, in some way."""
        if self._symbol is not None and not (self._size(node.meta["val"].numel()).free_symbols & self._symbol.free_symbols):
            raise UnknownLossError

    def _weight_of_elements(self, node: fx.Node) -> "CountedWeight | str":
        self._has_samples(node)
        return self._weight_of_size(node, node.meta["val"].numel())  # a length that differs from piece to piece is not known to add up

    def _weight_of_loss(self, node: fx.Node, name: str, arguments: dict[str, Any]) -> "CountedWeight | str":
        reduction = {"mean": _MEAN, "sum": _SUM}.get(arguments.get("reduction"), arguments.get("reduction"))  # type: ignore[arg-type]
        if name not in _POINTWISE | _BY_SAMPLE | BY_LABEL or reduction not in (_MEAN, _SUM):
            raise UnknownLossError
        inputs = node.args[0]
        if not isinstance(inputs, fx.Node):
            raise UnknownLossError
        self._has_samples(inputs)
        if reduction == _SUM:
            return "sum"
        if name in _BY_SAMPLE:
            shape = inputs.meta["val"].shape  # CTC's has the samples second, the others' have classes or features last
            sizes = shape[1:2] if name == "ctc_loss" and len(shape) == 3 else shape[: max(1, len(shape) - 1)]
            return self._weight_of_size(node, math.prod(sizes)) if len(shape) > 1 else self._weight_of_elements(inputs)
        if name in _POINTWISE:
            return self._weight_of_elements(inputs)
        target = arguments["target"]
        if target.meta["val"].is_floating_point():  # probabilities of the classes: every position counts
            return self._weight_of_elements(target)
        ignored = arguments.get("ignore_index", -100)
        if not isinstance(ignored, int):
            raise UnknownLossError
        labels = (arguments.get("weight"), ignored)
        return CountedWeight(("labels", _structure(target), str(labels)), target, labels)


def call_of(node: fx.Node) -> tuple[str, dict[str, Any]]:
    """An operator's name, in place or not, and its arguments with their defaults."""
    if node.op != "call_function":
        return "", {}
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", ""), dict(node.kwargs)
    arguments = {argument.name: argument.default_value for argument in target._schema.arguments}
    arguments |= dict(zip(arguments, node.args, strict=False)) | node.kwargs
    name = target._schema.name.rpartition("::")[2]
    return (name.rstrip("_") if not name.startswith("_") else name), arguments


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def _is_in_place(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_fresh(node: Any) -> bool:
    """A value of its own memory that nobody else reads: changing it in place is as good as making another."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if _is_in_place(node):
        return _is_fresh(node.args[0])
    return all(value.alias_info is None for value in node.target._schema.returns) and call_of(node)[0] not in _SAME


def place_of(node: object) -> str:
    """Where the user's own code has an operator: its file and line, and what stands there; "" where that is not known."""
    trace = (node.meta.get("stack_trace") or "") if isinstance(node, fx.Node) else ""
    places = _FRAME.findall(trace)
    places = [place for place in places if "self._loss(self.model, batch)" not in place[2]]  # our own line, which calls the user's loss
    if not places:
        return ""
    file, line, code = places[-1]
    return f"{'/'.join(Path(file).parts[-3:])}:{line}: {code.strip()}"


def _is_count(node: Any) -> bool:
    """A sum of yes and no, or of whole numbers, in whatever type it is."""
    while isinstance(node, fx.Node) and call_of(node)[0] in _SAME:
        node = node.args[0]
    if not isinstance(node, fx.Node) or call_of(node)[0] not in ("sum", "count_nonzero"):
        return False
    inside = node.args[0]
    while isinstance(inside, fx.Node) and inside.meta["val"].is_floating_point() and call_of(inside)[0] in _SAME:
        inside = inside.args[0]
    return isinstance(inside, fx.Node) and not inside.meta["val"].is_floating_point()


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _is_multiple(size: Any, symbol: Any) -> bool:
    return not (size / symbol).simplify().free_symbols


def _structure(node: Any) -> object:
    """The same for two values that are computed in the same way, whatever views are taken of them."""
    while isinstance(node, fx.Node) and call_of(node)[0] in _VIEWS:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return str(node)
    if node.op != "call_function":
        return node.name
    return (str(node.target), tuple(_structure(value) for value in (*node.args, *node.kwargs.values())))
