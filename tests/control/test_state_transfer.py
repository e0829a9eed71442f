"""A joiner whose state is committed upon while it arrives finishes it and makes the step it missed, where its donors have kept it.

A state is fetched from several donors; over a slow link nothing is asked for twice only because it takes its time.
"""

import random

import pytest

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.messages import Committed, FetchState, Finished, PullSum, Reduce, Run, Seal, StageReduction, StateChunk, SumChunk
from atoll.control.settings import Settings
from atoll.control.state_transfer import WINDOW, Fetch, StateDonor
from atoll.control.worker_state import WorkerState
from atoll.simulate import arithmetic
from atoll.simulate.arithmetic import ExactCompute, ExactState, ExactSum
from atoll.simulate.loop import Loop, Process
from tests.control.bench import ALL, Bench
from tests.control.test_worker import commit, held, reduce

CELLS = [ExactState(11, 1, 0, 10), ExactState(12, 2, 0, 11)]
SUMS = [ExactSum(5, 7), ExactSum(6, 8)]
COMMIT = Committed(0, 3, (1, 2), ("", arithmetic.digest(SUMS)), 1.0, False, 0.0, 4.0)
DONORS = ("x", "y")


def announce(bench: Bench, seq: int, version: int, committed: Committed | None = None, donors: tuple[str, ...] = DONORS) -> None:
    bench.announce(Run((ALL, ALL), frozenset(), (1, seq)), seq, version=version, commit=committed, donors=donors)


def joiner(chunks: int, committed: Committed = COMMIT) -> Bench:
    """It has so many of two chunks of version 3 when that is committed upon."""
    bench = Bench()
    announce(bench, 1, 3)
    for chunk in range(chunks):
        give(bench, chunk)
    announce(bench, 3, 4, committed)
    return bench


def give(bench: Bench, chunk: int) -> None:
    bench.inbox.put(StateChunk(1, 0, 3, 1, chunk, (CELLS[chunk],)))
    bench.run(0.01)


def give_sums(bench: Bench, sums: list[ExactSum]) -> None:
    for chunk, value in enumerate(sums):
        bench.inbox.put(SumChunk((1, 2), 0, 3, 1, chunk, value))
    bench.run(0.5)


def test_a_state_that_is_mostly_there_is_finished_and_the_step_made() -> None:
    bench = joiner(1)
    bench.wire.sent.clear()
    bench.run(2.5)
    asked = [(to, message) for to, message in bench.wire.sent if isinstance(message, FetchState)]
    assert {(to, message.version, message.chunk) for to, message in asked} <= {("y", 3, 1)}  # of the one who gave the first
    give(bench, 1)
    bench.run(0.5)
    assert {(to, m.round, m.version, m.chunk) for to, m in bench.wire.sent if isinstance(m, PullSum)} == {
        ("y", (1, 2), 3, c) for c in (0, 1)
    }
    give_sums(bench, SUMS)
    assert bench.worker.version == 4
    assert bench.worker.state == arithmetic.model_apply(tuple(CELLS), SUMS, 1.0, False)


def test_a_state_that_has_hardly_begun_is_fetched_anew() -> None:
    bench = joiner(0)
    assert {message.version for message in bench.sent(FetchState)[2:]} == {4}


def test_sums_that_are_not_the_committed_ones_are_not_used() -> None:
    bench = joiner(1)
    give(bench, 1)
    bench.run(0.5)
    bench.sent(FetchState)
    give_sums(bench, [SUMS[0], ExactSum(9, 9)])
    assert bench.worker.state is None
    assert {message.version for message in bench.sent(FetchState)} == {4}


@pytest.mark.parametrize("given", [1, 2])
def test_donors_that_have_kept_nothing_are_not_waited_for(given: int) -> None:
    bench = joiner(given)
    bench.run(0.5)
    bench.sent(FetchState)
    bench.run(200.0)
    announce(bench, 3, 4, COMMIT)
    assert {message.version for message in bench.sent(FetchState)} == {4}


@pytest.mark.parametrize("given", [1, 2])
def test_a_joiner_whose_donors_are_gone_or_that_missed_two_steps_begins_anew(given: int) -> None:
    for donors, version in ((("z",), 4), (DONORS, 5)):
        bench = joiner(given)
        bench.run(0.5)
        bench.sent(FetchState)
        later = Committed(0, version - 1, (1, 4), ("", "other"), 1.0, False, 0.0, 4.0) if version == 5 else COMMIT
        announce(bench, 5, version, later, donors)
        assert {message.version for message in bench.sent(FetchState)} == {version}


def test_sums_of_a_donor_that_is_gone_are_asked_of_another() -> None:
    bench = Bench()
    announce(bench, 1, 3)
    asked = {message.chunk: to for to, message in bench.wire.sent if isinstance(message, FetchState)}
    for chunk in asked:
        give(bench, chunk)
    bench.run(0.5)
    assert set(asked.values()) == {"x", "y"}
    announce(bench, 3, 4, COMMIT)
    asked_of = [to for to, message in bench.wire.sent if isinstance(message, PullSum)]
    assert sorted(asked_of) == ["x", "y"]
    bench.inbox.put(SumChunk((1, 2), 0, 3, 1, asked_of.index("y"), SUMS[asked_of.index("y")]))
    bench.wire.sent.clear()
    announce(bench, 3, 4, COMMIT, donors=("y",))
    assert [(to, message.chunk) for to, message in bench.wire.sent if isinstance(message, PullSum)] == [("y", asked_of.index("x"))]


def test_sums_collected_before_the_commit_are_not_asked_for_again() -> None:
    bench = Bench()
    announce(bench, 1, 3)
    for chunk in (0, 1):
        give(bench, chunk)
    bench.run(0.5)
    order = StageReduction((), (("x", 1),), ("x", "x"))
    bench.announce(Reduce((1, 2), (order, order)), 2, version=3, donors=DONORS)
    bench.inbox.put(SumChunk((1, 2), 0, 3, 1, 0, SUMS[0]))
    bench.run(0.01)
    bench.sent(PullSum)
    announce(bench, 3, 4, COMMIT)
    assert {message.chunk for message in bench.sent(PullSum)} == {1}
    bench.inbox.put(SumChunk((1, 2), 0, 3, 1, 1, SUMS[1]))
    bench.run(0.5)
    assert bench.worker.version == 4


@pytest.mark.parametrize("lent", [True, False])
def test_a_donor_keeps_the_past_for_whom_it_began_to_give_it_and_no_longer(lent: bool) -> None:
    bench = Bench()
    digest = held(bench)
    before, sums = bench.worker.state, bench.worker.reduction.result()  # type: ignore[union-attr]
    if lent:
        bench.inbox.put(FetchState(1, 0, 0, 1, 0, "j"))
        bench.run(0.1)
        bench.sent(StateChunk)
    bench.open(9, version=1, commit=commit((1, 2), digest))
    bench.run(0.5)
    assert bench.worker.version == 1
    bench.inbox.put(FetchState(1, 0, 0, 1, 1, "j"))
    bench.inbox.put(PullSum((1, 2), 0, 0, 1, 1, "j"))
    bench.run(0.1)
    assert [(chunk.version, chunk.payload) for chunk in bench.sent(StateChunk)] == ([(0, tuple(before[1::2]))] if lent else [])
    assert [(chunk.version, chunk.payload) for chunk in bench.sent(SumChunk) if chunk.version == 0][-1:] == ([(0, sums[1])] if lent else [])
    bench.announce(Run((ALL, ALL), frozenset(), (1, 20)), 20, version=5)  # it was away for long
    bench.inbox.put(FetchState(2, 0, 0, 1, 1, "j"))
    bench.run(0.1)
    assert not bench.sent(StateChunk)


def test_a_donor_that_is_making_the_step_gives_sums_it_does_not_own_at_once() -> None:
    bench = Bench()
    bench.open()
    bench.announce(Seal((1, 2)), 2)
    bench.announce(reduce("w", owners=("x", "x")), 3)
    for chunk in (0, 1):
        bench.inbox.put(SumChunk((1, 2), 0, 0, 1, chunk, SUMS[chunk]))
        bench.inbox.put(FetchState(1, 0, 0, 1, chunk, "j"))
    bench.run(0.05)
    bench.wire.sent.clear()
    bench.compute.slowness = 100.0
    bench.open(9, version=1, commit=commit((1, 2), arithmetic.digest(SUMS)))
    for chunk in (0, 1):
        bench.inbox.put(PullSum((1, 2), 0, 0, 1, chunk, "j"))
    bench.run(1.0)
    assert bench.worker.changing
    assert [(message.chunk, message.payload) for message in bench.sent(SumChunk)] == list(enumerate(SUMS))


def test_sums_that_do_not_come_are_asked_for_again_before_the_state_is_given_up() -> None:
    bench = joiner(2)
    bench.run(0.5)
    bench.sent(PullSum)
    bench.run(15.0)
    assert {message.chunk for message in bench.sent(PullSum)} == {0, 1}
    assert bench.worker.state is not None


def test_a_coordinator_that_knows_nobody_yet_costs_a_joiner_nothing() -> None:
    for given in (1, 2):
        bench = joiner(given)
        bench.run(0.5)
        bench.sent(FetchState)
        announce(bench, 5, 4, COMMIT, donors=())
        announce(bench, 6, 4, COMMIT)
        assert {message.version for message in bench.sent(FetchState)} <= {3}


def test_one_that_catches_up_when_the_run_is_over_goes() -> None:
    bench = joiner(2)
    bench.run(0.5)
    bench.announce(Finished(), 5, version=4, commit=COMMIT, donors=DONORS)
    bench.run(0.1)
    assert bench.worker.finished


@pytest.mark.parametrize(("chunks", "kept"), [(1, False), (8, True)])
def test_a_state_is_kept_only_for_whoever_may_have_enough_of_it(chunks: int, kept: bool) -> None:
    settings = Settings(stages=1, micro_batches=1, steps=1, chunks=64)
    at = WorkerState("w", ExactCompute(Process("w", Loop()), random.Random(0)), settings)
    at.stage = at.epoch = at.version = 0
    at.state = (ExactState(1, 0, 0, 0),) * 64
    lending = StateDonor(at, lambda to, message: None)
    for chunk in range(chunks):
        lending.on_fetch(FetchState(1, 0, 0, 0, chunk, "j"))
        lending.on_fetch(FetchState(1, 0, 0, 0, chunk, "j"))  # asked for again
    assert lending.wanted == kept


POSITION = (0, 3, 1)
CHUNKS = 12


class Slow:
    """Donors behind one link that takes so many seconds for a chunk, one after another."""

    def __init__(self, fetch: Fetch, donors: tuple[str, ...], seconds: float) -> None:
        self.fetch, self.donors, self.seconds = fetch, donors, seconds
        self.asked: list[tuple[str, FetchState]] = []
        self._free_at = 0.0
        self._arrivals: list[tuple[float, FetchState]] = []

    def send(self, donor: str, message: FetchState) -> None:
        self.asked.append((donor, message))
        if donor in self.donors:
            self._free_at = max(self._free_at, self.now) + self.seconds
            self._arrivals.append((self._free_at, message))

    def run(self, tick: float = 0.5, until: float = 500.0) -> float:
        """Until the state is whole: when that was."""
        self.now = 0.0
        while self.now < until:
            self.fetch.ask(self.now, self.donors, self.send)
            self.now += tick
            while self._arrivals and self._arrivals[0][0] <= self.now:
                at, message = self._arrivals.pop(0)
                whole = self.fetch.on_chunk(StateChunk(message.nonce, *POSITION, message.chunk, "bytes"), at)
                if whole:
                    return at
                self.fetch.ask(at, self.donors, self.send)
        raise AssertionError(f"not whole after {until} s")


def fetch(patience: AdaptiveTimeout) -> Fetch:
    return Fetch("w", 1, POSITION, CHUNKS, patience)


def test_a_slow_link_is_not_filled_with_doubles() -> None:
    patience = AdaptiveTimeout(10.0, 1.0)
    slow = Slow(fetch(patience), ("a", "b"), 3.0)  # four are under way, so each takes twelve seconds: longer than the first patience
    assert slow.run() < 1.5 * CHUNKS * 3.0
    assert len(slow.asked) <= CHUNKS + 2 * WINDOW
    again = Slow(fetch(patience), ("a", "b"), 3.0)  # and what was learnt stays
    assert again.run() == CHUNKS * 3.0
    assert len(again.asked) == CHUNKS


def test_another_donor_is_asked_at_once_when_one_is_gone() -> None:
    it = fetch(AdaptiveTimeout(10.0, 1.0))
    asked: list[tuple[str, FetchState]] = []
    it.ask(0.0, ("a", "b"), lambda donor, message: asked.append((donor, message)))
    assert {donor for donor, _ in asked} == {"a", "b"}
    lost = {message.chunk for donor, message in asked if donor == "a"}
    other = next(message.chunk for donor, message in asked if donor == "b")
    asked.clear()
    it.on_chunk(StateChunk(1, *POSITION, other, "bytes"), 0.2)
    it.ask(0.2, ("b",), lambda donor, message: asked.append((donor, message)))  # `a` never answered, and no deadline has passed
    assert [(donor, message.chunk) for donor, message in asked] == [("b", min(lost))]
