"""Whom a commit waits for, and how long; and who gives a joiner its state."""

import random
from collections import Counter

from atoll.control import Coordinator, Settings, SwarmProcess
from atoll.control.journal import Checkpointed, Epoch, FencedError, Record, Term
from atoll.control.membership import Member, Members
from atoll.control.messages import FeederBeat, Peer, Reduce, Run, StageReduction, WorkerBeat
from atoll.control.reduction import ReductionRound, too_slow, waits_for_joiners
from atoll.events import MemberTooSlow
from atoll.simulate.loop import Loop, Process
from tests.control.bench import Wire

SETTINGS = Settings(stages=1, micro_batches=4, steps=100, chunks=8, hold_seconds=6.0, hold_limit_seconds=60.0)


def member(members: Members, fetched: int, now: float, version: int = -1) -> Member:
    beat = WorkerBeat("j", 7, 1, 0, 0, version, 0, 1, fetched, 0.0, None, "", None)
    found, _ = members.hear(beat, now)
    assert found is not None
    return found


def waits(members: Members, version: int, now: float) -> bool:
    order = Reduce((1, 1), (StageReduction((), (("w", 1),), ("w",)),))
    summing = ReductionRound(order, ((None),), 0, 0.0, 0.0)  # type: ignore[arg-type]
    return waits_for_joiners(members, summing, SETTINGS, version=version, barred=set(), now=now, beat=0)


def test_nobody_waits_for_a_first_step_and_later_only_while_chunks_arrive() -> None:
    members = Members(SETTINGS, 1)
    member(members, 3, 0.0)
    assert not waits(members, 5, 0.0)  # it has all of the next step
    assert waits(members, 6, 1.0)
    member(members, 3, 6.0)
    assert not waits(members, 6, 7.5)  # nothing came for six seconds
    member(members, 4, 8.0)
    assert waits(members, 6, 8.0)
    for second in range(8, 61):
        member(members, 4 + second % 2, float(second))
        assert waits(members, 6, float(second))
    member(members, 7, 62.0)
    assert not waits(members, 6, 62.0)  # not for ever


def test_whoever_took_part_is_somebody_of_whom_nothing_is_held_against() -> None:
    members = Members(SETTINGS, 1)
    joiner = member(members, 3, 0.0)
    assert not waits(members, 5, 0.0)
    assert waits(members, 6, 1.0)
    joiner.wait_no_more()
    assert not waits(members, 1000, 2.0)


def test_one_that_had_all_the_time_there_is_for_it_is_told_of_once() -> None:
    members = Members(SETTINGS, 1)
    joiner = member(members, 3, 0.0)
    assert not waits(members, 5, 0.0)
    assert list(too_slow(members, SETTINGS, 0.0)) == []
    assert waits(members, 6, 1.0)
    member(members, 2, 60.0)
    assert list(too_slow(members, SETTINGS, 60.0)) == []
    assert list(too_slow(members, SETTINGS, 61.0)) == [MemberTooSlow(name="j", stage=0, fetched=0.25)]
    assert list(too_slow(members, SETTINGS, 99.0)) == []
    joiner.wait_no_more()  # it got in after all, and is out again
    assert list(too_slow(members, SETTINGS, 99.0)) == []


class Once:
    """A journal where the record of one who died lands while another claims its term."""

    def __init__(self) -> None:
        self.records: list[Record] = [Term(1), Epoch(0, 0, 0), Checkpointed(0, 0)]
        self.landed = False

    async def read(self) -> list[Record]:
        return list(self.records)

    async def append(self, term: int, record: Record) -> None:
        if not self.landed:
            self.landed = True
            self.records.append(Term(term))
            raise FencedError("another was quicker")
        self.records.append(record)


def coordinator(journal: Once) -> Coordinator:
    process = Process("c", Loop())
    return Coordinator(SwarmProcess("c", process, Wire(), process.mailbox(), 1, random.Random(0)), journal, SETTINGS)


def test_a_term_that_a_dead_coordinator_claimed_is_passed_over() -> None:
    journal = Once()
    found = coordinator(journal)
    found.node.clock.spawn(found.run())
    found.node.clock.loop.run(1.0)  # type: ignore[attr-defined]
    assert (found.deposed, found.term, journal.records[-1]) == (False, 3, Term(3))


def test_a_joiner_keeps_its_donors_when_others_come_and_go_and_all_give_as_much() -> None:
    found = coordinator(Once())
    found.members = Members(SETTINGS, 1)
    joiners = []
    for number in range(6):
        joiner, _ = found.members.hear(WorkerBeat(f"j{number}", 0, number + 1, -1, -1, -1, 0, 0, -1, 0.0, None, "", None), 0.0)
        assert joiner is not None
        joiners.append(joiner)

    def donors(of: range) -> list[tuple[str, ...]]:
        found.routes = (tuple(Peer(f"w{number}", 1, 0.0) for number in of),)
        return [found.donors(joiner) for joiner in joiners]

    before = donors(range(8))
    assert Counter(name for row in before for name in row) == {f"w{number}": 3 for number in range(8)}
    assert donors(range(12)) == before
    after = donors(range(1, 12))
    for old, new in zip(before, after, strict=True):
        assert (len(set(new)), set(old) - {"w0"} <= set(new), "w0" in new) == (4, True, False)


def test_a_joiner_that_misses_the_commit_after_its_state_came_has_the_donors_it_had() -> None:
    found = coordinator(Once())
    found.members, found.version = Members(SETTINGS, 1), 5
    joiner, _ = found.members.hear(WorkerBeat("j", 0, 1, -1, -1, -1, 0, 0, -1, 0.0, None, "", None), 0.0)
    assert joiner is not None
    joiner.stage, joiner.epoch = 0, 0
    found.routes = (tuple(Peer(f"w{number}", 1, 0.0) for number in range(8)),)
    before = found._assignment(joiner).donors
    joiner.version = 5
    assert found._assignment(joiner).donors == ()
    found.version = 6
    assert found._assignment(joiner).donors == before


def test_feeders_hear_of_a_worker_that_has_got_its_state_without_waiting_for_a_tick() -> None:
    found = coordinator(Once())
    found.term, found.version = 1, 5
    found.members = Members(SETTINGS, 1)
    found.phase = Run((frozenset({0}),), frozenset(), (1, 1))
    found.members.hear(FeederBeat("f", 1, 1, 0, 1, None, 0, 0), 0.0)
    for version, told in ((-1, 0), (5, 1), (5, 1)):
        found.node.clock.spawn(found._on_worker_beat(WorkerBeat("w", 7, 1, 0, 0, version, 0, 1, -1, 0.0, None, "", None)))
        found.node.clock.loop.run(1.0)  # type: ignore[attr-defined]
        wire = found.node.transport
        assert isinstance(wire, Wire)
        routes = [message.yours.routes for to, message in wire.sent if to == "f"]
        assert [[peer.worker for peer in row] for (row,) in routes] == [["w"]] * told
