"""The JSON form and files."""

import json
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import PlanError
from atoll.plan import Plan, Replica, Stage, load_plan, save_plan, to_text
from tests.plan.strategies import any_plans

PLAN = Plan(
    graph="g",
    cluster="c",
    batch_size=8,
    micro_batch_size=2,
    codecs={"a–b": "int8"},
    stages=(Stage(start=0, stop=4, replicas=(Replica(devices=("a/0",), samples=(8,)),)),),
)


@given(any_plans)
def test_any_plan_reads_back_equal(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_the_format_is_written_first_and_may_be_left_out() -> None:
    raw = json.loads(PLAN.to_json())
    assert next(iter(raw.items())) == ("format", 1)
    del raw["format"]
    assert Plan.from_json(json.dumps(raw)) == PLAN


def _broken(path: list[str | int], value: object) -> bytes:
    raw = json.loads(PLAN.to_json())
    place = raw
    for key in path[:-1]:
        place = place[key]
    if value is None:
        place.pop(path[-1], None) if isinstance(place, dict) else place.pop()
    else:
        place[path[-1]] = value
    return msgspec.json.encode(raw)


ERRORS: list[tuple[list[str | int], object, str]] = [
    (["format"], 9, "format: this Atoll reads format 1, got 9"),
    (["batch_sise"], 3, "batch_sise: there is no such field; did you mean 'batch_size'?"),
    (["stages", 0, "tensr"], 3, "stages[0].tensr: there is no such field; did you mean 'tensor'?"),
    (
        ["stages", 0, "replicas", 0, "zzz"],
        3,
        "stages[0].replicas[0].zzz: there is no such field; there are devices, samples, tensor_shares",
    ),
    (["stages", 0, "start"], "x", "stages[0].start: expected a whole number, got a string"),
    (["stages", 0, "replicas", 0, "samples", 0], "x", "stages[0].replicas[0].samples[0]: expected a whole number, got a string"),
    (["stages", 0, "replicas"], 3, "stages[0].replicas: expected a list, got a whole number"),
    (["stages", 0, "stop"], None, "stages[0].stop: this field is missing"),
    (["graph"], None, "graph: this field is missing"),
    (["mode"], "lockstap", "mode: 'lockstap' is not one of its values; did you mean 'lockstep'?"),
    (["codecs", "a–b"], "int9", "codecs.a–b: 'int9' is not one of its values; did you mean"),
    (["codecs", "a–b"], 3, "expected a string, got a whole number"),
]


@pytest.mark.parametrize(("path", "value", "message"), ERRORS)
def test_a_wrong_field_is_named_by_its_path(path: list[str | int], value: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(_broken(path, value), "p.json")
    assert str(caught.value).startswith("p.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff\xfe", '{"graph": "\ud800"}'.encode("utf-8", "surrogatepass")])
def test_what_is_no_plan_at_all_is_refused(text: "str | bytes") -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


@pytest.mark.parametrize("name", ["p.json", "p.plan", "p.txt"])
def test_saved_plans_load_equal_and_leave_nothing_beside_them(tmp_path: Path, name: str) -> None:
    save_plan(PLAN, tmp_path / name)
    save_plan(PLAN, tmp_path / name)
    assert load_plan(tmp_path / name) == PLAN
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text().startswith("{") == (name == "p.json")


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: cannot read the plan: no such file or directory"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="is a directory"):
        load_plan(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(PlanError, match="binary: cannot read the plan: the file is not UTF-8 text"):
        load_plan(tmp_path / "binary")
    (tmp_path / "bad.txt").write_text(to_text(PLAN).replace("stage 0", "stage 1"))
    with pytest.raises(PlanError, match=r"bad\.txt:3:7: expected stage 0"):
        load_plan(tmp_path / "bad.txt")
    with pytest.raises(PlanError, match="cannot write the plan: no such file or directory"):
        save_plan(PLAN, tmp_path / "nowhere" / "p.json")


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["stages", "graph", "start", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from([*ERRORS]), values)
def test_any_value_anywhere_is_a_plan_or_a_plan_error(error: tuple[list[str | int], object, str], value: object) -> None:
    with suppress(PlanError):
        Plan.from_json(_broken(error[0], value))
