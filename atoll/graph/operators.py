"""The captured program, operator by operator: every value at concrete sizes, its cost, its memory, whether a gradient flows.

This is the table that everything else about a Graph is computed from.
"""

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from atoll.graph.export import ExportedJob
from atoll.graph.fake import first_line
from atoll.graph.flops import OperatorCost, TensorSpec, measure_operator, why_not_measured
from atoll.graph.graph import Precision
from atoll.graph.regions import cuts_off_gradients, written

__all__ = ["Operator", "OperatorTable", "build_table", "schema_name"]

aten = torch.ops.aten


@dataclass
class Operator:
    """One call in the program. Amounts are of the whole captured batch."""

    node: fx.Node
    calls: tuple[tuple[str, str], ...]  # enclosing modules, outermost first: (path, which call of it)
    cost: OperatorCost
    inputs: tuple[fx.Node, ...]  # its tensor arguments, in order, getitems and views as they are
    outputs: tuple[TensorSpec, ...]
    saved: dict[fx.Node, float] = field(default_factory=dict)  # value → bytes of its memory, counted where it is first kept
    saved_fresh: float = 0.0

    @property
    def module(self) -> str:
        """Path of the innermost module, "" for top-level code."""
        return self.calls[-1][0] if self.calls else ""

    @property
    def saved_bytes(self) -> float:
        """Everything autograd keeps because of this operator and did not keep before."""
        return sum(self.saved.values()) + self.saved_fresh

    @property
    def requires_grad(self) -> bool:
        return any(self.cost.requires_grad)


@dataclass
class OperatorTable:
    """All operators in program order, and the program's inputs by what they are."""

    operators: list[Operator]
    position: dict[fx.Node, int]  # of the call_function nodes
    parameters: dict[fx.Node, str]  # placeholder → the user's name of the parameter
    buffers: dict[fx.Node, str]
    batch: list[fx.Node]  # placeholders of the batch
    specs: dict[fx.Node, Any]  # node → TensorSpec, or a structure of them, or a number
    memory: dict[fx.Node, fx.Node]  # value → the value whose memory it shares (itself when it has its own)
    samples: int
    results: list[fx.Node]  # what the program returns
    notes: list[str]
    module: fx.GraphModule  # whose graph it is; holds the regions


def schema_name(node: fx.Node) -> str:
    """What an operator is called, whichever its overload: "view", "add"; in place, "add_"."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target)))


def _concrete(value: Any, fallback: int) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    unknown = fallback if isinstance(value, torch.SymInt) else 0
    return value.node.hint if value.node.hint is not None else unknown


def _spec(value: Any, fallback: int) -> Any:
    """A traced value with numbers in place of symbols; a size that depends on data is taken as `fallback`."""
    if isinstance(value, torch.Tensor):
        shape = tuple(int(_concrete(size, fallback)) for size in value.shape)
        if value.layout is not torch.strided:
            return TensorSpec(shape, tuple(torch.empty(shape, device="meta").stride()), value.dtype)
        stride = tuple(int(_concrete(step, fallback)) for step in value.stride())
        return TensorSpec(shape, stride, value.dtype)
    if isinstance(value, (list, tuple)):
        items = [_spec(item, fallback) for item in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, dict):
        return {key: _spec(item, fallback) for key, item in value.items()}
    return _concrete(value, fallback)


def _calls(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Enclosing modules of the user's model: `("transformer.h.3", "")`; a second call of a shared module has "1" for "" and so on."""
    found = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        name, _, again = path.partition("@")
        again = again or key.partition("@")[2]
        if name.startswith("model."):
            found.append((name.removeprefix("model."), again))
    return tuple(found)


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, TensorSpec))


class _Builder:
    def __init__(self, exported: ExportedJob, precision: Precision):
        self.exported, self.precision = exported, precision
        self.graph = exported.program.graph
        self.module = exported.program.graph_module
        self.names = {id(parameter): name for name, parameter in exported.model.named_parameters()}  # tied ones have their first name
        self.memo: dict[Any, OperatorCost] = {}
        self.kept: set[fx.Node] = set()
        self.table = OperatorTable([], {}, {}, {}, [], {}, {}, exported.samples, [], [], self.module)

    def build(self) -> OperatorTable:
        inputs = {spec.arg.name: spec for spec in self.exported.program.graph_signature.input_specs}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, inputs[node.name])
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.target is operator.getitem:
                self._getitem(node)
            elif node.op == "call_function":
                self._call(node)
            else:
                self._output(node)
        return self.table

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        table = self.table
        value = _spec(node.meta.get("val"), 1)
        if spec.kind is InputKind.PARAMETER:
            parameter = self.exported.model.get_parameter(spec.target.removeprefix("model."))
            name = self.names[id(parameter)]
            value = TensorSpec(value.shape, value.stride, value.dtype, parameter.requires_grad, True)
            table.parameters[node] = name
        elif spec.kind is InputKind.USER_INPUT:
            table.batch.append(node)
        else:
            table.buffers[node] = str(spec.target).removeprefix("model.")
        table.specs[node] = value
        table.memory[node] = node

    def _attribute(self, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.module)
        self.table.specs[node] = _spec(value, 1) if isinstance(value, torch.Tensor) else value
        self.table.memory[node] = node

    def _output(self, node: fx.Node) -> None:
        signature = self.exported.program.graph_signature
        mutated = set(signature.buffers_to_mutate) | set(signature.user_inputs_to_mutate)
        self.table.results += [argument for argument in node.all_input_nodes if argument.name not in mutated]

    def _call(self, node: fx.Node) -> None:
        table = self.table
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda leaf: self._argument(leaf) if isinstance(leaf, fx.Node) else leaf
        )
        flat = pytree.tree_leaves((node.args, node.kwargs))
        inputs = tuple(leaf for leaf in flat if isinstance(leaf, fx.Node) and isinstance(table.specs[leaf], TensorSpec))
        largest = max((max(table.specs[leaf].shape, default=1) for leaf in inputs), default=1)
        value = _spec(node.meta.get("val"), largest)
        cost = _EXPERT_WEIGHTS if self._picks_expert_weights(node) else self._cost(node.target, args, kwargs)
        outputs = [leaf for leaf in _leaves(value) if isinstance(leaf, TensorSpec)]
        flags = cost.requires_grad if len(cost.requires_grad) == len(outputs) else (any(cost.requires_grad),) * len(outputs)
        flagged = [
            TensorSpec(s.shape, s.stride, s.dtype, g and (s.dtype.is_floating_point or s.dtype.is_complex))
            for s, g in zip(outputs, flags, strict=True)
        ]
        given = iter(flagged)
        table.specs[node] = pytree.tree_map(
            lambda leaf: next(given) if isinstance(leaf, TensorSpec) else leaf, value, is_leaf=lambda leaf: isinstance(leaf, TensorSpec)
        )
        self._remember(node, Operator(node, _calls(node), cost, inputs, tuple(flagged)))
        carries = any(spec.requires_grad for spec in flagged) or (not flagged and any(self._has_gradient(value) for value in inputs))
        if carries and not cuts_off_gradients(node, self.module):
            for value in written(node, self.module):
                self._write_into(value)

    def _write_into(self, value: fx.Node) -> None:
        """Something with a gradient is written into a value: what shares its memory has a gradient from now on."""
        table = self.table
        root = table.memory[value]
        if root.op != "call_function":
            return
        for node in [value] if self._has_gradient(root) else [node for node, shared in table.memory.items() if shared is root]:
            spec = table.specs[node]
            if isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
                table.specs[node] = replace(spec, requires_grad=True)

    def _has_gradient(self, node: fx.Node) -> bool:
        spec = self.table.specs[node]
        return isinstance(spec, TensorSpec) and spec.requires_grad

    def _argument(self, value: fx.Node) -> Any:
        """An argument's spec; views of a parameter count as parameters, whose copies under autocast are not kept per sample."""
        spec = self.table.specs[value]
        if isinstance(spec, TensorSpec) and self.table.memory[value] in self.table.parameters:
            return replace(spec, is_parameter=True)
        return spec

    def _picks_expert_weights(self, node: fx.Node) -> bool:
        """`weights[expert_of_row]`: stands for the experts' own weights, which a grouped kernel reads in place."""
        source: Any = node.args[0] if node.args else None
        if node.target is not aten.index.Tensor or self.table.memory.get(source) not in self.table.parameters:
            return False
        return len(self.table.specs[source].shape) >= 3

    def _getitem(self, node: fx.Node) -> None:
        table = self.table
        source: Any = node.args[0]
        value = table.specs[source]
        index: Any = node.args[1]
        table.specs[node] = value[index] if isinstance(value, (list, tuple, dict)) else _spec(node.meta.get("val"), 1)
        spec = table.specs[node]
        # Which memory: that of an argument the producer made a view of, or its own.
        producer = table.operators[table.position[source]] if source in table.position else None
        table.memory[node] = node
        if producer is not None and isinstance(index, int) and index < len(producer.cost.aliases):
            alias = producer.cost.aliases[index]
            if 0 <= alias < len(producer.inputs):
                table.memory[node] = table.memory[producer.inputs[alias]]
        outputs = (spec,) if isinstance(spec, TensorSpec) else ()
        flag = tuple(output.requires_grad for output in outputs)
        cost = OperatorCost(aliases=(0,) * len(outputs), requires_grad=flag)
        self._place(node, Operator(node, _calls(node), cost, (), outputs))
        if producer is not None and isinstance(index, int) and index in producer.cost.saved_outputs:
            self._keep(producer, node)

    def _cost(self, target: Any, args: Any, kwargs: Any) -> OperatorCost:
        leaves, tree = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
        key = (target, tuple(_key(leaf) for leaf in leaves), str(tree))
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._measure(target, args, kwargs, leaves)
            if found.note:
                self.table.notes.append(f"operator {target}: {found.note}")
        return found

    def _measure(self, target: Any, args: Any, kwargs: Any, leaves: list[Any]) -> OperatorCost:
        specs = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
        if target in _ASKS or "assert" in str(target) or (not specs and not isinstance(target, torch._ops.OpOverload)):
            return OperatorCost()
        try:
            return measure_operator(target, args, kwargs, self.precision)
        except Exception as error:  # an operator that cannot run on fake tensors is estimated, and said so
            gradient = any(spec.requires_grad for spec in specs)
            traffic = float(sum(spec.bytes for spec in specs))
            note = f"it is priced by the bytes it reads, because {why_not_measured(error, first_line(error))}"
            return OperatorCost(
                bytes=traffic,
                backward_bytes=2 * traffic * gradient,
                saved_inputs=tuple(range(len(specs))) * gradient,
                requires_grad=(gradient,),
                note=note,
            )

    def _place(self, node: fx.Node, entry: Operator) -> None:
        self.table.position[node] = len(self.table.operators)
        self.table.operators.append(entry)

    def _remember(self, node: fx.Node, entry: Operator) -> None:
        table, cost = self.table, entry.cost
        self._place(node, entry)
        table.memory[node] = node
        if isinstance(table.specs[node], TensorSpec) and cost.aliases and 0 <= cost.aliases[0] < len(entry.inputs):
            table.memory[node] = table.memory[entry.inputs[cost.aliases[0]]]
        for index in cost.saved_inputs:
            if index < len(entry.inputs):
                self._keep(entry, entry.inputs[index])
        if 0 in cost.saved_outputs and isinstance(table.specs[node], TensorSpec):
            self._keep(entry, node)
        entry.saved_fresh = cost.saved_fresh

    def _keep(self, entry: Operator, value: fx.Node) -> None:
        """Autograd keeps a value's memory, once however many operators want it; parameters are there anyway."""
        root = self.table.memory[value]
        if root in self.kept or root in self.table.parameters or root in self.table.buffers or root.op == "get_attr":
            return
        self.kept.add(root)
        spec = self.table.specs[root]
        entry.saved[root] = float((spec if isinstance(spec, TensorSpec) else self.table.specs[value]).storage_bytes)


_EXPERT_WEIGHTS = OperatorCost(aliases=(0,), requires_grad=(True,))  # a view of the parameter: neither copied nor kept


_ASKS = (aten.item.default, aten._local_scalar_dense.default, aten.sym_size.int)  # numbers, not tensors


def _key(leaf: Any) -> Any:
    if isinstance(leaf, (TensorSpec, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return (type(leaf).__name__, leaf)
    return id(leaf)


def build_table(exported: ExportedJob, precision: Precision) -> OperatorTable:
    """Measure every operator of an exported program."""
    return _Builder(exported, precision).build()
