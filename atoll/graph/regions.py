"""Regions of a program: `with no_grad()`, `with autocast(…)` and the like are one node each, with a graph of their own inside.

What an operator does to memory and which random numbers it draws is asked here, of operators and of whole regions alike.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

__all__ = [
    "arguments_of",
    "cuts_off_gradients",
    "draws_in",
    "is_initialisation",
    "is_random",
    "operators_in",
    "regions_of",
    "shared_memory",
    "write_early",
    "written",
]

aten = torch.ops.aten
_NORMS = (aten.batch_norm.default, aten.instance_norm.default)  # they change their running statistics without saying so in their schema
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
_NONE: frozenset[fx.Node] = frozenset()


def regions_of(node: fx.Node, root: nn.Module) -> dict[str, fx.GraphModule]:
    """What runs inside a node of `root`'s graph, by attribute: one region as a rule, none for an ordinary operator."""
    found: dict[str, fx.GraphModule] = {}
    for value in node.all_input_nodes if node.op == "call_function" else ():
        module: Any = root if value.op == "get_attr" else None
        for part in str(value.target).split("."):
            module = getattr(module, part, None)
        if isinstance(module, fx.GraphModule):
            found[str(value.target)] = module
    return found


def operators_in(node: fx.Node, root: nn.Module) -> Iterator[fx.Node]:
    """The operators a node stands for, in order: itself, or those of its region, with the regions in that."""
    regions = regions_of(node, root)
    if not regions:
        yield node
    for region in regions.values():
        for inner in region.graph.nodes:
            if inner.op == "call_function":
                yield from operators_in(inner, region)


def cuts_off_gradients(node: fx.Node, root: nn.Module) -> bool:
    """Whether no gradient goes through it, whatever it computes: a `detach`, or a region under `no_grad` with no other region inside."""
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.target is aten.detach.default
    inside = [regions_of(inner, region) for region in regions_of(node, root).values() for inner in region.graph.nodes]
    return node.args[0] is False and not any(inside)


def is_random(node: fx.Node) -> bool:
    """Whether the operator may draw random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "dropout" in str(node.target) or "rand" in str(node.target)


def is_initialisation(node: fx.Node) -> bool:
    """Whether it draws the first values of a module that a forward builds, which nobody reads: that module takes parameters there are."""
    if node.users or node.target not in (aten.uniform_.default, aten.normal_.default):
        return False
    memory: Any = node.args[0]
    while memory.target is aten.detach.default and len(memory.users) == 1:
        memory = memory.args[0]
    return memory.target is aten.empty.memory_format and len(memory.users) == 1


def draws_in(node: fx.Node, root: nn.Module) -> int:
    """How many times a node really draws random numbers: as often as eager code calls something random that is switched on."""
    return sum(is_random(inner) and _is_on(inner) and not is_initialisation(inner) for inner in operators_in(node, root))


def _is_on(node: fx.Node) -> bool:
    """Dropout that is off draws nothing."""
    args: Any = node.args
    name = str(node.target)
    if "scaled_dot_product_attention" in name:
        probability = args[4] if len(args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability)
    if name.startswith(_RECURRENT):
        first = 5 if name.endswith(".data") else 4  # number of layers, probability, training; packed sequences have one argument more
        return args[first] > 1 and bool(args[first + 1]) and bool(args[first + 2])
    if "dropout" in name and len(args) > 2:
        return bool(args[1]) and bool(args[2])
    return True


def written(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """The arguments an operator, or a region, changes in place."""
    regions = regions_of(node, root)
    if not regions:
        return _written_by_operator(node)
    changed: dict[fx.Node, None] = {}
    for region in regions.values():
        outside, memory = arguments_of(node, region, root), shared_memory(region.graph.nodes, region)
        starts = [start for inner in region.graph.nodes for value in written(inner, region) for start in memory.get(value, _NONE)]
        changed |= dict.fromkeys(outside[start] for start in starts if start in outside)
    return list(changed)


def _written_by_operator(node: fx.Node) -> list[fx.Node]:
    if node.target in _NORMS:
        return [value for value in node.args[3:5] if isinstance(value, fx.Node)] if node.args[5] else []
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        leaf
        for value in _arguments_with_alias(node, schema, only_written=True)
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, fx.Node)
    ]


def _arguments_with_alias(node: fx.Node, schema: Any, *, only_written: bool = False) -> Iterator[Any]:
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.is_write or not only_written):
            yield node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)


def arguments_of(node: fx.Node, region: fx.GraphModule, root: nn.Module) -> dict[fx.Node, fx.Node]:
    """A region's placeholders → the values the node hands to them: what comes after the region among its arguments."""
    regions = regions_of(node, root)
    last = max(i for i, value in enumerate(node.args) if isinstance(value, fx.Node) and value.op == "get_attr" and value.target in regions)
    given = zip(
        (inner for inner in region.graph.nodes if inner.op == "placeholder"), pytree.tree_leaves(node.args[last + 1 :]), strict=False
    )
    return {placeholder: value for placeholder, value in given if isinstance(value, fx.Node)}


def shared_memory(
    nodes: Iterable[fx.Node], root: nn.Module, starts: Mapping[fx.Node, frozenset[fx.Node]] | None = None
) -> dict[fx.Node, frozenset[fx.Node]]:
    """Which placeholders (or `starts`) a value may share memory with, as far as the operators' schemas tell; nothing is left out."""
    memory: dict[fx.Node, Any] = dict(starts or {})
    for node in nodes:
        if node.op == "placeholder" and starts is None:
            memory[node] = frozenset([node])
        elif node.op == "call_function":
            memory[node] = _memory_of_call(node, root, memory)
    return {node: _union(value) for node, value in memory.items()}


def _memory_of_call(node: fx.Node, root: nn.Module, memory: Mapping[fx.Node, Any]) -> Any:
    """A set of starts; for a region one for each of its results."""
    regions = regions_of(node, root)
    if regions:
        return [
            _union(results)
            for results in zip(*(_memory_of_results(node, region, root, memory) for region in regions.values()), strict=False)
        ]
    if getattr(node.target, "__name__", "") == "getitem":
        value, index = cast("tuple[fx.Node, int]", node.args)
        source = memory.get(value, _NONE)
        return source[index] if isinstance(source, list) else source
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(value.alias_info is not None for value in schema.returns):
        return _NONE
    values = pytree.tree_leaves(list(_arguments_with_alias(node, schema)))
    return _union([memory.get(value, _NONE) for value in values if isinstance(value, fx.Node)])


def _memory_of_results(node: fx.Node, region: fx.GraphModule, root: nn.Module, memory: Mapping[fx.Node, Any]) -> list[frozenset[fx.Node]]:
    outside, inside = arguments_of(node, region, root), shared_memory(region.graph.nodes, region)
    results = pytree.tree_leaves(next(inner for inner in region.graph.nodes if inner.op == "output").args[0])
    return [_union([memory.get(outside[start], _NONE) for start in inside.get(value, _NONE) if start in outside]) for value in results]


def _union(value: Any) -> frozenset[fx.Node]:
    return value if isinstance(value, frozenset) else frozenset().union(*map(_union, value))


def write_early(module: fx.GraphModule) -> None:
    """Move what is written into inputs at the very end of a program to where the old values were last needed: so it can be cut between."""
    nodes = list(module.graph.nodes)
    memory = shared_memory(nodes, module)
    place = {node: index for index, node in enumerate(nodes)}
    for node in reversed(nodes[:-1]):
        if node.target not in (aten.copy_.default, aten.detach.default) or (node.target is aten.copy_.default and node.users):
            break
        if node.target is aten.copy_.default:
            target, value = cast("tuple[fx.Node, fx.Node]", node.args[:2])
            made: Any = value.args[0] if value.target is aten.detach.default else value
            touched = memory.get(target, _NONE)
            users = [place[n] for n in nodes if n is not node and any(memory.get(v, _NONE) & touched for v in n.all_input_nodes)]
            changes = [place[n] for n in nodes if made in written(n, module)]
            anchor = nodes[max([place[target], place[made], *users, *changes])]
            anchor.append(node)
            if place[value] > place[anchor]:
                anchor.append(value)
