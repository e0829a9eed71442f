"""What rounds are made of: the history a journal adds up to, chunks of updates, and messages that cannot be meant."""

import msgspec
import pytest

from atoll.control.journal import Epoch, Term, encode
from atoll.control.rounds.exchange import GlobalFetch, UpdateStore
from atoll.control.rounds.history import RoundHistory
from atoll.control.rounds.messages import (
    FetchUpdate,
    Offer,
    RoundCommitted,
    RoundRecord,
    RoundSettings,
    RoundTerms,
    SiteBeat,
    UpdateId,
    why_no_round_message,
)


def offer(site: str, first: int, last: int, epoch: int = 0, round: int = 0, weight: float = 1.0) -> Offer:
    return Offer(UpdateId(site, 1, last), epoch, round, first, last, weight, "d")


def committed(epoch: int, round: int, *named: Offer) -> RoundCommitted:
    return RoundCommitted(epoch, round, (1, round), named, RoundTerms(1.0), "d")


RECORDS: list[RoundRecord] = [
    Term(1),
    Epoch(0, 0, 0),
    committed(0, 0, offer("a", 0, 4), offer("b", 0, 3)),
    committed(0, 1, offer("a", 4, 9)),
    committed(0, 2, offer("b", 3, 8)),
    Term(2),
    Epoch(1, 1, 0),
    committed(1, 1, offer("b", 3, 5)),
    Epoch(2, 2, 1),
    committed(2, 2, offer("a", 4, 6)),
]


def test_a_history_knows_which_of_every_sites_steps_are_in_the_present_state() -> None:
    found = [
        (history.position, history.first_unnamed("a"), history.first_unnamed("b"))
        for history in (RoundHistory.of(RECORDS[:count]) for count in range(2, len(RECORDS) + 1))
    ]
    assert found == [
        ((0, 0), 0, 0), ((0, 1), 4, 3), ((0, 2), 9, 3), ((0, 3), 9, 8), ((0, 3), 9, 8),
        ((1, 1), 4, 3), ((1, 2), 4, 5), ((2, 2), 4, 5), ((2, 3), 6, 5),
    ]  # fmt: skip


def test_the_round_that_led_to_the_present_state_says_how_the_next_one_is_made() -> None:
    found = [RoundHistory.of(RECORDS[:count]).last for count in (2, 3, 5, 7, 8, 9, 10)]
    places = [None if commit is None else (commit.epoch, commit.round) for commit in found]
    assert places == [None, (0, 0), (0, 2), (0, 0), (1, 1), (1, 1), (2, 2)]


def test_only_states_on_the_way_to_the_present_one_lead_here() -> None:
    history = RoundHistory.of(RECORDS)
    positions = [(epoch, round) for epoch in range(4) for round in range(5)]
    there = [position for position in positions if history.leads_here(position)]
    assert there == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 0)]
    assert [commit.round for commit in history.recent(5)] == [2]


def test_records_survive_the_journals_lines() -> None:
    decoder = msgspec.json.Decoder(RoundRecord)
    for record in RECORDS:
        assert decoder.decode(encode(record).partition(b" ")[2]) == record  # type: ignore[arg-type]


def test_an_update_with_another_digest_is_asked_for_again_of_somebody_else() -> None:
    store, asked = UpdateStore(2), []
    wanted = offer("a", 0, 4)
    store.keep([wanted])

    def ask(now: float) -> list[tuple[str, int]]:
        asked.clear()
        store.ask([wanted.update], lambda update: ["x", "y"], now, 5.0, 8, lambda to, update, chunk: asked.append((to, chunk)))
        return list(asked)

    assert ask(0.0) == [("x", 0), ("y", 1)]
    assert ask(1.0) == []  # they are on their way
    assert store.put(wanted.update, 0, "left", "".join) is False
    assert store.put(wanted.update, 1, "wrong", "".join) is False
    assert store.whole == frozenset()
    assert ask(2.0) == [("y", 0), ("x", 1)]
    for number, chunk in enumerate("d "):
        store.put(wanted.update, number, chunk, lambda chunks: "".join(chunks).strip())
    assert store.whole == {wanted.update}
    assert store.chunk(wanted.update, 0) == "d"
    store.keep([])
    assert store.whole == frozenset()


def test_a_chunk_of_another_state_is_none_of_this() -> None:
    fetch = GlobalFetch((0, 3), None, 2, 0.0)
    fetch.put((0, 2), 0, "old", 1.0)
    fetch.put((0, 3), 1, "b", 1.0)
    assert fetch.chunks is None
    fetch.put((0, 3), 0, "a", 2.0)
    assert fetch.chunks == ["a", "b"]


def beat(**changed: object) -> SiteBeat:
    found = SiteBeat("a", "a.0", 1, 1, 1, (0, 0), offer("a", 0, 4), None, "", frozenset())
    return msgspec.structs.replace(found, **changed)


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (beat(incarnation=-1), "numbers"),
        (beat(position=(0, -1)), "numbers"),
        (beat(offer=offer("b", 0, 4)), "another site"),
        (beat(offer=offer("a", 4, 4)), "no steps"),
        (beat(offer=offer("a", 0, 4, weight=float("nan"))), "weighs nothing"),
        (beat(offer=offer("a", 0, 4, weight=float("inf"))), "weighs nothing"),
        (FetchUpdate(UpdateId("a", 1, 1), 2, "b.0"), "chunk"),
        ("hello", "no message"),
    ],
)
def test_messages_that_cannot_be_meant_are_refused(message: object, word: str) -> None:
    settings = RoundSettings(rounds=1, chunks=2)
    assert word in (why_no_round_message(message, settings) or "")
    assert why_no_round_message(beat(), settings) is None
