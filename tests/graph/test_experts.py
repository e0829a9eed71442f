"""Experts are found where they can be divided, and only there."""

from typing import Any

import pytest
import torch
from captured_models import TinyJob
from mixture_models import EXPERTS, HAND_WRITTEN, HIDDEN, SEQUENCE, WIDTH, mixture, pairs
from torch import Tensor, fx, nn

from atoll.graph.axes import find_axes, operator_name
from atoll.graph.capture import Captured, capture_program
from atoll.graph.experts import LayerExperts, find_experts
from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable


def experts_of(name: str) -> tuple[Captured, LayerExperts]:
    captured = capture_program(mixture(name))
    return captured, find_experts(captured.liveness.table, 0, len(captured.liveness.table.operators))


@pytest.mark.parametrize("name", [name for name in HAND_WRITTEN if name != "Collapsed"])
def test_hand_written_experts_are_found(name: str) -> None:
    captured, experts = experts_of(name)
    assert experts.count == EXPERTS
    assert not experts.refusal
    model = HAND_WRITTEN[name]()
    stacked = {key for key, value in model.named_parameters() if value.shape[0] == EXPERTS and "router" not in key}
    assert {captured.liveness.table.parameters[node] for node in experts.parameters} == stacked
    assert sum(layer.expert_parameters for layer in captured.graph.layers) == sum(model.get_parameter(key).numel() for key in stacked)


def test_rows_that_are_repeated_for_experts_are_sent_once() -> None:
    _, experts = experts_of("Repeated")
    (region,) = experts.regions
    (entry,) = region.entries
    assert (entry.tag.expert, entry.tag.rows) == (None, 0)
    (leaving,) = region.exits
    assert (leaving.tag.expert, leaving.tag.rows) == (0, 1)
    rows = 4 * SEQUENCE * WIDTH * 4  # bytes of the captured batch
    assert experts.dispatched_bytes == (rows + EXPERTS * rows) / 2


@pytest.mark.parametrize(
    ("name", "rows_of_all_experts", "products"),
    [("Repeated", EXPERTS * SEQUENCE, 2), ("Letters", EXPERTS * SEQUENCE, 2), ("Chosen", 2 * SEQUENCE, 3)],
)
def test_what_experts_compute_is_their_work(name: str, rows_of_all_experts: int, products: int) -> None:
    captured = capture_program(mixture(name))
    work = [work for layer in captured.graph.layers for work in layer.work if work.expert and work.kind == "matmul"]
    assert {kind.count % EXPERTS for kind in work} == {0}
    assert sum(kind.flops * kind.count for kind in work) == pytest.approx(products * 2 * rows_of_all_experts * WIDTH * HIDDEN)


def test_two_mixtures_in_one_layer_are_two_regions() -> None:
    _, experts = experts_of("Two")
    assert [region.ids is None for region in experts.regions] == [True, True]
    assert not set(experts.regions[0].nodes) & set(experts.regions[1].nodes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Mixing", "does not act on each"),
        ("Decayed", "'down' is read elsewhere"),
        ("Dropping", "random"),
        ("BatchWide", "depends on the batch"),
        ("Heads", "scaled_dot_product_attention"),
    ],
)
def test_what_cannot_be_divided_is_not_counted(name: str, reason: str) -> None:
    captured, experts = experts_of(name)
    assert (experts.count, experts.regions, experts.parameters, experts.positions) == (0, (), set(), set())
    assert reason in experts.refusal
    assert all(layer.experts == 0 for layer in captured.graph.layers)


class ManyOperators(nn.Module):
    """Operators whose axes are known, in forms that people use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.stack = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, width]
        found = [
            x.transpose(0, 1),
            x.permute(2, 0, 1),
            x.unsqueeze(1).squeeze(1),
            x.unsqueeze(1).expand(-1, 3, -1, -1),
            x.reshape(-1, WIDTH).view(-1, SEQUENCE, WIDTH),
            x.flatten(1),
            x.unflatten(2, (2, 3)),
            x.softmax(1),
            x.cumsum(1),
            x.sum(1) + x.mean(-1, keepdim=True).amax(1),
            *x.chunk(2, -1),
            *x.unbind(1),
            x[:, 1:3],
            x.select(1, 0),
            self.norm(x),
            torch.cat([x, x], 1),
            self.linear(x),
            x @ self.weight,
            x.unsqueeze(1) @ self.stack,
            torch.bmm(x, x.transpose(1, 2)),
            torch.baddbmm(x[:, :1, :1], x, x.transpose(1, 2)),
            torch.einsum("bsw,ewh->besh", x, self.stack),
            torch.einsum("bsw,btw->bst", x, x * 2),
            torch.where(x > 0, x, x[:, :1]),
            torch.nn.functional.gelu(x) * x[..., :1],
        ]
        return sum((value.sum() for value in found), x.sum()) * torch.ones_like(x)


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], result_size: dict[int, int]) -> Any:
    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf)
    if operator_name(node) in ("view", "reshape", "expand"):
        sizes = [result_size.get(d, size) for d, size in enumerate(args[1])]
        args = (args[0], sizes, *args[2:])
    return node.target(*args, **kwargs)


def _check_axes(table: OperatorTable, node: fx.Node) -> int:
    """Half of an axis in, half of that axis out: for every axis of the result that is not mixed. How many were tried."""
    axes = find_axes(table, node)
    inputs = node.all_input_nodes
    if axes is None or not all(isinstance(table.specs[value], TensorSpec) for value in inputs if value.op != "get_attr"):
        return 0
    specs = {value: table.specs[value] for value in inputs}
    values = {value: torch.randn(spec.shape).to(spec.dtype) for value, spec in specs.items()}
    whole = _evaluate(node, values, {})
    assert isinstance(whole, (Tensor, list, tuple))
    tried = 0
    for dim, label in enumerate(axes.result):
        places = [(value, labels.index(label)) for value, labels in axes.operands if label in labels]
        if label in axes.mixed or not places:
            continue
        halves = dict(values)
        for value, place in places:
            halves[value] = values[value].narrow(place, 0, max(1, values[value].shape[place] // 2))
        size = halves[places[0][0]].shape[places[0][1]]
        part = _evaluate(node, halves, {dim: size})
        for one, other in zip([part] if isinstance(part, Tensor) else part, [whole] if isinstance(whole, Tensor) else whole, strict=True):
            torch.testing.assert_close(one, other.narrow(dim, 0, size))
        tried += 1
    return tried


def test_an_operator_acts_on_each_slice_of_its_axes_alone() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    table = capture_program(TinyJob("many", ManyOperators, loss, pairs)).liveness.table
    tried = {}
    for entry in table.operators:
        if not operator_name(entry.node).startswith("sym_") and entry.node.target.__class__.__name__ == "OpOverload":
            tried[operator_name(entry.node)] = tried.get(operator_name(entry.node), 0) + _check_axes(table, entry.node)
    expected = "transpose permute unsqueeze squeeze unflatten softmax cumsum sum mean amax chunk unbind slice select layer_norm cat linear"
    assert {
        name for name in (*expected.split(), "matmul", "bmm", "baddbmm", "einsum", "where", "gelu", "mul") if not tried.get(name)
    } == set()
