"""The text form: exact round trip, short for large plans, errors that point at the place."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import PlanError
from atoll.plan import Plan, Replica, Stage, parse_plan, to_text
from atoll.plan.names import shorten
from tests.plan.strategies import any_plans, device_lists

HEAD = "plan v1 graph=g cluster=c batch=8 micro_batch=2\n"


@given(any_plans)
def test_any_plan_reads_back_equal(plan: Plan) -> None:
    assert parse_plan(to_text(plan)) == plan


@given(device_lists)
def test_shortened_names_expand_to_the_same_names_in_order(names: list[str]) -> None:
    text = f"{HEAD}stage 0: layers 0-1: ({' '.join(shorten(tuple(names)))})=1"
    assert list(parse_plan(text).stages[0].replicas[0].devices) == names


def test_names_are_shortened_as_people_would() -> None:
    assert shorten(tuple(f"oslo-{h}/{d}" for h in range(16) for d in range(8))) == ["oslo-[0-15]/[0-7]"]
    assert shorten(("n08", "n09", "n10", "n12")) == ["n[08-10,12]"]
    assert shorten(("a/1", "b/1", "b/2")) == ["a/1", "b/[1-2]"]
    assert shorten(("a b/0", "a b/1")) == ['"a b/"[0-1]']


def test_a_thousand_devices_take_a_line_a_stage() -> None:
    hosts = [f"oslo-{h}" for h in range(128)]
    replicas = tuple(Replica(devices=tuple(f"{host}/{d}" for d in range(8)), samples=(8,)) for host in hosts)
    stages = tuple(Stage(start=i * 12, stop=i * 12 + 12, replicas=replicas[i * 16 : i * 16 + 16], tensor=8) for i in range(8))
    text = to_text(Plan(graph="g", cluster="c", batch_size=128, micro_batch_size=8, stages=stages))
    assert text.splitlines()[1] == "stage 0: layers 0-11 tensor=8: 16x(oslo-[0-15]/[0-7])=8"
    assert len(text.splitlines()) == 9


def test_long_stages_continue_on_indented_lines() -> None:
    replicas = tuple(Replica(devices=(f"{letter * 30}/0",), samples=(i + 1,)) for i, letter in enumerate("abcdefgh"))
    plan = Plan(graph="g", cluster="c", batch_size=36, micro_batch_size=1, stages=(Stage(start=0, stop=1, replicas=replicas),))
    assert max(map(len, to_text(plan).splitlines())) <= 110
    assert parse_plan(to_text(plan)) == plan


def test_comments_blank_lines_and_windows_line_ends_are_read() -> None:
    text = f"# mine\n\n{HEAD}\n  # about stage 0\nstage 0: layers 0-3: # devices follow\n   a/0=4\n\n   a/1=4 # done\n\n"
    assert parse_plan(text) == parse_plan(text.replace("\n", "\r\n"))
    assert [replica.devices for replica in parse_plan(text).stages[0].replicas] == [("a/0",), ("a/1",)]


ERRORS = {
    "": "1:1: expected a first line that begins with 'plan'",
    "plan v2 graph=g": "1:7: this is a plan of version 2; this Atoll reads version 1",
    "plan v1 graph=g cluster=c batch=8": "expected micro_batch=… on the plan's first line, found the end of the line",
    "plan v1 graph=g graph=h": "1:17: graph is given twice",
    "plan v1 grap=g": "1:9: expected a field of the plan",
    "plan v1 mode=lockstap": "perhaps 'lockstep', found 'lockstap'",
    "plan v1 batch=x": "1:15: expected a whole number for batch, found 'x'",
    HEAD + "stag 0": "2:1: expected a line that begins with 'stage' or 'codec' (stage, codec) — perhaps 'stage', found 'stag'",
    HEAD + "stage 1: layers 0-1: a=1": "2:7: expected stage 0, found stage 1",
    HEAD + "stage 0 layers": "2:9: expected ':' after the number of the stage, found 'layers'",
    HEAD + "stage 0: layers 0-": "expected the last layer, found the end of the line",
    HEAD + "stage 0: layers 0-1 sharded sharded: a=1": "2:29: sharded is given twice",
    HEAD + "stage 0: layers 0-1 shardd: a=1": "perhaps 'sharded', found 'shardd'",
    HEAD + "stage 0: layers 0-1 tensor=2": "expected an option of the stage or ':' and its replicas, found the end of the line",
    HEAD + "stage 0: layers 0-1: a": "expected '=' and the samples of the replica after its devices, found the end of the line",
    HEAD + "stage 0: layers 0-1: a=": "expected a number of samples, found the end of the line",
    HEAD + "stage 0: layers 0-1: 2x(a b c)=1": "2:22: 3 devices do not divide evenly over 2 replicas",
    HEAD + "stage 0: layers 0-1: 0x(a)=1": "do not divide evenly over 0 replicas",
    HEAD + 'stage 0: layers 0-1: "a=1': "2:22: this quoted name does not end on its line",
    HEAD + r'stage 0: layers 0-1: "\q"=1': "2:22: this quoted name is not a valid JSON string",
    HEAD + "stage 0: layers 0-1: a[3-1]=1": "2:24: a range must not run backwards, got 3-1",
    HEAD + "stage 0: layers 0-1: a[x]=1": "2:24: expected a number or a range such as 0-7 after '[', found 'x'",
    HEAD + "stage 0: layers 0-1: a[0-999999999999]=1": "2:24: this range stands for more than 1,000,000 names",
    HEAD + "stage 0: layers 0-1: [0-9999][0-9999]=1": "2:22: this pattern stands for 100,000,000 names",
    HEAD + "stage 0: layers 0-1: a=0*3": "2:24: expected a number of lanes before '*', found 0",
    HEAD + "stage 0: layers 0-1: a=1@": "expected a tensor share, found the end of the line",
    HEAD + "codec int9: a": "perhaps 'int8', found 'int9'",
    HEAD + "codec int8: a a": "2:15: link 'a' has two codecs",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_say_where_and_what_was_expected(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, "my.plan")
    assert str(caught.value).startswith("my.plan:")
    assert ERRORS[text] in str(caught.value)
    assert str(caught.value).splitlines()[-1].strip() == "^"


@given(
    any_plans,
    st.integers(0, 10_000),
    st.sampled_from(["", "x", "=", ":", "[", "]", "(", ")", '"', "\n", "-", "*", "9" * 12, "#", "\\", "²", "\x00"]),
)
def test_a_slip_of_the_pen_is_a_plan_or_a_plan_error(plan: Plan, place: int, slip: str) -> None:
    text = to_text(plan)
    place %= len(text) + 1
    with suppress(PlanError):
        parse_plan(text[:place] + slip + text[place + 1 :])
