"""What the tests of tensor parallelism run in every process: a captured program divided between processes, against the eager model.

`python -m tests.runtime.stage.tensor_ranks FOLDER CASES`: captures every case, then goes on as three processes, of which the first so many
as a case has shares divide it. CASES is JSON: kind → name → shares; of the kind `lanes` shares are samples. What a process found of a kind
is written to FOLDER/<kind>.<rank>.json, by case.
"""

import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from atoll.graph.capture import Captured, capture_program
from atoll.graph.export import use_batched_experts
from atoll.runtime.stage.collectives import Lanes, Ranks, TensorRanks
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.tensor import split_tensors
from tests.process_group import fork_ranks, process_group

Loss = Callable[[nn.Module, Any], Tensor]
AllCases = dict[str, dict[str, list[tuple[int, ...]]]]  # kind → name → shares


@dataclass
class Case:
    """A model to divide; in fp64, so that rounding does not hide mistakes."""

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int], Any]
    precision: str = "fp32"
    sums: bool = False  # the loss is a sum over samples, not a mean
    random: bool = False  # the model draws numbers

    @property
    def model(self) -> Callable[[], nn.Module]:
        return self.seeded

    def seeded(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double().train()

    def example_batch(self, samples: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            batch = self.batch(samples)
        return pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


@dataclass
class Reference:
    """The eager model's loss and gradients."""

    case: Case
    captured: Captured
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batch: Any
    loss: Tensor
    gradients: dict[str, Tensor]
    trainable: set[str]
    tolerance: float


def reference_of(case: Case, samples: int = 3) -> Reference:
    captured = capture_program(case)  # type: ignore[arg-type]
    model = case.seeded()
    use_batched_experts(model)
    batch = case.example_batch(samples)
    torch.manual_seed(7)
    loss = case.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    narrow = any(
        isinstance(value := node.meta.get("val"), Tensor) and value.dtype == torch.float32 for node in captured.program.graph.nodes
    )
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return Reference(case, captured, parameters, buffers, batch, loss.detach(), gradients, trainable, 2e-6 if narrow else 1e-9)


@dataclass
class Divided:
    """A rank's copy of the program."""

    module: fx.GraphModule
    holdings: dict[str, ShardSpec] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    divided_layers: list[str] = field(default_factory=list)


def divide(reference: Reference, shares: tuple[int, ...], index: int, ranks: Ranks) -> Divided:
    program = reference.captured.program
    graph, nodes = fx.Graph(), {}
    for node in program.graph.nodes:
        nodes[node] = graph.node_copy(node, lambda original: nodes[original])
    divided = Divided(fx.GraphModule({}, fx.Graph()))
    for layer, sharding in zip(reference.captured.graph.layers, reference.captured.shardings, strict=True):
        assert bool(sharding.rewrites) == bool(sharding.parameters)
        held = split_tensors(graph, nodes, sharding, shares, index, ranks)
        assert all(divided.holdings.get(name, holding) == holding for name, holding in held.items())
        divided.holdings |= held
        divided.divided_layers += [layer.name] if held else []
    graph.lint()
    divided.module = fx.GraphModule(program.graph_module, graph)
    return divided


def run(reference: Reference, divided: Divided, batch: Any) -> Tensor:
    """The loss; gradients are left in `divided.leaves`."""
    program = reference.captured.program
    first = {tensor.data_ptr(): name for name, tensor in reversed(reference.parameters.items())}  # tied ones go by their first name
    inputs: list[Any] = []
    user = iter(pytree.tree_leaves(batch))
    for spec in program.graph_signature.input_specs:
        target = str(spec.target).removeprefix("model.")
        if spec.kind is InputKind.PARAMETER:
            name = first[reference.parameters[target].data_ptr()]
            if name not in divided.leaves:
                holding = divided.holdings.get(name)
                whole = reference.parameters[target]
                divided.leaves[name] = (
                    (whole if holding is None else holding.take(whole)).clone().requires_grad_(name in reference.trainable)
                )
            inputs.append(divided.leaves[name])
        elif spec.kind is InputKind.BUFFER:
            inputs.append(reference.buffers[target].clone())
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            inputs.append(program.constants[str(spec.target)])
        else:
            inputs.append(next(user))
    torch.manual_seed(7)
    results = divided.module(*inputs)
    names = [getattr(spec.arg, "name", None) for spec in program.graph_signature.output_specs]
    (loss,) = [value for name, value in zip(names, results, strict=True) if name in program.graph_signature.user_outputs]
    return loss


def check(reference: Reference, shares: tuple[int, ...]) -> dict[str, Any]:
    """Divide, run, compare: what differs, and what was divided."""
    index = dist.get_rank()
    divided = divide(reference, shares, index, TensorRanks(dist.group.WORLD))
    loss = run(reference, divided, reference.batch)
    loss.backward()  # type: ignore[no-untyped-call]
    wrong = [_difference("loss", loss.detach(), reference.loss, reference.tolerance)]
    scale = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    for name, leaf in divided.leaves.items():
        gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        holding = divided.holdings.get(name)
        if holding is not None:
            gradient = assembled(holding, gradient)
        wrong.append(_difference(name, gradient, reference.gradients[name], reference.tolerance, scale))
    return {"wrong": [one for one in wrong if one], "divided": sorted(divided.holdings), "layers": divided.divided_layers}


def check_lanes(reference: Reference, samples: tuple[int, ...]) -> dict[str, Any]:
    """As `check`, but every process has its own samples, and all layers are divided between them."""
    index, case = dist.get_rank(), reference.case
    batch = case.example_batch(sum(samples))
    starts = [sum(samples[:lane]) for lane in range(len(samples))]
    own = [pytree.tree_map(lambda leaf, a=a, n=n: leaf[a : a + n], batch) for a, n in zip(starts, samples, strict=True)]
    weights = [1.0 if case.sums else count / sum(samples) for count in samples]
    model = case.seeded()
    torch.manual_seed(7)
    if case.random:  # what is dropped is drawn for all samples together
        expected = case.loss(model, batch)
    else:
        expected = sum((weight * case.loss(model, part) for weight, part in zip(weights, own, strict=True)), torch.zeros(()))
    expected.backward()  # type: ignore[no-untyped-call]
    lanes = Lanes(dist.group.WORLD, index)
    lanes.samples = samples
    divided = divide(reference, (1,) * len(samples), index, lanes)
    loss = run(reference, divided, own[index]) * weights[index]
    loss.backward()  # type: ignore[no-untyped-call]
    total = loss.detach().clone()
    dist.all_reduce(total)
    wrong = [_difference("loss", total, expected.detach(), reference.tolerance)]
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, leaf in divided.leaves.items():
        gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        holding = divided.holdings.get(name)
        if holding is None:
            dist.all_reduce(gradient)
        else:
            gradient = assembled(holding, gradient)
        wrong.append(_difference(name, gradient, gradients[name], reference.tolerance, scale))
    return {"wrong": [one for one in wrong if one], "divided": sorted(divided.holdings), "layers": divided.divided_layers}


def assembled(holding: ShardSpec, part: Tensor) -> Tensor:
    """The whole that ranks hold parts of; every element is held exactly once."""
    whole, count = part.new_zeros(holding.shape), part.new_zeros(holding.shape)
    holding.put(whole, part)
    holding.put(count, torch.ones_like(part))
    dist.all_reduce(whole)
    dist.all_reduce(count)
    assert bool((count == 1).all()), f"{holding.name} is not held exactly once"
    return whole


def _difference(name: str, actual: Tensor, expected: Tensor, tolerance: float, scale: float = 0.0) -> str:
    if actual.shape != expected.shape:
        return f"{name}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    difference = float((actual.double() - expected.double()).abs().max())
    most = max(float(expected.abs().max()), 1e-2 * scale)  # gradients that are zero but for rounding are not compared with themselves
    return "" if difference <= tolerance * most else f"{name}: differs by {difference:.2e} of {most:.2e}"


def rank_process(rank: int, folder: Path, references: dict[str, Reference | str], cases: AllCases) -> None:
    """One process: its part of every case of every kind."""
    for kind, shares_of in cases.items():
        size = max((len(shares) for proportions in shares_of.values() for shares in proportions), default=0)
        if rank >= size:
            continue
        with process_group(folder / f"{kind}.store", rank, size):
            answers = {name: answer_of(references[name], shares, kind) for name, shares in shares_of.items()}
            (folder / f"{kind}.{rank}.json").write_text(json.dumps(answers), encoding="utf-8")


def answer_of(reference: Reference | str, proportions: list[tuple[int, ...]], kind: str) -> dict[str, Any]:
    """What came of one case under all of its shares."""
    if isinstance(reference, str):
        return {"wrong": [reference]}
    try:
        results = [(check_lanes if kind == "lanes" else check)(reference, tuple(shares)) for shares in proportions]
    except Exception:
        return {"wrong": [traceback.format_exc()]}
    wrong = [f"{shares}: {one}" for shares, result in zip(proportions, results, strict=True) for one in result["wrong"]]
    return {**results[0], "wrong": wrong}


def captured_reference(name: str) -> Reference | str:
    """A case's reference, or why there is none."""
    from .tensor_cases import CASES

    try:
        return reference_of(CASES[name]())
    except Exception:
        return traceback.format_exc()


def main(folder: Path, cases: AllCases) -> int:
    """Capture once, which is what takes long, then go on as three processes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    references = {name: captured_reference(name) for name in dict.fromkeys(name for shares_of in cases.values() for name in shares_of)}
    return fork_ranks(3, rank_process, folder, references, cases)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
