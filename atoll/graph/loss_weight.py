"""What a loss is a mean over, read off the captured program, so that the losses of a batch's pieces add up to the loss of the whole.

`model(**batch).loss` is seldom a mean over samples: cross entropy divides by the labels that count, a masked mean by its mask, a sum by
nothing. Where the program tells what it divides by, its result becomes `(total, weight)`, which every mode adds up exactly. A loss that
adds means over different numbers keeps its form and gets an assertion for each: it is a mean over samples as long as no label is ignored.
What cannot be told is left as it is; `atoll.graph.loss_check` compares a batch with its pieces.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import sympy  # type: ignore[import-untyped]  # PyTorch's sizes are made of it
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

__all__ = ["IGNORED", "LossForm", "PieceWeight", "call_of", "given_values", "is_one_number", "loss_of", "weigh_loss"]

aten = torch.ops.aten
Number: TypeAlias = "int | float | fx.Node"

_MEAN, _SUM = 1, 2  # the numbers PyTorch's losses have for `reduction`
_POINTWISE = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
                        "soft_margin_loss", "hinge_embedding_loss", "kl_div", "poisson_nll_loss"})  # fmt: skip
_BY_SAMPLE = frozenset({"ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "margin_ranking_loss",
                        "triplet_margin_loss"})  # fmt: skip
_BY_LABEL = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_SAME = frozenset({"to", "_to_copy", "clone", "contiguous", "view", "reshape", "squeeze", "unsqueeze", "alias", "type_as", "flatten"})
IGNORED = (
    "a label is ignored, and the loss adds means over different numbers, so that the losses of a batch's pieces do not add up to the "
    "batch's: return (total, weight) from the loss"
)
_EPSILON = 1e-3  # what is added to a divisor to keep it from being zero is smaller


@dataclass(frozen=True)
class _Counted:
    """A divisor that depends on the batch's values. Two with the same key are the same number."""

    key: object
    node: fx.Node  # labels (of cross entropy), or the divisor itself
    labels: tuple[Any, int] | None = None  # class weights and the label that is ignored; None: `node` is the divisor


@dataclass(frozen=True)
class _Term:
    """`factors · total ÷ weight`. `weight` is "samples" for a mean that counts by its samples, "sum" for what is not divided."""

    total: fx.Node  # what is reduced
    weight: "_Counted | str"
    factors: tuple[tuple[str, Number], ...] = ()  # ("mul" or "div", by what)


class _UnknownError(Exception):
    """The loss is not a sum of means and sums over the batch, as far as can be told."""


@dataclass(frozen=True)
class LossForm:
    """What a captured loss was found to be.

    "mean": over samples, or not known; "counted": a mean over something the batch's labels or mask count; "sum"; "mixed": sums and means
    over samples added up; "guarded": a mean over samples as long as no label is ignored.
    """

    kind: Literal["mean", "counted", "sum", "mixed", "guarded"] = "mean"
    sentence: str = ""


def weigh_loss(program: ExportedProgram, batch_size: int) -> LossForm:
    """Let the program return `(total, weight)` where its loss is not a mean over samples; says what it is.

    `batch_size` is that of a step, which a loss that is a sum is taken over.
    """
    if program.call_spec.out_spec.num_leaves != 1 or not is_one_number(loss_of(program)):
        return LossForm()
    reader = _Reader(program)
    try:
        terms = list(reader.terms(reader.loss))
    except _UnknownError:
        return LossForm()
    counted = {term.weight.key: term.weight for term in terms if isinstance(term.weight, _Counted)}
    plain = [term.weight == "samples" for term in terms]
    writer = _Writer(program, reader.loss)
    if not counted:
        if all(plain) or reader.samples is None:  # captured at one size, which may be among its constants
            return LossForm()
        writer.write_sum(terms, reader.samples, batch_size)
        return LossForm("mixed" if any(plain) else "sum")
    if len(counted) == 1 and all(isinstance(term.weight, _Counted) for term in terms):
        writer.write_total(terms, next(iter(counted.values())))
        return LossForm("counted")
    if all(weight.labels is not None for weight in counted.values()) and not any(term.weight == "sum" for term in terms):
        for weight in counted.values():
            writer.assert_all_count(weight)
        return LossForm("guarded", "the loss adds means over different numbers: a run stops where a label is ignored")
    return LossForm()


def loss_of(program: ExportedProgram) -> object:
    """What the program returns as its loss, or as its total: a node, where it is computed."""
    results = cast(Any, next(node for node in program.graph.nodes if node.op == "output").args[0])
    return next(
        value for spec, value in zip(program.graph_signature.output_specs, results, strict=True) if spec.kind is OutputKind.USER_OUTPUT
    )


def is_one_number(value: object) -> bool:
    """Whether a node's value can be a loss; what cannot is refused by whoever reads it."""
    return isinstance(value, fx.Node) and _is_scalar(value) and value.meta["val"].is_floating_point()


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


class PieceWeight:
    """The weight of a batch that the program of a "counted" loss would find, without running the model."""

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        results = next(node for node in program.graph.nodes if node.op == "output").args[0]
        kinds = [spec.kind for spec in program.graph_signature.output_specs]
        self._weight: fx.Node = [value for kind, value in zip(kinds, results, strict=True) if kind is OutputKind.USER_OUTPUT][1]
        self._inputs = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
        self._given = given_values(program, model)

    def __call__(self, batch: Any) -> Tensor:
        """On the device of the batch."""
        leaves = pytree.tree_leaves(batch)
        values: dict[str, Any] = self._given | dict(zip(self._inputs, leaves, strict=True))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))

        def value_of(node: fx.Node) -> Any:
            if node.name not in values:
                arguments, keywords = pytree.tree_map_only(fx.Node, value_of, (node.args, dict(node.kwargs)))
                if "device" in keywords:
                    keywords["device"] = device
                values[node.name] = cast(Any, node.target)(*arguments, **keywords)
            found = values[node.name]
            return found.to(device) if isinstance(found, Tensor) else found

        return cast(Tensor, value_of(self._weight))


class _Reader:
    """Takes a loss apart into terms."""

    def __init__(self, program: ExportedProgram) -> None:
        self.loss = cast(fx.Node, loss_of(program))
        inputs = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
        self._inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
        self.samples, self._symbol = self._find_samples()
        self._from_batch: set[fx.Node] = set(self._inputs)
        self._trained: set[fx.Node] = {node for node in program.graph.nodes if node.op == "placeholder" and node not in self._from_batch}
        for node in program.graph.nodes:
            for known in (self._from_batch, self._trained):
                if any(value in known for value in node.all_input_nodes):
                    known.add(node)

    def _find_samples(self) -> tuple[tuple[fx.Node, int] | None, Any]:
        """A tensor of the batch and its dimension of samples, and that size as a symbol; None in programs of one size."""
        for node in self._inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim() and _expression(value.shape[0]).free_symbols:
                return (node, 0), _expression(value.shape[0])
        return None, None

    def terms(self, node: fx.Node, factors: tuple[tuple[str, Number], ...] = ()) -> Iterator[_Term]:
        """The loss as a sum of terms; raises `_UnknownError`."""
        if not isinstance(node, fx.Node) or node.op not in ("call_function", "placeholder"):
            raise _UnknownError
        if node not in self._from_batch:
            yield _Term(node, "samples", factors)  # a penalty on weights: every piece has it whole, by its share
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
            yield _Term(node, self._weight_of_loss(node, name, arguments), factors)

    def _added(self, node: fx.Node, name: str, arguments: dict[str, Any], factors: tuple[tuple[str, Number], ...]) -> Iterator[_Term]:
        first, second = node.args[:2]
        alpha = float(arguments.get("alpha") or 1) * (-1.0 if name == "sub" else 1.0)
        for operand, factor in ((first, 1.0), (second, alpha)):
            if isinstance(operand, (int, float)):
                if operand:
                    raise _UnknownError
                continue  # sum() begins with 0
            yield from self.terms(operand, factors if factor == 1.0 else (*factors, ("mul", factor)))  # type: ignore[arg-type]

    def _scaled(self, node: fx.Node, name: str, factors: tuple[tuple[str, Number], ...]) -> Iterator[_Term]:
        first, second = node.args[:2]
        if name == "mul" and self._is_constant(first):
            first, second = second, first
        if not isinstance(first, fx.Node):
            raise _UnknownError
        if self._is_constant(second):
            yield from self.terms(first, (*factors, (name, second)))  # type: ignore[arg-type]
            return
        inner = list(self.terms(first, factors))
        if name != "div" or any(term.weight != "sum" for term in inner) or not isinstance(second, fx.Node) or second in self._trained:
            raise _UnknownError
        weight = self._weight_of_divisor(second)
        yield from (replace(term, weight=weight) if weight != "samples" else self._with_samples(term, second) for term in inner)

    def _with_samples(self, term: _Term, divisor: fx.Node) -> _Term:
        return replace(term, weight="samples", factors=(*term.factors, ("div", divisor)))

    def _is_constant(self, value: object) -> bool:
        """A number, or one element that has nothing to do with the batch."""
        if isinstance(value, (int, float)):
            return True
        return isinstance(value, fx.Node) and value not in self._from_batch and _is_scalar(value)

    def _weight_of_divisor(self, node: fx.Node) -> "_Counted | str":
        """What a sum that is divided by this is a mean over."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self._weight_of_size(node, value)
        while True:  # what keeps it from being zero is no part of it
            name, arguments = call_of(node)
            second = node.args[1] if len(node.args) > 1 else arguments.get("min")
            floor = name in ("clamp", "clamp_min", "maximum") and isinstance(second, (int, float)) and second <= 1
            epsilon = name == "add" and isinstance(second, float) and 0 < second < _EPSILON
            if not (name in _SAME or floor or epsilon):
                break
            node = node.args[0]  # type: ignore[assignment]
        if not _is_scalar(node) or call_of(node)[0] not in ("sum", "count_nonzero"):
            raise _UnknownError
        return _Counted(_structure(node), node)

    def _weight_of_size(self, node: fx.Node, size: "torch.SymInt | int") -> "_Counted | str":
        if self._symbol is None or _is_multiple(size, self._symbol):
            return "samples"
        return _Counted(str(_expression(size)), node)

    def _reduced(self, node: fx.Node, name: str, arguments: dict[str, Any], factors: tuple[tuple[str, Number], ...]) -> Iterator[_Term]:
        """A sum or mean of all elements of something that has the batch's samples in it, or of a few losses in a list."""
        inside = node.args[0]
        if not isinstance(inside, fx.Node) or not _is_scalar(node):
            raise _UnknownError
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
            yield _Term(node, "sum", factors)
        else:
            yield _Term(node, self._weight_of_elements(inside), factors)

    def _has_samples(self, node: fx.Node) -> None:
        """Raises `_UnknownError` where nothing of the value's shape grows with the samples: it was reduced before, in some way."""
        if self._symbol is not None and not (_expression(node.meta["val"].numel()).free_symbols & self._symbol.free_symbols):
            raise _UnknownError

    def _weight_of_elements(self, node: fx.Node) -> "_Counted | str":
        self._has_samples(node)
        weight = self._weight_of_size(node, node.meta["val"].numel())
        if isinstance(weight, _Counted):
            raise _UnknownError  # padded to a length that differs from piece to piece: what is padded counts too
        return weight

    def _weight_of_loss(self, node: fx.Node, name: str, arguments: dict[str, Any]) -> "_Counted | str":
        reduction = {"mean": _MEAN, "sum": _SUM}.get(arguments.get("reduction"), arguments.get("reduction"))  # type: ignore[arg-type]
        if name not in _POINTWISE | _BY_SAMPLE | _BY_LABEL or reduction not in (_MEAN, _SUM):
            raise _UnknownError
        inputs = node.args[0]
        if not isinstance(inputs, fx.Node):
            raise _UnknownError
        self._has_samples(inputs)
        if reduction == _SUM:
            return "sum"
        if name in _BY_SAMPLE:
            return "samples"
        if name in _POINTWISE:
            return self._weight_of_elements(inputs)
        target = arguments["target"]
        if target.meta["val"].is_floating_point():  # probabilities of the classes: every position counts
            return self._weight_of_elements(target)
        labels = (arguments.get("weight"), int(arguments.get("ignore_index", -100)))
        return _Counted(("labels", _structure(target), str(labels)), target, labels)


class _Writer:
    """Rewrites the program's result."""

    def __init__(self, program: ExportedProgram, loss: fx.Node) -> None:
        self._program, self._graph, self._loss = program, program.graph, loss
        self._output = next(node for node in self._graph.nodes if node.op == "output")

    def write_sum(self, terms: Sequence[_Term], samples: tuple[fx.Node, int], batch_size: int) -> None:
        """Sums as they are, means by the piece's share of the batch, and that share as the weight: shares of a batch add up to one."""
        with self._graph.inserting_before(self._output):
            share = self._call(operator.truediv, self._call(aten.sym_size.int, *samples), batch_size)
            weight = self._call(aten.scalar_tensor.default, share, dtype=torch.float32)
            shared = [(term.total, term.factors if term.weight == "sum" else (*term.factors, ("mul", weight))) for term in terms]
            total = self._added(shared)
        self._return(total, weight)

    def write_total(self, terms: Sequence[_Term], weight: _Counted) -> None:
        """Sums instead of means, so that a piece in which nothing counts adds zero."""
        with self._graph.inserting_before(self._output):
            total = self._added([(self._undivided(term), term.factors) for term in terms])
            counted = self._count(weight)
        self._return(total, counted)

    def _added(self, terms: Sequence[tuple[fx.Node, tuple[tuple[str, Number], ...]]]) -> fx.Node:
        total: fx.Node | None = None
        for one, factors in terms:
            for how, by in factors:
                one = self._call(getattr(aten, how).Tensor, one, by)
            total = one if total is None else self._call(aten.add.Tensor, total, one)
        assert total is not None
        return total

    def _undivided(self, term: _Term) -> fx.Node:
        name, arguments = call_of(term.total)
        if name not in _BY_LABEL:
            return term.total
        target: Any = term.total.target
        positions = [argument.name for argument in target._schema.arguments]
        return self._call(target, *[_SUM if name == "reduction" else arguments[name] for name in positions])

    def _count(self, weight: _Counted) -> fx.Node:
        if weight.labels is None:
            return self._call(aten.to.dtype, weight.node, torch.float32)
        classes, ignored = weight.labels
        counts = self._call(aten.ne.Scalar, weight.node, ignored)
        if classes is None:
            return self._call(aten.to.dtype, self._call(aten.sum.default, counts), torch.float32)
        known = self._call(aten.mul.Tensor, weight.node, counts)  # an ignored label is no class
        weights = self._call(aten.take.default, classes, known)
        return self._call(aten.sum.default, self._call(aten.mul.Tensor, weights, counts))

    def assert_all_count(self, weight: _Counted) -> None:
        """The program stops where a label is ignored."""
        assert weight.labels is not None
        with self._graph.inserting_before(self._output):
            counts = self._call(aten.ne.Scalar, weight.node, weight.labels[1])
            self._call(aten._assert_async.msg, self._call(aten.all.default, counts), IGNORED)
        self._program.graph_module.recompile()

    def _call(self, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        """A new operator of the loss, with the value it has on the captured batch."""
        node = cast(fx.Node, self._graph.call_function(target, arguments, keywords))
        values = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], (arguments, keywords))
        modes = [value.fake_mode for value in pytree.tree_leaves(values) if isinstance(value, torch._subclasses.FakeTensor)]
        mode = modes[0] if modes else self._loss.meta["val"].fake_mode
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
        for key in ("nn_module_stack", "stack_trace", "custom"):
            if key in self._loss.meta:
                node.meta[key] = self._loss.meta[key]
        return node

    def _return(self, total: fx.Node, weight: fx.Node) -> None:
        """Write `(total, weight)` where the loss was returned; operators nobody needs any more go."""
        specs, results = list(self._program.graph_signature.output_specs), list(cast(Any, self._output.args[0]))
        place = next(index for index, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT)
        specs[place : place + 1] = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in (total, weight)]
        results[place : place + 1] = [total, weight]
        self._output.args = (tuple(results),)
        self._output.meta.pop("val", None)
        self._program.graph_signature.output_specs = specs
        signature = self._program.module_call_graph[0].signature
        assert signature is not None
        signature.out_spec = pytree.tree_structure((0, 0))
        signature.outputs = [TensorArgument(node.name) for node in (total, weight)]
        dead = [self._loss]
        while dead:
            node = dead.pop()
            if node.op == "call_function" and not node.users and node is not total:
                dead += node.all_input_nodes
                self._graph.erase_node(node)
        self._program.graph_module.recompile()


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
    return isinstance(value, torch.Tensor) and math.prod(value.shape) == 1


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _is_multiple(size: Any, symbol: Any) -> bool:
    return not (_expression(size) / symbol).simplify().free_symbols


def _structure(node: Any) -> object:
    """The same for two values that are computed in the same way, whatever views are taken of them."""
    while isinstance(node, fx.Node) and call_of(node)[0] in _SAME:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return str(node)
    if node.op != "call_function":
        return node.name
    return (str(node.target), tuple(_structure(value) for value in (*node.args, *node.kwargs.values())))
