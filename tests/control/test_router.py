"""Interleaved weighted routing."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.messages import Peer
from atoll.control.multi_stage import process_of
from atoll.control.router import Router, StageRouter


def stage(*speeds: float) -> StageRouter:
    router = StageRouter(random.Random(0))
    router.update([Peer(f"w{i}", 1, speed) for i, speed in enumerate(speeds)])
    return router


def counts(router: StageRouter, tasks: int, now: float = 0.0) -> Counter[str | None]:
    found: Counter[str | None] = Counter()
    for _ in range(tasks):
        worker = router.pick(now, 3.5)
        found[worker] += 1
    return found


def test_work_is_shared_in_proportion_to_speed() -> None:
    found = counts(stage(1.0, 2.0, 5.0), 800)
    assert {name: round(count / 100) for name, count in found.items()} == {"w0": 1, "w1": 2, "w2": 5}


def test_measured_speeds_change_the_shares() -> None:
    router = stage(1.0, 1.0)
    for _ in range(100):
        router.observe("w1", 1.0, 1 / 3)
    found = counts(router, 400)
    assert 2.7 < found["w1"] / found["w0"] < 3.3


def test_a_ban_expires_grows_and_is_forgiven_at_the_minimum() -> None:
    router = stage(1.0, 1.0)
    router.ban("w0", 0.0, 10.0)
    assert counts(router, 50, now=9.0) == {"w1": 50}
    after = counts(router, 50, now=11.0)
    assert abs(after["w0"] - after["w1"]) <= 2  # not all that it missed
    router.ban("w0", 11.0, 10.0)
    assert counts(router, 20, now=30.0) == {"w1": 20}
    router.observe("w0", 1.0, 1.0)
    router.ban("w0", 40.0, 10.0)
    assert counts(router, 20, now=51.0)["w0"] == 10


def test_somebody_banned_is_better_than_nobody() -> None:
    router = stage(1.0)
    router.ban("w0", 0.0, 10.0)
    assert router.pick(1.0, 1.0) == "w0"
    assert StageRouter(random.Random(0)).pick(0.0, 1.0) is None


def test_a_newcomer_enters_at_the_minimum_and_whoever_is_gone_is_told() -> None:
    router = stage(1.0, 1.0)
    counts(router, 100)
    assert router.update([Peer("w0", 1, 1.0), Peer("w2", 1, 1.0)]) == {"w1"}
    found = counts(router, 100)
    assert abs(found["w0"] - found["w2"]) <= 2
    assert router.update([Peer("w0", 2, 1.0), Peer("w2", 1, 1.0)]) == {"w0"}


def test_equal_peers_take_turns() -> None:
    router = stage(1.0, 1.0, 1.0)
    turns = [router.pick(0.0, 1.0) for _ in range(9)]
    assert sorted(map(str, turns[:3])) == ["w0", "w1", "w2"]
    assert turns == turns[:3] * 3


def test_a_path_needs_every_stage() -> None:
    router = Router(2, random.Random(0))
    router.update([[Peer("a", 1, 0.0)], []])
    assert router.path(0.0, 3.5) is None
    router.update([[Peer("a", 1, 0.0)], [Peer("b", 1, 0.0)]])
    assert router.path(0.0, 3.5) == ("a", "b")


def test_patience_rises_at_once_falls_slowly_and_doubles() -> None:
    patience = AdaptiveTimeout(6.0, 1.0)
    assert patience.seconds() == 7.0
    patience.measured(10.0)
    assert patience.seconds() == 16.0
    patience.measured(1.0)
    assert 15.0 < patience.seconds() < 16.0
    patience.failed()
    assert patience.seconds() > 30.0
    for _ in range(2000):
        patience.measured(1.0)
    assert patience.seconds() < 2.6


def hosting(*rows: dict[str, float]) -> Router:
    router = Router(len(rows), random.Random(0))
    router.update([[Peer(name, 1, speed) for name, speed in row.items()] for row in rows])
    return router


def test_a_path_stays_in_a_process_that_hosts_the_next_stage() -> None:
    router = hosting({"a": 1.0, "b": 1.01, "c": 0.98}, {"a+1": 1.02, "b+1": 1.0, "c+1": 0.99})
    paths = [router.path(0.0, 3.5) for _ in range(300)]
    assert sum(path is not None and process_of(path[0]) == process_of(path[1]) for path in paths) >= 295


def test_a_hosted_worker_that_is_banned_or_behind_is_passed_over() -> None:
    router = hosting({"a": 1.0}, {"a+1": 1.0, "b": 1.0})
    router.stages[1].ban("a+1", 0.0, 10.0)
    assert {router.path(1.0, 1.0) for _ in range(20)} == {("a", "b")}
    shares = Counter(path[1] for path in (router.path(20.0, 1.0) for _ in range(100)) if path is not None)
    assert abs(shares["a+1"] - shares["b"]) <= 2  # not everything, though every path comes from its process


speeds = st.sampled_from([0.5, 1.0, 1.0, 1.03, 2.0, 5.0])
hosts = st.lists(st.lists(st.one_of(st.none(), speeds), min_size=3, max_size=3), min_size=1, max_size=5)


@given(hosts, st.integers(0, 1000))
def test_shares_follow_speeds_whoever_hosts_what(drawn: list[list[float | None]], seed: int) -> None:
    """Of every stage each worker gets its share but for two tasks: one that any order may leave, one that staying in a process adds."""
    rows: list[dict[str, float]] = [{f"lone{stage}": 1.0} for stage in range(3)]
    for number, row in enumerate(drawn):
        for stage, speed in enumerate(row):
            if speed is not None:
                rows[stage][f"p{number}" if stage == 0 else f"p{number}+{stage}"] = speed
    router = Router(3, random.Random(seed))
    router.update([[Peer(name, 1, speed) for name, speed in row.items()] for row in rows])
    paths = [router.path(0.0, 3.5) for _ in range(240)]
    for stage, row in enumerate(rows):
        counts = Counter(path[stage] for path in paths if path is not None)
        for name, speed in row.items():
            assert abs(counts[name] - 240 * speed / sum(row.values())) <= 2 * len(row)
