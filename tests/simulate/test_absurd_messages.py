"""No single message ends anybody: whatever a member sends, the run goes on, commits what it should, and names the sender."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.control.message_checks import why_unsound
from atoll.control.messages import (
    Ack,
    Announce,
    Assignment,
    Attempt,
    Backward,
    BufferManifest,
    FeederBeat,
    FetchState,
    Forward,
    Manifest,
    Message,
    Pull,
    PullSum,
    Reduce,
    Reduced,
    Run,
    StageReduction,
    StateChunk,
    SumChunk,
    SumPart,
    View,
    WorkerBeat,
)
from atoll.simulate.arithmetic import ExactSum
from atoll.simulate.swarm import COORDINATORS, ExactSwarm, SwarmSize, exact_settings

SIZE = SwarmSize(stages=2, workers=4, micro_batches=4)
SETTINGS = exact_settings(SIZE)
NAME = "mallory"

absurd = st.sampled_from([-(2**40), -3, -2, 99, 10**6, 2**53])
number = st.one_of(st.integers(-1, 5), absurd)
fraction = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 0.5, 1e308])
text = st.sampled_from(["", "x", "w0", NAME, "a" * 1000])
order = st.tuples(number, number)
numbers = st.lists(number, max_size=4).map(tuple)
sets = st.lists(number, max_size=4).map(frozenset)
payload = st.sampled_from([None, "x", -1, math.nan, (), ExactSum(1, 2)])
attempt = st.builds(Attempt, order, text, number, number)
buffers = st.lists(st.builds(BufferManifest, number, sets, fraction, fraction), max_size=3).map(tuple)
own: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        WorkerBeat, st.just(NAME), number, number, number, number, number, number, number, number, fraction, st.none() | order, text,
        st.none() | st.tuples(number, text), st.booleans(), number,
    ),
    st.builds(FeederBeat, st.just(NAME), number, number, number, number, st.none() | order, number, number),
    st.builds(Ack, number, number, number, number, attempt, st.just(NAME), number, st.booleans(), st.booleans(), fraction),
    st.builds(Manifest, order, st.just(NAME), number, number, number, number, buffers, number),
    st.builds(Pull, order, number, number, number, number, st.just(NAME), number, numbers),
    st.builds(SumPart, order, number, number, number, number, st.just(NAME), number, payload),
    st.builds(PullSum, order, number, number, number, number, st.just(NAME)),
    st.builds(Reduced, order, st.just(NAME), number, number, number, number, text, fraction, st.lists(text, max_size=3).map(tuple)),
    st.builds(FetchState, number, number, number, number, number, st.just(NAME)),
)  # fmt: skip
nameless: st.SearchStrategy[Message] = st.one_of(  # which could be meant only by luck
    st.builds(Forward, number, absurd, number, number, attempt, st.lists(text, max_size=3).map(tuple), sets, payload),
    st.builds(Backward, number, absurd, number, number, attempt, payload),
    st.builds(SumChunk, order, number, absurd, number, number, payload),
    st.builds(StateChunk, number, number, absurd, number, number, payload),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from(["c0", "f0", "w0", "w3"]), own | nameless), max_size=40), st.integers(0, 999)
)
def test_the_run_goes_on_and_commits_what_it_should(sent: list[tuple[float, str, Message]], seed: int) -> None:
    swarm = ExactSwarm(SIZE, seed)
    swarm.start_all()
    for at, to, message in sent:
        swarm.loop.at(at, lambda pair: swarm.network.send(NAME, *pair), (to, message))
    swarm.run(31.0)
    before = swarm.checker.commits
    swarm.run(600.0, lambda: swarm.checker.commits >= before + 2)
    swarm.checker.at_the_end()
    assert swarm.checker.violations == []
    assert swarm.checker.commits >= before + 2
    unsound = [message for _, _, message in sent if why_unsound(message, SETTINGS) is not None]
    assert [source for source, _ in swarm.network.refused] == [NAME] * len(unsound)


def view(**changed: Any) -> View:
    whole: dict[str, Any] = {
        "term": 1, "seq": 1, "beat": 1, "epoch": 0, "version": 0, "origin": (0, 0), "commit": None,
        "phase": Run((frozenset(),) * 2, frozenset(), (1, 1)), "checkpoint": -1,
    }  # fmt: skip
    return View(**{**whole, **changed})


@pytest.mark.parametrize(
    "message",
    [
        Reduced((1, 1), "w0", 1, 0, 0, 0, "x", -1.0, ()),
        Pull((1, 1), 0, 0, 0, 99, "w0", 1, (0,)),
        Pull((1, 1), 0, 0, 0, 0, "w0", 1, ()),
        Pull((1, 1), 0, 0, 0, 0, "w0", 1, (7,)),
        FetchState(1, 0, 0, 0, -1, "w0"),
        Manifest((1, 1), "w0", 1, 0, 0, 0, (BufferManifest(0, frozenset({1}), 0.0, math.nan),), 0),
        Manifest((1, 1), "w0", 1, 0, 0, 0, (BufferManifest(5, frozenset({1})),), 0),
        Ack(0, 0, 7, 0, Attempt((1, 1), "f0", 1, 0), "w0", 1, True, False, 1.0),
        Ack(0, 0, 0, 0, Attempt((1, 1), "f0", 1, 0), "w0", 1, True, False, -1.0),
        Announce("c0", view(), Assignment(1, 1, 9)),
        Announce("c0", view(phase=Run((), frozenset(), (1, 1))), Assignment(1, 1, 0)),
        Announce("c0", view(phase=Reduce((1, 1), (StageReduction((), (), ()),) * 2)), Assignment(1, 1, 0)),
    ],
)
def test_what_ended_somebody_cannot_be_meant(message: Message) -> None:
    assert why_unsound(message, SETTINGS) is not None


def test_everything_that_an_ordinary_run_sends_can_be_meant() -> None:
    swarm = ExactSwarm(SwarmSize(stages=3, workers=6, micro_batches=5, tied=True, staleness=1), random.Random(3).randrange(100))
    swarm.start_all()
    swarm.run(60.0)
    assert swarm.checker.commits > 2
    assert swarm.network.refused == []
    assert COORDINATORS[0] in swarm.coordinators
