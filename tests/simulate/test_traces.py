"""Traces of who was there when: what is read, and what is refused with the line where it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.control import Settings
from atoll.errors import AtollError
from atoll.simulate.peers import PeerModel, PeerSwarm
from atoll.simulate.traces import alive_over_time, read_trace

EVENTS = "time_s,event,node_id\n"
COUNTS = "time_s,alive_count\n"
REBALANCING = Path(__file__).parents[2] / "benchmarks" / "rebalancing.py"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a trace has the columns time_s,event,node_id or time_s,alive_count"),
        ("time_s,event\n0,add\n", "a trace has the columns time_s,event,node_id or time_s,alive_count"),
        (EVENTS, "nobody ever comes in this trace"),
        (COUNTS + "0,0\n", "nobody ever comes in this trace"),
        (EVENTS + "0,remove,a\n", "nobody ever comes in this trace"),
        (EVENTS + "0,joins,a\n", "line 2: an event is add or remove, not 'joins'"),
        (EVENTS + "0,add\n", "line 2: a node has no name"),
        *(
            (EVENTS + f"0,add,a\n{time},add,b\n", f"line 3: a time is a number of seconds, 0 or more, not '{time}'")
            for time in ("nan", "inf", "-1", "soon", "")
        ),
        *(
            (EVENTS + f"0,add,{name}\n", f"line 2: a node cannot be called '{name}': names with `+`, coordinator and feeder…")
            for name in ("a+1", "+", "coordinator", "feeder0")
        ),
        *(
            (COUNTS + f"0,{count}\n", f"line 2: a count is a whole number, 0 or more, not '{count}'")
            for count in ("-1", "nan", "2.5", "many", "")
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(AtollError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AtollError, match=r"x\.csv: is no CSV"):
        read_trace(path)


def test_what_is_so_already_changes_nothing(tmp_path: Path) -> None:
    changes = read_trace(written(tmp_path, EVENTS + "0,remove,early\n0,add,a\n1,add,a\n2,add,b\n3,remove,a\n4,remove,a\n"))
    assert [(change.at, change.joins, change.peer) for change in changes] == [(0.0, True, "a"), (2.0, True, "b"), (3.0, False, "a")]
    assert alive_over_time(changes) == [(0.0, 1), (2.0, 2), (3.0, 1)]


def test_changes_are_in_order_of_time_and_at_one_instant_of_lines(tmp_path: Path) -> None:
    rows = "9,remove,b\n0,add,b\n0,add,a\n5,remove,a\n5,add,a\n5,add,c\n5,remove,c\n"
    changes = read_trace(written(tmp_path, EVENTS + rows))
    assert [(change.at, change.joins, change.peer) for change in changes] == [
        *[(0.0, True, "b"), (0.0, True, "a")],
        *[(5.0, False, "a"), (5.0, True, "a"), (5.0, True, "c"), (5.0, False, "c")],
        (9.0, False, "b"),
    ]
    assert alive_over_time(changes) == [(0.0, 2), (5.0, 2), (9.0, 1)]


def test_counts_say_how_many_are_there_in_whatever_order_they_are_written(tmp_path: Path) -> None:
    changes = read_trace(written(tmp_path, COUNTS + "7,1\n0,2\n3,3\n"))
    assert [(change.at, change.joins) for change in changes[-2:]] == [(7.0, False)] * 2
    assert changes == read_trace(written(tmp_path, COUNTS + "7,1\n0,2\n3,3\n")), "who leaves is drawn, and the same every time"
    assert alive_over_time(changes) == [(0.0, 2), (3.0, 3), (7.0, 1)]


def test_a_swarm_survives_changes_at_one_instant(tmp_path: Path) -> None:
    rows = "0,add,a\n0,add,b\n5,remove,a\n5,add,a\n5,add,c\n5,remove,c\n"
    swarm = PeerSwarm(Settings(stages=1, micro_batches=4, steps=10**9), PeerModel(forward_seconds=0.1, backward_seconds=0.1))
    for change in read_trace(written(tmp_path, EVENTS + rows)):
        swarm.loop.run(change.at)
        (swarm.start if change.joins else swarm.kill)(change.peer)
    assert sorted(swarm.workers) == ["a", "b"]
    swarm.loop.run(60.0)
    before = len(swarm.committed)
    swarm.loop.run(120.0)
    assert 0 < before < len(swarm.committed)


@pytest.mark.parametrize("rows", ["0,joins,a\n", "0,add,a\nnan,remove,a\n", "0,add,a+1\n"])
def test_the_benchmark_ends_with_a_sentence(rows: str, tmp_path: Path) -> None:
    path = written(tmp_path, EVENTS + rows)
    told = subprocess.run([sys.executable, str(REBALANCING), "--trace", str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 2
    assert told.stderr.startswith(f"{path}: line ")
    assert told.stderr.count("\n") == 1
