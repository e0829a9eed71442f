"""Holding: whether a commit waits for those who are joining."""

from collections.abc import Iterator

from atoll.control.happenings import TooSlow
from atoll.control.membership import Members
from atoll.control.settings import Settings
from atoll.control.summing import Summing

__all__ = ["too_slow", "waits_for_joiners"]


def waits_for_joiners(
    members: Members, summing: Summing, settings: Settings, *, version: int, barred: set[str], now: float, beat: int
) -> bool:
    """Whether the commit of `version` waits: for a joiner's next chunk, and not for ever.

    Nobody waits for one that came in the middle of this step: it has all of the next step to fetch a state, or to finish what it has and
    catch up. Only whoever has missed a commit before would perhaps never be in time. What is decided is noted in the members.
    """
    taking_part = summing.members()
    held = False
    for member in members:
        if not member.worker or member.stage < 0 or member.name in summing.reports[member.stage] or member.name in barred:
            continue
        has_state = member.version >= 0 and member.version in (version, version - 1)  # and still needs sums
        collecting = has_state and member.name not in taking_part and members.live(member, now, beat)
        if not (member.fetched >= 0 or collecting) or not members.heard(member, now):
            continue
        if member.missed < 0:
            member.missed = version
        if member.missed == version:
            continue
        if member.held_at_most == 0.0:
            member.held_at_most = now + settings.hold_limit_seconds
        if member.held_with != (member.version, member.fetched):  # it is getting on
            member.held_with = member.version, member.fetched
            member.held_until = now + settings.hold_seconds
        held = held or now < min(member.held_until, member.held_at_most)
    return held


def too_slow(members: Members, settings: Settings, now: float) -> Iterator[TooSlow]:
    """Those that a commit has just been made without though they had all the time there is for them; each is told once."""
    for member in members:
        if member.held_at_most and now >= member.held_at_most and not member.too_slow and member.fetched >= 0:
            member.too_slow = True
            yield TooSlow(member.name, member.stage, member.fetched / settings.chunks)
