"""What a loss is a mean over, read off the captured program, so that the losses of a batch's pieces add up to the loss of the whole.

`model(**batch).loss` is seldom a mean over samples: cross entropy divides by the labels that count, a masked mean by its mask. Where the
program tells what it divides by, its result becomes `(total, weight)`, which every mode adds up exactly. A loss that adds means over
different numbers keeps its form and gets an assertion for each: it is a mean over samples as long as no label is ignored. What cannot be
told is left as it is; `atoll.graph.loss_check` compares a batch with its pieces and refuses what does not add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import sympy  # type: ignore[import-untyped]  # PyTorch's sizes are made of it
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

__all__ = ["IGNORED", "LossForm", "call_of", "given_values", "is_one_number", "loss_of", "spec_is_parameter", "weigh_loss"]

aten = torch.ops.aten
Number: TypeAlias = "int | float | fx.Node"

_MEAN, _SUM = 1, 2  # the numbers PyTorch's losses have for `reduction`
_POINTWISE = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
                        "soft_margin_loss", "hinge_embedding_loss", "kl_div", "poisson_nll_loss"})  # fmt: skip
_BY_SAMPLE = frozenset({"ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "margin_ranking_loss",
                        "triplet_margin_loss"})  # fmt: skip
_BY_LABEL = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_VIEWS = frozenset({"contiguous", "view", "reshape", "squeeze", "unsqueeze", "alias", "flatten"})
_SAME = _VIEWS | {"to", "_to_copy", "clone", "type_as"}
IGNORED = (
    "a label is ignored, and the loss adds means over different numbers, so that the losses of a batch's pieces do not add up to the "
    "batch's: return (total, weight) from the loss"
)
_EPSILON = 1e-6  # what is added to a divisor to keep it from being zero is no larger


@dataclass(frozen=True)
class _Counted:
    """A divisor that depends on the batch's values. Two with the same key are the same number."""

    key: object
    node: fx.Node  # labels (of cross entropy), or the divisor itself
    labels: tuple[Any, int] | None = None  # class weights and the label that is ignored; None: `node` is the divisor


@dataclass(frozen=True)
class _Term:
    """`factors · total ÷ weight`. `weight` is "samples" for a mean that counts by its samples, "sum" for what is not divided yet."""

    total: fx.Node  # what is reduced
    weight: "_Counted | str"
    factors: tuple[tuple[str, Number], ...] = ()  # ("mul" or "div", by what)


class _UnknownError(Exception):
    """The loss is not a sum of means and sums over the batch, as far as can be told."""


@dataclass(frozen=True)
class LossForm:
    """What a captured loss was found to be.

    "mean": over samples, or not known; "counted": a mean over something the batch's labels or mask count; "guarded": a mean over samples
    as long as no label is ignored.
    """

    kind: Literal["mean", "counted", "guarded"] = "mean"
    sentence: str = ""


def weigh_loss(program: ExportedProgram) -> LossForm:
    """Let the program return `(total, weight)` where its loss is a mean over something else than samples; says what it is."""
    if program.call_spec.out_spec.num_leaves != 1 or not is_one_number(loss_of(program)):
        return LossForm()
    reader = _Reader(program)
    try:
        terms = list(reader.terms(reader.loss))
    except (_UnknownError, GuardOnDataDependentSymNode):
        return LossForm()
    if reader.samples is None:  # captured at one size, which may be among its constants, or not known to be that of the samples
        return LossForm()
    counted = {term.weight.key: term.weight for term in terms if isinstance(term.weight, _Counted)}
    if not counted:
        return LossForm()
    writer = _Writer(program, reader.loss)
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


class _Reader:
    """Takes a loss apart into terms."""

    def __init__(self, program: ExportedProgram) -> None:
        self.loss = cast(fx.Node, loss_of(program))
        inputs = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
        self._inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
        self._alike: dict[Any, Any] = {}
        self.samples, self._symbol = self._find_samples()
        self._from_batch: set[fx.Node] = set(self._inputs)
        self._trained: set[fx.Node] = {node for node in program.graph.nodes if node.op == "placeholder" and node not in self._from_batch}
        for node in program.graph.nodes:
            for known in (self._from_batch, self._trained):
                if any(value in known for value in node.all_input_nodes):
                    known.add(node)

    def _find_samples(self) -> tuple[tuple[fx.Node, int] | None, Any]:
        """A tensor of the batch and its dimension of samples, and that size as a symbol; None in programs of one size."""
        values = {node: node.meta.get("val") for node in self._inputs if node.users}
        first = {node: value.shape[0] for node, value in values.items() if isinstance(value, Tensor) and value.dim()}
        grow = {node: size for node, size in first.items() if _expression(size).free_symbols}
        if len({cast(Any, size).node.hint for size in grow.values()}) != 1 or len(grow) != len(first):
            return None, None  # not every tensor of the batch has the samples first: which size they are is not known
        node = next(iter(grow))
        self._alike = {_expression(size): _expression(grow[node]) for size in grow.values()}  # sizes that are the samples, by any name
        return (node, 0), _expression(grow[node])

    def terms(self, node: fx.Node, factors: tuple[tuple[str, Number], ...] = ()) -> Iterator[_Term]:
        """The loss as a sum of terms; raises `_UnknownError`."""
        if not isinstance(node, fx.Node) or node.op not in ("call_function", "placeholder"):
            raise _UnknownError
        if node in self._from_batch and (len(node.users) != 1 or _is_in_place(node)):
            raise _UnknownError  # others see or change it on the way
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
        alpha = float(arguments["alpha"] if arguments.get("alpha") is not None else 1) * (-1.0 if name == "sub" else 1.0)
        for operand, factor in ((first, 1.0), (second, alpha)):
            if isinstance(operand, (int, float)):
                if operand:
                    raise _UnknownError
                continue  # sum() begins with 0
            yield from self.terms(operand, factors if factor == 1.0 else (*factors, ("mul", factor)))  # type: ignore[arg-type]

    def _scaled(self, node: fx.Node, name: str, factors: tuple[tuple[str, Number], ...]) -> Iterator[_Term]:
        first, second = node.args[:2]
        if call_of(node)[1].get("rounding_mode") is not None:
            raise _UnknownError
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
            capped = arguments.get("max") is not None
            floor = (
                name in ("clamp", "clamp_min")
                and not capped
                and isinstance(second, (int, float))
                and second <= 1
                and _is_count(node.args[0])
            )
            epsilon = name == "add" and isinstance(second, float) and 0 < second <= _EPSILON and arguments.get("alpha") in (None, 1)
            if not (name in _SAME or floor or epsilon):
                break
            node = node.args[0]  # type: ignore[assignment]
        if not _is_scalar(node) or call_of(node)[0] not in ("sum", "count_nonzero"):
            raise _UnknownError
        return _Counted(_structure(node), node)

    def _weight_of_size(self, node: fx.Node, size: "torch.SymInt | int") -> "_Counted | str":
        if self._symbol is None or _is_multiple(self._size(size), self._symbol):
            return "samples"
        raise _UnknownError

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

    def _size(self, size: Any) -> Any:
        return _expression(size).subs(self._alike)

    def _has_samples(self, node: fx.Node) -> None:
        """Raises `_UnknownError` where nothing of the value's shape grows with the samples: it was reduced before, in some way."""
        if self._symbol is not None and not (self._size(node.meta["val"].numel()).free_symbols & self._symbol.free_symbols):
            raise _UnknownError

    def _weight_of_elements(self, node: fx.Node) -> "_Counted | str":
        self._has_samples(node)
        return self._weight_of_size(node, node.meta["val"].numel())  # a length that differs from piece to piece is not known to add up

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
        ignored = arguments.get("ignore_index", -100)
        if not isinstance(ignored, int):
            raise _UnknownError
        labels = (arguments.get("weight"), ignored)
        return _Counted(("labels", _structure(target), str(labels)), target, labels)


class _Writer:
    """Rewrites the program's result."""

    def __init__(self, program: ExportedProgram, loss: fx.Node) -> None:
        self._program, self._graph, self._loss = program, program.graph, loss
        self._output = next(node for node in self._graph.nodes if node.op == "output")

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
    return isinstance(value, Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def _is_in_place(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


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
