"""Coordinators and gateways of rounds that lack one guard each: what the checker must notice."""

from collections.abc import Sequence
from typing import Any

from atoll.control.journal import Epoch
from atoll.control.rounds import Gateway, RoundCoordinator
from atoll.control.rounds.exchange import GlobalFetch
from atoll.control.rounds.messages import Offer, Position, RoundAnnounce, RoundCommitted, RoundId, RoundRecord, RoundTerms, RoundView
from atoll.control.rounds.site import Kept
from atoll.simulate.rounds.exact_site import ExactTraining, joined_in
from atoll.simulate.rounds.faults import RoundFault, RoundScenario
from atoll.simulate.rounds.world import RoundRoles, SitesSize

__all__ = ["DIRECTED", "FAULTY"]


class NamesOtherRounds(RoundCoordinator):
    def _is_of_this_round(self, offer: Offer) -> bool:
        return True

    def _follows(self, offer: Offer) -> bool:
        return True


class KeepsStepsOfOldBatches(ExactTraining):
    def at_border(self, terms: RoundTerms, seconds: float, hurry: bool) -> bool:
        self.memory.joined = max(self.memory.joined, joined_in(terms), key=len)
        return super().at_border(terms, seconds, hurry)


class AnnouncesFirst(RoundCoordinator):
    async def _commit_durably(self, record: RoundCommitted) -> None:
        self.history.add(record)
        self._open_round()
        self._announce()
        await self.journal.append(self.term, record)


class ReadsOnce(RoundCoordinator):
    async def _read_again(self, records: Sequence[RoundRecord]) -> Sequence[RoundRecord]:
        return records


class TakesAnySum(Gateway):
    def _is_sum_of(self, found: tuple[RoundId, Any, str], commit: RoundCommitted) -> bool:
        return True

    def _is_as_decided(self, digest: str, commit: RoundCommitted) -> bool:
        return True


class FollowsOldWords(Gateway):
    def _is_outdated(self, view: RoundView) -> bool:
        return False

    def _is_ahead(self, view: RoundView) -> bool:
        return False


class TakesItsPredecessorsPlace(Gateway):
    def _is_mine(self, announce: RoundAnnounce) -> bool:
        return True


class CountsTwice(Gateway):
    def _kept(self, own: Offer | None) -> Kept:
        return "all"


class LosesWhatWasLeftOut(Gateway):
    def _kept(self, own: Offer | None) -> Kept:
        return "since sent" if self.training.offer is not None else super()._kept(own)


class MixingFetch(GlobalFetch):
    def _is_of_this(self, position: Position) -> bool:
        return True


class MixesStates(Gateway):
    fetch_type = MixingFetch


class IgnoresEpochs(Gateway):
    def _relabelled(self, view: RoundView, origin: Epoch) -> Position | None:
        position = self.training.position
        if position is not None and position[0] != view.epoch:
            position = (view.epoch, position[1])
            self.training.relabel(self.incarnation, position)
        return position


class NotReplaced(ExactTraining):
    def _check(self, incarnation: int) -> None:
        pass


FAULTY: dict[str, tuple[RoundRoles, range]] = {
    "round": (RoundRoles(coordinator=NamesOtherRounds), range(10)),
    "old batches": (RoundRoles(training=KeepsStepsOfOldBatches), range(20)),
    "durable": (RoundRoles(coordinator=AnnouncesFirst), range(30, 80)),
    "fence": (RoundRoles(fenced=False), range(30)),
    "journal": (RoundRoles(coordinator=ReadsOnce), range(1020, 1040)),
    "sum": (RoundRoles(gateway=TakesAnySum), range(300, 310)),
    "order": (RoundRoles(gateway=FollowsOldWords), range(30)),
    "twice": (RoundRoles(gateway=CountsTwice), range(10)),
    "left out": (RoundRoles(gateway=LosesWhatWasLeftOut), range(20)),
    "mixed": (RoundRoles(gateway=MixesStates), range(320, 330)),
    "epoch": (RoundRoles(gateway=IgnoresEpochs), range(30, 100)),
}
"""What lacks a guard, and seeds among which it is noticed; where it is rare (one in hundreds), seeds around one that was found."""

STARTED_AGAIN = RoundScenario(
    seed=177,
    size=SitesSize(sites=2, processes=1, recent=1, save_every=1),
    network=(0.0, 0.0, 0.3, 0.0, 0.0, 0.0),
    faults=(RoundFault(9.66, "kill-site", ("s1",), 0.6, False, 0.8), RoundFault(10.7, "restart-coordinator", (), 11.62, False, 0.93)),
)
"""A site's process is started again while a word to the one before it is on its way, and nobody leads for a while."""

STOPPED = RoundScenario(
    seed=57,
    size=SitesSize(sites=2, processes=2),
    network=(0.0,) * 6,
    faults=(RoundFault(4.0, "stop", ("s0.0",), 10.0, True, 0.12769714074773064), RoundFault(4.0, "stop", ("s0.1",), 10.0, True, 1.7690593)),
)
"""A gateway is stopped in the middle of its work and goes on with it when another has taken its place."""

DIRECTED = {
    "start": (RoundRoles(gateway=TakesItsPredecessorsPlace), STARTED_AGAIN),
    "replaced": (RoundRoles(training=NotReplaced), STOPPED),
}
"""What lacks a guard that random schedules hardly ever need, and a schedule that needs it."""
