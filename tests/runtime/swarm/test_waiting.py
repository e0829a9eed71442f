"""What people are told before the first step of a swarm."""

from atoll.runtime.swarm.waiting import Waiting


def test_what_is_waited_for_is_told_soon_and_again_when_it_changes() -> None:
    waiting = Waiting(3, 2)
    assert waiting.line(0.5, []) is None
    assert waiting.line(2.0, []) == "waiting for workers: 0 of 3 joined (they load PyTorch and the job)"
    assert waiting.line(2.5, []) is None
    assert waiting.line(3.0, [0]) is None  # the next line soon, not at once
    assert waiting.line(4.0, [0]) == "waiting for workers: 1 of 3 joined; stage 1 has nobody yet"
    assert waiting.line(18.5, [0]) is None
    assert waiting.line(19.0, [0]) == "waiting for workers: 1 of 3 joined; stage 1 has nobody yet"
    assert waiting.line(25.0, [0, 1]) == "2 workers joined; the first step is under way"


def test_of_many_stages_the_first_are_named() -> None:
    assert Waiting(20, 12).line(2.0, [3]) == "waiting for workers: 1 of 20 joined; stages 0, 1, 2, 4, 5, 6, 7, 8 … have nobody yet"


def test_others_may_have_come_first() -> None:
    assert Waiting(1, 3).line(2.0, [0, 1]) == "waiting for workers: 2 of 2 joined; stage 2 has nobody yet"
