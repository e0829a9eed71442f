"""Differences of plans: none exactly when they are equal, and in words otherwise."""

import json

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.graph import Graph
from atoll.plan import Plan, diff, parse_plan
from tests.plan.strategies import any_plans, stages, valid_cases

GOOD = """plan v1 graph=g cluster=c batch=8 micro_batch=2
codec int8: s0–s1
stage 0: layers 0-1 tensor=2: 2x(s0-0/[0-3])=4
stage 1: layers 2-5 sharded: s0-1/[0-1]=2*2 s0-1/[2-3]=2*2
"""


@given(any_plans, any_plans)
def test_the_difference_is_empty_exactly_for_equal_plans(a: Plan, b: Plan) -> None:
    assert bool(diff(a, b)) == (a != b)
    assert not diff(a, a)


@given(any_plans, st.data())
def test_a_small_change_is_noticed(plan: Plan, data: st.DataObject) -> None:
    """Change one field of one stage or replica, the way a hand does."""
    if not plan.stages:
        return
    index = data.draw(st.integers(0, len(plan.stages) - 1))
    stage, other = plan.stages[index], data.draw(stages)
    field = data.draw(st.sampled_from(["start", "stop", "tensor", "sharded", "expert", "recompute", "replicas", "one"]))
    if field == "one" and stage.replicas and other.replicas:
        part = data.draw(st.sampled_from(["devices", "samples", "tensor_shares"]))
        changed = replace(stage.replicas[0], **{part: getattr(other.replicas[0], part)})
        new = replace(stage, replicas=(changed, *stage.replicas[1:]))
    else:
        new = stage if field == "one" else replace(stage, **{field: getattr(other, field)})
    after = replace(plan, stages=(*plan.stages[:index], new, *plan.stages[index + 1 :]))
    changes = diff(plan, after).changes
    assert bool(changes) == (plan != after)
    assert all(change.stage == index for change in changes)


@given(valid_cases())
def test_equal_plans_say_so(case: tuple[Plan, Graph, Cluster]) -> None:
    assert str(diff(case[0], case[0])) == "the plans are equal"


def changed(*replacements: tuple[str, str]) -> str:
    text = GOOD
    for before, after in replacements:
        assert before in text
        text = text.replace(before, after)
    return str(diff(parse_plan(GOOD), parse_plan(text)))


def test_changes_are_said_in_words() -> None:
    assert changed(("micro_batch=2", "micro_batch=4 schedule=gpipe")) == "schedule: 1f1b → gpipe\nmicro-batch size: 2 → 4"
    assert changed(("codec int8", "codec bf16")) == "codec of link s0–s1: int8 → bf16"
    assert changed(("codec int8: s0–s1\n", "")) == "codec of link s0–s1: int8 → not named"
    assert changed(("0-1 t", "0-2 t"), ("2-5", "3-5")) == "stage 0: layers 0-1 → 0-2 (1 more)\nstage 1: layers 2-5 → 3-5 (1 fewer)"
    assert changed(("tensor=2", "tensor=2 recompute")) == "stage 0: inside a replica tensor 2 → tensor 2 · recompute"
    assert changed(("s0-1/[2-3]", "s1-1/[2-3]")) == "stage 1: 2 devices added: s1-1/[2-3]\nstage 1: 2 devices removed: s0-1/[2-3]"
    assert changed(("s0-1/[2-3]=2*2", "s0-1/[2-3]=3,1")) == "stage 1: samples 2×(2*2) → 2*2 3,1"
    assert changed(("[0-3])=4", "[0-3])=4@3:1")) == "stage 0: tensor shares equal → 3:1"
    assert changed(("2x(s0-0/[0-3])", "2x(s0-0/[0,2,1,3])")) == "stage 0: the same devices form other replicas"


def test_another_number_of_stages_is_told_by_its_layers_and_devices() -> None:
    one = parse_plan("plan graph=g cluster=c batch=8 micro_batch=2\ncodec int8: s0–s1\nstage 0: layers 0-5: s0-0/[0-4]=5*2")
    assert str(diff(parse_plan(GOOD), one)) == (
        "stages: 2 → 1, now of layers 0-5 (were 0-1 | 2-5)\nthe plan: 1 device added: s0-0/4\nthe plan: 4 devices removed: s0-1/[0-3]"
    )


def test_differences_are_json() -> None:
    raw = json.loads(diff(parse_plan(GOOD), parse_plan(GOOD.replace("0-1 t", "0-2 t"))).to_json())
    assert raw == {"changes": [{"kind": "layers", "stage": 0, "text": "stage 0: layers 0-1 → 0-2 (1 more)"}]}


def deep(stages: int, samples: str, shift: int = 0, size: int = 1) -> Plan:
    rows = [f"stage {s}: layers {s * size}-{s * size + size - 1}: a-{(s + shift) % 60}/0={samples}" for s in range(stages)]
    return parse_plan("\n".join(["plan graph=g cluster=c batch=8 micro_batch=2", *rows]))


def test_the_same_difference_in_many_stages_is_one_line() -> None:
    assert str(diff(deep(48, "8"), deep(48, "6"))) == "stages 0–47: samples 8 → 6"
    assert len(diff(deep(48, "8"), deep(48, "6")).changes) == 48
    assert diff(deep(48, "8"), deep(48, "6", shift=2)).lines() == (
        "stages 0–47: 1 device added: a-2/0 … 1 device added: a-49/0",
        "stages 0–47: 1 device removed: a-0/0 … 1 device removed: a-47/0",
        "stages 0–47: samples 8 → 6",
    )
    assert len(diff(deep(3, "8"), deep(3, "6")).lines()) == 3


def test_many_stages_are_not_all_listed() -> None:
    (line, *_) = diff(deep(48, "8"), deep(24, "8", size=2)).lines()
    assert line == (
        "stages: 48 → 24, now of layers 0-1 | 2-3 | 4-5 | 6-7 | 8-9 | 10-11 | … | 46-47 "
        "(were 0-0 | 1-1 | 2-2 | 3-3 | 4-4 | 5-5 | … | 47-47)"
    )
