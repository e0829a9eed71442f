"""How often a run saves when nobody says: from what a save costs and how often something fails (Young 1974, Daly 2006). Pure; says why."""

import math

import msgspec

from atoll.units import format_seconds

__all__ = ["LARGEST_GAP_SECONDS", "LARGEST_SHARE", "CheckpointInterval", "checkpoint_interval"]

LARGEST_SHARE = 0.02  # of the time may be spent on saving
LARGEST_GAP_SECONDS = 600.0  # between two saves where no failure rate is known, so that a crash costs no more
_RARELY_SECONDS = 86400.0  # between two saves however rare failures are said to be


class CheckpointInterval(msgspec.Struct, frozen=True, kw_only=True):
    """After how many steps to save, about how long that is, and why."""

    steps: int
    seconds: float
    reason: str


def checkpoint_interval(save_seconds: float, failures_per_hour: float | None, step_seconds: float) -> CheckpointInterval:
    """The interval that loses least: √(2 · what a save costs · time between failures), and at most `LARGEST_SHARE` of the time for saving.

    `save_seconds` is what one save takes from training; `failures_per_hour` counts failures that send the run back to a checkpoint, None
    or 0 where none is known: then saves are `LARGEST_GAP_SECONDS` apart. It is a whole number of steps and at least one.
    """
    save, step = max(save_seconds, 0.0), max(step_seconds, 1e-9)
    if failures_per_hour:
        best = min(math.sqrt(2.0 * save * 3600.0 / failures_per_hour), _RARELY_SECONDS)
        reason = f"Young-Daly: a save takes {format_seconds(save)}, {failures_per_hour:.2g} failures an hour"
    else:
        best = LARGEST_GAP_SECONDS
        reason = f"no failure rate is known: a crash costs at most {format_seconds(best)}"
    least = save / LARGEST_SHARE
    if best < least:
        best, reason = least, f"a save takes {format_seconds(save)}, which may be {LARGEST_SHARE:.0%} of the time"
    floor = math.ceil(least / step * (1 - 1e-9))  # rounding must not make saving dearer than it may be
    steps = max(floor, int(best / step), 1)
    return CheckpointInterval(steps=steps, seconds=steps * step, reason=reason)
