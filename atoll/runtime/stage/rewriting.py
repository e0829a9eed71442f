"""What is changed in a unit's graph, and in the regions inside it, before it runs."""

import copy
import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from atoll.graph.regions import arguments_of, draws_in, regions_of, shared_memory, written
from atoll.runtime.stage.rng import Draw

__all__ = ["keep_what_is_read", "own_region", "place_on", "seed_draws"]

aten = torch.ops.aten
_NOT_KEPT = (torch.ops.higher_order.wrap_with_set_grad_enabled,)  # with False as its first argument: nothing inside is kept for backward


def own_region(region: fx.GraphModule) -> fx.GraphModule:
    """A copy of a region with those inside it: the captured program stays as it is."""
    twin = fx.GraphModule(region, copy.deepcopy(region.graph))
    for name, inner in region.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(twin, name, own_region(inner))
    return twin


def place_on(module: fx.GraphModule, device: torch.device) -> None:
    """Capture ran on the CPU; what the program creates is to be created where the stage runs."""
    for node in module.graph.nodes:
        if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
            node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
            node.kwargs = {name: device if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
        for region in regions_of(node, module).values():
            place_on(region, device)
    module.recompile()


def seed_draws(module: fx.GraphModule, first: Mapping[str, int], draw: Draw) -> None:
    """Let `draw` seed the generator before every random operator; `first` has the number of a node's first draw."""
    if first:
        module.add_module("draw", draw)
    for node in list(module.graph.nodes):
        if node.name not in first:
            continue
        regions = regions_of(node, module)
        for region in regions.values():
            seed_draws(region, _numbered(region, first[node.name]), draw)
        if not regions:
            with module.graph.inserting_before(node):
                module.graph.call_module("draw", (first[node.name],))
    module.recompile()


def _numbered(region: fx.GraphModule, number: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in region.graph.nodes:
        draws = draws_in(node, region) if node.op == "call_function" else 0
        if draws:
            found[node.name], number = number, number + draws
    return found


def keep_what_is_read(module: fx.GraphModule, changed: Iterable[str]) -> None:
    """Let operators read copies of the buffers that the unit changes.

    What autograd keeps of such a buffer must be as the operator saw it, but other micro-batches change it before this one's backward.
    """
    names = set(changed)
    _keep(module, {node for node in module.graph.nodes if node.op == "get_attr" and node.target in names})


def _keep(module: fx.GraphModule, changed: set[fx.Node]) -> None:
    if not changed:
        return
    nodes = list(module.graph.nodes)
    memory = shared_memory(nodes, module, {node: frozenset([node]) for node in changed})
    for node in nodes:
        regions = regions_of(node, module)
        for region in regions.values() if not _keeps_nothing(node) else ():
            _keep(region, {inside for inside, value in arguments_of(node, region, module).items() if memory.get(value)})
        if regions or node.op != "call_function" or node.target is operator.getitem or memory[node]:
            continue  # a view of it, or a part of several results: what reads that gets the copy
        left = set(written(node, module))
        for value in [value for value in node.all_input_nodes if memory.get(value) and value not in left]:
            with module.graph.inserting_before(node):
                node.replace_input_with(value, module.graph.call_function(aten.clone.default, (value,)))
    module.recompile()


def _keeps_nothing(node: fx.Node) -> bool:
    return node.target in _NOT_KEPT and node.args[0] is False
