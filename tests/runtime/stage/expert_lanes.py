"""Lanes that divide experts, as processes: every case on two and on three lanes, compared with the whole model in eager PyTorch.

python expert_lanes.py FOLDER [CASE …] writes a JSON object for every lane: case → largest relative differences of loss and gradients.
"""

import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "graph"))

from captured_models import TinyJob
from mixture_models import HAND_WRITTEN, HUGGING_FACE, mixture

from atoll.graph.capture import Captured, capture_program
from atoll.graph.experts import find_experts
from atoll.runtime.stage.expert import expert_counts, split_experts
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.script import load_job
from tests.process_group import fork_ranks, process_group

SAMPLES = {2: (3, 2), 3: (2, 1, 3)}
EXAMPLE = Path(__file__).parents[3] / "examples" / "mixture_of_experts.py"
CASES = (*HAND_WRITTEN, *HUGGING_FACE, "example")


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class InDouble(TorchFunctionMode):
    """Models that compute parts in float32 whatever they are given do so in float64 here."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        return function(*pytree.tree_map(_doubled, args), **pytree.tree_map(_doubled, kwargs or {}))


def job_of(case: str) -> TinyJob:
    if case != "example":
        return mixture(case)
    job = load_job(EXAMPLE)
    build: Any = job.model
    return TinyJob(case, lambda: build.__globals__["MixtureModel"](layers=1, width=16), job.loss, job.example_batch)


def _double_constants(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map(_doubled, node.args), pytree.tree_map(_doubled, node.kwargs)


def _region(captured: Captured, name: str) -> fx.GraphModule:
    """Code under `no_grad` and the like, which the program keeps as a module."""
    module = copy.deepcopy(captured.program.graph_module.get_submodule(name))
    assert isinstance(module, fx.GraphModule)
    _double_constants(module.graph)
    module.recompile()
    return module


def lane_module(captured: Captured, model: nn.Module, lane: int, lanes: int, group: Any) -> tuple[fx.GraphModule, dict[str, ShardSpec]]:
    """The whole captured program as lane `lane` runs it."""
    table, graph, root = captured.liveness.table, fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    kinds = {spec.arg.name: spec for spec in captured.program.graph_signature.input_specs}
    constants = dict(model.named_buffers(remove_duplicate=False)) | captured.program.constants
    for node in captured.program.graph.nodes:
        if node.op == "placeholder" and kinds[node.name].kind is not InputKind.USER_INPUT:
            copies[node] = graph.get_attr(node.name)
            if node not in table.parameters:
                root.register_buffer(node.name, constants[str(kinds[node.name].target).removeprefix("model.")])
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                root.add_module(str(node.target), _region(captured, str(node.target)))
    _double_constants(graph)
    holdings: dict[str, ShardSpec] = {}
    for layer in captured.graph.layers:
        experts = find_experts(table, *layer.nodes)
        if experts.count:
            holdings |= split_experts(graph, copies, experts, table, expert_counts(experts.count, lanes), lane, group)
    assert holdings or lanes == 1, "nothing was divided, so nothing is tested"
    for node, name in table.parameters.items():
        whole = model.get_parameter(name)
        own = holdings[name].take(whole.detach()) if name in holdings else whole.detach()
        root.register_parameter(node.name, nn.Parameter(own.clone()))
    graph.lint()
    return fx.GraphModule(root, graph), holdings


def mean_of(result: Any) -> tuple[Tensor, Any]:
    """A loss and its weight, which is None where it is the number of samples."""
    leaves = pytree.tree_leaves(result)
    return (leaves[0], leaves[1]) if len(leaves) > 1 else (leaves[0], None)


def scaled(result: Any, share: float, weight: float) -> Tensor:
    total, counted = mean_of(result)
    return total * share if counted is None else total / weight


def reference(job: TinyJob, model: nn.Module, pieces: list[Any], shares: list[float], weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # a loop over experts: nothing like what is tested
    total = torch.zeros((), dtype=torch.float64)
    with InDouble():
        for piece, share in zip(pieces, shares, strict=True):
            loss = scaled(job.loss(model, piece), share, weight)
            loss.backward()
            total += loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def in_double(batch: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch)


def compare(job: TinyJob, captured: Captured, samples: tuple[int, ...], lane: int, group: Any, *, again: bool = False) -> dict[str, float]:
    """Largest relative difference of loss and of gradients between a lane's program and the whole model."""
    lanes, total = len(samples), sum(samples)
    torch.manual_seed(3)
    model = job.model().double().train()
    batch = in_double(job.example_batch(total))
    starts = [sum(samples[:i]) for i in range(lanes)]
    pieces = [pytree.tree_map(lambda leaf, a=a, n=n: leaf[a : a + n], batch) for a, n in zip(starts, samples, strict=True)]
    shares, weight = [n / total for n in samples], float(total * 4 * 6)
    module, holdings = lane_module(captured, model, lane, lanes, group)
    leaves = pytree.tree_leaves(pieces[lane])
    result = checkpoint(module, *leaves, use_reentrant=False) if again else module(*leaves)
    loss = scaled(result, shares[lane], weight)
    loss.backward()
    loss = loss.detach().clone()
    if group is not None:
        dist.all_reduce(loss, group=group)
    expected, gradients = reference(job, model, pieces, shares, weight)
    worst = 0.0
    for node, name in captured.liveness.table.parameters.items():
        own = module.get_parameter(node.name).grad
        if name not in gradients:
            continue
        whole = gradients[name]
        own = torch.zeros_like(whole) if own is None else own
        if name in holdings:
            whole = holdings[name].take(whole)
        elif group is not None:
            dist.all_reduce(own, group=group)
        worst = max(worst, float((own - whole).abs().max() / gradients[name].abs().max().clamp(min=1e-12)) if own.numel() else 0.0)
    return {"loss": float((loss - expected).abs() / expected.abs()), "gradient": worst}


def lane(rank: int, folder: Path, programs: dict[str, tuple[TinyJob, Captured]]) -> None:
    """One process: all cases, on two lanes (two of the three processes) and on three."""
    found: dict[str, dict[str, float]] = {}
    with process_group(folder / "store", rank, 3, timeout_seconds=120):
        groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
        for case, (job, captured) in programs.items():
            for lanes, group in groups.items():
                if rank < lanes:
                    found[f"{case} {lanes}"] = compare(job, captured, SAMPLES[lanes], rank, group)
            if case in ("Picked", "Repeated"):
                found[f"{case} again"] = compare(job, captured, SAMPLES[3], rank, groups[3], again=True)
                found[f"{case} without samples"] = compare(job, captured, (2, 0, 3), rank, groups[3])
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main(folder: Path, cases: Sequence[str]) -> int:
    """Capture once, then go on as three processes."""
    torch.set_num_threads(1)
    jobs = {case: job_of(case) for case in cases}
    programs = {case: (job, capture_program(job)) for case, job in jobs.items()}
    return fork_ranks(3, lane, folder, programs)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or CASES))
