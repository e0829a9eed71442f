"""When nobody gets on: who is said to keep the others waiting, and how often it is said."""

from atoll.runtime.lockstep.beats import Beat, Doing, Whose, blamed, whose
from atoll.runtime.lockstep.schedule import Action
from atoll.runtime.lockstep.stalling import Stalling


def beat(rank: int, doing: str, seconds: float, whose: Whose = "atoll", step: int | None = 3) -> Beat:
    given = {"rank": rank, "device": f"vm/{rank}", "stage": "", "place": "", "pid": 1, "count": 1}
    return Beat(**given, doing=doing, doing_seconds=seconds, whose=whose, step=step)


def ranks(*beats: Beat) -> dict[int, Beat]:
    return {one.rank: one for one in beats}


def stalling(world_size: int = 2, least_seconds: float = 30.0) -> Stalling:
    devices = {rank: f"vm/{rank}" for rank in range(world_size)}
    return Stalling(world_size, least_seconds=least_seconds, give_up_seconds=600.0, devices=devices)


WAITS = beat(0, "synchronising gradients", 41.0, "others")
READS = beat(1, "reading sample 12 of the data", 42.0, "user")


def test_users_code_is_named_first() -> None:
    said = stalling().line(ranks(WAITS, READS), 0.0)
    assert said == "rank 1 (vm/1) has been reading sample 12 of the data for 42 s at step 3; the others wait for it"
    both = stalling(3).line(ranks(WAITS, READS, beat(2, "1F0", 50.0)), 0.0)
    assert both is not None
    assert "rank 1" in both
    assert "rank 2" not in both


def test_who_computes_is_named_where_the_others_wait() -> None:
    said = stalling().line(ranks(WAITS, beat(1, "1B3", 31.0)), 0.0)
    assert said == "rank 1 (vm/1) has been running backward of micro-batch 3 for 31 s at step 3; the others wait for it"


def test_nobody_is_blamed_where_all_do_alike() -> None:
    all_capture = ranks(*(beat(rank, "capturing the model", 33.0, step=None) for rank in range(2)))
    assert blamed(all_capture) == []
    assert stalling().line(all_capture, 0.0) == "every rank has been capturing the model for 33 s"
    differently = ranks(WAITS, beat(1, "receiving the input of micro-batch 0", 35.0, "others"))
    said = stalling().line(differently, 0.0)
    assert said is not None
    assert said.startswith("nobody has got on for 35 s: rank 0 (vm/0) has been synchronising gradients for 41 s at step 3; rank 1")


def test_as_long_as_somebody_gets_on_nothing_is_said() -> None:
    assert stalling().line(ranks(WAITS, beat(1, "1F0", 0.5)), 0.0) is None
    assert stalling().line(ranks(WAITS, beat(1, "reading sample 12 of the data", 29.0, "user")), 0.0) is None


def test_a_run_of_long_steps_has_more_patience() -> None:
    watching = stalling()
    for step in range(1, 6):  # of a minute each
        assert watching.line(ranks(*(beat(rank, "1F0", 1.0, step=step) for rank in range(2))), 60.0 * step) is None
    hung = ranks(beat(0, "G", 599.0, "others", 5), beat(1, "1F0", 599.0, "atoll", 5))
    assert watching.line(hung, 900.0) is None
    assert watching.line(ranks(*(beat(r, "1F0", 601.0, w, 5) for r, w in ((0, "others"), (1, "atoll")))), 902.0) is not None


def test_one_line_a_minute() -> None:
    watching = stalling()
    said = [second for second in range(200) if watching.line(ranks(WAITS, READS), float(second)) is not None]
    assert said == [0, 60, 120, 180]


def test_another_cause_is_told_at_once() -> None:
    watching = stalling(least_seconds=1.0)
    assert watching.line(ranks(WAITS, beat(1, "1B3", 31.0)), 0.0) is not None
    said = watching.line(ranks(WAITS, READS), 2.0)  # nobody looked in between, when it had only begun
    assert said is not None
    assert "reading sample 12" in said


def test_a_rank_that_does_not_join_is_named() -> None:
    watching = stalling(4)
    there = ranks(*(beat(rank, "waiting for the other ranks", 10.0, "others", None) for rank in (0, 1, 2)))
    assert watching.line({}, 0.0) is None
    assert watching.line(there, 10.0) is None
    said = watching.line(there, 31.0)
    assert said is not None
    assert said.startswith("rank 3 (vm/3) has not joined after 31 s; the others wait until ")
    assert stalling(4).line(ranks(*there.values(), beat(3, "starting", 0.0, step=None)), 40.0) is None


def test_who_has_not_started_yet_may_be_reading_the_script() -> None:
    watching = stalling(2)
    watching.line({}, 0.0)
    assert watching.line({}, 35.0) == "rank 0 (vm/0), rank 1 (vm/1) have not joined after 35 s: still starting, or reading the script"


def test_a_run_that_ends_is_not_stalled() -> None:
    gone = beat(0, "leaving", 100.0)
    assert stalling().line(ranks(Beat(**{**{f: getattr(gone, f) for f in gone.__struct_fields__}, "left": True}), READS), 0.0) is None


def test_whose_code_it_is() -> None:
    assert whose(Action("RF", 1, 0)) == whose(Action("G", 1)) == "others"
    assert whose(Action("F", 1, 0)) == whose("capturing the model") == "atoll"
    assert whose(Doing("reading the data", "user")) == "user"
    assert str(Doing(lambda: "found when asked")) == "found when asked"
