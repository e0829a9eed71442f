"""Whose state is stored: that of the one who was told, unless most of its stage have another."""

import pytest

from atoll.control.checkpoint_schedule import CheckpointRound, StateVerdict
from atoll.control.membership import Member

STAGES = [Member(name, True, number + 1, 1, number // 4, 0.0) for number, name in enumerate("abcdefgh")]
HEARD = {member.identity for member in STAGES}


def begun() -> CheckpointRound:
    found = CheckpointRound()
    found.begin(5, STAGES, 0.0)
    return found


def verdict(storing: CheckpointRound, now: float = 1.0) -> StateVerdict | None:
    return storing.verdict(0, HEARD, now, 10.0)


def test_one_writes_two_tell_their_digests_and_the_others_go_on() -> None:
    storing = begun()
    assert [member.name for member in STAGES if storing.writes(member)] == ["a", "e"]
    assert [member.name for member in STAGES if storing.attests(member)] == ["b", "c", "f", "g"]


def test_only_who_was_told_stores_and_only_what_it_was_told() -> None:
    storing = begun()
    assert storing.why_not("a", 5, 0) is None
    assert storing.why_not("b", 5, 0) == "a is told to store it"
    assert storing.why_not("a", 5, 1) == "e is told to store it"
    for version, stage in ((4, 0), (6, 0), (5, 2), (5, -1), (-1, 0)):
        assert storing.why_not("a", version, stage) == "nobody is told to store it"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (("x", "x"), StateVerdict(taken=True, agreed=True)),
        (("x", "y"), StateVerdict(taken=True, agreed=False)),
        (("y", "x"), StateVerdict(taken=True, agreed=False)),
        (("y", "y"), StateVerdict(taken=False, agreed=False)),
        (("y", "z"), StateVerdict(taken=True, agreed=False)),
    ],
)
def test_the_majority_decides_and_without_one_the_one_who_was_told(others: tuple[str, str], expected: StateVerdict) -> None:
    storing = begun()
    storing.stored(0, "x", 0.5)
    for member, digest in zip(STAGES[1:3], others, strict=True):
        assert verdict(storing) is None
        storing.hear(member, digest)
        storing.hear(member, "later")  # what was said first counts
    assert verdict(storing) == expected


def test_who_is_gone_or_silent_is_waited_for_no_longer() -> None:
    storing = begun()
    storing.stored(0, "x", 0.5)
    assert storing.verdict(0, {STAGES[0].identity}, 1.0, 10.0) == StateVerdict(taken=True, agreed=True)
    assert verdict(storing, 20.0) == StateVerdict(taken=True, agreed=True)
    storing.hear(STAGES[3], "y")  # was not asked
    storing.hear(STAGES[4], "y")  # is of another stage
    assert verdict(storing, 20.0) == StateVerdict(taken=True, agreed=True)


def test_after_a_rejection_one_of_the_majority_writes() -> None:
    storing = begun()
    storing.stored(0, "wrong", 0.5)
    for member in STAGES[1:3]:
        storing.hear(member, "x")
    assert storing.reject(0) == "a"
    assert [member.name for member in STAGES[:4] if storing.writes(member)] == ["b"]
    assert storing.why_not("a", 5, 0) == "b is told to store it"
    storing.stored(0, "x", 2.0)
    assert verdict(storing, 2.0) == StateVerdict(taken=True, agreed=True)
