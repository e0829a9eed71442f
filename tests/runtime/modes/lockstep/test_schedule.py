"""The language: what it prints, what it reads, what it refuses."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ScheduleError
from atoll.runtime.modes.lockstep.schedule import Action, Kind, Schedule, Workers

numbers = st.integers(0, 999_999_999)
actions = st.one_of(
    st.builds(Action, st.sampled_from(get_args(Kind)[:6]), numbers, numbers), st.builds(Action, st.just("G"), numbers), st.just(Action("O"))
)
schedules = st.lists(st.lists(actions, max_size=8).map(tuple), max_size=5).map(lambda rows: Schedule(tuple(rows)))


@given(schedules)
def test_a_schedule_prints_and_reads_back_equal(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


@given(actions)
def test_an_action_is_one_word(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert str(action).split() == [str(action)]


@given(st.one_of(st.text(max_size=8), st.text(alphabet="0129FBRSGO ", max_size=6)))
def test_any_other_word_is_refused(text: str) -> None:
    try:
        action = Action.parse(text)
    except ScheduleError:
        return
    assert str(action) == text


@given(st.one_of(st.text(max_size=30), st.text(alphabet="01: FBO#\n", max_size=30)))
def test_any_text_is_read_or_refused(text: str) -> None:
    message = "schedule: "
    try:
        Schedule.parse(text)
    except ScheduleError as error:
        message = str(error)
    assert message.startswith("schedule: ")


def test_words_are_as_documented() -> None:
    assert str(Schedule.parse("0: 0F0 0SF0 0RB0 0B0 0G O  # a comment\n\n1: 1RF0 1F0 1B0 1SB0 1G O")) == (
        "0: 0F0 0SF0 0RB0 0B0 0G O\n1: 1RF0 1F0 1B0 1SB0 1G O"
    )
    assert Action.parse("2RF0") == Action("RF", 2, 0)
    assert Action.parse("12G") == Action("G", 12)
    assert Action("SF", 2, 7).received_as == Action("RF", 3, 7)
    assert Action("RB", 2, 7).sent_as == Action("SB", 3, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0: 0F0 0X0",
            "line 1: cannot read '0X0' as an action; there are 2F0, 2B0, 2RF0, 2SF0, 2RB0, 2SB0 (stage 2, micro-batch 0), 2G and O",
        ),
        ("0: O\n2: O", "line 2: expected the line of worker 1"),
        ("0F0", "line 1: expected the line of worker 0, such as '0: 0F0 0B0 0G O'"),
        ("0: 00F1", "cannot read '00F1'"),
    ],
)
def test_mistakes_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text, "steps.txt")
    assert str(caught.value).startswith("steps.txt: ")
    assert message in str(caught.value)


def test_workers_know_the_other_end() -> None:
    workers = Workers(((0, 1), (2,), (0, 1)), ((0, 1, 0), (0, 0, 0), (0, 0, 1)))
    assert (workers.stages, workers.micro_batches, workers.count) == (3, 3, 3)
    assert workers.stages_of == ((0, 2), (0, 2), (1,))
    assert workers.home(2, 2) == 1
    assert workers.peer(Action("SF", 0, 1)) == 2
    assert workers.peer(Action("RF", 1, 1)) == 1
    assert workers.peer(Action("SB", 2, 2)) == 2
    assert workers.crosses(0, 0)
    assert not workers.crosses(2, 0)
    assert not workers.crosses(-1, 0)


@pytest.mark.parametrize(
    ("homes", "route", "message"),
    [
        ((), (), "0 stages have homes"),
        (((0,),), (), "1 stages have homes, but 0 have a route"),
        (((0,), (1,)), ((0, 0), (0,)), "stage 0 routes 2 micro-batches, but stage 1 1"),
        (((0, 0),), ((0,),), "two replicas on one worker"),
        (((0,),), ((1,),), "stage 0 has 1 replicas, but routes a micro-batch to another"),
        (((0,), (2,)), ((0,), (0,)), "numbered from 0 without gaps, got 0, 2"),
    ],
)
def test_wrong_workers_are_refused(homes: tuple[tuple[int, ...], ...], route: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Workers(homes, route)
