"""Annotated graphs: whatever annotations are lawful, every answer honours them or an error names their lines."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.errors import AnnotationError, NoPlanError
from atoll.graph import Constraint, Graph, check_constraints, dense_transformer, mixture_of_experts, preset
from atoll.plan import Plan, validate
from atoll.planner import Candidate, plan


def blocks(layers: int, experts: bool = False) -> Graph:
    """A small transformer of so many layers, the embedding and the head among them; its parts come in eights."""
    if experts:
        return mixture_of_experts(
            name="g",
            layers=layers - 2,
            hidden=256,
            heads=8,
            sequence=64,
            vocabulary=1024,
            experts=4,
            active_experts=1,
            expert_hidden=512,
            every=2,
        )
    return dense_transformer(name="g", layers=layers - 2, hidden=256, heads=8, sequence=64, vocabulary=1024, tied=False)


def cluster_of(hosts: int, devices: int, sites: int = 1, kinds: tuple[str, ...] = ("A100-40GB",)) -> Cluster:
    made = [make_site(f"s{i}", kind=kinds[i % len(kinds)], hosts=hosts, devices=devices) for i in range(sites)]
    return make_cluster("c", made, default_link=("5 Gbit/s", "5 ms"))


def annotated(graph: Graph, *constraints: Constraint) -> Graph:
    numbered = (replace(c, where=f"train.py:{10 + i}") for i, c in enumerate(constraints))
    return replace(graph, constraints=tuple(numbered))


def whole(graph: Graph) -> tuple[int, ...]:
    return tuple(range(len(graph.layers)))


@st.composite
def lawful(draw: st.DrawFn) -> tuple[Graph, Cluster, int]:
    """A graph with random annotations that `check_constraints` lets pass, a cluster and a batch."""
    layers = draw(st.integers(6, 10))
    graph = blocks(layers, draw(st.booleans()))
    kinds = draw(st.sampled_from((("A100-40GB",), ("A100-40GB", "P100-16GB"))))
    cluster = cluster_of(draw(st.integers(1, 2)), draw(st.sampled_from((2, 3, 4))), draw(st.integers(1, 2)), kinds)
    made: list[Constraint] = []
    around = -1
    if draw(st.booleans()):
        made.append(Constraint(kind="replica", layers=whole(graph), devices=draw(st.integers(0, 3))))
        around = 0
    if draw(st.booleans()):
        made.append(Constraint(kind="pipeline", layers=whole(graph), micro_batches=draw(st.sampled_from((0, 1, 2, 4))), parent=around))
        around = len(made) - 1
    edges = [0, *sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))), layers]
    stages = draw(st.booleans())
    for order, (start, stop) in enumerate(pairwise(edges)):
        part = tuple(range(start + (draw(st.booleans()) and stop - start > 1), stop))
        parent = around
        if stages:
            made.append(Constraint(kind="stage", layers=part, order=order, parent=around))
            parent = len(made) - 1
        kind = draw(st.sampled_from(("replica", "split", "none")))
        if kind != "none":
            devices, uneven = draw(st.integers(0, 4)), draw(st.booleans())
            made.append(Constraint(kind=kind, layers=part, devices=devices, uneven=uneven or kind == "replica", parent=parent))  # type: ignore[arg-type]
    graph = annotated(graph, *made)
    try:
        check_constraints(graph, len(cluster.devices))
    except AnnotationError:
        graph = replace(graph, constraints=())  # as good a graph as any
    return graph, cluster, draw(st.sampled_from((8, 12, 24)))


@settings(max_examples=settings().max_examples // 5, suppress_health_check=[HealthCheck.too_slow])
@given(lawful())
def test_every_answer_honours_every_annotation(case: tuple[Graph, Cluster, int]) -> None:
    graph, cluster, batch_size = case
    refusal = ""
    candidates: tuple[Candidate, ...] = ()
    try:
        candidates = plan(graph, cluster, batch_size=batch_size, top=5, max_priced=60).candidates
    except NoPlanError as error:
        refusal = str(error)
    assert candidates or (graph.constraints and all(constraint.where in refusal for constraint in graph.constraints))
    for candidate in candidates:
        validate(candidate.plan, graph, cluster)
        assert candidate.cost.fits


def stages_of(graph: Graph, cluster: Cluster, batch_size: int = 24) -> Plan:
    best = plan(graph, cluster, batch_size=batch_size).best
    validate(best, graph, cluster)
    return best


def test_replicas_around_a_pipeline_of_annotated_stages() -> None:
    graph = blocks(8)
    graph = annotated(
        graph,
        Constraint(kind="replica", layers=whole(graph), devices=2),
        Constraint(kind="pipeline", layers=whole(graph), micro_batches=4, parent=0),
        Constraint(kind="stage", layers=(0, 1, 2), parent=1),
        Constraint(kind="stage", layers=(3, 4, 5, 6, 7), order=1, parent=1),
    )
    best = stages_of(graph, cluster_of(1, 8))
    assert [(stage.start, stage.stop) for stage in best.stages] == [(0, 3), (3, 8)]
    assert best.micro_batches in (4, 8)
    assert all(len(stage.replicas) * stage.lanes % 2 == 0 for stage in best.stages)


def test_stages_follow_their_own_annotations() -> None:
    graph = blocks(8)
    graph = annotated(
        graph,
        Constraint(kind="stage", layers=(0, 1, 2, 3)),
        Constraint(kind="stage", layers=(4, 5, 6, 7), order=1),
        Constraint(kind="replica", layers=(0, 1, 2, 3), devices=3, parent=0),
        Constraint(kind="split", layers=(4, 5, 6, 7), devices=4, uneven=False, parent=1),
    )
    first, second = stages_of(graph, cluster_of(1, 8)).stages
    assert len(first.replicas) * first.lanes == 3
    assert 4 in (second.tensor, second.lanes)


def test_a_split_of_the_whole_model_is_tensor_parallelism() -> None:
    graph = annotated(blocks(6), Constraint(kind="split", layers=tuple(range(6)), devices=4))
    best = stages_of(graph, cluster_of(1, 8))
    assert all(stage.tensor == 4 or stage.split == tuple(range(stage.start, stage.stop)) for stage in best.stages)


def test_replica_and_split_share_devices() -> None:
    graph = annotated(
        blocks(6),
        Constraint(kind="replica", layers=(0, 1, 2, 3, 4), devices=8),
        Constraint(kind="split", layers=(5,), devices=8),
    )
    (stage,) = stages_of(graph, cluster_of(1, 8)).stages
    assert (stage.lanes, stage.split, len(stage.replicas)) == (8, (5,), 1)


def test_the_exact_search_honours_annotations_too() -> None:
    graph = annotated(blocks(6), Constraint(kind="replica", layers=(0, 1, 2, 3, 4), devices=4), Constraint(kind="split", layers=(5,)))
    cluster = cluster_of(1, 4)
    planned = plan(graph, cluster, batch_size=16, top=3)
    assert planned.exact
    for candidate in planned.candidates:
        validate(candidate.plan, graph, cluster)


def test_experts_annotated_with_split_are_divided() -> None:
    graph = blocks(6, experts=True)
    layers = tuple(i for i, layer in enumerate(graph.layers) if layer.experts)
    best = stages_of(annotated(graph, Constraint(kind="split", layers=layers, devices=4)), cluster_of(1, 8))
    assert all(stage.expert and stage.lanes == 4 for stage in best.stages if set(layers) & set(range(stage.start, stage.stop)))


def test_what_cannot_be_honoured_is_an_error_that_names_the_lines() -> None:
    graph = annotated(blocks(6), Constraint(kind="replica", layers=(0, 1), devices=3), Constraint(kind="split", layers=(2, 3), devices=2))
    with pytest.raises(NoPlanError, match=r"honours all annotations: train\.py:10: replica\(3\), train\.py:11: split over 2 devices"):
        plan(graph, cluster_of(1, 3), batch_size=12)
    with pytest.raises(AnnotationError, match=r"train\.py:10: split over 8 devices needs 8 devices, but there are only 4"):
        plan(annotated(blocks(6), Constraint(kind="split", layers=(5,), devices=8)), cluster_of(1, 4), batch_size=12)


@pytest.mark.parametrize("network", ["1 Gbit/s", "50 Gbit/s"])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_heavy_classifier_is_split_without_being_told(hosts: int, network: str) -> None:
    chosen = preset("resnet50-100k")
    cluster = make_cluster("c", [make_site("a", kind="V100-32GB", hosts=hosts, devices=8, network=network)])
    planned = plan(chosen.graph, cluster, batch_size=64 * 8 * hosts, optimizer=chosen.optimizer, top=5)
    classifier = len(chosen.graph.layers) - 1
    assert any(classifier in stage.split for stage in planned.best.stages) or network == "1 Gbit/s"
    assert any(classifier in stage.split for candidate in planned.candidates for stage in candidate.plan.stages)
