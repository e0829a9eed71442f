"""Rearranging: who leaves and who changes stage, between steps; and who goes to a stage that has nobody."""

import random
from collections.abc import Callable, Mapping

from atoll.control.membership import Member, Members
from atoll.control.notices import Happening, Left, Moved
from atoll.control.rebalancing import MICRO_BATCH_WORK, move_at_once, plan_moves
from atoll.control.settings import Settings

__all__ = ["StageMoves"]

Usable = Callable[[], list[Member]]
"""Those who can be given work now: it is asked again after every change."""


class StageMoves:
    """What is asked for and when it was last looked at. Moves are noted in the members, and told."""

    def __init__(self, settings: Settings, draw: random.Random, observe: Callable[[Happening], None]) -> None:
        self._settings = settings
        self._draw = draw
        self._observe = observe
        self._wishes: dict[str, int] = {}
        self._empty_since: dict[int, float] = {}
        self._rebalance_at = 0.0
        self._balanced: frozenset[tuple[str, int]] = frozenset()  # those whom a move at once was last thought of for

    def begin(self, now: float) -> None:
        """A coordinator takes over."""
        self._rebalance_at = now + self._settings.rebalance_seconds

    def wish(self, worker: str, stage: int) -> None:
        """Somebody asks that a worker change stage."""
        self._wishes[worker] = stage

    def pending(self, members: Members, now: float, step_seconds: float) -> bool:
        """Whether something is to be changed after this step."""
        leaving = any(member.leaving and member.stage >= 0 for member in members)
        return bool(self._wishes) or leaving or self._due(now, step_seconds)

    def _due(self, now: float, step_seconds: float) -> bool:
        """At the end of the step that is nearest to the time set."""
        return self._settings.rebalance_seconds > 0 and now + step_seconds / 2 >= self._rebalance_at

    def let_go(self, members: Members, usable: Usable) -> list[Member]:
        """Those who want to leave and may, since enough stay behind: they have no stage any more."""
        gone = []
        for member in list(members):
            if not member.leaving or member.stage < 0:
                continue
            staying = [other for other in usable() if not other.leaving]
            if Members.may_go(member, staying, self._settings.minimum_replicas):
                self._observe(Left(member.name, member.stage))
                members.move(member, -1)
                members.remove(member.name)
                gone.append(member)
        return gone

    def grant_wishes(self, members: Members, usable: Usable) -> None:
        """Those that leave no stage with too few; the others are forgotten."""
        for name, stage in self._wishes.items():
            there = usable()
            member = next((member for member in there if member.name == name and member.stage != stage), None)
            if member is None or not Members.may_go(member, there, self._settings.minimum_replicas):
                continue
            if stage not in members.hosted_beside(name, member.nonce):
                self._observe(Moved(name, member.stage, stage, "asked for"))
                members.move(member, stage)
        self._wishes.clear()

    def rebalance(self, members: Members, usable: Usable, now: float, step_seconds: float) -> None:
        """From time to time, where it pays."""
        settings = self._settings
        if not self._due(now, step_seconds):
            return
        self._rebalance_at = now + settings.rebalance_seconds * self._draw.uniform(0.9, 1.0)
        moves = plan_moves(
            members.rated([member for member in usable() if not member.leaving], now),
            settings.work or (1.0,) * settings.stages,
            migration_seconds=settings.migration_seconds,
            horizon_seconds=20 * settings.migration_seconds,
            minimum_replicas=settings.minimum_replicas,
        )
        for move in moves:
            member = members.get(move.worker)
            assert member is not None
            members.move(member, move.target)
            self._observe(Moved(move.worker, move.source, move.target, move.reason))

    def rebalance_at_once(
        self, members: Members, usable: Usable, now: float, since: Mapping[tuple[str, int], float], remaining: int
    ) -> Member | None:
        """Who changes stage in the middle of a step, when somebody came or went: `since` says how long each has worked on it."""
        settings, there = self._settings, usable()
        known = frozenset((member.name, member.incarnation) for member in there)
        if known == self._balanced or settings.rebalance_seconds <= 0:
            return None
        self._balanced = known
        staying = [member for member in there if not member.leaving]
        summed = {
            member.name: (now - since.get((member.name, member.incarnation), now)) * member.speed / MICRO_BATCH_WORK for member in staying
        }
        move = move_at_once(
            members.rated(staying, now),
            settings.work or (1.0,) * settings.stages,
            summed,
            remaining,
            migration_seconds=settings.migration_seconds,
            minimum_replicas=settings.minimum_replicas,
        )
        member = members.get(move.worker) if move is not None else None
        if move is not None and member is not None:
            members.move(member, move.target)
            self._observe(Moved(move.worker, move.source, move.target, move.reason))
        return member

    def fill_empty_stages(self, members: Members, now: float) -> list[Member]:
        """A stage that has had nobody for a while gets a worker of the stage that can spare most, whatever minimum that one should keep:
        nothing moves without it, so nothing is lost. Until then whoever is meant for it may just be starting.
        """
        moved = []
        rows = self._rows(members, now)
        for stage, row in enumerate(rows):
            if row:
                self._empty_since.pop(stage, None)
            elif now - self._empty_since.setdefault(stage, now) < self._settings.lost_seconds:
                continue
            spare = [] if row else max(([m for m in other if Members.may_go(m, other, 1)] for other in rows), key=len)
            if spare:
                member = spare[-1]
                rows[member.stage].remove(member)
                row.append(member)
                self._observe(Moved(member.name, member.stage, stage, "the stage had nobody"))
                members.move(member, stage)
                moved.append(member)
        return moved

    def _rows(self, members: Members, now: float) -> list[list[Member]]:
        """The workers of every stage that are heard."""
        rows: list[list[Member]] = [[] for _ in range(self._settings.stages)]
        for member in members:
            if member.worker and member.stage >= 0 and members.heard(member, now):
                rows[member.stage].append(member)
        return rows
