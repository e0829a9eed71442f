"""The rules of a plan: random valid plans pass, and each way to break one gets a sentence and a marked cell."""

from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.errors import PlanError
from atoll.graph import Constraint, Graph
from atoll.plan import Plan, Replica, Stage, parse_plan, to_text, validate
from atoll.plan.modes.swarm import SWARM as RULES
from tests.plan.strategies import any_plans, make_cluster, make_graph, valid_cases

HEAD = "plan v1 graph=g cluster=c batch=8 micro_batch=2"
GOOD = f"{HEAD}\nstage 0: layers 0-1 tensor=2: 2x(s0-0/[0-3])=4\nstage 1: layers 2-5 sharded: s0-1/[0-1]=2*2 s0-1/[2-3]=2*2\n"
CLUSTER = make_cluster(hosts=2, devices=4, sites=2)
GRAPH = make_graph(6)


@given(valid_cases())
def test_valid_plans_are_valid(case: tuple[Plan, Graph, Cluster]) -> None:
    plan, graph, cluster = case
    validate(plan)
    validate(plan, graph, cluster)


@given(any_plans)
def test_any_plan_is_valid_or_gets_a_plan_error_with_one_marked_cell(plan: Plan) -> None:
    try:
        validate(plan, GRAPH, CLUSTER)
    except PlanError as error:
        sentence, table = str(error).split("\n\n", 1)
        assert sentence
        assert table.count("▶") == 1 or "▶" in to_text(plan)


PLAN_ERRORS = {
    HEAD: ("the plan has no stage", "▶none◀"),
    GOOD.replace("batch=8 ", "batch=0 "): ("batch must be at least 1, got 0", "batch ▶0◀"),
    GOOD.replace("micro_batch=2", "micro_batch=-1"): ("micro_batch must be at least 1", "▶-1◀"),
    GOOD.replace("micro_batch=2", "micro_batch=9"): ("a micro-batch of 9 is larger than the batch of 8", "▶9◀"),
    GOOD.replace("=2\n", "=2 staleness=1\n", 1): ("staleness=1: mode lockstep reduces gradients before the next step", "▶1◀"),
    GOOD.replace("layers 2-5", "layers 3-5"): ("layer 2 is in no stage: stage 1 begins at layer 3", "▶3-5◀"),
    GOOD.replace("layers 2-5", "layers 4-5"): ("layers 2-3 are in no stage", "▶4-5◀"),
    GOOD.replace("layers 2-5", "layers 1-5"): ("stages 0 and 1 are overlapping: stage 1 must begin at layer 2, not 1", "▶1-5◀"),
    GOOD.replace("layers 2-5", "layers 0-0").replace("layers 0-1", "layers 1-5"): ("layer 0 is in no stage", "▶1-5◀"),
    GOOD.replace("layers 2-5", "layers 2-1"): ("stage 1 has no layers", "▶2-1◀"),
    GOOD.replace("tensor=2", "tensor=0"): ("stage 0: tensor must be at least 1", "▶tensor 0◀"),
    GOOD.replace("2x(s0-0/[0-3])=4", ""): ("stage 0 has no replica", "▶none◀"),
    GOOD.replace("tensor=2", "tensor=4"): ("stage 0, replica 0: 2 devices do not form lanes of tensor=4", "▶1 × 2◀"),
    GOOD.replace("s0-1/[2-3]=2*2", "s0-1/2=4"): ("stage 1, replica 1: it has 1 devices but replica 0 has 2", "▶1 × 1◀"),
    GOOD.replace("s0-1/[2-3]=2*2", "s0-1/[2-3]=4"): ("2 devices are 2 lanes of 1, but samples has 1 entries", "▶4◀"),
    GOOD.replace("[0-3])=4", "[0-3])=4@1:2:3"): ("stage 0, replica 0: 3 tensor shares for tensor=2", "▶1:2:3◀"),
    GOOD.replace("[0-3])=4", "[0-3])=4@1:0"): ("tensor shares must be at least 1", "▶1:0◀"),
    GOOD.replace("tensor=2", "tensor=2 sharded"): ("stage 0 is sharded but a replica has one lane", "▶tensor 2 · sharded 1◀"),
    GOOD.replace("tensor=2", "tensor=2 expert"): ("stage 0 is expert but a replica has one lane", "▶tensor 2 · expert 1◀"),
    GOOD.replace("s0-1/[2-3]=2*2", "s0-1/[2-3]=-2,6"): ("stage 1, replica 1: samples must not be negative", "▶-2,6◀"),
    GOOD.replace("s0-1/[2-3]=2*2", "s0-1/[2-3]=2*0"): ("it takes no samples", "▶2*0◀"),
    GOOD.replace("s0-1/[2-3]=2*2", "s0-1/[2-3]=2,4"): ("stage 1: its replicas take 10 samples, but the batch has 8", "▶10/8◀"),
    GOOD.replace("s0-1/[0-1]=2*2 s0-1/[2-3]=2*2", "s0-1/[0-1]=1,2 s0-1/[2-3]=2,3"): (
        "stage 1, replica 1: with several stages a replica takes whole micro-batches of 2, not 5 samples",
        "▶2,3◀",
    ),
    GOOD.replace("s0-1/[2-3]", "s0-1/[1-2]"): ("stage 1: device 's0-1/1' is in replica 0 and again in replica 1", "▶s0-1/1◀ s0-1/2"),
    GOOD.replace("s0-1/[2-3]", "s0-0/[2-3]"): (
        "device 's0-0/2' is in stage 0 and in stage 1; stages share devices only under schedule interleaved, not 1f1b",
        "▶s0-0/2◀ s0-0/3",
    ),
    GOOD.replace("s0-1/[2-3]", "s0-0/[2-3]").replace("batch=8", "batch=8 schedule=interleaved", 1): (
        "stages that share devices must have the same replicas",
        "▶s0-0/2◀",
    ),
    GOOD.replace("cluster=c", "cluster=d"): ("the plan was made for cluster 'd', not 'c'", "cluster ▶d◀"),
    GOOD.replace("graph=g", "graph=h"): ("the plan was made for graph 'h', not 'g'", "graph ▶h◀"),
    GOOD.replace("s0-1/[2-3]", "s0-1/[3-4]"): ("stage 1: the cluster has no device 's0-1/4'; did you mean 's0-1/", "s0-1/3 ▶s0-1/4◀"),
    GOOD + "codec int8: s0–s2": (
        "codecs: 's0–s2' is not in the cluster; codecs are for links between sites; did you mean 's0–s1'?",
        "codec s0–s2 ▶int8◀",
    ),
    GOOD + "codec int8: s0": ("codecs: 's0' is inside a site; codecs are for links between sites", "codec s0 ▶int8◀"),
    GOOD.replace("layers 2-5", "layers 2-4"): ("layers 5-5 are in no stage: g has 6 layers, 0-5", "▶2-4◀"),
    GOOD.replace("layers 2-5", "layers 2-6"): ("there is no layer 6", "▶2-6◀"),
}


@pytest.mark.parametrize("text", PLAN_ERRORS)
def test_each_broken_rule_has_its_sentence_and_its_cell(text: str) -> None:
    sentence, cell = PLAN_ERRORS[text]
    with pytest.raises(PlanError) as caught:
        validate(parse_plan(text), GRAPH, CLUSTER)
    message = str(caught.value)
    assert sentence in message.split("\n\n")[0]
    assert cell in message.split("\n\n", 1)[1]
    assert message.count("▶") == 1


def test_the_good_plan_is_good() -> None:
    validate(parse_plan(GOOD), GRAPH, CLUSTER)


def test_the_last_smaller_micro_batch_goes_to_one_replica() -> None:
    text = (
        GOOD.replace("batch=8", "batch=9", 1)
        .replace("2x(s0-0/[0-3])=4", "s0-0/[0-1]=4 s0-0/[2-3]=5")
        .replace("s0-1/[2-3]=2*2", "s0-1/[2-3]=2,3")
    )
    validate(parse_plan(text), GRAPH, CLUSTER)


def test_one_stage_may_take_any_shares() -> None:
    validate(parse_plan(f"{HEAD}\nstage 0: layers 0-5: s0-0/0=3 s0-0/1=5"), GRAPH, CLUSTER)


def test_virtual_stages_share_devices_under_the_interleaved_schedule() -> None:
    stages = "".join(f"stage {i}: layers {i}-{i}: 2x(s0-{i % 2}/[0-1])=4\n" for i in range(6))
    validate(parse_plan(f"{HEAD} schedule=interleaved\n{stages}"), GRAPH, CLUSTER)


def test_repeating_lanes_are_allowed() -> None:
    validate(parse_plan(f"{HEAD}\nstage 0: layers 0-5: s0-0/[0-3]=4*2"), GRAPH, CLUSTER)


GRAPH_ERRORS: list[tuple[str, Graph, str, str]] = [
    (GOOD, make_graph(6, cut=False), "stage 1: g cannot be cut between 'h.1' and 'h.2'; it has no legal cut", "▶2-5◀"),
    (GOOD, make_graph(6, tensor_units=1), "stage 0: tensor=2, but none of its layers can be split", "▶tensor 2◀"),
    (
        GOOD.replace("tensor=2: 2x", "tensor=4: 1x").replace("[0-3])=4", "[0-3])=8"),
        make_graph(6, tensor_units=3),
        "stage 0: layer 'h.0' splits into at most 3 parts, not 4",
        "▶tensor 4◀",
    ),
    (GOOD.replace("sharded", "expert"), make_graph(6, experts=0), "stage 1 is expert, but none of its layers has experts", "▶expert 2◀"),
    (GOOD.replace("sharded", "expert"), make_graph(6, experts=1), "stage 1: 2 lanes cannot divide 1 experts", "▶expert 2◀"),
]


@pytest.mark.parametrize(("text", "graph", "sentence", "cell"), GRAPH_ERRORS)
def test_a_plan_must_fit_its_graph(text: str, graph: Graph, sentence: str, cell: str) -> None:
    with pytest.raises(PlanError) as caught:
        validate(parse_plan(text), graph, CLUSTER)
    assert sentence in str(caught.value)
    assert cell in str(caught.value)


def test_the_nearest_legal_cut_is_offered() -> None:
    layers = tuple(replace(layer, cut=i == 2) for i, layer in enumerate(GRAPH.layers))
    with pytest.raises(PlanError, match="the nearest legal cut is before layer 3"):
        validate(parse_plan(GOOD), Graph.from_layers("g", layers))


def annotated(*constraints: dict[str, Any], **fields: Any) -> Graph:
    return replace(
        make_graph(6, **{"experts": 0, **fields}), constraints=tuple(Constraint(**{"where": "t.py:3", **c}) for c in constraints)
    )


CONSTRAINTS: list[tuple[Graph, str, str]] = [
    (
        annotated({"kind": "stage", "layers": (0, 1, 2)}),
        "the annotation stage at t.py:3 makes one stage of layers that stages 0 and 1 divide",
        "▶2-5◀",
    ),
    (annotated({"kind": "stage", "layers": (0,)}, {"kind": "stage", "layers": (1,), "order": 1}), "are both in stage 0", "▶0-1◀"),
    (
        annotated({"kind": "replica", "layers": (2, 3), "devices": 3}),
        "asks for 3 copies, stage 1 makes 4 (replicas × lanes)",
        "▶sharded 2◀",
    ),
    (
        annotated({"kind": "replica", "layers": (2, 3), "devices": 3}, {"kind": "replica", "layers": (2, 3), "parent": 0}),
        "asks for 3 copies, stage 1 makes 4",
        "▶sharded 2◀",
    ),
    (
        annotated({"kind": "replica", "layers": (2,), "devices": 3}, {"kind": "pipeline", "layers": (2,), "micro_batches": 2, "parent": 0}),
        "asks for 3 copies",
        "▶sharded 2◀",
    ),
    (annotated({"kind": "split", "layers": (2, 3)}), "asks for layer 'h.2' to be divided, stage 1 does not", "▶sharded 2◀"),
    (annotated({"kind": "split", "layers": (0,), "devices": 4}), "asks for 4 parts, stage 0 makes 2", "▶tensor 2◀"),
    (annotated({"kind": "split", "layers": (0,), "uneven": False}, tensor_units=3), "layer 'h.0' has 3 units for tensor=2", "▶tensor 2◀"),
    (annotated({"kind": "replica", "layers": (0, 1)}), "keeps layer 'h.0' whole, stage 0 splits it", "▶tensor 2◀"),
    (annotated({"kind": "pipeline", "layers": (0, 1), "micro_batches": 8}), "asks for 8 micro-batches, the plan makes 4", "▶2◀"),
]


@pytest.mark.parametrize(("graph", "sentence", "cell"), CONSTRAINTS)
def test_annotations_are_honoured(graph: Graph, sentence: str, cell: str) -> None:
    with pytest.raises(PlanError) as caught:
        validate(parse_plan(GOOD), graph, CLUSTER)
    assert sentence in str(caught.value)
    assert cell in str(caught.value)


def test_honoured_annotations_pass() -> None:
    graph = annotated(
        {"kind": "pipeline", "layers": (0, 1, 2, 3, 4, 5), "micro_batches": 4},
        {"kind": "stage", "layers": (0, 1), "parent": 0},
        {"kind": "stage", "layers": (2, 3), "order": 1, "parent": 0},
        {"kind": "replica", "layers": (0, 1), "parent": 1},
        {"kind": "split", "layers": (0, 1), "devices": 2, "uneven": False, "parent": 3},
        {"kind": "replica", "layers": (2, 3, 4, 5), "devices": 2, "parent": 2},
        {"kind": "replica", "layers": (2, 3, 4, 5), "devices": 2, "parent": 5},
    )
    validate(parse_plan(GOOD), graph, CLUSTER)


def test_micro_batches_are_counted_for_each_copy_of_the_pipeline() -> None:
    whole = (0, 1, 2, 3, 4, 5)
    graph = annotated(
        {"kind": "replica", "layers": whole, "devices": 2}, {"kind": "pipeline", "layers": whole, "micro_batches": 2, "parent": 0}
    )
    validate(parse_plan(GOOD), graph, CLUSTER)


HYBRID = GOOD.replace("sharded", "split=4-5")


def test_lanes_may_split_layers_beside_replicas() -> None:
    graph = annotated(
        {"kind": "replica", "layers": (2, 3), "devices": 4}, {"kind": "split", "layers": (4, 5), "devices": 2, "uneven": False}
    )
    validate(parse_plan(HYBRID), graph, CLUSTER)
    with pytest.raises(PlanError, match=r"keeps layer 'h\.4' whole, stage 1 splits it"):
        validate(parse_plan(HYBRID), annotated({"kind": "replica", "layers": (2, 3, 4), "devices": 4}), CLUSTER)
    with pytest.raises(PlanError, match="has 3 units for 2 lanes"):
        validate(parse_plan(HYBRID), annotated({"kind": "split", "layers": (4,), "uneven": False}, tensor_units=3), CLUSTER)


@pytest.mark.parametrize(
    ("text", "units", "sentence"),
    [
        (GOOD.replace("tensor=2: 2x(s0-0/[0-3])=4", "tensor=2 split=1: s0-0/[0-3]=2*4"), 8, "lanes divide layers only where tensor=1"),
        (GOOD.replace("tensor=2", "tensor=1 split=1").replace("[0-3])=4", "[0-1])=4"), 8, "a replica has one lane"),
        (HYBRID.replace("4-5", "1,4"), 8, "stage 1 runs layers 2-5, but splits layer 1"),
        (HYBRID.replace("4-5", "5,4"), 8, "split layers must ascend, got 5,4"),
        (HYBRID.replace("tensor=2", "").replace("[0-3])=4", "[0-1])=4"), 1, "2 lanes split layer 'h.4', which cannot be split"),
        (HYBRID.replace("split", "expert split"), 8, "lanes divide the experts of layer 'h.4', so they cannot split it too"),
    ],
)
def test_split_layers_have_rules(text: str, units: int, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        validate(parse_plan(text), annotated(tensor_units=units, experts=8), CLUSTER)
    assert sentence in str(caught.value)
    assert "▶" in str(caught.value)


def test_a_split_of_a_layer_with_experts_divides_the_experts() -> None:
    graph = annotated({"kind": "split", "layers": (0,), "devices": 2}, {"kind": "split", "layers": (3,), "devices": 2}, experts=8)
    with pytest.raises(PlanError, match="asks for 2 parts, stage 0 makes 1"):
        validate(parse_plan(GOOD), graph, CLUSTER)  # tensor parallelism leaves the experts whole
    text = GOOD.replace("tensor=2: 2x(s0-0/[0-3])=4", "expert: 2x(s0-0/[0-3])=2,2").replace("sharded", "sharded expert")
    validate(parse_plan(text), graph, CLUSTER)


def test_unequal_shares_can_be_forbidden() -> None:
    plan = parse_plan(GOOD.replace("[0-3])=4", "[0-3])=4@3:1"))
    validate(plan, annotated({"kind": "split", "layers": (0,)}))
    with pytest.raises(PlanError, match="forbids unequal shares"):
        validate(plan, annotated({"kind": "split", "layers": (0,), "uneven": False}))


def test_the_table_of_a_large_plan_is_short_and_shows_the_wrong_device() -> None:
    replicas = tuple(Replica(devices=tuple(f"n-{h}/{d}" for d in range(8)), samples=(h + 1,)) for h in range(128))
    wrong = replace(replicas[77], devices=("n-0/3", *replicas[77].devices[1:]))
    stage = Stage(start=0, stop=6, replicas=(*replicas[:77], wrong, *replicas[78:]), tensor=8)
    with pytest.raises(PlanError) as caught:
        validate(Plan(graph="g", cluster="c", batch_size=128 * 129 // 2, micro_batch_size=1, stages=(stage,)))
    assert "▶n-0/3◀ n-77/[1-7]" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 15


def test_of_many_stages_those_around_the_wrong_one_are_shown() -> None:
    rows = [f"stage {s}: layers {s}-{s}: s0-{s}/0={7 if s == 30 else 8}" for s in range(48)]
    with pytest.raises(PlanError) as caught:
        validate(parse_plan("\n".join(["plan graph=g cluster=c batch=8 micro_batch=2", *rows])))
    table = str(caught.value).splitlines()[4:]
    assert [line.split()[0] for line in table] == ["0", "…", "27", "28", "29", "30", "31", "32", "33", "…", "47"]
    assert "▶7/8◀" in table[5]


SWARM = "plan v1 graph=g cluster=c mode=swarm schedule={schedule} batch=8 micro_batch=4{fields}\nstage 0: layers 0-1: a/0=8\n{last}\n"


@pytest.mark.parametrize(
    ("last", "fields", "sentence", "marked"),
    [
        ("stage 1: layers 2-3 tensor=2: b/[0-1]=8", "", "stage 1: a swarm's worker holds a whole stage by itself; tensor", "▶tensor 2◀"),
        ("stage 1: layers 2-3 expert: b/[0-1]=2*4", "", "tensor, expert and split parallelism inside stages are not run", "▶expert 2◀"),
        (
            "stage 1: layers 2-3 split=3: b/[0-1]=2*4",
            "",
            "tensor, expert and split parallelism inside stages are not run",
            "▶lanes 2 · split 3◀",
        ),
        ("stage 1: layers 2-3 sharded: b/[0-1]=2*4", "", "holds a whole stage by itself; leave out `sharded`", "▶sharded 2◀"),
        (
            "stage 1: layers 2-3: (b/0 c/0)=2*4",
            "",
            "a swarm's worker is on one host, but a replica is on b and c; make them 2 replicas",
            "▶",
        ),
        ("stage 1: layers 2-3: b/0=8", " staleness=2", "staleness=2: a swarm's reductions may lag by one step at most", "▶2◀"),
        ("stage 1: layers 2-3: a/[0-1]=2*4", "", "stage 1: a/0 works with other devices than in an earlier stage", "▶a/0◀"),
    ],
)
def test_what_no_swarm_can_run_is_refused_in_mode_swarm_only(last: str, fields: str, sentence: str, marked: str) -> None:
    schedule = "interleaved" if "a/[0-1]" in last else "1f1b"
    plan = parse_plan(SWARM.format(schedule=schedule, fields=fields, last=last))
    with pytest.raises(PlanError) as caught:
        validate(plan)
    assert sentence in str(caught.value).split("\n\n")[0] == RULES.why_not(plan)
    assert marked in str(caught.value)
    if schedule == "1f1b":
        validate(replace(plan, mode="lockstep", staleness=0))


def test_in_a_swarm_a_device_may_be_in_several_stages() -> None:
    """Its worker hosts them; in lockstep only virtual stages share devices."""
    stages = "stage 0: layers 0-1: a/0=4\nstage 1: layers 2-3: a/0=2 a/1=2\n"
    validate(parse_plan(f"plan v1 graph=g cluster=c mode=swarm schedule=interleaved batch=4 micro_batch=2\n{stages}"))
    with pytest.raises(PlanError, match="must have the same replicas"):
        validate(parse_plan(f"plan v1 graph=g cluster=c schedule=interleaved batch=4 micro_batch=2\n{stages}"))
