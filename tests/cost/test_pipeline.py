"""The pipeline engines against a schedule worked out naively, the classical formulas, and one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cost.columns import column_seconds
from atoll.cost.pipeline import Hop, StageReplica, Timeline, simulate
from atoll.plan.schedule_policy import interleaved_limits

seconds = st.floats(0.01, 10.0)
NOTHING = Hop(0.0, 0.0, -1)


def naive_order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage does in turn, as the papers draw it."""
    forwards = [("F", m) for m in range(micro_batches)]
    backwards = [("B", m) for m in range(micro_batches)]
    if schedule == "gpipe":
        return forwards + backwards
    warm_up = min(stages - stage - 1, micro_batches)
    order = forwards[:warm_up]
    for m in range(warm_up, micro_batches):
        order += [("F", m), ("B", m - warm_up)]
    return order + backwards[micro_batches - warm_up :]


def naive_finish(
    forward: list[float], backward: list[float], onward: list[Hop], back: list[Hop], micro_batches: int, schedule: str
) -> list[float]:
    """When each stage ends, by asking over and over which task can be placed next."""
    stages = len(forward)
    left = [naive_order(schedule, stages, s, micro_batches) for s in range(stages)]
    clock = [0.0] * stages
    link_clock: dict[tuple[str, int], float] = {}
    arrivals: dict[tuple[str, int, int], float] = {("F", 0, m): 0.0 for m in range(micro_batches)}
    while any(left):
        for s in range(stages):
            if not left[s] or (left[s][0][0], s, left[s][0][1]) not in arrivals:
                continue
            kind, m = left[s].pop(0)
            clock[s] = max(clock[s], arrivals[kind, s, m]) + (forward[s] if kind == "F" else backward[s])
            target = s + 1 if kind == "F" else s - 1
            if target == stages:
                arrivals["B", s, m] = clock[s]
            elif target >= 0:
                hop = onward[s] if kind == "F" else back[s - 1]
                sent = max(clock[s], link_clock.get((kind, s), 0.0))
                link_clock[kind, s] = sent + hop.occupancy
                arrivals[kind, target, m] = sent + hop.occupancy + hop.latency
    return clock


def played_column(forward: list[float], backward: list[float], onward: list[Hop], back: list[Hop], count: int, schedule: str) -> Timeline:
    stages = len(forward)
    return simulate(
        [[StageReplica(f, b, s)] for s, (f, b) in enumerate(zip(forward, backward, strict=True))],
        [[0] * count] * stages,
        [{(0, 0): hop._replace(link=2 * s)} for s, hop in enumerate(onward)],
        [{(0, 0): hop._replace(link=2 * s + 1)} for s, hop in enumerate(back)],
        schedule,
        [stages - s for s in range(stages)],
    )


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[float], list[float], list[Hop], list[Hop], int, str]:
    stages = draw(st.integers(1, 6))
    rows = [draw(st.lists(seconds, min_size=stages, max_size=stages)) for _ in range(2)]
    times = st.one_of(st.just(0.0), st.floats(0.0, 12.0))
    hops = st.lists(st.builds(Hop, times, times, st.just(0)), min_size=stages - 1, max_size=stages - 1)
    return rows[0], rows[1], draw(hops), draw(hops), draw(st.integers(1, 40)), draw(st.sampled_from(["1f1b", "gpipe"]))


@given(columns())
def test_column_naive_schedule_and_simulation_agree(case: tuple[list[float], list[float], list[Hop], list[Hop], int, str]) -> None:
    expected = naive_finish(*case)
    step, finish = column_seconds(*case)
    assert finish == pytest.approx(expected, rel=1e-9)
    assert step == max(finish)
    played = played_column(*case)
    assert [row[0] for row in played.finish] == pytest.approx(expected, rel=1e-9)
    assert played.seconds == pytest.approx(max(expected), rel=1e-9)


@given(columns(), st.integers(100, 400))
def test_leap_over_the_steady_part_changes_nothing(
    case: tuple[list[float], list[float], list[Hop], list[Hop], int, str], many: int
) -> None:
    *rows, _, schedule = case
    assert column_seconds(*rows, many, schedule)[1] == pytest.approx(naive_finish(*rows, many, schedule), rel=1e-9)


@given(st.integers(1, 8), st.integers(1, 64), seconds, seconds, st.sampled_from(["1f1b", "gpipe"]))
def test_uniform_column_takes_the_classical_time(stages: int, count: int, forward: float, backward: float, schedule: str) -> None:
    none = [NOTHING] * (stages - 1)
    step, _ = column_seconds([forward] * stages, [backward] * stages, none, none, count, schedule)
    assert step == pytest.approx((count + stages - 1) * (forward + backward), rel=1e-9)


@given(columns())
def test_lower_bounds(case: tuple[list[float], list[float], list[Hop], list[Hop], int, str]) -> None:
    forward, backward, onward, back, count, _ = case
    step, _ = column_seconds(*case)
    busiest = count * max(f + b for f, b in zip(forward, backward, strict=True))
    one = sum(forward) + sum(backward) + sum(hop.occupancy + hop.latency for hop in (*onward, *back))
    links = count * max((hop.occupancy for hop in (*onward, *back)), default=0.0)
    assert step >= max(busiest, one, links) * (1 - 1e-9)


@pytest.mark.parametrize(("depth", "chunks", "rounds"), [(2, 2, 2), (4, 2, 1), (4, 2, 4), (4, 4, 4), (8, 2, 2), (8, 3, 4)])
def test_interleaving_divides_the_bubble_as_megatron_says(depth: int, chunks: int, rounds: int) -> None:
    """Bubble over ideal time is (p - 1) / (m · v): Narayanan et al. 2021, section 2.2."""
    count, forward, backward = depth * rounds, 1.0 / chunks, 2.0 / chunks
    stages = depth * chunks
    workers = [[StageReplica(forward, backward, s % depth)] for s in range(stages)]
    none = [{(0, 0): NOTHING}] * (stages - 1)
    played = simulate(workers, [[0] * count] * stages, none, none, "interleaved", interleaved_limits(stages, depth))
    ideal = count * 3.0
    assert played.seconds / ideal - 1 == pytest.approx((depth - 1) / (count * chunks), rel=1e-9)
    plain, _ = column_seconds([1.0] * depth, [2.0] * depth, [NOTHING] * (depth - 1), [NOTHING] * (depth - 1), count, "1f1b")
    assert (plain - ideal) / (played.seconds - ideal) == pytest.approx(chunks)


@given(st.data())
def test_virtual_stages_with_any_times_and_limits_come_to_an_end(data: st.DataObject) -> None:
    depth, chunks, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    stages = depth * chunks
    workers = [[StageReplica(data.draw(seconds), data.draw(seconds), data.draw(st.integers(0, depth - 1)))] for _ in range(stages)]
    none = [{(0, 0): NOTHING}] * (stages - 1)
    limits = data.draw(st.lists(st.integers(1, 4), min_size=depth, max_size=depth))
    played = simulate(workers, [[0] * count] * stages, none, none, "interleaved", limits)
    assert all(row[0] > 0 for row in played.finish)
    for device in range(depth):
        busy = count * sum(row[0].forward + row[0].backward for row in workers if row[0].device == device)
        assert played.seconds >= busy * (1 - 1e-9)
