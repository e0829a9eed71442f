"""Timing on a shared machine: cases take turns, and the fastest tenth of the turns counts.

Machines are shared and noisy, so every case is timed in many short turns that alternate with all other cases: a disturbance of some seconds
then touches a few turns of every case instead of ruining one. Disturbances only ever add time, so the fastest tenth of the turns counts;
how much slower the usual turn was tells how busy the machine is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Case", "Timing", "interleaved"]

_MOST_TURNS = 60
_TURN_S = 0.004  # about a scheduler's time slice: longer turns are rarely left alone
_MINOR_EVERY = 4
_FIRST_ROUND = 0.1  # of the whole, as it is told: cases run for the first time then, which takes longer than later turns


@dataclass(frozen=True)
class Case:
    """Something to time; what matters less has a turn in every fourth round only."""

    run: Callable[[], object]
    minor: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: undisturbed (the fastest tenth of turns), and of the median turn by the clock on the wall."""

    seconds: float
    usual_seconds: float


def interleaved(
    cases: Sequence[Case],
    *,
    budget_s: float,
    synchronize: Callable[[], None],
    tick: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
    stopwatch: Callable[[], float] | None = None,
) -> list[Timing]:
    """How long one run of each case takes.

    Each case is timed once; then turns go round until the budget is spent or each case has had plenty. `tick` hears how far we are. Cases
    are timed with the stopwatch, if there is one that others cannot disturb, else with the clock.
    """
    stopwatch = stopwatch or clock
    start = clock()
    turns = []
    for i, case in enumerate(cases):
        turns.append([_turn(case.run, 1, synchronize, stopwatch, clock)])
        tick(_FIRST_ROUND * (i + 1) / len(cases))
    order = ((turn, i) for turn in range(_MOST_TURNS) for i, case in enumerate(cases) if not (case.minor and turn % _MINOR_EVERY))
    for turn, i in order:
        elapsed = clock() - start
        if elapsed >= budget_s:
            break
        tick(_FIRST_ROUND + (1 - _FIRST_ROUND) * max(elapsed / budget_s, turn / _MOST_TURNS))
        repeats = max(1, round(_TURN_S / max(min(turns[i])[0], 1e-9)))
        turns[i].append(_turn(cases[i].run, repeats, synchronize, stopwatch, clock))
    tick(1.0)
    return [_timing(taken) for taken in turns]


def _timing(turns: Sequence[tuple[float, float]]) -> Timing:
    ours = sorted(seconds for seconds, _ in turns)
    everything = sorted(seconds for _, seconds in turns)
    return Timing(seconds=max(ours[len(ours) // 10], 1e-9), usual_seconds=max(everything[len(everything) // 2], 1e-9))


def _turn(
    run: Callable[[], object], repeats: int, synchronize: Callable[[], None], stopwatch: Callable[[], float], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds a run, by the stopwatch and by the clock. A first run wakes the threads that will share the work, and is not counted."""
    run()
    synchronize()
    ours, everything = stopwatch(), clock()
    for _ in range(repeats):
        run()
    synchronize()
    return (stopwatch() - ours) / repeats, (clock() - everything) / repeats
