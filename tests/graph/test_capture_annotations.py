"""Annotations survive capture: they end up as constraints on the layers the modules became."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.cluster import make_cluster, make_site
from atoll.graph import Graph
from atoll.graph.capture import capture
from atoll.plan import Plan, parse_plan, validate
from atoll.planner import plan
from tests.graph.captured_models import TinyJob, own_loss, tokens

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Annotated(nn.Module):
    """Two pipeline stages of two blocks each, the second's last one divided."""

    def __init__(self) -> None:
        super().__init__()
        with atoll.replica(2), atoll.pipeline(micro_batches=2):
            with atoll.stage():
                first = [Block(), Block()]
            with atoll.stage():
                second = [Block()]
                with atoll.split(2):
                    second.append(Block())
        self.blocks = nn.ModuleList([*first, *second])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def graph_of(model: "nn.Module | Callable[[], nn.Module]") -> Graph:
    return capture(TinyJob("tiny", model, mean_square, lambda samples: torch.randn(samples, WIDTH)))


@pytest.mark.parametrize("built", [True, False], ids=["module", "builder"])
def test_blocks_become_constraints_on_layers_and_survive_json(built: bool) -> None:
    graph = graph_of(Annotated() if built else Annotated)
    found = [(c.kind, c.layers, c.devices, c.micro_batches, c.parent) for c in graph.constraints]
    assert found == [
        ("replica", (0, 1, 2, 3), 2, 0, -1),
        ("pipeline", (0, 1, 2, 3), 0, 2, 0),
        ("stage", (0, 1), 0, 0, 1),
        ("stage", (2, 3), 0, 0, 1),
        ("split", (3,), 2, 0, 3),
    ]
    assert all("test_capture_annotations.py:" in c.where for c in graph.constraints)
    assert Graph.from_json(graph.to_json()).constraints == graph.constraints


def test_annotated_stages_reach_the_plan() -> None:
    graph = graph_of(Annotated)
    cluster = make_cluster("c", [make_site("a", kind="A100-40GB", devices=8)])
    best = plan(graph, cluster, batch_size=8).best
    validate(best, graph, cluster)
    assert [(stage.start, stage.stop) for stage in best.stages] == [(0, 2), (2, 4)]
    assert best.stages[1].tensor == 2 or best.stages[1].split == (3,)


def test_functions_on_modules_and_a_default() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 64))
        atoll.split(model[2], 4, uneven=False)
        return atoll.default(model, atoll.replica())

    graph = graph_of(build)
    assert [(c.kind, c.layers, c.devices, c.uneven) for c in graph.constraints] == [
        ("split", (2,), 4, False),
        ("replica", (0, 1), 0, True),
    ]


def test_the_head_of_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, tie_word_embeddings=False
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        atoll.split(model.lm_head, 4)
        return model

    graph = capture(TinyJob("llama", build, own_loss, tokens))
    (split,) = graph.constraints
    assert (split.kind, split.devices) == ("split", 4)
    assert [graph.layers[layer].name for layer in split.layers] == ["lm_head"]
    cluster = make_cluster("c", [make_site("a", kind="A100-40GB", devices=8)])
    best = plan(graph, cluster, batch_size=16).best
    validate(best, graph, cluster)
    last = best.stages[-1]
    assert last.tensor == 4 or (last.lanes == 4 and split.layers[0] in last.split)


def test_the_example_with_experts_divides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    examples = Path(__file__).parents[2] / "examples"
    job = atoll.load_job(examples / "mixture_of_experts.py")
    graph, cluster = capture(job), atoll.load_cluster(examples / "clusters" / "one_host.toml")
    assert [c.kind for c in graph.constraints] == ["split"] * 4 + ["replica"]
    planned = plan(graph, cluster, batch_size=job.batch_size)
    validate(planned.best, graph, cluster)
    assert all(stage.expert for stage in planned.best.stages if any(layer.experts for layer in graph.layers[stage.start : stage.stop]))
    assert any("mixture_of_experts.py" in reason for reason in planned.candidates[0].reasons)


def test_the_example_of_the_documentation_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "annotations.md").read_text(encoding="utf-8")
    code, promised = text.split("```python\n")[1].split("```", 1)
    promised = promised.split("```\n")[1]
    exec(compile(code, "annotations.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip() == promised.strip()
    assert isinstance(parse_plan(promised), Plan)
