"""When nobody gets on: who is said to keep the others waiting, and how often it is said."""

from atoll.events import Stalled, StallEnded
from atoll.runtime.modes.lockstep.heartbeat import Doing, Heartbeat, StallDetector, Whose, blamed, whose
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.watch.describe import describe_event


def beat(rank: int, doing: str, seconds: float, whose: Whose = "atoll", step: int | None = 3) -> Heartbeat:
    given = {"rank": rank, "device": f"vm/{rank}", "stage": "", "place": "", "pid": 1, "count": 1}
    return Heartbeat(**given, doing=doing, doing_seconds=seconds, whose=whose, step=step)


def ranks(*beats: Heartbeat) -> dict[int, Heartbeat]:
    return {one.rank: one for one in beats}


def stalling(world_size: int = 2, least_seconds: float = 30.0) -> StallDetector:
    devices = {rank: f"vm/{rank}" for rank in range(world_size)}
    return StallDetector(world_size, least_seconds=least_seconds, give_up_seconds=600.0, devices=devices)


def line(watching: StallDetector, beats: dict[int, Heartbeat], now: float) -> str | None:
    event = watching.event(beats, now)
    return None if event is None else describe_event(event)


WAITS = beat(0, "synchronising gradients", 41.0, "others")
READS = beat(1, "reading sample 12 of the data", 42.0, "user")


def test_users_code_is_named_first() -> None:
    said = line(stalling(), ranks(WAITS, READS), 0.0)
    assert said == "rank 1 (vm/1) has been reading sample 12 of the data for 42 s at step 3; the others wait for it"
    both = line(stalling(3), ranks(WAITS, READS, beat(2, "1F0", 50.0)), 0.0)
    assert both is not None
    assert "rank 1" in both
    assert "rank 2" not in both


def test_who_computes_is_named_where_the_others_wait() -> None:
    said = line(stalling(), ranks(WAITS, beat(1, "1B3", 31.0)), 0.0)
    assert said == "rank 1 (vm/1) has been running backward of micro-batch 3 for 31 s at step 3; the others wait for it"


def test_nobody_is_blamed_where_all_do_alike() -> None:
    all_capture = ranks(*(beat(rank, "capturing the model", 33.0, step=None) for rank in range(2)))
    assert blamed(all_capture) == []
    assert line(stalling(), all_capture, 0.0) == "every member has been capturing the model for 33 s"
    differently = ranks(WAITS, beat(1, "receiving the input of micro-batch 0", 35.0, "others"))
    said = line(stalling(), differently, 0.0)
    assert said is not None
    assert said.startswith("no progress for 35 s: rank 0 (vm/0) has been synchronising gradients for 41 s at step 3; rank 1")


def test_as_long_as_somebody_gets_on_nothing_is_said() -> None:
    assert line(stalling(), ranks(WAITS, beat(1, "1F0", 0.5)), 0.0) is None
    assert line(stalling(), ranks(WAITS, beat(1, "reading sample 12 of the data", 29.0, "user")), 0.0) is None


def test_a_run_of_long_steps_has_more_patience() -> None:
    watching = stalling()
    for step in range(1, 6):  # of a minute each
        assert line(watching, ranks(*(beat(rank, "1F0", 1.0, step=step) for rank in range(2))), 60.0 * step) is None
    hung = ranks(beat(0, "G", 599.0, "others", 5), beat(1, "1F0", 599.0, "atoll", 5))
    assert line(watching, hung, 900.0) is None
    assert line(watching, ranks(*(beat(r, "1F0", 601.0, w, 5) for r, w in ((0, "others"), (1, "atoll")))), 902.0) is not None


def test_one_line_a_minute() -> None:
    watching = stalling()
    said = [second for second in range(200) if line(watching, ranks(WAITS, READS), float(second)) is not None]
    assert said == [0, 60, 120, 180]


def test_another_cause_is_told_at_once() -> None:
    watching = stalling(least_seconds=1.0)
    assert line(watching, ranks(WAITS, beat(1, "1B3", 31.0)), 0.0) is not None
    said = line(watching, ranks(WAITS, READS), 2.0)  # nobody looked in between, when it had only begun
    assert said is not None
    assert "reading sample 12" in said


def test_a_rank_that_does_not_join_is_named() -> None:
    watching = stalling(4)
    there = ranks(*(beat(rank, "waiting for the other ranks", 10.0, "others", None) for rank in (0, 1, 2)))
    assert line(watching, {}, 0.0) is None
    assert line(watching, there, 10.0) is None
    said = line(watching, there, 31.0)
    assert said is not None
    assert said.startswith("waiting for members: 3 of 4 joined; not joined after 31 s: rank 3 (vm/3); the others wait until ")
    assert line(stalling(4), ranks(*there.values(), beat(3, "starting", 0.0, step=None)), 40.0) is None


def test_who_has_not_started_yet_may_be_reading_the_script() -> None:
    watching = stalling(2)
    line(watching, {}, 0.0)
    assert line(watching, {}, 35.0) == (
        "waiting for members: 0 of 2 joined; not joined after 35 s: rank 0 (vm/0), rank 1 (vm/1) (they load PyTorch and the job)"
    )


def test_a_run_that_ends_is_not_stalled() -> None:
    gone = beat(0, "leaving", 100.0)
    assert line(stalling(), ranks(Heartbeat(**{**{f: getattr(gone, f) for f in gone.__struct_fields__}, "left": True}), READS), 0.0) is None


def test_whose_code_it_is() -> None:
    assert whose(Action("RF", 1, 0)) == whose(Action("G", 1)) == "others"
    assert whose(Action("F", 1, 0)) == whose("capturing the model") == "atoll"
    assert whose(Doing("reading the data", "user")) == "user"
    assert str(Doing(lambda: "found when asked")) == "found when asked"


def test_who_waits_for_whom_and_that_it_is_over() -> None:
    watching = stalling()
    stalled = watching.event(ranks(WAITS, READS), 100.0)
    assert isinstance(stalled, Stalled)
    assert [(wait.name, wait.waits_for) for wait in stalled.members] == [("rank 0", ("rank 1",)), ("rank 1", ())]
    assert watching.event(ranks(WAITS, beat(1, "1F0", 0.5)), 110.0) == StallEnded(seconds=51.0)
    assert watching.event(ranks(WAITS, beat(1, "1F0", 1.5)), 111.0) is None
