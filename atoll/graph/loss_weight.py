"""Programs for pieces of a batch, whose losses add up to the loss of the whole.

`model(**batch).loss` is seldom a mean over samples: cross entropy divides by the labels that count, a masked mean by its mask, a sum by
nothing. `loss_terms.py` reads the program's loss as a sum of terms Σ total ÷ weight, and the program is rewritten so that every mode adds
up its pieces by what they are (docs/decisions/0018-loss-weights.md):

- one weight that the batch's values count: the program returns `(total, weight)`, and the gradient is divided once the batch is summed;
- sums, and several weights: it returns what is a mean over samples, since each term is divided by its weight in the *whole* batch. Those
  weights depend on the batch alone, so that they are known before the step: whoever loads the data computes them (`BatchWeights`), and the
  program takes them as one more input;
- evaluations have no gradient: the program returns each term's total and weight.

What cannot be read is left as it is: `loss_check.py` compares a batch with its pieces and refuses what does not add up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from atoll.graph.loss_terms import BY_LABEL, CountedWeight, Factors, LossTerm, TermReader, UnknownLossError, call_of, is_one_number, loss_of
from atoll.graph.regions import is_random

__all__ = ["BatchWeights", "LossForm", "weigh_loss"]

aten = torch.ops.aten
_SUM = 2  # PyTorch's number for `reduction="sum"`
_LEAF = "weights_of_the_batch"
_NOTHING = 1e-12  # what a piece weighs in which nothing counts, so that zero can be divided by it


@dataclass(frozen=True)
class BatchWeights:
    """What the terms of a loss are divided by, computed from the batch's leaves. The sums over a batch's pieces are the batch's."""

    leaf: str  # the program's input that takes them
    inputs: tuple[str, ...]  # the leaves they are computed from; empty where all terms are sums, whose weight is 1
    module: fx.GraphModule
    floors: tuple[float, ...]  # the least that each may be

    @torch.no_grad()
    def of(self, leaves: Mapping[str, Any]) -> Tensor:
        """The weights of a piece of a batch."""
        found = self.module(*[leaves[name].cpu() if isinstance(leaves[name], Tensor) else leaves[name] for name in self.inputs])
        return torch.tensor([float(value) for value in found], dtype=torch.float64)

    def per_sample(self, whole: Iterable[Tensor], samples: int) -> Tensor:
        """What the program takes of a batch of so many samples: the sums of its pieces' weights, by its samples. Sums have the last."""
        total = sum(whole, torch.zeros(len(self.floors), dtype=torch.float64))
        least = torch.maximum(total, torch.tensor(self.floors, dtype=torch.float64))
        return (torch.cat([least, torch.ones(1, dtype=torch.float64)]) / samples).float()


@dataclass(frozen=True)
class LossForm:
    """What a captured loss was found to be.

    "mean": over samples; "counted": a mean over what the batch's labels or mask count, so the program returns `(total, weight)`; "terms": a
    sum, or several terms, made a mean over samples with the weights of the whole batch (`weights`; None in evaluations); "given": the
    user's own `(total, weight)`; "unknown": none of these, as far as can be told, and `node` is where.
    """

    kind: Literal["mean", "counted", "terms", "given", "unknown"] = "mean"
    weights: BatchWeights | None = None
    counts: BatchWeights | None = None  # of "counted", where it can be told from the batch alone: what the weight is
    node: fx.Node | None = None
    terms: int = 1  # how many totals and weights an evaluation's program returns


def weigh_loss(program: ExportedProgram, *, samples: int, batch_size: int | None = None, scaled: bool = False) -> LossForm:
    """Let the program's result be one that adds up over the pieces of a batch; says what its loss is.

    `samples` is how many the captured batch has. Where the loss has several terms, training's program still returns one number; that of an
    evaluation, which has a `batch_size` (what sums are summed over), returns their totals and their weights. A loss that is `scaled`, in
    fp16, is divided before the backward too: the gradients of totals are so much larger that they overflow.
    """
    if program.call_spec.out_spec.num_leaves != 1 or not is_one_number(loss_of(program)):
        return LossForm("given")
    reader = TermReader(program, samples)
    try:
        terms = reader.terms(reader.loss)
    except UnknownLossError as error:
        return LossForm("unknown", node=error.node)
    if all(term.weight == "samples" for term in terms):
        return LossForm()
    if not reader.knows_samples:  # captured at one size, which may be among its constants, or not known to be that of the samples
        return LossForm("unknown", node=reader.loss)
    counted = {term.weight.key: term.weight for term in terms if isinstance(term.weight, CountedWeight)}
    writer = _Writer(program, reader)
    same = len(counted) == 1 and all(isinstance(term.weight, CountedWeight) for term in terms)
    if batch_size is not None and not same:
        writer.write_terms(terms, batch_size)
        return LossForm("terms", terms=len(terms))
    if scaled or not same:
        try:
            return LossForm("terms", writer.write_mean(terms, list(counted.values())))
        except UnknownLossError as error:
            if not same:
                return LossForm("unknown", node=error.node)
    return LossForm("counted", counts=writer.write_total(terms, next(iter(counted.values()))))


class _Writer:
    """Rewrites the program's result."""

    def __init__(self, program: ExportedProgram, reader: TermReader) -> None:
        self._program, self._graph, self._loss = program, program.graph, reader.loss
        self._reader = reader
        self._output = next(node for node in self._graph.nodes if node.op == "output")

    def write_total(self, terms: Sequence[LossTerm], weight: CountedWeight) -> BatchWeights | None:
        """Sums instead of means, so that a piece in which nothing counts adds zero."""
        with self._graph.inserting_before(self._output):
            total = self._sum([self._times(self._undivided(term), term.factors) for term in terms])
            counted = self._count(weight)
        self._return([total, counted], (0, 0))
        try:
            return self._extracted([counted], [weight])
        except UnknownLossError:  # class weights that are a buffer of the model, for one
            return None

    def write_mean(self, terms: Sequence[LossTerm], counted: Sequence[CountedWeight]) -> BatchWeights:
        """A mean over the piece's samples, which by their share of the batch is what the piece adds to the batch's loss."""
        with self._graph.inserting_before(self._output):
            counts = [self._count(weight) for weight in counted]
        try:
            weights = self._extracted(counts, counted)
        except UnknownLossError:
            self._drop(counts)
            raise
        leaf = self._input(weights.leaf, len(counted) + 1)
        places: dict[object, int] = {weight.key: place for place, weight in enumerate(counted)}
        size = self._reader.make_size()
        with self._graph.inserting_before(self._output):
            loss = self._sum([self._mean(term, leaf, places, size) for term in terms])
        self._return([loss], 0)
        self._drop(counts)
        return weights

    def _mean(self, term: LossTerm, leaf: fx.Node, places: Mapping[object, int], size: fx.Node) -> fx.Node:
        if term.weight == "samples":
            return self._times(term.total, term.factors)
        total = self._times(self._undivided(term), term.factors)
        place = places[term.weight.key] if isinstance(term.weight, CountedWeight) else len(places)
        weight = self._call(aten.select.int, leaf, 0, place)
        return self._call(aten.div.Tensor, total, self._call(aten.mul.Tensor, weight, size))

    def write_terms(self, terms: Sequence[LossTerm], batch_size: int) -> None:
        """Every term's total in a row, and every weight: an evaluation divides their sums over its data. A sum is that of a batch."""
        size = self._reader.make_size()
        with self._graph.inserting_before(self._output):
            totals, weights = [], []
            for term in terms:
                total = self._times(self._undivided(term), term.factors)
                if not isinstance(term.weight, CountedWeight):
                    total = self._call(aten.mul.Tensor, total, size if term.weight == "samples" else float(batch_size))
                totals.append(self._call(aten.reshape.default, self._call(aten.to.dtype, total, torch.float32), []))
                samples = self._call(aten.mul.Tensor, self._call(aten.ones_like.default, totals[0]), size)
                weight = self._count(term.weight) if isinstance(term.weight, CountedWeight) else samples
                weights.append(self._call(aten.reshape.default, self._call(aten.to.dtype, weight, torch.float32), []))
            results = [self._call(aten.stack.default, totals), self._call(aten.stack.default, weights)]
        self._return(results, (0, 0))

    def _times(self, one: fx.Node, factors: Factors) -> fx.Node:
        for how, by in factors:
            one = self._call(getattr(aten, how).Tensor, one, by)
        return one

    def _sum(self, values: Sequence[fx.Node]) -> fx.Node:
        total = values[0]
        for value in values[1:]:
            total = self._call(aten.add.Tensor, total, value)
        return total

    def _undivided(self, term: LossTerm) -> fx.Node:
        name, arguments = call_of(term.total)
        if name not in BY_LABEL or not isinstance(term.weight, CountedWeight):
            return term.total
        target: Any = term.total.target
        positions = [argument.name for argument in target._schema.arguments]
        return self._call(target, *[_SUM if name == "reduction" else arguments[name] for name in positions])

    def _count(self, weight: CountedWeight) -> fx.Node:
        if weight.labels is None:
            counted = self._call(aten.to.dtype, weight.node, torch.float32)  # with a floor, nothing that counts is a loss of zero
            return self._call(aten.clamp_min.default, counted, _NOTHING) if weight.floor else counted
        classes, ignored = weight.labels
        counts = self._call(aten.ne.Scalar, weight.node, ignored)
        if classes is None:
            return self._call(aten.to.dtype, self._call(aten.sum.default, counts), torch.float32)
        known = self._call(aten.mul.Tensor, weight.node, counts)  # an ignored label is no class
        weights = self._call(aten.take.default, classes, known)
        return self._call(aten.sum.default, self._call(aten.mul.Tensor, weights, counts))

    def _extracted(self, counts: Sequence[fx.Node], counted: Sequence[CountedWeight]) -> BatchWeights:
        """What computes the weights, as a program of its own; it may read the batch and constants, nothing that training changes."""
        needed, wanted = set[fx.Node](), list(counts)
        while wanted:
            node = wanted.pop()
            if node not in needed:
                needed.add(node)
                wanted += node.all_input_nodes
        kinds = {spec.arg.name: spec for spec in self._program.graph_signature.input_specs}
        graph, copies, inputs, root = fx.Graph(), dict[fx.Node, fx.Node](), list[str](), torch.nn.Module()
        for node in [node for node in self._graph.nodes if node in needed]:
            if _may_change(node):
                raise _unknown(node)
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                continue
            spec = kinds.get(node.name)
            constant = self._program.constants.get(str(spec.target)) if spec is not None else None
            if spec is not None and spec.kind is InputKind.USER_INPUT:
                copies[node] = graph.placeholder(node.name)
                inputs.append(node.name)
            elif isinstance(constant, Tensor) and not isinstance(constant, torch._subclasses.FakeTensor):
                root.register_buffer(node.name, constant.detach(), persistent=False)
                copies[node] = graph.get_attr(node.name)
            else:
                raise _unknown(node)
        graph.output(tuple(copies[node] for node in counts))
        return BatchWeights(_LEAF, tuple(inputs), fx.GraphModule(root, graph), tuple(weight.floor for weight in counted))

    def _input(self, name: str, count: int) -> fx.Node:
        """One more input of the program, after all others."""
        places = [node for node in self._graph.nodes if node.op == "placeholder"]
        with self._graph.inserting_after(places[-1]):
            node = self._graph.placeholder(name)
        with self._loss.meta["val"].fake_mode:
            node.meta["val"] = torch.empty(count)
        self._program.graph_signature.input_specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None))
        return cast(fx.Node, node)

    def _call(self, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        """A new operator of the loss, with the value it has on the captured batch."""
        node = cast(fx.Node, self._graph.call_function(target, arguments, keywords))
        values = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], (arguments, keywords))
        with self._loss.meta["val"].fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        for key in ("nn_module_stack", "stack_trace", "custom"):
            if key in self._loss.meta:
                node.meta[key] = self._loss.meta[key]
        return node

    def _return(self, values: Sequence[fx.Node], structure: Any) -> None:
        """Write these where the loss was returned; operators nobody needs any more go."""
        specs, results = list(self._program.graph_signature.output_specs), list(cast(Any, self._output.args[0]))
        place = next(index for index, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT)
        specs[place : place + 1] = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in values]
        results[place : place + 1] = values
        self._output.args = (tuple(results),)
        self._output.meta.pop("val", None)
        self._program.graph_signature.output_specs = specs
        signature = self._program.module_call_graph[0].signature
        assert signature is not None
        signature.out_spec = pytree.tree_structure(structure)
        signature.outputs = [TensorArgument(node.name) for node in values]
        self._drop([self._loss])

    def _drop(self, nodes: Iterable[fx.Node]) -> None:
        """Erase these and what only they needed."""
        dead = list(nodes)
        while dead:
            node = dead.pop()
            if node.op == "call_function" and not node.users and not node._erased:
                dead += node.all_input_nodes
                self._graph.erase_node(node)
        self._program.graph_module.recompile()


def _unknown(node: fx.Node) -> UnknownLossError:
    error = UnknownLossError()
    error.node = node
    return error


def _may_change(node: fx.Node) -> bool:
    """Whether the value is drawn, or somebody writes to its memory: then it is not a function of what it is computed from."""
    plain = isinstance(node.target, torch._ops.OpOverload) or getattr(node.target, "__module__", "") == "_operator"
    if node.op == "call_function" and (is_random(node) or not plain):
        return True
    wanted, seen = [node], set[fx.Node]()
    while wanted:
        value = wanted.pop()
        for user in value.users:
            schema = getattr(user.target, "_schema", None)
            if schema is None or user in seen:
                continue
            seen.add(user)
            if schema.is_mutable and user.args and user.args[0] is value:
                return True
            if any(result.alias_info is not None for result in schema.returns) and user.args and user.args[0] is value:
                wanted.append(user)
    return False
