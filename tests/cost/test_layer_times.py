"""Tables of layer times: matched to layers and kinds, used by the cost of a plan on mixed GPUs, wrong lines named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from layer_times import kind_named, read_layer_times

from atoll.cluster import make_cluster, make_site
from atoll.cost import Calibration, Evaluator
from atoll.errors import PlanError
from atoll.graph import dense_transformer
from atoll.plan import Plan, Replica, Stage

GRAPH = dense_transformer(name="tiny", layers=2, hidden=64, heads=4, sequence=32, vocabulary=100, precision="fp32")
HEADER = "model,gpu,micro_batch,tp,layer,fwd_s,bwd_s,update_s\n"


def table(path: Path, gpus: dict[str, float], layers: int = 4, tensors: tuple[int, ...] = (1, 2)) -> Path:
    lines = [f"m,{gpu},1,{t},{i},{s},{2 * s},0\n" for gpu, s in gpus.items() for t in tensors for i in range(layers)]
    path.write_text(HEADER + "".join(lines))
    return path


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        ("A100-40", "A100-40GB"),
        ("A100-80", "A100-80GB"),
        ("V100-16", "V100-16GB"),
        ("GH-96", "GH200-96GB"),
        ("RTX-3090", "RTX-3090"),
        ("Titan-RTX", "Titan-RTX"),
        ("RTX-2080", "RTX-2080"),
        ("A100-40GB", "A100-40GB"),
        ("Abacus", None),
    ],
)
def test_names_of_gpus(short: str, kind: str | None) -> None:
    assert kind_named(short) == kind


def test_a_pipeline_on_mixed_gpus_takes_what_was_measured(tmp_path: Path) -> None:
    times = read_layer_times(table(tmp_path / "t.csv", {"A100-40": 1.0, "V100-16": 3.0}), GRAPH).times
    cluster = make_cluster("c", [make_site("s", kind=[("A100-40GB", 1), ("V100-16GB", 1)], link=("1000 GB/s", "0 us"))])
    names = [device.name for device in cluster.devices]
    stages = tuple(
        Stage(start=a, stop=b, replicas=(Replica(devices=(n,), samples=(2,)),)) for a, b, n in ((0, 2, names[0]), (2, 4, names[1]))
    )
    plan = Plan(graph="tiny", cluster="c", batch_size=2, micro_batch_size=1, stages=stages)
    seconds = Evaluator(GRAPH, cluster, calibration=Calibration(layer_times=times)).seconds(plan)
    # forward 2 s on the A100, then both micro-batches forward and backward (2 × 18 s) on the V100, then the last backward (4 s)
    assert seconds == pytest.approx(2 + 2 * 18 + 4, rel=1e-3)


def test_a_measured_split_contains_its_all_reduces(tmp_path: Path) -> None:
    times = read_layer_times(table(tmp_path / "t.csv", {"A100-40": 1.0}), GRAPH).times
    cluster = make_cluster("c", [make_site("s", kind="A100-40GB", devices=2, link=("1 MB/s", "1 ms"))])
    replica = Replica(devices=tuple(device.name for device in cluster.devices), samples=(1,))
    stage = Stage(start=0, stop=4, replicas=(replica,), tensor=2)
    plan = Plan(graph="tiny", cluster="c", batch_size=1, micro_batch_size=1, stages=(stage,))
    assert Evaluator(GRAPH, cluster, calibration=Calibration(layer_times=times)).seconds(plan) == pytest.approx(12.0, rel=1e-3)


def test_layers_beyond_the_graphs_are_added_to_its_last(tmp_path: Path) -> None:
    times = read_layer_times(table(tmp_path / "t.csv", {"A100-40": 1.0}, layers=6, tensors=(1,)), GRAPH).times
    assert [time.layer for time in times] == [layer.name for layer in GRAPH.layers]
    assert [time.forward_seconds for time in times] == [1.0, 1.0, 1.0, 3.0]


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", {"A100-40": 1.0, "Abacus": 1.0}, tensors=(1,))
    path.write_text(path.read_text() + "m,V100-16,1,1,0,1,1,0\n")
    found = read_layer_times(path, GRAPH)
    assert {time.kind for time in found.times} == {"A100-40GB"}
    assert "Abacus" in found.left_out[0]
    assert "has 1 layers and tiny has 4" in found.left_out[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model,gpu\n", "line 1: no column micro_batch"),
        (HEADER, "has no rows"),
        (HEADER + "m,A100-40,1,1,0,fast,1,0\n", "line 2: fwd_s must be a number of seconds"),
        (HEADER + "m,A100-40,1,1,0,-1,1,0\n", "line 2: fwd_s"),
        (HEADER + "m,A100-40,1,1,0,nan,1,0\n", "line 2: fwd_s"),
        (HEADER + "m,A100-40,0.5,1,0,1,1,0\n", "line 2: micro_batch must be a whole number"),
        (HEADER + "m,A100-40,0,1,0,1,1,0\n", "at least 1"),
        (HEADER + "m,A100-40,1,1\n", "line 2: layer"),
        (HEADER + "m,A100-40,1,1,0,1,1,0\nm,A100-40,1,1,0,1,1,0\n", "line 3: layer 0 .* twice"),
        (HEADER + "m,A100-40,1,1,0,1,1,0\n", "nothing in it fits tiny"),
        (HEADER + "m,A100-40,1,1,0,1,1,0\nn,A100-40,1,1,0,1,1,0\n", "several models"),
    ],
)
def test_wrong_tables(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=complaint):
        read_layer_times(path, GRAPH)


def test_a_model_or_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        read_layer_times(tmp_path / "none.csv", GRAPH)
    with pytest.raises(PlanError, match="no model is called 'x'; there are: m"):
        read_layer_times(table(tmp_path / "t.csv", {"A100-40": 1.0}), GRAPH, "x")
