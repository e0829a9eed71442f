"""Traces: predictions obey what they are predictions of; the JSON has what Perfetto needs and reads back."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ScheduleError
from atoll.runtime.modes.lockstep.schedule import Action, Schedule, Workers
from atoll.runtime.modes.lockstep.schedule_builder import make_schedule, post_receives_early
from atoll.runtime.modes.lockstep.trace import TraceSpan, chrome_trace, predict, step_seconds, table
from tests.runtime.modes.lockstep.read_trace import read_chrome_trace
from tests.runtime.modes.lockstep.schedule_cases import SCHEDULES, any_workers, column


def some_seconds(numbers: random.Random):  # type: ignore[no-untyped-def]
    known: dict[tuple[int, Action], float] = {}
    return lambda worker, action: known.setdefault((worker, action), numbers.choice([0.0, 0.25, 0.5, 1.0, 2.0]))


@given(any_workers, SCHEDULES, st.integers(0, 2), st.integers(0, 9))
def test_a_prediction_is_possible_and_leaves_no_time_unused(workers: Workers, name: str, ahead: int, seed: int) -> None:
    schedule = post_receives_early(make_schedule(name, workers), ahead)
    seconds_of = some_seconds(random.Random(seed))
    spans = {(span.process, span.action): span for span in predict(schedule, seconds_of)}
    assert len(spans) == sum(map(len, schedule.actions))
    for worker, row in enumerate(schedule.actions):
        free = 0.0
        for action in row:
            span = spans[worker, action]
            if action.computes:
                ready = free
                receive = Action(f"R{action.kind}", action.stage, action.micro_batch)  # type: ignore[arg-type]
                if (worker, receive) in spans:
                    ready = max(free, spans[workers.peer(receive), receive.sent_as].end_seconds)
                    assert spans[worker, receive].end_seconds <= span.begin_seconds
                assert span.begin_seconds == ready  # as soon as it can
                free = span.end_seconds
            elif action.sends:
                assert span.begin_seconds >= free
            elif action.kind == "G":
                assert all(
                    span.begin_seconds >= s.end_seconds for s in spans.values() if s.action.stage == action.stage and s.action.kind == "B"
                )
            elif action.kind == "O":
                assert span.begin_seconds == max([free, *[spans[worker, a].end_seconds for a in row if a.kind == "G"]])


@pytest.mark.parametrize(("depth", "count"), [(1, 3), (2, 5), (4, 8)])
def test_the_step_of_a_column_is_the_textbook_formula(depth: int, count: int) -> None:
    for name in ("gpipe", "1f1b"):
        spans = predict(make_schedule(name, column(depth, count)), lambda _, action: {"F": 1.0, "B": 2.0}.get(action.kind, 0.0))
        assert step_seconds(spans) == 3 * (count + depth - 1)


def test_transfers_of_a_channel_follow_each_other() -> None:
    spans = predict(make_schedule("gpipe", column(2, 3)), lambda _, action: {"SF": 10.0, "SB": 0.0}.get(action.kind, 1.0))
    sends = [(span.begin_seconds, span.end_seconds) for span in spans if span.action.kind == "SF"]
    assert sends == [(1.0, 11.0), (11.0, 21.0), (21.0, 31.0)]


def test_a_schedule_that_never_ends_has_no_prediction() -> None:
    crossed = Schedule.parse("0: 0F0 0SF0 0RB0 0B0 0F1 0SF1 0RB1 0B1 0G O\n1: 1RF0 1RF1 1F0 1F1 1B0 1SB0 1B1 1SB1 1G O")
    with pytest.raises(ScheduleError, match="would wait for ever"):
        predict(crossed, lambda *_: 1.0)


@given(any_workers, SCHEDULES, st.integers(0, 9))
def test_the_json_is_what_perfetto_needs(workers: Workers, name: str, seed: int) -> None:
    spans = predict(make_schedule(name, workers), some_seconds(random.Random(seed)))
    trace = json.loads(json.dumps(chrome_trace(spans, {0: "the first"})))
    named: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] > 0  # 0 is the idle process
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named[event["pid"], event["tid"]] = event["args"]["name"]
            elif event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert min(event["ts"], event["dur"]) >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
            assert named[event["pid"], event["tid"]].split()[0] == event["cat"]
    assert processes == {worker + 1: f"worker {worker}" if worker else "the first" for worker in range(workers.count)}
    assert len({tid for _, tid in named}) == len(named)  # some viewers tell threads apart by this alone
    for row in slices.values():
        assert all(begin >= end for (_, end), (begin, _) in pairwise(row))  # no two at once


@given(
    st.lists(
        st.builds(
            lambda p, b, d: TraceSpan(p, Action("F", 1, 2), b / 1e9, (b + d) / 1e9),
            st.integers(0, 9),
            st.integers(0, 10**13),
            st.integers(0, 10**12),
        )
    )
)
def test_traces_read_back(spans: list[TraceSpan]) -> None:
    trace = chrome_trace(spans)
    assert sorted(read_chrome_trace(trace)) == sorted(spans)
    assert sorted(read_chrome_trace(json.dumps(trace).encode())) == sorted(spans)


def test_the_table_is_the_picture_of_a_pipeline() -> None:
    assert table(make_schedule("1f1b", column(3, 4))) == (
        "worker 0  0F0 0F1 0F2 ·   ·   0B0 0F3 0B1 ·   0B2 ·   0B3\n"
        "worker 1  ·   1F0 1F1 ·   1B0 1F2 1B1 1F3 1B2 ·   1B3 ·\n"
        "worker 2  ·   ·   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 ·   ·"
    )
    assert table(make_schedule("1f1b", column(1, 3)), most_columns=4) == "worker 0  0F0 0B0 0F1 0B1\n… and 2 more columns"
